"""What is worked out of one node's facts once, however many checks and siblings ask.  Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import TypeVar

from gpufleet.checks.probe_facts import CannotTell, DoesNotApply, GpuReading, Reading, Unread

# What a sibling whose facts are missing or make no sense does to a question about it.
_NO_ANSWER = (CannotTell, DoesNotApply, Unread, ArithmeticError, AttributeError, LookupError,
              TypeError, ValueError)  # fmt: skip

Answer = TypeVar("Answer")
Asked = TypeVar("Asked", Reading, GpuReading)


def remembered(ask: Callable[[Asked], Answer]) -> Callable[[Asked], Answer]:
    """
    Return a question that keeps its answer with the node or the GPU, as `cached_property` would.

    Every node of a fleet is compared with every other: without it 500 nodes would count each
    other's links 250 000 times.
    """
    key = f"{ask.__module__}.{ask.__name__}"

    @wraps(ask)
    def once(asked: Asked) -> Answer:
        known = vars(asked)
        if key not in known:
            known[key] = ask(asked)
        answer: Answer = known[key]
        return answer

    return once


def told_by_twins(node: Reading, ask: Callable[[Reading], Answer]) -> Iterator[Answer | None]:
    """
    Yield what each sibling with the same kind of GPU answers, None where it has no answer.

    A sibling that is broken is its own trouble, and no reason not to know about this node.
    """
    for twin in node.twins:
        try:
            yield ask(twin)
        except _NO_ANSWER:
            yield None
