"""
Does a model fit, and how many tokens does its KV cache hold: vLLM's start-up arithmetic.  Pure.

vLLM gives the KV cache what is left of its budget on the smallest rank:

    utilization x total - weights - activation peak - non-torch [- CUDA graphs]

and refuses to start where one request of `--max-model-len` does not fit into that. Weights and
cache follow from the model's config; the other terms are estimates with an error of their own
(`start_memory.py`). A verdict within that error of the limit is "near the edge" and never a fit.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

if TYPE_CHECKING:
    from gpufleet.architecture.description import Description

Confidence: TypeAlias = Literal["certain", "near the edge"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """How the model would be served: vLLM's flags by their names, and the GPU."""

    gpu_memory_gib: float
    """The total that CUDA reports of one GPU in GiB, not its nominal size; of the node's memory
    with `device` "cpu"."""
    vllm: tuple[int, ...]
    """The release, such as (0, 19, 0)."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False
    decode_context_parallel: int = 1
    max_model_len: int | None = None
    """None: what the model's config says."""
    gpu_memory_utilization: float | None = None
    """None: the release's default."""
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    """None: the checkpoint's own."""
    dtype: str = "auto"
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    """Given: the cache is exactly this, and no estimate is made."""
    block_size: int | None = None
    enforce_eager: bool = False
    prefix_caching: bool | None = None
    speculative_tokens: int = 0
    hybrid_manager: bool = True
    compute_capability: tuple[int, int] | None = None
    """(9, 0) is Hopper; None: unknown, and what depends on it is not judged."""
    device: Literal["cuda", "cpu"] = "cuda"


@dataclass(frozen=True)
class Sizing:
    """What one GPU of the replica holds, and the verdict. Bytes are of the smallest rank."""

    fits: bool
    """Starts, beyond the estimates' error, and nothing in vLLM refuses it."""
    confidence: Confidence
    reasons: tuple[str, ...]
    """Sentences: why it does not fit, and what was not counted exactly."""
    weights_bytes_per_gpu: int
    """Of the largest rank."""
    kv_bytes_per_token_per_gpu: int
    """What one more token of a long context takes; windows and states have stopped growing."""
    kv_bytes_for_max_model_len_per_gpu: int
    """Of one request of `max_model_len`, with windows and states."""
    kv_cache_bytes_per_gpu: int
    """What is left for the KV cache; 0 where the weights leave nothing."""
    kv_cache_tokens: int
    """As the release logs it at start."""
    max_concurrency: float
    """Requests of `max_model_len` that fit at once, as the release logs it."""
    largest_max_model_len: int
    """The longest `--max-model-len` that starts; 0: none."""
    smallest_gpus: int | None
    """GPUs of this kind that the model needs with these options; None: no number up to 64 does."""
    activation_bytes_per_gpu: int
    non_torch_bytes_per_gpu: int
    cuda_graph_bytes_per_gpu: int
    """Estimate; part of the budget from 0.21 on, on top of it before."""
    estimate_error_bytes_per_gpu: int
    """How far the three estimates together may be off."""
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    block_size_tokens: int
    vllm: tuple[int, ...]

    def as_json(self) -> dict[str, Any]:
        """Return it as `gpufleet size --json` prints it: units in the names."""
        document = asdict(self)
        document["reasons"] = list(self.reasons)
        document["vllm"] = ".".join(map(str, self.vllm))
        return document


def size(description: Description, options: Options) -> Sizing:
    """
    Return what `description` takes on one GPU with `options`, and whether it starts.

    Raises `FleetError` where a release or a dtype is unknown.
    """
    raise NotImplementedError
