"""Quote words for unit files so that systemd reads back exactly the same words. Pure."""

from __future__ import annotations

import re

# The characters that systemd does not interpret anywhere in a word. The following are excluded: %
# (specifiers), $ (variables), quotes and backslash (quoting), whitespace, ; (separates commands), #
# (a comment at the start of a line).
_PLAIN = re.compile(r"[A-Za-z0-9_@:/.,=+-]+")


def systemd_quote(value: str, *, command: bool = True) -> str:
    r"""
    Return `value` as one word of a unit file, which systemd reads back as exactly `value`.

        >>> systemd_quote('100% "sure"\n')
        '\'100%% "sure"\\n\''

    systemd first resolves C escapes in either kind of quotes, and then specifiers (`%`). In
    commands (ExecStart=) it last expands variables (`$`). Use `command=False` for Environment= and
    other lists of words, where systemd does not expand variables. The result is printable ASCII on
    one line. Raises ValueError for characters that systemd refuses in any spelling. These are NUL,
    surrogates and the 66 code points that Unicode reserves as noncharacters (unichar_is_valid in
    systemd's utf8.c).
    """
    if is_unquotable(value):
        raise ValueError(f"systemd cannot express {value!r}")
    if _PLAIN.fullmatch(value):
        return value
    # Use the quote that the value does not contain, so that JSON stays readable.
    quote = "'" if '"' in value and "'" not in value else '"'
    return quote + "".join(_escaped(character, quote, command) for character in value) + quote


UNQUOTABLE = (
    "contains a NUL, a lone surrogate or a Unicode noncharacter, but a systemd unit cannot contain "
    "these characters"
)


def is_unquotable(value: str) -> bool:
    """Return whether systemd refuses `value` in any spelling."""
    points = [ord(character) for character in value]
    return any(
        point == 0
        or 0xD800 <= point <= 0xDFFF
        or 0xFDD0 <= point <= 0xFDEF
        or point & 0xFFFE == 0xFFFE
        for point in points
    )


_ESCAPES = {"\\": r"\\", "\n": r"\n", "\t": r"\t", "\r": r"\r", "%": "%%"}


def _escaped(character: str, quote: str, command: bool) -> str:
    if character == quote:
        return f"\\{quote}"
    if character == "$" and command:
        return "$$"
    if character in _ESCAPES:
        return _ESCAPES[character]
    if " " <= character <= "~":
        return character
    if character < "\x80":
        return f"\\x{ord(character):02x}"
    return f"\\u{ord(character):04x}" if character <= "\uffff" else f"\\U{ord(character):08x}"
