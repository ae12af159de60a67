"""Who makes what nodes need, and who has it from whom."""

from __future__ import annotations

import math
from collections import Counter

import pytest

from gpufleet.artifacts import distribution
from gpufleet.artifacts.distribution import (
    Share,
    TreeState,
    describe_action,
    expected_halves,
    parse_look,
    plan_distribution,
    sources,
)
from tests.support.rows import each_row

NOBLE = ("ubuntu 24.04", "x86_64", "CPython 3.12.3")
JAMMY = ("ubuntu 22.04", "x86_64", "CPython 3.10.12")


def names(count: int) -> list[str]:
    return [f"gpu-{number:03}" for number in range(1, count + 1)]


@each_row("count", [1, 2, 3, 4, 7, 16, 17, 100, 500])
def test_no_node_sends_more_than_one_copy_nor_is_far_from_the_source(count: int) -> None:
    """Of two halves each: that is the whole point of two trees."""
    ways = sources("source", names(count))
    parents = Counter(half[0] for halves in ways.values() for half in halves)
    depth = max(len(half) for halves in ways.values() for half in halves)

    assert parents["source"] == 2
    assert max(parents.values()) <= 2
    assert depth <= math.log2(count) + 1
    assert all(len(halves) == distribution.HALVES for halves in ways.values())


@pytest.mark.parametrize("count", [2, 7, 16, 33])
def test_every_piece_reaches_every_node_by_nodes_that_have_it_from_above(count: int) -> None:
    ways = sources("source", names(count))

    for half in range(distribution.HALVES):
        have = {"source"}
        while reached := {node for node in ways.keys() - have if ways[node][half][0] in have}:
            have |= reached
        assert have == {"source", *names(count)}
    # The last resort of each is the source, and nobody is named twice or names itself.
    for node, halves in ways.items():
        for half_sources in halves:
            assert half_sources[-1] == "source"
            assert len(set(half_sources)) == len(half_sources)
            assert node not in half_sources


def test_each_node_is_expected_once_a_half_and_by_whom_it_asks_first() -> None:
    ways = sources("source", names(9))
    named = [each for waiting in expected_halves(ways).values() for each in waiting]

    assert sorted(named) == sorted(f"{node}/{half}" for node in names(9) for half in (0, 1))
    for node, waiting in expected_halves(ways).items():
        for each in waiting:
            child, _, half = each.partition("/")
            assert ways[child][int(half)][0] == node


def test_the_first_builds_for_all_of_its_kind() -> None:
    looks = {
        "a": TreeState(False, NOBLE),
        "b": TreeState(False, JAMMY),
        "c": TreeState(False, NOBLE),
        "d": TreeState(False, JAMMY),
    }
    found = plan_distribution(list("abcd"), looks)

    assert found.shares == (Share("a", False, ("c",)), Share("b", False, ("d",)))
    assert found.makes("a") == found.copies("c") == Share("a", False, ("c",))
    assert found.makes("c") is None
    assert found.copies("a") is None


def test_whoever_has_it_gives_it_though_it_has_no_part_in_the_run() -> None:
    looks = {"a": TreeState(False, NOBLE), "y": TreeState(True, JAMMY), "z": TreeState(True, NOBLE)}

    assert plan_distribution(["a"], looks).shares == (Share("z", True, ("a",)),)
    looks["b"] = TreeState(True, NOBLE)
    assert plan_distribution(["a", "b"], looks).shares == (Share("b", True, ("a",)),)


def test_a_node_is_believed_about_no_files_but_those_that_were_built() -> None:
    """One that says it has a release which nobody has built, or another one, gives it to nobody."""
    right = {NOBLE: {"aa"}, JAMMY: {"bb"}}
    looks = {
        "a": TreeState(False, NOBLE),
        "b": TreeState(False, NOBLE),
        "forged": TreeState(True, NOBLE, "ff"),
        "of another kind": TreeState(True, NOBLE, "bb"),
        "unread": TreeState(True, NOBLE),
    }
    found = plan_distribution(["a", "forged", "b"], looks, right)

    assert found.shares == (Share("a", False, ("b",)),)
    assert found.unknown == ("forged", "of another kind", "unread")
    assert found.copies("forged") is found.makes("forged") is None, "it keeps what it has"

    looks["built"] = TreeState(True, NOBLE, "aa")
    assert plan_distribution(["a", "b"], looks, right).shares == (Share("built", True, ("a", "b")),)
    assert plan_distribution(["a", "b"], looks, {}).shares == (Share("a", False, ("b",)),)


def test_nobody_copies_what_everybody_has() -> None:
    assert (
        plan_distribution(["a", "b"], {name: TreeState(True, NOBLE) for name in "ab"}).shares == ()
    )


def test_a_node_of_which_nothing_is_known_makes_its_own_and_says_why() -> None:
    """Unknown is no kind: a release of another system would break there."""
    silent = parse_look("cannot be reached: refused")
    odd = parse_look({"error": "no such file: '/usr/bin/python3.13'"})
    found = plan_distribution(["a", "b", "c"], {"a": TreeState(True, NOBLE), "b": silent, "c": odd})

    assert found.shares == ()
    assert found.alone == {
        "b": "cannot be reached: refused",
        "c": "the kind of the node is unknown: no such file: '/usr/bin/python3.13'",
    }
    assert parse_look({"whole": True, "kind": "noble"}) == "the node reported no kind"
    assert parse_look({"whole": 1, "kind": []}) == TreeState(False, ())


def test_a_dry_run_says_who_builds_for_whom_and_who_copies() -> None:
    late, now = Share("a", False, ("b", "c")), Share("a", True, ("b",))

    assert describe_action("release 1", "build", late, "a") == "build release 1, once for a, b, c"
    assert describe_action("release 1", "build", late, "b") == "copy release 1 from a when a has it"
    assert describe_action("release 1", "build", now, "b") == "copy release 1 from a"
    assert describe_action("org/m", "download", Share("a", False, ()), "a") == "download org/m"
