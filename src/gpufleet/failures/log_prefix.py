"""
Split a log line into its prefix (time, process, level) and its message. Pure.

A line may have several prefixes, which are removed from left to right: those of kubectl and Docker,
the journal, the kernel, Ray, several releases of vLLM, SGLang and PyTorch. A prefix in an unknown
format remains a part of the message.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

LONGEST_PROCESS = 80
"""The most characters of a process' name."""

LAYERS = 8
"""
The most prefixes of one line: the pod and the time from kubectl, the process from Ray, the time
from vLLM, and so on.
"""

_RANK = r"(?:ATTN_CP|MOE_DP|DP|EP|PP|TP)\d{1,5}"
RANKS = rf"{_RANK}(?: {_RANK}){{0,5}}"
"""The ranks of a scheduler in SGLang's prefix (SGLang 0.5.23 srt/managers/scheduler.py)."""


@dataclass(frozen=True, slots=True)
class Stamp:
    """
    The time of a log line. `offset` is its time zone in minutes, or None if the line has no time
    zone.
    """

    moment: datetime
    """
    The time without a time zone. If the line has no year, the year is 1900, which `stamp_utc`
    replaces.
    """
    offset: int | None = None

    @property
    def has_year(self) -> bool:
        """Return whether the line contains a year."""
        return self.moment.year != _NO_YEAR


@dataclass(frozen=True, slots=True)
class Prefix:
    """The parts of a log line's prefix, and the message in `text`."""

    text: str
    stamp: Stamp | None = None
    process: str = ""
    level: str = ""


_NO_YEAR = 1900
_MONTHS = {
    name: number
    for number, name in enumerate(
        ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"), 1
    )
}
_MONTH = "|".join(_MONTHS)
_CLOCK = r"(?P<h>\d\d):(?P<m>\d\d):(?P<s>\d\d)(?:[.,](?P<f>\d{1,9}))?"
_COLOUR = re.compile(r"\x1b\[[0-9;]{0,20}[A-Za-z]")

# The formats of prefixes. Each comment has the program that writes the format:
_FORMATS = tuple(
    re.compile(each)
    for each in (
        # A scheduler of SGLang: `[2026-11-29 11:49:34 DP0 TP1] `, with the parallel sizes above 1.
        rf"\[(?P<year>\d{{4}})-(?P<mon>\d\d)-(?P<day>\d\d) {_CLOCK}"
        rf" (?P<process>{RANKS})\] ",
        # RFC 3339: `docker logs -t`, `kubectl logs --timestamps`, CRI; the journal's short-iso and
        # short-iso-precise; dmesg --time-format iso; logs with a year.
        rf"\[?(?P<year>\d{{4}})-(?P<mon>\d\d)-(?P<day>\d\d)[T ]{_CLOCK}"
        r"(?P<zone>Z|[+-]\d\d:?\d\d)?\]?(?: (?:stdout|stderr) [FP])?(?: |$)",
        # The journal's short-full.
        r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) (?P<year>\d{4})-(?P<mon>\d\d)-(?P<day>\d\d) "
        rf"{_CLOCK} (?P<zone>UTC|[A-Z]{{3,5}}|[+-]\d\d) ",
        # The journal's short and short-precise, syslog.
        rf"(?P<month>{_MONTH}) {{1,2}}(?P<day>\d{{1,2}}) {_CLOCK} ",
        # journalctl after its time: host, unit and process number; of the kernel without one.
        r"(?P<host>[\w.:-]{1,64}) (?P<ident>[\w@./:\\-]{1,80})(?:\[\d{1,9}\]|(?<=kernel)): ",
        # kubectl logs --prefix.
        r"\[(?P<pod>pod/[\w.-]{1,120}/[\w.-]{1,80})\] ",
        # docker compose.
        r"(?P<service>[\w.-]{1,60}) {1,20}\| ",
        # dmesg -x, then its seconds since boot, or -T.
        r"(?:kern|user|daemon|syslog) {0,4}:[a-z]{3,6} {0,3}: ",
        r"\[ {0,6}\d{1,9}\.\d{3,6}\] ",
        rf"\[(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) (?P<month>{_MONTH}) {{1,2}}(?P<day>\d{{1,2}}) "
        rf"{_CLOCK} (?P<year>\d{{4}})\] ",
        # Fabric manager.
        rf"\[(?P<month>{_MONTH}) (?P<day>\d\d) (?P<year>\d{{4}}) {_CLOCK}\] "
        r"\[(?P<level>[A-Z]{4,8})\] (?:\[tid \d{1,9}\] )?",
        # vLLM's processes, Ray's workers.
        # 0.9 wrote `(VllmWorker rank=1 pid=5)`, 0.10 `(VllmWorker TP1 pid=5)`.
        r"\((?P<process>[\w.+-]{1,60}(?: (?:rank=\d{1,5}|[TPDEC]P\d{1,5}[\w]{0,20}))?)"
        r" pid=\d{1,9}(?:, ip=(?P<ip>[\w.:]{1,45}))?\)"
        r"(?: \[repeated \d{1,9}x across cluster\])? ?",
        # vLLM: 0.32 `[core.py:93]`, 0.4 `core.py:93]`.
        r"(?P<level>DEBUG|INFO|WARNING|ERROR|CRITICAL) {1,4}"
        rf"(?P<mon>\d\d)-(?P<day>\d\d) {_CLOCK} \[?[\w./-]{{1,120}}:\d{{1,6}}\] ?",
        # uvicorn.
        r"(?P<level>INFO|WARNING|ERROR|CRITICAL): {3,5}",
        # PyTorch: `[rank1]:`, then glog's line.
        r"\[(?P<rank>rank\d{1,6})\]: ?",
        rf"\[?(?P<letter>[IWEF])(?P<mon>\d{{1,2}})(?P<day>\d\d) {_CLOCK} (?:\d{{1,9}} )?"
        r"[\w./-]{1,160}:\d{1,6}\] ?",
    )
)
_NEEDS_TIME = 4
"""
The index of the format that is accepted only after a time, because `host unit[1]: ` could also be a
part of the message.
"""

