"""
Check the kernel log since boot for PCIe errors, failed GPU starts and hardware errors.

As with Xids (`checks/kernel_log.py`), errors before the driver was last loaded count as history.
Errors of CPUs and memory always count. If the log is unreadable or has lost its beginning, the
check xid reports it. Pure.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from gpufleet.checks.finding import (
    POWER_CYCLE,
    REBOOT_IT,
    STOP,
    Action,
    Problem,
    Severity,
    Step,
    reset_step,
)
from gpufleet.checks.kernel_log import DAY, Log, sysfs_bus_id
from gpufleet.checks.probe_facts import CannotTell, Reading, gpu_facts, is_missing
from gpufleet.formatting import join_names

_ADDRESS = r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]"
_CASE = re.IGNORECASE
# A root port's line about an error of a function, and the line about the function itself
# (drivers/pci/pcie/aer.c).
_RECEIVED = re.compile(
    rf"AER: .*\berror (?:message )?received(?: from|:)? (?P<bus_id>{_ADDRESS})", _CASE
)
_BUS_ERROR = re.compile(rf"(?P<bus_id>{_ADDRESS}): (?:AER: )?PCIe Bus Error: severity=", _CASE)
_FATAL = re.compile(r"\(Fatal\)", _CASE)
_NON_FATAL = re.compile(r"\(Non-?Fatal\)", _CASE)
_CORRECTED = re.compile(r"(?<!un)correct(?:ed|able)\b", _CASE)

# From this number of corrected errors per day, the check reports a function. A healthy link of
# generation 5 has at most one wrong bit in 10^12. A wrong bit causes a retry, but rarely a report,
# and the kernel reports at most 10 errors of a device in 5 seconds. The number is gpufleet's own,
# because no limit is published.
FLOOD = 100

_NOT_STARTED = re.compile(
    rf"NVRM: GPU ({_ADDRESS}|[0-9a-f:]+): (?:RmInitAdapter|rm_init_adapter) failed", _CASE
)


@dataclass(frozen=True)
class PcieError:
    """A log line about an error of a PCIe function, with its time and severity."""

    seconds: float
    bus_id: str
    kind: str  # fatal, nonfatal, corrected
    reported: bool  # True: a line of the root port. False: a line about the function itself
    text: str


def pcie_errors(node: Reading) -> Iterator[Problem]:
    """
    Check that the kernel reported no uncorrected PCIe error of a GPU or of a bridge above a GPU.

    There is one problem for each function and kind of error. For other functions (disks, NICs),
    fatal errors are warnings and other errors are remarks. Corrected errors count only if there are
    at least `FLOOD` within a day.
    """
    log = _log(node)
    errors = [
        error
        for at, (seconds, text) in enumerate(log.lines)
        if at > log.loaded_at and (error := _pcie_error(seconds, text)) is not None
    ]
    by_kind: dict[tuple[str, str], list[PcieError]] = defaultdict(list)
    for error in errors:
        by_kind[error.bus_id, error.kind].append(error)
    below = _gpus_below(node)
    for (bus_id, kind), found in sorted(by_kind.items()):
        count = max(sum(one.reported == reported for one in found) for reported in (True, False))
        if kind == "corrected" and (count := _most_in_a_day(found)) < FLOOD:
            continue
        yield _pcie_problem(bus_id, kind, count, found[-1].text, below.get(bus_id))


def _pcie_error(seconds: float, text: str) -> PcieError | None:
    received, own = _RECEIVED.search(text), _BUS_ERROR.search(text)
    found = received or own
    if found is None:
        return None
    if _NON_FATAL.search(text):
        kind = "nonfatal"
    elif _FATAL.search(text):
        kind = "fatal"
    elif _CORRECTED.search(text):
        kind = "corrected"
    else:
        kind = "nonfatal"
    return PcieError(seconds, sysfs_bus_id(found["bus_id"]), kind, received is not None, text)


def _most_in_a_day(errors: Sequence[PcieError]) -> int:
    """
    Return the highest number of a function's errors within a day.

    The lines of the root port and the lines about the function itself are counted separately,
    because both report the same errors. The larger number is returned.
    """
    return max(
        _most_within_a_day(one.seconds for one in errors if one.reported == reported)
        for reported in (True, False)
    )


def _most_within_a_day(times: Iterable[float]) -> int:
    ordered = sorted(times)
    most = first = 0
    for last, seconds in enumerate(ordered):
        while ordered[first] < seconds - DAY:
            first += 1
        most = max(most, last - first + 1)
    return most


_KINDS = {
    "fatal": "fatal errors, each of which reset the link",
    "nonfatal": "uncorrected errors",
    "corrected": "corrected errors within a day",
}


def _pcie_problem(
    bus_id: str, kind: str, count: int, text: str, gpus: Sequence[int | str] | None
) -> Problem:
    if gpus is None:
        severity = Severity.WARN if kind == "fatal" else Severity.INFO
        whose = f"PCI function {bus_id}, which is not a GPU"
    else:
        severity = Severity.BLOCK if kind == "fatal" else Severity.WARN
        names = join_names(map(str, gpus))
        whose = f"PCI function {bus_id}, on the path of GPU{'s' * (len(gpus) > 1)} {names}"
    one = gpus[0] if gpus and len(gpus) == 1 else None
    return Problem(
        severity,
        f"{whose}: {count} PCIe {_KINDS[kind]}: {text[:160]}",
        "none" if kind != "corrected" else f"fewer than {FLOOD}",
        "PCI Express error reporting (AER)",
        (
            Step(
                Action.LOOK, f"`journalctl -k -b | grep -E 'AER|{bus_id}'`; `lspci -vv -s {bus_id}`"
            ),
            STOP,
            *((reset_step(one),) if isinstance(one, int) and kind == "fatal" else ()),
            REBOOT_IT,
            POWER_CYCLE,
            Step(
                Action.SERVICE,
                "if the error comes back: reseat the card, then replace the riser, then the card",
            ),
        ),
        one,
    )


def _gpus_below(node: Reading) -> dict[str, list[int | str]]:
    """
    Return a dict that maps each GPU and each bridge above a GPU to the GPUs below it. A GPU is
    given by its NVML index, or by its PCI address if NVML does not list it.
    """
    index = {str(place): gpu.index for gpu, place in gpu_facts(node.gpus, "pci", "bus_id")}
    found: dict[str, list[int | str]] = defaultdict(list)
    for place, number in index.items():
        found[place].append(number)
    for function in node.known("pci", default=[]):
        if not str(function["class"]).startswith("0x03"):
            continue
        own = str(function["bus_id"])
        gpu: int | str = index.get(own, own)
        path = "" if is_missing(function["path"]) else str(function["path"])
        for part in {own, *re.findall(_ADDRESS, path)}:
            if gpu not in found[part]:
                found[part].append(gpu)
    return dict(found)


def gpu_start(node: Reading) -> Iterator[Problem]:
    """
    Check that the driver could start every GPU (the log has no `RmInitAdapter failed`).

    If the GPU answers now, it was started later, so the earlier failure is only a warning.
    """
    log = _log(node)
    lines: dict[str, list[tuple[int, str]]] = defaultdict(list)
    for at, (_, text) in enumerate(log.lines):
        if found := _NOT_STARTED.search(text):
            lines[_place(found[1])].append((at, text))
    index = {str(place): gpu.index for gpu, place in gpu_facts(node.gpus, "pci", "bus_id")}
    for bus_id, failed in sorted(lines.items()):
        gpu = index.get(bus_id)
        fresh = [text for at, text in failed if at > log.loaded_at]
        if not fresh:
            severity, now = Severity.INFO, "before the driver was last loaded"
        elif gpu is not None:
            severity, now = Severity.WARN, "but the GPU answers now"
        else:
            severity, now = Severity.BLOCK, "and the driver does not list the GPU"
        yield Problem(
            severity,
            f"the driver could not start the GPU at {bus_id}, {len(failed)} times, {now}: "
            f"{failed[-1][1][:160]}",
            "a start without errors",
            "the driver (RmInitAdapter)",
            _START_LADDER if severity > Severity.INFO else (),
            bus_id if gpu is None else gpu,
        )


_START_LADDER = (
    Step(
        Action.LOOK,
        "read the error codes in this line, and `dmesg | grep -E 'NVRM|AER' | head -40`; "
        "possible causes are firmware (GSP) that does not match the module, too little PCI "
        "address space (BIOS: above 4G decoding) or the power supply",
    ),
    STOP,
    REBOOT_IT,
    POWER_CYCLE,
    Step(
        Action.SERVICE,
        "if the error comes back: reseat the GPU, run `nvidia-bug-report.sh` and have the GPU "
        "replaced",
    ),
)


# The kernel's messages about CPUs and memory: print_mce in arch/x86/kernel/cpu/mce/core.c,
# drivers/edac/edac_mc.c and mce_amd.c, drivers/firmware/efi/cper.c, mm/memory-failure.c,
# arch/x86/kernel/cpu/mce/therm_throt.c.
_BANK = re.compile(
    r"Machine Check(?: Exception)?: *[0-9a-f]+ Bank \d+: *(?P<status>[0-9a-f]{1,16})"
)
_UC = 61  # this bit of a bank's status is set if the error was not corrected
_MACHINE = (
    (
        "uncorrected",
        re.compile(
            r"\bEDAC \w+: \d+ UE\b|event severity: (?:fatal|recoverable)"
            r"|\[Hardware Error\]: (?:Uncorrected|System Fatal)\b|Processor context corrupt"
            r"|Uncorrected hardware memory error|^Memory failure: .*recovery action",
            _CASE,
        ),
    ),
    (
        "corrected",
        re.compile(
            r"\bEDAC \w+: \d+ CE\b|event severity: corrected"
            r"|\[Hardware Error\]: (?:Corrected|Deferred) error|Machine check events logged",
            _CASE,
        ),
    ),
    ("hot", re.compile(r"\bCPU\d+: .*temperature above threshold", _CASE)),
)
_MACHINE_SAID = {
    "uncorrected": ("hardware errors that were not corrected", "none"),
    "corrected": ("corrected hardware errors within a day", f"fewer than {FLOOD}"),
    "hot": ("times within a day, heat throttled a CPU", f"fewer than {FLOOD}"),
}


def machine_check(node: Reading) -> Iterator[Problem]:
    """
    Check that the CPUs and the memory reported no uncorrected errors, and only few corrected
    errors.

    As in host-ecc, a problem is only a warning, because the kernel ends only the program that was
    affected by the error.
    """
    by_kind: dict[str, list[tuple[float, str]]] = defaultdict(list)
    for seconds, text in _log(node).lines:
        if kind := _machine_error(text):
            by_kind[kind].append((seconds, text))
    for kind, lines in by_kind.items():
        count = len(lines) if kind == "uncorrected" else _most_within_a_day(t for t, _ in lines)
        if kind != "uncorrected" and count < FLOOD:
            continue
        said, wanted = _MACHINE_SAID[kind]
        yield Problem(
            Severity.WARN,
            f"{count} {said}: {lines[-1][1][:160]}",
            wanted,
            "the kernel's machine checks (MCE, EDAC, APEI)",
            _MACHINE_LADDER,
        )


def _machine_error(text: str) -> str | None:
    if bank := _BANK.search(text):
        return "uncorrected" if int(bank["status"], 16) >> _UC & 1 else "corrected"
    return next((kind for kind, shape in _MACHINE if shape.search(text)), None)


_MACHINE_LADDER = (
    Step(
        Action.LOOK,
        "`journalctl -k -b | grep -E 'mce:|EDAC|Hardware Error'`; the BMC's event log names the "
        "faulty part: "
        "`ipmitool sel elist | tail`",
    ),
    STOP,
    REBOOT_IT,
    Step(
        Action.SERVICE, "if the error comes back: have this DIMM, this CPU or its cooling inspected"
    ),
)


def _place(text: str) -> str:
    """Return a PCI address in the form that sysfs uses, or any other text unchanged."""
    return sysfs_bus_id(text) if text.count(":") == 2 else text  # domain:bus:device


def _log(node: Reading) -> Log:
    lines = node.known("kernel_log", "lines")
    if lines is None:
        raise CannotTell("the kernel log could not be read: see the check xid")
    return Log([(float(seconds), str(text)) for seconds, text in lines])


WITHOUT_DRIVER: dict[str, Callable[[Reading], Iterator[Problem]]] = {
    "pcie-errors": pcie_errors,
    "gpu-start": gpu_start,
    "machine-check": machine_check,
}
