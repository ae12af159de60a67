"""Make text of nodes and operators safe for a terminal, an XML file and an HTML page. Pure.

Process names, serials, kernel messages and error output come from machines that may be broken or
hostile. A terminal interprets escape sequences in them, which change titles, clear the screen,
overwrite lines or reverse text. JSON output escapes them itself.
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
PAGE_STYLE = """
:root { color-scheme: light dark; --ground: #ffffff; --shade: #eef1f6; --ink: #1b1b1f;
  --pale: #5f6368; --line: #dadce0; --ok: #2e7d32; --warn: #b45309; --unknown: #8e44ad;
  --fail: #b3261e; --link: #1a56c4; }
@media (prefers-color-scheme: dark) { :root { --ground: #17181c; --shade: #24262c; --ink: #e6e6ea;
  --pale: #a0a4ab; --line: #3a3c42; --ok: #6fcf7c; --warn: #ffa657; --unknown: #c792ea;
  --fail: #ff7b72; --link: #8ab4ff; } }
@media print { :root { --ground: #ffffff; --shade: #f2f2f2; --ink: #000000; --pale: #444444;
  --line: #999999; --ok: #000000; --warn: #000000; --unknown: #000000; --fail: #000000;
  --link: #000000; }
  body { margin: 0; max-width: none; font-size: 10pt; } tr { break-inside: avoid; }
  thead { display: table-header-group; } }
body { background: var(--ground); color: var(--ink); font: 15px/1.5 system-ui, sans-serif;
  margin: 2rem auto; max-width: 1200px; padding: 0 1rem; overflow-wrap: anywhere; }
h1 { font-size: 1.4rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; }
p { margin: .3rem 0; } .pale { color: var(--pale); } a { color: var(--link); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .8rem .25rem 0; text-align: left;
  vertical-align: top; } td { overflow-wrap: anywhere; }
.OK { color: var(--ok); } .WARN { color: var(--warn); } .UNKNOWN { color: var(--unknown); }
.FAIL { color: var(--fail); }
@media screen and (max-width: 600px) { thead { position: absolute; width: 1px; height: 1px;
  overflow: hidden; clip-path: inset(50%); }
  tbody, tr, td, tbody th { display: block; } tr { border-bottom: 1px solid var(--line); }
  tbody th, td { border: 0; padding: .1rem 0; }
  td[data-label]::before { content: attr(data-label) ": "; color: var(--pale); } }
"""
"""The style of pages for print and phones. On a phone, a table row is a block."""

# What XML 1.0 cannot have in any way (its production 2, Char).
_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def printable(text: str) -> str:
    r"""
    Return `text` with unprintable characters, except line ends, as Python's escapes.

    All control and format characters of Unicode (C0 and C1 controls, directional overrides,
    zero-width characters), lone surrogates, and spaces that are not U+0020 are unprintable.

    >>> printable("a\x1b[2J")
    'a\\x1b[2J'
    """
    if text.isprintable():
        return text
    return "".join(each if each.isprintable() or each == "\n" else _escaped(each) for each in text)


def last_lines(lines: Iterable[str]) -> str:
    """
    Return the end of a node's output as one printable line.

    Empty output gives "nothing". Very long lines are cut.
    """
    last = [each.strip() for each in lines if each.strip()][-LINES:]
    return " / ".join(printable(_cut(each)) for each in last) or "nothing"


def _cut(line: str) -> str:
    return line if len(line) <= LINE_CHARACTERS else f"{line[:LINE_CHARACTERS]} ..."


def _escaped(character: str) -> str:
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


def html_page(title: str, style: str, body: Iterable[str]) -> str:
    """
    Return an HTML page that loads no resources and runs no scripts.

    `title` is plain text. `body` has elements in HTML.
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
    """Escape texts of nodes and operators for an element or an attribute; line ends are kept."""
    return escape(xml_text(words))


def xml_text(words: str) -> str:
    """Return a printable text with `?` for characters that XML forbids; markup is not escaped."""
    return _NOT_XML.sub("?", "\n".join(map(printable, words.splitlines())))
