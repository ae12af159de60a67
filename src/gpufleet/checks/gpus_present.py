"""
Check that every GPU is in the driver's list and on the PCI bus, and that no GPU of the board is
missing. Pure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from gpufleet.checks.finding import POWER_CYCLE, REBOOT_IT, STOP, Action, Problem, Severity, Step
from gpufleet.checks.nvlink_facts import nvswitches
from gpufleet.checks.probe_facts import (
    Reading,
    Unread,
    cached_answer,
    expectation,
    is_missing,
    twin_answers,
)

# The number of GPUs on a board with NVSwitches: HGX A100, H100, H200, B200, B300 (NVIDIA's HGX data
# sheets).
BOARD_WITH_SWITCHES = 8


def gpu_count(node: Reading) -> Iterator[Problem]:
    """
    Check that NVML lists all GPUs on the PCI bus, and as many as declared or as on the siblings.

    GPUs that are bound to vfio-pci, or that a module option hides, are absent on purpose. The
    comparison with siblings counts the GPUs of vfio-pci as present. If NVML lists all GPUs on the
    bus, a difference from the siblings is only a warning, because the node may have been built with
    fewer GPUs. If the number is not declared and there are no siblings, a gap in the board's module
    numbers shows a missing GPU.
    """
    count = _counted(node)
    unlisted, given = _unlisted(node), _given_away(node)
    hidden = _hidden_at(node)
    seen = count + len(unlisted) - min(len(unlisted), len(node.silent_gpus))
    declared = node.settings.gpus.count
    expected = expectation(declared, "gpus.count", twin_answers(node, _present))
    present = count if declared is not None else count + len(given)
    if not count and not unlisted:
        away = "; ".join([*([_hidden(hidden)] if hidden else []), *([_given(given)] * bool(given))])
        found = "the driver finds no GPU" + (f": {away}" if away else "")
        yield Problem(
            Severity.BLOCK, found, "at least one GPU", "the device", _back(None, unlisted, hidden)
        )
    elif expected and present < expected.value:
        sure = declared is not None or unlisted or (expected.certain and not _bus_agrees(node))
        severity = Severity.BLOCK if sure else Severity.WARN
        yield from _missing(node, expected.value, expected.source, severity)
    elif unlisted:
        # If NVML lists the declared number, the unlisted GPUs are cards that this driver does not
        # support.
        right = declared == count
        severity = Severity.WARN if right else Severity.BLOCK
        yield from _missing(node, seen, "the PCI bus", severity)
    elif declared is not None and count > declared:
        yield Problem(
            Severity.WARN,
            f"{count} GPUs, {declared} declared",
            f"{declared} GPUs",
            "gpus.count in group_vars",
            (Step(Action.CONFIGURE, f"if this number is intended, write gpus.count: {count}"),),
        )
    else:
        if declared is None and expected is None:
            yield from _modules_missing(node)
        if hidden:
            yield Problem(Severity.INFO, _hidden(hidden), "", "NVreg_ExcludedGpus")
        if given:
            yield Problem(Severity.INFO, _given(given), "", "the PCI bus")


def _counted(node: Reading) -> int:
    """Return NVML's number of GPUs. Raises `Unread` if the probe lists a different number."""
    count, listed = int(node.get("driver", "gpu_count")), len(node.document["gpus"])
    if count != listed:
        raise Unread(f"the driver counts {count} GPUs, but the probe lists {listed}")
    return count


@cached_answer
def _present(node: Reading) -> int:
    """Return the node's number of GPUs, including those that are passed to virtual machines."""
    return _counted(node) + len(_given_away(node))


def _bus_agrees(node: Reading) -> bool:
    """
    Return whether the GPUs on the PCI bus are exactly those in NVML's list and those that are
    passed to virtual machines.

    The result is False if the bus could not be read, if a module option hides a GPU, or if the
    address of a silent GPU is unknown.
    """
    on_bus = {function["bus_id"] for function in _gpus_on_bus(node)} - set(_given_away(node))
    return on_bus == {gpu.known("pci", "bus_id") for gpu in node.gpus}


