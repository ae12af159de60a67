"""
Read a checkpoint's quantization from its config, in the same way as vLLM. Pure.

`quantization_methods.py` reads the config of each method.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.sizing.architectures.config_fields import ImpossibleError
from gpufleet.sizing.architectures.quantization_methods import READERS, inner_config
from gpufleet.sizing.architectures.quantization_scheme import (
    FP8,
    FP8_CHANNEL,
    INT8_CHANNEL,
    MXFP4,
    MXFP8,
    NF4,
    NVFP4,
    Quantization,
    Scheme,
)


def quantization(
    config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None = None
) -> Quantization | None:
    """
    Return the checkpoint's quantization, or None if it is not quantized.

    `config` is the parsed config.json. `hf_quant_config` is the parsed hf_quant_config.json, which
    older ModelOpt checkpoints have. Raises `FleetError` if the method is unknown.
    """
    said = _quantization_config(config) or hf_quant_config
    if not said:
        return None
    method = _method_name(said)
    reader = READERS.get(method)
    if reader is None:
        raise FleetError(
            f"gpufleet does not know the quantization {method!r} (`quantization_config` in "
            "config.json), and cannot estimate the size of the weights. Known quantizations: "
            f"{', '.join(sorted(READERS))}"
        )
    if method == "modelopt" and "quantized_layers" not in said and hf_quant_config:
        said = {**said, **inner_config(hf_quant_config)}
    try:
        found = reader(said)
        found = _own_experts(found, config, said) if method == "fp8" else found
        _check(found)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, re.error) as error:
        why = f" ({error})" if isinstance(error, ImpossibleError) else ""
        raise FleetError(
            f"the quantization {method} has a value of an unexpected type{why}: use the "
            "publisher's original config.json"
        ) from error
    return found


def _check(found: Quantization) -> None:
    """
    Raise `ImpossibleError` for a scheme with an invalid size, and `re.error` for a bad pattern.
    """
    found.scheme_of("", expert=True)  # compiles the patterns, and stores them
    for scheme in (found.scheme, *(scheme for _, scheme in found.groups)):
        if scheme is not None and (scheme.bits < 1 or min(scheme.block or (1, 1)) < 1):
            raise ImpossibleError(f"a scheme has {scheme.bits} bits and blocks of {scheme.block}")


def _own_experts(
    found: Quantization, config: Mapping[str, Any], said: Mapping[str, Any]
) -> Quantization:
    """
    Return the quantization, changed to four-bit routed experts for families that have them.

    Source for Ling 3: _configure_ling_fp8_quant_config in bailing_moe_v3.py.
    """
    if said.get("routed_experts_quant_method") == "mxfp4":
        own = (("re:.*mlp\\.experts\\..*",), MXFP4)
        return replace(found, groups=(own, *found.groups))
    return _deepseek_v4(found, config, said)


def _deepseek_v4(
    found: Quantization, config: Mapping[str, Any], said: Mapping[str, Any]
) -> Quantization:
    """
    Return the quantization, changed to four-bit routed experts for DeepSeek V4.

    The experts have four bits unless `expert_dtype` is a different format. With four-bit experts, a
    scale of other weights has one byte. Source: DeepseekV4FP8Config in
    vllm/models/deepseek_v4/quant_config.py.
    """
    if not str(config.get("model_type", "")).startswith("deepseek_v4"):
        return found
    if str(said.get("moe_quant_algo", "")).upper() == "NVFP4":
        experts = NVFP4
    elif config.get("expert_dtype", "fp4") == "fp4":
        experts = MXFP4
    else:
        return found
    linear = replace(found.scheme, scale_bytes=1) if found.scheme else None
    own = (("re:.*ffn\\.experts\\..*",), experts)
    return replace(found, scheme=linear, ignored=(), groups=(own,))


@cache
def online_quantization(method: str, vllm: tuple[int, ...]) -> Quantization | None:
    """
    Return the quantization that `--quantization METHOD` applies to an unquantized checkpoint.

    None if this release cannot quantize with that method while it loads. Source: the table of
    shorthands in vllm/config/quantization.py of 0.33.0; for earlier releases, Fp8Config and
    BitsAndBytesConfig.
    """
    scheme, since, until = _ONLINE.get(method, (None, (0,), (0,)))
    if scheme is None or not since <= vllm[:2] < until:
        return None
    return Quantization(
        method,
        scheme,
        experts_only=method in {"experts_int8", "nvfp4_per_token", "int8_per_channel_weight_only"},
        online=True,
        ignored=("lm_head",),
    )


def online_methods(vllm: tuple[int, ...]) -> list[str]:
    """Return the methods with which a release quantizes while it loads."""
    return [method for method in _ONLINE if online_quantization(method, vllm) is not None]


_EVER = (1 << 30,)
_ONLINE: dict[str, tuple[Scheme | None, tuple[int, ...], tuple[int, ...]]] = {
    "fp8": (FP8, (0, 0), (0, 31)),
    "ptpc_fp8": (FP8_CHANNEL, (0, 7), (0, 19)),
    "fp8_per_tensor": (FP8, (0, 20), _EVER),
    "fp8_per_block": (Scheme(8, "fp8", block=(128, 128), scale_bytes=4), (0, 20), _EVER),
    "fp8_per_channel": (FP8_CHANNEL, (0, 24), _EVER),
    "mxfp8": (MXFP8, (0, 19), _EVER),
    "mxfp4": (MXFP4, (0, 28), _EVER),
    "int8_per_channel_weight_only": (INT8_CHANNEL, (0, 20), _EVER),
    "nvfp4_per_token": (NVFP4, (0, 26), _EVER),
    "experts_int8": (INT8_CHANNEL, (0, 0), _EVER),
    "bitsandbytes": (NF4, (0, 0), (0, 28)),
}


def _quantization_config(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return the `quantization_config` of the whole model or of its text part."""
    for part in (config, *(config.get(key) for key in ("text_config", "llm_config"))):
        if not isinstance(part, Mapping):
            continue
        for key in ("quantization_config", "compression_config"):
            found = part.get(key)
            if found and not isinstance(found, Mapping):
                raise FleetError(
                    f"`{key}` in config.json is not an object: use the publisher's original file"
                )
            if found:
                return found
    return None


def _method_name(said: Mapping[str, Any]) -> str:
    inner = inner_config(said)
    algorithm = str(inner.get("quant_algo") or "")
    producer = said.get("producer")
    by_modelopt = isinstance(producer, Mapping) and producer.get("name") == "modelopt"
    stated = str(said.get("quant_method") or "").lower()
    if (by_modelopt or algorithm) and stated in {"", "modelopt"}:
        return "modelopt"
    return canonical_method(stated) or "(no quant_method)"


_SAME = {
    "auto_awq": "awq",
    "awq_marlin": "awq",
    "awq_triton": "awq",
    "auto_gptq": "gptq",
    "gptq_marlin": "gptq",
    "intel/auto-round": "auto-round",
    "inc": "auto-round",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "modelopt_mxfp8": "modelopt",
    "gpt_oss_mxfp4": "mxfp4",
    "deepseek_v4_fp8": "fp8",
}


LOADS_OTHERS = {
    "humming",
    "moe_wna16",
    "auto-round",
    "bitblas",
    "gptq_bitblas",
    "marlin",
    "cpu_awq",
}
"""Methods that load the checkpoints of other methods (override_quantization_method)."""


def canonical_method(method: str) -> str:
    """
    Return gpufleet's name of a method. vLLM has several names for some methods.
    """
    return _SAME.get(method.lower(), method.lower())
