"""What is known of NVIDIA's driver branches holds together, and nothing is invented of others."""

from __future__ import annotations

import datetime as dt
from dataclasses import FrozenInstanceError
from itertools import pairwise

import pytest

from gpufleet.catalog.driver_branches import (
    BRANCHES,
    FIRST_CUDA,
    LAST_BEFORE_TURING,
    OLDEST_DRIVER,
    OPEN_ONLY_SINCE,
    branch,
    cuda_major,
    flavours,
    version_numbers,
)


def test_a_newer_branch_has_a_newer_cuda() -> None:
    known = list(BRANCHES.values())

    assert all(int(one.name) < int(next_.name) for one, next_ in pairwise(known))
    assert all(one.cuda < next_.cuda for one, next_ in pairwise(known))
    assert (known[0].cuda, BRANCHES["580"].cuda, known[-1].cuda) == ((12, 2), (13, 0), (13, 4))


def test_branches_end_when_nvidias_tables_say() -> None:
    ends = {each.name: each.end_of_life for each in BRANCHES.values() if each.end_of_life}

    # Those that the edition of 4 August 2025 leaves out had ended by then.
    gone = dt.date(2025, 8, 4)
    assert {name for name, end in ends.items() if end == gone} == {"550", "560", "565", "575"}
    assert {name: (end.year, end.month) for name, end in ends.items() if end != gone} == {
        "535": (2026, 6),
        "570": (2026, 2),
        "580": (2028, 6),
        "595": (2027, 3),
        "610": (2026, 8),
    }
    # The last day of that month.
    assert all((end + dt.timedelta(1)).day == 1 for end in ends.values() if end != gone)


def test_long_term_support_is_535_and_580() -> None:
    long = {name for name, each in BRANCHES.items() if each.designation == "long term support"}

    assert long == {"535", "580"}


def test_gpus_before_turing_end_with_580_and_proprietary_modules_before_615() -> None:
    assert LAST_BEFORE_TURING == 580
    assert OPEN_ONLY_SINCE == 615
    assert flavours("615") == flavours("616") == ("open",)
    assert flavours("610") == flavours("614") == ("open", "proprietary")


@pytest.mark.parametrize(
    ("name", "major"),
    [("535", 12), ("575", 12), ("580", 13), ("577", 12), ("612", 13), ("616", None), ("520", None)],
)
def test_a_branch_between_two_known_ones_runs_the_cuda_of_the_older(
    name: str, major: int | None
) -> None:
    assert cuda_major(name) == major


def test_wheels_of_a_cuda_major_need_the_first_driver_of_it() -> None:
    assert OLDEST_DRIVER == {12: "525.60.13", 13: "580.65.06"}
    assert cuda_major(OLDEST_DRIVER[13].partition(".")[0]) == 13


def test_blackwell_needs_cuda_12_8_and_its_second_edition_12_9() -> None:
    assert FIRST_CUDA == {
        (10, 0): (12, 8),
        (12, 0): (12, 8),
        (10, 3): (12, 9),
        (11, 0): (13, 0),
        (12, 1): (12, 9),
    }


def test_what_is_known_of_a_branch_cannot_be_changed() -> None:
    known = branch("580")

    assert known is not None
    with pytest.raises(FrozenInstanceError):
        known.name = "581"  # type: ignore[misc]
    assert branch("581") is None


def test_versions_compare_as_numbers() -> None:
    assert version_numbers("580.95.05") < version_numbers("580.178.04")
