"""Find settings that servers accept, but that do not suit nodes, models or clients.  Pure."""

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
    Return a sentence for each setting that servers accept but that is probably wrong.

    The sentence has the setting's key, its effect, and the remedy.

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
    Yield a remark on entries that have the same name for clients.

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
                f"serving.{models[0]}.served_name: the models {join_names(models)} all have the "
                f"name {name!r}. A gateway refuses requests for an ambiguous name, so clients "
                f"must use a path such as /{models[0]}/v1. Set a different name for each model, "
                "or use LiteLLM, which balances one name over several models"
            )


def _parsers(model: str, served: Served) -> Iterator[str]:
    """Yield a remark on each parser that is for a different model family.

    With such a parser, tool calls remain plain text.
    """
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
                f"serving.{model}.flags.{flag}: {flags[flag]!r} is not the usual parser for "
                f"models with a name like {name}, which is {own!r}. With a different parser, "
                f"tool calls and reasoning may reach clients as plain text. Write `{flag}: "
                f"{own}`, or keep your parser if you have tested it"
            )


_LONGEST = {"ttft_p99_seconds": 100.0, "itl_p99_seconds": 5.0, "e2e_p99_seconds": 7200.0}
"""
An objective of this many seconds or more is probably in milliseconds (limits of this project).
"""


def _objectives(model: str, served: Served) -> Iterator[str]:
    """
    Yield remarks on objectives that are probably in milliseconds, or that are probably swapped.

    If every server meets an objective, the alert on it never fires, and `measure` finds no limit.
    """
    promised = served.objectives
    for name, most in _LONGEST.items():
        seconds = getattr(promised, name)
        if seconds is not None and seconds >= most:
            yield (
                f"serving.{model}.objectives.{name}: the value {seconds:g} is in seconds, and "
                "every server meets such an objective. If you mean milliseconds, write "
                f"{seconds / 1000:g}"
            )
    ttft, itl = promised.ttft_p99_seconds, promised.itl_p99_seconds
    if ttft and itl and itl > ttft:
        yield (
            f"serving.{model}.objectives: itl_p99_seconds (the time between two tokens, {itl:g}) "
            f"is above ttft_p99_seconds (the time to the first token, {ttft:g}). The two values "
            "may be swapped"
        )


def _staged(model: str, served: Served) -> Iterator[str]:
    """
    Yield remarks on flags that have no effect.

    Servers read the files that gpufleet has placed on the node, in the version `revision`.
    """
    for flag, instead in (
        ("revision", "write the setting `revision` next to `model`, and remove the flag"),
        ("download-dir", "remove it"),
    ):
        if served.flags.get(flag):
            yield (
                f"serving.{model}.flags.{flag}: the flag has no effect, because the server reads "
                f"the model's files that gpufleet has placed on the node: {instead}"
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
                f"{servers.engine}.listen: {servers.listen} is not an address of {name}, so its "
                "servers cannot listen there and do not start. The node's addresses are "
                f"{join_names(own)}: write one of them in host_vars, or write 0.0.0.0"
            )


def _reserved_that_are_not_there(
    settings: Mapping[str, NodeSettings], nodes: Mapping[str, Node]
) -> Iterator[str]:
    for name, node in sorted(nodes.items()):
        there = {gpu.index for gpu in node.gpus} | set(node.unfit)
        if gone := sorted(set(settings[name].gpus.reserved) - there):
            yield (
                f"gpus.reserved: {name} has no GPU {ranges(gone)}, so the GPU that you mean is "
                f"not reserved. The node's GPUs are {ranges(there)}"
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

    `cpu-offload-gb` is a size for each GPU, and `kv-offloading-size` for each engine (vLLM's
    config/cache.py).
    """
    memory = value_or(documents.get(stage.node, {}).get("memory_mib"))
    if not isinstance(memory, int):
        return
    flags, gpus = settings[stage.node].serving[stage.model].flags, len(stage.gpus)
    has = f"{stage.node} has only {memory // 1024:,} GiB"
    size = flags.get("cpu-offload-gb")
    if isinstance(size, int | float) and (weights := size * gpus) > memory / 1024:
        yield (
            f"serving.{stage.model}.flags.cpu-offload-gb: {size:g} GiB for each GPU are "
            f"{weights:,.0f} GiB in total, but {has} of memory. If the weights do not fit, the "
            "kernel kills the server. Write the number of GiB of weights that each GPU moves to "
            "the node's memory"
        )
    size = flags.get("kv-offloading-size")
    engines = gpus / (stage.tensor_parallel * stage.pipeline_parallel)
    native = flags.get("kv-offloading-backend", "native") == "native"
    if native and isinstance(size, int | float) and (cache := size * engines) > memory / 1024:
        yield (
            f"serving.{stage.model}.flags.kv-offloading-size: the engines on the node would keep "
            f"{cache:,.0f} GiB of KV cache in the node's memory, but {has}. The server would end "
            "at its start, or the kernel would kill it. Write the number of GiB that each engine "
            "may use"
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
                        f"litellm.models.{name}.parameters.max_tokens: with {tokens} tokens of "
                        f"answer, the context of {entry} ({context} tokens) has no room for a "
                        "prompt. vLLM refuses each request that does not set `max_tokens` "
                        "itself. Write a lower number, or remove the setting"
                    )
