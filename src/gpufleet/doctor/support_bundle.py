"""Build an archive of a fleet's data for a vendor or for an issue, without secrets. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from gpufleet.doctor.fleet_diagnosis import Diagnosis
from gpufleet.doctor.fleet_text import diagnosis_lines
from gpufleet.doctor.node_evidence import JournalLine
from gpufleet.doctor.observations import FleetObservations
from gpufleet.redact import hide_secrets
from gpufleet.serving.rank_status import iso

MOST_BYTES = 50 << 20
"""
The most bytes of all files before compression. Issue trackers and mail servers accept the
compressed archive.
"""
README = "README.txt"
README_BYTES = 1 << 18
"""
The most bytes of README.txt. It has room for one line about each of some thousand omitted files.
"""


def bundle_files(
    found: Diagnosis,
    observed: FleetObservations,
    settings: Mapping[str, Any],
    secrets: Iterable[str],
    now: float,
) -> dict[str, str]:
    """
    Return the files of the archive by name. Together they have at most `MOST_BYTES`.

    `settings` has the settings of each node as JSON values. No file contains any of the texts in
    `secrets`. If the files are too large, the first lines of journals and some whole files are left
    out, and README.txt lists both.
    """
    first = {
        "diagnosis.txt": "\n".join([*diagnosis_lines(found, now), ""]),
        "diagnosis.json": _json(found.as_json()),
        "status.json": _json(observed.status.as_json()),
        "checks.json": _json({**observed.report.as_json(), "facts": {}}),
        "gateways.json": _json(
            {
                name: each if isinstance(each, str) else asdict(each)
                for name, each in observed.gateways.items()
            }
        ),
        "alerts.json": _json([asdict(each) for each in observed.alerts]),
        "changes.json": _json(
            {
                name: [[iso(at), what] for at, what in each.changes]
                for name, each in observed.evidence.items()
            }
        ),
        "connections.json": _json(
            {
                name: {to: asdict(tried) for to, tried in each.connections.items()}
                for name, each in observed.evidence.items()
            }
        ),
    }
    named = {name for each in found.problems for name in each.names}
    # Nodes with problems come first, because a large fleet may not fit.
    parts = {
        f"{what}/{name}.json": _json(each)
        for what, by_node in (("settings", settings), ("probes", observed.report.facts))
        for name, each in sorted(by_node.items(), key=lambda each: each[0] not in named)
    }
    logs = {}
    for name, each in observed.evidence.items():
        logs[f"kernel/{name}.log"] = _log(each.kernel)
        for stage, lines in each.stages.items():
            logs[f"journals/{name}/{stage}.log"] = _log(lines)
    hidden = tuple(secrets)
    notes = [
        f"gpufleet doctor, {iso(now)}. Known secrets, and text that looks like a secret, "
        f"are removed."
    ]
    files: dict[str, str] = {}
    left = MOST_BYTES - README_BYTES

    def add(name: str, text: str, room: int) -> None:
        """Add a file, whole or not at all."""
        nonlocal left
        whole = hide_secrets(text, hidden)
        size = len(whole.encode())
        if size > room:
            notes.append(f"{name}: this file is left out, because it has {size >> 20} MiB")
            return
        files[name] = whole
        left -= size

    for name, text in first.items():
        add(name, text, left)
    # Half of the remaining space is reserved for journals, for any number of nodes.
    kept_for_logs = left // 2
    for name, text in parts.items():
        add(name, text, left - kept_for_logs)
    for place, name in enumerate(logs):
        whole = hide_secrets(logs[name], hidden)
        kept = _end(whole, max(0, left) // (len(logs) - place))
        if len(kept) < len(whole):
            notes.append(f"{name}: the first lines of this file are left out")
        left -= len(kept.encode())
        files[name] = kept
    return {README: _end("\n".join([*notes, ""]), README_BYTES), **files}


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True, default=str) + "\n"


def _log(lines: Iterable[JournalLine]) -> str:
    return "".join(f"{iso(each.at)} {each.text}\n" for each in lines)


def _end(text: str, size: int) -> str:
    """Return the last complete lines of a text, up to a number of bytes."""
    raw = text.encode()
    if len(raw) <= size:
        return text
    cut = raw[len(raw) - size :] if size else b""
    return cut.partition(b"\n")[2].decode("utf-8", "replace")
