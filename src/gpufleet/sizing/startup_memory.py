"""
What vLLM takes at start besides weights and KV cache, and the defaults that decide it.  Pure.

None of it follows from a config alone: the activation peak is what a dummy run of
`max_num_batched_tokens` tokens leaves as PyTorch's high-water mark, the rest is what CUDA, NCCL and
the kernels' libraries allocate. So each is an `Estimate` with its error and its source, and a
verdict within the error of the limit is not given (`sizing/fit.py`).

What the budget holds, by release (determine_available_memory in vllm/v1/worker/gpu_worker.py):

    up to 0.19   weights, activation peak, non-torch; CUDA graphs come on top of it
    from 0.20    the same, and an estimate of the CUDA graphs
    from 0.27    what the device lost since the start (weights and non-torch in one), and the peak
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gpufleet.sizing.architectures.components import (
    Architecture,
    CompressedCache,
    LatentCache,
    StateCache,
)
from gpufleet.sizing.architectures.max_length import text_part

GIB = 1 << 30

GRAPHS_IN_BUDGET = (0, 20)
"""VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS is on: vllm/envs.py of 0.20.0; off in 0.18 and 0.19."""
_TOTAL_CONSUMED = (0, 27)
"""The device's free memory is compared, not PyTorch's: vllm/utils/mem_utils.py of 0.27.0."""
_HIGHER_UTILIZATION = (0, 20)
"""0.92 instead of 0.9: vllm/config/cache.py of 0.20.0."""


@dataclass(frozen=True)
class Estimate:
    """A number that no config says."""

    bytes: int
    error_bytes: int
    """How far the measured starts lie from it, with the few worst left out."""


@dataclass(frozen=True)
class StartMemory:
    """What one GPU needs besides weights and cache."""

    activation: Estimate
    non_torch: Estimate
    cuda_graphs: Estimate
    graphs_in_budget: bool
    """Whether this release keeps the graphs' memory free, or lets them come on top."""

    @property
    def budget_bytes(self) -> int:
        """Return the bytes that the KV cache does not get."""
        graphs = self.cuda_graphs.bytes if self.graphs_in_budget else 0
        return self.activation.bytes + self.non_torch.bytes + graphs

    @property
    def error(self) -> int:
        """Return how far `budget_bytes` may be off: the errors are independent of each other."""
        graphs = self.cuda_graphs.error_bytes if self.graphs_in_budget else 0
        return math.isqrt(
            self.activation.error_bytes**2 + self.non_torch.error_bytes**2 + graphs**2
        )


@dataclass(frozen=True)
class Defaults:
    """The values that decide the size of the dummy run, given or defaulted."""

    gpu_memory_utilization: float
    max_num_seqs: int
    max_num_batched_tokens: int


def batch_defaults(
    *,
    vllm: tuple[int, ...],
    gpu_memory_gib: float,
    max_model_len: int,
    world: int = 1,
    compute_capability: tuple[int, int] | None = None,
    gpu: str | None = None,
    device: Literal["cuda", "cpu"] = "cuda",
    gpu_memory_utilization: float | None = None,
    max_num_seqs: int | None = None,
    max_num_batched_tokens: int | None = None,
    throughput: bool = False,
) -> Defaults:
    """
    Return what `vllm serve` takes where a flag is not given (None).

    `gpu` is the product's name, `world` the GPUs of a replica, `throughput` what doubles the
    defaults of sequences and tokens: `--performance-mode throughput`, since 0.17. Source:
    get_batch_defaults and _set_default_max_num_seqs_and_batched_tokens_args in
    vllm/engine/arg_utils.py (older: _set_default_args_v1) of 0.8.0 to 0.33.0, for the API server.
    """
    if device == "cpu":
        seqs, tokens = (128 * world, 2048 * world) if vllm >= (0, 9, 2) else (256, 2048)
    else:
        seqs, tokens = _batch_defaults(vllm, gpu_memory_gib, compute_capability, gpu)
    if throughput and vllm >= (0, 17):
        seqs, tokens = 2 * seqs, 2 * tokens
    if max_num_seqs is not None:
        seqs = max_num_seqs
    if max_num_batched_tokens is not None:
        tokens = max_num_batched_tokens
    elif vllm >= (0, 11, 1):
        tokens = min(seqs * max_model_len, tokens)
    if max_num_seqs is None and vllm >= (0, 10, 1):
        seqs = min(seqs, tokens)
    utilization = gpu_memory_utilization
    if utilization is None:
        utilization = 0.92 if vllm >= _HIGHER_UTILIZATION else 0.9
    return Defaults(utilization, seqs, tokens)


