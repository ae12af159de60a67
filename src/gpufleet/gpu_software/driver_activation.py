"""Decide whether the driver on a node's disk is active, and how to activate it. Pure.

Three versions must match: the version of the loaded kernel module, of the module on disk for the
running kernel, and of the libraries. NVML requires this (its error 18), and the fabric manager
accepts only its own version. A change of packages changes the module on disk and the libraries at
once. The loaded module changes only by a reload or a reboot. This module chooses between reload and
reboot, and finds the processes that prevent a reload.
docs/gpu-nodes/driver-activation.md has the table.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

STOP_ORDER = (
    "nvidia-dcgm-exporter.service",
    "nvidia-dcgm.service",
    "nvidia-imex.service",
    "nvidia-fabricmanager.service",
    "nvidia-persistenced.service",
)
"""
The driver's services, without stages, in the order of stopping. They start in reverse order.
"""
UNLOAD_ORDER = ("nvidia_peermem", "nvidia_uvm", "nvidia_drm", "nvidia_modeset", "nvidia")
"""
Modules in the order of unloading. Each is before the modules that it depends on (`depends` in
modinfo). They are loaded in reverse order.
"""
ALWAYS_LOADED = ("nvidia", "nvidia_uvm")
"""
Modules that must be loaded. CUDA would load nvidia_uvm with a setuid program, which units forbid.
"""
NAMED = 4  # the most holders that a message lists; it only counts the others


@dataclass(frozen=True)
class Holder:
    """
    A process that prevents unloading the driver.

    Attributes:
        pid: the process id on the node.
        name: the name of the process' program.
        unit: the process' systemd unit; "" if it has none.
        devices: the devices that the process has open, for example /dev/nvidia0.
    """

    pid: int
    name: str
    unit: str = ""
    devices: tuple[str, ...] = ()

    def __str__(self) -> str:
        within = f" of {self.unit}" if self.unit else ""
        opened = f" ({', '.join(self.devices[:2])})" if self.devices else ""
        return f"process {self.pid} {self.name}{within}{opened}"


@dataclass(frozen=True)
class Active:
    """
    The loaded module, the libraries and the module on disk have `version`.

    `remarks` lists what the next reboot will change.
    """

    version: str
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class NeedsReload:
    """
    Only units that gpufleet can stop use the driver, so the driver is reloaded without a reboot.

    Attributes:
        reason: which versions differ.
        version: the version after the reload.
        stop: the active units, in the order of stopping.
        unload, load: the modules, in the order of unloading and of loading.
        start: the units to start, in order. Stages are not among them, because they wait for the
            node's check.
    """

    reason: str
    version: str
    stop: tuple[str, ...] = ()
    unload: tuple[str, ...] = ()
    load: tuple[str, ...] = ()
    start: tuple[str, ...] = ()


@dataclass(frozen=True)
class NeedsReboot:
    """Only a reboot activates `version`."""

    reason: str
    version: str


@dataclass(frozen=True)
class InUse:
    """Another program uses the driver, and only the operator may stop this program."""

    reason: str
    by: tuple[Holder, ...]

    @property
    def sentence(self) -> str:
        """Return a sentence with the holders and the remedy."""
        named = "; ".join(map(str, self.by[:NAMED]))
        more = f"; and {len(self.by) - NAMED} more" if len(self.by) > NAMED else ""
        return (
            f"{self.reason}, but the driver is in use by {named}{more}. gpufleet stopped nothing. "
            "Stop these processes or wait until they end, then run the command again"
        )


@dataclass(frozen=True)
class Blocked:
    """Neither a reload nor a reboot would help, because packages must be changed first."""

    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Unknown:
    """A required fact could not be read."""

    reasons: tuple[str, ...]


DriverState: TypeAlias = Active | NeedsReload | NeedsReboot | InUse | Blocked | Unknown


def driver_state(
    document: Mapping[str, Any], wanted: str | None, flavour: str | None = None
) -> DriverState:
    """
    Return the driver's state on a node.

    `document` is the document of a probe or of `on_node/gpu_software/driver_reload.py`. The latter
    also has the processes that use the driver (`holders`), the active units (`active`) and the
    loaded modules (`loaded`). `wanted` is the driver in the lock, an exact version or a branch
    ("580"). None means the version on disk. `flavour` is `modules` in the lock, "open" or
    "proprietary". None accepts both. Both flavours have the same versions.
    """
    driver = document["driver"]
    asked = {"the loaded module": "module", "the module on disk": "disk"}
    unread = tuple(
        f"{what} could not be read ({_why(driver[key])})"
        for what, key in asked.items()
        if _missing(driver[key]) not in {None, "absent"}
    )
    if unread:
        return Unknown(unread)
    loaded = None if _missing(driver["module"]) else str(driver["module"])
    on_disk = None if _missing(driver["disk"]) else str(driver["disk"]["version"])
    if on_disk is None:
        return _without_module(document, loaded, wanted)
    if reasons := tuple(_unfit(driver, on_disk, wanted)):
        return Blocked(reasons)
    if loaded == on_disk:
        told = _flavour(driver)
        if flavour is not None and told not in {None, flavour}:
            said = f"the {told} module {loaded} is loaded, but gpu_lock.modules is {flavour}"
            return _to_be_loaded(document, loaded, on_disk, said)
        if _missing(driver.get("init")) == "version_mismatch":
            said = (
                f"the module and the libraries have version {on_disk}, but NVML reports a version "
                "mismatch"
            )
            return NeedsReboot(said, on_disk)
        return Active(on_disk, tuple(_remarks(document)))
    return _to_be_loaded(document, loaded, on_disk)


def matches_lock(version: str, wanted: str | None) -> bool:
    """
    Return whether an installed version matches the version in a lock.

    >>> [matches_lock("580.95.05", each) for each in ("580", "580.9", None)]
    [True, False, True]
    """
    return wanted is None or version == wanted or version.startswith(f"{wanted}.")


def services_first_to_stop(active: tuple[str, ...]) -> tuple[str, ...]:
    """Return units in the order of stopping: first stages, then the driver's own services."""
    stages = tuple(unit for unit in active if unit not in STOP_ORDER)
    return (*sorted(stages), *(unit for unit in STOP_ORDER if unit in active))


