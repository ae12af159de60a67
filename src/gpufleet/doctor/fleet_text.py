"""Format a diagnosis for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from gpufleet.doctor.fleet_diagnosis import Diagnosis, Problem
from gpufleet.formatting import count_of, format_duration
from gpufleet.serving.rank_status import iso


def diagnosis_lines(found: Diagnosis, now: float) -> list[str]:
    """
    Return the lines to print: the problems, the worst first, the parts that could not be read, and
    the replicas that serve.
    """
    lines: list[str] = []
    for number, each in enumerate(found.problems, 1):
        lines += [*_problem(number, each, now), ""]
    lines += [f"unknown: {each}" for each in found.unseen]
    count = len(found.problems)
    lines += [*found.serving, count_of(count, "problem") if count else "no problem found"]
    return lines


def _problem(number: int, each: Problem, now: float) -> Iterator[str]:
    began = ""
    if each.at is not None and iso(each.at):
        began = f" (since {iso(each.at)}, {format_duration(now - each.at)})"
    yield f"{number}. {each.impact.word.upper()}  {each.what}{began}"
    rows = [
        *(("seen", text) for text in each.evidence),
        ("follows", each.because),
        ("cause", each.cause or ("" if each.because or not each.evidence else "not known")),
        ("next", each.do),
        ("page", each.page),
    ]
    for name, text in rows:
        if text:
            first, *rest = text.splitlines() or [""]
            yield f"   {name:<8} {first}"
            yield from (f"   {'':<8} {line}" for line in rest)
