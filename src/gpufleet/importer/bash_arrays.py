"""Expand arrays of words in a shell script: `ARGS=(--port 8000)` and `"${ARGS[@]}"`.  Pure."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence

SET = "\0array"
"""The first word of a line that sets an array. The name, `+` or `=`, and the words follow."""

_ASSIGNED = re.compile(
    r"""(?P<before>^|[;&|{]|\b(?:then|do|else)\b)[ \t]*"""
    r"""(?:(?:declare|local|typeset|readonly)(?:[ \t]+-\w+)*[ \t]+)?"""
    r"""(?P<name>[A-Za-z_]\w*)(?P<how>\+?)="""
    r"""\((?P<words>(?:[^()'"\\#]|\\.|'[^']*'|"(?:\\.|[^"\\])*"|\$\([^()]*\)|(?<=\s)\#[^\n]*|\#)*+)"""
    r"""\)(?=[ \t]*(?:\#[^\n]*)?(?:$|[;&|}]))""",
    re.DOTALL | re.MULTILINE,
)
_USED = re.compile(r"\$\{([A-Za-z_]\w*)\[[@*]\]\}")


def one_line_each(text: str) -> str:
    """
    Return a script with each array assignment in one line that begins with `SET`.

    >>> one_line_each("A=(\\n  --port 8000  # ours\\n)")
    '\\x00array A = --port 8000'
    """

    def line(match: re.Match[str]) -> str:
        try:
            words = shlex.split(match["words"], comments=True)
        except ValueError:
            return match[0]
        line = f"{SET} {match['name']} {match['how'] or '='} {shlex.join(words)}".rstrip()
        return f"{match['before']}\n{line}\n" if match["before"] else line

    return _ASSIGNED.sub(line, text)


def fill_in(words: Sequence[str], arrays: Mapping[str, Sequence[str]]) -> list[str]:
    """
    Return the words of a command, after arrays in it are replaced by their words.

    >>> fill_in(["vllm", "${A[@]}", "${B[@]}"], {"A": ["serve", "m"]})
    ['vllm', 'serve', 'm', '${B[@]}']
    """
    found: list[str] = []
    for word in words:
        used = _USED.fullmatch(word)
        found += arrays[used[1]] if used and used[1] in arrays else [word]
    return found
