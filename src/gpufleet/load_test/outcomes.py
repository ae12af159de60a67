"""Contracts, requests and outcomes of a load test, as values. Pure.

Times are seconds from the start of the load; `due` is a request's intended arrival, which an
open-loop client decides independently of the server. Latencies count from there: a client that
counts from `sent` hides its own queue (coordinated omission).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True)
class Contract:
    """The latencies promised to clients, and the share of requests that must meet them."""

    ttft_seconds: float | None = None
    """Time to first token, at most; None: not promised."""
    itl_seconds: float | None = None
    """Mean time between the tokens of one answer, at most."""
    e2e_seconds: float | None = None
    """Time to the last token, at most."""
    share: float = 0.95
    """The share of requests that must keep all of it."""
    confidence: float = 0.95
    """The confidence of the interval that must hold the true share, for a verdict."""


class Outcome(NamedTuple):
    """One request, as the client saw it."""

    due: float
    sent: float
    """Later than `due` by the client's own lag, or by what held it back in a closed loop."""
    first: float | None
    """When the first token came; None: none came."""
    done: float | None
    """When the last token came; None: it failed, or was given up."""
    prompt_tokens: int
    tokens: int
    """That came."""
    gaps: tuple[float, ...]
    """Seconds between chunks of the answer."""
    error: str
    """Why it failed: "429", "timeout", "reset" ...; "": it did not."""

    @property
    def ttft(self) -> float | None:
        """Seconds from its intended arrival to its first token."""
        return None if self.first is None else self.first - self.due

    @property
    def itl(self) -> float | None:
        """Mean seconds between its tokens; None with fewer than two."""
        if self.first is None or self.done is None or self.tokens < 2:
            return None
        return (self.done - self.first) / (self.tokens - 1)

    @property
    def e2e(self) -> float | None:
        """Seconds from its intended arrival to its last token."""
        return None if self.done is None else self.done - self.due