def _without_module(
    document: Mapping[str, Any], loaded: str | None, wanted: str | None
) -> DriverState:
    """
    Return the state of a node whose running kernel has no module on disk.

    A different kernel may have one.
    """
    running = _known(document.get("kernel"), "the running kernel")
    if (
        loaded is not None
        and matches_lock(loaded, wanted)
        and _library(document["driver"]) == loaded
    ):
        said = (
            f"{running} no longer has an NVIDIA module on disk, so the node may have no driver "
            "after the next boot"
        )
        return Active(loaded, (said,))
    boots = next((each for each in _kernels(document) if each["newest"]), None)
    if boots and not boots["running"] and not _missing(boots["nvidia"]):
        version = str(boots["nvidia"])
        if matches_lock(version, wanted):
            said = (
                f"the running kernel {running} has no NVIDIA module, but the kernel that boots "
                f"next, {boots['kernel']}, has module {version}"
            )
            return NeedsReboot(said, version)
    return Blocked(
        (
            f"there is no NVIDIA module on disk for {running}: `dkms status` shows whether the "
            "module was built. Install the headers of this kernel "
            f"(linux-headers-{running}, or kernel-devel)",
        )
    )


def _unfit(driver: Mapping[str, Any], on_disk: str, wanted: str | None) -> Iterator[str]:
    """Yield the problems of packages that must be corrected before a module is loaded."""
    if not matches_lock(on_disk, wanted):
        yield (
            f"the module on disk is {on_disk}, but gpu_lock.driver is {wanted}, and the packages "
            "of that version are not installed: run deploys/node.py"
        )
    library = _library(driver)
    if library is None:
        yield f"the module on disk is {on_disk}, but libnvidia-ml.so.1 is missing"
    elif library != on_disk:
        yield (
            f"the module on disk is {on_disk}, but the libraries are {library}: an upgrade was "
            "interrupted. `dpkg --audit` or `rpm -qa '*nvidia*'` lists the packages of the upgrade"
        )


