"""
Prefill and decode in separate `serving` entries, and the settings that must match.  Pure.

`prefill` of an entry names the entry that computes its prompts. NIXL transfers the KV cache from
the prefill entry to the decode entry, configured by `--kv-transfer-config` on each side. The
requirements for partners, and the mistakes that vLLM would find only at the first request, come
from vllm/distributed/kv_transfer/kv_connector/v1/nixl_connector.py of 0.18 to 0.19 and nixl/ beside
it from 0.20 on: `compute_nixl_compatibility_hash`, `_validate_remote_agent_handshake`,
`NixlBaseConnectorWorker.__init__`.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from gpufleet.artifacts.release import cuda_release, pinned
from gpufleet.errors import FleetError
from gpufleet.formatting import count_of, join_names, ranges, suggestion
from gpufleet.planning.flag_layers import LayeredFlag
from gpufleet.planning.stage import Stage
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.serving_settings import Argument, Served, Vllm
from gpufleet.sizing.architectures.components import FullCache, LatentCache, StateCache
from gpufleet.sizing.architectures.description import Described, Description
from gpufleet.versions import numbers

FLAG = "kv-transfer-config"
LAYER = "prefill"
"""The layer's name in `LayeredFlag.layer`."""

# The flags that enter the connector's hash of a server, and the block size: some models allow it to
# differ in one direction, without any benefit.
_ALIKE = (
    "attention-backend",
    "block-size",
    "disable-hybrid-kv-cache-manager",
    "dtype",
    "kv-cache-dtype",
)
_SPECULATIVE = "speculative-config"
# Keys of that flag that may differ between the sides; methods without a KV cache to hand over.
_OWN_DEPTH = ("attention_backend", "num_speculative_tokens")
_WITHOUT_CACHE = ("ngram", "ngram_gpu", "suffix")

# The oldest release of NIXL that each vLLM accepts: its requirements/kv_connectors.txt. 0.33
# refuses to start with an older one.
_NIXL = {
    (0, 18): (0, 7, 1),
    (0, 21): (1, 1, 0),
    (0, 24): (1, 2, 0),
    (0, 25): (1, 3, 0),
    (0, 26): (1, 3, 1),
    (0, 28): (1, 3, 2),
    (0, 30): (1, 4, 1),
    (0, 32): (1, 5, 0),
}

# From this release on states are handed over in three reads, which assert the variable's value.
_STATE_LAYOUT = "VLLM_SSM_CONV_STATE_LAYOUT"
_STATE_LAYOUT_SINCE = (0, 20)
_CONTEXT = "decode-context-parallel-size"
# Before this release the connector assumes that every rank of a group has the whole context. From
# it on VllmConfig.__post_init__ requires that all ranks of a side divide it, or none, and only with
# MLA.
_CONTEXT_SINCE = (0, 29)
# Models with states: from 0.30 on.
_CONTEXT_OF_STATES_SINCE = (0, 30)

# Before this release vLLM disabled it for every connector unless set; NixlConnector supports it.
_HYBRID = "disable-hybrid-kv-cache-manager"
_HYBRID_SINCE = (0, 22)

# Each replica on a node has its own port.
_SIDE_CHANNEL = "VLLM_NIXL_SIDE_CHANNEL_PORT"

# Keys that the plan writes into the flag's value.
_OURS = ("engine_id", "kv_connector", "kv_role")
# Prefill with more ranks than decode: before 0.20 refused even with one rank per KV head; before
# 0.21 also for caches that every rank holds whole.
_ALL_HEADS_SINCE = (0, 20)
_COPIES_SINCE = (0, 21)

Layers: TypeAlias = Mapping[tuple[str, str], tuple[LayeredFlag, ...]]
"""Every flag that a layer sets, by (model, release)."""


@dataclass(frozen=True)
class _Entry:
    """One entry of `serving`, and the nodes that declare it."""

    name: str
    served: Served
    nodes: tuple[str, ...]
    vllm: tuple[Vllm, ...]
    """`vllm` settings of each node, in the order of `nodes`."""
    flags: Mapping[str, Argument]

    @property
    def answers_to(self) -> str:
        return self.served.served_name or self.name


