"""Estimate the memory of vLLM's profiling run at start, and find its model runner.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpufleet.sizing.architectures.components import Architecture, StateCache
from gpufleet.sizing.architectures.max_length import text_part

GIB = 1 << 30

_V2_RUNNER: tuple[tuple[tuple[int, ...], frozenset[str]], ...] = (
    ((0, 22), frozenset({"Qwen3ForCausalLM"})),
    ((0, 23), frozenset({"LlamaForCausalLM", "MistralForCausalLM", "Qwen3ForCausalLM"})),
    (
        (0, 24),
        frozenset(
            {
                "DeepseekV2ForCausalLM",
                "GraniteMoeForCausalLM",
                "LlamaForCausalLM",
                "MistralForCausalLM",
                "Qwen2MoeForCausalLM",
                "Qwen3ForCausalLM",
            }
        ),
    ),
)
"""
The architectures that use the second model runner, for each release that changed the list. Source:
vllm/config/vllm.py.
"""
_V2_MOE = frozenset({"DeepseekV2ForCausalLM", "GraniteMoeForCausalLM", "Qwen2MoeForCausalLM"})
"""
Since 0.25, these architectures use the second model runner, and so do all models without experts
and without states.
"""
_V2_EVERY = (0, 29)
_V2_PROFILES_GRAPHS = (0, 29)
"""Up to 0.28 the second runner's profile_cudagraph_memory returns 0."""


def has_second_runner(architecture: Architecture, vllm: tuple[int, ...]) -> bool:
    """
    Return whether the release runs this model with its second model runner (vllm/v1/worker/gpu/).

    With the second model runner, the dummy run of the sampler needs less memory. Source:
    use_v2_model_runner in vllm/config/vllm.py.
    """
    if vllm >= _V2_EVERY:
        return True
    if vllm >= (0, 25):
        stateful = any(
            isinstance(cache, StateCache) for layer in architecture.layers for cache in layer.caches
        )
        return architecture.name in _V2_MOE or not (architecture.experts or stateful)
    with_it: frozenset[str] = frozenset()
    for since, names in _V2_RUNNER:
        if vllm >= since:
            with_it = names
    return architecture.name in with_it


@dataclass(frozen=True, kw_only=True)
class DummyRun:
    """Inputs for the peak memory of vLLM's profiling run at start, on one GPU."""

    vllm: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    tensor: int = 1
    data: int = 1
    expert: bool = False
    """Whether expert parallelism is used."""
    dispatches: bool = False
    """Whether a token goes only to the GPUs of its experts, not to all GPUs (--all2all-backend)."""
    pipeline: int = 1
    last_stage: bool = True
    """Whether this is the pipeline stage that samples."""
    layers: int | None = None
    """Number of layers of the stage; None for all layers."""
    dtype_bytes: int = 2
    mxfp4: bool = False
    """Whether experts are quantized to MXFP4."""
    nvfp4: bool = False
    enforce_eager: bool = False
    compute_capability: tuple[int, int] | None = None


_SORT_ALWAYS = (0, 11, 1)
"""
Since this release, vLLM uses FlashInfer's sampler only if it is enabled
(VLLM_USE_FLASHINFER_SAMPLER).
"""


def _sampler_bytes(vllm: tuple[int, ...], dtype_bytes: int, *, second: bool) -> tuple[float, float]:
    """
    Return the lowest and the highest number of bytes per logit in the sampler's dummy run.

    The dummy run has `max_num_seqs` x vocabulary logits. Each logit needs its value in the model's
    dtype, a float32 copy, and the working memory of top-k and top-p. Up to 0.16, top-k and top-p
    sort the logits (values, int64 indices, and memory of PyTorch's segmented sort). The sum is then
    38 bytes (measured: 38.2 to 38.6). Since 0.17, a Triton kernel or FlashInfer is used
    (probabilities and noise), and the sum is 14 bytes (measured: 14.28). Up to 0.11.0, either sum
    is possible, because the sort runs only if FlashInfer is not installed, and vLLM's images
    contain FlashInfer. Up to 0.32, the second model runner needs only the logits. Source:
    _dummy_sampler_run in vllm/v1/worker/gpu_model_runner.py and gpu/model_runner.py,
    vllm/v1/sample/ops/topk_topp_sampler.py.
    """
    kernel, sort = 12.25 + dtype_bytes, 36.3 + dtype_bytes
    if vllm < _SORT_ALWAYS:
        return kernel, sort
    if vllm < (0, 17):
        return sort, sort
    if second and vllm < (0, 33):
        return dtype_bytes, dtype_bytes
    return kernel, kernel


