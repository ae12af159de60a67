"""Rules for options that contradict each other, or have a value that prevents a start.  Pure."""

from __future__ import annotations

import math
from collections.abc import Callable

from gpufleet.flags.conflict_rule import Conflict, Settings

_TP = "--tensor-parallel-size"
_ASYNC = "--async-scheduling"
_SPEC = "--speculative-config"
_COMPILE = "--compilation-config"
_SEQS = "--max-num-seqs"
_TOKENS = "--max-num-batched-tokens"
_LENGTH = "--max-model-len"
_GROUP = "--offload-group-size"
_OF_GROUP = "--offload-num-in-group"
_PARTIAL = "--max-num-partial-prefills"
_LONG_PARTIAL = "--max-long-partial-prefills"
_BY_BATCH = "num_speculative_tokens_per_batch_size"


def _async_beside_speculation(s: Settings) -> bool:
    method = s.key(_SPEC, "method") or s.value("--spec-method")
    return bool(
        s.value(_ASYNC) is True
        and isinstance(method, str)
        and method in {"ngram", "medusa", "mlp_speculator", "suffix"}
    )


def _async_beside_unpadded(s: Settings) -> bool:
    return s.value(_ASYNC) is True and s.key(_SPEC, "disable_padded_drafter_batch") is True


def _ngram_of_no_length(s: Settings) -> bool:
    """
    Return whether the ngram method is used without a number of draft tokens.

    Other methods read the number from the draft model, or choose it themselves.
    """
    method = s.key(_SPEC, "method") or s.value("--spec-method")
    lengths = (s.key(_SPEC, key) for key in ("num_speculative_tokens", _BY_BATCH))
    return (
        isinstance(method, str)
        and method in {"ngram", "[ngram]", "ngram_gpu"}
        and s.value("--spec-tokens") is None
        and all(length is None for length in lengths)
    )


def _drafts_of_no_model(s: Settings) -> bool:
    """
    Return whether speculative decoding needs a draft model, but none is given.

    Some methods need no draft model, because they draft without a model or with layers of the
    served model.
    """
    method = s.key(_SPEC, "method") or s.value("--spec-method")
    model = s.key(_SPEC, "model") or s.value("--spec-model")
    lengths = (s.key(_SPEC, "num_speculative_tokens"), s.value("--spec-tokens"))
    return (
        model is None
        and any(length is not None for length in lengths)
        and not (isinstance(method, str) and (method in _WITHOUT_MODEL or method.endswith("mtp")))
    )


_WITHOUT_MODEL = {
    "ngram",
    "[ngram]",
    "ngram_gpu",
    "suffix",
    "extract_hidden_states",
    "dspark",
}


def _item_limit_is_impossible(s: Settings) -> bool:
    """
    Return whether --limit-mm-per-prompt has an impossible limit.

    A limit must be a number or a mapping. Its count must not be negative, and its sizes must be at
    least 1.
    """
    given = s.value("--limit-mm-per-prompt")
    limits = given.values() if isinstance(given, dict) else ()
    for limit in limits:
        if not isinstance(limit, int | dict):  # vLLM unpacks it as a mapping
            return True
        sizes = limit if isinstance(limit, dict) else {"count": limit}
        for key, size in sizes.items():
            if isinstance(size, int) and size < (0 if key == "count" else 1):
                return True
    return False


def _ngram_upside_down(s: Settings) -> bool:
    least, most = (s.key(_SPEC, f"prompt_lookup_{end}") for end in ("min", "max"))
    return (
        s.key(_SPEC, "method") in ("ngram", "[ngram]")
        and isinstance(least, int)
        and isinstance(most, int)
        and least > most
    )


def _draft_divided_otherwise(s: Settings) -> bool:
    ranks = s.key(_SPEC, "draft_tensor_parallel_size")
    return (
        isinstance(s.key(_SPEC, "model"), str)
        and isinstance(ranks, int)
        and ranks not in (1, s.number(_TP))
    )


def _suffix_out_of_bounds(s: Settings) -> bool:
    """Return whether a number for suffix decoding is outside its bounds."""
    bounds = (
        ("max_tree_depth", 1.0, math.inf),
        ("max_cached_requests", 0.0, math.inf),
        ("max_spec_factor", 0.0, math.inf),
        ("min_token_prob", 0.0, 1.0),
    )
    given = [(s.key(_SPEC, f"suffix_decoding_{key}"), low, high) for key, low, high in bounds]
    return s.key(_SPEC, "method") == "suffix" and any(
        isinstance(value, int | float) and not low <= value <= high for value, low, high in given
    )


