"""
Evaluate the divisions of a model over the GPUs of one kind of node, and choose the best.  Pure.

If the operator sets a value (`tensor_parallel` and similar), gpufleet only checks that value.
Otherwise gpufleet tries these values:

- tensor parallelism in powers of two, inside an NVLink island. Larger groups are tried only if
  `allow_pcie` is set and nothing fits inside an island;
- pipeline parallelism over islands and nodes, only if `span_nodes` is set and nothing else fits.
  Tensor, data and expert parallelism extend over several nodes only if the operator sets them;
- for mixture-of-experts models, several engines with whole experts on each GPU (data and expert
  parallelism), if `objective: throughput` is set.

A division fits if the KV cache has room for `concurrency` requests of the requested context length,
even if the estimate is wrong by its maximum error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import TYPE_CHECKING, TypeAlias

from gpufleet.errors import FleetError, NotKnownError
from gpufleet.planning.parallelism import Division, Kind, parts_per_node, replica_capacity, spread
from gpufleet.planning.serving_options import memory_gib, sizing_options
from gpufleet.settings import engine_flags
from gpufleet.settings.engine_flags import DEFAULT
from gpufleet.settings.serving_settings import Served
from gpufleet.sizing.options import Options, Sizing

if TYPE_CHECKING:
    from gpufleet.sizing.architectures.description import Description

Sizer: TypeAlias = "Callable[[Description, Options], Sizing]"

GIB = 1 << 30

# The four below are choices of this project, not measurements.
CACHE_SHARE = 0.1
"""
Minimum share of a GPU's memory that remains for the KV cache with the default objective.

A smaller group that leaves less memory is not chosen, because it runs fewer requests at once.
"""
SMALL_WEIGHTS_GIB = 2.0
"""
Size of the weights per GPU, in GiB, at which reading them takes as long as waiting for other GPUs.

Below this size, a wider group is no faster, unless it also divides the KV cache further.
"""
THROUGHPUT_SHARE = 0.6
"""
Share of the maximum number of KV tokens per GPU that is enough for `objective: throughput`.

gpufleet chooses the smallest group that reaches this share, because GPUs in a group of twice the
size wait twice as much for each other.
"""
MOST_STAGES = 8
"""
Maximum number of pipeline stages, unless the operator sets `pipeline_parallel`.

