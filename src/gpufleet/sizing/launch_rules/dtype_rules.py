"""
Define rules on dtypes that a GPU, a model, a quantization or a KV cache does not support. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpufleet.sizing.launch_rules.choice import Refused
from gpufleet.sizing.launch_rules.launch_case import BFLOAT16_CAPABILITY, LaunchCase
from gpufleet.sizing.launch_rules.release_rules import refuse_gpu


def check_bfloat16(case: LaunchCase) -> Iterator[Refused]:
    """Refuse bfloat16 on a GPU that does not support it."""
    if case.dtype != "bfloat16" or not case.has_no_bfloat16:
        return
    where = (
        "vllm/platforms/cuda.py: check_if_supports_dtype"
        if case.vllm >= (0, 10, 0)
        else "vllm/v1/worker/gpu_worker.py: _check_if_gpu_supports_dtype"
    )
    found = f"{case.gpu} does not support bfloat16, which needs compute capability 8.0"
    yield _refuse_dtype(case, "bfloat16", found, where)


def check_float16(case: LaunchCase) -> Iterator[Refused]:
    """Refuse float16 for a model whose values are too large for float16."""
    if case.dtype == "float16" and case.refuses_float16:
        yield _refuse_dtype(
            case,
            "float16",
            f"{case.release} refuses float16 for {case.model}, because the values of this model "
            "overflow float16",
            "vllm/config/model.py: _check_valid_dtype",
        )


def check_method_dtype(case: LaunchCase) -> Iterator[Refused]:
    """Refuse a dtype that the quantization method does not support."""
    if case.method_limits is None or case.dtype in case.method_limits.dtypes:
        return
    yield _refuse_dtype(
        case,
        "quantization-dtype",
        f"{case.release} computes with `{case.method}` weights in "
        f"{' or '.join(case.method_limits.dtypes)}, not in {case.dtype}",
        "vllm/config/vllm.py: VllmConfig._get_quantization_config",
    )


def _refuse_dtype(case: LaunchCase, name: str, found: str, rule: str) -> Refused:
    """
    Return the refusal of a dtype. It suggests a different dtype that no rule refuses.

    If there is no such dtype, it suggests a change that removes at least this refusal.
    """
    wanted = case.choice.dtype
    gpu_has = [one for one in _DTYPES if not (one == "bfloat16" and case.has_no_bfloat16)]
    model_has = [one for one in gpu_has if not (one == "float16" and case.refuses_float16)]
    by_method = case.method_limits.dtypes if case.method_limits else _DTYPES
    whole = [one for one in model_has if one in by_method and one != case.dtype]
    if whole:
        return Refused(name, "dtype", wanted, found, rule, whole[0])
    if name != "quantization-dtype":
        others = [one for one in model_has if one != case.dtype]
        return Refused(name, "dtype", wanted, found, rule, others[0])
    if "bfloat16" not in by_method:
        return Refused(name, "checkpoint", case.method, found, rule, None)
    if wanted == "auto":
        return refuse_gpu(case, name, BFLOAT16_CAPABILITY, found, rule)
    return Refused(name, "dtype", wanted, found, rule, "bfloat16")


_DTYPES = ("bfloat16", "float16", "float32")


def check_kv_cache_dtype(case: LaunchCase) -> Iterator[Refused]:
    """Refuse a KV cache dtype that the weights or the attention do not allow."""
    wanted = case.choice.kv_cache_dtype
    if wanted == "fp8_e5m2" and case.checkpoint and "fp8" in case.checkpoint.kinds:
        yield Refused(
            "kv-cache-dtype",
            "kv_cache_dtype",
            wanted,
            f"{case.release} does not support an fp8_e5m2 cache with FP8 weights",
            "vllm/model_executor/layers/attention/attention.py: Attention"
            if case.vllm >= (0, 16)
            else "vllm/attention/layer.py: Attention",
            "auto" if case.has_no_fp8_latent_cache else "fp8_e4m3",
        )
    if wanted.startswith("fp8") and case.has_no_fp8_latent_cache:
        yield Refused(
            "kv-cache-dtype",
            "kv_cache_dtype",
            wanted,
            f"{case.release} has no backend that reads {case.model}'s latent cache in FP8 on "
            f"{case.gpu}",
            "vllm/platforms/cuda.py: get_attn_backend_cls",
            "auto",
        )
    nvfp4 = wanted.startswith("nvfp4") and not wanted.endswith("_ds_mla")
    if nvfp4 and case.architecture.has_latent_cache and case.vllm >= (0, 21):
        yield Refused(
            "kv-cache-dtype",
            "kv_cache_dtype",
            wanted,
            f"{case.release} does not support a {wanted} cache for {case.model}'s latent attention",
            "vllm/config/vllm.py: VllmConfig.validate_nvfp4_kv_cache_with_mla",
            "fp8",
        )
