"""Check that the GPUs have joined the NVLink fabric, and that the fabric manager runs. Pure."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpufleet.checks.finding import Action, Problem, Severity, Step
from gpufleet.checks.nvlink_facts import (
    COMPLETED,
    DRAIN,
    IN_PROGRESS,
    NO_FABRIC,
    NOT_STARTED,
    NVLINK_5,
    REBOOT,
    RESET_ALL,
    RESTART_MANAGER,
    has_switches,
    has_unknown_peers,
    is_grace,
    known_fabric_state,
    known_links,
    links_into_switches,
    nvswitches,
    widths,
)
from gpufleet.checks.probe_facts import (
    CannotTell,
    DoesNotApply,
    GpuReading,
    Reading,
    Unread,
    cached_answer,
    is_missing,
    lookup,
    twin_answers,
)
from gpufleet.formatting import ranges
from gpufleet.node.topology import P2P_OK

_STATES = {NOT_STARTED: "not started", IN_PROGRESS: "in progress"}
# The values of nvmlReturn_t that have been seen as the status of a GPU's registration.
_STATUSES = {3: "not supported", 23: "insufficient resources", 999: "unknown error"}
# GPUs with this compute capability (Hopper) or a newer one register with their NVSwitches (nvml.h
# on nvmlDeviceGetGpuFabricInfo).
REGISTERS = (9, 0)
# The longest time that registration takes after boot, in seconds. It usually takes some tens of
# seconds.
REGISTRATION_SECONDS = 300


@dataclass(frozen=True)
class HealthField:
    """
    One field of the fabric's health mask: its position, its good values, and the faults that its
    bad values mean.
    """

    shift: int
    width: int
    good: frozenset[int]
    bad: Mapping[int, str]
    passing: bool = False  # the fault ends by itself, or the GPU works with it for a while


_NO = frozenset({0, 2})  # not supported; no
_YES = frozenset({0, 1})  # not supported; yes
# The shifts, widths and values are NVML_GPU_FABRIC_HEALTH_MASK_* in nvml.h. The widths are those of
# the Python binding since 13.590.44. Older bindings had 0x11 as the width of two bits.
HEALTH = (
    HealthField(0, 0x3, _NO, {1: "bandwidth is degraded"}),
    HealthField(2, 0x3, _NO, {1: "a route is being recovered"}, passing=True),
    HealthField(4, 0x3, _NO, {1: "a route is unhealthy"}),
    HealthField(6, 0x3, _NO, {1: "the GPU is recovering from an access timeout"}, passing=True),
    HealthField(
        8,
        0xF,
        _YES,
        {
            2: "the system GUID is wrong",
            3: "the chassis' serial number is wrong",
            4: "the GPU is in no partition",
            5: "the GPU has too few NVLinks",
            6: "the firmware is incompatible",
            7: "the GPU's location is invalid",
            8: "the GPU's state is invalid",
        },
    ),
    HealthField(12, 0x3, _YES, {2: "no partition is assigned to the GPU"}),
    HealthField(14, 0x3, _YES, {2: "the global fabric manager is disconnected"}, passing=True),
)
_HEALTH_BITS = 0xFFFF  # the bits of the mask that the fields above describe
_SUMMARY_HEALTHY = 1
_SUMMARIES = {2: "unhealthy", 3: "of limited capacity"}

FABRIC_MANAGER = "nvidia-fabricmanager.service"
# Before R580, the name of NVIDIA's package contains the driver's branch. The name of Ubuntu's
# package still contains it.
UNBRANCHED = 580
_FABRIC_MANAGER_PACKAGE = re.compile(r"nvidia-fabric-?manager(-\d+)?")
_UPSTREAM_VERSION = re.compile(r"(?:\d+:)?(\d+(?:\.\d+)+)")

# fabric-state


def fabric_state(gpu: GpuReading) -> Iterator[Problem]:
    """
    Check that the GPU has joined its NVLink fabric, is healthy in it, and can access its peers.

    Only values that are known to be good pass. Boards without a fabric have no fabric state, but
    their peer access is also checked. Such boards are older than Hopper, PCIe boards, or a single
    board in a virtual machine.
    """
    refused = _refused(gpu)
    try:
        state = _fabric_state(gpu)
    except (CannotTell, DoesNotApply):
        if not refused:
            raise
        yield refused
        return
    except Unread:
        if refused:
            yield refused
        raise
    if state != COMPLETED:
        yield _not_joined(gpu, state)
    elif status := gpu.section("fabric", "status"):
        said = _STATUSES.get(status, "error")
        yield _fabric_problem(
            gpu, f"joining the NVLink fabric failed with {said} (status {status})", "success"
        )
    else:
        if odd := _other_cluster(gpu):
            yield odd
        if refused:
            yield refused
        yield from _unhealthy(gpu)


def _fabric_state(gpu: GpuReading) -> Any:
    try:
        state = gpu.section("fabric", "state")
    except (CannotTell, DoesNotApply) as why:
        if _its_like_tell(gpu):
            raise Unread("the GPU reports no fabric state, unlike the node's other GPUs") from None
        if isinstance(why, DoesNotApply) and _must_register(gpu):
            raise Unread(
                "the GPU reports no fabric state, although it is connected to NVSwitches"
            ) from None
        raise
    if state == NO_FABRIC and not _others_have_fabric(gpu):
        raise DoesNotApply("this board does not belong to an NVLink fabric")
    return state


def _fabric_problem(
    gpu: GpuReading,
    found: str,
    expected: str,
    source: str = "the driver (fabric state)",
    severity: Severity = Severity.BLOCK,
) -> Problem:
    return Problem(severity, found, expected, source, _fabric_remedy(gpu))


def _fabric_remedy(gpu: GpuReading) -> tuple[Step, ...]:
    if is_grace(gpu):
        look = "query the rack's NVLink switch trays (NMX) for the state of this GPU's partition"
        return (Step(Action.LOOK, look), DRAIN, RESET_ALL, REBOOT)
    if not has_switches(gpu.node):
        look = "make sure that MIG is off (`nvidia-smi -L`), and read the checks mig and iommu-acs"
        return (Step(Action.LOOK, look), DRAIN, RESET_ALL, REBOOT)
    steps = [
        Step(Action.LOOK, "`systemctl status nvidia-fabricmanager` and its journal"),
        DRAIN,
        RESTART_MANAGER,
        RESET_ALL,
        REBOOT,
    ]
    if _version_of(gpu) >= NVLINK_5:
        modules = (
            "`sudo modprobe ib_umad mlx5_ib`, and make sure that nvlsm and ibstat are installed"
        )
        steps.insert(1, Step(Action.CONFIGURE, f"NVLink 5 is managed over InfiniBand: {modules}"))
    return tuple(steps)


def _not_joined(gpu: GpuReading, state: Any) -> Problem:
    found = f"the GPU has not joined the NVLink fabric: {_STATES.get(state, f'state {state}')}"
    if state == NO_FABRIC:
        found = "the GPU reports no NVLink fabric, unlike other GPUs of the node or model"
    uptime = gpu.node.known("system", "uptime_seconds")
    if uptime is not None and uptime < REGISTRATION_SECONDS:
        found += f"; the node booted {uptime:.0f} s ago, so the GPU may still be joining"
    return _fabric_problem(gpu, f"{found} (CUDA fails with error 802)", "state Completed")


def _others_have_fabric(gpu: GpuReading) -> bool:
    """
    Return whether a GPU that reports no fabric should be in one, because the node has NVSwitches,
    or because other GPUs of the node or of its siblings are in a fabric.
    """
    node = gpu.node
    count = len(node.document["gpus"])

    def joins(twin: Reading) -> bool:
        return len(twin.document["gpus"]) == count and _has_fabric(twin)

    return count > 1 and bool(
        nvswitches(node) or _has_fabric(node) or any(twin_answers(node, joins))
    )


def _its_like_tell(gpu: GpuReading) -> bool:
    """Return whether a GPU with the same name on the node is, or should be, in a fabric."""
    return any(
        known_fabric_state(other) not in {None, NO_FABRIC}
        for other in gpu.node.gpus
        if other.known("name") == gpu.known("name")
    )


def _must_register(gpu: GpuReading) -> bool:
    """
    Return whether NVSwitches connect the GPU with others, and its generation registers with
    NVSwitches.

    If a GPU without NVLink should have NVLink, the check nvlink-links reports it.
    """
    several = len(gpu.node.document["gpus"]) > 1
    capability = tuple(gpu.known("compute_capability", default=()))
    switched = has_switches(gpu.node) or _others_have_fabric(gpu)
    return several and switched and capability >= REGISTERS and known_links(gpu) is not None


@cached_answer
def _has_fabric(node: Reading) -> bool:
    return any(known_fabric_state(gpu) not in {None, NO_FABRIC} for gpu in node.gpus)


@cached_answer
def _memberships(node: Reading) -> dict[int, tuple[Any, Any]]:
    """Return the cluster and the clique of each GPU that has joined a fabric and reports both."""
    found = {
        gpu.index: (_of_fabric(gpu, "cluster_uuid"), _of_fabric(gpu, "clique"))
        for gpu in node.gpus
        if known_fabric_state(gpu) == COMPLETED
    }
    return {index: member for index, member in found.items() if None not in member}


def _of_fabric(gpu: GpuReading, key: str) -> Any:
    """Return one value of the GPU's fabric state, or None if the GPU does not report it."""
    return lookup(gpu.node.document["fabric"][gpu.at], (key,), None, None)


