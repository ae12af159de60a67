"""
Check the kernel log since boot: Xid errors of GPUs, SXid errors of NVSwitches. Pure.

A log shows what happened in the past, and NVML shows the present state. Therefore four rules apply
(docs/checks/xid.md):

1. An Xid is history (`INFO`) if it came before the driver was last loaded, or before the driver
withdrew its recovery request for that GPU (Xid 154 "to 0x0 (None)"). 2. An Xid about uncorrectable
memory came before the last reset (`WARN`) if the GPU has counted no such error since then, and the
driver requests no action. Both conditions are needed: counters have been seen at zero on a GPU that
still waited for its reset. 3. Of several Xids 154, the newest counts. NVML's current answer takes
precedence over it. 4. A log that does not reach back to the boot cannot prove that there were no
errors: `WARN`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Any

from gpufleet.checks.finding import Action, Problem, Severity, Step
from gpufleet.checks.probe_facts import (
    CannotTell,
    DoesNotApply,
    GpuReading,
    Reading,
    Unread,
    gpu_facts,
)
from gpufleet.checks.xid_table import (
    COUNTED_BY_ECC,
    KINDS,
    NVLINK5,
    OF_PROGRAMS,
    RECOVERY,
    UNKNOWN,
    WATCH,
    Kind,
)

FALLEN_OFF = 79
RECOVERY_CHANGED = 154
NVLINK = 74
CONTEXT_SWITCH = 109

# The most lines that the probe keeps (on_node/common/kernel_messages.py). If the probe has fewer
# lines, all dropped lines were repetitions of lines that it has.
KEPT = 2000

# If a program fails, the driver writes a line for each affected part of the GPU within seconds.
# Lines that are less than INCIDENT_APART apart therefore count as one incident. A GPU is considered
# faulty if it has INCIDENTS_MANY incidents in a day, and every other GPU has at most half as many.
# The numbers are gpufleet's own. NVIDIA's workflow for Xid 13 runs diagnostics if the Xid comes
# back on the same GPU.
INCIDENT_APART = 60.0  # seconds
INCIDENTS_MANY = 5
DAY = 86400.0  # seconds

# The most lines that the message "The NVIDIA GPU 0000:b3:00.0 ..." takes: it has three lines, and
# one other message of the kernel may come between them.
SENTENCE_LINES = 4

LINE_SHOWN = 160  # characters

_PLACE = r"(?:PCI:)?(?P<bus_id>[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}(?:\.[0-7])?)"
# NVRM: Xid (PCI:0000:01:00 GPU-I:05): 94, pid=7194, Contained: ...
_XID_OF = r"(?:nvidia \S+ )?NVRM:\s+(?:GPU ?\d+:?\s+)?Xid\s*"
_XID = re.compile(rf"{_XID_OF}\({_PLACE}[^)]*\):\s*(?P<number>\d+)\b", re.IGNORECASE)
# The same message with something other than a PCI address as the name of the GPU.
_XID_SOMEWHERE = re.compile(rf"{_XID_OF}\([^)]*\):\s*(?P<number>\d+)\b", re.IGNORECASE)
# All other lines with the word Xid. A lower-case "xid" counts only in lines of the NVIDIA driver,
# because other kernel modules use the word for the numbers of their requests.
_SAYS_XID = re.compile(r"\bXid\b|\bNVRM\b.*\b(?i:Xid)\b")
_SAYS_SXID = re.compile(r"\bSXid\b", re.IGNORECASE)
_SENTENCE = re.compile(rf"NVRM: The NVIDIA GPU {_PLACE}", re.IGNORECASE)
_GPU = re.compile(rf"NVRM: (?:The NVIDIA )?GPU {_PLACE}", re.IGNORECASE)
_FALLEN = re.compile(r"NVRM: .*\bfallen off the bus\b", re.IGNORECASE)
_LOADED = re.compile(r"NVRM: loading NVIDIA ")
_ACTION = re.compile(r"\bto 0x(?P<action>[0-9a-f]+)\b", re.IGNORECASE)
_SXID = re.compile(
    rf"(?:nvidia-nvswitch\d*|NVRM):\s+SXid\s*\({_PLACE}[^)]*\):\s*(?P<number>\d+)\b[\s,:]*"
    r"(?P<said>.*)",
    re.IGNORECASE,
)
_NONFATAL = re.compile(r"\bNon-?fatal\b", re.IGNORECASE)
_FATAL = re.compile(r"\bFatal\b", re.IGNORECASE)

CATALOGUE = "NVIDIA's Xid catalogue, as docs/checks/xid.md has it"
GUIDE = "NVIDIA's fabric manager guide, as docs/checks/sxid.md has it"


@dataclass(frozen=True)
class Xid:
    """
    One line of the log that reports an Xid.

    `at` is the line's position in the log, and `seconds` is the line's time since boot. `bus_id` is
    the GPU's PCI address in the form that sysfs uses (0000:0f:00.0), or None if the line does not
    contain it. `number` is None if it could not be read.
    """

    at: int
    seconds: float
    bus_id: str | None
    number: int | None
    text: str

    @property
    def action(self) -> int | None:
        """
        Return the action that an Xid 154 requests, as NVML's number, or None for any other Xid.
        """
        found = _ACTION.search(self.text) if self.number == RECOVERY_CHANGED else None
        return int(found["action"], 16) if found else None


@dataclass(frozen=True)
class Log:
    """The lines of the kernel log in a probe, oldest first, as (seconds since boot, text)."""

    lines: Sequence[tuple[float, str]]

    @cached_property
    def xids(self) -> tuple[Xid, ...]:
        """Return every line that reports an Xid, in any known wording."""
        return tuple(xid for xid in _xids(self.lines) if xid.number is not None)

    @cached_property
    def unread(self) -> tuple[Xid, ...]:
        """Return every line that contains the word Xid but cannot be parsed."""
        return tuple(xid for xid in _xids(self.lines) if xid.number is None)

    @cached_property
    def loaded_at(self) -> int:
        """Return the position in the log at which the driver was last loaded, or -1."""
        return max(
            (at for at, (_, text) in enumerate(self.lines) if _LOADED.match(text)), default=-1
        )

    @cached_property
    def recovered_at(self) -> dict[str | None, int]:
        """
        Return, for each GPU, the position in the log at which the driver last withdrew its recovery
        request.
        """
        return {xid.bus_id: xid.at for xid in self.xids if xid.action == 0}

    def is_history(self, xid: Xid) -> bool:
        """
        Return whether the driver was loaded, or withdrew its recovery request for the GPU, after
        the Xid.
        """
        return xid.at < max(self.loaded_at, self.recovered_at.get(xid.bus_id, -1))


def sysfs_bus_id(text: str) -> str:
    """
    Return a PCI address in the form that sysfs uses. The address may have a domain of any width.

    >>> sysfs_bus_id("0000000F:0A:00")
    '000f:0a:00.0'
    """
    domain, bus, device = text.lower().split(":")
    device, _, function = device.partition(".")
    return f"{int(domain, 16):04x}:{bus}:{device}.{function or 0}"


def _xids(lines: Iterable[tuple[float, str]]) -> Iterator[Xid]:
    named: str | None = None
    named_at = -SENTENCE_LINES
    for at, (seconds, text) in enumerate(lines):
        if begun := _SENTENCE.match(text):
            named, named_at = begun["bus_id"], at
        if found := _XID.match(text):
            yield Xid(at, seconds, sysfs_bus_id(found["bus_id"]), int(found["number"]), text)
        elif found := _XID_SOMEWHERE.match(text):
            yield Xid(at, seconds, None, int(found["number"]), text)
        elif _FALLEN.match(text):
            own = _GPU.match(text)
            before = named if at - named_at < SENTENCE_LINES else None
            place = own["bus_id"] if own else before
            yield Xid(at, seconds, place and sysfs_bus_id(place), FALLEN_OFF, text)
        elif _SAYS_XID.search(text):
            yield Xid(at, seconds, None, None, text)


def xid(node: Reading) -> Iterator[Problem]:
    """
    Yield a problem for each GPU and Xid number that the driver reported since this boot.

    No line that contains the word Xid is skipped. A line that cannot be parsed is a warning.
    """
    log = Log([(float(seconds), str(text)) for seconds, text in node.get("kernel_log", "lines")])
    yield from _gap(node)
    by_kind = sorted(log.xids, key=lambda one: (one.bus_id or "", one.number or 0, one.at))
    for (bus_id, number), group in groupby(by_kind, key=lambda one: (one.bus_id, one.number or 0)):
        yield _problem(node, log, bus_id, number, tuple(group))
    if log.unread:
        yield Problem(
            Severity.WARN,
            f"an Xid message cannot be parsed: {_times(node, log.unread)}: "
            f"{_short(log.unread[-1].text)}",
            "only lines of a known format",
            "docs/checks/xid.md",
            (Step(Action.LOOK, "look up the number in NVIDIA's Xid catalogue"),),
        )


def _problem(
    node: Reading, log: Log, bus_id: str | None, number: int, reported: tuple[Xid, ...]
) -> Problem:
    index = _index(node, bus_id)
    gpu = next((one for one in node.gpus if one.index == index), None)
    fresh = tuple(one for one in reported if not log.is_history(one))
    severity, ladder, remark = _judged(node, gpu, number, fresh)
    kind = KINDS.get(number, UNKNOWN)
    if number in OF_PROGRAMS and (times := _on_this_gpu_alone(node, log, bus_id, number)):
        severity, ladder = Severity.WARN, WATCH
        remark = (
            f", {times} times within a day, but less often on other GPUs: the GPU may be the cause"
        )
    found = f"Xid {number}, {kind.meaning}: {_times(node, reported)}{remark}"
    if index is None:
        found = f"GPU {bus_id or 'without an address'}, which NVML does not list: {found}"
    return Problem(
        severity,
        f"{found}: {_short(reported[-1].text)}",
        "no Xid that requires more than a restart of the program",
        f"{CATALOGUE}: {kind.action}" if kind.action else CATALOGUE,
        tuple(Step(action, _step(action, bus_id)) for action in ladder),
        index,
    )


def _on_this_gpu_alone(node: Reading, log: Log, bus_id: str | None, number: int) -> int:
    """
    Return how often the Xid occurred on this GPU within the last day, if it is frequent there and
    rare on other GPUs. Otherwise return 0.
    """
    if len(node.document["gpus"]) < 2 or bus_id is None:
        return 0
    last = max((seconds for seconds, _ in log.lines), default=0.0)
    latest: dict[str | None, float] = {}
    times: Counter[str | None] = Counter()
    for one in log.xids:
        if one.number != number or one.seconds < last - DAY or log.is_history(one):
            continue
        if one.seconds - latest.get(one.bus_id, -INCIDENT_APART) >= INCIDENT_APART:
            times[one.bus_id] += 1
        latest[one.bus_id] = one.seconds
    mine = times.pop(bus_id, 0)
    return mine if mine >= INCIDENTS_MANY and 2 * max(times.values(), default=0) <= mine else 0


def _judged(
    node: Reading, gpu: GpuReading | None, number: int, fresh: tuple[Xid, ...]
) -> tuple[Severity, tuple[Action, ...], str]:
    """
    Return the current severity of an Xid, its remedy, and why the severity differs from the usual
    one.
    """
    kind: Kind = KINDS.get(number, UNKNOWN)
    severity, ladder = kind.severity, kind.ladder
    if not fresh:
        return (
            Severity.INFO,
            (),
            ", which happened before the driver was loaded or the GPU recovered",
        )
    if number == RECOVERY_CHANGED:
        return _of_recovery(gpu, fresh[-1])
    if number == NVLINK and not _talks_over_nvlink(node):
        return Severity.WARN, ladder, ", but no replica on this node uses NVLink between GPUs"
    if number == CONTEXT_SWITCH and len(fresh) > 1:
        return Severity.BLOCK, ladder, ", repeatedly"
    if number in NVLINK5 and all(_NONFATAL.search(one.text) for one in fresh):
        return Severity.WARN, ladder, ", not fatal"
    if number in COUNTED_BY_ECC and gpu is not None and _reset_since(gpu):
        return (
            Severity.WARN,
            (Action.LOOK,),
            ", which happened before the GPU's last reset: since then, the GPU has counted no "
            "uncorrectable error, and the driver requests no action",
        )
    return severity, ladder, ""


def _of_recovery(gpu: GpuReading | None, last: Xid) -> tuple[Severity, tuple[Action, ...], str]:
    """
    Return the current severity, remedy and remark of Xid 154, with which the driver requests an
    action.

    NVML's field 230 (R570 and newer) may show that the driver has withdrawn the request.
    """
    words, ladder = RECOVERY.get(last.action if last.action is not None else -1, ("", None))
    if last.action == 0:
        return Severity.INFO, (), ", to none"
    if gpu is not None and gpu.known("recovery_action") == 0:
        return Severity.WARN, (Action.LOOK,), ", but NVML now requests no action"
    asked = f", the driver requests {words}" if words else ", to an unknown action"
    return Severity.BLOCK, KINDS[RECOVERY_CHANGED].ladder if ladder is None else ladder, asked


def _reset_since(gpu: GpuReading) -> bool:
    """
    Return whether the GPU, which had an uncorrectable memory error, has been reset since then.
    """
    asked = gpu.known("recovery_action")
    counted = gpu.known("ecc_uncorrected_volatile") if gpu.known("ecc_mode", "current") else None
    return (asked, counted) == (0, 0)


def _talks_over_nvlink(node: Reading) -> bool:
    """Return whether a replica of the node uses, or may use, several GPUs that have NVLink."""
    models = node.settings.serving.values()
    if models and all(model.tensor_parallel == 1 for model in models):
        return False
    return not node.gpus or sum(map(_may_have_nvlink, node.gpus)) > 1


def _may_have_nvlink(gpu: GpuReading) -> bool:
    try:
        return int(gpu.section("nvlink", "count")) > 0
    except DoesNotApply:
        return False
    except (CannotTell, Unread):
        return True


def _index(node: Reading, bus_id: str | None) -> int | None:
    """
    Return NVML's index of the GPU at a PCI address, or None. A silent GPU is found if it is the
    only one.
    """
    if bus_id is None:
        return None
    places = {sysfs_bus_id(at): gpu.index for gpu, at in gpu_facts(node.gpus, "pci", "bus_id")}
    if bus_id in places:
        return places[bus_id]
    on_bus = {sysfs_bus_id(one["bus_id"]) for one in _functions(node, "0x03")}
    if on_bus - set(places) == {bus_id} and len(node.silent_gpus) == 1:
        return node.silent_gpus[0].index
    return None


def _functions(node: Reading, prefix: str) -> list[Any]:
    """
    Return NVIDIA's PCI functions whose class has this prefix, or [] if the bus could not be read.
    """
    every = node.known("pci", default=[])
    return [one for one in every if str(one["class"]).startswith(prefix)]


def _gap(node: Reading) -> Iterator[Problem]:
    log = node.get("kernel_log")
    cut = log["dropped"] > 0 and len(log["lines"]) >= KEPT
    if log["complete"] and not cut:
        return
    uptime = node.known("system", "uptime_seconds")
    since = f" {_span(uptime)} ago" if uptime else ""
    found = f"the kernel log ({log['source']}) no longer reaches back to the boot{since}"
    if log["complete"]:
        found = f"{log['dropped']} older lines about GPUs are missing from the probe's answer"
    yield Problem(
        Severity.WARN,
        f"{found}: the check cannot see errors before the log's first line",
        "the whole log since the boot",
        "the probe",
        (
            Step(
                Action.CONFIGURE,
                "keep the journal on disk: mkdir -p /var/log/journal, systemctl restart "
                "systemd-journald; the journal is complete after the next boot",
            ),
            Step(Action.LOOK, "until then: journalctl -k -b | grep -E 'NVRM: Xid|SXid'"),
        ),
    )


def _times(node: Reading, reported: Sequence[Any]) -> str:
    lines = "1 line" if len(reported) == 1 else f"{len(reported)} lines, the last"
    uptime = node.known("system", "uptime_seconds")
    if uptime is None:
        return f"{lines} {_span(reported[-1].seconds)} after boot"
    return f"{lines} {_span(max(0.0, uptime - reported[-1].seconds))} ago"


def _span(seconds: float) -> str:
    for size, unit in ((86400, "days"), (3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def _short(text: str) -> str:
    return text if len(text) <= LINE_SHOWN else text[: LINE_SHOWN - 3] + "..."


def _step(action: Action, place: str | None) -> str:
    """Return the command for one step of the remedy."""
    return {
        Action.LOOK: "journalctl -k -b | grep -E 'NVRM: Xid', and the journal of the programs "
        "that ran then; if the Xid comes back, also with other programs, do the next steps of "
        "the page docs/checks/xid.md",
        Action.DRAIN: "let requests finish, then stop what uses the GPU: systemctl stop 'vllm-*'",
        Action.RESTART_SERVICE: "restart the stage that ran on the GPU: systemctl restart its "
        "vllm-* unit",
        Action.RESET_GPU: "systemctl stop 'vllm-*' nvidia-dcgm nvidia-persistenced; nvidia-smi "
        f"--gpu-reset -i {place or 'BUS_ID'}; start them again",
        Action.REBOOT: "systemctl reboot; then gpufleet check",
        Action.POWER_CYCLE: "power-cycle it: ipmitool chassis power cycle",
        Action.SERVICE: "nvidia-bug-report.sh, and call the vendor with the GPU's serial number",
    }.get(action, "")


# --- NVSwitches


@dataclass(frozen=True)
class Sxid:
    """
    One line of the log that reports an SXid of the NVSwitch at `bus_id`.

    `fatal` is None if the line does not state it. `bus_id` and `number` are None if they could not
    be read.
    """

    at: int
    seconds: float
    bus_id: str | None
    number: int | None
    fatal: bool | None
    text: str


def _sxids(lines: Iterable[tuple[float, str]]) -> Iterator[Sxid]:
    for at, (seconds, text) in enumerate(lines):
        if found := _SXID.match(text):
            said = found["said"]
            fatal = False if _NONFATAL.match(said) else True if _FATAL.match(said) else None
            bus_id = sysfs_bus_id(found["bus_id"])
            yield Sxid(at, seconds, bus_id, int(found["number"]), fatal, text)
        elif _SAYS_SXID.search(text):
            fatal = False if _NONFATAL.search(text) else True if _FATAL.search(text) else None
            yield Sxid(at, seconds, None, None, fatal, text)


def sxid(node: Reading) -> Iterator[Problem]:
    """
    Yield a problem for each NVSwitch and SXid number that was reported since this boot.

    A fatal SXid is `block`, because the switch has stopped the traffic of at least one GPU. Most
    errors have several lines, and the lines with the error's registers do not repeat "fatal" or
    "non-fatal". If no line of an error contains one of these words, the error counts as fatal.

    No line is skipped. A line that cannot be parsed is a warning, or `block` if it contains "fatal"
    but not "non-fatal".
    """
    raw = node.known("kernel_log", "lines", default=[])
    found = list(_sxids((float(seconds), str(text)) for seconds, text in raw))
    if not found and not _switches_on_pci(node):
        raise DoesNotApply("no NVSwitch is on this node's PCI bus")
    yield from _gap(node)
    log = Log([(float(seconds), str(text)) for seconds, text in raw])
    read = [(one.bus_id or "", one.number, one) for one in found if one.number is not None]
    read.sort(key=lambda row: (row[0], row[1], row[2].at))
    for (bus_id, number), group in groupby(read, key=lambda row: row[:2]):
        yield _of_switch(node, log, bus_id, number, tuple(one for *_, one in group))
    for fatal in (True, False):
        unread = [one for one in found if one.number is None and bool(one.fatal) == fatal]
        if unread:
            yield _unread_sxid(node, log, unread, fatal)


def _unread_sxid(node: Reading, log: Log, reported: Sequence[Sxid], fatal: bool) -> Problem:
    history = reported[-1].at < log.loaded_at
    severity = Severity.BLOCK if fatal else Severity.WARN
    which = "a fatal SXid" if fatal else "an SXid"
    return Problem(
        Severity.INFO if history else severity,
        f"a message about {which} cannot be parsed: {_times(node, reported)}"
        f"{', before the driver was last loaded' if history else ''}: {_short(reported[-1].text)}",
        "only lines of a known format",
        "docs/checks/sxid.md",
        _SWITCH_LADDER if fatal and not history else _SWITCH_LOOK,
    )


def _of_switch(
    node: Reading, log: Log, bus_id: str, number: int, reported: tuple[Sxid, ...]
) -> Problem:
    fresh = [one for one in reported if one.at > log.loaded_at]
    words = {one.fatal for one in fresh} - {None}
    told = next((one for one in reversed(reported) if one.fatal is not None), reported[0])
    if not fresh:
        severity, how = Severity.INFO, "before the driver was last loaded"
    elif words == {False}:
        severity, how = Severity.WARN, "not fatal"
    else:
        severity, how = Severity.BLOCK, "fatal" if words else "which is not known to be harmless"
    return Problem(
        severity,
        f"NVSwitch {bus_id}: SXid {number}, {how}: {_times(node, reported)}: {_short(told.text)}",
        "none",
        GUIDE,
        _SWITCH_LADDER if severity is Severity.BLOCK else _SWITCH_LOOK,
    )


_SWITCH_LOOK = (
    Step(Action.LOOK, "check whether the error comes back: journalctl -k -b | grep SXid"),
    Step(Action.LOOK, "check the links: nvidia-smi nvlink -s, nvidia-smi nvlink -e"),
)
_SWITCH_LADDER = (
    Step(
        Action.DRAIN, "let requests finish, then stop what uses the GPUs: systemctl stop 'vllm-*'"
    ),
    Step(
        Action.RESET_GPU,
        "reset all GPUs and NVSwitches together: systemctl stop nvidia-fabricmanager nvidia-dcgm "
        "nvidia-persistenced; nvidia-smi --gpu-reset; start them again",
    ),
    Step(Action.REBOOT, "systemctl reboot; then gpufleet check"),
    Step(
        Action.SERVICE, "nvidia-bug-report.sh, and call the vendor, because the board may be faulty"
    ),
)


def _switches_on_pci(node: Reading) -> bool:
    """Return whether the node has, or may have, NVSwitches as PCI functions (before NVLink 5)."""
    if node.known("pci") is not None:
        return bool(_functions(node, "0x0680"))
    return any(node.known("nvlink", gpu.at, "switch_links", default=0) for gpu in node.gpus)


WITHOUT_DRIVER: dict[str, Callable[[Reading], Iterator[Problem]]] = {"xid": xid, "sxid": sxid}
