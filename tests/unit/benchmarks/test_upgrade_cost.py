"""What an upgrade cost is read from its journal as it lies in the file."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.upgrade.measure import cost


def entry(at: float, what: str, group: str | None = None, **said: Any) -> dict[str, Any]:
    return {"at": at, "what": what, "wave": 1, "group": group, "node": None, "said": said}


def journal() -> list[dict[str, Any]]:
    """Two replicas, one after the other; the first one's step was made twice."""
    return [
        entry(0, "started"),
        entry(50, "wave"),
        entry(51, "draining", "tiny-0"),
        entry(61, "drained", "tiny-0"),
        entry(61, "switching", "tiny-0"),
        entry(62, "switching", "tiny-0"),
        entry(93, "ready", "tiny-0", load_seconds={"tiny-0": 30.0}),
        entry(95, "undrained", "tiny-0"),
        entry(125, "done", "tiny-0"),
        entry(125, "wave"),
        entry(126, "draining", "tiny-1"),
        entry(126, "drained", "tiny-1"),
        entry(126, "switching", "tiny-1"),
        entry(147, "ready", "tiny-1", load_seconds={"tiny-1": 20.0}),
        entry(149, "undrained", "tiny-1"),
        entry(170, "done", "tiny-1"),
        entry(200, "finished"),
    ]


def test_a_replica_is_out_from_its_stop_until_it_is_sent_to_again() -> None:
    first, second = cost(journal()).outages
    assert (first.out, first.load, first.rest, first.drain) == (34, 30, 4, 10)
    assert (second.rest, second.drain) == (3, 0)


def test_waves_are_held_against_loads_one_after_the_other() -> None:
    found = cost(journal())
    assert (found.whole, found.waves, found.loads) == (200, 120, 50)


@pytest.mark.parametrize("word", ["failed", "stuck"])
def test_one_that_did_not_go_well_has_no_cost(word: str) -> None:
    with pytest.raises(ValueError, match="finished"):
        cost([*journal(), entry(201, word, "tiny-1")])
    with pytest.raises(ValueError, match="finished"):
        cost(journal()[:-1])


def test_one_that_changed_what_lies_below_vllm_has_none_either() -> None:
    with pytest.raises(ValueError, match="below vLLM"):
        cost([entry(62, "changing", "tiny-0"), *journal()])
