"""Convert the programs in a supervisord configuration to shell lines.  Pure."""

from __future__ import annotations

import configparser
import re
import shlex

from gpufleet.errors import FleetError

_PROGRAM = re.compile(r"^\[program:", re.MULTILINE)
_VARIABLE = re.compile(r"""([A-Za-z_]\w*)=("[^"]*"|'[^']*'|[^,"']*)""")

_QUOTES = "\"'"


def is_supervisor(text: str) -> bool:
    """Return whether a text has a supervisord program."""
    return _PROGRAM.search(text) is not None


def as_script(text: str) -> str:
    """
    Return each program's command, prefixed with its environment.

    Raises `FleetError` for other files.

    >>> as_script("[program:a]\\ncommand=vllm serve m\\nenvironment=A=\\"b\\",C=d")
    'A=b C=d vllm serve m'
    """
    parser = configparser.RawConfigParser(strict=False, inline_comment_prefixes=(";",))
    try:
        parser.read_string(text)
    except configparser.Error:
        raise FleetError("is not a supervisord configuration: a line is not `key=value`") from None
    lines = []
    for section in parser.sections():
        if section.startswith("program:"):
            given = _VARIABLE.findall(parser.get(section, "environment", fallback=""))
            variables = [f"{name}={shlex.quote(value.strip(_QUOTES))}" for name, value in given]
            command = " ".join(parser.get(section, "command", fallback="").split("\n"))
            lines.append(" ".join([*variables, command]))
    return "\n".join(lines)