_FORWARD = (0.8, 1.2)
"""
Lowest and highest factor between the real peak and the formula. In the logs of six starts without
experts whose forward pass is the peak (0.10.2 to 0.26), the factor is 0.90 to 1.19. On a V100
(0.18), it is 0.83, derived from the memory that was left.
"""
_EXPERTS = (0.2, 1.2)
"""
The same factors for experts. In the logs of four models without quantization (0.19.0), the factor
is 0.87 to 1.06. With FP8 experts on four RTX PRO 6000 (0.27.1), which use other kernels, it is
0.31.
"""
_NVFP4_EXPERTS = (0.2, 3.0)
"""
The same factors for experts in NVFP4, whose kernels need more memory. In two starts of a Gemma 4
with 16,384 tokens, the factor is 2.2. In four starts of a Qwen3.6 with 4,096 to 32,768 tokens, it
is up to 4, because linear attention and the encoder add memory. (0.19.2 to 0.20.2, all starts by
one author.)
"""
_GATHERED = (0.6, 1.4)
"""
The same factors for experts that process the tokens of several engines. They are assumed, because
there is no log of such a start.
"""
_OTHER = (0.0, 0.12)
"""
Lowest and highest GiB in addition to the formula: buffers for input and block tables, and cuBLAS
workspaces. In the logs of 45 starts of 0.15 to 0.19 without experts and images, whose sampler is
the peak, they are -0.01 to 0.12 GiB.
"""


def peak_bytes(
    architecture: Architecture, config: Mapping[str, Any] | None, run: DummyRun
) -> tuple[float, float]:
    """
    Return the lowest and the highest estimate of PyTorch's peak memory in bytes.
    """
    forward = _forward_bytes(architecture, run)
    gathered = _experts_bytes(architecture, config, run)
    least = gathered
    if run.dispatches and run.expert and run.data > 1:
        # If the load of the experts is even, a GPU gets as many tokens as one engine sends. A
        # backend may reserve memory for more, up to the tokens of all engines. This has not been
        # measured.
        least = gathered / run.data
    low, high = _EXPERTS if run.data == 1 else _GATHERED
    if run.nvfp4:
        low, high = _NVFP4_EXPERTS
    experts = low * least, gathered + (high - 1) * least
    of_a_logit = _sampler_bytes(
        run.vllm, run.dtype_bytes, second=has_second_runner(architecture, run.vllm)
    )
    sequences = min(run.max_num_seqs, run.max_num_batched_tokens)
    hidden = run.max_num_batched_tokens * architecture.hidden_size * run.dtype_bytes
    ends = []
    for end in (0, 1):
        sampler = 0.0
        if run.last_stage:
            sampler = sequences * architecture.vocab_size * of_a_logit[end] + hidden
        # Since 0.13, the working memory of the experts stays allocated after a run, so it adds to
        # the sampler's memory: WorkspaceManager in vllm/v1/worker/workspace.py.
        kept = experts[end] if run.vllm >= (0, 13) else 0.0
        passing = _FORWARD[end] * forward + experts[end]
        ends.append(max(passing, sampler + kept) + _OTHER[end] * GIB)
    return ends[0], ends[1]


def _forward_bytes(architecture: Architecture, run: DummyRun) -> float:
    """
    Return the peak memory of one layer for the run's tokens, without experts, in bytes.

    The memory holds the residual, the normed input, the output, and the gate-up product with its
    activation (vllm/model_executor/models/llama.py). For each token, these are 4 x hidden + 3 x
    intermediate / TP numbers.
    """
    wide = 3 * architecture.intermediate_size / run.tensor
    if architecture.has_latent_cache:
        # Queries, and the keys and values that are computed from the latent, have 192 numbers each.
        wide = max(wide, 3 * 192 * architecture.heads / run.tensor)
    return run.max_num_batched_tokens * run.dtype_bytes * (4 * architecture.hidden_size + wide)


def _experts_bytes(
    architecture: Architecture, config: Mapping[str, Any] | None, run: DummyRun
) -> float:
    """
    Return the working memory of a layer of experts, in bytes.

    There are two buffers, each with a row for each token and each of its experts. One buffer is for
    the products of the first matrix, the other for the activations. Each row is at least as wide as
    the hidden state. Source: workspace_shapes of TritonExperts in
    vllm/model_executor/layers/fused_moe/fused_moe.py. The kernels for MXFP4 do not need these
    buffers.
    """
    if not architecture.experts or run.mxfp4:
        return 0.0
    inner = architecture.moe_intermediate_size / (1 if run.expert else run.tensor * run.data)
    hidden = architecture.hidden_size
    wide = max(inner, hidden) + max(2 * inner, hidden)
    tokens = run.max_num_batched_tokens * (run.data if run.expert else 1)
    return tokens * _experts_of_a_token(config) * wide * run.dtype_bytes


_EXPERTS_OF_A_TOKEN = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_topk",
    "moe_k",
    "top_k_experts",
    "experts_per_token",
)


def _experts_of_a_token(config: Mapping[str, Any] | None) -> int:
    text = text_part(config) if config else {}
    for key in _EXPERTS_OF_A_TOKEN:
        value = text.get(key)
        if isinstance(value, list) and value:
            value = max(value)
        if isinstance(value, int):
            return value
    return 8
