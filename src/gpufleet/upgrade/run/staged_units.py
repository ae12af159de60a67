"""Stage a node's new units beside the running ones: `next/` of a change.  Pure.

`next/` contains the planned units, the files that these units read at start (keys, the launcher,
the ranks' program), and a manifest with the destinations of all files. The manifest is written
last, so that an interrupted run is recognised as incomplete. `on_node/change/units.py` reads it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

from gpufleet import node_paths
from gpufleet.converge.desired import DesiredState, Directory, File, NoOtherFiles
from gpufleet.serving.unit import UnitFile

HOME = node_paths.CHANGE
"""
Folder of a change's files on nodes, accessible only to root: `on_node/common/change_files.py`.
"""
NEXT = f"{HOME}/next"
MANIFEST = f"{NEXT}/manifest.json"


def next_files(
    units: Iterable[UnitFile], remove: Iterable[str], beside: Iterable[File]
) -> DesiredState:
    """
    Return the files of `next/`; equal plans give equal bytes.

    `remove` are units that the plan does not place on this node. `beside` are the files that units
    read at start, with their final paths.
    """
    units = sorted(units, key=lambda each: each.unit)
    beside = sorted(beside, key=lambda each: each.path)
    names = {each.path: f"files/{each.path.strip('/').replace('/', '-')}" for each in beside}
    about = {
        "schema": 1,
        "units": {each.unit: each.fingerprint for each in units},
        "remove": sorted(set(remove)),
        "files": {
            each.path: {"name": names[each.path], "mode": f"{each.mode:04o}"} for each in beside
        },
        # Of a secret there is no hash anywhere. Its unit's fingerprint covers it.
        "sha256": {each.unit: hashlib.sha256(each.content.encode()).hexdigest() for each in units}
        | {names[each.path]: each.sha256 for each in beside if not each.secret},
    }
    plan = hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:16]
    manifest = json.dumps({**about, "plan": plan}, indent=1, sort_keys=True) + "\n"
    return DesiredState(
        Directory(HOME, mode=0o700),
        Directory(NEXT, mode=0o700),
        Directory(f"{NEXT}/files", mode=0o700),
        *(File(f"{NEXT}/{each.unit}", each.content.encode(), mode=0o600) for each in units),
        *(
            File(f"{NEXT}/{names[each.path]}", each.content, mode=0o600, secret=each.secret)
            for each in beside
        ),
        File(MANIFEST, manifest.encode(), mode=0o600),
        NoOtherFiles(f"{NEXT}/*"),
        NoOtherFiles(f"{NEXT}/files/*"),
    )
