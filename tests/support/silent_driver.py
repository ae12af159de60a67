"""Recorded nodes whose driver does not answer, or that have none."""

from __future__ import annotations

from typing import Any

GONE = {"missing": "absent"}


def silent(document: Any, missing: str, **more: Any) -> Any:
    """Return a node whose NVML does not start: no fact that it would tell is there."""
    why = {"missing": missing, **more}
    document["driver"].update(init=why, version=why, branch=why, cuda=why, gpu_count=why)
    document["driver"]["excluded"] = why
    for section in ("gpus", "nvlink", "numa", "fabric", "pcie"):
        document[section] = []
    document["p2p"] = {"read": [], "write": [], "nvlink": []}
    document["errors"] = [{"about": "driver", **why}]
    return document


def without_module(document: Any) -> Any:
    """Return a node on which no kernel module runs, so none of its files is there either."""
    document["driver"].update(module=GONE, proc=GONE, proc_gpus=GONE)
    for function in document["pci"]:
        function["driver"] = GONE
    modules = document["system"]["modules"]
    document["system"]["modules"] = [name for name in modules if not name.startswith("nvidia")]
    return silent(document, "driver_not_loaded", code=9)


def without_driver(document: Any) -> Any:
    """Return a node on which no driver was installed."""
    bare = silent(without_module(document), "library_not_found")
    bare["driver"]["disk"] = GONE
    return bare
