"""Judge whether other clients of the measured servers still get the promised latencies. Pure.

A server's histograms count the requests of all clients. The load test's own requests are
subtracted. Whether such a request was late is judged by the latency that the load client measured
from its sending. This latency includes the network, so at the client at least as many requests are
late as at the server. There are two signs of harm:

- More than 1 % of the requests of other clients were late. Objectives apply to 99 of 100 requests.
- More than 1 % of all requests were late. Other clients share the queue and the steps with the load
  test, and the load test would raise the operator's alert.

A latency counts as late if it is above the first bucket bound of the histogram that is not below
the objective. Pauses between tokens are counted one by one, as in the alert.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gpufleet.engines import engine
from gpufleet.engines.engine import Measure
from gpufleet.engines.metrics_page import MetricsPage, expected_name, read_page
from gpufleet.load_test.outcomes import Contract, Outcome

WINDOW_SECONDS = 300.0
"""The length of the observed time in seconds.

It is long enough to include a user with one request a minute. It is short enough that a burst of
late requests does not disappear among the requests of the hour before.
"""
SETTLE_SECONDS = 3.0
"""
After this time in seconds, the load clients have reported all their requests up to an observation.

A client reports once a second.
"""
LATE_SHARE = 0.01
"""The allowed share of late requests, because objectives apply to 99 of 100 requests."""


class _Promise(NamedTuple):
    """An objective, with its histogram and its alert."""

    name: str
    measure: Measure
    limit: str
    """The field of a contract."""
    alert: str
    fewest: int
    """The allowed share applies to at least this number of observations, as in the alert."""
    said: str


PROMISES: Mapping[str, _Promise] = {
    "ttft": _Promise(
        "TTFT", Measure.TTFT,
        "ttft_seconds", "VllmTtftAboveObjective", 100,
        "requests waited longer than {bound:g} s for their first token",
    ),
    "itl": _Promise(
        "pauses between tokens", Measure.ITL,
        "itl_seconds", "VllmItlAboveObjective", 1000,
        "pauses between tokens were longer than {bound:g} s",
    ),
    "e2e": _Promise(
        "end to end", Measure.E2E,
        "e2e_seconds", "VllmE2eAboveObjective", 100,
        "requests took longer than {bound:g} s",
    ),
}  # fmt: skip


def line_beginnings() -> tuple[str, ...]:
    """Return the beginnings of the lines that `read_counts` needs from a page of /metrics."""
    return engine.line_beginnings(*(each.measure for each in PROMISES.values()))


@dataclass(frozen=True)
class Counts:
    """The observations of a latency since the start of a server."""

    total: float
    late: float
    bound: float
    """The bound in seconds above which observations are late."""


def read_counts(page: str, contract: Contract) -> dict[str, Counts] | str:
    """
    Return the counts of each promised latency in a page of /metrics, or why the counts are unknown.
    """
    try:
        read = read_page(page)
        histograms = {name: _buckets(read, name) for name, _ in promised(contract)}
    except ValueError as error:
        return f"the metrics cannot be read: {error}"
    found = {}
    for name, limit in promised(contract):
        histogram = expected_name(PROMISES[name].measure, read)
        counts = histograms[name]
        bound = min((each for each in counts if each >= limit), default=math.inf)
        if math.inf not in counts or not all(map(math.isfinite, counts.values())):
            return (
                f"the metrics have no {histogram}, with which gpufleet watches the requests of "
                "other clients"
            )
        if math.isinf(bound):
            return (
                f"{histogram} has no bucket bound of {limit:g} s or more, so gpufleet cannot see "
                "late requests"
            )
        found[name] = Counts(counts[math.inf], counts[math.inf] - counts[bound], bound)
    return found


def _buckets(page: MetricsPage, promise: str) -> Mapping[float, float]:
    """
    Return the number of observations up to each bucket bound, summed over all engines of a server.
    """
    counts: dict[float, float] = {}
    for labels, value in page.measured(PROMISES[promise].measure):
        if "le" in labels:
            bound = float(labels["le"])
            counts[bound] = counts.get(bound, 0.0) + value
    return counts


def promised(contract: Contract) -> Iterator[tuple[str, float]]:
    """Yield each promised latency with its limit in seconds."""
    for name, each in PROMISES.items():
        if (limit := getattr(contract, each.limit)) is not None:
            yield name, limit


class _Look(NamedTuple):
    """The counts of all servers at one moment, and those of the load test's own requests."""

    at: float
    level_seconds: float
    """The time of the level's last heartbeat, in seconds."""
    level: int
    servers: Mapping[str, Mapping[str, Counts]]
    own: Mapping[str, tuple[int, int]]


