"""A round of questions to nodes that ends by a deadline, whatever a node does.  Border."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass

import gevent

from gpufleet.remote.query import Answer
from gpufleet.upgrade.run.connections import Nodes
from gpufleet.upgrade.run.node_questions import NodeQuestion


@dataclass(frozen=True)
class Timed:
    """An answer of a node, and when it was asked and answered by this machine's clock."""

    sent: float
    answered: float
    answer: Answer


def ask_bounded(
    nodes: Nodes, questions: Mapping[tuple[str, str], NodeQuestion], seconds: float
) -> dict[tuple[str, str], Timed]:
    """
    Put questions to nodes, all at once; keys are pairs of a name of the question and a node.

    Takes at most `seconds`. A question without an answer by then has a sentence.
    """

    def one(node: str, question: NodeQuestion) -> Timed:
        sent = time.time()
        answer = nodes.ask({node: question})[node]
        return Timed(sent, time.time(), answer)

    jobs = {key: gevent.spawn(one, key[1], each) for key, each in questions.items()}
    gevent.joinall(list(jobs.values()), timeout=seconds)
    late = Timed(0, 0, f"no answer within {seconds:.0f} s")
    found = {
        key: job.value if job.successful() and job.value else late for key, job in jobs.items()
    }
    gevent.killall(list(jobs.values()), block=False)
    return found
