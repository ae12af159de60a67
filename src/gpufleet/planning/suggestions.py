"""Suggest settings with which a model fits. Each suggestion is tested before it is made. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from gpufleet.planning.candidates import (
    Candidate,
    CandidateSet,
    Sizer,
    Verdict,
    evaluate_divisions,
    powers_of_two,
)
from gpufleet.planning.gpu_shares import UTILIZATION, larger_shares
from gpufleet.planning.parallelism import Kind
from gpufleet.settings.serving_settings import Served

if TYPE_CHECKING:
    from gpufleet.sizing.architectures.description import Description


def remedies(
    served: Served,
    description: Description,
    kind: Kind,
    nodes: int,
    *,
    sizer: Sizer,
) -> tuple[str, ...]:
    """
    Return settings that make a model fit on `nodes` nodes of a kind.

    A suggestion is `key: value` in backquotes, or two such settings if one is not enough. Each
    suggestion was tested, and is sufficient by itself.
    """

    def evaluate(changes: Mapping[str, Any]) -> CandidateSet:
        changed = _apply_changes(served, changes)
        return evaluate_divisions("", changed, description, kind, nodes, sizer=sizer)

    def is_enough(changes: Mapping[str, Any]) -> bool:
        chosen = evaluate(changes).chosen
        return chosen is not None and chosen.replicas > 0 and chosen.verdict is not Verdict.UNKNOWN

    found = [each for each in _single_changes(served, evaluate({}).candidates) if is_enough(each)]
    wider: dict[str, Any] = {}
    if served.gpu_share is not None:
        found = [*_larger_share(served.gpu_share, is_enough), *found]
    elif served.tensor_parallel is not None:
        free = evaluate({"tensor_parallel": None})
        tensor = (
            free.chosen.division.tensor_parallel
            if free.chosen
            else max(powers_of_two(1, max(kind.islands)))
        )
        wider = {"tensor_parallel": tensor}
        if is_enough(wider):
            found.insert(0, wider)
    if not found and wider:
        changed = _apply_changes(served, wider)
        more = _single_changes(changed, evaluate(wider).candidates)
        found = [both for each in more if is_enough(both := {**wider, **each})]
    if not found:
        least = {**wider, "concurrency": 1}
        changed = _apply_changes(served, least)
        more = _single_changes(changed, evaluate(least).candidates)
        found = [both for each in more if is_enough(both := {**least, **each})]
    first: dict[tuple[str, ...], str] = {}
    for changes in found:  # of several values of one key, take the first: it is the smallest change
        words = " and ".join(_yaml(key, value) for key, value in changes.items())
        first.setdefault(tuple(changes), words)
    return tuple(first.values())


def _larger_share(
    share: float, is_enough: Callable[[Mapping[str, Any]], bool]
) -> list[dict[str, Any]]:
    """
    Return the smallest larger share with which the model fits, as a list with one change.

    Shares are tried in steps of 0.01, and then a whole GPU. The list is empty if none is
    sufficient.
    """
    changes = ({"gpu_share": each} for each in (*larger_shares(share), None))
    return [found] if (found := next(filter(is_enough, changes), None)) else []


def _single_changes(served: Served, judged: tuple[Candidate, ...]) -> Iterator[dict[str, Any]]:
    """Yield changes to try. Of the changes of one key, the smallest change comes first."""
    most = int(max((each.concurrency for each in judged), default=0))
    for fewer in dict.fromkeys((most, int(most * 0.8), 1)):
        if 1 <= fewer < served.concurrency:
            yield {"concurrency": fewer}
    sizings = [each.sizing for each in judged if each.sizing]
    longest = max((sizing.largest_max_model_len for sizing in sizings), default=0)
    length = max((sizing.max_model_len for sizing in sizings), default=0)
    for part in (0.95, 0.8, 0.5, 0.25):
        shorter = int(longest * part / served.concurrency) // 1024 * 1024
        if 0 < shorter < length:
            yield {"context": shorter}
    if "max-num-seqs" not in served.flags:
        yield from ({"flags.max-num-seqs": fewer} for fewer in (512, 256, 128, 64))
    if any(
        each.division.expert_parallel and each.division.data_parallel > 1 for each in judged
    ) and (
        "max-num-batched-tokens" not in served.flags
    ):  # a GPU needs room for the tokens of all engines
        yield from ({"flags.max-num-batched-tokens": fewer} for fewer in (8192, 4096, 2048))
    if not served.allow_pcie:
        yield {"allow_pcie": True}
    if not served.span_nodes:
        yield {"span_nodes": True}
    if served.expert_parallel:
        yield {"expert_parallel": False}
    for key in ("data_parallel", "pipeline_parallel"):
        if (own := getattr(served, key) or 1) > 1:
            yield from ({key: fewer} for fewer in powers_of_two(2, own - 1)[::-1])
            yield {key: 1}
    if "kv-cache-dtype" not in served.flags:
        yield {"flags.kv-cache-dtype": "fp8"}


def _apply_changes(served: Served, changes: Mapping[str, Any]) -> Served:
    """Return `served` with these settings changed; a key `flags.NAME` changes a flag."""
    flags = {
        key.removeprefix("flags."): value
        for key, value in changes.items()
        if key.startswith("flags.")
    }
    settings = {key: value for key, value in changes.items() if not key.startswith("flags.")}
    kept = dict(served.flags)
    if "gpu_share" in settings:
        kept.pop(UTILIZATION, None)  # the flag follows from the share
    return served.model_copy(update={**settings, "flags": {**kept, **flags}})


def _yaml(key: str, value: Any) -> str:
    if key.startswith("flags."):
        return f"`{key.removeprefix('flags.')}: {value}` in `flags`"
    if value is None:
        return f"no `{key}`"
    return f"`{key}: {str(value).lower() if isinstance(value, bool) else value}`"
