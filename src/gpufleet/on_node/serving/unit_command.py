"""RUNS ON THE NODE: split the command line of a stage's unit into arguments."""

from __future__ import annotations

import re
from typing import Iterator, Match, Tuple

# Words as units.systemd_quote writes them: wholly in quotes, or plain.
WORD = re.compile(r"\"((?:[^\"\\]|\\.)*)\"|'((?:[^'\\]|\\.)*)'|(\S+)")
ESCAPE = re.compile(r"\\(x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}|.)|(%%)|(\$\$)")
LETTERS = {"n": "\n", "t": "\t", "r": "\r"}


def command(text: str) -> list[str]:
    """Return the words of a unit's ExecStart=, in the form that the program receives."""
    _, _, rest = text.partition("\nExecStart=")
    lines = []
    for line in rest.splitlines():
        lines.append(line.rstrip("\\"))
        if not line.endswith("\\"):
            break
    return [
        ESCAPE.sub(unescape, double or single or plain)
        for double, single, plain in WORD.findall(" ".join(lines))
    ]


def unescape(found: Match[str]) -> str:
    """Return the character of an escape sequence."""
    escape, percent, _ = found.groups()
    if escape is None:
        return "%" if percent else "$"
    if len(escape) > 1:
        return chr(int(escape[1:], 16))
    return LETTERS.get(escape, escape)


# The server of every engine: `/opt/vllm/releases/ID/bin/vllm serve`.
SERVER = re.compile(r".*/releases/[^/]+/bin/[^/]+")


def serve(words: list[str]) -> list[str]:
    """
    Return the words after `RELEASE/bin/PROGRAM serve`; none if the unit starts no server.

    A port that the rank's program fills in is not for clients: it is no server either.
    """
    for at, (program, verb) in enumerate(pairs(words)):
        if verb == "serve" and SERVER.fullmatch(program):
            found = words[at + 2 :]
            return [] if (value(found, "--port") or "").startswith("{") else found
    return []


def pairs(words: list[str]) -> Iterator[Tuple[str, str]]:
    """Yield each word with the next word."""
    return zip(words, words[1:])  # both are of 3.10


def value(words: list[str], flag: str) -> str | None:
    """Return the value of a flag, which is the last if repeated, or None."""
    found = None
    for word, following in pairs(words):
        if word == flag:
            found = following
    return found
