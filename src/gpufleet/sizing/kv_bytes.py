"""
Compute the bytes of a layer's KV cache in a block on one GPU, by release. Pure.

A block is a number of tokens. A page is the data that one layer stores for a block. All pages of a
model must have the same size. The attention backend determines the number of tokens in a block. For
models with states (Mamba, linear attention), vLLM makes the block so large that a page of an
attention layer can hold a whole state. Source: vllm's v1/kv_cache_interface.py, the layers'
get_kv_cache_spec, platforms/cuda.py, platforms/cpu.py, platforms/interface.py and
model_executor/models/config.py of 0.8.5 to 0.33.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cached_property
from math import lcm, prod
from typing import Any, Literal

from gpufleet.errors import NotKnownError
from gpufleet.sizing.architectures.components import (
    Architecture,
    Cache,
    ChunkCache,
    CompressedCache,
    CrossCache,
    FullCache,
    LatentCache,
    StateCache,
    WindowCache,
)

Version = tuple[int, ...]

# Bytes of one number, by torch's names of dtypes.
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2, "half": 2, "float": 4}
_ONE_BYTE = frozenset({"fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc"})
# DeepSeek's packed formats: latent, rotary key and scales of a token in one piece
# (v1/attention/backends/mla/flashmla_sparse.py, get_kv_cache_spec of mla_attention.py).
_PACKED_LATENT = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}
_INDEX_GROUP = 128
"""Numbers of an index key that share a 4-byte scale (model_executor/models/deepseek_v2.py)."""
# The Mamba kinds whose models cache the state of every block if prefix caching is on
# (SupportsMambaPrefixCaching: Mamba, Mamba-2, Bamba, Falcon-H1, Granite-4, Jamba, Nemotron-H,
# Zamba-2). In 0.28, "align" became the default for these models as well.
_EVERY_BLOCK = frozenset({"mamba1", "mamba2"})


@dataclass(frozen=True, kw_only=True)
class Layout:
    """All inputs of the KV cache's size except the available memory."""

    stages: tuple[tuple[Cache, ...], ...]
    """
    The caches of each pipeline stage, in the order of its layers. The caches of draft layers (MTP)
    or of a draft model come after those of the last stage. See `caches()`.
    """
    vllm: Version
    max_model_len: int
    max_num_batched_tokens: int
    dtype: str = "bfloat16"
    """The model's dtype."""
    kv_dtype: str = "auto"
    """The KV dtype: `--kv-cache-dtype`, resolved by `kv_dtype()`."""
    tensor: int = 1
    decode_context_parallel: int = 1
    block_size: int | None = None
    """`--block-size`; None if the release chooses the size."""
    prefix_caching: bool | None = None
    """Whether prefix caching is on; None for the release's default."""
    speculative_tokens: int = 0
    hybrid_manager: bool = True
    """
    False with --disable-hybrid-kv-cache-manager. Layers with windows then store the whole context.
    """
    state_chunk: int = 256
    """
    Mamba's chunk_size. If the state of every block is cached, the block is a multiple of this
    value.
    """
    compute_capability: tuple[int, int] | None = None
    """
    The GPU's compute capability. None means that Hopper is assumed (for example for MLA's block).
    """
    device: Literal["cuda", "cpu"] = "cuda"

    @property
    def pipeline(self) -> int:
        """Return the number of stages."""
        return len(self.stages)

    @cached_property
    def distinct(self) -> tuple[Cache, ...]:
        """Return the caches of all layers, without duplicates."""
        return tuple(dict.fromkeys(cache for stage in self.stages for cache in stage))

    @cached_property
    def has_states(self) -> bool:
        """Return whether at least one layer keeps a state."""
        return any(isinstance(cache, StateCache) for cache in self.distinct)

    @cached_property
    def has_attention(self) -> bool:
        """Return whether at least one layer stores tokens."""
        return any(not isinstance(cache, StateCache) for cache in self.distinct)

    @cached_property
    def caches_prefixes(self) -> bool:
        """
        Return whether prefix caching is on.

        By default, prefix caching is off for models with only states, and before 0.26 for all
        models with states (ModelConfig.is_prefix_caching_supported).
        """
        if self.prefix_caching is None:
            return not self.has_states or (self.vllm >= (0, 26) and self.has_attention)
        return self.prefix_caching


