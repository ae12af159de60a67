"""Write out what deploys/vllm.py declares of each node, for the other ways to converge it.

    <folder>/gpu-01.json      packages, accounts, directories, files, units ... of one node
    <folder>/files/<sha256>   every file's content, 0600

The roles are asked themselves: `listen` has every `Converge` that the deploy makes noted, so that
nothing that a role wants can be forgotten here. What is neither declared by Ansible's modules nor
by pyinfra's is in docs/measured/performance.md.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.converge.fleet import BenchFleet, ran
from gpufleet.artifacts.release import Release, build_script
from gpufleet.converge.desired import (
    UNIT_DIRECTORY,
    Absent,
    DesiredState,
    Directory,
    File,
    Group,
    Listing,
    NoOtherFiles,
    NoOtherUnits,
    Package,
    Unit,
    UnitGone,
    User,
    Value,
)
from gpufleet.errors import FleetError
from gpufleet.fleet.facts_timer import FACTS
from gpufleet.network.firewall import RULES

__all__ = ["FOLDER", "GPUS_ANSWER", "NOTED", "UNIT_DIRECTORY", "declared", "read", "written"]

# Where declare.py, which pyinfra runs, is to write.
FOLDER = "GPUFLEET_BENCH_DECLARED"
NOTED: dict[str, list[Value]] = {}
"""The desired values of each node. declare.py fills this mapping."""

GPUS_ANSWER = """
import ctypes, sys
nvml, count = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_uint()
if nvml.nvmlInit_v2() or nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)):
    sys.exit(1)
print(count.value)
""".strip()

# Which service reads a file when it starts: part of the path -> its name in the playbook.
_READERS = {
    "node-facts": "facts",
    "gpufleet-facts": "facts",
    "prometheus-node-exporter": "exporter",
    "watchdog": "watchdog",
    f"{UNIT_DIRECTORY}/vllm-": "server",
    "/etc/vllm/credentials/": "server",
    "/usr/local/libexec/gpufleet/": "server",
}


@dataclass(frozen=True)
class Declared:
    """One node's state, as values of JSON, and the files' contents by their hash."""

    document: dict[str, Any]
    contents: dict[str, bytes]


def declared(
    values: Iterable[Value], endpoints: list[dict[str, Any]], release: Release, gpus: int
) -> Declared:
    """
    Return a node's state.

    Raises `FleetError` for a kind of value that the other ways do not have: then they, and this,
    are to be extended, for a comparison of less would flatter.
    """
    wanted = DesiredState(*values)
    known = (
        *(Absent, Directory, File, Group, Listing, NoOtherFiles, NoOtherUnits),
        *(Package, Unit, UnitGone, User),
    )
    if strange := sorted({type(each).__name__ for each in wanted if not isinstance(each, known)}):
        raise FleetError(f"the comparison does not declare {', '.join(strange)}: extend it")
    files = wanted.values_of(File)
    units = wanted.values_of(Unit)
    script = build_script(release).encode()
    document: dict[str, Any] = {
        "packages": sorted(each.name for each in wanted.values_of(Package)),
        "groups": [{"name": each.name, "system": each.system} for each in wanted.values_of(Group)],
        "users": [
            {
                "name": each.name,
                "group": each.group,
                "home": each.home,
                "shell": each.shell,
                "system": each.system,
            }
            for each in wanted.values_of(User)
        ],
        "directories": [_owned(each) for each in wanted.values_of(Directory)],
        "files": [
            {
                **_owned(each),
                "sha256": each.sha256,
                "secret": each.secret,
                "reader": _reader(each.path),
            }
            for each in files
        ],
        "absent": [each.path for each in wanted.values_of(Absent)],
        "only_files": [
            {
                "directory": each.directory,
                "pattern": each.pattern.rpartition("/")[2],
                "keep": [f.path for f in files if f.path.rpartition("/")[0] == each.directory],
            }
            for each in wanted.values_of(NoOtherFiles)
        ],
        "units": [
            {"name": each.name, "enabled": each.enabled, "running": each.running} for each in units
        ],
        "units_gone": [each.name for each in wanted.values_of(UnitGone)],
        "only_units": [
            {"pattern": each.pattern, "keep": [unit.name for unit in units]}
            for each in wanted.values_of(NoOtherUnits)
        ],
        "release": {"mark": release.mark, "script": hashlib.sha256(script).hexdigest()},
        "facts_file": FACTS,
        "firewall_rules": RULES,
        "endpoints": endpoints,
        "gpus_answer": GPUS_ANSWER,
        "gpu_count": gpus,
    }
    contents = {each.sha256: each.content for each in files}
    return Declared(document, {**contents, document["release"]["script"]: script})


def written(fleet: BenchFleet, folder: Path) -> None:
    """Have the deploy say what it declares of each node; changes nothing on any."""
    ran(
        [
            *(sys.executable, "-m", "pyinfra", "--dry", fleet.inventory),
            str(Path(__file__).with_name("declare.py")),
        ],
        {**fleet.environment, FOLDER: str(folder)},
    )


def read(folder: Path, node: str) -> dict[str, Any]:
    """Return a node's declaration."""
    found: dict[str, Any] = json.loads((folder / f"{node}.json").read_text())
    return found


def _owned(value: File | Directory) -> dict[str, str]:
    return {
        "path": value.path,
        "owner": value.user,
        "group": value.group,
        "mode": f"{value.mode:04o}",
    }


def _reader(path: str) -> str:
    return next((reader for part, reader in _READERS.items() if part in path), "none")
