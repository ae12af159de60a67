"""Sanitize nodes' output before it reaches the terminal, including output that pyinfra prints.

pyinfra prints the output of failed operations and facts, and with -v all output. Escape sequences
in this output could set the clipboard, change the title of the window, or overwrite lines. This
module escapes nodes' output before pyinfra prints it. All other text (exceptions, tracebacks)
passes through `echo`, which keeps only pyinfra's own colours.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import click
from pyinfra import logger
from pyinfra.api import Host, output
from pyinfra.connectors import util
from pyinfra.connectors.util import CommandOutput, OutputLine

from gpufleet.sanitize import printable

# What `click.style` writes for pyinfra, and tabs.
_HARMLESS = re.compile(r"(\x1b\[(?:[0-2]|3[1-7]|9[1-7])m|\t)")
_echo = click.echo


class _Lines(Protocol):
    def put(self, item: OutputLine) -> object: ...


def patch_output() -> None:
    """Replace pyinfra's print functions with the functions of this module."""
    click.echo = echo
    output.set_echo(echo)
    util.read_buffer = read_buffer
    for name in ("pyinfra.api.operations", "pyinfra.api.facts"):
        importlib.import_module(name).print_host_combined_output = print_output  # type: ignore[attr-defined]


def echo(message: Any = None, *arguments: Any, **options: Any) -> None:
    """Print like `click.echo`, keeping colours and escaping all other control characters."""
    if isinstance(message, bytes | bytearray):
        message = bytes(message).decode("utf-8", "replace")
    shown = None if message is None else escape_unprintable(str(message))
    _echo(shown, *arguments, **options)


def escape_unprintable(text: str) -> str:
    r"""Return a text with its colours; escape all other unprintable characters like Python.

    >>> escape_unprintable("\x1b[31mred\x1b[0m \x1b]0;title\x07")
    '\x1b[31mred\x1b[0m \\x1b]0;title\\x07'
    """
    parts = _HARMLESS.split(text)
    return "".join(part if place % 2 else printable(part) for place, part in enumerate(parts))


def read_buffer(
    name: str,
    io: Iterable[str | bytes],
    output_queue: _Lines,
    print_output: bool = False,  # pyinfra's signature
    print_func: Callable[[str], str] | None = None,
) -> None:
    """
    Store a node's output lines.

    If `print_output` is true (-v), also print the lines without the node's colours.
    """
    for each in io:
        line = each if isinstance(each, str) else each.decode("utf-8", "replace")
        line = line.rstrip("\n")
        output_queue.put(OutputLine(name, line))
        if print_output:
            shown = printable(line)
            echo(print_func(shown) if print_func else shown, err=True)


def print_output(host: Host, said: CommandOutput) -> None:
    """Log a failed command's output."""
    for each in said:
        line = printable(each.line)
        shown = output.format_text(line, "red") if each.buffer_name == "stderr" else line
        logger.error(f"{host.print_prefix}{shown}")
