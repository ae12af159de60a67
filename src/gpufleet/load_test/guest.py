"""Load beside users: how much of what is idle it may take, and when it has to stop.  Pure.

What vLLM itself says decides: its queue and the use of its KV cache. A request that waits, waits
behind ours, too, so the first one that does ends the load.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from gpufleet.errors import FleetError

# Above it vLLM soon preempts requests, those of others as well (docs/alerts/vllm-kv-cache-full.md).
MOST_KV_USAGE = 0.9


@dataclass(frozen=True)
class ServerLoad:
    """The load of a replica."""

    replica: str
    running: float
    waiting: float
    kv_usage: float
    """From 0 to 1."""
    slots: int | None
    """Requests that it takes at once; None: not known."""


@dataclass(frozen=True)
class Allowance:
    """The number of requests that a guest may have in flight."""

    most: int
    """Requests at once."""
    why: str = ""
    """Why none."""


def most_in_flight(loads: Iterable[ServerLoad | str], share: float) -> int:
    """
    Return how many requests a guest may have under way at once.

    `share` of the slots that are idle, or of those that the idle KV cache is worth if that is less.
    A sentence in place of a load says why it is not known. Raises `FleetError` where one is not
    known, and where nothing is idle.
    """
    idle = idle_slots(loads)
    if (most := math.floor(idle * share)) < 1:
        raise FleetError(f"{_too_little(idle, share)}: measure when less goes on, or raise --guest")
    return most


def allowance(loads: Sequence[ServerLoad | str], own: int, share: float) -> Allowance:
    """
    Return what a guest may have under way that stays, and has `own` requests under way now.

    None while requests wait and any of others are there: they may be those that wait. Raises
    `FleetError` where a replica's limit is not known.
    """
    others = subtract_own_load(loads, own)
    # Alone, a guest's own requests may wait: no request waits behind them.
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
    Return loads without a guest's own requests: of all requests they are this part everywhere.

    A server does not tell whose requests it has; a gateway spreads all alike.
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
    Return how many requests more would fit: by slots, or by the KV cache if that is less.

    Raises `FleetError` where a load, or a replica's limit of requests, is not known.
    """
    idle = 0.0
    unknown = []
    for each in loads:
        if isinstance(each, str):
            unknown.append(each)
        elif each.slots is None:
            unknown.append(f"{each.replica}: its limit of concurrent requests is unknown: set "
                           "`flags.max-num-seqs`")  # fmt: skip
        else:
            free = each.slots - each.running - each.waiting
            idle += max(0.0, min(free, each.slots * (1 - each.kv_usage)))
    if unknown:
        raise FleetError(*unknown)
    return idle


def _too_little(idle: float, share: float) -> str:
    return f"{idle:.0f} requests more would fit, and a guest may take {share:.0%} of that"


def stop_reason(loads: Iterable[ServerLoad | str]) -> str:
    """Return why a guest has to stop now, as a sentence; "": it may go on."""
    for each in loads:
        if isinstance(each, str):
            return f"a replica's load is no longer known ({each})"
        if each.waiting:
            return f"{each.waiting:.0f} requests wait for {each.replica}"
        if each.kv_usage > MOST_KV_USAGE:
            return f"{each.kv_usage:.0%} of {each.replica}'s KV cache is in use"
    return ""


def busy_replicas(loads: Iterable[ServerLoad | str]) -> Mapping[str, float]:
    """Return the replicas that have requests of others before any load is put on."""
    return {
        each.replica: each.running + each.waiting
        for each in loads
        if not isinstance(each, str) and each.running + each.waiting
    }
