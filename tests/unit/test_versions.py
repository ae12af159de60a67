"""A release's text."""

from __future__ import annotations

import time

from gpufleet.versions import RELEASE
from tests.support.rows import each_row


@each_row("text", ["0.32.0", "0.19.1rc2", "0.32.0.post1", "0.10.1.1"])
def test_a_release_is_three_numbers_and_what_follows(text: str) -> None:
    assert RELEASE.fullmatch(text)


@each_row("text", ["0.32", "v0.32.0", "0.32.0+cu129", "0.32.0 ", ""])
def test_what_is_no_release_is_told(text: str) -> None:
    assert not RELEASE.fullmatch(text)


def test_a_long_word_is_told_at_once() -> None:
    """Each letter more doubled the time; 28 took a quarter of a minute and more."""
    began = time.process_time()
    assert not RELEASE.fullmatch("0.32.0" + "a" * 28 + "+cu129")
    assert time.process_time() - began < 1
