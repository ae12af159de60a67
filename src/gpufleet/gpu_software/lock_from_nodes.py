"""Build a lock from the versions in the probes of a group's nodes. Pure.

A lock is built only if all nodes have the same versions. If a node has mixed versions or differs
from the other nodes, the difference is reported and no lock is built. A value that cannot be read
is reported as unreadable, never as "none".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.formatting import join_names
from gpufleet.gpu_software.lock_rules import OWN_PYTHON
from gpufleet.node.topology import value_or
from gpufleet.settings.gpu_lock import DRIVER, GpuLock
from gpufleet.settings.node_settings import NodeSettings

_TOOLKITS = (("full", "cuda-toolkit"), ("jit", "cuda-nvcc"))
_DCGM = "datacenter-gpu-manager-4-core"
_EXPORTER = "datacenter-gpu-manager-exporter"
_FABRIC_MANAGER = re.compile(r"nvidia-fabric-?manager(-\d+)?")
_KERNEL = re.compile(r"linux-image-\d.*|kernel(-core)?")


def build_lock(
    documents: Mapping[str, Mapping[str, Any]], settings: Mapping[str, NodeSettings]
) -> GpuLock:
    """
    Return the lock with the versions that all nodes have.

    Otherwise, raises `FleetError` with all problems and with every key in which nodes differ.
    """
    problems: list[str] = []
    read: dict[str, dict[str, Any]] = {}
    for node, document in documents.items():
        found = tuple(_problems(document, settings[node]))
        problems += (f"{node}: {problem}" for problem in found)
        if not found:
            read[node] = installed_versions(document, settings[node])
    problems += _differing(read)
    if problems:
        raise FleetError(*problems)
    values = next(iter(read.values()))
    # Nodes without NVLink 5 switches do not have nvlsm and do not need it.
    values["nvlsm"] = next((each["nvlsm"] for each in read.values() if each["nvlsm"]), None)
    return GpuLock.model_validate(values)


def _problems(document: Mapping[str, Any], settings: NodeSettings) -> Iterator[str]:
    """Yield the reasons why a node's versions cannot be read."""
    driver, system = document["driver"], document["system"]
    for what in ("packages", "units"):
        if value_or(system[what]) is None:
            yield f"the node's {what} could not be read ({system[what]['missing']})"
    packages = value_or(system["packages"], {})
    toolkits = _toolkits(packages, settings)
    if len(toolkits) > 1:
        several = join_names([f"{name}-{branch}" for _, name, branch in toolkits])
        yield f"has several CUDA toolkits, {several}: set the one to keep in `cuda.toolkit`"
    loaded = value_or(driver["module"])
    if loaded is None or not re.fullmatch(DRIVER, loaded):
        yield (
            "no NVIDIA driver is loaded, so there is no version to lock: start from a set of "
            "versions (`--set`), or run deploys/node.py first"
        )
        return
    if modules_flavour(document) is None:
        yield (
            "the version of the loaded kernel modules could not be read: check `cat "
            "/proc/driver/nvidia/version` on the node"
        )
    parts = {
        "on disk": _version(driver["disk"]) or "an unreadable version",
        "as its library": _version(driver["library"]) or "an unreadable version",
        "as its fabric manager": _fabric_manager(packages) or loaded,  # only with NVSwitches
    }
    others = {what: version for what, version in parts.items() if version != loaded}
    if others:
        said = " and ".join(f"{version} {what}" for what, version in others.items())
        yield (
            f"runs driver {loaded} but has {said} installed: first activate one of these versions "
            "(deploys/node.py, or a reboot)"
        )


def installed_versions(document: Mapping[str, Any], settings: NodeSettings) -> dict[str, Any]:
    """Return the versions on a node as plain data, in the form of `GpuLock`."""
    packages = document["system"]["packages"]
    return {
        "driver": document["driver"]["module"],
        "modules": modules_flavour(document),
        "kernel": "held" if _kernels_held(packages) else "follow",
        "nvlsm": packages.get("nvlsm", {}).get("version"),
        "toolkit": _toolkit(packages, settings),
        "dcgm": _dcgm(packages),
        "persistence": _persistence(document),
        "vllm": _vllm(document, settings),
    }