def _adapters_beside_drafts(s: Settings) -> bool:
    """Return whether, with LoRA, a step is too small for all requests with their draft tokens."""
    drafts = s.key(_SPEC, "num_speculative_tokens")
    return (
        s.on("--enable-lora")
        and isinstance(drafts, int)
        and s.has(_TOKENS)
        and s.has(_SEQS)
        and 0 < s.number(_TOKENS, 0) < s.number(_SEQS, 0) * (drafts + 1)
    )


def _offload_is_grouped(s: Settings) -> bool:
    return s.number(_GROUP, 0) > 0 or s.value("--offload-backend") == "prefetch"


_KV = "--kv-transfer-config"
_CAPTURE = "--max-cudagraph-capture-size"
_OPTIMIZATION = "--optimization-level"
_METRICS = "--show-hidden-metrics-for-version"
_CONNECTORS = frozenset(
    {
        "DecodeBenchConnector",
        "ExampleConnector",
        "ExampleHiddenStatesConnector",
        "FlexKVConnectorV1",
        "HF3FSKVConnector",
        "HiSparseConnector",
        "LMCacheConnectorV1",
        "LMCacheMPConnector",
        "MoRIIOConnector",
        "MooncakeConnector",
        "MooncakeStoreConnector",
        "MultiConnector",
        "NixlConnector",
        "NixlPullConnector",
        "NixlPushConnector",
        "OffloadingConnector",
        "SimpleCPUOffloadConnector",
    }
)
"""
Connectors that 0.32.0 registers in distributed/kv_transfer/kv_connector/factory.py.

Other releases have different connectors.
"""


def _metrics_of_no_version(s: Settings) -> bool:
    """Return whether the flag's value cannot be parsed as a version."""
    from packaging.version import InvalidVersion, Version

    given = s.value(_METRICS)
    if not isinstance(given, str):
        return False
    try:
        Version(given)
    except InvalidVersion:
        return True
    return False


def _connector_is_unknown(s: Settings) -> bool:
    name = s.key(_KV, "kv_connector")
    return (
        isinstance(name, str)
        and name not in _CONNECTORS
        and s.key(_KV, "kv_connector_module_path") is None
    )


def _graphs_are_captured(s: Settings) -> bool:
    return (
        not s.on("--enforce-eager")
        and s.value("--optimization-level") != 0
        and s.key(_COMPILE, "cudagraph_mode") in (None, *_GRAPHS)
        and s.key(_COMPILE, "mode") is None
        and s.key(_COMPILE, "level") is None
    )


_GRAPHS = ("PIECEWISE", "FULL", "FULL_DECODE_ONLY", "FULL_AND_PIECEWISE")


def _captures_too_little(s: Settings) -> bool:
    given = [s.value(_CAPTURE), s.key(_COMPILE, "max_cudagraph_capture_size")]
    return _graphs_are_captured(s) and any(isinstance(n, int) and n < 1 for n in given)


def _captures_no_size(s: Settings) -> bool:
    return _graphs_are_captured(s) and s.key(_COMPILE, "cudagraph_capture_sizes") == []


def _several_partial_prefills(s: Settings) -> bool:
    return s.number(_PARTIAL) != 1 or s.number(_LONG_PARTIAL) != 1


def _twice(flag: str, config: str, key: str) -> Callable[[Settings], bool]:
    """Return the condition that the same setting is given as a flag and as a key of a JSON flag."""
    return lambda s: s.value(flag) is not None and s.key(config, key) is not None


def _more(flag: str, than: str) -> Callable[[Settings], bool]:
    """Return the condition that both flags are given and the first is larger."""
    return lambda s: s.has(flag) and s.has(than) and s.number(flag, 0) > s.number(than, 0) > 0


def _off(s: Settings, name: str) -> bool:
    return s.has(name) and s.value(name) is False


