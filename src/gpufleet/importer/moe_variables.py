"""Convert FlashInfer's variables for mixture-of-experts models to the flag `--moe-backend`. Pure.

In new releases of vLLM, this flag replaces the variables.

Contract: a variable is converted only if it had an effect. Unlike the variables, the flag applies
to every model, and a backend that cannot run a model's experts prevents the server from starting.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

_FP8, _FP16 = "VLLM_USE_FLASHINFER_MOE_FP8", "VLLM_USE_FLASHINFER_MOE_FP16"
_KERNELS = "VLLM_FLASHINFER_MOE_BACKEND"
MOE_VARIABLES = frozenset({_FP8, _FP16, _KERNELS})

# Values of `--quantization`, from fused_moe/oracle/fp8.py and unquantized.py of vLLM 0.23, the last
# release that reads the variables. With a value in neither set, the kind of experts is unknown.
_HAVE_FP8 = frozenset({"fp8", "modelopt"})
_HAVE_NO_FP8 = frozenset(
    {
        *("auto_awq", "auto_gptq", "awq", "awq_marlin", "bitsandbytes", "experts_int8", "gguf"),
        *("gpt_oss_mxfp4", "gptq", "gptq_marlin", "modelopt_fp4", "moe_wna16", "mxfp4"),
    }
)


@dataclass(frozen=True, slots=True)
class MoeChoice:
    """
    The result for one variable: arguments to add, the reason, and whether the operator must decide.
    """

    arguments: tuple[str, ...]
    why: str
    decide: bool = False


def moe_choice(name: str, variables: Mapping[str, str], quantization: str | None) -> MoeChoice:
    """
    Return the result for one of the variables in `MOE_VARIABLES`.

    `variables` are all variables of the server. `quantization` is the value in its command line. If
    it is None, the model's files decide.
    """
    if name == _KERNELS:
        if _is_on(variables, _FP8) or _is_on(variables, _FP16):
            return MoeChoice(
                (), "it only selects one of FlashInfer's kernels for the other variable"
            )
        return MoeChoice((), "without VLLM_USE_FLASHINFER_MOE_FP8 or _FP16 it has no effect")
    if not _is_on(variables, name):
        return MoeChoice((), "it is off")
    throughput = variables.get(_KERNELS, "").lower() == "throughput"
    backend = "flashinfer_cutlass" if throughput else "flashinfer_trtllm"
    flag = ("--moe-backend", backend)
    kind = "FP8" if name == _FP8 else "16-bit"
    acts = _acts(name, quantization)
    if acts:
        return MoeChoice(flag, f"with `--quantization {quantization}` the model has {kind} experts")
    if acts is False:
        return MoeChoice(
            (),
            f"it is for {kind} experts, but with `--quantization {quantization}` the model "
            "has different experts",
        )
    return MoeChoice(
        (),
        f"it is for {kind} experts, and gpufleet does not know whether the model has such "
        f"experts: if it does, write `moe-backend: {backend}` under `flags`",
        decide=True,
    )


def _acts(name: str, quantization: str | None) -> bool | None:
    """Return whether the variable has an effect on the model, or None if this is unknown."""
    if quantization is None:
        return None
    if name == _FP16:
        return False
    if quantization in _HAVE_FP8:
        return True
    return False if quantization in _HAVE_NO_FP8 else None


def _is_on(variables: Mapping[str, str], name: str) -> bool:
    return variables.get(name, "").strip().lower() in {"1", "true"}