def _missing(node: Reading, wanted: int, source: str, severity: Severity) -> Iterator[Problem]:
    """
    Yield a problem for each missing GPU whose address is known. If no address is known, yield one
    problem for all missing GPUs.
    """
    count = _counted(node)
    unlisted, hidden = _unlisted(node), _hidden_at(node)
    places = {
        **dict.fromkeys(
            _empty_slots(node), "there is no device at {}, where the sibling nodes have a GPU"
        ),
        **{at: _unlisted_said(driver) for at, driver in unlisted.items()},
        **dict.fromkeys(hidden, "an option of the driver's module hides {}"),
    }
    if node.settings.gpus.count is not None:
        places |= dict.fromkeys(_given_away(node), "{} is given to virtual machines (vfio-pci)")
    so = f"if the node was built with {count} GPUs, write gpus.count: {count} in its host_vars"
    built_so = () if severity == Severity.BLOCK or unlisted else (Step(Action.CONFIGURE, so),)
    for bus_id, said in (places or {"": "the positions of the missing GPUs are unknown"}).items():
        yield Problem(
            severity,
            f"{count} of {wanted} GPUs: {said.format(bus_id)}",
            f"{wanted} GPUs",
            source,
            (*built_so, *_back(bus_id or None, unlisted, hidden)),
            bus_id,
        )


