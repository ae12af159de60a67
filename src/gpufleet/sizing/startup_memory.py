"""
Estimate vLLM's memory at start without weights and KV cache, and its defaults.  Pure.

This memory cannot be computed from a config. The activation peak is the most memory that PyTorch
needs in a dummy run of `max_num_batched_tokens` tokens (`sizing/dummy_run.py`). CUDA, NCCL and the
libraries of the kernels allocate the rest (`sizing/startup_ranges.py`). Each part is therefore an
`Estimate`, which is a range of bytes. A verdict is certain only if it is the same for the whole
range (`sizing/fit.py`).

vLLM subtracts different memory from its budget in different releases (determine_available_memory in
vllm/v1/worker/gpu_worker.py):

- Up to 0.19: the weights, the activation peak and the non-torch memory. CUDA graphs are outside the
  budget.
- From 0.20: the same, and an estimate of the CUDA graphs.
- From 0.27: the decrease of free memory since the start (weights and non-torch together), the
  activation peak, and the estimate of the CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from gpufleet.sizing.architectures.components import Architecture
from gpufleet.sizing.dummy_run import GIB, DummyRun, has_second_runner, peak_bytes
from gpufleet.sizing.startup_ranges import AT_ONCE, RANGES, Estimate, Ranges, is_sparse, parts

CONTEXT, MOST_CONTEXT = GIB // 2, int(0.6 * GIB)
"""
The memory that a process uses on the GPU before its first allocation, in bytes: the usual and the
highest value. This memory is outside vLLM's budget. In most start-up logs, the free memory at start
is 0.45 to 0.6 GiB below the total memory.
"""
GRAPHS_IN_BUDGET = (0, 20)
"""
The release from which VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS is on (vllm/envs.py).

It is off in 0.18 and 0.19.
"""
_HIGHER_UTILIZATION = (0, 20)
"""
The release from which `--gpu-memory-utilization` is 0.92 by default instead of 0.9:
vllm/config/cache.py.
"""


@dataclass(frozen=True)
class StartMemory:
    """One GPU's memory besides weights and KV cache."""

    activation: Estimate
    non_torch: Estimate
    cuda_graphs: Estimate
    graphs_in_budget: bool
    """Whether this release subtracts the memory of the CUDA graphs from its budget."""
    parts: tuple[str, ...] = ()
    """Names of the ranges of `startup_ranges` that the estimates include."""

    @property
    def budget(self) -> Estimate:
        """
        Return the memory that the budget cannot use for the KV cache, as the estimate that is
        shown.

        The range is narrower than `whole_range`, see `AT_ONCE`.
        """
        return self.whole_range.narrowed(AT_ONCE)

    @property
    def whole_range(self) -> Estimate:
        """Return the sum of the estimates: all low ends are added, and all high ends are added."""
        taken = self.activation + self.non_torch
        return taken + self.cuda_graphs if self.graphs_in_budget else taken


@dataclass(frozen=True)
class Defaults:
    """Values of the flags that determine the budget and the dummy run: given values or defaults."""

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
    Return `vllm serve`'s defaults for flags that are not given (None).

    `gpu` is the product name of the GPU. `world` is the number of GPUs of a replica. With
    `throughput` (`--performance-mode throughput`, since 0.17), the defaults of sequences and tokens
    are twice as large. Source: get_batch_defaults and
    _set_default_max_num_seqs_and_batched_tokens_args in vllm/engine/arg_utils.py (older:
    _set_default_args_v1) of 0.8.0 to 0.33.0, for the API server.
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
    # vLLM searches the name for "a100", so an A800 does not count as an A100.
    a100 = "a100" in name or (not name and compute_capability == (8, 0))
    # A GB10 uses the node's memory. NVML does not report its size, so vLLM uses the defaults of
    # small GPUs (get_device_total_memory in vllm/platforms/cuda.py). Since 0.33, vLLM knows the
    # GPU.
    small = (vllm >= (0, 9) and a100) or compute_capability == (12, 1)
    if gpu_memory_gib >= 70 and not small:
        return 1024, 8192
    return 256, 2048


# -- the memory of the dummy run -------------------------------------------------------------------

V2_PROFILES_GRAPHS = (0, 29)
"""
The release from which all graphs are in the budget.

Up to 0.28, the second runner's profile_cudagraph_memory returns 0.
"""
_LEFT_AT_THE_PEAK = ("images", "images, many tokens", "sparse attention")
"""
Parts that PyTorch allocates in the dummy run, so they add to the activation peak. All other parts
are non-torch memory.
"""