class OtherClients:
    """The counts of servers, and of the load test's own requests, over `WINDOW_SECONDS`."""

    def __init__(self, bounds: Mapping[str, float]) -> None:
        """Set the bound of each promised latency, above which observations are late."""
        self._bounds = bounds
        self._looks: deque[_Look] = deque()
        self._own = dict.fromkeys(bounds, (0, 0))
        """The number of observations of the load test itself, and how many of them may be late."""
        self._level, self._level_seconds = 0, 0.0
        self._late_in_flight = 0

    def begin_level(self) -> None:
        """Begin a level of load, whose times start at 0."""
        self._level, self._level_seconds, self._late_in_flight = self._level + 1, 0.0, 0

    def end_level(self, unfinished: int) -> None:
        """
        Count the requests that were dropped at the end of a level. All of them may have been late.
        """
        for name in self._own:
            if name != "itl":
                self._add(name, unfinished, unfinished)
        self._late_in_flight = 0

    def add(self, outcome: Outcome) -> None:
        """Count a request of the load test itself."""
        for name, bound in self._bounds.items():
            if name == "itl":
                self._add(name, len(outcome.gaps), sum(each > bound for each in outcome.gaps))
                continue
            end = outcome.first if name == "ttft" else outcome.done
            # For a failed request, it is unknown what the server has counted, so the request counts
            # as late.
            self._add(name, 1, end is None or end - outcome.sent > bound)

    def beat(self, now: float, in_flight: Sequence[float]) -> None:
        """Record the due times of the requests in flight at a heartbeat."""
        self._level_seconds = now
        bound = self._bounds.get("ttft", math.inf)
        self._late_in_flight = sum(now - due > bound for due in in_flight)

    def look(self, at: float, servers: Mapping[str, Mapping[str, Counts]]) -> str:
        """
        Record the servers' counts at a moment.

        Returns why the counts cannot be compared with earlier counts, or "".
        """
        if self._looks:
            last = self._looks[-1].servers
            if last.keys() != servers.keys():
                return "the servers behind the target have changed"
            for server, counts in servers.items():
                if any(counts[name].total < each.total for name, each in last[server].items()):
                    return f"{server} was restarted, so its counts began again at 0"
        self._looks.append(_Look(at, self._level_seconds, self._level, servers, dict(self._own)))
        while len(self._looks) > 2 and self._looks[1].at <= at - WINDOW_SECONDS:
            self._looks.popleft()
        return ""

    def late_reason(self) -> str:
        """Return a sentence about the harm to other clients, or "" if there is no sign of harm."""
        settled = [each for each in self._looks if self._is_settled(each)]
        if len(settled) < 2:
            return ""
        first, last = settled[0], settled[-1]
        for name, bound in self._bounds.items():
            of = PROMISES[name]
            total, late = (
                _sum(last.servers, name, each) - _sum(first.servers, name, each)
                for each in ("total", "late")
            )
            own, own_late = (a - b for a, b in zip(self._own[name], first.own[name], strict=True))
            own_late += self._late_in_flight if name == "ttft" else 0
            others, others_late = max(0.0, total - own), late - own_late
            said = of.said.format(bound=bound)
            when = f"in {last.at - first.at:.0f} s"
            if others_late > _allowed(others, of.fewest):
                return (
                    f"of about {others:.0f} values of other clients, {others_late:.0f} {said} "
                    f"{when}"
                )
            if late > _allowed(total, of.fewest):
                fires = f": {of.alert} would fire" if total >= of.fewest else ""
                return (
                    f"of {total:.0f} values, including those of the load test, {late:.0f} {said} "
                    f"{when}{fires}"
                )
        return ""

    def _is_settled(self, look: _Look) -> bool:
        since = self._level_seconds - look.level_seconds
        return look.level < self._level or since >= SETTLE_SECONDS

    def _add(self, name: str, count: int, late: int) -> None:
        total, before = self._own[name]
        self._own[name] = total + count, before + late


def bound_remarks(contract: Contract, bounds: Mapping[str, float]) -> tuple[str, ...]:
    """Return a remark on each objective that is not a bucket bound of the servers' histograms."""
    return tuple(
        f"{name.upper() if name != 'e2e' else 'requests'} of other clients count as late only "
        f"above {bounds[name]:g} s, because this is the first bucket bound of vLLM's histogram "
        f"that is not below the objective of {limit:g} s"
        for name, limit in promised(contract)
        if name in bounds and bounds[name] > limit
    )


def shared_bounds(servers: Iterable[Mapping[str, Counts]]) -> dict[str, float]:
    """Return the highest bound of each latency over all servers."""
    found: dict[str, float] = {}
    for each in servers:
        for name, counts in each.items():
            found[name] = max(counts.bound, found.get(name, 0.0))
    return found


def _allowed(count: float, fewest: int) -> float:
    return max(count, fewest) * LATE_SHARE


def _sum(servers: Mapping[str, Mapping[str, Counts]], name: str, of: str) -> float:
    return sum(float(getattr(each[name], of)) for each in servers.values())