def _modules_missing(node: Reading) -> Iterator[Problem]:
    """
    Yield a problem if no GPU has some of the board's module numbers (nvmlDeviceGetModuleId).

    Boards number their GPUs from 1 (or 0). If a node has the board's NVSwitches, it has the whole
    board of 8 GPUs. A virtual machine may have any of the GPUs.
    """
    modules = [gpu.known("module_id") for gpu in node.gpus]
    numbers = {number for number in modules if type(number) is int and 0 <= number < 64}
    if len(numbers) != len(modules) or len(modules) < 2:
        return  # boards without module numbers, and cards that all report the same number
    first = min(numbers) if min(numbers) < 2 else 1
    whole = bool(nvswitches(node)) or _manages_switches(node)
    size = max(numbers) - first + 1
    if whole:
        size = -(-size // BOARD_WITH_SWITCHES) * BOARD_WITH_SWITCHES
    absent = sorted(set(range(first, first + size)) - numbers)
    away = len(node.silent_gpus) + len(_given_away(node)) + len(_hidden_at(node))
    if len(absent) <= away:
        return
    count = _counted(node)
    named = f"module{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
    if away:
        named = f"{len(absent) - away} of the {named}"
    severity = Severity.INFO
    if whole or any(gpu.known("c2c_links") for gpu in node.gpus):
        severity = Severity.BLOCK if whole else Severity.WARN
    so = (
        f"if the node was built with {count} GPUs or has only {count} GPUs passed through, "
        f"write gpus.count: {count} in its host_vars"
    )
    yield Problem(
        severity,
        f"{count} GPUs, but no GPU has {named} of the board",
        f"{count + len(absent) - away} GPUs, modules {first} to {first + size - 1}",
        "the board's module numbers",
        (Step(Action.CONFIGURE, so), *_back(None, {}, [])) if severity > Severity.INFO else (),
        "" if severity > Severity.INFO else None,
    )


def _manages_switches(node: Reading) -> bool:
    """Return whether this node manages the switches of NVLink 5 over its InfiniBand devices."""
    devices = node.known("nics", "infiniband", default=[])
    return any(device.get("manages_switches") is True for device in devices)


def _unlisted_said(driver: str | None) -> str:
    if driver in {None, "nvidia"}:
        return "{} is on the PCI bus, but the driver does not list it"
    return f"{{}} is on the PCI bus, bound to {driver}, so the NVIDIA driver cannot use it"


def _given(bus_ids: list[str]) -> str:
    return f"given to virtual machines (vfio-pci): {', '.join(bus_ids)}"


def _hidden(bus_ids: list[str]) -> str:
    return f"an option of the driver's module hides {', '.join(bus_ids)}"


def _back(
    bus_id: str | None, unlisted: Mapping[str, str | None], hidden: list[str]
) -> tuple[Step, ...]:
    """Return the steps that restore a missing GPU."""
    unhide = Step(
        Action.CONFIGURE,
        "remove NVreg_ExcludedGpus from /etc/modprobe.d to use the GPU again, then reboot",
    )
    if bus_id in hidden:
        return (unhide,)
    driver = unlisted.get(bus_id) if bus_id else None
    if driver not in {None, "nvidia"}:
        said = (
            f"`grep -rE '{driver}|ids=' /etc/modprobe.d /proc/cmdline` shows which setting "
            f"bound the GPU to {driver}"
        )
        free = (
            f"to use the GPU, remove {driver} from this setting, then reboot; otherwise bind "
            f"the GPU to vfio-pci"
        )
        return (Step(Action.LOOK, said), STOP, Step(Action.CONFIGURE, free))
    at = f" -s {bus_id}" if bus_id in unlisted else " -d 10de:"
    look = Step(Action.LOOK, f"`lspci -vv{at}` and `dmesg | grep NVRM` show the error")
    seat = Step(
        Action.SERVICE,
        "if the GPU is still missing, have its seating, riser and power cables inspected",
    )
    return (look, *([unhide] if hidden else []), STOP, REBOOT_IT, POWER_CYCLE, seat)


def _gpus_on_bus(node: Reading) -> list[Mapping[str, Any]]:
    """Return NVIDIA's display functions (PCI class 03) on the bus."""
    functions = node.get("pci", absent=[])
    return [function for function in functions if function["class"].startswith("0x03")]


def _bound_to(function: Mapping[str, Any]) -> str | None:
    driver = function["driver"]
    return None if is_missing(driver) else str(driver)


def _given_away(node: Reading) -> list[str]:
    """Return the addresses of GPUs that vfio-pci holds for virtual machines."""
    return sorted(at["bus_id"] for at in _gpus_on_bus(node) if _bound_to(at) == "vfio-pci")


def _hidden_at(node: Reading) -> list[str]:
    """Return the addresses of GPUs that a module option hides."""
    return sorted(at["bus_id"] for at in node.known("driver", "excluded", default=[]))


def _unlisted(node: Reading) -> dict[str, str | None]:
    """
    Return the GPUs on the PCI bus that NVML does not list, each with its driver.

    If such a GPU has NVIDIA's driver or no driver, its initialisation failed. Any other driver
    prevents NVIDIA's driver from using the GPU. The PCI address of a silent GPU in NVML's list is
    unknown, so the result is empty if there are not more such GPUs on the bus than silent GPUs.
    """
    away = {*(gpu.known("pci", "bus_id") for gpu in node.gpus), *_hidden_at(node)}
    away |= set(_given_away(node))
    found = {at["bus_id"]: _bound_to(at) for at in _gpus_on_bus(node) if at["bus_id"] not in away}
    return found if len(found) > len(node.silent_gpus) else {}


def _empty_slots(node: Reading) -> list[str]:
    """Return the PCI addresses at which most siblings have a GPU but this node has none."""
    here = _places(node)
    there = Counter(at for places in twin_answers(node, _places) for at in places or ())
    return sorted(
        str(bus_id)
        for bus_id, twins in there.items()
        if bus_id is not None and bus_id not in here and 2 * twins > len(node.twins)
    )


@cached_answer
def _places(node: Reading) -> set[str | None]:
    """
    Return the addresses of the node's GPUs, including those that are passed to virtual machines.
    """
    return {*(gpu.known("pci", "bus_id") for gpu in node.gpus), *_given_away(node)}


OF_NODE: dict[str, Callable[[Reading], Iterator[Problem]]] = {"gpu-count": gpu_count}
