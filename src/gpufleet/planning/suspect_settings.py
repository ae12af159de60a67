"""Remarks on settings that servers accept, but that do not suit nodes, models or clients.  Pure."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpufleet.catalog import presets
from gpufleet.formatting import join_names, ranges
from gpufleet.node.cluster_network import interface_addresses
from gpufleet.node.topology import Node, value_or
from gpufleet.planning.flag_layers import requested_context
from gpufleet.planning.stage import Stage
from gpufleet.planning.suspect_variables import variable_remarks
from gpufleet.settings.base import LOOPBACK
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.serving_settings import Served
from gpufleet.sizing.not_counted import BLOCK, odd_block

_PARSERS = {"tool-call-parser": "tool_call_parser", "reasoning-parser": "reasoning_parser"}


def remarks(
    stages: Iterable[Stage],
    settings: Mapping[str, NodeSettings],
    nodes: Mapping[str, Node],
    documents: Mapping[str, Mapping[str, Any]],
) -> tuple[str, ...]:
    """
    Return a sentence for each such setting, with its key, its effect, and the remedy.

    `documents` are the nodes' probes.
    """
    stages = tuple(stages)
    declared = {
        model: served
        for _, wanted in sorted(settings.items())
        for model, served in wanted.serving.items()
    }
    found = (
        *_one_name_for_several(declared),
        *(each for model, served in sorted(declared.items()) for each in _parsers(model, served)),
        *(
            each
            for model, served in sorted(declared.items())
            for each in _objectives(model, served)
        ),
        *(each for stage in stages for each in variable_remarks(stage, settings, nodes, documents)),
        *(each for name, served in sorted(declared.items()) for each in _staged(name, served)),
        *_foreign_addresses(settings, documents),
        *_reserved_that_are_not_there(settings, nodes),
        *(each for stage in stages for each in _odd_block(stage, settings)),
        *(each for stage in stages for each in _offload(stage, settings, documents)),
        *_longest_answers(settings, declared),
    )
    return tuple(dict.fromkeys(found))


def _one_name_for_several(declared: Mapping[str, Served]) -> Iterator[str]:
    """
    Yield a remark on entries with the same name for clients.

    Prefill entries are ignored, because clients send requests only to decode entries.
    """
    by_name: dict[str, list[str]] = defaultdict(list)
    asked_by_others = {served.prefill for served in declared.values()}
    for model, served in sorted(declared.items()):
        if model not in asked_by_others:
            by_name[served.served_name or model].append(model)
    for name, models in sorted(by_name.items()):
        if len(models) > 1:
            yield (
                f"serving.{models[0]}.served_name: {join_names(models)} all answer to {name!r}: a "
                "gateway refuses requests for an ambiguous name, so clients have to use "
                f"/{models[0]}/v1; give each its own name, or put LiteLLM in front, which "
                "balances one name over several entries"
            )


def _parsers(model: str, served: Served) -> Iterator[str]:
    """Yield a remark on each parser of another model family; tool calls would remain plain text."""
    name = served.model.rstrip("/").rpartition("/")[2]
    family = next(
        (each for each in presets.families() if re.search(each.model, name, re.IGNORECASE)), None
    )
    flags = served.flags
    for flag, field in _PARSERS.items():
        own = getattr(family, field, None)
        known = (own, *family.also) if family else ()
        if own and isinstance(flags.get(flag), str) and flags[flag] not in known:
            yield (
                f"serving.{model}.flags.{flag}: {flags[flag]!r} is not the parser for models "
                f"named like {name}, which is {own!r}: with another parser, tool calls and "
                f"reasoning may reach clients as plain text; write `{flag}: {own}`, or keep it if "
                "you have tested it"
            )


_LONGEST = {"ttft_p99_seconds": 100.0, "itl_p99_seconds": 5.0, "e2e_p99_seconds": 7200.0}
"""Limits in seconds from which an objective is probably in milliseconds (own choice)."""


def _objectives(model: str, served: Served) -> Iterator[str]:
    """
    Yield remarks on objectives that are probably in milliseconds, or swapped.

    An alert on an objective that no server misses never fires, and `measure` finds no limit.
    """
    promised = served.objectives
    for name, most in _LONGEST.items():
        seconds = getattr(promised, name)
        if seconds is not None and seconds >= most:
            yield (
                f"serving.{model}.objectives.{name}: {seconds:g} are seconds, an objective that "
                f"no server misses: for milliseconds write {seconds / 1000:g}"
            )
    ttft, itl = promised.ttft_p99_seconds, promised.itl_p99_seconds
    if ttft and itl and itl > ttft:
        yield (
            f"serving.{model}.objectives: itl_p99_seconds is {itl:g}, the time between two tokens, "
            f"and more than ttft_p99_seconds, {ttft:g}, the time to the first one: they may be "
            "swapped"
        )


def _staged(model: str, served: Served) -> Iterator[str]:
    """
    Yield remarks on flags without effect: servers read the files that were staged at `revision`.
    """
    for flag, instead in (
        ("revision", "write `revision` beside `model`, and remove the flag"),
        ("download-dir", "remove it"),
    ):
        if served.flags.get(flag):
            yield (
                f"serving.{model}.flags.{flag}: has no effect, because the server reads the files "
                f"that were staged on its node: {instead}"
            )


_ANY = frozenset({*LOOPBACK, "0.0.0.0", "::"})  # noqa: S104


def _foreign_addresses(
    settings: Mapping[str, NodeSettings], documents: Mapping[str, Mapping[str, Any]]
) -> Iterator[str]:
    for name, here in sorted(settings.items()):
        own = interface_addresses(documents.get(name, {}))
        servers = here.servers
        if servers and here.serving and own and servers.listen not in {*_ANY, *own}:
            yield (
                f"{servers.engine}.listen: {servers.listen} is not an address of {name}, which has "
                f"{join_names(own)}: its servers cannot listen there and do not start; write one "
                "of these in host_vars, or 0.0.0.0"
            )


def _reserved_that_are_not_there(
    settings: Mapping[str, NodeSettings], nodes: Mapping[str, Node]
) -> Iterator[str]:
    for name, node in sorted(nodes.items()):
        there = {gpu.index for gpu in node.gpus} | set(node.unfit)
        if gone := sorted(set(settings[name].gpus.reserved) - there):
            yield (
                f"gpus.reserved: {name} has no GPU {ranges(gone)}: its GPUs are {ranges(there)}; "
                "the intended GPU is not reserved"
            )


def _odd_block(stage: Stage, settings: Mapping[str, NodeSettings]) -> Iterator[str]:
    here = settings[stage.node]
    size = here.serving[stage.model].flags.get("block-size")
    if here.engine_of(stage.model).device == "cuda" and isinstance(size, int) and size % BLOCK:
        yield f"serving.{stage.model}.flags.block-size: {odd_block(size)}"


def _offload(
    stage: Stage,
    settings: Mapping[str, NodeSettings],
    documents: Mapping[str, Mapping[str, Any]],
) -> Iterator[str]:
    """
    Yield remarks on offloading sizes above the node's memory.

    `cpu-offload-gb` is per GPU, `kv-offloading-size` per engine (config/cache.py).
    """
    memory = value_or(documents.get(stage.node, {}).get("memory_mib"))
    if not isinstance(memory, int):
        return
    flags, gpus = settings[stage.node].serving[stage.model].flags, len(stage.gpus)
    has = f"{stage.node} has {memory // 1024:,} GiB"
    size = flags.get("cpu-offload-gb")
    if isinstance(size, int | float) and (weights := size * gpus) > memory / 1024:
        yield (
            f"serving.{stage.model}.flags.cpu-offload-gb: {size:g} GiB of each GPU are "
            f"{weights:,.0f} GiB, and {has} of memory: the kernel kills the server if its weights "
            "do not fit; write how many GiB of weights each GPU offloads"
        )
    size = flags.get("kv-offloading-size")
    engines = gpus / (stage.tensor_parallel * stage.pipeline_parallel)
    native = flags.get("kv-offloading-backend", "native") == "native"
    if native and isinstance(size, int | float) and (cache := size * engines) > memory / 1024:
        yield (
            f"serving.{stage.model}.flags.kv-offloading-size: the engines here keep {cache:,.0f} "
            f"GiB of KV cache in the node's memory, and {has}: the server ends at its start, or "
            "the kernel kills it; write how many GiB each engine may take"
        )


def _longest_answers(
    settings: Mapping[str, NodeSettings], declared: Mapping[str, Served]
) -> Iterator[str]:
    """Yield remarks on LiteLLM's defaults for `max_tokens` that leave no room for a prompt."""
    for _, here in sorted(settings.items()):
        for name, public in sorted(here.litellm.models.items()) if here.litellm else ():
            tokens = public.parameters.max_tokens
            for entry in public.entries or (name,):
                context = requested_context(declared[entry]) if entry in declared else None
                if tokens and isinstance(context, int) and tokens >= context:
                    yield (
                        f"litellm.models.{name}.parameters.max_tokens: {tokens} leaves no room for "
                        f"a prompt in the context of {entry}, {context} tokens: vLLM refuses each "
                        "request that states no `max_tokens` of its own; write less, or leave it "
                        "out"
                    )