def _differing(read: Mapping[str, Mapping[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each key whose value differs between nodes."""
    for key in next(iter(read.values()), {}):
        nodes: dict[str, list[str]] = {}
        for node, values in read.items():
            if key == "nvlsm" and values[key] is None:
                continue
            nodes.setdefault(_shown(values[key]), []).append(node)
        if len(nodes) > 1:
            each = "; ".join(f"{value} on {join_names(names)}" for value, names in nodes.items())
            yield (
                f"gpu_lock.{key} differs between nodes: {each}: install one version, or lock each "
                "group separately (`--group`)"
            )


def _version(part: Mapping[str, Any]) -> str | None:
    """Return the version of the driver's module on disk or of its library, or None."""
    return value_or(part["version"]) if value_or(part) else None


def modules_flavour(document: Mapping[str, Any]) -> str | None:
    """Return the flavour that the loaded modules report, or None."""
    said = value_or(document["driver"]["proc"])
    if said is None:
        return None
    return "open" if "Open Kernel Module" in said else "proprietary"


def _fabric_manager(packages: Mapping[str, Any]) -> str | None:
    """Return the fabric manager's driver version, or None if not installed."""
    found = [each["version"] for name, each in packages.items() if _FABRIC_MANAGER.fullmatch(name)]
    upstream = re.match(r"(?:\d+:)?(\d{3}(?:\.\d+)+)", found[0]) if found else None
    return upstream and upstream[1]


def _toolkits(packages: Mapping[str, Any], settings: NodeSettings) -> list[tuple[str, str, str]]:
    """
    Return (profile, package without its branch, branch) of the toolkits that are installed.

    If there are several and one of them is declared, return only this one.
    """
    declared = settings.cuda and settings.cuda.toolkit
    for profile, name in _TOOLKITS:
        branches = [
            match[1]
            for package in packages
            if (match := re.fullmatch(rf"{name}-(\d+-\d+)", package))
        ]
        if declared in branches:
            branches = [declared]
        if branches:  # a complete toolkit includes the compiler
            return [(profile, name, branch) for branch in branches]
    return []


def _toolkit(packages: Mapping[str, Any], settings: NodeSettings) -> dict[str, str]:
    for profile, name, branch in _toolkits(packages, settings):
        version = packages[f"{name}-{branch}"]["version"]
        return {"profile": profile, "branch": branch, "version": version}
    return {"profile": "none"}


def _dcgm(packages: Mapping[str, Any]) -> dict[str, str | None] | None:
    if _DCGM not in packages:
        return None
    exporter = packages.get(_EXPORTER, {}).get("version")
    return {"version": packages[_DCGM]["version"], "exporter": exporter}


def _kernels_held(packages: Mapping[str, Any]) -> bool:
    return any(each["held"] for name, each in packages.items() if _KERNEL.fullmatch(name))


def _persistence(document: Mapping[str, Any]) -> bool:
    units = value_or(document["system"]["units"]) or {}
    unit = value_or(units.get("nvidia-persistenced.service")) or {}
    return unit.get("active") == "active"


def _vllm(document: Mapping[str, Any], settings: NodeSettings) -> dict[str, str] | None:
    """
    Return the declared release of vLLM.

    The result is None if no release is declared, or if its Python is unknown. The running release
    is not used, because the next deploy changes it.
    """
    vllm = settings.vllm
    if vllm is None:
        return None
    named = re.search(r"/python(3\.\d+)$", vllm.python)
    own = re.match(r"3\.\d+", value_or(document["python"]) or "")
    if named:
        return {"version": vllm.version, "python": named[1]}
    if own and vllm.python == OWN_PYTHON:
        return {"version": vllm.version, "python": own[0]}
    return None


def _shown(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key} {each}" for key, each in value.items() if each) or "none"
    return "none" if value is None else str(value)
