"""Join the lines of a shell script or unit file like a shell. Pure.

Contract: lines that a backslash or an open quote continues become one line. Comments and
here-documents are removed. If a continued line is broken by a mistake, it is read as the author
meant it, with a note.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from gpufleet.errors import FleetError
from gpufleet.importer.server import Note

_HERE = re.compile(r"<<-?\s*(['\"]?)(\w+)\1")
_UNIT = re.compile(r"\s*(ExecStart|Environment)=[-@:+!]*(.*)", re.DOTALL)
# A backslash that should continue the line, but has blanks or a comment after it.
_BROKEN = re.compile(r"(?<=\s)\\[ \t]+(?:#.*)?$")
_LONGEST = 1 << 16  # characters of one command; a longer one has a quote that is never closed
_QUOTED = {"": re.compile(r"""[\\'"]"""), "'": re.compile("'"), '"': re.compile(r'[\\"]')}
"""Special characters within each kind of quotes: the end, and a backslash with its character."""


def read_lines(text: str) -> Iterator[tuple[str, tuple[Note, ...]]]:
    """
    Yield each line of a script with notes about it.

    Raises `FleetError` if a quote is not closed or a command is too long.
    """
    pending, quote, began = "", "", 1
    ended: dict[str, int] = {}
    lines = enumerate(text.splitlines(), 1)
    for number, line in lines:
        if not quote and line.lstrip().startswith("#"):
            if pending:
                ended.setdefault("is a comment", number)
            continue
        own = line
        if not quote:
            own, broken = _bare(_plain(line))
            if broken:
                ended.setdefault("has text after its last `\\`", number)
        began = began if pending else number
        continued = _continues(own)
        more = own[:-1] + " " if continued else own
        pending += more
        quote = open_quote(more, quote)
        if len(pending) > _LONGEST and (quote or continued):
            break
        if quote and not continued:
            pending += "\n"
            quote = open_quote("\n", quote)
        elif not continued:
            if document := _HERE.search(pending):
                any(line.strip() == document[2] for _, line in lines)  # skips it
            yield pending, _notes(ended)
            pending, ended = "", {}
    if quote:
        raise FleetError(  # only the line's number, because the text may contain a key
            f"the quote that is opened in line {began} is never closed: close it"
        )
    if len(pending) > _LONGEST:
        raise FleetError(
            f"the command that begins in line {began} has more than {_LONGEST:,} characters: split "
            "it"
        )
    if pending:
        yield pending, _notes(ended)


def _bare(line: str) -> tuple[str, bool]:
    """Return a line without its comment, and whether the comment breaks the line's continuation."""
    broken = _BROKEN.search(line)
    if broken and not open_quote(line[: broken.start()]):
        return line[: broken.start() + 1], True
    return _without_comment(line), False


def _notes(ended: Mapping[str, int]) -> tuple[Note, ...]:
    return tuple(
        Note(
            f"line {number} {why}: a shell would end the command there, but gpufleet reads "
            "the next line as a part of the command: check the result",
            decide=True,
        )
        for why, number in ended.items()
    )


def _plain(line: str) -> str:
    """Return a line of a unit file in shell syntax. Any other line is returned unchanged."""
    match = _UNIT.fullmatch(line)
    if match is None:
        return line
    return match[2] if match[1] == "ExecStart" else f"export {match[2]}"


def _continues(line: str) -> bool:
    stripped = line.rstrip("\\")
    return (len(line) - len(stripped)) % 2 == 1


def _without_comment(line: str) -> str:
    quote, at = "", 0
    for match in re.finditer(r"\s#", line):
        quote = open_quote(line[at : match.start()], quote)
        at = match.start()
        if not quote:
            return line[:at]
    return line


def open_quote(text: str, quote: str = "") -> str:
    """
    Return the quote that is open at the end of a text, or "".

    `quote` is the quote that is open before the text. A backslash at the end also counts as open,
    because it escapes the next character.

    >>> open_quote("a 'b"), open_quote("c' d", "'"), open_quote('"')
    ("'", '', '"')
    """
    if not text:
        return quote
    at = 0
    if quote.endswith("\\"):
        quote, at = quote[:-1], 1
    while match := _QUOTED[quote].search(text, at):
        at = match.end()
        if match[0] != "\\":
            quote = "" if quote else match[0]
        elif at == len(text):
            return f"{quote}\\"
        else:
            at += 1
    return quote