@cached_answer
def _is_clustered(node: Reading) -> bool:
    """
    Return whether all GPUs are members of a cluster. Only the GPUs of a rack are in a cluster.
    """
    joined = _memberships(node).values()
    return bool(joined) and all(str(cluster).strip("0-") for cluster, _ in joined)


def _other_cluster(gpu: GpuReading) -> Problem | None:
    """
    Return a problem if the GPU is in a different cluster or clique than the others, so that it
    cannot access them.
    """
    cluster, clique = (gpu.section("fabric", key) for key in ("cluster_uuid", "clique"))
    usual = Counter(_memberships(gpu.node).values()).most_common(1)[0][0]
    if (cluster, clique) != usual:
        return _fabric_problem(
            gpu,
            f"the GPU is in clique {clique} of cluster {cluster}",
            f"clique {usual[1]} of cluster {usual[0]}",
            "the node's other GPUs",
        )
    clustered = [told for told in twin_answers(gpu.node, _is_clustered) if told is not None]
    if clustered and all(clustered) and not str(cluster).strip("0-"):
        return _fabric_problem(
            gpu, "the GPU is in no cluster", "membership in a cluster", "siblings of the same kind"
        )
    return None


def _unhealthy(gpu: GpuReading) -> Iterator[Problem]:
    mask, summary = gpu.section("fabric", "health_mask"), _of_fabric(gpu, "health_summary")
    told = False
    for field in HEALTH:
        value = mask >> field.shift & field.width
        if value not in field.good:
            told = True
            said = field.bad.get(value, f"health bits {field.shift} and up say {value}")
            yield _fabric_problem(
                gpu,
                f"in the NVLink fabric {said}",
                "a health mask without a fault",
                severity=Severity.WARN if field.passing else Severity.BLOCK,
            )
    if summary not in {None, 0, _SUMMARY_HEALTHY} and not told:
        said = _SUMMARIES.get(summary, f"of unknown health ({summary})")
        yield _fabric_problem(gpu, f"the GPU's NVLink fabric is {said}", "a healthy fabric")
    if mask & ~_HEALTH_BITS and summary != _SUMMARY_HEALTHY:
        raise Unread(f"the fabric's health mask {mask:#x} has unknown fields")