_LETTERS = {"I": "INFO", "W": "WARNING", "E": "ERROR", "F": "CRITICAL"}
_PRIORITIES = {"0": "CRITICAL", "1": "CRITICAL", "2": "CRITICAL", "3": "ERROR", "4": "WARNING"}


def split_prefix(line: str) -> Prefix:
    """
    Return the prefix of a line and its message. If the line has several times, the first is used.
    """
    if line.startswith("{") and (found := _from_json(line)):
        stamp, process, level, line = found
    else:
        stamp, process, level = None, "", ""
    if "\x1b" in line:
        line = _COLOUR.sub("", line)
    at = 0
    processes = [process] if process else []
    for _ in range(LAYERS):
        for number, pattern in enumerate(_FORMATS):
            if number == _NEEDS_TIME and stamp is None:
                continue
            if match := pattern.match(line, at):
                break
        else:
            break
        at = match.end()
        named = match.groupdict()
        stamp = stamp or _stamp(named)
        level = named.get("level") or _LETTERS.get(named.get("letter") or "", "") or level
        processes += _names(named)
    return Prefix(line[at:], stamp, "/".join(processes)[:LONGEST_PROCESS], level)


def _names(named: Mapping[str, str | None]) -> list[str]:
    if process := named.get("process"):
        return [f"{process}@{named['ip']}" if named.get("ip") else process]
    if host := named.get("host"):
        return [host]
    return [name for key in ("pod", "service", "rank") if (name := named.get(key))]


def _stamp(named: Mapping[str, str | None]) -> Stamp | None:
    if not named.get("day"):
        return None
    month = named.get("mon") or _MONTHS[named.get("month") or "Jan"]
    fraction = (named.get("f") or "0").ljust(6, "0")[:6]
    try:
        moment = datetime(  # noqa: DTZ001  # its zone, if it has one, is `offset`
            int(named.get("year") or _NO_YEAR),
            int(month),
            int(named["day"] or 1),
            int(named["h"] or 0),
            int(named["m"] or 0),
            int(named["s"] or 0),
            int(fraction),
        )
    except ValueError:
        return None
    return Stamp(moment, _offset(named.get("zone")))


def _offset(zone: str | None) -> int | None:
    if not zone:
        return None
    if zone in {"Z", "UTC"}:
        return 0
    if zone.isalpha():  # an abbreviation is ambiguous: several zones have the same one
        return None
    sign = -1 if zone[0] == "-" else 1
    digits = zone[1:].replace(":", "")
    return sign * (int(digits[:2]) * 60 + int(digits[2:4] or 0))


def _from_json(line: str) -> tuple[Stamp | None, str, str, str] | None:
    """Return the time, process, level and text of a JSON line, or None if its form is unknown."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(entry, dict):
        return None
    if isinstance(entry.get("log"), str):
        # Docker's json-file.
        inner = split_prefix(f"{entry.get('time', '')} ")
        return inner.stamp, "", "", entry["log"].rstrip("\n")
    if isinstance(entry.get("message"), str) and "node" in entry:
        # `gpufleet logs --json`: serving/logs.py.
        inner = split_prefix(f"{entry.get('time', '')} ")
        rank = "" if entry.get("rank") is None else f"/rank{entry['rank']}"
        return inner.stamp, f"{entry['node']}{rank}", "", entry["message"]
    message = entry.get("MESSAGE")
    if isinstance(message, list):
        message = _from_bytes(message)
    if isinstance(message, str):
        # `journalctl -o json`.
        level = _PRIORITIES.get(str(entry.get("PRIORITY")), "")
        # systemd gives all lines that a service prints the same priority, so it has no meaning.
        level = "" if entry.get("_TRANSPORT") == "stdout" else level
        return (
            _realtime(entry.get("__REALTIME_TIMESTAMP")),
            str(entry.get("_HOSTNAME", "")),
            level,
            message.rstrip("\n"),
        )
    return None


def _from_bytes(numbers: list[Any]) -> str | None:
    try:
        return bytes(numbers).decode("utf-8", "replace")
    except (TypeError, ValueError):
        return None


def _realtime(microseconds: Any) -> Stamp | None:
    try:
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(microseconds=int(microseconds))
    except (TypeError, ValueError, OverflowError):
        return None
    return Stamp(moment.replace(tzinfo=None), 0)
