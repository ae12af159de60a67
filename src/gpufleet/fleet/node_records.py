"""Build the records that are written on a node: its declaration, check and drift. Pure.

Each record becomes metrics of the node's exporter. `on_node/monitoring/node_facts.py` reads the
declaration, and `on_node/monitoring/record.py` writes the other records.
docs/reference/node-metrics.md describes all of these metrics.
"""

from __future__ import annotations

import calendar
import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

from gpufleet.checks.finding import Finding, Severity
from gpufleet.fleet.drift import NodeDrift, Urgency
from gpufleet.settings.node_settings import NodeSettings

Samples: TypeAlias = list[tuple[str, dict[str, str], int | float]]

CHECK, DRIFT = "check.prom", "drift.prom"
# Severities that count as a finding. A passed check is not a finding.
_SEVERITIES = (Severity.BLOCK, Severity.UNKNOWN, Severity.WARN, Severity.INFO)


def declaration(settings: NodeSettings, *, gpus: int | None, release: str | None) -> bytes:
    """
    Return a node's declaration for `on_node/monitoring/node_facts.py`.

    `gpus` is the number of GPUs on the PCI bus, which is used for nodes that declare no number.
    `release` is the id of the vLLM release that the node should serve. Equal declarations give
    equal bytes.
    """
    about = {
        "schema": 1,
        "gpu_node": settings.gpu_node,
        "dcgm": has_dcgm_metrics(settings),
        "gpus": (settings.gpus.count or gpus) if settings.gpu_node else None,
        "lock": lock_hash(settings),
        "release": release or "",
    }
    return (json.dumps(about, indent=1) + "\n").encode()


def gpus_on_bus(document: Mapping[str, Any]) -> int | None:
    """Return the number of GPUs on a probe's PCI bus, or None if it is unknown.

    GPUs without a driver count too.
    """
    functions = document["pci"]
    if isinstance(functions, Mapping):
        return None
    return sum(str(each["class"]).startswith("0x03") for each in functions)


def has_dcgm_metrics(settings: NodeSettings) -> bool:
    """
    Return whether DCGM's exporter serves a node's GPU metrics.

    If not, the node's own facts contain GPU metrics.
    """
    return settings.dcgm is not None and settings.dcgm.exporter_version is not None


def lock_hash(settings: NodeSettings) -> str:
    """Return a hash of a node's lock with ten digits, or "" if the node has no lock."""
    if settings.gpu_lock is None:
        return ""
    text = json.dumps(settings.gpu_lock.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def check_record(findings: Iterable[Finding], at: float) -> Samples:
    """
    Return the metrics of a check's findings on a node and its GPUs.

    `at` is the time of the check, in seconds since 1970.

    An accepted finding counts as info, whatever its severity, because the operator knows it. A
    check that was skipped because of a different finding is not counted.
    """
    found = Counter(
        Severity.INFO if each.accepted is not None else each.severity
        for each in findings
        if each.cause is None
    )
    return [
        *(
            ("gpufleet_check_findings", {"severity": each.word}, found[each])
            for each in _SEVERITIES
        ),
        ("gpufleet_check_timestamp_seconds", {}, at),
    ]


def drift_record(drift: NodeDrift, at: float, *, refused: bool = False) -> Samples:
    """
    Return a node's drift metrics. `at` is the time of the comparison, in seconds since 1970.

    `refused` means that a deploy would be refused now, so the deploy's changes are not completely
    known.
    """
    moved = Counter(each.matters for each in drift.moved)
    return [
        *(
            ("gpufleet_drift_differences", {"matters": str(each).replace(" ", "_")}, moved[each])
            for each in Urgency
        ),
        ("gpufleet_drift_unknown", {}, int(bool(drift.unread) or refused)),
        ("gpufleet_drift_timestamp_seconds", {}, at),
    ]


def probed_at(answer: Mapping[str, Any] | str, otherwise: float) -> float:
    """Return the time of a probe by its node's clock, or `otherwise` if the time is unknown."""
    if isinstance(answer, str):
        return otherwise
    try:
        return calendar.timegm(time.strptime(str(answer["time"]), "%Y-%m-%dT%H:%M:%SZ"))
    except (KeyError, ValueError):
        return otherwise


def record_failures(answers: Mapping[str, Mapping[str, Any] | str], what: str) -> list[str]:
    """Return a sentence for every node whose record could not be written."""
    said = {
        name: answer if isinstance(answer, str) else str(answer.get("error", ""))
        for name, answer in sorted(answers.items())
    }
    return [f"{name}: {what} not recorded on the node: {why}" for name, why in said.items() if why]