class Kind(StrEnum):
    """How the memory of one request grows with its length."""

    FULL = "full"
    WINDOW = "window"
    CHUNK = "chunk"
    STATE = "state"
    CROSS = "cross"


@dataclass(frozen=True)
class Page:
    """
    The data that one layer stores for one block. Layers with equal pages may share a group.

    `shape` distinguishes pages that have the same size, but different contents.
    """

    kind: Kind
    block: int
    """Number of tokens."""
    bytes: int
    """Size including padding."""
    shape: tuple[object, ...]
    span: int = 0
    """Tokens of the window or the chunk."""
    grows: int = 0
    """Bytes that one more token needs; 0 for windows, chunks, states and encoder outputs."""


def caches(architecture: Architecture, layers: Iterable[range]) -> tuple[tuple[Cache, ...], ...]:
    """
    Return `Layout.stages`: the caches of the decoder layers of each stage in `layers`.

    The model's own draft layers are excluded: append `draft_caches()` to the last stage.
    """
    return tuple(
        tuple(cache for number in stage for cache in architecture.layers[number].caches)
        for stage in layers
    )


def draft_caches(architecture: Architecture) -> tuple[Cache, ...]:
    """Return the caches of the model's own multi-token prediction layers."""
    return tuple(cache for layer in architecture.draft_layers for cache in layer.caches)


def pages(layout: Layout, stage: tuple[Cache, ...]) -> tuple[Page, ...]:
    """
    Return the pages of one stage's layers, in the release's order.

    Raises `NotKnownError` for an unknown KV dtype.
    """
    block = block_size(layout)
    made = {cache: _pages(layout, cache, block) for cache in set(stage)}
    found = [page for cache in stage for page in made[cache]]
    if layout.vllm < (0, 11):
        # Two passes over the layers: attention, then Mamba (gpu_model_runner.get_kv_cache_spec).
        found.sort(key=lambda page: page.kind is Kind.STATE)
    return tuple(found)


def _pages(layout: Layout, cache: Cache, block: int) -> tuple[Page, ...]:
    """Return the pages of one layer. Sparse attention has a second page for its index."""
    if isinstance(cache, StateCache):
        return (_state_page(layout, cache, block),)
    if isinstance(cache, CompressedCache):
        return compressed_pages(layout, cache)
    if isinstance(cache, LatentCache) and cache.indexer_dim:
        return (_page(layout, cache, block), _index_page(cache, block))
    return (_page(layout, cache, block),)


COMPRESSED = "compressed"
"""The first item of a DeepSeek V4 page's `shape`."""
_COMPRESSED_BLOCK, _WINDOW_BLOCK = 256, 64
_STATE_BLOCKS = {4: 4, 128: 8}
_FLASH_MLA_ROW = 576


