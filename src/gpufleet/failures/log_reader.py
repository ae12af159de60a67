"""Read the lines of log files with any size and any bytes, in limited memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO, NamedTuple

from gpufleet.errors import FleetError
from gpufleet.failures.log_prefix import Prefix, split_prefix

CHUNK = 1 << 20
LONGEST_LINE = 16_384
"""
The most bytes of a line that are read. The rest is skipped. Errors of vLLM have up to 3,000 bytes.
"""

_HEAD = 4096
_FORMS = {
    b"\x1f\x8b": "gzip: write `zcat FILE | gpufleet doctor -`",
    b"\x28\xb5\x2f\xfd": "zstd: write `zstdcat FILE | gpufleet doctor -`",
    b"BZh": "bzip2: write `bzcat FILE | gpufleet doctor -`",
    b"\xfd7zXZ\x00": "xz: write `xzcat FILE | gpufleet doctor -`",
    b"LPKSHHRH": "a file of the journal: write `journalctl --file FILE -o short-iso | "
    "gpufleet doctor -`",
    b"PK\x03\x04": "a zip archive: unpack it, and give the names of the logs that it contains",
}
_UTF16 = {b"\xff\xfe": "utf-16-le", b"\xfe\xff": "utf-16-be"}
_CONTROLS = bytes({*range(32), 127} - set(b"\t\n\r\f\b\x1b"))
"""Bytes that do not occur in any text encoding. About a tenth of random bytes are among them."""


class LogLine(NamedTuple):
    """One line of a log. `number` is the line's number in the file, counted from 1."""

    source: str
    number: int
    raw: str

    def split(self) -> Prefix:
        """Return the prefix and the message of the line."""
        return split_prefix(self.raw)


def is_log_line(raw: str) -> bool:
    """
    Return whether a program wrote this line. Blank lines and remarks of journalctl do not count.
    """
    text = raw.strip()
    # `-- No entries --`, `-- Boot ... --`, `-- Logs begin at ... --`
    return bool(text) and not (text.startswith("-- ") and text.endswith(" --"))


def read_log(stream: BinaryIO, source: str) -> Iterator[LogLine]:
    """
    Yield the lines of a log. Bytes that are not UTF-8 are replaced.

    A carriage return also ends a line, because progress bars write it, but the line number does not
    change. Raises `FleetError` if the stream is not text.
    """
    for number, raw in _raw_lines(stream, source):
        if "\r" not in raw:
            if raw:
                yield LogLine(source, number, raw)
            continue
        for part in raw.split("\r"):
            if part:
                yield LogLine(source, number, part)


def _raw_lines(stream: BinaryIO, source: str) -> Iterator[tuple[int, str]]:
    head = stream.read(_HEAD)
    # If a log file is emptied while the program writes, it begins with many zero bytes.
    while head and not head.strip(b"\0"):
        head = stream.read(CHUNK)
    head = head.lstrip(b"\0")
    encoding = _encoding(head, source)
    newline = "\n".encode(encoding)
    number, kept, skipping = 1, b"", False
    chunk = head[2:] if encoding != "utf-8" else head.removeprefix(b"\xef\xbb\xbf")
    while chunk:
        *whole, rest = _split(kept + chunk, newline)
        for line in whole:
            yield number, "" if skipping else line[:LONGEST_LINE].decode(encoding, "replace")
            number, skipping = number + 1, False
        kept = rest
        if len(kept) > LONGEST_LINE:
            if not skipping:
                yield number, kept[:LONGEST_LINE].decode(encoding, "replace")
            # If a character has two bytes, the number of bytes that remain must be even.
            kept, skipping = kept[len(kept) - len(kept) % len(newline) :], True
        chunk = stream.read(CHUNK)
    if kept and not skipping:
        yield number, kept.decode(encoding, "replace")


def _split(data: bytes, newline: bytes) -> list[bytes]:
    """Return the pieces between line ends. In UTF-16, only line ends at even offsets count."""
    if len(newline) == 1:
        return data.split(newline)
    pieces, begin, at = [], 0, data.find(newline)
    while at >= 0:
        if at % 2:
            at = data.find(newline, at + 1)
            continue
        pieces.append(data[begin:at])
        begin = at + 2
        at = data.find(newline, begin)
    return [*pieces, data[begin:]]


def _encoding(head: bytes, source: str) -> str:
    for magic, form in _FORMS.items():
        if head.startswith(magic):
            raise FleetError(f"{source}: is {form}")
    if head[:2] in _UTF16:
        return _UTF16[head[:2]]
    if len(head) - len(head.translate(None, _CONTROLS)) > len(head) // 20:
        raise FleetError(
            f"{source}: is not text: give a log in the format that `journalctl` or Docker prints"
        )
    return "utf-8"
