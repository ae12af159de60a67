"""
Warn of settings with which servers start, but do not suit the nodes, models or clients.  Pure.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from itertools import combinations
from typing import Any

from gpufleet.catalog import presets
from gpufleet.formatting import join_names, ranges
from gpufleet.node.topology import Node, value_or
from gpufleet.planning.flag_layers import requested_context
from gpufleet.planning.stage import Stage
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
    Return a sentence for each such setting, with its key, its effect, and what to write.

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
        *(each for stage in stages for each in _nvlink_unused(stage, settings, nodes)),
        *_reserved_that_are_not_there(settings, nodes),
        *(each for stage in stages for each in _odd_block(stage, settings)),
        *(each for stage in stages for each in _offload(stage, settings, documents)),
        *_longest_answers(settings, declared),
        *(each for stage in stages for each in _unknown_adapters(stage, settings, documents)),
    )
    return tuple(dict.fromkeys(found))


def _one_name_for_several(declared: Mapping[str, Served]) -> Iterator[str]:
    """
    Yield entries with the same name for clients. Prefill and decode count as one: clients ask only
    decode.
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
    """Yield parsers of another model family: tool calls and reasoning would remain plain text."""
    name = served.model.rstrip("/").rpartition("/")[2]
    family = next(
        (each for each in presets.families() if re.search(each.model, name, re.IGNORECASE)), None
    )
    flags = served.flags
    if flags.get("tool-call-parser") and flags.get("enable-auto-tool-choice") is not True:
        yield (
            f"serving.{model}.flags.tool-call-parser: has no effect without "
            "`enable-auto-tool-choice: true`: add that, or remove the parser"
        )
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


def _nvlink_unused(
    stage: Stage, settings: Mapping[str, NodeSettings], nodes: Mapping[str, Node]
) -> Iterator[str]:
    """
    Yield variables that disable NVLink and PCIe's P2P: NCCL_P2P_DISABLE, NCCL_P2P_LEVEL=LOC (NCCL's
    manual).
    """
    here, node = settings[stage.node], nodes.get(stage.node)
    if stage.tensor_parallel < 2 or node is None or here.vllm is None:
        return
    places = (
        (f"serving.{stage.model}.environment", here.serving[stage.model].environment),
        ("vllm.environment", here.vllm.environment),
    )
    key = next((f"{at}.{name}" for at, each in places for name in _p2p_off(each)), None)
    linked = [pair for pair in combinations(sorted(stage.gpus), 2) if node.nvlink.get(pair)]
    if key and linked:
        gpus = sorted({gpu for pair in linked for gpu in pair})
        yield (
            f"{key}: NVLink joins GPUs {ranges(gpus)} of {stage.node}, and this "
            "keeps NCCL from using it: every layer's traffic goes through host memory; remove "
            "it, unless you are debugging"
        )


def _p2p_off(variables: Mapping[str, str]) -> Iterator[str]:
    """Yield the variables that forbid direct transfers between GPUs; 0 is LOC in older files."""
    if variables.get("NCCL_P2P_DISABLE", "0") != "0":
        yield "NCCL_P2P_DISABLE"
    if variables.get("NCCL_P2P_LEVEL", "").strip().upper() in {"LOC", "0"}:
        yield "NCCL_P2P_LEVEL"


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
    if here.vllm and here.vllm.device == "cuda" and isinstance(size, int) and size % BLOCK:
        yield f"serving.{stage.model}.flags.block-size: {odd_block(size)}"


def _offload(
    stage: Stage,
    settings: Mapping[str, NodeSettings],
    documents: Mapping[str, Mapping[str, Any]],
) -> Iterator[str]:
    """
    Yield offloading sizes above the node's memory: `cpu-offload-gb` is per GPU,
    `kv-offloading-size` per engine (config/cache.py).
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
    """Yield defaults of LiteLLM for `max_tokens` that leave no room for a prompt."""
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


def _unknown_adapters(
    stage: Stage,
    settings: Mapping[str, NodeSettings],
    documents: Mapping[str, Mapping[str, Any]],
) -> Iterator[str]:
    """
    Yield NCCL_IB_HCA with unknown adapters (NCCL's manual: prefixes of names, `=` for exact names,
    `^` to exclude).
    """
    here = settings[stage.node]
    nics = value_or(documents.get(stage.node, {}).get("nics"))
    if here.vllm is None or not isinstance(nics, Mapping):
        return
    there = [str(each["name"]) for each in value_or(nics.get("infiniband")) or ()]
    for at, variables in (
        (f"serving.{stage.model}.environment", here.serving[stage.model].environment),
        ("vllm.environment", here.vllm.environment),
    ):
        text = variables.get("NCCL_IB_HCA", "")
        if not text or text.startswith("^"):
            continue
        exact = text.startswith("=")
        names = [name.partition(":")[0].strip() for name in text.lstrip("=").split(",")]
        if gone := [
            name
            for name in names
            if not any(each == name if exact else each.startswith(name) for each in there)
        ]:
            has = f"has {join_names(there)}" if there else "has no RDMA adapter"
            yield (
                f"{at}.NCCL_IB_HCA: {stage.node} has no adapter {join_names(gone)}, it {has}: "
                "NCCL uses whichever adapters it finds, or TCP if it finds none; write names "
                "that `ibdev2netdev` prints there, or remove it"
            )
