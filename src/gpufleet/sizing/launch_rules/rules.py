"""
What vLLM would refuse about a model, a way to divide it and a GPU, known before it starts.  Pure.

Contract: `refusals` names only what is certain to stop the server, each with the place in vLLM
that raises it and with one setting that, changed as told, is not refused for that reason again.
What is not known (a GPU's capability, an architecture that no release has) is not judged. That
nothing is found here does not mean that the server starts: memory is `sizing/fit.py`'s business,
and what follows from flags alone is `flags/`'s.

A release between two whose sources were read has the rules of the older one, but where only one of
them has an architecture or a method, nothing is said.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

from gpufleet.catalog import vllm_support
from gpufleet.catalog.vllm_support import Version
from gpufleet.sizing.architectures.components import (
    Architecture,
    ChunkCache,
    FullCache,
    LatentCache,
    Split,
    StateCache,
    Weight,
    WindowCache,
)
from gpufleet.sizing.architectures.quantization import Quantization, Scheme, online

VOCABULARY_PADDING = 64
"""DEFAULT_VOCAB_PADDING_SIZE of vllm/model_executor/layers/vocab_parallel_embedding.py."""
REFINED_BLOCK = 32
"""The smallest block that FP8 experts' scales are refined to, refine_fp8_moe_block_shape of
vllm/model_executor/layers/fused_moe/oracle/fp8.py."""
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""LoRAConfig of vllm/config/lora.py; 1 as well from 0.11.1 on."""


@dataclass(frozen=True)
class Choice:
    """How a model is to be served: vLLM's flags, as far as they can be refused for a model."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False
    decode_context: int = 1
    max_model_len: int | None = None
    """In tokens; None: the model's."""
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    """None: the checkpoint's."""
    lora_rank: int | None = None
    """`--max-lora-rank`; None: no adapters."""
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    chunked_prefill: bool = True


@dataclass(frozen=True)
class Refused:
    """
    One thing that vLLM refuses.

    `setting` is the field of `Choice` to change, or "compute_capability" (of the GPU), "vllm" (the
    release), "checkpoint" (another quantization of the model; `nearest` is then None: none).
    """

    name: str
    """The rule's, as in docs/plan/refusals.md: "attention-heads"."""
    setting: str
    value: Any
    found: str
    """A sentence without a full stop."""
    rule: str
    """vLLM's file and what raises it there."""
    nearest: Any
    """The value of `setting` that works, nearest to `value`."""
    also: str = ""
    """What else would do, in words."""

    @property
    def flag(self) -> str:
        """Return the flag of `vllm serve`, or in words what has to change."""
        return FLAGS[self.setting]

    @property
    def remedy(self) -> str:
        """Return what to do."""
        return _remedy(self.setting, self.nearest) + (f", or {self.also}" if self.also else "")

    @property
    def sentence(self) -> str:
        """Return all of it for people."""
        return f"{self.found} ({self.rule}): {self.remedy}"


FLAGS = {
    "tensor": "--tensor-parallel-size",
    "pipeline": "--pipeline-parallel-size",
    "data": "--data-parallel-size",
    "expert": "--enable-expert-parallel",
    "decode_context": "--decode-context-parallel-size",
    "max_model_len": "--max-model-len",
    "dtype": "--dtype",
    "kv_cache_dtype": "--kv-cache-dtype",
    "quantization": "--quantization",
    "lora_rank": "--max-lora-rank",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "compute_capability": "the GPU",
    "vllm": "the vLLM release",
    "checkpoint": "the checkpoint",
}


def refusals(
    architecture: Architecture,
    quantization: Quantization | None,
    choice: Choice,
    compute_capability: tuple[int, int] | None,
    vllm: Version,
) -> tuple[Refused, ...]:
    """
    Return everything that release `vllm` refuses, what has to do with the release itself first.

    `quantization` is the checkpoint's. `compute_capability` is (9, 0) for Hopper; None: it is not
    known, and what depends on it is not judged.
    """
    case = _Case(architecture, quantization, choice, compute_capability, vllm)
    return tuple(refused for rule in _RULES for refused in rule(case))


def without(
    refused: Refused,
    quantization: Quantization | None,
    choice: Choice,
    compute_capability: tuple[int, int] | None,
    vllm: Version,
) -> tuple[Quantization | None, Choice, tuple[int, int] | None, Version]:
    """Return the same with the one setting changed as `refused` tells."""
    if refused.setting == "compute_capability":
        return quantization, choice, refused.nearest, vllm
    if refused.setting == "vllm":
        return quantization, choice, compute_capability, refused.nearest
    if refused.setting == "checkpoint":
        return None, replace(choice, quantization=None), compute_capability, vllm
    changed = replace(choice, **{refused.setting: refused.nearest})
    return quantization, changed, compute_capability, vllm


def version_text(vllm: Version) -> str:
    """Return a release as people write it."""
    return ".".join(map(str, vllm))


def _remedy(setting: str, nearest: Any) -> str:
    flag = FLAGS[setting]
    match setting:
        case "compute_capability":
            return f"use GPUs of compute capability {nearest[0]}.{nearest[1]} or newer"
        case "vllm":
            return f"use vLLM {version_text(nearest)}"
        case "checkpoint":
            return "use a checkpoint that is not quantized so"
        case "expert":
            return f"set {flag}" if nearest else f"leave {flag} out"
        case "lora_rank" if nearest is None:
            return "leave --enable-lora out"
        case _ if nearest is None:
            return f"leave {flag} out"
    return f"set {flag} {nearest}"