def start_memory(
    architecture: Architecture,
    config: Mapping[str, Any] | None,
    run: DummyRun,
    ranges: Ranges = RANGES,
) -> StartMemory:
    """
    Return a release's memory on one GPU for this model, besides weights and cache.

    `config` is the parsed config.json, for values that `architecture` lacks: the experts per token,
    and whether the model takes videos.
    """
    low, high = peak_bytes(architecture, config, run)
    activation, non_torch = Estimate(int(low), int(high)), Estimate(0, 0)
    found_parts = parts(architecture, config, run)
    for part in found_parts:
        found = Estimate(*(int(end * GIB) for end in ranges[part]))
        if part in _LEFT_AT_THE_PEAK:
            activation += found
        else:
            non_torch += found
    return StartMemory(
        activation,
        non_torch,
        _cuda_graphs(architecture, run),
        _reserves_graphs(architecture, run),
        found_parts,
    )


def _reserves_graphs(architecture: Architecture, run: DummyRun) -> bool:
    """
    Return whether the release subtracts the memory of the CUDA graphs from its budget.

    Up to 0.28, the second model runner does not.
    """
    if run.vllm < GRAPHS_IN_BUDGET or run.enforce_eager:
        return False
    return run.vllm >= V2_PROFILES_GRAPHS or not has_second_runner(architecture, run.vllm)


_GRAPH = 0.00024 * GIB
"""
Bytes of one CUDA graph for one layer. In 33 start-up logs of dense models with 18 to 102 graphs, it
is 0.00022 to 0.00026 GiB, independently of TP.
"""
_SPARSE_GRAPH = 0.0006 * GIB
"""The same number with sparse attention. In two starts, it was 0.00054 and 0.00063 GiB."""
_GRAPH_SHARE = ((0.0, 2.1), (0.0, 1.3))
"""
Releases from 0.20 on estimate the graphs' memory: they capture two graphs and multiply. The values
are the lowest and the highest ratio of the release's estimate to the number that is computed from
`_GRAPH`: first from 0.20 to 0.28, then from 0.29 on. In three starts that print the estimate, the
ratio is 0.94, 1.05 and 2.05. In one start, the graphs that were really captured have a ratio of
0.65. In one start, the estimate is -0.17 GiB: it is the difference of two measurements, so it may
be zero or less. In two starts of 0.29 and 0.31, the captured graphs have a ratio of 0.35.
"""
_GRAPHS_BESIDE = int(0.45 * GIB)
"""
Maximum bytes that the graphs need in addition to `_GRAPH_SHARE`, even if there are few graphs. In
seven starts with up to ten graphs, they were 0.22 to 0.43 GiB.
"""


def _cuda_graphs(architecture: Architecture, run: DummyRun) -> Estimate:
    """
    Return the CUDA graphs' memory, or the release's estimate of it.

    There is a graph for each batch size up to twice max_num_seqs, but at most 512. Since 0.11.1,
    there is also a graph for decoding for each size up to max_num_seqs (_set_cudagraph_sizes in
    vllm/config/vllm.py). The releases that estimate the graphs' memory capture two graphs and
    multiply. With experts, their result is up to three times too large.
    """
    if run.enforce_eager:
        return Estimate(0, 0)
    largest = min(2 * run.max_num_seqs, 512, run.max_num_batched_tokens)
    if run.vllm < (0, 11, 1):
        graphs = 3 + largest // 8
    else:
        graphs = _graph_count(largest) + _graph_count(min(largest, run.max_num_seqs))
    of_a_layer = _GRAPH * 1.2 if architecture.experts else _GRAPH
    if is_sparse(architecture):
        of_a_layer = _SPARSE_GRAPH
    found = of_a_layer * graphs * (run.layers or len(architecture.layers))
    if not _reserves_graphs(architecture, run):
        return Estimate(int(0.5 * found), int(1.5 * found + 0.1 * GIB))
    low, high = _GRAPH_SHARE[run.vllm >= V2_PROFILES_GRAPHS]
    return Estimate(int(low * found), int(high * found) + _GRAPHS_BESIDE)


def _graph_count(largest: int) -> int:
    """
    Return the number of batch sizes up to `largest` with a graph.

    >>> _graph_count(512), _graph_count(256), _graph_count(64)
    (51, 35, 11)
    """
    small = sum(size <= largest for size in (1, 2, 4))
    return small + len(range(8, min(largest + 1, 256), 8)) + len(range(256, largest + 1, 16))
