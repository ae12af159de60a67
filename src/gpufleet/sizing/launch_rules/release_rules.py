"""Define rules on what a release and a GPU support: classes, methods and kernels. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from gpufleet.catalog import vllm_support
from gpufleet.catalog.vllm_support import Version
from gpufleet.sizing.architectures.quantization import (
    LOADS_OTHERS,
    canonical_method,
    online_quantization,
)
from gpufleet.sizing.architectures.quantization_scheme import Quantization
from gpufleet.sizing.launch_rules.choice import Refused
from gpufleet.sizing.launch_rules.launch_case import LaunchCase


def check_architecture(case: LaunchCase) -> Iterator[Refused]:
    """Refuse an architecture for which the release has no class."""
    if vllm_support.supports_architecture(case.model, case.vllm) is False:
        nearest = vllm_support.nearest_serving(case.model, case.vllm)
        if nearest is not None:
            yield Refused(
                "architecture",
                "vllm",
                case.vllm,
                f"{case.release} has no class for {case.model}, and gpufleet does not size or plan "
                "models that vLLM runs with its fallback to Transformers",
                "vllm/model_executor/models/registry.py: _ModelRegistry",
                nearest,
            )


def check_method(case: LaunchCase) -> Iterator[Refused]:
    """Refuse a quantization method that the release does not have."""
    if (
        case.method is None
        or case.method_limits is not None
        or not vllm_support.is_known_method(case.method)
    ):
        return
    nearest = vllm_support.nearest_with_method(case.method, case.vllm)
    if nearest is not None:
        yield Refused(
            "quantization-method",
            "vllm",
            case.vllm,
            f"{case.release} does not have the quantization `{case.method}` of the weights",
            "vllm/config/model.py: ModelConfig._verify_quantization",
            nearest,
        )


_OF_MODELOPT = {"nvfp4": "modelopt", "petit_nvfp4": "modelopt"}


def check_quantization_flag(case: LaunchCase) -> Iterator[Refused]:
    """Refuse a `--quantization` that contradicts the checkpoint."""
    flag = case.choice.quantization
    if flag is None:
        return
    if case.checkpoint is None:
        if online_quantization(flag, case.vllm) is None and vllm_support.is_known_method(flag):
            yield Refused(
                "quantization-flag",
                "quantization",
                flag,
                f"--quantization {flag} needs a checkpoint with this quantization, but "
                f"{case.model}'s checkpoint is not quantized, and {case.release} does not quantize "
                "with this method while loading",
                "vllm/config/model.py: ModelConfig._verify_quantization",
                None,
            )
        return
    own = case.checkpoint.method
    said, has = (canonical_method(_OF_MODELOPT.get(name, name)) for name in (flag, own))
    if said != has and not {said, has} & LOADS_OTHERS and vllm_support.is_known_method(flag):
        yield Refused(
            "quantization-flag",
            "quantization",
            flag,
            f"--quantization {flag} contradicts the checkpoint, which is quantized by `{own}`",
            "vllm/config/model.py: ModelConfig._verify_quantization",
            None,
        )


_WHEELS: tuple[tuple[Version, int], ...] = (((0, 8), 70), ((0, 20), 75))
"""
(release, lowest compute capability of its kernels). Source: docs/getting_started/installation of
the releases. Since 0.20, vLLM uses CUDA 13, which does not support Volta.
"""


def check_gpu_generation(case: LaunchCase) -> Iterator[Refused]:
    """Refuse a GPU for which the release has no kernels."""
    if case.capability is None:
        return
    least = max(
        (capability for since, capability in _WHEELS if since <= case.vllm[:2]),
        default=_WHEELS[0][1],
    )
    if case.capability < least:
        yield refuse_gpu(
            case,
            "gpu-generation",
            least,
            f"{case.release}'s kernels are not built for {case.gpu}",
            "docs/getting_started/installation: requirements",
        )


def refuse_gpu(case: LaunchCase, name: str, least: int, found: str, rule: str) -> Refused:
    """Return the refusal of a GPU, with the minimum compute capability."""
    also = (
        "use a checkpoint with a different quantization, or without quantization"
        if name == "quantization-gpu"
        else ""
    )
    return Refused(
        name, "compute_capability", case.compute_capability, found, rule, divmod(least, 10), also
    )


def check_method_on_gpu(case: LaunchCase) -> Iterator[Refused]:
    """Refuse a quantization method that does not run on the GPU."""
    if case.capability is None or case.method_limits is None or case.quantization is None:
        return
    rule = "vllm/config/vllm.py: VllmConfig._get_quantization_config"
    if case.capability < case.method_limits.capability:
        yield refuse_gpu(
            case,
            "quantization-gpu",
            case.method_limits.capability,
            f"{case.release} does not run `{case.method}` weights on {case.gpu}",
            rule,
        )
        return
    if case.method != "compressed-tensors":
        return
    needs = [
        (asked.capability, kind)
        for kind in _compressed_kinds(case.quantization)
        if (asked := vllm_support.quantization_needs(f"compressed-tensors {kind}", case.vllm))
    ]
    least, kind = max(needs, default=(0, ""))
    if case.capability < least:
        yield refuse_gpu(
            case,
            "quantization-gpu",
            least,
            f"{case.release} does not run compressed-tensors weights in {kind} on {case.gpu}",
            "vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors.py: "
            "_check_scheme_supported",
        )


def _compressed_kinds(quantization: Quantization) -> set[str]:
    """Return the names that the table of limits uses for these schemes of compressed-tensors."""
    kinds = set()
    for scheme in (quantization.scheme, *(scheme for _, scheme in quantization.groups)):
        if scheme is None:
            continue
        if scheme.kind == "fp8":
            kinds.add("float8")
        elif scheme.kind == "nvfp4":
            kinds.add("float4")
        elif scheme.kind == "int":
            kinds.add("int8" if scheme.bits == 8 and scheme.group <= 0 else "int4")
    return kinds


_SPARSE = {"DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM"}
_SPARSE_LEAST = 90
"""
The lowest compute capability that any sparse backend accepts. Source: supports_compute_capability
in vllm/v1/attention/backends/mla.
"""


def check_sparse_attention(case: LaunchCase) -> Iterator[Refused]:
    """Refuse a GPU without a backend for sparse attention."""
    if case.capability is None or case.model not in _SPARSE:
        return
    consumer = case.capability // 10 == 12 and case.vllm[:2] <= (0, 21)
    if case.capability < _SPARSE_LEAST or consumer:
        yield refuse_gpu(
            case,
            "sparse-attention",
            _SPARSE_LEAST,
            f"{case.release} has no backend for {case.model}'s sparse attention on {case.gpu}",
            "vllm/platforms/cuda.py: get_attn_backend_cls",
        )
