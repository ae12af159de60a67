"""What a node answered, as values: not known is not absent, and nothing changes them."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, fields

import pytest

from gpufleet.converge.snapshot import (
    FileState,
    PackageState,
    Snapshot,
    UnitState,
    Unknown,
    UserState,
    _file_state,
)


@pytest.mark.parametrize(
    ("found", "there"),
    [
        (PackageState("1", True, False), True),
        (PackageState("1", False, False), False),
        (Unknown("no answer"), False),
        (None, False),
    ],
)
def test_only_a_package_that_is_wholly_installed_is_there(found: object, there: bool) -> None:
    snapshot = Snapshot(packages={"lib": found})  # type: ignore[dict-item]

    assert snapshot.package("lib") == (found if there else None)
    assert snapshot.package("other") is None


def test_a_secret_s_hash_is_the_one_at_its_place_among_those_asked_of_its_path() -> None:
    """The node prints a place and no hash; the places count sorted hashes."""
    asked = [
        ("secret", "/etc/k", "cc"),
        ("secret", "/etc/other", "00"),
        ("file", "/etc/k", "11"),
        ("secret", "/etc/k", "aa"),
    ]

    states = [_file_state("/etc/k", {"kind": "file", "secret": place}, asked) for place in (0, 1)]

    assert [state.sha256 for state in states if state] == ["aa", "cc"]
    assert _file_state("/etc/k", {"error": "torn"}, asked) == FileState("unknown", error="torn")
    assert _file_state("/etc/k", None, asked) is None


def test_states_cannot_be_changed_by_who_compares_them() -> None:
    states = (
        FileState("file"),
        PackageState("1", True, False),
        UnitState(),
        UserState("/home", "/bin/sh", "vllm", frozenset()),
        Unknown("why"),
        Snapshot(),
    )
    for state in states:
        with pytest.raises(FrozenInstanceError):
            setattr(state, fields(state)[0].name, "other")
