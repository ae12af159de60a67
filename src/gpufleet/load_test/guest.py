"""
Limit a load test beside real users to a share of the idle capacity, and decide when it must stop.

Pure. In this module, the load test is called the guest. The decision uses vLLM's own metrics: its
queue and its usage of the KV cache. A user's request that is queued also waits for the guest's
requests. So the first queued request ends the load test.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpufleet.errors import FleetError
from gpufleet.settings.engine_flags import SLOT_FLAGS

# Above this usage vLLM soon preempts requests, also those of others
# (docs/alerts/vllm-kv-cache-full.md).
MOST_KV_USAGE = 0.9


@dataclass(frozen=True)
class ServerLoad:
    """The load of a replica."""

    replica: str
    running: float
    waiting: float
    kv_usage: float
    """The used part of the KV cache, from 0 to 1."""
    slots: int | None
    """The replica's maximum number of concurrent requests, or None if it is unknown."""
    gateway_slots: int | None = None
    """The gateway's maximum number of concurrent requests to the replica, or None."""

    @property
    def limit(self) -> int | None:
        """Return how many concurrent requests can reach the replica, or None if this is unknown."""
        known = [each for each in (self.slots, self.gateway_slots) if each is not None]
        return None if self.slots is None else min(known)


@dataclass(frozen=True)
class Allowance:
    """The number of requests that a guest may have in flight."""

    most: int
    """The maximum number of requests in flight."""
    why: str = ""
    """Why the maximum is 0; "" if it is not 0."""


def most_in_flight(loads: Iterable[ServerLoad | str], share: float) -> int:
    """
    Return the maximum number of requests that a guest may have in flight.

    The maximum is `share` of the idle slots. If the idle KV cache has room for fewer requests, the
    maximum is `share` of this number. If the load of a replica is unknown, `loads` has a sentence
    with the reason instead. Raises `FleetError` if a load is unknown, or if nothing is idle.
    """
    idle = idle_slots(loads)
    if (most := math.floor(idle * share)) < 1:
        raise FleetError(
            f"{_too_little(idle, share)}. Measure when the servers have less load, or raise --guest"
        )
    return most


def allowance(loads: Sequence[ServerLoad | str], own: int, share: float) -> Allowance:
    """
    Return the maximum number of requests in flight for a running guest.

    `own` is the number of the guest's requests in flight now. The maximum is 0 while requests queue
    and other clients have running or queued requests. Raises `FleetError` if a replica's limit is
    unknown.
    """
    others = subtract_own_load(loads, own)
    # If there are no other clients, the guest's own requests may wait, because no other request
    # waits behind them.
    alone = not busy_replicas(others)
    judged = [
        replace(each, waiting=0.0) if alone and not isinstance(each, str) else each
        for each in loads
    ]
    if why := stop_reason(judged):
        return Allowance(0, why)
    idle = idle_slots(others)
    most = math.floor(idle * share)
    return Allowance(most, "" if most else _too_little(idle, share))


def subtract_own_load(loads: Iterable[ServerLoad | str], own: int) -> list[ServerLoad | str]:
    """
    Return the loads without the guest's own requests.

    The function assumes that the guest's requests are the same share of the requests on every
    server. A server does not report the owners of requests, and a gateway spreads all requests
    evenly.
    """
    loads = list(loads)
    total = sum(each.running + each.waiting for each in loads if not isinstance(each, str))
    part = max(0.0, 1 - own / total) if total else 0.0
    return [
        each
        if isinstance(each, str)
        else replace(
            each,
            running=each.running * part,
            waiting=each.waiting * part,
            kv_usage=each.kv_usage * part,
        )
        for each in loads
    ]


def idle_slots(loads: Iterable[ServerLoad | str]) -> float:
    """
    Return how many more requests the servers have room for, by slots and by KV cache.

    Raises `FleetError` if a load, or a replica's limit of requests, is unknown.
    """
    idle = 0.0
    unknown = []
    for each in loads:
        if isinstance(each, str):
            unknown.append(each)
        elif (limit := each.limit) is None:
            flags = " or ".join(f"`flags.{flag}`" for flag in SLOT_FLAGS.values())
            unknown.append(
                f"{each.replica}: gpufleet does not know the limit of concurrent requests: set "
                f"{flags}, depending on the replica's engine"
            )  # fmt: skip
        else:
            free = limit - each.running - each.waiting
            idle += max(0.0, min(free, limit * (1 - each.kv_usage)))
    if unknown:
        raise FleetError(*unknown)
    return idle


def _too_little(idle: float, share: float) -> str:
    return (
        f"the servers have room for {idle:.0f} more requests, of which a guest may use "
        f"{share:.0%}, so no request can be sent"
    )


def stop_reason(loads: Iterable[ServerLoad | str]) -> str:
    """Return why a guest must stop now, as a sentence, or "" if the guest may continue."""
    loads = list(loads)
    full = [each for each in loads if not isinstance(each, str) and _fills_gateway(each)]
    if loads and len(full) == len(loads):
        return (
            "every replica has as many requests as the gateway sends to it "
            "(`gateway.per_server`), so requests of other clients may wait in the gateway"
        )
    for each in loads:
        if isinstance(each, str):
            return f"gpufleet no longer knows the load of a replica ({each})"
        if each.waiting:
            return f"{each.waiting:.0f} requests wait for {each.replica}"
        if each.kv_usage > MOST_KV_USAGE:
            return f"{each.kv_usage:.0%} of {each.replica}'s KV cache is in use"
    return ""


def _fills_gateway(load: ServerLoad) -> bool:
    return load.gateway_slots is not None and load.running + load.waiting >= load.gateway_slots


def busy_replicas(loads: Iterable[ServerLoad | str]) -> Mapping[str, float]:
    """
    Return the replicas that have requests.

    Each name maps to the number of running and waiting requests.
    """
    return {
        each.replica: each.running + each.waiting
        for each in loads
        if not isinstance(each, str) and each.running + each.waiting
    }
