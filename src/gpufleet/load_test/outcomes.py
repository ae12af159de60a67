"""Define contracts and outcomes of a load test. Pure.

Times are seconds from the start of the load. `due` is a request's intended arrival, which an
open-loop client decides independently of the server. Latencies start at `due`, because a client
that counts from `sent` hides its own queue (coordinated omission).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple


@dataclass(frozen=True)
class Contract:
    """The latencies promised to clients, and the share of requests that must meet them."""

    ttft_seconds: float | None = None
    """The maximum time to first token; None without a promise."""
    itl_seconds: float | None = None
    """The maximum mean time between the tokens of one answer."""
    e2e_seconds: float | None = None
    """The maximum time to the last token."""
    share: float = 0.95
    """The share of requests that must keep the whole contract."""
    confidence: float = 0.95
    """The confidence of the interval that must hold the true share, for a verdict."""

    def with_longer_limits(self, seconds: float) -> Contract:
        """Return the contract with limits on TTFT and E2E that are longer by these seconds."""
        ttft, e2e = (
            None if limit is None else limit + seconds
            for limit in (self.ttft_seconds, self.e2e_seconds)
        )
        return replace(self, ttft_seconds=ttft, e2e_seconds=e2e)


class Outcome(NamedTuple):
    """The client's view of one request."""

    due: float
    sent: float
    """
    The time of sending, later than `due` by the client's lag or, in a closed loop, by its wait.
    """
    first: float | None
    """The time of the first token; None if none arrived."""
    done: float | None
    """The time of the last token; None if the request failed or was given up."""
    prompt_tokens: int
    tokens: int
    """The number of received tokens."""
    gaps: tuple[float, ...]
    """Seconds between chunks of the answer."""
    error: str
    """Why the request failed, such as "429", "timeout" or "reset"; "" without a failure."""

    @property
    def ttft(self) -> float | None:
        """Seconds from the intended arrival to the first token."""
        return None if self.first is None else self.first - self.due

    @property
    def itl(self) -> float | None:
        """Mean seconds between the answer's tokens; None with fewer than two tokens."""
        if self.first is None or self.done is None or self.tokens < 2:
            return None
        return (self.done - self.first) / (self.tokens - 1)

    @property
    def e2e(self) -> float | None:
        """Seconds from the intended arrival to the last token."""
        return None if self.done is None else self.done - self.due