def _refused(gpu: GpuReading) -> Problem | None:
    """
    Return a problem if the driver allows no access to peers that NVLinks connect with the GPU, or
    None.
    """
    node = gpu.node
    refused = [
        other.index
        for other in node.gpus
        if other.at != gpu.at and _linked(gpu, other) and not _may_reach(gpu, other)
    ]
    if not refused:
        return None
    return _fabric_problem(
        gpu,
        f"NVLinks connect this GPU with GPUs {ranges(refused, ', ')}, but the driver allows no "
        f"peer access over these links",
        "peer access",
        "the driver (P2P status over NVLink)",
    )


def _linked(one: GpuReading, other: GpuReading) -> bool:
    """
    Return whether two GPUs should be able to access each other over NVLink.

    In a virtual machine that cannot see the switches, links with unknown peers are counted.
    """
    first, second = sorted((one.index, other.index))
    return bool(widths(one.node).get((first, second))) or (
        has_unknown_peers(one) and has_unknown_peers(other)
    )


def _may_reach(gpu: GpuReading, other: GpuReading) -> bool:
    """
    Return whether the driver allows access in both directions. Raises `Unread` if the GPU's own
    answer cannot be read.
    """
    try:
        answers = [gpu.node.get("p2p", "nvlink", gpu.at, other.at)]
    except (CannotTell, DoesNotApply):
        answers = []
    # If the other GPU's answer is missing, the check of that GPU reports it.
    answers.append(gpu.node.known("p2p", "nvlink", other.at, gpu.at, default=P2P_OK))
    return all(answer == P2P_OK for answer in answers)