OPTIONS: tuple[Conflict, ...] = (
    Conflict(
        (_LENGTH,),
        "0.23.0",
        lambda s: s.value(_LENGTH) == 0,
        "`--max-model-len` must be at least 1. With -1 or auto, vLLM chooses the longest length "
        "that fits in memory",
        "config/model.py ModelConfig.__post_init__",
    ),
    Conflict(
        (_SPEC, "--spec-method"),
        "0.11.1",
        _ngram_of_no_length,
        "speculative decoding with the ngram method needs `num_speculative_tokens` in "
        "`--speculative-config`",
        "config/speculative.py SpeculativeConfig",
    ),
    Conflict(
        (_ASYNC, _SPEC, "--spec-method"),
        "0.14.0",
        _async_beside_speculation,
        "`--async-scheduling` does not work with this method of speculative decoding: remove the "
        "flag, and vLLM uses asynchronous scheduling where possible",
        "config/vllm.py VllmConfig",
        until="0.33.0",
        leave_out=_ASYNC,
    ),
    Conflict(
        (_ASYNC, _SPEC),
        "0.14.0",
        _async_beside_unpadded,
        "`--async-scheduling` does not work with `disable_padded_drafter_batch`",
        "config/vllm.py VllmConfig",
        until="0.33.0",
        leave_out=_ASYNC,
    ),
    Conflict(
        ("--attention-backend", "--attention-config"),
        "0.13.0",
        _twice("--attention-backend", "--attention-config", "backend"),
        "`--attention-backend` and `backend` of `--attention-config` cannot be set together: "
        "remove one of them",
        "engine/arg_utils.py create_engine_config",
    ),
    Conflict(
        ("--cudagraph-capture-sizes", _COMPILE),
        "0.11.1",
        _twice("--cudagraph-capture-sizes", _COMPILE, "cudagraph_capture_sizes"),
        "`--cudagraph-capture-sizes` and the same key in `--compilation-config` cannot be set "
        "together: remove one of them",
        "engine/arg_utils.py create_engine_config",
    ),
    Conflict(
        ("--max-cudagraph-capture-size", _COMPILE),
        "0.11.1",
        _twice("--max-cudagraph-capture-size", _COMPILE, "max_cudagraph_capture_size"),
        "`--max-cudagraph-capture-size` and the same key in `--compilation-config` cannot be set "
        "together: remove one of them",
        "engine/arg_utils.py create_engine_config",
    ),
    *(
        Conflict(
            (flag, _SPEC),
            "0.22.0",
            _twice(flag, _SPEC, key),
            f"`{flag}` and `{key}` of `--speculative-config` cannot be set together: remove one "
            "of them",
            "engine/arg_utils.py create_speculative_config",
        )
        for flag, key in (
            ("--spec-method", "method"),
            ("--spec-model", "model"),
            ("--spec-tokens", "num_speculative_tokens"),
        )
    ),
    Conflict(
        ("--per-request-spec-decode-metrics",),
        "0.29.0",
        lambda s: (
            s.value("--per-request-spec-decode-metrics") not in {None, "none"}
            and not s.has(_SPEC, "--spec-method", "--spec-model", "--spec-tokens")
        ),
        "`--per-request-spec-decode-metrics` needs speculative decoding (`--speculative-config`)",
        "config/vllm.py VllmConfig",
    ),
    Conflict(
        (_SEQS, _TOKENS),
        "0.8.0",
        _more(_SEQS, _TOKENS),
        "`--max-num-batched-tokens` cannot be less than `--max-num-seqs`, because each running "
        "request needs at least one token in each step",
        "config/scheduler.py SchedulerConfig",
    ),
    Conflict(
        (_TOKENS, _LENGTH),
        "0.8.0",
        lambda s: _off(s, "--enable-chunked-prefill") and _more(_LENGTH, _TOKENS)(s),
        "without chunked prefill, `--max-num-batched-tokens` cannot be less than `--max-model-len`",
        "config/scheduler.py SchedulerConfig",
    ),
    Conflict(
        ("--max-num-active-seqs", _SEQS),
        "0.31.0",
        _more("--max-num-active-seqs", _SEQS),
        "`--max-num-active-seqs` cannot be more than `--max-num-seqs`",
        "config/scheduler.py SchedulerConfig",
    ),
    Conflict(
        ("--long-prefill-token-threshold", _LENGTH),
        "0.8.0",
        _more("--long-prefill-token-threshold", _LENGTH),
        "`--long-prefill-token-threshold` cannot be more than `--max-model-len`",
        "config/scheduler.py SchedulerConfig",
    ),
    Conflict(
        (_PARTIAL, _LONG_PARTIAL),
        "0.8.0",
        lambda s: (
            _several_partial_prefills(s)
            and s.environment.get("VLLM_USE_V1", "0").strip() not in {"", "0"}
        ),
        "the V1 engine prefills only one long prompt at a time, and VLLM_USE_V1=1 does not let "
        "vLLM fall back to the V0 engine: remove `--max-num-partial-prefills` and "
        "`--max-long-partial-prefills`",
        "engine/arg_utils.py EngineArgs._is_v1_supported_oracle",
        until="0.11.1",
    ),
    Conflict(
        (_PARTIAL, _LONG_PARTIAL),
        "0.11.1",
        _several_partial_prefills,
        "this release prefills only one long prompt at a time: remove "
        "`--max-num-partial-prefills` and `--max-long-partial-prefills`, or set them to 1",
        "engine/arg_utils.py EngineArgs._check_feature_supported",
        until="0.27.0",
    ),
    Conflict(
        ("--max-cpu-loras", "--max-loras"),
        "0.8.0",
        lambda s: (
            s.on("--enable-lora") and 0 < s.number("--max-cpu-loras", 0) < s.number("--max-loras")
        ),
        "`--max-cpu-loras` cannot be less than `--max-loras`",
        "config/lora.py LoRAConfig",
    ),
    Conflict(
        ("--lora-modules",),
        "0.11.0",
        lambda s: bool(s.value("--lora-modules")) and not s.on("--enable-lora"),
        "`--lora-modules` needs `--enable-lora`",
        "v1/worker/lora_model_runner_mixin.py LoRAModelRunnerMixin",
    ),
    Conflict(
        ("--collect-detailed-traces",),
        "0.11.1",
        lambda s: (
            bool(s.value("--collect-detailed-traces")) and not s.value("--otlp-traces-endpoint")
        ),
        "`--collect-detailed-traces` needs `--otlp-traces-endpoint`",
        "config/observability.py ObservabilityConfig",
    ),
    Conflict(
        ("--gpu-memory-utilization",),
        "0.4.2",
        lambda s: (
            isinstance(s.value("--gpu-memory-utilization"), float)
            and s.value("--gpu-memory-utilization") > 1
        ),
        "`--gpu-memory-utilization` is a share of the GPU's memory: it must be above 0 and at "
        "most 1",
        "config/cache.py CacheConfig",
        until="0.11.1",
    ),
    Conflict(
        ("--max-loras",),
        "0.8.0",
        lambda s: s.on("--enable-lora") and s.number("--max-loras") < 1,
        "`--max-loras` must be at least 1",
        "config/lora.py LoRAConfig.__post_init__",
        until="0.11.1",
    ),
    Conflict(
        (_SPEC,),
        "0.8.2",
        _ngram_upside_down,
        "`prompt_lookup_min` of `--speculative-config` cannot be more than `prompt_lookup_max`",
        "config/speculative.py SpeculativeConfig.__post_init__",
    ),
    Conflict(
        (_SPEC, _TP),
        "0.8.2",
        _draft_divided_otherwise,
        "`draft_tensor_parallel_size` of `--speculative-config` must be 1, or equal to the "
        "model's `--tensor-parallel-size`",
        "config/speculative.py SpeculativeConfig",
    ),
    Conflict(
        (_SPEC,),
        "0.11.1",
        _suffix_out_of_bounds,
        "suffix decoding needs a `suffix_decoding_max_tree_depth` of at least 1 and a "
        "`suffix_decoding_min_token_prob` from 0 to 1. Its other numbers must be at least 0",
        "config/speculative.py SpeculativeConfig._validate_suffix_decoding",
    ),
    Conflict(
        ("--enable-lora",),
        "0.11.1",
        _adapters_beside_drafts,
        "with adapters and speculative decoding, `--max-num-batched-tokens` must be at least "
        "`--max-num-seqs` x (`num_speculative_tokens` + 1)",
        "engine/arg_utils.py create_engine_config",
    ),
    Conflict(
        (_GROUP, _OF_GROUP, "--offload-backend"),
        "0.17.0",
        lambda s: _offload_is_grouped(s) and s.number(_OF_GROUP) > s.number(_GROUP, 0),
        "`--offload-num-in-group` cannot be more than `--offload-group-size`",
        "config/offload.py OffloadConfig.validate_offload_config",
    ),
    Conflict(
        (_GROUP, "--offload-prefetch-step", "--offload-backend"),
        "0.17.0",
        lambda s: _offload_is_grouped(s) and s.number("--offload-prefetch-step") < 1,
        "layers can be fetched ahead only if `--offload-prefetch-step` is at least 1",
        "config/offload.py OffloadConfig.validate_offload_config",
    ),
    Conflict(
        ("--mm-shm-cache-max-object-size-mb",),
        "0.11.1",
        lambda s: (
            s.number("--mm-shm-cache-max-object-size-mb", 128) != 128
            and s.value("--mm-processor-cache-type") != "shm"
        ),
        "`--mm-shm-cache-max-object-size-mb` needs `--mm-processor-cache-type` shm",
        "config/multimodal.py MultiModalConfig",
    ),
    Conflict(
        ("--mm-encoder-attn-backend",),
        "0.12.0",
        lambda s: str(s.value("--mm-encoder-attn-backend")).upper() == "XFORMERS",
        "`--mm-encoder-attn-backend` cannot be XFORMERS, which vLLM has removed: write a "
        "different backend, or remove the flag",
        "config/multimodal.py MultiModalConfig",
    ),
    Conflict(
        ("--enable-flashinfer-autotune", "--kernel-config"),
        "0.16.0",
        lambda s: (
            s.has("--enable-flashinfer-autotune")
            and s.key("--kernel-config", "enable_flashinfer_autotune") is not None
        ),
        "`--enable-flashinfer-autotune` and the same key in `--kernel-config` cannot be set "
        "together: remove one of them",
        "engine/arg_utils.py create_engine_config",
    ),
    Conflict(
        ("--kv-transfer-config",),
        "0.21.0",
        lambda s: (
            s.key("--kv-transfer-config", "kv_connector") is not None
            and "expandable_segments:True" in s.environment.get("PYTORCH_CUDA_ALLOC_CONF", "")
            and not s.on("--enable-cumem-allocator")
            and not s.on("--enable-sleep-mode")
        ),
        "a KV connector does not work with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True, "
        "because this option moves memory that the connector has registered: remove the option "
        "from the variable",
        "config/vllm.py VllmConfig._verify_kv_transfer_compat",
    ),
    Conflict(
        (_SPEC, "--spec-method", "--spec-tokens"),
        "0.12.0",
        _drafts_of_no_model,
        "this method of speculative decoding needs a draft model: write the draft model as "
        "`model` in `--speculative-config`. The methods ngram, suffix and mtp need no draft model",
        "config/speculative.py SpeculativeConfig.__post_init__",
    ),
    Conflict(
        ("--limit-mm-per-prompt",),
        "0.12.0",
        _item_limit_is_impossible,
        "`--limit-mm-per-prompt` must have numbers of items of 0 or more, and sizes above 0",
        "config/multimodal.py BaseDummyOptions",
    ),
    Conflict(
        ("--logits-processors",),
        "0.12.0",
        lambda s: any(":" not in text for text in s.texts("--logits-processors")),
        "each value of `--logits-processors` must be a class, written as module:Class",
        "v1/sample/logits_processor/__init__.py _load_logitsprocs_by_fqcns",
    ),
    Conflict(
        ("--seed",),
        "0.12.0",
        lambda s: not 0 <= s.number("--seed", 0) < 1 << 32,
        "`--seed` must be from 0 to 4294967295, because NumPy accepts no other seed",
        "platforms/interface.py Platform.seed_everything",
    ),
    Conflict(
        (_KV,),
        "0.32.0",
        _connector_is_unknown,
        "`kv_connector` of `--kv-transfer-config` is not a connector of this release: write one "
        f"of {', '.join(sorted(_CONNECTORS))}, or set `kv_connector_module_path` to the module "
        "of your own class",
        "distributed/kv_transfer/kv_connector/factory.py KVConnectorFactory.get_connector_class",
        until="0.33.0",
    ),
    Conflict(
        (_METRICS,),
        "0.12.0",
        _metrics_of_no_version,
        "`--show-hidden-metrics-for-version` is not a version: write the previous minor release, "
        "for example 0.31",
        "config/observability.py ObservabilityConfig",
    ),
    Conflict(
        (_COMPILE,),
        "0.11.1",
        _captures_no_size,
        "`cudagraph_capture_sizes` is empty, but CUDA graphs need at least one size: remove the "
        "key, or write `--enforce-eager` to run without graphs",
        "config/vllm.py VllmConfig._set_cudagraph_sizes",
    ),
    Conflict(
        (_CAPTURE, _COMPILE),
        "0.11.1",
        _captures_too_little,
        "`--max-cudagraph-capture-size` is below 1, but CUDA graphs need at least one size: "
        "write 1 or more, or `--enforce-eager` to run without graphs",
        "config/vllm.py VllmConfig._set_cudagraph_sizes",
    ),
    Conflict(
        ("--worker-cls",),
        "0.8.0",
        lambda s: (
            isinstance(s.value("--worker-cls"), str)
            and s.value("--worker-cls") != "auto"
            and "." not in s.value("--worker-cls")
        ),
        "`--worker-cls` must be a class with its module, written as module.name.Class. vLLM "
        "cannot import a name without a dot",
        "v1/worker/worker_base.py WorkerWrapperBase.init_worker",
    ),
    Conflict(
        (_OPTIMIZATION,),
        "0.32.0",
        lambda s: s.has(_OPTIMIZATION) and str(s.value(_OPTIMIZATION)) not in {*"0123"},
        "`--optimization-level` must be a whole number from 0 to 3, for example -O3. vLLM does "
        "not start with a different number, or with a name such as O3",
        "config/vllm.py OptimizationLevel",
        until="0.33.0",
    ),
)