def _batch_defaults(
    vllm: tuple[int, ...],
    gpu_memory_gib: float,
    compute_capability: tuple[int, int] | None,
    gpu: str | None,
) -> tuple[int, int]:
    """Return max_num_seqs and max_num_batched_tokens."""
    name = (gpu or "").lower()
    if vllm < (0, 8, 5):  # by name alone, and 1,024 sequences everywhere
        hopper = any(one in name for one in ("h100", "h200")) or (
            not name and compute_capability == (9, 0)
        )
        return 1024, 8192 if hopper else 2048
    if vllm >= (0, 28) and gpu_memory_gib >= 160:
        return 1024, 16384
    # vLLM looks for "a100" in the name; an A800 is not taken for one.
    a100 = "a100" in name or (not name and compute_capability == (8, 0))
    # A GB10 shares the node's memory: NVML does not say how much, and vLLM took that for little
    # (get_device_total_memory in vllm/platforms/cuda.py); since 0.33 it knows the GPU.
    small = (vllm >= (0, 9) and a100) or compute_capability == (12, 1)
    if gpu_memory_gib >= 70 and not small:
        return 1024, 8192
    return 256, 2048


# -- what the dummy run takes ----------------------------------------------------------------------

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
"""Which architectures had the second model runner: vllm/config/vllm.py of these releases."""
_V2_MOE = frozenset({"DeepseekV2ForCausalLM", "GraniteMoeForCausalLM", "Qwen2MoeForCausalLM"})
"""From 0.25: every model without experts and states, and these."""
_V2_EVERY = (0, 29)
_V2_PROFILES_GRAPHS = (0, 29)
"""Up to 0.28 the second runner's profile_cudagraph_memory returns 0."""


def has_second_runner(architecture: Architecture, vllm: tuple[int, ...]) -> bool:
    """
    Say whether the release runs this model with its second model runner (vllm/v1/worker/gpu/).

    Its dummy run of the sampler takes less. Source: use_v2_model_runner in vllm/config/vllm.py.
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
    """What decides the peak of the run that vLLM makes at start, on one GPU."""

    vllm: tuple[int, ...]
    max_num_seqs: int
    max_num_batched_tokens: int
    tensor: int = 1
    data: int = 1
    expert: bool = False
    """With expert parallelism."""
    dispatches: bool = False
    """Tokens go to the GPUs of their experts alone, not to all (--all2all-backend)."""
    last_stage: bool = True
    """The pipeline stage that samples."""
    layers: int | None = None
    """Of the stage; None: all."""
    dtype_bytes: int = 2
    mxfp4: bool = False
    """Experts quantized so."""
    enforce_eager: bool = False
    compute_capability: tuple[int, int] | None = None


def start_memory(
    architecture: Architecture, config: Mapping[str, Any] | None, run: DummyRun
) -> StartMemory:
    """
    Return what a release needs on one GPU of this model, besides weights and cache.

    `config` is the parsed config.json, for what `architecture` does not keep: the experts of a
    token.
    """
    return StartMemory(
        _activation(architecture, config, run),
        _non_torch(run),
        _cuda_graphs(architecture, run),
        _reserves_graphs(architecture, run),
    )


def _reserves_graphs(architecture: Architecture, run: DummyRun) -> bool:
    """Return whether the graphs' memory is kept free: not by the second runner up to 0.28."""
    if run.vllm < GRAPHS_IN_BUDGET or run.enforce_eager:
        return False
    return run.vllm >= _V2_PROFILES_GRAPHS or not has_second_runner(architecture, run.vllm)


_SORT_ALWAYS = (0, 11, 1)
"""FlashInfer's sampler has to be asked for (VLLM_USE_FLASHINFER_SAMPLER)."""


