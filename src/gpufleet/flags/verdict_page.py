"""A verdict as text for a terminal.  Pure."""

from __future__ import annotations

import shlex
import textwrap
from collections.abc import Iterator

from gpufleet.flags.check import Verdict
from gpufleet.flags.problem import By, Problem

_INDENT = "        "
_LONGEST = 200  # characters of an argument; JSON can be as long as it likes

_REFUSED_BY = {
    By.PARSER: "the parser refuses it",
    By.START: "vLLM ends while it starts",
    By.ADVICE: "vLLM starts, and it does not do what it says",
}


def page(verdict: Verdict, width: int) -> str:
    """Return what an operator reads of a verdict, `width` characters wide."""
    refused = [problem for problem in verdict.problems if problem.refuses]
    remarks = [problem for problem in verdict.problems if not problem.refuses]
    blocks = ["\n".join(_lines(problem, width)) for problem in (*refused, *remarks)]
    if refused:
        last = f"refused: {_counted(len(refused), 'problem')} with vLLM {verdict.version}"
    else:
        last = f"accepted by vLLM {verdict.version}"
    if remarks:
        last += f", {_counted(len(remarks), 'remark')}"
    if verdict.rewritten is not None:
        written = shlex.join(("vllm", "serve", *verdict.rewritten))
        blocks.append(f"without what is refused:\n{_INDENT}{written}")
    return "\n\n".join([*blocks, last])


def _lines(problem: Problem, width: int) -> Iterator[str]:
    argument = problem.argument
    if len(argument) > _LONGEST:
        argument = argument[:_LONGEST] + " ..."
    yield f"{problem.severity.value:7} {argument}"
    sentence = problem.found
    if problem.since:
        sentence += f" (since {problem.since})"
    yield from _wrapped(sentence + ".", width)
    if problem.refuses and problem.by is not By.PARSER:
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