# fabric-manager


def fabric_manager(node: Reading) -> Iterator[Problem]:
    """
    Check that a node with NVSwitches runs the fabric manager in the driver's version.

    The GPUs' answers cannot replace this check: their registration stays Completed after the fabric
    manager has stopped, and A100 GPUs do not register. Two kinds of nodes do not run the service:
    for a virtual machine that does not see the switches, the host runs it, and for a rack of Grace
    boards, the switch trays run it.
    """
    _needs_manager(node)
    if node.get("system", "units", absent=None) is None:
        raise Unread("systemd does not run here, so the fabric manager's state is unknown")
    load, active, enabled = (_of_manager(node, key) for key in ("load", "active", "enabled"))
    if load != "loaded":
        yield _not_there(node, load)
        return
    if active != "active":
        stale = ""
        if _all_joined(node):
            stale = " (the GPUs still report Completed from an earlier start)"
        sub, result = (_of_manager(node, key) for key in ("sub", "result"))
        yield Problem(
            Severity.BLOCK,
            f"{FABRIC_MANAGER} is {active} ({sub}, result {result}){stale}",
            "active",
            _switches_said(node),
            (
                Step(Action.LOOK, f"`journalctl -u {FABRIC_MANAGER} -b`"),
                DRAIN,
                RESTART_MANAGER,
                RESET_ALL,
                REBOOT,
            ),
        )
    elif enabled == "disabled":
        yield Problem(
            Severity.WARN,
            f"{FABRIC_MANAGER} is disabled: after the next boot no GPU will join the fabric",
            "enabled",
            _switches_said(node),
            (Step(Action.CONFIGURE, f"`sudo systemctl enable {FABRIC_MANAGER}`"),),
        )
    yield from _manager_version(node)


def _needs_manager(node: Reading) -> None:
    """
    Return if this node must run a fabric manager. Otherwise raise `DoesNotApply`, or `Unread` if
    the driver does not answer and the PCI bus shows no NVSwitch.
    """
    if nvswitches(node):
        return
    if not node.driver_answers:
        raise Unread("only the driver could tell whether the GPUs are connected to NVSwitches")
    if any(map(is_grace, node.gpus)):
        raise DoesNotApply("the fabric manager of Grace boards runs on the rack's switch trays")
    if links_into_switches(node):
        return
    if any(map(has_unknown_peers, node.gpus)):
        raise DoesNotApply("the NVSwitches belong to the host of this virtual machine")
    raise DoesNotApply("there is no NVSwitch")


def _of_manager(node: Reading, key: str) -> Any:
    """
    Return one property of the fabric manager's unit in systemd, or None if the unit does not have
    it.
    """
    return node.get("system", "units", FABRIC_MANAGER, key, absent=None)


