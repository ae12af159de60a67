"""A round of questions ends in time, and keeps each answer that came until then."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import cast

import gevent
from gevent.event import Event

from gpufleet.cli.bounded_questions import Questions, ask_bounded
from gpufleet.remote.query import Answer
from gpufleet.upgrade.run import node_questions
from gpufleet.upgrade.run.connections import Nodes
from gpufleet.upgrade.run.node_questions import NodeQuestion

LOOK = node_questions.look()
HOUR = 3600.0


class Answering:
    """Nodes of which `second` answers after `first` has; `hung` never does, `gone` is off."""

    def __init__(self) -> None:
        self.turns: defaultdict[str, Event] = defaultdict(Event)
        self.turns["first"].set()

    def reach(self, name: str, _: float) -> str:
        return "no route to host" if name == "gone" else ""

    def ask(self, wanted: Mapping[str, NodeQuestion]) -> dict[str, Answer]:
        (node,) = wanted
        self.turns[node].wait()
        gevent.spawn_later(0.05, self.turns["second"].set)
        return {node: {"node": node}}


def nodes() -> Nodes:
    return cast("Nodes", Answering())


def test_every_answer_that_comes_in_time_is_kept() -> None:
    found = ask_bounded(nodes(), {("look", "first"): LOOK, ("look", "second"): LOOK}, HOUR)

    assert {node: each.answer for (_, node), each in found.items()} == {
        "first": {"node": "first"},
        "second": {"node": "second"},
    }


def test_a_node_that_hangs_ends_the_round_at_its_deadline_and_is_named_so() -> None:
    found = ask_bounded(nodes(), {("look", "hung"): LOOK, ("look", "first"): LOOK}, 1)

    assert found["look", "hung"].answer == "no answer within 1 s"
    assert found["look", "first"].answer == {"node": "first"}


def test_a_node_that_cannot_be_reached_is_not_asked() -> None:
    found = ask_bounded(nodes(), {("look", "gone"): LOOK}, HOUR, connect_seconds=1)

    assert found["look", "gone"].answer == "not reached: no route to host"


def test_further_questions_of_an_answer_belong_to_the_same_round() -> None:
    def then(what: str, node: str, _: Answer) -> Questions:
        return {("more", node): LOOK} if what == "look" else {}

    found = ask_bounded(nodes(), {("look", "first"): LOOK}, HOUR, then=then)

    assert [*found] == [("look", "first"), ("more", "first")]
    assert found["more", "first"].answer == {"node": "first"}
    assert 0 < found["more", "first"].sent <= found["more", "first"].answered