def _sampler_bytes(vllm: tuple[int, ...], dtype_bytes: int, *, second: bool) -> float:
    """
    Return the bytes of one logit of the sampler's dummy run, of `max_num_seqs` x vocabulary.

    The logits in the model's dtype, a float32 copy, and the working memory of top-k and top-p: up
    to 0.16 a sort (values, int64 indices, and what PyTorch's segmented sort needs: 38 in all,
    measured 38.2 to 38.6), then a Triton kernel or FlashInfer (probabilities and noise: 14, and
    measured 14.28). Up to 0.11.0 the sort only where FlashInfer is not installed, as it was in
    vLLM's images: between the two (11 and 38). The second runner up to 0.32 skips all but the
    logits. Source:
    _dummy_sampler_run in vllm/v1/worker/gpu_model_runner.py and gpu/model_runner.py,
    vllm/v1/sample/ops/topk_topp_sampler.py.
    """
    if vllm < _SORT_ALWAYS:
        return 22.5 + dtype_bytes
    if vllm < (0, 17):
        return 36 + dtype_bytes
    if second and vllm < (0, 33):
        return dtype_bytes
    return 12.25 + dtype_bytes


def _activation(
    architecture: Architecture, config: Mapping[str, Any] | None, run: DummyRun
) -> Estimate:
    forward = _forward_bytes(architecture, run)
    experts = _experts_bytes(architecture, config, run)
    spread = 0.0
    if run.dispatches and run.expert and run.data > 1:
        # Balanced experts get as many tokens as an engine sends; how many a backend makes room
        # for, up to those of all engines, has not been measured.
        least = experts / run.data
        experts, spread = (least + experts) / 2, (experts - least) / 2
    sampler = 0.0
    if run.last_stage:
        second = has_second_runner(architecture, run.vllm)
        sequences = min(run.max_num_seqs, run.max_num_batched_tokens)
        sampler = sequences * architecture.vocab_size
        sampler *= _sampler_bytes(run.vllm, run.dtype_bytes, second=second)
        sampler += run.max_num_batched_tokens * architecture.hidden_size * run.dtype_bytes
    # The experts' working memory stays from one run to the next, so that it is there when the
    # sampler's is: WorkspaceManager in vllm/v1/worker/workspace.py, since 0.13.
    kept = experts if run.vllm >= (0, 13) else 0.0
    in_pass, in_sampler = forward + experts, sampler + kept
    peak = max(in_pass, in_sampler) + _OTHER
    error = 0.06 * GIB + 0.03 * sampler + 0.4 * (experts - spread) + spread
    if run.vllm < _SORT_ALWAYS:
        error += 0.55 * sampler
    if in_sampler < 1.3 * in_pass:  # else the forward pass is long over at the peak
        error += 0.25 * forward
    if _is_sparse(architecture):
        peak, error = peak + _CHOOSING, error + _CHOOSING
    if architecture.multimodal:
        peak, error = peak + _TOWER, error + 0.5 * GIB
    if run.vllm >= _V2_EVERY and not run.enforce_eager:
        peak, error = peak + _COMPILING, error + _COMPILING
    elif run.vllm >= _FLASHINFER and not has_second_runner(architecture, run.vllm):
        peak, error = peak + _SAMPLER_SPACE, error + 0.7 * _SAMPLER_SPACE
    return Estimate(int(peak), int(error))


def _is_sparse(architecture: Architecture) -> bool:
    return any(
        isinstance(cache, CompressedCache) or (isinstance(cache, LatentCache) and cache.indexer_dim)
        for layer in architecture.layers
        for cache in layer.caches
    )


_CHOOSING = 1.6 * GIB
"""What sparse attention's kernels and index took beyond a layer's own: 1.2 GiB for DeepSeek V4 on
two RTX PRO 6000 with 0.25, 2.1 for GLM-5.2 on four GB200 with 0.26."""
_SPARSE_GRAPH = 0.0006 * GIB
"""Of one graph and one layer in the same two starts: 0.00054 and 0.00063."""
_COMPILING = 0.4 * GIB
"""What the first start, which compiles, leaves less of than the next one. With 0.31: 0.42 on an
A100, 0.9 and 1.1 between a cold and a warm start of small GPUs."""
_FLASHINFER = (0, 21)
"""Its sampler is the default: VLLM_USE_FLASHINFER_SAMPLER in vllm/envs.py of 0.21.0."""
_SAMPLER_SPACE = 0.45 * GIB
"""What starts of 0.22 to 0.27 with the first runner had beyond the sampler's own tensors: 0.39,
0.6 and 0.69, whatever the vocabulary."""
_TOWER = 0.2 * GIB
"""What vision towers left at the peak: 0 to 0.3 GiB in start-up logs of 0.19."""
_OTHER = int(0.085 * GIB)
"""Buffers for input and block tables, cuBLAS workspaces: what the logs have beyond both peaks."""


