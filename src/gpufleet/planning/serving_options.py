"""Return the options for sizing from a model's settings and flags.  Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from gpufleet.catalog.gpu_models import cuda_total_gib
from gpufleet.flags.normalize import human_readable
from gpufleet.planning.flag_layers import requested_context
from gpufleet.planning.gpu_shares import UTILIZATION, utilization
from gpufleet.planning.parallelism import Division, Kind
from gpufleet.settings.serving_settings import Served
from gpufleet.sizing.lora_memory import Lora
from gpufleet.sizing.options import (
    AUTO_LENGTH,
    Options,
    is_pooling,
    modalities_off,
    video_frames,
)
from gpufleet.versions import numbers


def sizing_options(served: Served, kind: Kind, division: Division) -> Options:
    """Return the vLLM options of one replica that affect its memory."""
    flags = served.flags
    speculative = read_object(flags.get("speculative-config"))
    tokens = speculative.get("num_speculative_tokens")
    return Options(
        gpu_memory_gib=memory_gib(kind),
        vllm=numbers(kind.vllm),
        tensor_parallel=division.tensor_parallel,
        pipeline_parallel=division.pipeline_parallel,
        data_parallel=division.data_parallel,
        expert_parallel=division.expert_parallel,
        redundant_experts=_redundant_experts(flags),
        decode_context_parallel=_integer(flags.get("decode-context-parallel-size")) or 1,
        max_model_len=_context_length(requested_context(served)),
        gpu_memory_utilization=_utilization(served, kind),
        gpu_share=served.gpu_share or 1.0,
        kv_cache_dtype=str(flags.get("kv-cache-dtype") or "auto"),
        quantization=_text(flags.get("quantization")),
        dtype=str(flags.get("dtype") or "auto"),
        max_num_seqs=_integer(flags.get("max-num-seqs")),
        max_num_batched_tokens=_integer(flags.get("max-num-batched-tokens")),
        kv_cache_memory_bytes=_integer(flags.get("kv-cache-memory-bytes")),
        throughput=flags.get("performance-mode") == "throughput",
        all2all_backend=_text(flags.get("all2all-backend")),
        block_size=_integer(flags.get("block-size")),
        enforce_eager=flags.get("enforce-eager") is True,
        prefix_caching=_switch(flags.get("enable-prefix-caching")),
        speculative_tokens=tokens if isinstance(tokens, int) else 0,
        speculative_method=_text(speculative.get("method")),
        draft_model=draft_model(served),
        mixed_vocabularies=speculative.get("use_heterogeneous_vocab") is True,
        lora=_lora(flags),
        cpu_offload_gib=_fraction(flags.get("cpu-offload-gb")) or 0.0,
        pooling=is_pooling(flags.get("runner"), flags.get("convert") or flags.get("task")),
        language_model_only=flags.get("language-model-only") is True,
        modalities_off=modalities_off(read_object(flags.get("limit-mm-per-prompt"))),
        video_frames=video_frames(read_object(flags.get("limit-mm-per-prompt"))),
        chunked_media=flags.get("disable-chunked-mm-input") is not True,
        hybrid_manager=flags.get("disable-hybrid-kv-cache-manager") is not True,
        compute_capability=kind.compute_capability,
        gpu=kind.gpu or None,
        device="cpu" if kind.device == "cpu" else "cuda",
    )


def _utilization(served: Served, kind: Kind) -> float | None:
    if served.gpu_share is None:
        return _fraction(served.flags.get(UTILIZATION))
    eager = served.flags.get("enforce-eager") is True
    return utilization(served.gpu_share, memory_gib(kind), numbers(kind.vllm), enforce_eager=eager)


def _redundant_experts(flags: Mapping[str, Any]) -> int | None:
    """
    Return the number of redundant experts.

    The result is None if `enable-eplb` is not set, or if `prefill-context-parallel-size` is above
    1.
    """
    context = _integer(flags.get("prefill-context-parallel-size"))
    if flags.get("enable-eplb") is not True or context not in {None, 1}:
        return None
    of_config = read_object(flags.get("eplb-config")).get("num_redundant_experts")
    return _integer(of_config) or _integer(flags.get("num-redundant-experts")) or 0


def memory_gib(kind: Kind) -> float:
    """Return the memory of one GPU according to CUDA, in GiB. The value may be slightly too low."""
    return cuda_total_gib(kind.gpu, kind.memory_mib << 20)


def _integer(value: Any) -> int | None:
    """
    Parse a number like vLLM's parser.

    The result is None if the number is not set or invalid. The check of flags reports an invalid
    number.
    """
    if isinstance(value, bool) or value is None:
        return None
    return human_readable(str(value))


def _context_length(value: Any) -> int | None:
    """Parse a number like `_integer`; "auto" becomes -1, vLLM's value for "as much as fits"."""
    length = AUTO_LENGTH if value == "auto" else _integer(value)
    return length if length == AUTO_LENGTH or (length or 0) > 0 else None


def _fraction(value: Any) -> float | None:
    if isinstance(value, bool) or value is None:
        return None
    try:
        return float(value)
    except (TypeError, ValueError):
        return None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _switch(value: Any) -> bool | None:
    return value if isinstance(value, bool) else None


def draft_model(served: Served) -> str | None:
    """Return `model` of `speculative-config` in `flags`, or None."""
    return _text(read_object(served.flags.get("speculative-config")).get("model"))


def config_overrides(served: Served) -> dict[str, Any]:
    """Return the operator's changes to the model's config.json: `hf-overrides`, `rope-scaling`."""
    flags = served.flags
    found = read_object(flags.get("hf-overrides"))
    if scaling := read_object(flags.get("rope-scaling")):
        found = {"rope_scaling": scaling, **found}
    return found


def read_object(value: Any) -> dict[str, Any]:
    """
    Return the JSON object of a flag, or {} if the flag is not set or invalid.

    The check of flags reports an invalid object.
    """
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return dict(value) if isinstance(value, Mapping) else {}


def _lora(flags: Mapping[str, Any]) -> Lora | None:
    if flags.get("enable-lora") is not True:
        return None
    return Lora(
        max_loras=_integer(flags.get("max-loras")) or 1,
        max_rank=_integer(flags.get("max-lora-rank")) or 16,
        fully_sharded=flags.get("fully-sharded-loras") is True,
        dtype=lora_dtype(flags.get("lora-dtype")),
    )


def lora_dtype(value: Any) -> str:
    """
    Return the dtype of `--lora-dtype`, or "auto" (the model's dtype) if sizing does not know it.
    """
    return value if value in ("float16", "bfloat16", "float32") else "auto"
