"""Define rules of vLLM's config classes on combinations of fields in a JSON object. Leaf, pure.

A schema of types cannot express these rules. From release `since` on, each rule is in
`__post_init__` or in a validator of its class in vllm/config/. vLLM's parser refuses an object that
breaks a rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpufleet.flags.schema import sort_key

_QUANTIZATION_KEYS = {
    "fp8_per_tensor_static": "0.24.0",
    "fp8_per_tensor_dynamic": "0.24.0",
    "fp8_per_token": "0.24.0",
    "fp8_per_channel_static": "0.24.0",
    "fp8_per_block_static": "0.24.0",
    "fp8_per_block_dynamic": "0.24.0",
    "mxfp8": "0.24.0",
    "mxfp4": "0.24.0",
    "int8_per_channel_static": "0.24.0",
    "nvfp4_per_token": "0.32.0",
    "int4_per_group_32": "0.32.0",
    "int8_per_group_32": "0.33.0",
}  # QUANT_KEY_NAMES of vllm/config/quantization.py, and the first release that was read to have it

_NO_LINEAR = {"int8_per_channel_weight_only", "nvfp4_per_token"}  # these quantize experts only

_Fields = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Rule:
    json_class: str
    since: str
    broken: Callable[[_Fields], Any]
    sentence: str


def broken_rules(json_class: str, version: str, fields: _Fields) -> Iterator[str]:
    """
    Yield a sentence for each rule of a class that an object breaks.

    `fields` has the values of all fields, including defaults. Each value must have the correct
    type.
    """
    at = sort_key(version)
    for rule in _RULES:
        if rule.json_class == json_class and sort_key(rule.since) <= at and rule.broken(fields):
            yield rule.sentence


def quantization_keys(version: str) -> tuple[str, ...]:
    """Return the names that a release accepts for the number format of weights or activations."""
    at = sort_key(version)
    return tuple(name for name, since in _QUANTIZATION_KEYS.items() if sort_key(since) <= at)


def quantization_names(online: tuple[str, ...], field: str, version: str) -> tuple[str, ...]:
    """
    Return the accepted values of a field of --quantization-config.

    `online` has the values of --quantization with which vLLM quantizes while it loads a model.
    """
    whole = [name for name in online if name != "online"]
    if field == "targets":
        return tuple(whole)
    names = {*whole, *quantization_keys(version)}
    return tuple(sorted(names - _NO_LINEAR if field == "linear" else names))


def _without(needed: str, *given: str) -> Callable[[_Fields], Any]:
    """Return the condition that one of `given` is set, but `needed` is not set."""
    return lambda f: any(f.get(name) for name in given) and not f.get(needed)


def _profiler(kind: str, *options: str) -> Callable[[_Fields], Any]:
    """Return the condition that one of the options is set, but the profiler is not `kind`."""
    return lambda f: any(f.get(name) for name in options) and f.get("profiler") != kind


def _both_ways(f: _Fields) -> bool:
    ops = f.get("custom_ops") or []
    return bool({op[1:] for op in ops if op[:1] == "+"} & {op[1:] for op in ops if op[:1] == "-"})


def _misspelt_op(f: _Fields) -> bool:
    bases = {"all", "none"}
    return any(
        op not in bases and (len(op) < 2 or op[0] not in "+-") for op in f.get("custom_ops") or []
    )


def _below(limit: float, *names: str) -> Callable[[_Fields], Any]:
    """Return the condition that one of the numbers in these fields is at most `limit`."""

    def found(f: _Fields) -> bool:
        values = [f.get(name) for name in names]
        numbers = [
            each for value in values for each in (value if isinstance(value, list) else [value])
        ]
        return any(isinstance(each, int | float) and each <= limit for each in numbers)

    return found


_PROTON_DEFAULTS: _Fields = {
    "proton_profiler_dir": "",
    "proton_context": "shadow",
    "proton_data": "tree",
    "proton_backend": None,
    "proton_mode": None,
    "proton_hook": None,
    "proton_output_format": None,
    "proton_graph_attribution": False,
}


def _proton_for_other(f: _Fields) -> bool:
    return f.get("profiler") != "proton" and any(
        f.get(name, default) != default for name, default in _PROTON_DEFAULTS.items()
    )


def _format_needs(f: _Fields, data: str, formats: set[str]) -> bool:
    is_proton = f.get("profiler") == "proton"
    return is_proton and f.get("proton_output_format") in formats and f.get("proton_data") != data


_RULES = (
    _Rule(
        "KVTransferConfig",
        "0.7.0",
        lambda f: f.get("kv_connector") is not None and f.get("kv_role") is None,
        "`kv_connector` needs `kv_role`: kv_producer, kv_consumer or kv_both",
    ),
    _Rule(
        "ECTransferConfig",
        "0.11.1",
        lambda f: f.get("ec_connector") is not None and f.get("ec_role") is None,
        "`ec_connector` needs `ec_role`: ec_producer, ec_consumer or ec_both",
    ),
    _Rule(
        "ProfilerConfig",
        "0.13.0",
        lambda f: f.get("profiler") == "torch" and not f.get("torch_profiler_dir"),
        '`profiler` "torch" needs `torch_profiler_dir`',
    ),
    _Rule(
        "ProfilerConfig",
        "0.13.0",
        _profiler("torch", "torch_profiler_dir"),
        '`torch_profiler_dir` needs `profiler` to be "torch"',
    ),
    _Rule(
        "ProfilerConfig",
        "0.31.0",
        lambda f: f.get("torch_profiler_activities") is not None and f.get("profiler") != "torch",
        '`torch_profiler_activities` needs `profiler` to be "torch"',
    ),
    _Rule(
        "ProfilerConfig",
        "0.31.0",
        lambda f: (
            len(f.get("torch_profiler_activities") or ())
            != len(set(f.get("torch_profiler_activities") or ()))
        ),
        "`torch_profiler_activities` has the same activity twice",
    ),
    _Rule(
        "ProfilerConfig",
        "0.26.0",
        _profiler("torch", "capture_torch_profiler"),
        '`capture_torch_profiler` needs `profiler` to be "torch"',
    ),
    _Rule(
        "ProfilerConfig",
        "0.28.0",
        _proton_for_other,
        'the options of the Proton profiler need `profiler` to be "proton"',
    ),
    _Rule(
        "ProfilerConfig",
        "0.28.0",
        lambda f: f.get("profiler") == "proton" and not f.get("proton_profiler_dir"),
        '`profiler` "proton" needs `proton_profiler_dir`',
    ),
    _Rule(
        "ProfilerConfig",
        "0.28.0",
        lambda f: "://" in (f.get("proton_profiler_dir") or ""),
        "`proton_profiler_dir` must be a local directory",
    ),
    _Rule(
        "ProfilerConfig",
        "0.30.0",
        lambda f: (
            f.get("profiler") == "proton"
            and f.get("proton_graph_attribution")
            and f.get("proton_data") != "tree"
        ),
        '`proton_graph_attribution` needs `proton_data` to be "tree"',
    ),
    _Rule(
        "ProfilerConfig",
        "0.28.0",
        lambda f: _format_needs(f, "trace", {"chrome_trace"}),
        '`proton_output_format` "chrome_trace" needs `proton_data` to be "trace"',
    ),
    _Rule(
        "ProfilerConfig",
        "0.28.0",
        lambda f: _format_needs(f, "tree", {"hatchet", "hatchet_msgpack"}),
        '`proton_output_format` "hatchet" needs `proton_data` to be "tree"',
    ),
    _Rule(
        "StructuredOutputsConfig",
        "0.11.0",
        lambda f: (
            f.get("disable_any_whitespace") and f.get("backend") not in {"xgrammar", "guidance"}
        ),
        "`disable_any_whitespace` needs `backend` to be xgrammar or guidance",
    ),
    _Rule(
        "StructuredOutputsConfig",
        "0.11.0",
        lambda f: f.get("disable_additional_properties") and f.get("backend") != "guidance",
        "`disable_additional_properties` needs `backend` to be guidance",
    ),
    _Rule(
        "PoolerConfig",
        "0.20.0",
        lambda f: f.get("logit_sigma") == 0,
        "`logit_sigma` cannot be 0, because vLLM divides by it",
    ),
    _Rule(
        "PoolerConfig",
        "0.14.0",
        lambda f: (
            f.get("pooling_type") and (f.get("seq_pooling_type") or f.get("tok_pooling_type"))
        ),
        "`pooling_type` cannot be set together with `seq_pooling_type` or `tok_pooling_type`",
    ),
    _Rule(
        "EPLBConfig",
        "0.24.0",
        lambda f: f.get("use_async") and f.get("communicator") in {"torch_nccl", "pynccl"},
        "with `use_async`, `communicator` cannot be torch_nccl or pynccl, because their NCCL "
        "streams would conflict",
    ),
    _Rule(
        "EngramConfig",
        "0.30.0",
        _without("cpu_offload", "dp_shared_memory"),
        "`dp_shared_memory` needs `cpu_offload`",
    ),
    _Rule(
        "EngramConfig",
        "0.31.0",
        lambda f: f.get("use_thp") and (not f.get("cpu_offload") or f.get("dp_shared_memory")),
        "`use_thp` needs `cpu_offload`, and cannot be set together with `dp_shared_memory`",
    ),
    _Rule(
        "EncoderCacheManagerConfig",
        "0.28.0",
        lambda f: f.get("manager_config") and f.get("encoder_cache_manager_cls") is None,
        "`manager_config` needs `encoder_cache_manager_cls`",
    ),
    _Rule(
        "QuantizationConfigArgs",
        "0.30.0",
        lambda f: (
            f.get("targets") is not None
            and (f.get("linear") is not None or f.get("moe") is not None)
        ),
        "`targets` cannot be set together with `linear` or `moe`",
    ),
    _Rule(
        "CompilationConfig",
        "0.11.0",
        _misspelt_op,
        "each item of `custom_ops` must be all, none, +NAME or -NAME",
    ),
    _Rule(
        "CompilationConfig",
        "0.27.0",
        lambda f: {"all", "none"} <= set(f.get("custom_ops") or ()),
        "`custom_ops` cannot contain both all and none",
    ),
    _Rule(
        "CompilationConfig",
        "0.27.0",
        lambda f: (
            sum(op in {"all", "none"} for op in f.get("custom_ops") or ()) > 1
            and not {"all", "none"} <= set(f.get("custom_ops") or ())
        ),
        "`custom_ops` contains `all` twice or `none` twice",
    ),
    _Rule(
        "CompilationConfig",
        "0.27.0",
        _both_ways,
        "`custom_ops` switches the same operation on and off",
    ),
    _Rule(
        "CompilationConfig",
        "0.11.1",
        lambda f: (
            str(f.get("mode")).upper() in {"3", "VLLM_COMPILE"}
            and f.get("backend") not in {"", "eager", "inductor"}
        ),
        "with `mode` VLLM_COMPILE (3), `backend` must be eager or inductor",
    ),
    _Rule(
        "CompilationConfig",
        "0.11.0",
        lambda f: any("." not in path for path in (f.get("inductor_passes") or {}).values()),
        "each item of `inductor_passes` must be MODULE.FUNCTION",
    ),
    _Rule(
        "CompilationConfig",
        "0.32.0",
        _below(0, "decoder_replay_cudagraph_capture_sizes"),
        "`decoder_replay_cudagraph_capture_sizes` must be more than 0",
    ),
    _Rule(
        "CompilationConfig",
        "0.22.0",
        _below(0, "encoder_cudagraph_token_budgets"),
        "`encoder_cudagraph_token_budgets` must be more than 0",
    ),
    _Rule(
        "CompilationConfig",
        "0.20.0",
        lambda f: (
            f.get("cudagraph_mm_encoder")
            and _below(-1, "encoder_cudagraph_max_vision_items_per_batch")(f)
        ),
        "`encoder_cudagraph_max_vision_items_per_batch` cannot be less than 0",
    ),
    _Rule(
        "CompilationConfig",
        "0.22.0",
        lambda f: (
            f.get("cudagraph_mm_encoder")
            and _below(-1, "encoder_cudagraph_max_frames_per_batch")(f)
        ),
        "`encoder_cudagraph_max_frames_per_batch` cannot be less than 0",
    ),
)