def _to_be_loaded(
    document: Mapping[str, Any], loaded: str | None, version: str, reason: str = ""
) -> NeedsReload | NeedsReboot | InUse:
    modules = _known(document["system"]["modules"], [])
    if loaded is None and "nouveau" in modules:
        return NeedsReboot("nouveau uses the GPUs, and releases them only at a reboot", version)
    reason = reason or (
        f"module {loaded} is loaded, but module {version} is on disk"
        if loaded
        else f"no NVIDIA module is loaded, and module {version} is on disk"
    )
    if strange := sorted(set(document.get("used_by", ())) - set(UNLOAD_ORDER)):
        said = f"{reason}, and {', '.join(strange)} depends on the loaded module"
        return NeedsReboot(said, version)
    active = tuple(document.get("active", ()))
    others = tuple(holder for holder in _holders(document) if holder.unit not in active)
    if others:
        return InUse(reason, others)
    unload = tuple(name for name in UNLOAD_ORDER if name in modules)
    load = {*ALWAYS_LOADED, *unload, *document.get("kept", {}).get("modules", ())}
    kept = document.get("kept", {}).get("units", ())
    return NeedsReload(
        reason,
        version,
        stop=services_first_to_stop(active),
        unload=unload,
        load=tuple(name for name in reversed(UNLOAD_ORDER) if name in load),
        start=tuple(unit for unit in reversed(STOP_ORDER) if unit in {*active, *kept}),
    )


def _remarks(document: Mapping[str, Any]) -> Iterator[str]:
    """Yield remarks about changes at the next boot. They are not a reason to reboot."""
    boots = next((each for each in _kernels(document) if each["newest"]), None)
    if boots and not boots["running"]:
        kernel, module = boots["kernel"], boots["nvidia"]
        yield (
            f"kernel {kernel} is installed and boots next, but has no NVIDIA module"
            if _missing(module)
            else f"kernel {kernel} is installed and boots next, with module {module}"
        )
    if document["system"].get("reboot_required") is True:
        yield "a package requires a reboot (/run/reboot-required)"


def _kernels(document: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return list(_known(document["driver"].get("kernels"), []))


def _holders(document: Mapping[str, Any]) -> tuple[Holder, ...]:
    return tuple(
        Holder(each["pid"], each["name"], each["unit"] or "", tuple(each["devices"]))
        for each in document.get("holders", ())
    )


def _library(driver: Mapping[str, Any]) -> str | None:
    """
    Return the libraries' version, or None.

    It is read from the file's name or from the version that NVML returns ("13.580.95.05").
    """
    file = driver.get("library")
    version = None if _missing(file) else (file or {}).get("version")
    if isinstance(version, str):
        return version
    nvml = driver.get("nvml")
    found = re.search(r"\b(\d{3}\.\d+(\.\d+)?)\b", nvml) if isinstance(nvml, str) else None
    return found[1] if found else None


def _flavour(driver: Mapping[str, Any]) -> str | None:
    """Return the flavour of the loaded modules, or None if the kernel's file does not state it."""
    told = driver.get("proc")
    if not isinstance(told, str):
        return None
    return "open" if "Open Kernel Module" in told else "proprietary"


def _missing(value: Any) -> str | None:
    return str(value["missing"]) if isinstance(value, dict) and "missing" in value else None


def _why(value: Mapping[str, Any]) -> str:
    detail = f": {value['detail']}" if value.get("detail") else ""
    return f"{value['missing']}{detail}"


def _known(value: Any, otherwise: Any) -> Any:
    return otherwise if value is None or _missing(value) else value


# The decision

Policy: TypeAlias = Literal["never", "when_needed", "ask"]
Way: TypeAlias = Literal["nothing", "reload", "reboot", "ask", "fail"]


@dataclass(frozen=True)
class Decision:
    """What is done on a node, with a sentence that explains it."""

    way: Way
    said: str


def decide(state: DriverState, policy: Policy, *, terminal: bool) -> Decision:
    """
    Return the decision for a state and `gpu.reboot`.

    `terminal` is true if the operator can be asked.
    """
    match state:
        case Active():
            return Decision("nothing", f"driver {state.version} is active")
        case NeedsReload():
            return Decision("reload", state.reason)
        case NeedsReboot() if policy == "when_needed":
            return Decision("reboot", state.reason)
        case NeedsReboot() if policy == "ask" and terminal:
            return Decision("ask", state.reason)
        case NeedsReboot():
            allowed = (
                "gpu.reboot is never"
                if policy == "never"
                else "gpu.reboot is ask, and there is no terminal"
            )
            return Decision(
                "fail",
                f"{state.reason}: driver {state.version} needs a reboot, but {allowed}. Reboot "
                "the node and run the command again, or set gpu.reboot: when_needed",
            )
        case InUse():
            return Decision("fail", state.sentence)
        case Blocked() | Unknown():
            return Decision("fail", "; ".join(state.reasons))
