"""
Find replicas that are slow, and why. Pure.

A replica is compared with its objectives and its siblings. Causes may be in its queue, its KV
cache, its prompts, or its hardware.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import median

from gpufleet.checks.finding import Finding
from gpufleet.doctor.fleet_diagnosis import Impact, Problem
from gpufleet.doctor.node_problems import failed_checks
from gpufleet.doctor.observations import FleetObservations
from gpufleet.doctor.replica_speed import ReplicaSpeed
from gpufleet.serving.rank_status import Health, RankStatus
from gpufleet.serving.status import ReplicaStatus

LEAST_TOKENS = 200
"""
The fewest tokens for a p99. With fewer tokens, the p99 is only the slowest one or two of them.
"""
LEAST_REQUESTS = 20
FULL = 0.9
"""The share of the KV cache from which vLLM begins to preempt requests."""
LONG_TOKENS = 8000
"""
A prompt with this number of tokens nearly fills vLLM's default batch of 8,192 tokens, so other
requests have to wait for it.
"""
LONG_SHARE = 0.05
STRAGGLES = 1.5
"""
A replica is slow if its time between tokens is this many times that of its siblings. Boards of the
same kind differ by some percent (gpufleet's own number).
"""
LIKE_LOAD = 2.0
"""
Two siblings are compared only if neither runs more than this many times the requests of the other.
"""
OF_SPEED = frozenset(
    {"hardware-slowdown", "software-throttle", "temperature", "power-limit", "locked-clocks"}
    | {"pcie-width", "pcie-generation", "pcie-replays", "nvlink-links", "nvlink-width"}
    | {"foreign-processes", "gpu-outlier"}
)
"""The checks for conditions that make a GPU slow but do not end its programs."""


def slow_problems(observed: FleetObservations, inventory: str) -> Iterator[Problem]:
    """
    Yield a problem for each serving replica that is slower than its objectives or its siblings.
    """
    serving = [each for each in observed.status.replicas if each.health is Health.SERVES]
    siblings: dict[str, list[tuple[str, ReplicaSpeed]]] = defaultdict(list)
    for each in serving:
        speed = observed.speeds.get(each.id)
        if isinstance(speed, ReplicaSpeed):
            siblings[each.model].append((each.id, speed))
    for each in serving:
        speed = observed.speeds.get(each.id)
        if not isinstance(speed, ReplicaSpeed):
            continue
        missed = [*_missed(observed, each.model, speed)]
        others = [other for name, other in siblings[each.model] if name != each.id]
        behind = _straggles(speed, others)
        if missed or behind:
            yield _problem(observed, each, _Slowness(speed, missed, behind), inventory)


def unknown_speeds(observed: FleetObservations) -> Iterator[str]:
    """Yield a sentence for each replica that has an objective but whose speed could not be read."""
    for each in observed.status.replicas:
        objectives = observed.objectives.get(each.model)
        promised = objectives and (
            objectives.itl_p99_seconds or objectives.ttft_p99_seconds or objectives.e2e_p99_seconds
        )
        speed = observed.speeds.get(each.id, "its node did not answer in time")
        if each.health is not Health.SERVES or not promised:
            continue
        if isinstance(speed, str):
            yield f"{each.id}: unknown whether the replica is slow: {speed}"
        elif speed.missing:
            yield (
                f"{each.id}: unknown whether the replica is slow: its /metrics do not contain "
                f"{', '.join(speed.missing)}"
            )


def _missed(observed: FleetObservations, model: str, speed: ReplicaSpeed) -> Iterator[str]:
    """Yield a sentence for each objective that the replica does not meet now."""
    objectives = observed.objectives.get(model)
    if objectives is None:
        return
    for name, histogram, promised, least in (
        ("ITL", speed.itl, objectives.itl_p99_seconds, LEAST_TOKENS),
        ("TTFT", speed.ttft, objectives.ttft_p99_seconds, LEAST_REQUESTS),
        ("e2e latency", speed.e2e, objectives.e2e_p99_seconds, LEAST_REQUESTS),
    ):
        if promised is None or histogram.total < least:
            continue
        # The value is certainly above the lower bound of its bucket. Its exact position in the
        # bucket is unknown.
        above = [at for at in histogram.counts if at < histogram.quantile(0.99)]
        low = max(above, default=0.0)
        if low >= promised:
            yield f"p99 {name} is above {_time(low)}, the objective is {_time(promised)}"


def _straggles(speed: ReplicaSpeed, others: Iterable[ReplicaSpeed]) -> str:
    """Return a sentence if the replica is slower than its siblings under a similar load, or ""."""
    if speed.itl.total < LEAST_TOKENS:
        return ""
    alike = [
        other.itl.mean
        for other in others
        if other.itl.total >= LEAST_TOKENS
        and speed.running <= LIKE_LOAD * other.running
        and other.running <= LIKE_LOAD * speed.running
    ]
    if not alike or (own := speed.itl.mean) < STRAGGLES * (theirs := median(alike)):
        return ""
    return (
        f"a token takes {_time(own)}, but {_time(theirs)} on other replicas of the model under a "
        f"similar load (median of replicas that run between half and twice as many requests)"
    )


@dataclass(frozen=True)
class _Slowness:
    speed: ReplicaSpeed
    missed: list[str]
    """A sentence for each objective that the replica does not meet."""
    behind: str
    """A sentence if the replica is slower than its siblings, or ""."""


def _problem(
    observed: FleetObservations, replica: ReplicaStatus, slow: _Slowness, inventory: str
) -> Problem:
    speed, missed, behind = slow.speed, slow.missed, slow.behind
    nodes = tuple(dict.fromkeys(rank.node for rank in replica.ranks))
    because = _because(observed, replica)
    causes = [*_load_causes(replica.model, speed)] if missed else []
    if behind and not because:
        causes.append(
            (
                "the replica is slower than the model's other replicas under a similar load, and "
                "no check of its node shows the reason; the cause may be its GPUs, its PCIe or "
                "network path, or another program",
                f"`gpufleet check {inventory} --limit {nodes[0]}`; compare clocks and power with "
                f"the node of another replica (`nvidia-smi -q -d CLOCK,POWER`)",
            )
        )
    evidence = [
        *missed,
        *([behind] if behind else []),
        f"{speed.running:.0f} requests run, {speed.waiting:.0f} wait, {speed.preempted:.0f} were "
        f"preempted; the KV cache is {speed.kv_use:.0%} full",
    ]
    return Problem(
        f"{replica.id} (slow)",
        f"{replica.id} serves, but is slow",
        Impact.RISK,
        tuple(evidence),
        "; ".join(cause for cause, _ in causes),
        "\n".join(do for _, do in causes)
        or (
            ""
            if because
            else f"`gpufleet measure {inventory}` shows how many requests it can serve"
        ),
        "docs/operate/doctor.md",
        names=(replica.id, replica.model, *nodes),
        because=because,
    )


def _load_causes(model: str, speed: ReplicaSpeed) -> Iterator[tuple[str, str]]:
    """Yield the causes that are in the load itself, each with the setting to change."""
    flags = f"serving.{model}.flags"
    if speed.preempted or (speed.kv_use >= FULL and speed.waiting):
        yield (
            "the KV cache is too small for the requests that run at once",
            f"Lower max-num-seqs ({flags}), raise serving.{model}.replicas, or lower "
            f"serving.{model}.context.",
        )
    elif speed.waiting:
        yield (
            (
                "requests wait although the KV cache has room: max-num-seqs may limit the number "
                "of running requests"
            ),
            f"Raise serving.{model}.replicas; if ITL is well below its objective, raise "
            f"max-num-seqs ({flags}).",
        )
    if (share := speed.prompts.share_above(LONG_TOKENS)) > LONG_SHARE:
        yield (
            f"{share:.0%} of the prompts have more than {LONG_TOKENS:,} tokens, so other "
            f"requests may wait for them",
            f"Lower max-num-batched-tokens ({flags}), or serve long prompts from a separate entry "
            "of `serving`.",
        )


def _because(observed: FleetObservations, replica: ReplicaStatus) -> str:
    """
    Return the subject of the check that explains why the replica's GPUs are slow, or "" if there is
    none.
    """
    for subject, findings in failed_checks(observed):
        if any(_slows(rank, each) for each in findings for rank in replica.ranks):
            return subject
    return ""


def _slows(rank: RankStatus, found: Finding) -> bool:
    """Return whether a finding reports that a GPU of the rank is slowed down."""
    return (
        found.check in OF_SPEED
        and found.node == rank.node
        and (found.gpu is None or found.gpu.uuid in rank.gpus or found.gpu.index in rank.indices)
    )


def _time(seconds: float) -> str:
    if math.isinf(seconds):
        return "the last bound"
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