# -- what is judged --------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Fault:
    """Why a tensor-parallel size is refused."""

    name: str
    found: str
    rule: str


@dataclass(frozen=True)
class _Case:
    """Everything that a rule may ask."""

    architecture: Architecture
    checkpoint: Quantization | None
    choice: Choice
    compute_capability: tuple[int, int] | None
    vllm: Version

    @property
    def model(self) -> str:
        return self.architecture.name

    @property
    def release(self) -> str:
        return f"vLLM {version_text(self.vllm)}"

    @property
    def gpu(self) -> str:
        major, minor = self.compute_capability or (0, 0)
        return f"a GPU of compute capability {major}.{minor}"

    @cached_property
    def capability(self) -> int | None:
        """80 for 8.0, as vLLM counts; None: unknown."""
        if self.compute_capability is None:
            return None
        major, minor = self.compute_capability
        return 10 * major + minor

    @cached_property
    def quantization(self) -> Quantization | None:
        """What the weights are once loaded: the checkpoint's, or what the flag makes of them."""
        if self.checkpoint is None and self.choice.quantization is not None:
            return online(self.choice.quantization, self.vllm)
        return self.checkpoint

    @cached_property
    def method(self) -> str | None:
        """The name under which vLLM loads the quantization on this GPU."""
        return None if self.quantization is None else _loaded_as(self, self.quantization)

    @cached_property
    def asked(self) -> vllm_support.Asked | None:
        return vllm_support.asked(self.method, self.vllm) if self.method else None

    @cached_property
    def latent(self) -> bool:
        """Whether attention is MLA."""
        return any(isinstance(cache, LatentCache) for cache in _shape(self.architecture).caches)

    @cached_property
    def dtype(self) -> str:
        """The dtype that is computed with, as the release resolves `auto`."""
        dtype = _ALIASES.get(self.choice.dtype, self.choice.dtype)
        if dtype != "auto":
            return dtype
        own = self.architecture.dtype
        if own == "bfloat16" and self.before_bfloat16 and self.vllm >= _AUTO_FALLS_BACK:
            return "float32" if self.refuses_float16 else "float16"
        return own

    @property
    def before_bfloat16(self) -> bool:
        """Whether the GPU is known to have no bfloat16."""
        return self.capability is not None and self.capability < _BFLOAT16

    @cached_property
    def refuses_float16(self) -> bool:
        return bool(vllm_support.refuses_float16(self.model, self.vllm))

    def faults(self, tensor: int, expert: bool | None = None) -> Iterator[_Fault]:
        """Yield why this tensor-parallel size is refused, everything else as it is."""
        split = self.choice.expert if expert is None else expert
        for rule in _TENSOR_RULES:
            yield from rule(self, tensor, split)


_ALIASES = {"half": "float16", "float": "float32"}
_BFLOAT16 = 80
"""supported_dtypes of vllm/platforms/cuda.py: Ampere and newer."""
_AUTO_FALLS_BACK = (0, 9, 1)
"""_resolve_auto_dtype of vllm/config is first in 0.9.1."""


class _Same:
    """An architecture by its identity: comparing all its layers would take longer than judging."""

    def __init__(self, architecture: Architecture, quantization: Quantization | None) -> None:
        self.architecture = architecture
        self.quantization = quantization

    def __hash__(self) -> int:
        return hash((id(self.architecture), id(self.quantization)))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _Same)
            and self.architecture is other.architecture
            and self.quantization is other.quantization
        )


@dataclass(frozen=True)
class _Shape:
    """The different weights and caches of an architecture's layers, each once."""

    caches: tuple[Any, ...]
    linear: tuple[tuple[Weight, tuple[int, ...]], ...]
    """Divided matrices outside of state layers' mixers, with the layers to ask about them."""


def _shape(architecture: Architecture) -> _Shape:
    return _shape_of(_Same(architecture, None))


