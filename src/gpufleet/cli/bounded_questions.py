"""Query nodes in rounds with a deadline. Border."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TypeAlias

import gevent

from gpufleet.remote.query import Answer
from gpufleet.upgrade.run.connections import Nodes
from gpufleet.upgrade.run.node_questions import NodeQuestion

Questions: TypeAlias = Mapping[tuple[str, str], NodeQuestion]
"""Questions by (the question's name, node)."""


@dataclass(frozen=True)
class Timed:
    """A node's answer, and when this machine sent the question and received the answer."""

    sent: float
    answered: float
    answer: Answer


def ask_bounded(
    nodes: Nodes,
    questions: Questions,
    seconds: float,
    *,
    connect_seconds: float | None = None,
    then: Callable[[str, str, Answer], Questions] = lambda *_: {},
) -> dict[tuple[str, str], Timed]:
    """
    Query nodes in parallel. The keys of questions and answers are (the question's name, node).

    The round takes at most `seconds`. If a question has no answer by then, its answer is a sentence
    that says so. If it takes longer than `connect_seconds` to connect to a node, the answer to each
    of its questions is `not reached: ...`. After each answer, `then` returns further questions to
    the same node. They have the same deadline.
    """
    late = Timed(0, 0, f"no answer within {seconds:.0f} s")
    found = dict.fromkeys(questions, late)
    doors = {
        name: gevent.spawn(nodes.reach, name, connect_seconds)
        for name in {node for _, node in questions}
        if connect_seconds is not None
    }

    def put(key: tuple[str, str], question: NodeQuestion) -> None:
        _, node = key
        found[key] = late
        sent = time.time()
        unreached = doors[node].get() if node in doors else ""
        answer: Answer = f"not reached: {unreached}" if unreached else ""
        answer = answer or nodes.ask({node: question})[node]
        found[key] = Timed(sent, time.time(), answer)
        jobs.extend(gevent.spawn(put, each, more) for each, more in then(*key, answer).items())

    jobs = [gevent.spawn(put, key, each) for key, each in questions.items()]
    end = time.monotonic() + seconds
    while left := [each for each in jobs if not each.ready()]:
        gevent.joinall(left, timeout=max(0, end - time.monotonic()), count=1)
        if time.monotonic() >= end:
            break
    gevent.killall([*jobs, *doors.values()], block=False)
    return found