def _forward_bytes(architecture: Architecture, run: DummyRun) -> float:
    """
    Return the peak of one layer over the run's tokens, without experts, in bytes.

    The residual, the normed input and the output, and the gate-up product with its activation
    beside it (vllm/model_executor/models/llama.py): 4 x hidden + 3 x intermediate / TP.
    """
    wide = 3 * architecture.intermediate_size / run.tensor
    if architecture.has_latent_cache:
        # Queries, and the keys and values that the latent is turned into, of 192 each.
        wide = max(wide, 3 * 192 * architecture.heads / run.tensor)
    return run.max_num_batched_tokens * run.dtype_bytes * (4 * architecture.hidden_size + wide)


def _experts_bytes(
    architecture: Architecture, config: Mapping[str, Any] | None, run: DummyRun
) -> float:
    """
    Return the working memory of a layer of experts, in bytes.

    Two buffers of tokens x experts of a token, of which one holds the products of the first matrix
    and one the activations, each at least as wide as the hidden state. Source: workspace_shapes of
    TritonExperts in vllm/model_executor/layers/fused_moe/fused_moe.py. The kernels for MXFP4 need
    none of them.
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


def _non_torch(run: DummyRun) -> Estimate:
    """
    Return what CUDA's libraries and NCCL hold.

    Before 0.9.1 the whole of what is not PyTorch's counts, with the CUDA context (about 0.5 GiB);
    since then only the increase since the worker's start.
    """
    alone = run.tensor * run.data == 1
    if not run.last_stage and alone:
        found, error = 0.07, 0.1
    elif run.vllm < (0, 9, 1):
        found, error = (0.6, 0.3) if alone else (1.9, 0.9)
    elif run.vllm < (0, 17):
        found, error = (0.13, 0.15) if alone else (0.55, 0.5)
    elif run.vllm < _TOTAL_CONSUMED:
        found, error = (0.25, 0.15) if alone else (2.1, 0.5)
        if not alone and run.compute_capability is not None and run.compute_capability[0] == 10:
            found, error = 1.5, 0.7  # 0.95 on four GB200
    else:
        found, error = (0.35, 0.3) if alone else (1.8, 1.0)
    major, minor = run.compute_capability or (9, 0)
    if not alone and (major < 9 or (major, minor) == (12, 0)):
        # No NVLink switches, no multicast buffers. From 0.27: 0.76 on two RTX 5090.
        found, error = (0.3, 0.4) if run.vllm < _TOTAL_CONSUMED else (0.75, 0.5)
    return Estimate(int(found * GIB), int(error * GIB))


_GRAPH = 0.00024 * GIB
"""Of one graph and one layer: 0.00022 to 0.00026 in 33 start-up logs of dense models, 18 to 102
graphs, whatever TP is."""


def _cuda_graphs(architecture: Architecture, run: DummyRun) -> Estimate:
    """
    Return what the graphs take, or what the release thinks that they will.

    One for each size up to twice max_num_seqs and 512, from 0.11.1 on once more for decoding alone
    up to max_num_seqs (_set_cudagraph_sizes in vllm/config/vllm.py). The releases that estimate
    them capture two and multiply, which comes out up to three times too large with experts.
    """
    if run.enforce_eager:
        return Estimate(0, 0)
    largest = min(2 * run.max_num_seqs, 512, run.max_num_batched_tokens)
    if run.vllm < (0, 11, 1):
        graphs = 3 + largest // 8
    else:
        graphs = _graph_count(largest) + _graph_count(min(largest, run.max_num_seqs))
    of_a_layer = _GRAPH * 1.2 if architecture.experts else _GRAPH
    if _is_sparse(architecture):
        of_a_layer = _SPARSE_GRAPH
    found = 0.05 * GIB + of_a_layer * graphs * (run.layers or len(architecture.layers))
    return Estimate(int(found), int(0.1 * GIB + 0.5 * found))


def _graph_count(largest: int) -> int:
    """
    Return how many batch sizes up to `largest` have a graph.

    >>> _captured(512), _captured(256), _captured(64)
    (51, 35, 11)
    """
    small = sum(size <= largest for size in (1, 2, 4))
    return small + len(range(8, min(largest + 1, 256), 8)) + len(range(256, largest + 1, 16))
