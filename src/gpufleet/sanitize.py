"""Make text of nodes and operators safe for a terminal, an XML file and an HTML page. Pure.

Names of processes, serials, kernel messages and error output come from machines that may be broken
or hostile. A terminal obeys escape sequences in them: they retitle windows, clear what was there,
write over lines, turn text around. JSON for programs escapes them itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from html import escape

# A sentence about a node is read in a table: three lines of a traceback say what went wrong, and a
# line of the kernel's log, the longest that says something, is cut by the kernel at about as much
# (1024 bytes with its prefix: LOG_LINE_MAX in kernel/printk/printk.c, later PRINTKRB_RECORD_MAX).
LINES = 3
LINE_CHARACTERS = 1000
# What XML 1.0 cannot have in any way (its production 2, Char).
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def printable(text: str) -> str:
    r"""
    Return `text` with unprintable characters, except line ends, escaped as Python does.

    That is every control and format character of Unicode (C0 and C1 controls, directional
    overrides, zero-width characters), lone surrogates, and spaces that are not U+0020.

    >>> printable("a\x1b[2J")
    'a\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\n" else _escaped(each) for each in text)


def last_lines(lines: Iterable[str]) -> str:
    """
    Return what a node said in one line for a sentence: the end of it, printable.

    `nothing` when there is nothing. Very long lines are cut.
    """
    last = [each.strip() for each in lines if each.strip()][-LINES:]
    return " / ".join(printable(_cut(each)) for each in last) or "nothing"


def _cut(line: str) -> str:
    return line if len(line) <= LINE_CHARACTERS else f"{line[:LINE_CHARACTERS]} ..."


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def html_page(title: str, style: str, body: Iterable[str]) -> str:
    """
    Return a page that loads nothing and runs nothing.

    The title is text; `body` are elements, which are HTML already.
    """
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">\n'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">\n"
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html_text(title)}</title>\n<style>{style}</style></head>\n<body>\n"
        + "\n".join(body)
        + "\n</body></html>\n"
    )


def html_text(words: str) -> str:
    """Return what nodes and operators wrote as text of an element or an attribute; lines stay."""
    return escape(xml_text(words))


def xml_text(words: str) -> str:
    """Return words as an XML document can have them, not escaped yet."""
    return _NOT_XML.sub("?", "\n".join(map(printable, words.splitlines())))
