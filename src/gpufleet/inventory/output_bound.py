"""Limit the output of a command on a node.

pyinfra keeps the whole output of a command in memory, and reads as long as the command prints. For
example, the command `yes` on a node uses 130 MiB of the controller's memory within 4 s. With this
module, a command that exceeds the limit is ended and fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pyinfra.connectors import util
from pyinfra.connectors.util import OutputLine

# Limits for each of the two streams. The longest output of an operation is that of a package
# transaction, about 100 KiB. Every line takes about 200 bytes of memory, even if it is short.
MOST_BYTES = 16 << 20
MOST_LINES = 200_000
# Bytes per read: paramiko copies all read bytes for each line.
PART_BYTES = 8192


class TooMuchError(Exception):
    """The output of a command exceeds the limit."""


def patch_output_bound() -> None:
    """Wrap pyinfra's reader with the output limit."""
    util.read_buffer = bounded_reader(util.read_buffer)


def bounded_reader(reader: Callable[..., None]) -> Callable[..., None]:
    """
    Return `reader` with the output limit.

    `reader` is pyinfra's `read_buffer` or a replacement with its signature.
    """

    def read(name: str, io: Any, output_queue: Any, *arguments: Any, **options: Any) -> None:
        channel = getattr(io, "channel", None)
        stream = io
        if channel:  # read bytes, because a part of the text may end within a character
            stream = (channel.makefile if name == "stdout" else channel.makefile_stderr)("rb")
        try:
            reader(name, _lines(stream), output_queue, *arguments, **options)
        except TooMuchError:
            # Drop all output, because pyinfra would print all of it.
            output_queue.queue.clear()
            output_queue.put(OutputLine("stderr", _sentence()))
            (channel or io).close()

    return read


def _lines(io: Any) -> Iterator[bytes]:
    """Yield the lines of a stream as they arrive. Raises `TooMuchError` beyond the limit."""
    size = lines = 0
    parts: list[bytes] = []
    while part := io.readline(PART_BYTES):
        size += len(part)
        parts.append(part)
        if size > MOST_BYTES or lines >= MOST_LINES:
            raise TooMuchError
        if part.endswith(b"\n"):
            yield b"".join(parts)
            parts.clear()
            lines += 1
    if parts:
        yield b"".join(parts)


def _sentence() -> str:
    return (
        f"gpufleet ended this command, because it printed more than {MOST_BYTES >> 20} MiB "
        f"or {MOST_LINES:,} lines, and this machine keeps all output in its memory. Change "
        "the command so that it writes to a file on the node, or prints less (`| tail -n "
        "1000`)"
    )
