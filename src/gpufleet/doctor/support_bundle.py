"""Build the archive for a vendor or an issue from a fleet's data, without secrets. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any

from gpufleet.doctor.fleet_diagnosis import Diagnosis
from gpufleet.doctor.fleet_text import diagnosis_lines
from gpufleet.doctor.node_evidence import JournalLine
from gpufleet.doctor.sights import FleetObservations
from gpufleet.redact import hide_secrets
from gpufleet.serving.rank_status import iso

MOST_BYTES = 50 << 20
"""Limit for all files before compression: issue trackers and mail accept them compressed."""
README = "README.txt"


def bundle_files(
    found: Diagnosis,
    sights: FleetObservations,
    settings: Mapping[str, Any],
    secrets: Iterable[str],
    now: float,
) -> dict[str, str]:
    """
    Return the files of a bundle by name, together at most `MOST_BYTES`.

    `settings` are each node's as JSON values; no file may contain a text in `secrets`. Journals
    that do not fit lose their first lines, which README.txt says.
    """
    first = {
        "diagnosis.txt": "\n".join([*diagnosis_lines(found, now), ""]),
        "diagnosis.json": _json(found.as_json()),
        "status.json": _json(sights.status.as_json()),
        "checks.json": _json({**sights.report.as_json(), "facts": {}}),
        "gateways.json": _json(
            {
                name: each if isinstance(each, str) else asdict(each)
                for name, each in sights.gateways.items()
            }
        ),
        "alerts.json": _json([asdict(each) for each in sights.alerts]),
        "changes.json": _json(
            {
                name: [[iso(at), what] for at, what in each.changes]
                for name, each in sights.evidence.items()
            }
        ),
        **{f"settings/{name}.json": _json(each) for name, each in settings.items()},
        **{f"probes/{name}.json": _json(each) for name, each in sights.report.facts.items()},
    }
    logs = {}
    for name, each in sights.evidence.items():
        logs[f"kernel/{name}.log"] = _log(each.kernel)
        for stage, lines in each.stages.items():
            logs[f"journals/{name}/{stage}.log"] = _log(lines)
    hidden = tuple(secrets)
    whole = {name: hide_secrets(text, hidden) for name, text in {**first, **logs}.items()}
    left = MOST_BYTES - sum(len(whole[name].encode()) for name in first)
    notes = [f"gpufleet doctor, {iso(now)}. Known secrets and what looks like one are removed."]
    files = {name: whole[name] for name in first}
    for place, name in enumerate(logs):
        share = max(0, left) // (len(logs) - place)
        kept = _end(whole[name], share)
        if len(kept) < len(whole[name]):
            notes.append(f"{name}: its first lines are left out")
        left -= len(kept.encode())
        files[name] = kept
    return {README: "\n".join([*notes, ""]), **files}


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, sort_keys=True, default=str) + "\n"


def _log(lines: Iterable[JournalLine]) -> str:
    return "".join(f"{iso(each.at)} {each.text}\n" for each in lines)


def _end(text: str, size: int) -> str:
    """Return a text's last whole lines, within a limit in bytes."""
    raw = text.encode()
    if len(raw) <= size:
        return text
    cut = raw[len(raw) - size :] if size else b""
    return cut.partition(b"\n")[2].decode("utf-8", "replace")
