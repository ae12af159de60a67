"""Validate the document of a probe, and read the probes in a file. Pure.

The output of a node, and a file that was edited, are untrusted. Only this module validates them.
Other code may rely on the structure of a valid document (docs/reference/probe.md), but never on its
facts.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gpufleet.errors import FleetError, json_fault

SCHEMA = 2

# Sections that are lists with one item for each GPU, and sections that are objects.
_OF_GPUS = ("gpus", "nvlink", "numa", "fabric")
_OBJECTS = ("driver", "system", "nics", "p2p", "user", "kernel_log", "os_release")
# Facts that identify a GPU.
_NAMES = {"uuid", "serial", "name", "pci"}


def document_problem(document: Any) -> str | None:
    """
    Return why a document cannot be used, as the end of a sentence, or None if it is valid.

    >>> document_problem({"schema": 1}).partition(": ")[0]
    'has schema 1, but this gpufleet reads schema 2'
    """
    if not isinstance(document, dict) or "schema" not in document:
        return "is not the document of a probe"
    if document["schema"] != SCHEMA or isinstance(document["schema"], bool):
        return (
            f"has schema {document['schema']!r}, but this gpufleet reads schema {SCHEMA}: probe "
            "the node again with this version of gpufleet"
        )
    bad = next((name for name in _OBJECTS if not isinstance(document.get(name), dict)), None)
    bad = bad or next((name for name in _OF_GPUS if not isinstance(document.get(name), list)), None)
    bad = bad or _bad_gpus(document) or _bad_pairs(document)
    if bad is None and not isinstance(document.get("errors"), list):
        bad = "errors"
    if bad is None and not set(document["driver"]) >= {"init", "version", "gpu_count"}:
        bad = "driver"
    return f"is incomplete: correct {bad!r} in it, or probe the node again" if bad else None


def _bad_gpus(document: Mapping[str, Any]) -> str | None:
    count = len(document["gpus"])
    for name in _OF_GPUS:
        if len(document[name]) != count or not all(isinstance(x, dict) for x in document[name]):
            return name
    for place, gpu in enumerate(document["gpus"]):
        if type(gpu.get("index")) is not int or gpu["index"] != place:
            return "gpus"
        if "missing" not in gpu and not set(gpu) >= _NAMES:
            return "gpus"
    return None


def _bad_pairs(document: Mapping[str, Any]) -> str | None:
    count = len(document["gpus"])
    matrices = {"pcie": document.get("pcie")}
    matrices |= {f"p2p.{kind}": document["p2p"].get(kind) for kind in ("read", "write", "nvlink")}
    for name, matrix in matrices.items():
        square = isinstance(matrix, list) and all(
            isinstance(row, list) and len(row) == count for row in matrix
        )
        if not square or len(matrix or ()) != count:
            return name
    return None


def parse_documents(text: str, where: str, alone: str) -> dict[str, Any]:
    """
    Return the probes in the text of a file.

    Each node's name maps to its document, or to the reason why the document is missing. The file
    may contain a single probe, the output of `gpufleet probe --json`, or a report of `gpufleet
    check --json`. `alone` is the name for the node of a single probe. `where` is the name of the
    file in messages. Raises `FleetError` for any other content.
    """
    try:
        found = json.loads(text)
    except json.JSONDecodeError as error:
        raise FleetError(f"{where}:{error.lineno}: is not JSON: {json_fault(error)}") from None
    except (RecursionError, ValueError):  # too deep; a number of thousands of digits
        raise FleetError(
            f"{where}: is not a probe: its JSON is nested too deeply or too long"
        ) from None
    if not isinstance(found, dict):
        raise FleetError(f"{where}: is JSON, but not a probe: {_WANTED}")
    if "findings" in found or "facts" in found:
        nodes = _reported(found)
    elif "schema" in found:
        nodes = {alone: found}
    else:
        nodes = found
    if not nodes or not all(isinstance(each, str | dict) for each in nodes.values()):
        raise FleetError(f"{where}: is JSON, but not a probe: {_WANTED}")
    return nodes


_WANTED = "`gpufleet probe INVENTORY --json` and `gpufleet check INVENTORY --json` print probes"


def _reported(report: Mapping[str, Any]) -> dict[str, Any]:
    """
    Return the facts in a report of `gpufleet check`.

    For nodes without facts, return the text of the finding.
    """
    facts = report.get("facts")
    nodes: dict[str, Any] = dict(facts) if isinstance(facts, dict) else {}
    findings = report.get("findings")
    for finding in findings if isinstance(findings, list) else []:
        if isinstance(finding, dict) and finding.get("check") == "probe":
            nodes.setdefault(str(finding.get("node")), str(finding.get("found")))
    return nodes
