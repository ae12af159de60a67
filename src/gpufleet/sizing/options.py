"""The input and output of sizing: vLLM's flags with the GPU, and the verdict.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal, TypeAlias

from gpufleet.errors import FleetError
from gpufleet.sizing.lora_memory import Lora

Confidence: TypeAlias = Literal["certain", "near the edge", "unknown"]


@dataclass(frozen=True, kw_only=True)
class Options:
    """The input of an estimate: values of vLLM's flags, and properties of the GPU."""

    gpu_memory_gib: float
    """
    The memory that CUDA reports for one GPU, in GiB, not its nominal size. With `device` "cpu",
    the node's memory.
    """
    vllm: tuple[int, ...]
    """The release, such as (0, 19, 0)."""
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False
    redundant_experts: int | None = None
    """`num_redundant_experts` with `--enable-eplb`; None without `--enable-eplb`."""
    decode_context_parallel: int = 1
    max_model_len: int | None = None
    """None for the length in the model's config."""
    gpu_memory_utilization: float | None = None
    """None for the release's default."""
    gpu_share: float = 1.0
    """
    Share of the GPU's memory that the whole process may use, including memory outside the budget of
    `gpu_memory_utilization`.
    """
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    """None for the checkpoint's quantization."""
    dtype: str = "auto"
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_memory_bytes: int | None = None
    """If set, the KV cache has exactly this size. None if vLLM computes the size."""
    block_size: int | None = None
    enforce_eager: bool = False
    prefix_caching: bool | None = None
    speculative_tokens: int = 0
    speculative_method: str | None = None
    """`method` of `--speculative-config`, or None."""
    draft_model: str | None = None
    """`model` of `--speculative-config`. `Description.draft` describes this model."""
    mixed_vocabularies: bool = False
    """`use_heterogeneous_vocab` of `--speculative-config`."""
    lora: Lora | None = None
    """None without `--enable-lora`."""
    cpu_offload_gib: float = 0.0
    """`--cpu-offload-gb`: GiB of each rank's layers that stay in the node's memory."""
    pooling: bool = False
    """`--runner pooling`: the server embeds or scores, and does not sample."""
    language_model_only: bool = False
    modalities_off: frozenset[str] = frozenset()
    """Modalities that `--limit-mm-per-prompt` sets to 0: "image", "video", "audio"."""
    video_frames: int | None = None
    """`num_frames` of videos in `--limit-mm-per-prompt`; None if the model's own limit applies."""
    chunked_media: bool = True
    """
    False with `--disable-chunked-mm-input`: vLLM must process a whole image or clip in one step.
    """
    hybrid_manager: bool = True
    compute_capability: tuple[int, int] | None = None
    """(9, 0) for Hopper. If it is None, checks that depend on it are skipped."""
    throughput: bool = False
    """`--performance-mode throughput`, which doubles the defaults of sequences and
    batched tokens."""
    all2all_backend: str | None = None
    """
    `--all2all-backend`; None for the release's default. With the default, every GPU gets the tokens
    of all engines.
    """
    gpu: str | None = None
    """
    NVML's name of the GPU, or None if unknown. In some releases, the name determines defaults.
    """
    device: Literal["cuda", "cpu"] = "cuda"


@dataclass(frozen=True)
class Sizing:
    """
    The output of an estimate: memory of one GPU of the replica, and the verdict.

    Numbers of bytes are those of the smallest rank, unless stated otherwise.
    """

    fits: bool
    """
    Whether the model certainly starts: vLLM accepts it, and the memory is enough even if the
    estimates are too low by their errors.
    """
    confidence: Confidence
    reasons: tuple[str, ...]
    """Sentences on why the model does not fit, or why the verdict is unknown."""
    weights_bytes_per_gpu: int
    """Bytes of the weights on the largest rank."""
    kv_bytes_per_token_per_gpu: int
    """
    Bytes that one more token of a long context needs, on the stage that needs the most. Windows and
    states do not count, because they no longer grow. If all layers have windows, the value is the
    bytes of a token inside the windows.
    """
    kv_bytes_for_max_model_len_per_gpu: int
    """Bytes of KV cache that one request of `max_model_len` needs, including windows and states."""
    kv_cache_bytes_per_gpu: int
    """Bytes that are left for the KV cache; 0 if the weights leave no memory."""
    kv_cache_tokens: int
    """The size of the KV cache in tokens, as the release logs it at start."""
    max_concurrency: float
    """Number of requests of `max_model_len` that fit at once, as the release logs it."""
    largest_max_model_len: int
    """The longest `--max-model-len` with which the model starts; 0 if there is none."""
    smallest_gpus: int | None
    """Minimum number of such GPUs with these options; None if 64 are not enough."""
    activation_bytes_per_gpu: int
    non_torch_bytes_per_gpu: int
    cuda_graph_bytes_per_gpu: int
    """
    The estimated memory of the CUDA graphs. `cuda_graphs_in_budget` states whether it is part of
    the budget.
    """
    estimate_error_bytes_per_gpu: int
    """Maximum error of the memory that is left for the KV cache, in bytes."""
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    gpu_memory_utilization: float
    block_size_tokens: int
    vllm: tuple[int, ...]
    cuda_graphs_in_budget: bool = True
    """
    Whether the CUDA graphs are part of vLLM's budget. They are not up to 0.19, and with the second
    model runner up to 0.28.
    """
    notes: tuple[str, ...] = ()
    """Sentences on parts that were not counted exactly."""
    remedy: str = ""
    """
    A sentence with the single changes with which the model would certainly start, or that none is
    enough. "" if memory is not the problem.
    """

    @property
    def keeps_cache(self) -> bool:
        """Return whether requests need a KV cache. Requests to an encoder do not need one."""
        return self.kv_bytes_for_max_model_len_per_gpu > 0

    def as_json(self) -> dict[str, Any]:
        """Return the values for `gpufleet size --json`, with units in the names."""
        document = asdict(self)
        remedy = [self.remedy] if self.remedy else []
        document["reasons"] = [*self.reasons, *self.notes, *remedy]
        del document["remedy"], document["notes"]
        document["vllm"] = ".".join(map(str, self.vllm))
        return document