def _not_there(node: Reading, load: str) -> Problem:
    # The GPUs are registered, so a hypervisor or a container on the node runs a fabric manager.
    elsewhere = load == "not-found" and not nvswitches(node) and _all_joined(node)
    said = "not installed" if load == "not-found" else load
    unmask = Step(Action.CONFIGURE, f"`sudo systemctl unmask {FABRIC_MANAGER}`, then enable it")
    return Problem(
        Severity.WARN if elsewhere else Severity.BLOCK,
        f"{FABRIC_MANAGER} is {said}"
        + (", but all GPUs have joined a fabric" if elsewhere else ""),
        "active, and of the driver's version",
        _switches_said(node),
        (unmask if load == "masked" else _install(node),),
    )


def _switches_said(node: Reading) -> str:
    switches = nvswitches(node)
    if switches:
        return f"{len(switches)} NVSwitches on the PCI bus"
    return "the GPUs' links lead to NVSwitches"


def _all_joined(node: Reading) -> bool:
    states = [known_fabric_state(gpu) for gpu in node.gpus]
    return bool(states) and set(states) == {COMPLETED}


def _driver_version(node: Reading) -> str | None:
    """Return the running driver's version, from NVML or from the kernel module."""
    version: str | None = node.known("driver", "version") or node.known("driver", "module")
    return version


def _install(node: Reading) -> Step:
    driver = _driver_version(node) or "<the driver's version>"
    branch = driver.partition(".")[0]
    named = f"-{branch}" if branch.isdecimal() and int(branch) < UNBRANCHED else ""
    return Step(
        Action.CONFIGURE,
        f"install nvidia-fabricmanager{named} in version {driver}, then "
        "`sudo systemctl enable --now nvidia-fabricmanager`",
    )


def _manager_version(node: Reading) -> Iterator[Problem]:
    """
    Check that the fabric manager has exactly the driver's version, because it starts with no other.
    """
    packages = _packages(node)
    installed = {
        name: package["version"]
        for name, package in packages.items()
        if _FABRIC_MANAGER_PACKAGE.fullmatch(name)
    }
    driver = _driver_version(node)
    if not installed:
        yield Problem(
            Severity.INFO,
            f"no package contains {FABRIC_MANAGER}, so its version is unknown",
            f"{driver}",
            "the driver",
        )
        return
    if driver is None:
        yield Problem(
            Severity.INFO,
            f"the version of {FABRIC_MANAGER} was not compared, because no driver is loaded",
            "the driver's version",
            "the driver",
        )
        return
    if driver not in {upstream_version(version) for version in installed.values()}:
        said = ", ".join(f"{name} {version}" for name, version in sorted(installed.items()))
        yield Problem(
            Severity.BLOCK,
            f"{said} is installed with driver {driver}: the fabric manager cannot start again",
            driver,
            "the driver that runs",
            (DRAIN, _install(node), REBOOT),
        )
    newest = max(map(_version_of, node.gpus), default=0)
    if newest >= NVLINK_5 and "nvlsm" not in packages:
        yield Problem(
            Severity.BLOCK,
            "nvlsm is not installed: without it the fabric manager cannot configure NVLink 5",
            "nvlsm installed together with nvidia-fabricmanager",
            "NVIDIA's fabric manager user guide",
            (
                Step(
                    Action.CONFIGURE, "install nvlsm and infiniband-diags from NVIDIA's repository"
                ),
                DRAIN,
                RESTART_MANAGER,
                RESET_ALL,
            ),
        )


def _packages(node: Reading) -> Mapping[str, Any]:
    """Return the installed packages, or an empty dict on a node without dpkg and rpm."""
    told = node.document["system"]["packages"]
    if is_missing(told) and told["missing"] == "no_program":
        return {}
    return dict(node.get("system", "packages", absent={}))


def _version_of(gpu: GpuReading) -> int:
    links = known_links(gpu)
    return links.version if links else 0


def upstream_version(version: str) -> str | None:
    """
    Return the part of a package's version that NVIDIA assigned.

    >>> upstream_version("1:570.124.06-1ubuntu0.24.04.1")
    '570.124.06'
    """
    found = _UPSTREAM_VERSION.match(version)
    return found and found[1]


WITHOUT_DRIVER: dict[str, Callable[[Reading], Iterator[Problem]]] = {
    "fabric-manager": fabric_manager,
}

OF_GPU: dict[str, Callable[[GpuReading], Iterator[Problem]]] = {
    "fabric-state": fabric_state,
}
