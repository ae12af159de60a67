"""What is worked out of one node's facts once, however many siblings ask.  Pure."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

from gpufleet.checks.reading import Reading

Answer = TypeVar("Answer")


def remembered(ask: Callable[[Reading], Answer]) -> Callable[[Reading], Answer]:
    """
    Return a question that keeps its answer with the node, as `cached_property` would.

    Every node of a fleet is compared with every other: without it 500 nodes would count each
    other's links 250 000 times.
    """
    key = f"{ask.__module__}.{ask.__name__}"

    @wraps(ask)
    def once(node: Reading) -> Answer:
        known = vars(node)
        if key not in known:
            known[key] = ask(node)
        answer: Answer = known[key]
        return answer

    return once