FIRST = (0, 8)
"""The oldest release that can be sized: the first with V1 as the default engine."""
NEWEST = (0, 33)
"""The newest release whose source code was read for gpufleet's rules."""

MOST_GIB = 1 << 20
"""Maximum memory of one GPU, or of a node with `device` "cpu"; more is a typing mistake."""
MOST_GPUS = 10_000
"""Maximum of each parallel size; more is a typing mistake."""

AUTO_LENGTH = -1
"""`--max-model-len auto`: the longest length that fits."""


def check_options(options: Options) -> None:
    problems = []
    if options.vllm < FIRST:
        release = ".".join(map(str, options.vllm))
        problems.append(
            f"--vllm {release}: gpufleet does not support releases before 0.8 (the V0 engine): "
            "write 0.8.0 or newer"
        )
    if options.dtype not in ("auto", "half", "float16", "bfloat16", "float", "float32"):
        problems.append(
            f"--dtype {options.dtype}: vLLM accepts auto, half, float16, bfloat16, float and "
            "float32"
        )
    if not 0 < options.gpu_memory_gib <= MOST_GIB:
        problems.append(
            f"--gpu-memory-gib {options.gpu_memory_gib:g}: the value must be above 0 and at most "
            f"{MOST_GIB:,}"
        )
    groups = {
        "--tensor-parallel-size": options.tensor_parallel,
        "--pipeline-parallel-size": options.pipeline_parallel,
        "--data-parallel-size": options.data_parallel,
        "--decode-context-parallel-size": options.decode_context_parallel,
    }
    problems += (
        f"{flag} {count}: the value must be at least 1 and at most {MOST_GPUS:,}"
        for flag, count in groups.items()
        if not 1 <= count <= MOST_GPUS
    )
    if options.max_model_len is not None and not (
        options.max_model_len > 0 or options.max_model_len == AUTO_LENGTH
    ):
        problems.append(
            f"--max-model-len {options.max_model_len}: the value must be above 0, or auto"
        )
    if options.lora and (options.lora.max_loras < 1 or options.lora.max_rank < 1):
        problems.append("--max-loras and --max-lora-rank must be at least 1")
    if not 0 <= options.cpu_offload_gib <= MOST_GIB:
        problems.append(
            f"--cpu-offload-gb {options.cpu_offload_gib:g}: the value must be at least 0 and at "
            f"most {MOST_GIB:,}"
        )
    share = options.gpu_memory_utilization
    if share is not None and not 0 < share <= 1:
        problems.append(
            f"--gpu-memory-utilization {share:g}: the value must be above 0 and at most 1"
        )
    if problems:
        raise FleetError(*problems)


POOLING = frozenset({"embed", "embedding", "classify", "score", "reward"})
"""Values of `--convert`, and of `--task` up to 0.12, that mean `--runner pooling`."""


def is_pooling(runner: object, convert: object) -> bool:
    """Return whether `--runner` and `--convert`, or `--task`, select a pooling server."""
    return runner == "pooling" or (runner in (None, "auto") and convert in POOLING)


def modalities_off(limits: Mapping[str, Any]) -> frozenset[str]:
    """
    Return the modalities whose limit in `--limit-mm-per-prompt` is 0.

    A limit is a number, or an object with the number as `count`.
    """
    return frozenset(
        name
        for name, limit in limits.items()
        if (limit.get("count") if isinstance(limit, Mapping) else limit) == 0
    )


def video_frames(limits: Mapping[str, Any]) -> int | None:
    """Return `num_frames` of videos in `--limit-mm-per-prompt`, or None."""
    limit = limits.get("video")
    frames = limit.get("num_frames") if isinstance(limit, Mapping) else None
    return frames if isinstance(frames, int) and frames > 0 else None