@lru_cache(maxsize=256)
def _shape_of(same: _Same) -> _Shape:
    caches: dict[Any, None] = {}
    weights: dict[Weight, list[int]] = {}
    seen: dict[tuple[int, int], list[int]] = {}
    for index, layer in enumerate(same.architecture.layers):
        key = (id(layer.weights), id(layer.cache))
        seen.setdefault(key, []).append(index)
    for indices in seen.values():
        layer = same.architecture.layers[indices[0]]
        own = [cache for cache in (layer.cache, *layer.more) if cache is not None]
        caches.update(dict.fromkeys(own))
        state = any(isinstance(cache, StateCache) for cache in own)
        for weight in layer.weights:
            # How a state layer's mixer is divided follows from its heads, not from its rows.
            if state and not (weight.expert or weight.name.startswith(("mlp.", "feed_forward."))):
                continue
            if weight.linear and weight.split not in {Split.NONE, Split.VOCABULARY}:
                weights.setdefault(weight, []).extend(indices)
    return _Shape(
        tuple(caches),
        tuple(
            (weight, (indices[-1], indices[len(indices) // 2], indices[0]))
            for weight, indices in weights.items()
        ),
    )


@lru_cache(maxsize=256)
def _quantized(same: _Same) -> tuple[tuple[Weight, Scheme], ...]:
    """Return the matrices that are quantized in at least one layer, with how."""
    found = []
    if same.quantization is not None:
        for weight, indices in _shape(same.architecture).linear:
            schemes = (
                same.quantization.scheme_of(
                    f"model.layers.{index}.{weight.name}", expert=weight.expert
                )
                for index in indices
            )
            if scheme := next((scheme for scheme in schemes if scheme), None):
                found.append((weight, scheme))
    return tuple(found)


def _schemes(case: _Case) -> tuple[tuple[Weight, Scheme], ...]:
    return _quantized(_Same(case.architecture, case.quantization))


def _loaded_as(case: _Case, quantization: Quantization) -> str:
    """
    Return vLLM's name of a method: GPTQ and AWQ become Marlin's where that runs.

    Source: override_quantization_method of the classes in
    vllm/model_executor/layers/quantization.
    """
    method = quantization.method
    if quantization.online and method not in _ONLINE_OF_THEIR_OWN:
        return "online"
    if method == "auto-round" and vllm_support.asked(method, case.vllm) is None:
        return "inc"
    if method == "modelopt":
        kinds = quantization.kinds
        if len(kinds) > 1:
            return "modelopt_mixed"
        return {"nvfp4": "modelopt_fp4", "mxfp8": "modelopt_mxfp8"}.get(
            next(iter(kinds), ""), "modelopt"
        )
    if method == "mxfp4" and vllm_support.asked("gpt_oss_mxfp4", case.vllm):
        return "gpt_oss_mxfp4"
    if method in {"awq", "gptq"}:
        marlin = vllm_support.asked(f"{method}_marlin", case.vllm)
        known = case.capability is not None  # else the better one is taken for granted
        enough = marlin and (not known or (case.capability or 0) >= marlin.capability)
        scheme = quantization.scheme
        fits = scheme is not None and scheme.bits in {4, 8}
        if method == "gptq":
            fits = fits and scheme is not None and scheme.symmetric
        if enough and fits:
            return f"{method}_marlin"
    return method


_ONLINE_OF_THEIR_OWN = {"fp8", "ptpc_fp8", "bitsandbytes", "experts_int8"}
"""What is quantized while it is loaded, by a class of its own and not OnlineQuantizationConfig."""


# -- the release and the GPU -----------------------------------------------------------------------


def _architecture_known(case: _Case) -> Iterator[Refused]:
    if vllm_support.serves(case.model, case.vllm) is False:
        nearest = vllm_support.nearest_serving(case.model, case.vllm)
        if nearest is not None:
            yield Refused(
                "architecture",
                "vllm",
                case.vllm,
                f"{case.release} has no class for {case.model}; what its fallback to Transformers "
                "would make of it is neither sized nor planned",
                "vllm/model_executor/models/registry.py: _ModelRegistry",
                nearest,
            )


def _method_known(case: _Case) -> Iterator[Refused]:
    if case.method is None or case.asked is not None or not vllm_support.knows(case.method):
        return
    nearest = vllm_support.nearest_with_method(case.method, case.vllm)
    if nearest is not None:
        yield Refused(
            "quantization-method",
            "vllm",
            case.vllm,
            f"{case.release} has no quantization `{case.method}`, which the weights have",
            "vllm/config/model.py: ModelConfig._verify_quantization",
            nearest,
        )


_SAME_METHOD = {
    "awq_marlin": "awq",
    "auto_awq": "awq",
    "gptq_marlin": "gptq",
    "auto_gptq": "gptq",
    "gpt_oss_mxfp4": "mxfp4",
    "modelopt_fp4": "modelopt",
    "modelopt_mxfp8": "modelopt",
    "modelopt_mixed": "modelopt",
    "nvfp4": "modelopt",
    "auto-round": "inc",
    "petit_nvfp4": "modelopt",
}
_LOADS_OTHERS = {"humming", "moe_wna16", "inc", "bitblas", "gptq_bitblas", "marlin", "cpu_awq"}
"""Methods that take over the checkpoints of others (override_quantization_method)."""


def _flag_agrees(case: _Case) -> Iterator[Refused]:
    flag = case.choice.quantization
    if flag is None:
        return
    if case.checkpoint is None:
        if online(flag, case.vllm) is None and vllm_support.knows(flag):
            yield Refused(
                "quantization-flag",
                "quantization",
                flag,
                f"--quantization {flag} needs a checkpoint that is quantized so, and {case.model}'s"
                f" is not: {case.release} quantizes nothing by that name while it loads",
                "vllm/config/model.py: ModelConfig._verify_quantization",
                None,
            )
        return
    own = case.checkpoint.method
    said, has = _SAME_METHOD.get(flag, flag), _SAME_METHOD.get(own, own)
    if said != has and not {said, has} & _LOADS_OTHERS and vllm_support.knows(flag):
        yield Refused(
            "quantization-flag",
            "quantization",
            flag,
            f"--quantization {flag} contradicts the checkpoint, which is quantized by `{own}`",
            "vllm/config/model.py: ModelConfig._verify_quantization",
            None,
        )


_WHEELS: tuple[tuple[Version, int], ...] = (((0, 8), 70), ((0, 20), 75))
"""docs/getting_started/installation of the releases: CUDA 13 (0.20) has left Volta behind."""


def _wheel_runs(case: _Case) -> Iterator[Refused]:
    if case.capability is None:
        return
    least = max(
        (capability for since, capability in _WHEELS if since <= case.vllm[:2]),
        default=_WHEELS[0][1],
    )
    if case.capability < least:
        yield _too_old(
            case,
            "gpu-generation",
            least,
            f"{case.release}'s kernels are not built for {case.gpu}",
            "docs/getting_started/installation: requirements",
        )


def _too_old(case: _Case, name: str, least: int, found: str, rule: str) -> Refused:
    also = "a checkpoint that is not quantized so" if name == "quantization-gpu" else ""
    return Refused(
        name, "compute_capability", case.compute_capability, found, rule, divmod(least, 10), also
    )


def _gpu_has_method(case: _Case) -> Iterator[Refused]:
    if case.capability is None or case.asked is None or case.quantization is None:
        return
    rule = "vllm/config/vllm.py: VllmConfig._get_quantization_config"
    if case.capability < case.asked.capability:
        yield _too_old(
            case,
            "quantization-gpu",
            case.asked.capability,
            f"{case.release} does not run `{case.method}` weights on {case.gpu}",
            rule,
        )
        return
    if case.method != "compressed-tensors":
        return
    needs = [
        (asked.capability, kind)
        for kind in _compressed_kinds(case.quantization)
        if (asked := vllm_support.asked(f"compressed-tensors {kind}", case.vllm))
    ]
    least, kind = max(needs, default=(0, ""))
    if case.capability < least:
        yield _too_old(
            case,
            "quantization-gpu",
            least,
            f"{case.release} does not run compressed-tensors weights in {kind} on {case.gpu}",
            "vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors.py: "
            "_check_scheme_supported",
        )


def _compressed_kinds(quantization: Quantization) -> set[str]:
    """Return the rows of the table of limits that the schemes of compressed-tensors fall under."""
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
"""supports_compute_capability of every sparse backend in vllm/v1/attention/backends/mla."""


def _sparse_attention(case: _Case) -> Iterator[Refused]:
    if case.capability is None or case.model not in _SPARSE:
        return
    consumer = case.capability // 10 == 12 and case.vllm[:2] <= (0, 21)
    if case.capability < _SPARSE_LEAST or consumer:
        yield _too_old(
            case,
            "sparse-attention",
            _SPARSE_LEAST,
            f"{case.release} has no backend for {case.model}'s sparse attention on {case.gpu}",
            "vllm/platforms/cuda.py: get_attn_backend_cls",
        )


# -- dtypes ----------------------------------------------------------------------------------------


def _bfloat16_runs(case: _Case) -> Iterator[Refused]:
    if case.dtype != "bfloat16" or not case.before_bfloat16:
        return
    where = (
        "vllm/platforms/cuda.py: check_if_supports_dtype"
        if case.vllm >= (0, 10, 0)
        else "vllm/v1/worker/gpu_worker.py: _check_if_gpu_supports_dtype"
    )
    yield _other_dtype(case, "bfloat16", f"{case.gpu} has no bfloat16, which needs 8.0", where)


def _float16_allowed(case: _Case) -> Iterator[Refused]:
    if case.dtype == "float16" and case.refuses_float16:
        yield _other_dtype(
            case,
            "float16",
            f"{case.release} refuses float16 for {case.model}, which overflows it",
            "vllm/config/model.py: _check_valid_dtype",
        )


def _method_has_dtype(case: _Case) -> Iterator[Refused]:
    if case.asked is None or case.dtype in case.asked.dtypes:
        return
    yield _other_dtype(
        case,
        "quantization-dtype",
        f"{case.release} computes with `{case.method}` weights in "
        f"{' or '.join(case.asked.dtypes)}, not in {case.dtype}",
        "vllm/config/vllm.py: VllmConfig._get_quantization_config",
    )


def _other_dtype(case: _Case, name: str, found: str, rule: str) -> Refused:
    """
    Return the refusal of a dtype with another that nothing refuses.

    Where there is none: of the others, what ends this refusal at least.
    """
    wanted = case.choice.dtype
    gpu_has = [one for one in _DTYPES if not (one == "bfloat16" and case.before_bfloat16)]
    model_has = [one for one in gpu_has if not (one == "float16" and case.refuses_float16)]
    by_method = case.asked.dtypes if case.asked else _DTYPES
    whole = [one for one in model_has if one in by_method and one != case.dtype]
    if whole:
        return Refused(name, "dtype", wanted, found, rule, whole[0])
    if name != "quantization-dtype":
        others = [one for one in model_has if one != case.dtype]
        return Refused(name, "dtype", wanted, found, rule, others[0])
    if "bfloat16" not in by_method:
        return Refused(name, "checkpoint", case.method, found, rule, None)
    if wanted == "auto":
        return _too_old(case, name, _BFLOAT16, found, rule)
    return Refused(name, "dtype", wanted, found, rule, "bfloat16")


_DTYPES = ("bfloat16", "float16", "float32")


def _kv_cache_dtype(case: _Case) -> Iterator[Refused]:
    wanted = case.choice.kv_cache_dtype
    if wanted == "fp8_e5m2" and case.checkpoint and "fp8" in case.checkpoint.kinds:
        yield Refused(
            "kv-cache-dtype",
            "kv_cache_dtype",
            wanted,
            f"{case.release} keeps no fp8_e5m2 cache beside FP8 weights",
            "vllm/model_executor/layers/attention/attention.py: Attention"
            if case.vllm >= (0, 16)
            else "vllm/attention/layer.py: Attention",
            "fp8_e4m3",
        )
    nvfp4 = wanted.startswith("nvfp4") and not wanted.endswith("_ds_mla")
    if nvfp4 and case.latent and case.vllm >= (0, 21):
        yield Refused(
            "kv-cache-dtype",
            "kv_cache_dtype",
            wanted,
            f"{case.release} has no {wanted} cache for {case.model}'s latent attention",
            "vllm/config/vllm.py: VllmConfig.validate_nvfp4_kv_cache_with_mla",
            "fp8",
        )


# -- tensor parallelism ----------------------------------------------------------------------------


def _heads(case: _Case, tensor: int, _: bool) -> Iterator[_Fault]:
    heads = case.architecture.heads
    if heads % tensor:
        yield _Fault(
            "attention-heads",
            f"--tensor-parallel-size {tensor} does not divide {case.model}'s {heads} attention "
            "heads",
            "vllm/config/model.py: ModelConfig.verify_with_parallel_config",
        )


def _kv_heads(case: _Case, tensor: int, _: bool) -> Iterator[_Fault]:
    counts = {
        cache.kv_heads
        for cache in _shape(case.architecture).caches
        if isinstance(cache, FullCache | WindowCache | ChunkCache)
    }
    for heads in sorted(counts):
        if tensor > heads and case.model in _NEVER_COPIED:
            yield _Fault(
                "kv-heads",
                f"--tensor-parallel-size {tensor} is more than {case.model}'s {heads} KV heads, "
                "which its class does not copy",
                "vllm/model_executor/models/gpt_oss.py: OAIAttention",
            )
        elif tensor % heads and heads % tensor:
            yield _Fault(
                "kv-heads",
                f"--tensor-parallel-size {tensor} neither divides {case.model}'s {heads} KV heads "
                "nor is a multiple of them",
                "vllm/model_executor/layers/linear.py: QKVParallelLinear",
            )


_NEVER_COPIED = {"GptOssForCausalLM"}


def _vocabulary(case: _Case, tensor: int, _: bool) -> Iterator[_Fault]:
    for part in case.architecture.parts:
        for weight in part.weights:
            if weight.split is not Split.VOCABULARY:
                continue
            padded = math.ceil(weight.rows / VOCABULARY_PADDING) * VOCABULARY_PADDING
            if padded % tensor:
                yield _Fault(
                    "vocabulary",
                    f"--tensor-parallel-size {tensor} does not divide {case.model}'s vocabulary, "
                    f"{weight.rows} padded to {padded}",
                    "vllm/model_executor/layers/vocab_parallel_embedding.py: "
                    "VocabParallelEmbedding",
                )
                return


def _state_heads(case: _Case, tensor: int, _: bool) -> Iterator[_Fault]:
    for cache in _shape(case.architecture).caches:
        if not isinstance(cache, StateCache):
            continue
        for size, what in _state_sizes(cache):
            if size % tensor:
                yield _Fault(
                    "state-heads",
                    f"--tensor-parallel-size {tensor} does not divide the {size} {what} of "
                    f"{case.model}'s {cache.kind} layers",
                    "vllm/model_executor/layers/mamba/mamba_utils.py: MambaStateShapeCalculator",
                )
                return


def _state_sizes(cache: StateCache) -> Iterator[tuple[int, str]]:
    """Yield what tensor parallelism has to divide of a layer with a state."""
    for shape, split in zip(cache.shapes, cache.split, strict=True):
        if split is None:
            continue
        if cache.kind not in _OF_HEADS:
            yield shape[split], "channels"
        elif shape is cache.shapes[-1]:
            yield shape[split], "heads"
        elif len(shape) == len(cache.shapes[-1]) and shape[split] > 1:
            yield shape[split], "groups"  # a single one is copied: MambaMixer2


_OF_HEADS = {"mamba2", "gdn", "kda"}
"""Kinds whose last state is (heads, ...)."""
_WHOLE_QUANTIZED_UNTIL = (0, 11)
_GROUPED_QUANTIZED_UNTIL = (0, 14)


def _quantized_state(case: _Case, tensor: int, _: bool) -> Iterator[_Fault]:
    if tensor == 1 or case.quantization is None or case.vllm[:2] >= _GROUPED_QUANTIZED_UNTIL:
        return
    for cache in _shape(case.architecture).caches:
        if isinstance(cache, StateCache) and cache.kind == "mamba2":
            groups = cache.shapes[1][0] if len(cache.shapes) == 3 else 0
            if case.vllm[:2] < _WHOLE_QUANTIZED_UNTIL or (groups and groups % tensor):
                yield _Fault(
                    "quantized-state",
                    f"{case.release} does not divide {case.model}'s quantized Mamba 2 layers over "
                    f"{tensor} GPUs",
                    "vllm/model_executor/layers/mamba/mamba_mixer2.py: MambaMixer2",
                )
                return


def _layer_sizes(case: _Case, tensor: int, _: bool) -> Iterator[_Fault]:
    heads = case.architecture.heads
    found: dict[int, str] = {}
    for weight, _layers in _shape(case.architecture).linear:
        if weight.expert or weight.split is Split.HEADS:
            continue
        size = weight.rows if weight.split is Split.ROWS else weight.columns
        # Where the heads are not divided, that says it better.
        by_heads = heads and heads % tensor and size % heads == 0
        if size % tensor and not by_heads:
            found.setdefault(size, weight.name)
    if found:
        sizes = ", ".join(f"{size} ({name})" for size, name in sorted(found.items()))
        yield _Fault(
            "layer-sizes",
            f"--tensor-parallel-size {tensor} does not divide {case.model}'s layers: {sizes}",
            "vllm/model_executor/layers/linear.py: ColumnParallelLinear, RowParallelLinear",
        )


def _ranks_of_experts(case: _Case, tensor: int, expert: bool) -> int:
    """
    Return over how many ranks each expert is divided.

    Data parallelism divides experts too, unless whole experts are divided. Source:
    FusedMoEParallelConfig.make in vllm/model_executor/layers/fused_moe/config.py.
    """
    return 1 if expert else tensor * case.choice.data


def _expert_size(case: _Case, tensor: int, expert: bool) -> Iterator[_Fault]:
    ranks = _ranks_of_experts(case, tensor, expert)
    sizes = {
        weight.columns
        for weight, _ in _shape(case.architecture).linear
        if weight.expert and weight.split is Split.COLUMNS
    }
    for size in sorted(sizes):
        if size % ranks:
            yield _Fault(
                "expert-size",
                f"{_over(case, tensor, ranks)} does not divide the {size} inner numbers of "
                f"{case.model}'s experts",
                "vllm/model_executor/layers/fused_moe: FusedMoEConfig, assert on intermediate_size",
            )


def _over(case: _Case, tensor: int, ranks: int) -> str:
    if ranks == tensor:
        return f"--tensor-parallel-size {tensor}"
    return f"--tensor-parallel-size {tensor} times --data-parallel-size {case.choice.data}"


def _fewer_ranks_than_experts(case: _Case, tensor: int, _: bool) -> Iterator[_Fault]:
    experts = case.architecture.experts
    if experts and tensor > experts and vllm_support.limits_by_experts(case.model, case.vllm):
        yield _Fault(
            "ranks-over-experts",
            f"--tensor-parallel-size {tensor} is more than {case.model}'s {experts} experts",
            "vllm/model_executor/models: the class's block of experts",
        )


_MERGED_MAY_MISMATCH = (0, 14)
"""_maybe_allow_fp8_block_shape_mismatch of vllm/model_executor/layers/linear.py."""
_NOT_MERGED = ("q_b_proj", "kv_b_proj")


def _fp8_blocks(case: _Case, tensor: int, _: bool) -> Iterator[_Fault]:
    method = case.quantization.method if case.quantization else ""
    if tensor == 1:
        return
    # compressed-tensors keeps its blocks elsewhere, where the allowance does not look for them.
    allowed = case.vllm[:2] >= _MERGED_MAY_MISMATCH and method == "fp8"
    for weight, scheme in _schemes(case):
        if scheme.block is None or weight.expert:
            continue
        rows, columns = scheme.block
        merged = not weight.name.endswith(_NOT_MERGED)
        if weight.split is Split.COLUMNS:
            size, block = weight.columns // tensor, columns
        elif merged and allowed:
            continue
        elif weight.split is Split.HEADS:
            size, block = max(1, weight.heads // tensor) * weight.rows // weight.heads, rows
        else:
            size, block = weight.rows // tensor, rows
        if size % block:
            yield _Fault(
                "fp8-block",
                f"--tensor-parallel-size {tensor} leaves {size} of {case.model}'s {weight.name} on "
                f"a GPU, no multiple of its FP8 block of {block}",
                "vllm/model_executor/layers/quantization/utils/fp8_utils.py: "
                "validate_fp8_block_shape"
                if case.vllm >= (0, 11)
                else "vllm/model_executor/layers/quantization/fp8.py: "
                "Fp8LinearMethod.create_weights",
            )
            return


_REFINED_SINCE = (0, 29)
"""resolve_fp8_moe_weight_block_shape of vllm/model_executor/layers/fused_moe/oracle/fp8.py."""


def _fp8_expert_blocks(case: _Case, tensor: int, expert: bool) -> Iterator[_Fault]:
    ranks = _ranks_of_experts(case, tensor, expert)
    method = case.quantization.method if case.quantization else ""
    for weight, scheme in _schemes(case):
        if scheme.block is None or not weight.expert or weight.split is not Split.COLUMNS:
            continue
        rows, columns = scheme.block
        size = weight.columns // ranks
        if size % rows == 0 and (tensor == 1 or size % columns == 0):
            continue
        hidden = case.architecture.hidden_size
        if method == "fp8" and case.vllm[:2] >= _REFINED_SINCE:
            if math.gcd(rows, columns, size, hidden) >= REFINED_BLOCK:
                continue
        elif method not in {"fp8", "compressed-tensors"}:
            continue
        yield _Fault(
            "fp8-expert-block",
            f"{_over(case, tensor, ranks)} leaves {size} inner numbers of each of {case.model}'s "
            f"experts on a GPU, no multiple of their FP8 block of {rows}",
            "vllm/model_executor/layers/quantization/utils/fp8_utils.py: "
            "validate_fp8_block_shape_moe"
            if case.vllm[:2] >= (0, 30)
            else "vllm/model_executor/layers/quantization: create_weights of the experts' method",
        )
        return


_IN_GROUPS = {"awq", "gptq", "compressed-tensors", "modelopt"}


def _groups(case: _Case, tensor: int, _: bool) -> Iterator[_Fault]:
    method = case.quantization.method if case.quantization else ""
    if tensor == 1 or method not in _IN_GROUPS:
        return
    for weight, scheme in _schemes(case):
        if weight.expert or weight.split is not Split.COLUMNS or scheme.group <= 0:
            continue
        if scheme.kind != "int" and not (method == "modelopt" and scheme.kind == "nvfp4"):
            continue
        size = weight.columns // tensor
        if size % scheme.group and scheme.group < weight.columns:
            yield _Fault(
                "quantization-group",
                f"--tensor-parallel-size {tensor} leaves {size} inputs of {case.model}'s "
                f"{weight.name} on a GPU, no whole number of quantization groups of {scheme.group}",
                "vllm/distributed/utils.py: verify_group_size_divides_partition"
                if case.vllm[:2] >= (0, 28)
                else "vllm/model_executor/layers/quantization: create_weights of the method",
            )
            return


_EXPERT_GROUPS_CHECKED = (0, 24)
"""create_weights of compressed_tensors_moe_wna16.py; before, the scales were cut short."""
_SMALLEST_GROUP = 32
"""MoeWNA16Method.create_weights halves a group that does not divide, down to this."""


def _expert_groups(case: _Case, tensor: int, expert: bool) -> Iterator[_Fault]:
    method = case.quantization.method if case.quantization else ""
    ranks = _ranks_of_experts(case, tensor, expert)
    for weight, scheme in _schemes(case):
        if not weight.expert or weight.split is not Split.COLUMNS or scheme.kind != "int":
            continue
        size, group = weight.columns // ranks, scheme.group
        if group <= 0 or size % group == 0:
            continue
        if method == "compressed-tensors" and case.vllm[:2] >= _EXPERT_GROUPS_CHECKED:
            rule = "compressed_tensors/compressed_tensors_moe: the WNA16 method"
        elif method in {"awq", "gptq"} and not _halves(group, size, case.architecture.hidden_size):
            rule = "moe_wna16.py: MoeWNA16Method.create_weights"
        else:
            continue
        yield _Fault(
            "expert-group",
            f"{_over(case, tensor, ranks)} leaves {size} inner numbers of each of {case.model}'s "
            f"experts on a GPU, no whole number of quantization groups of {group}",
            f"vllm/model_executor/layers/quantization/{rule}",
        )
        return


def _halves(group: int, *sizes: int) -> bool:
    """Say whether a group, halved as often as needed, divides all sizes."""
    while any(size % group for size in sizes):
        group //= 2
        if group < _SMALLEST_GROUP:
            return False
    return True


_PREQUANTIZED_GONE = (0, 28)


def _bitsandbytes(case: _Case, tensor: int, _: bool) -> Iterator[_Fault]:
    own = case.checkpoint
    if tensor > 1 and own and own.method == "bitsandbytes" and case.vllm[:2] < _PREQUANTIZED_GONE:
        yield _Fault(
            "bitsandbytes",
            f"{case.release} does not divide a checkpoint that bitsandbytes has quantized",
            "vllm/model_executor/model_loader/bitsandbytes_loader.py: BitsAndBytesModelLoader",
        )


_TENSOR_RULES: tuple[Callable[[_Case, int, bool], Iterator[_Fault]], ...] = (
    _heads,
    _kv_heads,
    _vocabulary,
    _state_heads,
    _quantized_state,
    _layer_sizes,
    _expert_size,
    _fewer_ranks_than_experts,
    _fp8_blocks,
    _fp8_expert_blocks,
    _groups,
    _expert_groups,
    _bitsandbytes,
)
_OF_EXPERTS = {"expert-size", "fp8-expert-block", "expert-group"}


def _tensor(case: _Case) -> Iterator[Refused]:
    wanted = case.choice.tensor
    faults = list(case.faults(wanted))
    if not faults:
        return
    nearest = next((size for size in range(wanted - 1, 0, -1) if not any(case.faults(size))), None)
    for fault in faults:
        smaller = nearest or _smaller(case, fault.name)
        of_experts = fault.name in _OF_EXPERTS and not case.choice.expert
        if of_experts and not _names(case.faults(wanted, expert=True)) & {fault.name}:
            also = "divide whole experts with --enable-expert-parallel"
        else:
            also = ""
        if smaller is not None:
            yield Refused(fault.name, "tensor", wanted, fault.found, fault.rule, smaller, also)
        elif also:
            yield Refused(fault.name, "expert", False, fault.found, fault.rule, nearest=True)
        else:
            yield Refused(fault.name, "checkpoint", case.method, fault.found, fault.rule, None)


def _smaller(case: _Case, name: str) -> int | None:
    """Return the largest size below the wanted one that this rule does not refuse."""
    sizes = range(case.choice.tensor - 1, 0, -1)
    return next((size for size in sizes if name not in _names(case.faults(size))), None)


def _names(faults: Iterable[_Fault]) -> set[str]:
    return {fault.name for fault in faults}


# -- the other ways to divide ----------------------------------------------------------------------


def _pipeline(case: _Case) -> Iterator[Refused]:
    if case.choice.pipeline == 1:
        return
    said = vllm_support.pipelines(case.model, case.vllm)
    if said is None:
        said = case.architecture.pipeline
    if not said and vllm_support.serves(case.model, case.vllm) is not False:
        yield Refused(
            "pipeline",
            "pipeline",
            case.choice.pipeline,
            f"{case.release} cannot divide {case.model} into pipeline stages",
            "vllm/config/model.py: ModelConfig.verify_with_parallel_config",
            1,
        )


def _experts(case: _Case) -> Iterator[Refused]:
    if case.choice.expert and not case.architecture.experts:
        yield Refused(
            "expert-parallel",
            "expert",
            value=True,
            found=f"{case.model} has no experts to divide with --enable-expert-parallel",
            rule="vllm/config/model.py: ModelConfig._verify_with_expert_parallelism",
            nearest=False,
        )


_CONTEXT_SINCE = (0, 10, 2)
_CONTEXT_OF_HEADS_SINCE = (0, 11, 1)
_CONTEXT_WHOLE_UNTIL = (0, 25)


def _decode_context(case: _Case) -> Iterator[Refused]:
    wanted = case.choice.decode_context
    fault = _context_fault(case, wanted)
    if fault is None:
        return
    nearest = next(size for size in range(wanted - 1, 0, -1) if _context_fault(case, size) is None)
    yield Refused(fault.name, "decode_context", wanted, fault.found, fault.rule, nearest)


def _context_fault(case: _Case, size: int) -> _Fault | None:
    if size == 1:
        return None
    name, tensor = "decode-context", case.choice.tensor
    given = f"--decode-context-parallel-size {size}"
    parallel = "vllm/config/parallel.py: ParallelConfig"
    model = "vllm/config/model.py: ModelConfig.verify_with_parallel_config"
    if case.vllm < _CONTEXT_SINCE:
        return _Fault(name, f"{case.release} has no --decode-context-parallel-size", parallel)
    if tensor % size:
        found = f"{given} does not divide --tensor-parallel-size {tensor}, whose GPUs it uses"
        return _Fault(name, found, parallel)
    caches = _shape(case.architecture).caches
    whole = all(isinstance(cache, FullCache | LatentCache) for cache in caches)
    if case.vllm[:2] < _CONTEXT_WHOLE_UNTIL and not whole:
        return _Fault(
            name,
            f"{case.release} divides only caches of the whole context, and {case.model} has others",
            "vllm/v1/core/kv_cache_coordinator.py and single_type_kv_cache_manager.py",
        )
    if case.latent:
        if case.choice.kv_cache_dtype.startswith("fp8") and case.vllm[:2] < _CONTEXT_WHOLE_UNTIL:
            found = f"{case.release} divides no FP8 cache of latent attention with {given}"
            return _Fault(name, found, "MLA's forward: assert on fp8_attention")
        return None
    kv_heads = case.architecture.kv_heads
    if case.vllm < _CONTEXT_OF_HEADS_SINCE or not kv_heads:
        return None
    if tensor <= kv_heads:
        found = (
            f"{given} needs --tensor-parallel-size above {case.model}'s {kv_heads} KV heads, not "
            f"{tensor}"
        )
        return _Fault(name, found, model)
    most = tensor // kv_heads
    if size > most:
        found = f"{given} is more than the {most} copies of each KV head of {case.model}"
        return _Fault(name, found, model)
    group = case.architecture.heads // kv_heads
    if group % size:
        found = f"{given} does not divide {case.model}'s {group} query heads a KV head"
        return _Fault(name, found, model)
    return None


# -- lengths and adapters --------------------------------------------------------------------------


def _length(case: _Case) -> Iterator[Refused]:
    wanted, longest = case.choice.max_model_len, case.architecture.longest_length(case.vllm)
    if wanted is not None and wanted > longest:
        yield Refused(
            "max-model-len",
            "max_model_len",
            wanted,
            f"--max-model-len {wanted} is beyond the {longest} tokens of {case.model}'s config",
            "vllm/config/model.py: _get_and_verify_max_len",
            longest,
            "lengthen it with rope parameters in --hf-overrides, as the model's card says",
        )


def _batch(case: _Case) -> Iterator[Refused]:
    tokens, sequences = case.choice.max_num_batched_tokens, case.choice.max_num_seqs
    if tokens is None:
        return
    rule = "vllm/config/scheduler.py: SchedulerConfig.verify_max_model_len"
    if sequences is not None and tokens < sequences:
        yield Refused(
            "batched-tokens-below-seqs",
            "max_num_batched_tokens",
            tokens,
            f"--max-num-batched-tokens {tokens} is less than --max-num-seqs {sequences}",
            rule,
            sequences,
        )
    length = case.choice.max_model_len or case.architecture.untold_length(case.vllm)
    if not case.choice.chunked_prefill and tokens < length:
        yield Refused(
            "batched-tokens-below-length",
            "max_num_batched_tokens",
            tokens,
            f"--max-num-batched-tokens {tokens} is less than the context of {length}, which a "
            "prompt needs in one piece without chunked prefill",
            rule,
            length,
        )


def _lora(case: _Case) -> Iterator[Refused]:
    rank = case.choice.lora_rank
    if rank is None:
        return
    served = vllm_support.serves(case.model, case.vllm)
    if vllm_support.adapts(case.model, case.vllm) is False and served is not False:
        yield Refused(
            "lora",
            "lora_rank",
            rank,
            f"{case.release} loads no LoRA adapters for {case.model}",
            "vllm/lora: the class is no SupportsLoRA",
            None,
        )
    ranks = LORA_RANKS if case.vllm < (0, 11, 1) else (1, *LORA_RANKS)
    if rank not in ranks:
        yield Refused(
            "lora-rank",
            "lora_rank",
            rank,
            f"--max-lora-rank {rank} is none of {', '.join(map(str, ranks))}",
            "vllm/config/lora.py: LoRAConfig",
            next((one for one in ranks if one >= rank), ranks[-1]),
        )


_RULES: tuple[Callable[[_Case], Iterator[Refused]], ...] = (
    _architecture_known,
    _method_known,
    _flag_agrees,
    _wheel_runs,
    _gpu_has_method,
    _sparse_attention,
    _bfloat16_runs,
    _float16_allowed,
    _method_has_dtype,
    _kv_cache_dtype,
    _tensor,
    _pipeline,
    _experts,
    _decode_context,
    _length,
    _batch,
    _lora,
)
