"""Format findings as text for an operator, and as JSON. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import Any

from gpufleet.failures.diagnosis import Finding, Findings, Waiting
from gpufleet.failures.rule_file import Advice
from gpufleet.failures.tallies import Place
from gpufleet.formatting import count_of, format_duration, join_names
from gpufleet.sanitize import printable

SCHEMA = 1
"""The version of `as_json`."""


def text_lines(findings: Findings, now: datetime | None = None) -> Iterator[str]:
    """
    Yield the lines to print, without control characters of terminals.

    `now` is used to compute the age of a line.
    """
    for at, finding in enumerate(findings.causes):
        yield from _cause(finding, "cause" if at == 0 else "also")
    if findings.waiting:
        yield from _wait(findings.waiting, findings, now)
    elif findings.unknown:
        yield "unknown: something failed, but no rule explains it"
        for name, place in (
            ("first error", findings.unknown.first_error),
            ("exception", findings.unknown.exception),
        ):
            if place:
                yield f"  {name}: {_where(place)}"
                yield f"    {_quoted(place)}"
        yield "  searched: " + _read(findings)
        yield "  what to do: read these lines. Run doctor again with the logs of all ranks and"
        yield "    the kernel log (`journalctl -k -o short-iso`), which may have the cause."
        yield "    For a vendor, `gpufleet doctor INVENTORY --bundle FILE` writes an archive"
        yield "    of all evidence"
        yield ""
    if findings.consequences:
        yield "followed:"
        yield from map(_short, findings.consequences)
        yield ""
    if findings.notes:
        yield "also found, not a failure:"
        yield from map(_short, findings.notes)
        yield ""
    if findings.unordered:
        yield "note: one log has no times, so its order relative to the other logs is unknown"
    if findings.healthy:
        yield f"nothing found in {_read(findings)}"


def _wait(waiting: Waiting, findings: Findings, now: datetime | None) -> Iterator[str]:
    if waiting.served:
        what = "the server waits for a worker, which takes long or hangs"
    else:
        what = "the server is still starting or hangs"
    yield f"unknown: {what}; no line has an error"
    age = ""
    if now and waiting.last_at and now >= waiting.last_at:
        age = f", {format_duration((now - waiting.last_at).total_seconds())} old"
    yield f"  last line: {_where(waiting.last, waiting.last_at)}{age}"
    yield f"    {_quoted(waiting.last)}"
    yield "  searched: " + _read(findings)
    yield f"  what to do: read the log again in some minutes. If it has no new line: {waiting.fix}"
    yield ""


def _cause(finding: Finding, label: str) -> Iterator[str]:
    detail = f" ({finding.detail})" if finding.detail else ""
    yield f"{label}: {finding.rule.id}, {finding.rule.component}{detail}"
    yield f"  {_where(finding.first, finding.first_at)}"
    yield f"    {_quoted(finding.first)}"
    if finding.count > 1:
        yield f"  {_repeats(finding)}"
    if len(finding.causes) == 1:
        yield from _advice(finding.causes[0], "  ")
    else:
        yield "  one of these is the cause:"
        for advice, look in zip(finding.causes, finding.looks, strict=True):
            yield f"  - if {look}:"
            yield from _advice(advice, "    ")
    if finding.rule.releases:
        yield f"  releases: {finding.rule.releases}"
    if finding.started_after:
        yield f"  since then: a server started, line {finding.started_after.number}"
    yield ""


def _advice(advice: Advice, indent: str) -> Iterator[str]:
    yield f"{indent}why: {advice.cause}"
    yield f"{indent}what to do: {advice.fix}"
    if advice.command:
        yield f"{indent}command: {advice.command}"
    if advice.setting:
        yield f"{indent}setting: {advice.setting}"


def _where(place: Place, at: datetime | None = None) -> str:
    parts = [f"{place.source}:{place.number}"]
    if at:
        parts.append(f"{at:%Y-%m-%d %H:%M:%S}Z")
    if place.process:
        parts.append(place.process)
    return printable(", ".join(parts))


def _quoted(place: Place) -> str:
    return printable(place.text).replace("\n", "\\n")


def _repeats(finding: Finding) -> str:
    names = [name for name, _ in finding.processes if name]
    last = f"last {_where(finding.last, finding.last_at)}"
    return f"{finding.count} times, {last}" + (
        f"; on {printable(join_names(names))}" if names else ""
    )


def _short(finding: Finding) -> str:
    count = f", {finding.count} times" if finding.count > 1 else ""
    return f"  {finding.rule.id}: {_where(finding.first, finding.first_at)}{count}: " + (
        finding.causes[0].cause if len(finding.causes) == 1 else finding.rule.advice.cause
    )


def _read(findings: Findings) -> str:
    names = [
        f"{printable(name)} ({count_of(lines, 'line')})" for name, lines in findings.lines.items()
    ]
    return join_names(names) or "no lines"


def as_json(findings: Findings) -> dict[str, Any]:
    """Return the findings as values for JSON. Times are in UTC."""
    return {
        "schema": SCHEMA,
        "causes": [_entry(each) for each in findings.causes],
        "consequences": [_entry(each) for each in findings.consequences],
        "notes": [_entry(each) for each in findings.notes],
        "unknown": findings.unknown
        and {
            "first_error": _place(findings.unknown.first_error),
            "exception": _place(findings.unknown.exception),
        },
        "waiting": findings.waiting
        and {
            "last": _place(findings.waiting.last, findings.waiting.last_at),
            "served": findings.waiting.served,
        },
        "read": dict(findings.lines),
        "order_known": not findings.unordered,
    }


def _entry(finding: Finding) -> dict[str, Any]:
    return {
        "rule": finding.rule.id,
        "component": finding.rule.component,
        "detail": finding.detail,
        "count": finding.count,
        "first": _place(finding.first, finding.first_at),
        "last": _place(finding.last, finding.last_at),
        "processes": dict(finding.processes),
        "causes": _advices(finding.causes, finding.looks),
        "source": finding.rule.source,
    }


def _advices(causes: Sequence[Advice], looks: Sequence[str]) -> list[dict[str, str]]:
    return [
        {
            "cause": advice.cause,
            "fix": advice.fix,
            "command": advice.command,
            "setting": advice.setting,
            "look": looks[at] if looks else "",
        }
        for at, advice in enumerate(causes)
    ]


def _place(place: Place | None, at: datetime | None = None) -> dict[str, Any] | None:
    if place is None:
        return None
    return {
        "log": place.source,
        "line": place.number,
        "time": at.isoformat() if at else None,
        "process": place.process,
        "text": place.text,
    }
