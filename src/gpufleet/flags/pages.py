"""Format verdicts and differences of releases for a terminal.  Pure."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from gpufleet.flags.check import Verdict
from gpufleet.flags.from_settings import ServerFlags
from gpufleet.flags.problem import JudgedBy, Problem
from gpufleet.flags.schema import TITLES

if TYPE_CHECKING:
    # The import of `release_diff` loads the settings, which takes longer than a verdict.
    from gpufleet.flags.release_diff import Difference, Overview

_INDENT = "        "
_LONGEST = 200  # maximum characters of an argument that are shown; JSON can be very long

_QUOTED = re.compile(f"`([^`]{{{_LONGEST + 1},}})`")

_REFUSED_BY = {
    JudgedBy.PARSER: "the parser refuses it",
    JudgedBy.START: "the server ends while it starts",
    JudgedBy.ADVICE: "the server starts, but may not do what the flag asks for",
}


def verdict_page(verdict: Verdict, width: int) -> str:
    """Format a verdict for an operator, `width` characters wide."""
    refused = [problem for problem in verdict.problems if problem.refuses]
    remarks = [problem for problem in verdict.problems if not problem.refuses]
    blocks = ["\n".join(_lines(problem, width)) for problem in (*refused, *remarks)]
    release = f"{TITLES[verdict.engine]} {verdict.version}"
    if refused:
        last = f"refused: {_counted(len(refused), 'problem')} with {release}"
    else:
        last = f"accepted by {release}"
    if remarks:
        last += f", {_counted(len(remarks), 'remark')}"
    if verdict.rewritten is not None:
        written = shlex.join(("vllm", "serve", *verdict.rewritten))
        blocks.append(f"The command line without the refused parts:\n{_INDENT}{written}")
    return "\n\n".join([*blocks, last])


def _lines(problem: Problem, width: int) -> Iterator[str]:
    argument = problem.argument
    if len(argument) > _LONGEST:
        argument = argument[:_LONGEST] + " ..."
    yield f"{problem.severity.value:7} {argument}"
    sentence = _QUOTED.sub(lambda match: f"`{match[1][:_LONGEST]} ...`", problem.found)
    if problem.since:
        sentence += f" (since {problem.since})"
    yield from _wrapped(sentence + ".", width)
    if problem.refuses and problem.by is not JudgedBy.PARSER:
        yield from _wrapped(_REFUSED_BY[problem.by] + ".", width)
    if problem.replacement:
        yield from _wrapped(f"instead: {problem.replacement}", width)
    if problem.rewritten:
        yield f"{_INDENT}write: {shlex.join(problem.rewritten)}"
    elif problem.rewritten is not None:
        yield f"{_INDENT}leave it out"


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(
        text,
        width,
        initial_indent=_INDENT,
        subsequent_indent=_INDENT,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _counted(number: int, what: str) -> str:
    return f"{number} {what}" + ("s" if number != 1 else "")


def diff_page(
    yours: ServerFlags, found: Iterable[Difference], whole: tuple[str, ...] | None, width: int
) -> str:
    """Format the changes for one server. `whole` is the corrected command line, or None."""
    from gpufleet.flags.release_diff import DifferenceKind

    titles = {
        DifferenceKind.REMOVED: "Removed",
        DifferenceKind.RENAMED: "Renamed",
        DifferenceKind.VALUE: "No longer accepted",
        DifferenceKind.MEANING: "Changed meaning",
        DifferenceKind.DEPRECATED: "Deprecated",
        DifferenceKind.DEFAULT: "New default of a flag or variable that you do not set",
        DifferenceKind.HIDDEN: "Accepted, but no longer in vLLM's help",
        DifferenceKind.NEW: "New, and useful to you",
    }
    differences = list(found)
    blocks = [f"{yours.where}:"] if yours.where else []
    for sort in DifferenceKind:
        lines = [
            line for one in differences if one.kind is sort for line in _difference(one, width)
        ]
        if lines:
            blocks.append("\n".join([titles[sort], *lines]))
    broken = [one for one in differences if one.breaks]
    if not differences:
        blocks.append("Nothing changes for these settings.")
    elif broken and whole is not None:
        but = ", without the steps after `then`" if any(one.then for one in broken) else ""
        blocks.append(f"Corrected command line{but}:\n  vllm serve {shlex.join(whole)}")
    elif undecided := [one.name for one in broken if one.rewritten is None]:
        blocks.append(
            _fill(
                (f"gpufleet cannot correct these, so you must decide: {', '.join(undecided)}"),
                width,
                "",
                "  ",
            )
        )
    elif broken:
        said = (
            "vLLM still refuses the command line with these replacements. Run `gpufleet flags "
            "check` to see the reasons."
        )
        blocks.append(_fill(said, width))
    return "\n\n".join(blocks)


def overview_page(old: str, new: str, found: Overview, width: int) -> str:
    """Format the counts of changes between two releases, and the notable changes."""
    counts = "\n".join(f"  {number:5}  {what}" for what, number in found.counts.items() if number)
    blocks = [f"vLLM {old} to {new}" + (f"\n{counts}" if counts else ": nothing changes")]
    lines = []
    for change in found.notable:
        about = f" {', '.join(change.values)}" if change.values else ""
        said = f"{change.name}{about}: {change.kind}, since {change.since}: {change.why}"
        if change.when:
            said += f" (if {change.when})"
        if change.replacement:
            said += f"; instead: {change.replacement}"
        lines.append(_fill(said, width, "  ", "      "))
    if lines:
        blocks.append("\n".join(["Worth knowing", *lines]))
    blocks.append(
        _fill(
            (
                "To see which of these changes affect your server, write its flags after `--`, or "
                "use --settings."
            ),
            width,
        )
    )
    return "\n\n".join(blocks)


def _difference(one: Difference, width: int) -> Iterator[str]:
    mark = "! " if one.breaks else "  "
    since = f" (since {one.since})" if one.since else ""
    yield _fill(f"{mark}{one.argument or one.name}{since}", width, "", "      ")
    said = f"{one.said} (only if {one.when})" if one.when else one.said
    yield _fill(said, width, "      ", "      ")
    if one.rewritten:
        yield _fill(f"→ {shlex.join(one.rewritten)}", width, "      ", "        ")
    elif one.rewritten == () and one.breaks:
        yield "      → leave it out"
    if one.replacement and not one.rewritten:
        yield _fill(f"instead: {one.replacement}", width, "      ", "        ")
    if one.then:
        yield _fill(f"then: {one.then}", width, "      ", "        ")
    if one.keep:
        kept = shlex.join(one.keep)
        yield _fill(f"to keep the old default: {kept}", width, "      ", "        ")


def _fill(text: str, width: int, first: str = "", rest: str = "") -> str:
    return textwrap.fill(
        text,
        width,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
        break_long_words=False,
    )
