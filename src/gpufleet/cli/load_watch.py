"""Observe a target's servers during a load test, to record their load and to protect users."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import gevent

from gpufleet.errors import FleetError
from gpufleet.load_test import guest, other_clients
from gpufleet.load_test.client_process import Beat, LevelRun
from gpufleet.load_test.guest import ServerLoad
from gpufleet.load_test.level_runs import LevelObserver
from gpufleet.load_test.other_clients import Counts, OtherClients
from gpufleet.load_test.outcomes import Contract, Outcome
from gpufleet.upgrade.plan import replica_load

GUEST_LOOK_SECONDS, LOOK_SECONDS = 3.0, 10.0
STALE_SECONDS = 60.0
"""
Seconds after which a guest stops if the load is not known.

A node has 30 s to answer, and a connection to it may take 40 s.
"""


@dataclass(frozen=True)
class Look:
    """One observation of a target's servers."""

    loads: list[ServerLoad | str]
    """The load of each replica, or the reason why it is unknown."""
    pages: Mapping[str, str] = field(default_factory=dict, repr=False)
    """The text of each server's page /metrics, by `NODE:PORT`."""


class LoadWatch:
    """Observes the servers during a load test. No other client may send requests meanwhile."""

    def __init__(
        self, look: Callable[[], Look], record: Callable[[list[ServerLoad | str]], None]
    ) -> None:
        self._look, self._record = look, record
        self._finished: dict[str, float] = {}
        self._reason = ""

    def run(self) -> None:
        """Observe the servers until there is a reason to stop."""
        while not self._reason:
            self.look_once()
            gevent.sleep(LOOK_SECONDS)

    def look_once(self) -> None:
        """Observe the servers once, and record their loads. If a query fails, record the reason."""
        try:
            seen = self._look()
        except FleetError as error:
            self._record([error.problems[0]])
            return
        self._record(seen.loads)
        for server, page in seen.pages.items():
            sample = replica_load.read(page)
            if isinstance(sample, str) or sample.finished is None:
                continue
            if sample.finished < self._finished.get(server, 0.0):
                # Requests that were lost or that arrived during the start do not show the capacity.
                self._reason = f"{server} was restarted during the measurement: measure again"
            self._finished[server] = sample.finished

    def reason(self, _in_flight: int) -> str:
        """Return why the load must end, or "" if it may continue."""
        return self._reason


class GuestWatch(LevelObserver):
    """Observes the servers while a guest sends requests, and decides when the guest must stop."""

    def __init__(
        self,
        look: Callable[[], Look],
        record: Callable[[list[ServerLoad | str]], None],
        contract: Contract,
        most: int,
        share: float,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Make the first observation.

        `most` is the maximum number of requests in flight: the part `share` of the slots that were
        idle before the guest began. Each observation computes this maximum again. Raises
        `FleetError` if other clients' latencies cannot be measured.
        """
        self._look, self._record, self._clock = look, record, clock
        self._contract, self._most, self._reason = contract, most, ""
        self._looked = clock()
        self._share, self._own = share, 0
        # Limits of the last two observations, because requests in flight are known only with a
        # delay of a second or two.
        self._allowed = (most, most)
        servers = read_servers(look(), contract)
        bounds = other_clients.shared_bounds(servers.values())
        self.remarks = other_clients.bound_remarks(contract, bounds)
        """Remarks for the operator on the measurement of other clients' latencies."""
        self._others = OtherClients(bounds)
        self._others.look(clock(), servers)

    def run(self) -> None:
        """Observe the servers until there is a reason to stop."""
        while not self._reason:
            gevent.sleep(GUEST_LOOK_SECONDS)
            self._reason = self.look_once()

    def look_once(self) -> str:
        """Observe the servers once. Return why the guest must stop, or "" if it may continue."""
        try:
            seen = self._look()
            self._looked = self._clock()
            self._record(seen.loads)
            if why := guest.stop_reason(seen.loads):
                return why
            most = guest.allowance(seen.loads, self._own, self._share).most
            self._allowed, self._own = (self._allowed[1], most), 0
            return self._others.look(self._clock(), read_servers(seen, self._contract))
        except FleetError as error:
            return error.problems[0]

    def began(self, _load: float, /) -> None:
        """Record that a level begins."""
        self._others.begin_level()

    def outcome(self, outcome: Outcome) -> None:
        """Record the outcome of one of the guest's own requests."""
        self._others.add(outcome)

    def beat(self, beat: Beat) -> None:
        """Record which of the guest's requests are in flight now."""
        self._others.beat(beat.now, beat.in_flight)
        # Requests above the guest's share wait in the client.
        self._own = max(self._own, min(len(beat.in_flight), self._most))

    def ended(self, run: LevelRun) -> None:
        """Record that a level has ended."""
        self._others.end_level(len(run.unfinished))

    def reason(self, in_flight: int) -> str:
        """Return why the load must end, or "" if it may continue."""
        why = self._reason or self._others.late_reason()
        if not why and self._clock() - self._looked > STALE_SECONDS:
            why = f"the servers' load has not been known for {STALE_SECONDS:.0f} s"
        if why:
            return f"stopped as a guest: {why}"
        most = min(self._most, max(self._allowed))
        if in_flight > most:
            return (
                f"stopped as a guest: {in_flight} requests are due, but the share of the idle "
                f"capacity allows only {most}"
            )
        return ""


def read_servers(seen: Look, contract: Contract) -> dict[str, dict[str, Counts]]:
    """
    Return each server's counts for the latencies that have an objective.

    Raises `FleetError` if the counts of a server or the load of a replica are unknown.
    """
    found: dict[str, dict[str, Counts]] = {}
    problems = [each for each in seen.loads if isinstance(each, str)]
    for server, page in seen.pages.items():
        counts = other_clients.read_counts(page, contract)
        if isinstance(counts, str):
            problems.append(f"{server}: {counts}")
        else:
            found[server] = counts
    if problems:
        raise FleetError(*problems)
    return found