@dataclass(frozen=True)
class Pairs:
    """The pairs of decode and prefill entries."""

    prefill: Mapping[str, str]
    """The prefill entry of each decode entry."""

    def role(self, model: str) -> str:
        """Return an entry's `kv_role`, or "" if no transfer is declared."""
        if model in self.prefill:
            return "kv_consumer"
        return "kv_producer" if model in self.prefill.values() else ""

    def partners(self, model: str) -> frozenset[str]:
        """
        Return the prefill entry of an entry's pair with all its decode entries.

        Without a pair, return only the entry itself.
        """
        source = self.prefill.get(model, model)
        return frozenset({source, *(name for name, of in self.prefill.items() if of == source)})

    def flags(
        self,
        model: str,
        vllm: str,
        given: Iterable[LayeredFlag],
        description: Described | None,
    ) -> tuple[LayeredFlag, ...]:
        """
        Return an entry's flags with those for its role on a release.

        `given` are the flags of other layers; an operator's additions to the connector's settings
        are merged into the resulting flag.
        """
        given = tuple(given)
        if not (role := self.role(model)):
            return given
        others = join_names(self.partners(model) - {model})
        because = (
            f"{self.prefill[model]} computes the prompts of this entry"
            if model in self.prefill
            else f"this entry computes the prompts of {others}"
        )
        names = {each.name: each.value for each in given}
        added = names.get(FLAG)
        config = {
            **(added if isinstance(added, dict) else {}),
            "kv_connector": "NixlConnector",
            "kv_role": role,  # kv_both works on either side, but 0.33 deprecates it
        }
        found = [LayeredFlag(FLAG, config, LAYER, because)]
        several = isinstance(description, Description) and any(
            not isinstance(cache, FullCache | LatentCache)
            for layer in description.architecture.layers
            for cache in layer.caches
        )
        if several and _HYBRID not in names and numbers(vllm) < _HYBRID_SINCE:
            why = (
                f"vLLM {vllm} disables the manager for connectors, but the plan and models with "
                "states need the manager"
            )
            found.append(LayeredFlag(_HYBRID, False, LAYER, why))
        return (*(each for each in given if each.name != FLAG), *found)


def handover_pairs(
    settings: Mapping[str, NodeSettings],
    layers: Layers,
    models: Mapping[str, Described],
    locks: Mapping[str, str],
) -> Pairs:
    """
    Return the declared pairs of prefill and decode entries.

    `settings` are by node, `layers` has the flags of presets and operators, and `locks` has the
    text of each readable lock that settings name. Raises `FleetError` with every mismatch between
    partners.
    """
    entries = _entries(settings, layers)
    pairs = {name: entry.served.prefill for name, entry in entries.items() if entry.served.prefill}
    problems: list[str] = []
    for name, prefill in pairs.items():
        problems += _partner_problems(entries, name, prefill)
    whole = {name: prefill for name, prefill in pairs.items() if prefill in entries}
    for name in sorted({*whole, *whole.values()}):
        problems += _entry_problems(entries[name], models.get(name), locks)
    if problems:
        raise FleetError(*dict.fromkeys(problems))
    return Pairs(whole)


def check_divisions(
    stages: Iterable[Stage], pairs: Pairs, layers: Layers, models: Mapping[str, Described]
) -> tuple[str, ...]:
    """
    Check the partners' parallelism, and return remarks.

    Raises `FleetError` with all pairs that cannot transfer KV caches.
    """
    problems: list[str] = []
    remarks: list[str] = []
    by_model: dict[str, list[Stage]] = defaultdict(list)
    for stage in stages:
        by_model[stage.model].append(stage)
    flags = {model: {each.name: each.value for each in of} for (model, _), of in layers.items()}
    for decode, prefill in pairs.prefill.items():
        if not by_model[decode] or not by_model[prefill]:
            continue  # the problem that keeps one of them out of the plan is already reported
        description = models.get(decode)
        vllm = min(numbers(release) for model, release in layers if model == decode)
        shapes = {(_shape(a), _shape(b)) for a in by_model[decode] for b in by_model[prefill]}
        for mine, theirs in sorted(shapes):
            problems += _division_problems((decode, *mine), (prefill, *theirs), description, vllm)
        for name, sizes in ((decode, {a for a, _ in shapes}), (prefill, {b for _, b in shapes})):
            size = _integer(flags.get(name, {}).get(_CONTEXT))
            problems += _context_problems(
                name, size, {tensor for tensor, _ in sizes}, description, vllm
            )
        remarks.append(_router_sentence(decode, prefill, by_model))
    if problems:
        raise FleetError(*dict.fromkeys(problems))
    return tuple(remarks)


def remarks(pairs: Pairs, layers: Layers) -> tuple[str, ...]:
    """Return remarks on permitted but harmful differences between partners."""
    longest = {
        model: next((each.value for each in flags if each.name == "max-model-len"), None)
        for (model, _), flags in layers.items()
    }
    return tuple(
        f"serving.{decode}.context is {_value_text(longest[decode])}, but "
        f"serving.{prefill}.context is {_value_text(longest[prefill])}. The side with the smaller "
        "value refuses longer requests: write the same value for both"
        for decode, prefill in pairs.prefill.items()
        if longest.get(decode) != longest.get(prefill)
    )


