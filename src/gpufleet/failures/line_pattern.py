"""
Match log lines with patterns that take a limited time, even for hostile text. Pure.

A pattern is plain text, or a regular expression between slashes: `/Xid \\(.{1,40}\\): 79,/`. A
regular expression must meet three conditions. All repeats have an upper limit. It has no
alternatives at its top level. It contains plain text that is in every match, so that lines without
this text can be skipped.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

SHORTEST_NEEDLE = 4
"""The fewest plain characters that a pattern must contain."""

MOST_STEPS = 20_000
"""
The most ways in which a pattern may divide a text from one position. With this number (gpufleet's
own), the worst line of 4,000 characters takes less than a second.
"""

_SINGLE = 16
"""
A repeat with at most this upper limit counts as one way. Such repeats are used for digits and
spaces, which end by themselves.
"""

_COUNTED = re.compile(r"\{(\d*)(?:,(\d*))?\}")


@dataclass(frozen=True, slots=True)
class LinePattern:
    """
    One pattern: the plain text that a line must contain, and the regular expression. If the
    expression is None, only the plain text decides.
    """

    needle: str
    expression: re.Pattern[str] | None
    written: str

    def matches(self, text: str) -> bool:
        """Return whether the text of a line matches the pattern."""
        if self.needle not in text:
            return False
        return self.expression is None or self.expression.search(text) is not None


def parse(written: str) -> LinePattern:
    """Parse the pattern of a rule. Raises `ValueError` if the pattern is invalid."""
    if not (len(written) > 1 and written.startswith("/") and written.endswith("/")):
        if len(written) < SHORTEST_NEEDLE:
            raise ValueError(f"{written!r} is shorter than {SHORTEST_NEEDLE} characters")
        return LinePattern(written, None, written)
    text = written[1:-1]
    try:
        expression = re.compile(text)
    except re.error as error:
        raise ValueError(f"{written} is not a regular expression: {error}") from None
    if (steps := _steps(text)) > MOST_STEPS:
        raise ValueError(
            f"{written} may match a line in {steps} ways, more than {MOST_STEPS}: use smaller "
            "bounds"
        )
    needle = max(_plain_runs(text), key=len, default="")
    if len(needle) < SHORTEST_NEEDLE:
        raise ValueError(
            f"{written} has no plain text of {SHORTEST_NEEDLE} characters that every match has"
        )
    return LinePattern(needle, expression, written)


def _steps(text: str) -> int:
    """
    Return the number of ways in which the repeats of an expression may divide a text.

    Raises `ValueError` if a repeat has no upper limit, or if a group is repeated.
    """
    steps, at, in_class = 1, 0, False
    while at < len(text):
        character = text[at]
        if character == "\\":
            at += 2
            continue
        if in_class:
            in_class = character != "]"
        elif character == "[":
            in_class = True
            at += text[at + 1 : at + 2] in {"]", "^"}
        elif character in "*+":
            raise ValueError(
                f"/{text}/ has `{character}`, a repeat without a bound: write {{1,40}}"
            )
        elif character == "{" and (found := _COUNTED.match(text, at)):
            if found[2] == "":
                raise ValueError(f"/{text}/ has `{found[0]}`, a repeat without a bound")
            if text[at - 1] == ")" and text[at - 2 : at - 1] != "\\":
                raise ValueError(f"/{text}/ repeats a group: write it out, or use a class")
            most = int(found[2] or found[1])
            steps *= most if most > _SINGLE else 1
        at += 1
    return steps


def _plain_runs(text: str) -> list[str]:
    """Return the plain texts outside groups that are in every match of an expression."""
    if re.search(r"(?<!\\)\|", _without_groups(text)):
        raise ValueError(f"/{text}/ has alternatives at its top level: write two patterns")
    runs, run, at = [], "", 0
    text = _without_groups(text)
    while at < len(text):
        width = 2 if text[at] == "\\" else 1
        piece = text[at : at + width]
        plain = piece[1] if width == 2 and not piece[1].isalnum() else piece if width == 1 else ""
        if width == 1 and piece in ".^$[]{}()?*+\0":
            plain = ""
        after = text[at + width : at + width + 1]
        optional = after in {"?", "*"} or (after == "{" and _COUNTED.match(text, at + width))
        if plain and not optional:
            run += plain
        else:
            runs.append(run)
            run = ""
        at += width
        if counted := _COUNTED.match(text, at):
            at = counted.end()
            runs.append(run)
            run = ""
    return [*runs, run]


def _without_groups(text: str) -> str:
    """Return the expression with each group and each character class replaced with one NUL."""
    kept, depth, in_class, at = "", 0, False, 0
    while at < len(text):
        width = 2 if text[at] == "\\" else 1
        piece = text[at : at + width]
        at += width
        if in_class:
            in_class = piece != "]"
        elif piece == "[":
            in_class = True
            kept += "\0" * (depth == 0)
            at += text[at : at + 1] in {"]", "^"}
        elif piece == "(":
            depth += 1
        elif piece == ")":
            depth -= 1
            kept += "\0" * (depth == 0)
        elif depth == 0:
            kept += piece
    return kept
