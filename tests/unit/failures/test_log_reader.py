"""Logs of any size and with any bytes are read line by line, in bounded memory."""

from __future__ import annotations

import io
import random
from collections.abc import Iterator

import pytest

from gpufleet.errors import FleetError
from gpufleet.failures.line_pattern import MOST_STEPS
from gpufleet.failures.line_pattern import parse as parse_pattern
from gpufleet.failures.log_reader import CHUNK, LONGEST_LINE, read_log
from gpufleet.failures.rule_file import rules
from tests.support.rows import each_row


def read(data: bytes) -> list[tuple[int, str]]:
    return [(line.number, line.raw) for line in read_log(io.BytesIO(data), "a.log")]


class Endless(io.RawIOBase):
    """A stream that makes its bytes when they are read, and counts what was asked for at once."""

    def __init__(self, piece: bytes, pieces: int) -> None:
        self.piece, self.left, self.largest = piece, pieces, 0

    def read(self, size: int = -1) -> bytes:
        self.largest = max(self.largest, size)
        assert size > 0
        if self.left == 0:
            return b""
        self.left -= 1
        return self.piece


@each_row(
    ("data", "lines"),
    [
        (b"", []),
        (b"a\nb", [(1, "a"), (2, "b")]),
        (b"a\r\n\r\nb\r\n", [(1, "a"), (3, "b")]),
        (b" 1%\r 2%\r 3%\nb\n", [(1, " 1%"), (1, " 2%"), (1, " 3%"), (2, "b")]),
        (b"\xef\xbb\xbfa\n", [(1, "a")]),
        (b"a\xff\xfeb\n", [(1, "a\ufffd\ufffdb")]),
        ("a\nüb\n".encode("utf-16"), [(1, "a"), (2, "üb")]),
        ("\na".encode("utf-16"), [(2, "a")]),
        ("\u0a41\u4100\nb".encode("utf-16"), [(1, "\u0a41\u4100"), (2, "b")]),
        (b"\xfe\xff" + "a\nb".encode("utf-16-be"), [(1, "a"), (2, "b")]),
    ],
)
def test_lines_are_numbered_as_editors_do(data: bytes, lines: list[tuple[int, str]]) -> None:
    assert read(data) == lines


def test_a_line_of_ten_megabytes_is_cut_and_the_next_one_is_whole() -> None:
    lines = read(b"x" * 10_000_000 + b"\nnext\n")
    assert [number for number, _ in lines] == [1, 2]
    assert lines[0][1] == "x" * LONGEST_LINE
    assert lines[1][1] == "next"


def test_lines_on_the_border_of_two_chunks_are_whole() -> None:
    text = "".join(f"line {number}\n" for number in range(400_000))
    assert len(text) > 2 * CHUNK
    lines = read(text.encode())
    assert lines[-1] == (400_000, "line 399999")
    assert len(lines) == 400_000


def test_a_stream_without_an_end_of_line_is_not_kept() -> None:
    stream = Endless(b"x" * CHUNK, 64)
    lines: Iterator[object] = read_log(stream, "a.log")  # type: ignore[arg-type]
    assert len(list(lines)) == 1
    assert stream.largest == CHUNK


@each_row(
    ("data", "says"),
    [
        (b"\x1f\x8b\x08\x00rest", "zcat"),
        (b"\x28\xb5\x2f\xfdrest", "zstdcat"),
        (b"LPKSHHRH" + bytes(200), "journalctl --file"),
        (b"PK\x03\x04rest", "zip"),
        (b"BZh91AY&SY" + bytes(50), "bzcat"),
        (b"\x7fELF" + bytes(500), "is not text"),
    ],
)
def test_a_file_that_is_no_text_is_refused_with_what_to_do(data: bytes, says: str) -> None:
    with pytest.raises(FleetError, match=says):
        read(data)


def test_what_a_pattern_costs_on_hostile_text_is_bounded() -> None:
    """The bound is counted from the pattern, not timed: repeats are bounded, and few."""
    for rule in rules():
        for pattern in rule.patterns:
            assert parse_pattern(pattern.written) == pattern  # refuses more than MOST_STEPS
            hostile = (pattern.needle * 100_000)[:100_000]
            assert pattern.matches(hostile) in {True, False}
    assert MOST_STEPS <= 20_000


@each_row("seed", range(5))
def test_random_bytes_are_refused(seed: int) -> None:
    with pytest.raises(
        FleetError, match="is not text: give a log in the format that `journalctl` or Docker"
    ):
        read(random.Random(seed).randbytes(20_000))


def test_a_coloured_text_in_an_old_encoding_is_read() -> None:
    assert read("\x1b[31mné à côté\x1b[0m\tb\n".encode("latin-1"))


def test_zero_bytes_before_a_log_that_was_emptied_while_it_was_written_are_no_binary() -> None:
    assert read(bytes(3 << 20) + b"INFO one\nINFO two\n") == [(1, "INFO one"), (2, "INFO two")]