def engine_id(stage: Stage) -> str:
    """
    Return the engine's id for the other side, with its incarnation.

    All ranks of an engine must have the same id, and different engines must have different ids. By
    default vLLM generates an id for each process; before 0.24 an engine over several nodes thus had
    several ids. The id must change with a restart, because the other side remembers an engine by
    its id. vLLM appends the number of the engine (until 0.19 the number on its node).
    """
    span = max(1, stage.tensor_parallel * stage.pipeline_parallel // len(stage.gpus))
    return f"{stage.id}-{stage.node_rank // span}-{{incarnation}}"


# Declared settings


def _entries(settings: Mapping[str, NodeSettings], layers: Layers) -> dict[str, _Entry]:
    """Return every entry by name. The planner refuses entries that differ between nodes."""
    found: dict[str, tuple[Served, list[tuple[str, Vllm]]]] = {}
    for node, wanted in sorted(settings.items()):
        for name, served in wanted.serving.items():
            if wanted.vllm is not None:
                found.setdefault(name, (served, []))[1].append((node, wanted.vllm))
    return {
        name: _Entry(
            name,
            served,
            tuple(node for node, _ in on),
            tuple(vllm for _, vllm in on),
            {each.name: each.value for each in layers.get((name, on[0][1].version), ())},
        )
        for name, (served, on) in sorted(found.items())
    }


def _partner_problems(entries: Mapping[str, _Entry], name: str, prefill: str) -> Iterator[str]:
    """Yield the mismatches between an entry and its prefill entry."""
    key = f"serving.{name}.prefill"
    if prefill == name:
        yield (
            f"{key}: the value is the name of the entry itself: write the name of the entry that "
            "computes the prompts, or remove `prefill`"
        )
        return
    if prefill not in entries:
        near = suggestion(prefill, [each for each in entries if each != name])
        yield f"{key}: no node has an entry {prefill!r} in `serving`{near}"
        return
    one, other = entries[name], entries[prefill]
    if other.served.prefill:
        yield (
            f"{key}: {prefill} itself has `prefill: {other.served.prefill}`, but an entry that "
            "computes prompts cannot get prompts from a different entry: write "
            f"`prefill: {other.served.prefill}` here, or remove `prefill` from {prefill}"
        )
    for what in ("model", "revision"):
        values = getattr(one.served, what), getattr(other.served, what)
        if values[0] != values[1]:
            yield _difference_sentence(one, other, what, *values)
    if one.answers_to != other.answers_to:
        yield (
            f"serving.{prefill}.served_name: {prefill} answers to {other.answers_to!r}, but {name} "
            f"answers to {one.answers_to!r}, and both entries get the same request: write "
            f"`served_name: {one.answers_to}`"
        )
    mine, theirs = (_backends(each.flags) for each in (one, other))
    if mine != theirs:
        yield _difference_sentence(
            one, other, f"flags.{FLAG}.kv_connector_extra_config.backends", mine, theirs
        )
    mine, theirs = (_speculation(each.flags) for each in (one, other))
    if mine != theirs:
        yield _difference_sentence(one, other, f"flags.{_SPECULATIVE}", mine, theirs)
    for flag in _ALIKE:
        mine, theirs = one.flags.get(flag), other.flags.get(flag)
        if mine != theirs:
            yield _difference_sentence(one, other, f"flags.{flag}", mine, theirs)
    releases = sorted({each.version for each in one.vllm + other.vllm})
    if len(releases) > 1:
        yield (
            f"{key}: {name} runs on {_release_names(one)} "
            f"and {prefill} on {_release_names(other)}, but vLLM transfers a KV cache only within "
            "one release: write the same `vllm.version` for all nodes of both entries"
        )


def _entry_problems(
    entry: _Entry, description: Described | None, locks: Mapping[str, str]
) -> Iterator[str]:
    """Yield the problems that prevent an entry from transferring its KV cache."""
    key = f"serving.{entry.name}"
    yield from _transfer_flag_problems(key, entry.served.flags)
    if entry.served.gpu_share is not None:
        yield (
            f"{key}.gpu_share: the entry transfers KV caches, and a share does not contain the "
            "buffers for the transfer: remove `gpu_share`, or the pair's `prefill`"
        )
    if cpus := [
        node for node, vllm in zip(entry.nodes, entry.vllm, strict=True) if vllm.device == "cpu"
    ]:
        yield (
            f"{key}: the entry transfers KV caches, which needs GPUs, but `vllm.device` is cpu on "
            f"{join_names(cpus)}: remove the pair's `prefill`"
        )
    if _SIDE_CHANNEL in entry.served.environment:
        yield (
            f"{key}.environment.{_SIDE_CHANNEL}: with `prefill`, the plan sets this variable: "
            "remove the variable here"
        )
    if any(_SIDE_CHANNEL in vllm.environment for vllm in entry.vllm):
        yield (
            f"vllm.environment.{_SIDE_CHANNEL}: with `prefill`, the plan sets this variable: "
            "remove the variable here"
        )
    seen = set()
    for vllm in entry.vllm:
        text = locks.get(vllm.lock)
        if text is None or (vllm.lock, vllm.version) in seen:
            continue  # the role that installs it reports the problem of its lock
        seen.add((vllm.lock, vllm.version))
        yield from _nixl_problems(key, vllm, text)
    needs = any(numbers(vllm.version) >= _STATE_LAYOUT_SINCE for vllm in entry.vllm)
    if isinstance(description, Description) and needs and _has_cache(description, StateCache):
        laid = {
            (vllm.environment | entry.served.environment).get(_STATE_LAYOUT) for vllm in entry.vllm
        }
        if laid != {"DS"}:
            yield (
                f"{key}.environment: {description.architecture.name} has layers with a state, "
                f"which NIXL reads only in one layout: write `{_STATE_LAYOUT}: DS`"
            )


def _nixl_problems(key: str, vllm: Vllm, lock: str) -> Iterator[str]:
    """Yield the problems of NIXL in a lock: missing, too old, or without its CUDA library."""
    least = _least_nixl(numbers(vllm.version))
    there = pinned(lock.encode(), "nixl")
    if there is None:
        yield (
            f"{key}: the entry transfers KV caches with NIXL, but {vllm.lock} does not contain "
            f"NIXL: add `nixl` {_text(least)} to the lock (vLLM's requirements/kv_connectors.txt)"
        )
    elif numbers(there) < least:
        yield (
            f"{key}: the entry transfers KV caches with NIXL, and {vllm.lock} contains `nixl` "
            f"{there or 'without a version'}, but vLLM {vllm.version} needs {_text(least)} or "
            "newer: lock a newer version"
        )
    # vLLM imports `nixl`, which loads its library from `nixl-cu13` or the package of another CUDA
    # (so in the wheels of 0.7 to 1.5).
    cuda = cuda_release(lock.encode())
    if there and cuda and pinned(lock.encode(), f"nixl-cu{cuda[0]}") is None:
        yield (
            f"{key}: the entry transfers KV caches with NIXL, but {vllm.lock} contains CUDA "
            f"{cuda[0]} without NIXL's library for this CUDA version: add `nixl-cu{cuda[0]}` "
            f"{there} to the lock"
        )


def _transfer_flag_problems(key: str, flags: Mapping[str, Argument]) -> Iterator[str]:
    """Yield the mistakes in the operator's additions to the connector's settings."""
    if dotted := [name for name in flags if name.startswith(f"{FLAG}.")]:
        yield (
            f"{key}.flags: {join_names(dotted)} would replace the value that `prefill` sets: write "
            f"a mapping under `{FLAG}` instead"
        )
    value = flags.get(FLAG)
    if value is None:
        return
    if not isinstance(value, dict):
        yield (
            f"{key}.flags.{FLAG}: the value is not a mapping, so `prefill` cannot add keys to it: "
            "write a mapping"
        )
    elif ours := [name for name in _OURS if name in value]:
        yield (
            f"{key}.flags.{FLAG}: `prefill` sets {join_names(ours)} on both sides: remove "
            f"{'this key' if len(ours) == 1 else 'these keys'}"
        )


# Planned divisions

_Shape: TypeAlias = tuple[int, int]
"""Tensor and pipeline parallelism."""


def _shape(stage: Stage) -> _Shape:
    return stage.tensor_parallel, stage.pipeline_parallel


def _division_problems(
    mine: tuple[str, int, int],
    theirs: tuple[str, int, int],
    description: Described | None,
    vllm: tuple[int, ...],
) -> Iterator[str]:
    """Yield why a decode entry's tensor or pipeline parallelism cannot read prefill's KV cache."""
    for name, _, pipeline in (mine, theirs):
        if pipeline > 1:
            yield (
                f"serving.{name}.pipeline_parallel: the value is {pipeline}, but NixlConnector "
                "transfers the cache of only one pipeline stage: write `pipeline_parallel: 1` and "
                "more `tensor_parallel`"
            )
    (decode, here, _), (prefill, there, _) = mine, theirs
    if max(here, there) % min(here, there):
        yield (
            f"serving.{decode}.tensor_parallel: the value is {here}, and {prefill} has {there}. "
            "One of the two values must be a multiple of the other, so that a rank reads whole "
            f"parts: write {there * max(1, here // there)}"
        )
    elif there > here and isinstance(description, Description):
        latent = _has_cache(description, LatentCache)
        if vllm >= _COPIES_SINCE and (latent or _has_cache(description, StateCache)):
            return
        heads = 1 if latent else max(1, description.architecture.kv_heads)
        most = heads if vllm >= _ALL_HEADS_SINCE else heads - 1
        if there > most:
            yield (
                f"serving.{prefill}.tensor_parallel: the value is {there}, and {decode} has "
                f"{here}. {description.architecture.name} has {count_of(heads, 'KV head')}, so the "
                "prefill ranks have copies of KV heads, and fewer decode ranks cannot read copies: "
                f"write {max(here, most)} for {prefill}, or {there} for {decode}"
            )


def _context_problems(
    name: str,
    size: int,
    tensors: set[int],
    description: Described | None,
    vllm: tuple[int, ...],
) -> Iterator[str]:
    """Yield why NIXL cannot read an entry's context that is divided over `size` ranks."""
    if size == 1:
        return
    given = f"serving.{name}.flags.{_CONTEXT}: the value is {size}, but NixlConnector "
    known = description if isinstance(description, Description) else None
    if vllm < _CONTEXT_SINCE:
        yield f"{given}of vLLM {_text(vllm)} transfers only whole contexts: remove the flag"
    elif known and not _has_cache(known, LatentCache):
        yield f"{given}transfers divided contexts only for latent attention: remove the flag"
    elif known and vllm < _CONTEXT_OF_STATES_SINCE and _has_cache(known, StateCache):
        yield (
            f"{given}of vLLM {_text(vllm)} does not transfer divided contexts of models with "
            "states: remove the flag"
        )
    elif tensors != {size}:
        every = " and ".join(map(str, sorted(tensors)))
        yield f"{given}accepts only 1 or the tensor parallel size ({every}): write one of these"


def _router_sentence(decode: str, prefill: str, by_model: Mapping[str, list[Stage]]) -> str:
    """Return a remark on the required routing of requests, with the endpoints of both sides."""

    def places(model: str) -> str:
        serving = [stage for stage in by_model[model] if stage.servers]
        return ", ".join(f"{stage.node}:{ranges(stage.servers)}" for stage in serving)

    count = count_of(len({stage.id for stage in by_model[prefill]}), "replica")
    return (
        f"{decode}: {prefill} ({count}) computes the prompts of this model. A router has to send "
        f"each request first to prefill ({places(prefill)}), and then, with prefill's answer, to "
        f"decode ({places(decode)})"
    )


# Parts of sentences


def _difference_sentence(one: _Entry, other: _Entry, what: str, mine: Any, theirs: Any) -> str:
    return (
        f"serving.{one.name}.{what} is {_value_text(mine)}, but serving.{other.name}.{what} is "
        f"{_value_text(theirs)}. vLLM can transfer a KV cache only between servers with the same "
        "value: write the same value for both"
    )


def _backends(flags: Mapping[str, Argument]) -> Any:
    """Return NIXL's configured transfer backends, or None for the default, UCX."""
    config = flags.get(FLAG)
    extra = config.get("kv_connector_extra_config") if isinstance(config, dict) else None
    return extra.get("backends") if isinstance(extra, dict) else None


def _speculation(flags: Mapping[str, Argument]) -> Any:
    """Return the speculative settings that affect the transferred KV cache, or None."""
    value = flags.get(_SPECULATIVE)
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return value  # the flag check reports the problem
    if not isinstance(value, dict) or value.get("method") in _WITHOUT_CACHE:
        return None
    return {name: each for name, each in sorted(value.items()) if name not in _OWN_DEPTH}


def _value_text(value: Any) -> str:
    return "not set" if value is None else str(value)


def _release_names(entry: _Entry) -> str:
    return " and ".join(sorted({f"vLLM {each.version}" for each in entry.vllm}))


def _has_cache(description: Description, kind: type) -> bool:
    layers = description.architecture.layers
    return any(isinstance(cache, kind) for layer in layers for cache in layer.caches)


def _least_nixl(vllm: tuple[int, ...]) -> tuple[int, ...]:
    return next((_NIXL[each] for each in sorted(_NIXL, reverse=True) if vllm >= each), (0, 7, 1))


def _text(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def _integer(value: Any) -> int:
    try:
        return max(1, int(value))
    except (TypeError, ValueError):
        return 1