In a deeper pipeline, stages idle more than they work.
"""


class Verdict(StrEnum):
    """Whether servers with a division start and have room for the requested concurrency."""

    FITS = "fits"
    NEAR = "near the edge"
    NO = "does not fit"
    UNKNOWN = "not checked"


@dataclass(frozen=True)
class Candidate:
    """One division of a model on one kind of node, with its verdict."""

    division: Division
    verdict: Verdict
    reason: str
    """Why the candidate was chosen or not, as a sentence without a full stop."""
    sizing: Sizing | None = None
    """None if unknown."""
    replicas: int = 0
    """Maximum number of replicas on the nodes of this kind, if the nodes run nothing else."""
    chosen: bool = False

    @property
    def fits(self) -> bool:
        """
        Return whether the candidate may be chosen: it fits, and there is no reason against it.
        """
        return self.verdict is Verdict.FITS and not self.reason

    @property
    def kv_tokens(self) -> int:
        """Return how many tokens the KV caches of all engines of the replica hold together."""
        return self.sizing.kv_cache_tokens * self.division.data_parallel if self.sizing else 0

    @property
    def concurrency(self) -> float:
        """Return how many requests of full length all engines of the replica run at once."""
        return self.sizing.max_concurrency * self.division.data_parallel if self.sizing else 0.0


@dataclass(frozen=True)
class CandidateSet:
    """The candidates of one model on one kind of node."""

    model: str
    kind: Kind
    nodes: int
    candidates: tuple[Candidate, ...]
    names: tuple[str, ...] = ()
    """Names of the nodes, if known."""

    @property
    def chosen(self) -> Candidate | None:
        """Return the candidate that the plan uses, or None if these nodes get no replica."""
        return next((each for each in self.candidates if each.chosen), None)


def evaluate_divisions(
    name: str,
    served: Served,
    description: Description | str | None,
    kind: Kind,
    nodes: int,
    *,
    sizer: Sizer,
) -> CandidateSet:
    """
    Evaluate all divisions of `served` on `nodes` nodes of a kind, and choose one.

    `description` is the model's description, or a sentence why gpufleet could not read the model.
    In the second case, gpufleet uses the operator's `tensor_parallel` without a check.

    The choice does not depend on the number of replicas or nodes, so it stays the same when the
    fleet grows or shrinks. The only exception is a pipeline over several nodes, which needs that
    number of nodes.
    """
    if served.engine != DEFAULT:
        found = _weighed_candidates(served, description, kind, nodes)
    elif description is None or isinstance(description, str):
        found = _unchecked_candidates(served, kind, nodes, description)
    else:
        try:
            found = _checked_candidates(served, description, kind, nodes, sizer)
        except NotKnownError as error:
            found = _unchecked_candidates(served, kind, nodes, "; ".join(error.problems))
    return CandidateSet(name, kind, nodes, tuple(found))


def _unchecked_candidates(
    served: Served, kind: Kind, nodes: int, why: str | None
) -> list[Candidate]:
    if served.tensor_parallel is None:
        return []
    division = spread(
        Division(
            served.tensor_parallel,
            served.pipeline_parallel or 1,
            served.data_parallel or 1,
            bool(served.expert_parallel),
        ),
        served,
        kind,
    )
    reason = f"gpufleet did not check the memory: {why or 'it does not know the model'}"
    replicas = replica_capacity(division, served, kind, nodes)
    return [Candidate(division, Verdict.UNKNOWN, reason, replicas=replicas, chosen=True)]


# With these flags, a server needs less memory for the weights than the size of their files.
_LESS_WEIGHTS = frozenset({"cpu-offload-gb", "quantization", "load-format"})


def _weighed_candidates(
    served: Served, description: Description | str | None, kind: Kind, nodes: int
) -> list[Candidate]:
    """
    Return the divisions for an engine for which gpufleet can estimate only the memory of the
    weights.

    If the operator sets `tensor_parallel`, this division is chosen, unless the weights alone do not
    fit. Otherwise no division is chosen.
    """
    title = engine_flags.of(served.engine).title
    stored = None
    if not (description is None or isinstance(description, str) or _LESS_WEIGHTS & {*served.flags}):
        stored = description.stored_bytes
    own, total = served.tensor_parallel, memory_gib(kind)
    found = []
    for tensor in powers_of_two(1, kind.gpus) if own is None else [own]:
        division = spread(Division(tensor, served.pipeline_parallel or 1), served, kind)
        each = (stored or 0) / GIB / division.gpus
        verdict, reason = Verdict.UNKNOWN, f"gpufleet does not know how much memory {title} needs"
        if each > total:
            reason = (
                f"the weights alone need {each:.1f} GiB per GPU, but a GPU has only {total:.1f} GiB"
            )
            verdict = Verdict.NO
        elif stored:
            reason = (
                f"the weights need {each:.1f} GiB per GPU, and a GPU has {total:.1f} GiB. "
                f"gpufleet does not know how much additional memory {title} needs"
            )
        replicas = replica_capacity(division, served, kind, nodes)
        chosen = own is not None and verdict is not Verdict.NO
        found.append(Candidate(division, verdict, reason, replicas=replicas, chosen=chosen))
    return found


def _checked_candidates(
    served: Served, description: Description, kind: Kind, nodes: int, sizer: Sizer
) -> list[Candidate]:
    """Return the candidates. If any candidate is allowed, one of them is marked as chosen."""

    def check(division: Division) -> Candidate:
        replicas = replica_capacity(division, served, kind, nodes)
        try:
            sizing = sizer(description, sizing_options(served, kind, division))
        except NotKnownError:
            raise
        except FleetError as error:  # no release accepts it, or this model does not allow it
            return Candidate(division, Verdict.NO, "; ".join(error.problems), replicas=replicas)
        verdict, reason = _verdict(served, division, sizing)
        return Candidate(division, verdict, reason, sizing, replicas)

    island, node = max(kind.islands, default=0), kind.gpus
    own = served.tensor_parallel
    found = [check(each) for each in _divisions(served, description, kind, 1, island)]
    if own is None:
        found = _keep_fewest_nodes(found, served, kind, nodes)
    fitting = [each for each in found if each.fits]
    if not fitting and served.allow_pcie and own is None and node > island:
        found += (check(each) for each in _divisions(served, description, kind, island + 1, node))
        found = _keep_fewest_nodes(found, served, kind, nodes)
        fitting = [each for each in found if each.fits]
    deeper = served.span_nodes and served.pipeline_parallel is None and served.gpu_share is None
    if not fitting and deeper:
        for deep in _pipelines(
            served, description, kind, nodes, node if served.allow_pcie else island
        ):
            candidate = check(deep)
            found.append(candidate)
            if candidate.fits:
                fitting = [candidate]
                break
    if own is not None and not fitting:
        return [_accept_explicit(each) for each in found]
    return _choose(found, fitting, served, description) if fitting else found


def _keep_fewest_nodes(
    found: list[Candidate], served: Served, kind: Kind, nodes: int
) -> list[Candidate]:
    """
    Allow only those fitting candidates that need the fewest nodes, and add a reason to the others.

    Without this rule, a replica would spread over more nodes as the fleet grows.
    """

    def node_count(candidate: Candidate) -> float:
        return (
            candidate.division.nodes
            if parts_per_node(candidate.division, served, kind)
            else math.inf
        )

    fewest = min((node_count(each) for each in found if each.fits), default=math.inf)
    if fewest == math.inf:
        return found
    return [
        _check_node_count(each, node_count(each), fewest, nodes) if each.fits else each
        for each in found
    ]


def _check_node_count(candidate: Candidate, takes: float, fewest: float, nodes: int) -> Candidate:
    if takes == math.inf:
        gpus = candidate.division.gpus
        return replace(
            candidate,
            verdict=Verdict.NO,
            reason=f"the division needs {gpus} GPUs, but no node has {gpus} GPUs",
        )
    if takes > fewest:
        return replace(candidate, reason=f"fits, but needs {takes} nodes instead of {fewest}")
    if takes > nodes:
        are = f"{nodes} {'is' if nodes == 1 else 'are'} of this kind"
        return replace(
            candidate,
            verdict=Verdict.NO,
            reason=(f"the division needs {takes} nodes, but only {are}"),
        )
    return candidate


def _accept_explicit(candidate: Candidate) -> Candidate:
    """
    Choose the operator's division, even if it is near the edge or not checked, and say so in its
    reason.

    A division that is certain to fail is not chosen.
    """
    if candidate.verdict is Verdict.NO:
        return candidate
    reason = f"used because `tensor_parallel` is set: {candidate.reason}"
    return replace(candidate, reason=reason, chosen=True)


# Divisions to try


def _divisions(
    served: Served, description: Description, kind: Kind, least: int, most: int
) -> Iterator[Division]:
    """Yield the divisions on one node whose groups have `least` to `most` GPUs, smallest first."""
    own = served.tensor_parallel if served.gpu_share is None else 1
    tensors = [own] if own is not None else powers_of_two(1, most)
    experts = description.architecture.experts > 0
    for tensor in tensors:
        pipeline = served.pipeline_parallel or 1
        engines = [served.data_parallel or 1]
        if (
            own is None
            and served.data_parallel is None
            and served.expert_parallel is not False
            and served.objective == "throughput"
            and experts
            and pipeline == 1
        ):
            engines = [each for each in powers_of_two(1, most) if tensor * each <= most]
        for data in engines:
            expert = _uses_expert_parallel(served, description, data)
            division = Division(tensor, pipeline, data, expert)
            if own is not None or division.group >= least:
                yield spread(division, served, kind)


def _pipelines(
    served: Served, description: Description, kind: Kind, nodes: int, widest: int
) -> list[Division]:
    """
    Return the pipelines that have more GPUs than a group can have, sorted by nodes, stages and
    GPUs.
    """
    own = served.tensor_parallel
    tensors = powers_of_two(1, widest) if own is None else [own]
    data = served.data_parallel or 1
    expert = _uses_expert_parallel(served, description, data)
    every = (
        spread(Division(tensor, stages, data, expert), served, kind)
        for stages in range(2, MOST_STAGES + 1)
        for tensor in tensors
        if tensor * stages > max(tensors)
    )
    return sorted(
        (each for each in every if replica_capacity(each, served, kind, nodes)),
        key=lambda each: (each.nodes, each.pipeline_parallel, each.gpus),
    )


def _uses_expert_parallel(served: Served, description: Description, data: int) -> bool:
    if served.expert_parallel is not None:
        return served.expert_parallel
    return data > 1 and description.architecture.experts > 0


def powers_of_two(least: int, most: int) -> list[int]:
    """Return the powers of two from `least` to `most`."""
    return [1 << power for power in range(most.bit_length()) if least <= 1 << power <= most]


# Whether it fits


def _verdict(served: Served, division: Division, sizing: Sizing) -> tuple[Verdict, str]:
    if sizing.confidence == "unknown":
        return Verdict.UNKNOWN, "; ".join(sizing.reasons)
    # The plan suggests its own keys instead of vLLM's flags (`remedies`).
    why = "; ".join(sizing.reasons) or "the KV cache of one request does not fit"
    if not sizing.fits and sizing.confidence == "certain":
        return Verdict.NO, why
    # The requested concurrency must fit as certainly as a single request.
    cache = max(1, sizing.kv_cache_bytes_per_gpu)
    least = max(0, cache - sizing.estimate_error_bytes_per_gpu) / cache
    most = (cache + sizing.estimate_error_bytes_per_gpu) / cache
    at_once = sizing.max_concurrency * division.data_parallel
    asked = (
        f"{at_once:.1f} concurrent requests of {sizing.max_model_len:,} tokens fit, but "
        f"`concurrency` requires {served.concurrency}"
    )
    if served.concurrency > 1 and 0 < at_once * most < served.concurrency:
        return Verdict.NO, asked
    if not sizing.fits:
        return Verdict.NEAR, why
    if served.concurrency > 1 and at_once * least < served.concurrency:
        return Verdict.NEAR, f"{asked}. The difference is smaller than the error of the estimate"
    return Verdict.FITS, ""


# The choice of the best


def _choose(
    found: list[Candidate], fitting: list[Candidate], served: Served, description: Description
) -> list[Candidate]:
    """Return `found` with the best candidate marked as chosen, and a reason for each that fits."""
    by_size = sorted(fitting, key=_smallest_first)
    if served.objective == "latency":
        best, why, others = _choose_fastest(by_size, description)
    elif served.objective != "memory" and _keeps_no_cache(by_size[0]):
        best, why, others = _choose_without_cache(by_size)
    elif served.objective == "throughput":
        best, why, others = _choose_most_tokens(by_size)
    elif served.objective == "memory":
        best, why, others = _choose_fewest_gpus(by_size)
    else:
        best, why, others = _choose_balanced(by_size)
    if len(fitting) == 1:
        own = served.tensor_parallel is not None
        why = (
            ("`tensor_parallel` is set, and this division fits")
            if own
            else "the only division that fits"
        )
        if served.gpu_share is not None:
            why = f"the model fits into `gpu_share: {served.gpu_share:g}`"
    return [
        replace(each, chosen=True, reason=why)
        if each is best
        else replace(each, reason=others(each))
        if each.fits
        else each
        for each in found
    ]


Choice: TypeAlias = "tuple[Candidate, str, Callable[[Candidate], str]]"


def _smallest_first(candidate: Candidate) -> tuple[int, int, int]:
    return (
        candidate.division.gpus,
        candidate.division.data_parallel,
        candidate.division.tensor_parallel,
    )


def _keeps_no_cache(candidate: Candidate) -> bool:
    """Return whether the model keeps no cache for requests, for example an encoder."""
    return candidate.sizing is not None and not candidate.sizing.keeps_cache


def _choose_without_cache(by_size: list[Candidate]) -> Choice:
    best = by_size[0]
    return (
        best,
        f"the smallest group that fits: the model keeps no KV cache, and {_cache_share(best):.0%} "
        "of a GPU's memory remains unused",
        lambda _: (
            f"fits on more GPUs than needed: {best.division} fits, and a model without a KV "
            "cache gains nothing from more GPUs"
        ),
    )


def _choose_balanced(by_size: list[Candidate]) -> Choice:
    roomy = [each for each in by_size if _cache_share(each) >= CACHE_SHARE]
    best = roomy[0] if roomy else max(by_size, key=_cache_share)
    share = f"{_cache_share(best):.0%} of a GPU's memory remains for the KV cache"
    why = f"the smallest group that fits with room for concurrent requests: {share}"
    if not roomy:
        why = (
            "no group has room for many concurrent requests, and this group has the most room: "
            f"{share}"
        )

    def others(each: Candidate) -> str:
        if _smallest_first(each) < _smallest_first(best):
            return (
                f"fits, but only {_cache_share(each):.0%} of a GPU's memory remains for the KV "
                "cache (`objective: memory` would choose it)"
            )
        return (
            f"fits on more GPUs than needed: {best.division} fits with room for concurrent requests"
        )

    return best, why, others


def _choose_fewest_gpus(by_size: list[Candidate]) -> Choice:
    best = by_size[0]
    return (
        best,
        "the minimum number of GPUs",
        lambda _: f"fits on more GPUs than needed: {best.division} fits too",
    )


def _choose_fastest(by_size: list[Candidate], description: Description) -> Choice:
    """Choose the widest group, unless widening no longer reduces the memory that a step reads."""
    alone = [each for each in by_size if each.division.data_parallel == 1] or by_size
    best, why = alone[0], "the widest group that has room"
    heads = description.architecture.kv_heads
    for wider in alone[1:]:
        weights = _weights_gib(best)
        if weights <= SMALL_WEIGHTS_GIB and wider.division.tensor_parallel > heads:
            why = (
                f"wider groups are no faster, because each GPU reads only {weights:.1f} GiB of "
                f"weights per step, and {_heads(heads)} of the KV cache cannot be divided further"
            )
            break
        if weights <= SMALL_WEIGHTS_GIB / 4:
            why = (
                f"wider groups are no faster, because each GPU reads only {weights:.1f} GiB of "
                "weights per step"
            )
            break
        best = wider

    def others(each: Candidate) -> str:
        if _smallest_first(each) < _smallest_first(best):
            return f"fits, but {best.division} is faster"
        return f"fits, but is no faster than {best.division}"

    return best, why, others


def _choose_most_tokens(by_size: list[Candidate]) -> Choice:
    def tokens_per_gpu(candidate: Candidate) -> float:
        return candidate.kv_tokens / candidate.division.gpus

    most = max(by_size, key=tokens_per_gpu)
    enough = [
        each for each in by_size if tokens_per_gpu(each) >= THROUGHPUT_SHARE * tokens_per_gpu(most)
    ]
    least = enough[0].division.gpus
    best = max((each for each in enough if each.division.gpus == least), key=tokens_per_gpu)
    why = (
        "the smallest group whose number of KV tokens per GPU is near the maximum: "
        f"{tokens_per_gpu(best):,.0f}"
    )

    def others(each: Candidate) -> str:
        held = f"fits, with {tokens_per_gpu(each):,.0f} KV tokens per GPU"
        if each in enough and each.division.gpus > least:
            return f"{held}, but {best.division} has about as many in more and smaller groups"
        return f"{held}, but {best.division} has {tokens_per_gpu(best):,.0f}"

    return best, why, others


def _cache_share(candidate: Candidate) -> float:
    sizing = candidate.sizing
    if sizing is None:
        return 0.0
    parts = (
        sizing.weights_bytes_per_gpu,
        sizing.activation_bytes_per_gpu,
        sizing.non_torch_bytes_per_gpu,
        sizing.kv_cache_bytes_per_gpu,
    )
    # vLLM's budget is `gpu_memory_utilization` of the GPU; the share refers to all of its memory.
    return sizing.kv_cache_bytes_per_gpu * sizing.gpu_memory_utilization / max(1, sum(parts))


def _weights_gib(candidate: Candidate) -> float:
    return candidate.sizing.weights_bytes_per_gpu / GIB if candidate.sizing else 0.0


def _heads(count: int) -> str:
    return "the one head" if count == 1 else f"the {count} heads"
