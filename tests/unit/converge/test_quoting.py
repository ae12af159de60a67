"""Characters that systemd cannot be given, and those next to them that it can."""

from __future__ import annotations

import pytest

from gpufleet.converge.quoting import is_unquotable


@pytest.mark.parametrize(
    ("first", "last"),
    [(0, 0), (0xD800, 0xDFFF), (0xFDD0, 0xFDEF), (0xFFFE, 0xFFFF), (0x1FFFE, 0x1FFFF)],
)
def test_nul_surrogates_and_noncharacters_are_refused_and_their_neighbours_are_not(
    first: int, last: int
) -> None:
    assert is_unquotable(f"a{chr(first)}b")
    assert is_unquotable(f"a{chr(last)}b")
    assert not is_unquotable(f"a{chr(last + 1)}b")
    assert first == 0 or not is_unquotable(f"a{chr(first - 1)}b")


def test_no_text_is_fine() -> None:
    assert not is_unquotable("")