def compressed_pages(layout: Layout, cache: CompressedCache) -> tuple[Page, ...]:
    """
    Return DeepSeek V4's pages of one layer, in FlashMLA's packed rows (fp8_ds_mla).

    A token of 512 numbers needs 448 numbers of one byte, 64 numbers of two bytes, and 8 scales.
    Pages are multiples of 576 bytes. The states of keys and of scores are float32. With a ratio of
    4, the groups of tokens overlap. Source: DeepseekV4SWACache, DeepseekV4Attention,
    DeepseekV4IndexerCache and CompressorStateCache in vllm/models/deepseek_v4 and
    v1/attention/backends/mla/sparse_swa.py, 0.20 to 0.33.
    """
    if layout.kv_dtype != "auto" and layout.kv_dtype not in _ONE_BYTE | {"fp8_ds_mla"}:
        raise NotKnownError(
            f"--kv-cache-dtype {layout.kv_dtype}: for DeepSeek V4, gpufleet knows only the bytes "
            "of fp8_ds_mla, which both auto and fp8 select"
        )
    rope = 64
    token, ratio = cache.dim - rope + 2 * rope + 8, cache.ratio
    window = _rows(_WINDOW_BLOCK * token)
    found = [Page(Kind.WINDOW, _WINDOW_BLOCK, window, (COMPRESSED, cache.dim), cache.window)]
    if not ratio:
        return tuple(found)
    block = layout.block_size or _COMPRESSED_BLOCK
    overlap = 2 if ratio == 4 else 1
    state = _STATE_BLOCKS.get(ratio, ratio)
    kept = [(cache.dim, token)]
    if cache.index_dim:
        kept.append((cache.index_dim, cache.index_dim + cache.index_dim // _INDEX_GROUP * 4))
    for dim, entry in kept:
        size = _rows(block // ratio * entry)
        shape = (COMPRESSED, dim, ratio)
        found.append(Page(Kind.FULL, block, size, shape, 0, size // block))
        own = _rows(state * 2 * overlap * dim * 4)
        found.append(Page(Kind.WINDOW, state, own, (*shape, "state"), overlap * ratio))
    return tuple(found)


def _rows(size: int) -> int:
    return -(-size // _FLASH_MLA_ROW) * _FLASH_MLA_ROW


def block_size(layout: Layout) -> int:
    """
    Return the number of tokens in an attention block, before page sizes are made equal.

    The default is 16, unless the attention backend needs more: FlashMLA needs 64, FlashInfer MLA 32
    or 64, CUTLASS MLA 128, and the CPU 128 (16 for MLA). For models with states, the number is
    raised until a page can hold a state.
    """
    if layout.device == "cpu":
        block, kernel = _cpu_block(layout)
    elif (latent := _latent(layout)) is not None:
        block, kernel = _latent_block(layout, latent)
    else:
        block, kernel = layout.block_size or 16, 16
    if layout.has_states and layout.has_attention:
        block = _hybrid_block(layout, block, kernel)
    return block


def token_bytes(
    layout: Layout, cache: FullCache | WindowCache | ChunkCache | CrossCache | LatentCache
) -> int:
    """
    Return the bytes of one token in one layer on one GPU.

    MLA's latent is the same on every rank. Tensor parallelism divides KV heads, but every rank has
    at least one.
    """
    if isinstance(cache, LatentCache):
        packed = _PACKED_LATENT.get(_latent_dtype(layout))
        return packed or (cache.rank + cache.rope_dim) * _element_bytes(layout)
    heads = max(1, cache.kv_heads // layout.tensor)
    # Since 0.14, vLLM counts a different size of value heads (FullAttentionSpec.head_size_v).
    own = cache.v_head_dim if isinstance(cache, FullCache | WindowCache) else None
    own = None if layout.vllm < (0, 14) else own
    keys, values = cache.head_dim, own or cache.head_dim
    dtype = layout.kv_dtype
    if dtype in ("int8_per_token_head", "fp8_per_token_head"):
        return heads * (keys + values + 2 * 4)
    if dtype == "int4_per_token_head":
        return heads * (keys // 2 + values // 2 + 2 * 4)
    if dtype.startswith("nvfp4"):
        # Four bits a number and an fp8 scale for 16 of them (torch_utils.nvfp4_kv_cache_full_dim).
        return heads * 2 * (keys // 2 + keys // 16)
    return heads * (keys + values) * _element_bytes(layout)


def kv_dtype(
    config: Mapping[str, Any],
    requested: str,
    vllm: Version,
    compute_capability: tuple[int, int] | None = None,
) -> str:
    """
    Return the KV dtype that a release uses for `--kv-cache-dtype` with this config.json.

    With "auto", the release uses the KV dtype that the checkpoint states:
    - ModelOpt's kv_cache_quant_algo, since 0.14 (utils/torch_utils.py).
    - compressed-tensors' kv_cache_scheme, since 0.16 (layers/attention/attention.py). From 0.16 to
      0.21 it replaces any requested dtype.
    - fp8 for GLM-5's sparse attention on SM100, since 0.32 (model_executor/models/config.py).
    """
    said = config.get("quantization_config")
    said = said if isinstance(said, Mapping) else {}
    method = str(said.get("quant_method", ""))
    if method == "compressed-tensors" and said.get("kv_cache_scheme") and vllm >= (0, 16):
        return "fp8" if requested == "auto" or vllm < (0, 22) else requested
    if requested != "auto":
        return requested
    if method.startswith("modelopt") and vllm >= (0, 14):
        return _modelopt_kv_dtype(said, vllm)
    if config.get("architectures") == ["GlmMoeDsaForCausalLM"] and vllm >= (0, 32):
        return "fp8_e4m3" if compute_capability and compute_capability[0] == 10 else "auto"
    return "auto"


def _modelopt_kv_dtype(said: Mapping[str, Any], vllm: Version) -> str:
    below = said.get("quantization")
    inner = below if isinstance(below, Mapping) else said
    for key in ("kv_cache_scheme", "kv_cache_quant_algo"):
        found = inner.get(key) or said.get(key)
        if isinstance(found, Mapping):
            if found.get("type") == "float" and found.get("num_bits") == 4 and vllm >= (0, 20):
                return "nvfp4"
            static = found.get("dynamic") is False and found.get("num_bits") == 8
            return "fp8_e4m3" if static and found.get("type") == "float" else "auto"
        if isinstance(found, str):
            known = {"fp8": "fp8_e4m3"} | ({"nvfp4": "nvfp4"} if vllm >= (0, 20) else {})
            return known.get(found.lower(), "auto")
    return "auto"


def _element_bytes(layout: Layout) -> int:
    dtype = layout.kv_dtype
    if dtype == "auto":
        dtype = layout.dtype
    if dtype in _ONE_BYTE:
        return 1
    if dtype in DTYPE_BYTES:
        return DTYPE_BYTES[dtype]
    raise NotKnownError(
        f"--kv-cache-dtype {layout.kv_dtype}: gpufleet does not know the bytes per token of this "
        f"type. It knows auto, {', '.join(sorted(_ONE_BYTE | {'bfloat16', 'float16'}))}, "
        "fp8_ds_mla, nvfp4_ds_mla, nvfp4 and int4/int8/fp8_per_token_head"
    )


def _is_sparse(layout: Layout) -> bool:
    """
    Return whether the model's attention is sparse. It is if at least one layer has an index.

    In GLM-5.2, layers without an index use the index of an earlier layer (`index_topk_freq`).
    """
    return any(
        isinstance(cache, LatentCache) and cache.indexer_dim
        for stage in layout.stages
        for cache in stage
    )


def _latent_dtype(layout: Layout) -> str:
    """Return MLA's KV dtype. For sparse attention, fp8 can become DeepSeek's packed format."""
    dtype = layout.kv_dtype
    if dtype in _PACKED_LATENT or not _is_sparse(layout):
        return dtype
    major = _major_capability(layout)
    if layout.vllm >= (0, 18):
        # The backend decides: FlashMLA on Hopper packs fp8, and since 0.24 the kernel of SM120
        # packs "auto" as well. FlashInfer, which vLLM prefers for fp8 on SM100, keeps plain fp8
        # (layers/attention/mla_attention.py).
        if major == 12 and (dtype == "auto" or dtype in _ONE_BYTE) and layout.vllm >= (0, 24):
            return "fp8_ds_mla"
        return "fp8_ds_mla" if dtype in _ONE_BYTE and major != 10 else dtype
    return "fp8_ds_mla" if dtype in _ONE_BYTE else dtype


def _page(
    layout: Layout,
    cache: FullCache | WindowCache | ChunkCache | CrossCache | LatentCache,
    block: int,
) -> Page:
    token = token_bytes(layout, cache)
    if isinstance(cache, LatentCache):
        return Page(
            Kind.FULL, block, block * token, ("latent", cache.rank, cache.rope_dim), 0, token
        )
    shape: tuple[object, ...] = (max(1, cache.kv_heads // layout.tensor), cache.head_dim)
    if isinstance(cache, CrossCache):
        if layout.vllm < (0, 11):
            raise NotKnownError(
                "gpufleet does not know the KV cache of encoder-decoder models before vLLM 0.11"
            )
        return Page(Kind.CROSS, block, block * token, shape)
    if isinstance(cache, ChunkCache) and layout.vllm >= (0, 10):  # a whole context before
        return Page(Kind.CHUNK, block, block * token, shape, cache.chunk)
    # 0.8.0 to 0.8.2 knew no windows.
    if isinstance(cache, WindowCache) and layout.vllm >= (0, 8, 3):
        return Page(Kind.WINDOW, block, block * token, shape, cache.window)
    values = None if isinstance(cache, ChunkCache) else cache.v_head_dim
    return Page(Kind.FULL, block, block * token, (*shape, values), 0, token)


def row_bytes(layout: Layout) -> int:
    """
    Return the number of bytes to a multiple of which 0.31 rounds a block of the pool.

    For sparse attention on SM100, it is the bytes of one token in one layer
    (MLAAttention._uses_flat_kv_cache). In all other cases, the result is 1. 0.32 aligns each page
    instead, which changes nothing here because whole rows are already aligned.
    """
    latent = _latent(layout)
    if latent is None or not latent.indexer_dim or layout.vllm[:2] != (0, 31):
        return 1
    return token_bytes(layout, latent) if _major_capability(layout) == 10 else 1


def _index_page(cache: LatentCache, block: int) -> Page:
    """Return the page of sparse attention's index keys, with one byte per number, and scales."""
    token = cache.indexer_dim + cache.indexer_dim // _INDEX_GROUP * 4
    return Page(Kind.FULL, block, block * token, ("index", cache.indexer_dim), 0, token)


def _state_page(layout: Layout, cache: StateCache, block: int) -> Page:
    """Return the page of a state. If the model has attention, it is padded to an attention page."""
    size = state_bytes(layout, cache)
    if layout.has_attention:
        one = _attention_token(layout)
        size = max(size, block * one)
    # The tokens that one state covers: all tokens of a request, or those of a block if vLLM caches
    # states by block.
    cached = layout.caches_prefixes and layout.has_attention and layout.vllm >= (0, 11, 1)
    covers = block if cached else layout.max_model_len
    return Page(Kind.STATE, covers, size, (cache.kind, cache.shapes, cache.dtypes))


def state_bytes(layout: Layout, cache: StateCache) -> int:
    """
    Return the bytes of one state on one GPU.

    With speculative decoding, the state of the convolution also holds the speculative tokens: for
    gated delta nets in all releases, for Mamba-2 since 0.17, for KDA since 0.27, and for short
    convolutions since 0.29 (mamba_utils.py).
    """
    total = 0
    last = len(cache.shapes) - (0 if cache.kind == "short_conv" else 1)
    for number, (shape, split) in enumerate(zip(cache.shapes, cache.split, strict=True)):
        sizes = list(shape)
        if split is not None:
            sizes[split] = -(-sizes[split] // layout.tensor)
        if number < last and _is_lengthened(layout, cache.kind):
            sizes[0 if split == 1 else -1] += layout.speculative_tokens
        dtype = cache.dtypes[number]
        total += prod(sizes) * DTYPE_BYTES[layout.dtype if dtype == "model" else dtype]
    return total


def _is_lengthened(layout: Layout, kind: str) -> bool:
    since = {"gdn": (0,), "mamba2": (0, 17), "kda": (0, 27), "short_conv": (0, 29)}
    return kind in since and layout.vllm >= since[kind]


def blocks(layout: Layout, page: Page, length: int) -> int:
    """
    Return the blocks that a request of `length` tokens needs in a layer with this page.
    """
    if page.kind is Kind.STATE:
        return _state_blocks(layout, page, length)
    if page.kind is Kind.WINDOW:
        # A window can begin inside a block, so one more block is needed.
        tokens = min(page.span - 1 + _in_flight(layout), length)
        return -(-tokens // page.block) + 1
    if page.kind is Kind.CHUNK:
        return -(-min(page.span + _in_flight(layout), length) // page.block)
    if page.kind is Kind.CROSS:
        # max_num_encoder_input_tokens equals the tokens of a step (CrossAttentionSpec, 0.15 to
        # 0.33).
        return -(-layout.max_num_batched_tokens // page.block)
    tokens = -(-length // layout.decode_context_parallel)
    return -(-tokens // page.block)


def _state_blocks(layout: Layout, page: Page, length: int) -> int:
    """
    Return the number of states of one request.

    A request has one state, and since 0.16 one more for each speculative token
    (MambaSpec.max_memory_usage_bytes). With prefix caching, there is either a state for every block
    (mode "all"), or one additional state (mode "align"). In mode "align", one more state is needed
    for a checkpoint inside a prefill: for Mamba-2 since 0.32, and for gated delta nets with
    FlashInfer's kernel since 0.33.
    """
    speculative = layout.speculative_tokens if layout.vllm >= (0, 16) else 0
    if not layout.caches_prefixes or layout.vllm < (0, 11, 1):
        return 1 + speculative
    kind = str(page.shape[0])
    if _caches_every_block(layout, kind):
        # Since 0.22, the states of speculative tokens are added here.
        return -(-length // page.block) + (speculative if layout.vllm >= (0, 22) else 0)
    if layout.vllm < (0, 16):
        return 1
    return 2 + speculative + _exports_checkpoints(layout, kind)


def _caches_every_block(layout: Layout, kind: str) -> bool:
    return kind in _EVERY_BLOCK and layout.caches_prefixes and (0, 11, 1) <= layout.vllm < (0, 28)


def _exports_checkpoints(layout: Layout, kind: str) -> bool:
    if kind == "mamba2":
        return layout.vllm >= (0, 32)
    return kind == "gdn" and layout.vllm >= (0, 33) and _flashinfer_delta_nets(layout)


def _flashinfer_delta_nets(layout: Layout) -> bool:
    """
    Return whether gated delta nets use FlashInfer's kernel: on Hopper and newer GPUs
    (qwen_gdn_linear_attn.py).
    """
    return layout.device == "cuda" and _major_capability(layout) in (9, 10, 12)


def _in_flight(layout: Layout) -> int:
    """
    Return the number of scheduled, unfinished tokens, whose blocks a window still holds.

    Before 0.26, they are the tokens of one batch. Since 0.26, they are the tokens of all batches
    that run at once (VllmConfig.max_in_flight_tokens). This number of batches is the number of
    stages, plus one with asynchronous scheduling. Asynchronous scheduling is the default, except on
    the CPU. Before 0.29 it is also off for most mixtures of experts with several stages, but this
    exception is ignored here.
    """
    if layout.vllm < (0, 26):
        return layout.max_num_batched_tokens
    overlap = 0 if layout.device == "cpu" else 1
    return (layout.pipeline + overlap) * layout.max_num_batched_tokens


def _major_capability(layout: Layout) -> int:
    return 9 if layout.compute_capability is None else layout.compute_capability[0]


def _latent(layout: Layout) -> LatentCache | None:
    return next((cache for cache in layout.distinct if isinstance(cache, LatentCache)), None)


def _latent_block(layout: Layout, cache: LatentCache) -> tuple[int, int]:
    """
    Return the tokens of MLA's block, and the multiple that the backend's kernel requires.

    Until 0.17, platforms/cuda.py sets the block: 64 on Hopper (FlashMLA), 128 on SM100 (CUTLASS),
    64 on SM100 since 0.15 (FlashInfer), and 16 on other GPUs. Since 0.18, the backend's preference
    applies: 16 on Hopper (FlashAttention MLA; 64 with an fp8 cache, for FlashMLA), 32 on SM100
    (FlashInfer), and 16 on other GPUs (Triton). Sparse attention has 64.
    """
    major, asked, vllm = _major_capability(layout), layout.block_size, layout.vllm
    if vllm >= (0, 18):
        wanted = _preferred_latent_block(layout, major, sparse=_is_sparse(layout))
        return (asked or max(wanted, 16)), wanted
    if cache.indexer_dim:
        return 64, 64
    if major == 10 and vllm >= (0, 10, 1):
        wanted = 64 if vllm >= (0, 15) else 128
    else:
        wanted = 64 if major == 9 else 16
    # Since 0.11, vLLM accepts a multiple as it is.
    if asked is not None and asked % wanted == 0 and vllm >= (0, 11):
        return asked, wanted
    return (asked or 16) if wanted == 16 else wanted, wanted


def _preferred_latent_block(layout: Layout, major: int, *, sparse: bool) -> int:
    if sparse:
        return 64
    if major == 10:
        return 32
    if major == 9 and layout.kv_dtype in _ONE_BYTE:
        return 64
    return 16


def _cpu_block(layout: Layout) -> tuple[int, int]:
    """
    Return the tokens of a block on the CPU, and the multiple that the kernel requires.

    The default is 128. MLA's kernel accepts only 16 (platforms/cpu).
    """
    if _latent(layout) is not None:
        return 16, 16
    return layout.block_size or 128, 32


def _attention_token(layout: Layout) -> int:
    """Return the bytes per token of the first attention layer; a state must fit into its page."""
    first = next(
        cache for cache in layout.distinct if not isinstance(cache, StateCache | CompressedCache)
    )
    return token_bytes(layout, first)


def _hybrid_block(layout: Layout, block: int, kernel: int) -> int:
    """
    Return the tokens of an attention block that is large enough for a page to hold a state.

    The block is a multiple of:
    - 16 before 0.20. For MLA, it is 64 since 0.11.1. On SM100 with heads of 256, it is 32 from
      0.11.1 to 0.17.
    - the backend's own block since 0.20. For MLA, it is at least 128 since 0.27.

    If the state of every block is cached, the block is also a multiple of Mamba's chunk.
    """
    token = _attention_token(layout)
    states = [cache for cache in layout.distinct if isinstance(cache, StateCache)]
    state = max(state_bytes(layout, cache) for cache in states)
    kinds = {cache.kind for cache in states}
    align = _hybrid_alignment(layout, block, kernel)
    if any(_caches_every_block(layout, kind) for kind in kinds):
        align = lcm(layout.state_chunk, align)
    elif layout.caches_prefixes and any(
        kind == "gdn" and _exports_checkpoints(layout, kind) for kind in kinds
    ):
        align = lcm(align, 64)
    return max(block, align * -(-state // (align * token)))


def _hybrid_alignment(layout: Layout, block: int, kernel: int) -> int:
    latent, vllm = _latent(layout) is not None, layout.vllm
    if vllm >= (0, 20):
        align = max(kernel, block)
        return max(align, 128) if latent and vllm >= (0, 27) else align
    if vllm < (0, 11, 1):
        return 16
    if latent:
        return 64
    wide = any(isinstance(cache, FullCache) and cache.head_dim == 256 for cache in layout.distinct)
    return 32 if wide and _major_capability(layout) == 10 and vllm < (0, 18) else 16


def pad_page(page: Page, size: int) -> Page:
    """Return the page with its bytes padded to `size`."""
    return replace(page, bytes=size)


def widen_page(page: Page, ratio: int) -> Page:
    """Return the page for a block that is `ratio` times as large."""
    return replace(page, block=page.block * ratio, bytes=page.bytes * ratio)
