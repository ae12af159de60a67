"""
Describe decoders with multi-head latent attention: a latent per token instead of keys. Pure.

All tensor-parallel ranks store the same latents. TP divides only the projections to heads. Source:
DeepseekV2MLAAttention and DeepseekV2MoE in vLLM's model_executor/models/deepseek_v2.py, and Indexer
there for sparse attention.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.sizing.architectures.building_blocks import (
    gated_mlp,
    norm,
    rotary,
    rotary_tables,
    vector,
)
from gpufleet.sizing.architectures.components import (
    Architecture,
    Cache,
    CompressedCache,
    FullCache,
    LatentCache,
    Layer,
    Part,
    Split,
    StagePlacement,
    Weight,
)
from gpufleet.sizing.architectures.config_fields import Fields
from gpufleet.sizing.architectures.moe_common import (
    NUMBERED,
    assemble,
    draft_weights,
    is_dense_layer,
    named_fields,
    routed_experts,
    too_short_error,
)


@dataclass(frozen=True)
class Family:
    """How a family of decoders differs from DeepSeek V3."""

    router_dtype: str | None = None
    norms: tuple[str, ...] = ("input_layernorm", "post_attention_layernorm")
    experts: tuple[str, ...] = ("n_routed_experts",)
    shared: tuple[str, ...] = ("n_shared_experts",)
    corrected: Callable[[Fields], bool] = lambda fields: (
        fields.text("topk_method", default="noaux_tc") == "noaux_tc"
    )
    """Function that returns whether the router's scores have a float32 correction."""
    sandwich: tuple[str, ...] = ()
    """Names of the further norms of a layer if `sandwich_norm` is set."""
    sparse: bool = False
    """Whether a config with `index_topk` means sparse attention with an index."""


def latent_attention(fields: Fields, *, prefix: str = "self_attn.") -> tuple[Weight, ...]:
    """Return the weights of one layer's latent attention."""
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    low, rank = fields.whole("q_lora_rank", default=0), fields.whole("kv_lora_rank")
    rope, plain = fields.whole("qk_rope_head_dim"), fields.whole("qk_nope_head_dim")
    value = fields.whole("v_head_dim")
    if low:
        queries = (
            Weight(f"{prefix}q_a_proj", low, hidden),
            *norm(f"{prefix}q_a_layernorm", low),
            Weight(f"{prefix}q_b_proj", heads * (plain + rope), low, Split.ROWS),
        )
    else:
        queries = (Weight(f"{prefix}q_proj", heads * (plain + rope), hidden, Split.ROWS),)
    return (
        *queries,
        Weight(f"{prefix}kv_a_proj_with_mqa", rank + rope, hidden),
        *norm(f"{prefix}kv_a_layernorm", rank),
        Weight(f"{prefix}kv_b_proj", heads * (plain + value), rank, Split.ROWS),
        Weight(f"{prefix}o_proj", hidden, heads * value, Split.COLUMNS),
    )


def indexer(fields: Fields) -> tuple[Weight, ...]:
    """
    Return the weights that select the tokens for sparse attention. All ranks have the same.

    vLLM fuses `wk` and `weights_proj`, and keeps both in the model's dtype. It keeps the norm of
    the index in float32.
    """
    hidden, low = fields.whole("hidden_size"), fields.whole("q_lora_rank")
    prefix = "self_attn.indexer."
    heads, dim = fields.whole("index_n_heads"), fields.whole("index_head_dim")
    return (
        Weight(f"{prefix}wq_b", heads * dim, low),
        Weight(f"{prefix}wk", dim, hidden, linear=False),
        Weight(f"{prefix}weights_proj", heads, hidden, linear=False),
        vector(f"{prefix}k_norm", dim, dtype="float32"),
        vector(f"{prefix}k_norm.bias", dim, dtype="float32"),
    )


def has_index(fields: Fields, index: int) -> bool:
    """
    Return whether this layer selects tokens itself, instead of reusing an earlier layer's choice.

    Source: `index_topk_freq`, `index_topk_pattern` and `index_skip_topk_offset` in
    DeepseekV2MLAAttention.
    """
    pattern = fields.value("index_topk_pattern")
    if isinstance(pattern, str | list):
        return not (index < len(pattern) and pattern[index] == "S")
    every = fields.whole("index_topk_freq", default=1) or 1
    offset = fields.whole("index_skip_topk_offset", default=2)
    return max(index - offset + 1, 0) % every == 0


def build(name: str, family: Family, config: Mapping[str, Any]) -> Architecture:
    """Return the architecture that a config of this family describes."""
    fields = named_fields(config, name)
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    experts = fields.whole(*family.experts, default=0)
    dense = fields.whole("intermediate_size")
    inner = fields.whole("moe_intermediate_size") if experts else 0
    norms = family.norms + (family.sandwich if fields.flag("sandwich_norm") else ())
    common = latent_attention(fields) + tuple(w for n in norms for w in norm(n, hidden))
    mlp, mixture = gated_mlp(hidden, dense), _mixture(fields, family, hidden, inner, experts)
    layers = []
    count = fields.whole("num_hidden_layers")
    sparse = family.sparse and fields.value("index_topk") is not None
    for index in range(count):
        feed_forward = mlp if not experts or is_dense_layer(fields, index) else mixture
        if sparse and has_index(fields, index):
            layers.append(
                Layer(common + indexer(fields) + feed_forward, _cache(fields, index=True))
            )
        else:
            layers.append(Layer(common + feed_forward, _cache(fields)))
    draft = [
        Layer(
            draft_weights(hidden)
            + common
            + (indexer(fields) if sparse else ())
            + (mixture if experts else mlp),
            _cache(fields, index=sparse),
        )
        for _ in range(fields.whole("num_nextn_predict_layers", default=0))
    ]
    return assemble(
        fields,
        layers,
        heads=heads,
        kv_heads=1,
        experts=experts,
        moe_intermediate_size=inner,
        intermediate_size=dense,
        # The index of sparse attention rotates its keys in a different way, so it has its own
        # table.
        further=rotary_tables(fields, fields.whole("qk_rope_head_dim")) * (2 if sparse else 1),
        draft_layers=draft,
    )


def _cache(fields: Fields, *, index: bool = False) -> LatentCache:
    return LatentCache(
        fields.whole("kv_lora_rank"),
        fields.whole("qk_rope_head_dim"),
        indexer_dim=fields.whole("index_head_dim") if index else 0,
    )


def _mixture(
    fields: Fields, family: Family, hidden: int, inner: int, experts: int
) -> tuple[Weight, ...]:
    if not experts:
        return ()
    weights = routed_experts(
        hidden,
        inner,
        experts,
        router_dtype=family.router_dtype,
        correction="gate.e_score_correction_bias" if family.corrected(fields) else "",
    )
    if shared := fields.whole(*family.shared, default=0):
        weights += gated_mlp(hidden, shared * inner, prefix="mlp.shared_experts.")
    return weights


def longcat(config: Mapping[str, Any]) -> Architecture:
    """
    Describe LongCat-Flash, with two attentions and two MLPs in each layer, and with experts.

    The router also scores `zero_expert_num` experts that have no weights. LongCat-Flash-Lite also
    has embeddings for sequences of several tokens (longcat_flash_ngram.py). Source:
    longcat_flash.py.
    """
    fields = named_fields(config, "LongcatFlashForCausalLM")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    experts = fields.whole("n_routed_experts")
    inner = fields.whole("expert_ffn_hidden_size", "moe_intermediate_size")
    dense = fields.whole("ffn_hidden_size", "intermediate_size")
    scored = experts + fields.whole("zero_expert_num", default=0)
    weights = (
        *(w for i in (0, 1) for w in latent_attention(fields, prefix=f"self_attn.{i}.")),
        *(w for i in (0, 1) for w in gated_mlp(hidden, dense, prefix=f"mlps.{i}.")),
        *(w for i in (0, 1) for w in norm(f"input_layernorm.{i}", hidden)),
        *(w for i in (0, 1) for w in norm(f"post_attention_layernorm.{i}", hidden)),
        *routed_experts(hidden, inner, experts)[1:],
        Weight("mlp.router.classifier", scored, hidden, linear=False, dtype="float32"),
        vector("mlp.router.e_score_correction_bias", scored, dtype="float32"),
    )
    layer = Layer(weights, _cache(fields), more=(_cache(fields),))
    return assemble(
        fields,
        [layer] * fields.whole("num_layers", "num_hidden_layers"),
        heads=heads,
        kv_heads=1,
        experts=experts,
        moe_intermediate_size=inner,
        intermediate_size=dense,
        further=(
            *rotary_tables(fields, fields.whole("qk_rope_head_dim")),
            *_ngrams(fields, hidden),
        ),
    )


def _ngrams(fields: Fields, hidden: int) -> tuple[Part, ...]:
    """
    Return the embeddings for sequences of several tokens. The sizes of the tables differ slightly.
    """
    ratio = fields.whole("ngram_vocab_size_ratio", default=0)
    if fields.name != "LongcatFlashNgramForCausalLM" or not ratio:
        return ()
    tables = fields.whole("emb_split_num") * (fields.whole("emb_neighbor_num") - 1)
    rows = tables * ratio * fields.whole("vocab_size") + tables**2
    size = hidden // max(tables, 1)
    block = "model.ngram_embeddings."
    weights = (
        Weight(f"{block}embedders", rows, size, Split.VOCABULARY, linear=False),
        Weight(f"{block}post_projs", tables * size, hidden, linear=False),
    )
    return (Part("embedding of several tokens", weights, StagePlacement.FIRST),)


def minicpm3(config: Mapping[str, Any]) -> Architecture:
    """
    Describe MiniCPM3, for which vLLM caches a key and a value per head instead of latents.

    Values are padded to the size of keys. Source: minicpm3.py.
    """
    fields = named_fields(config, "MiniCPM3ForCausalLM")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    dense = fields.whole("intermediate_size")
    weights = (
        *latent_attention(fields),
        *gated_mlp(hidden, dense),
        *norm("input_layernorm", hidden),
        *norm("post_attention_layernorm", hidden),
    )
    size = fields.whole("qk_nope_head_dim") + fields.whole("qk_rope_head_dim")
    cache: Cache = FullCache(heads, size)
    return assemble(
        fields,
        [Layer(weights, cache)] * fields.whole("num_hidden_layers"),
        heads=heads,
        kv_heads=heads,
        intermediate_size=dense,
        tied=True,
        further=rotary_tables(fields, fields.whole("qk_rope_head_dim")),
    )


_SPARSE = Family(sparse=True)
_FAMILIES: dict[str, Family] = {
    "AXK1ForCausalLM": Family(
        norms=("input_layernorm", "post_attention_layernorm", "post_mlp_layernorm")
    ),
    "DeepseekV2ForCausalLM": Family(
        corrected=lambda fields: fields.text("topk_method") == "noaux_tc"
    ),
    "DeepseekV32ForCausalLM": _SPARSE,
    "DeepseekV3ForCausalLM": _SPARSE,
    "Glm4MoeLiteForCausalLM": Family(router_dtype="float32"),
    "GlmMoeDsaForCausalLM": _SPARSE,
    "MistralLarge3ForCausalLM": Family(
        corrected=lambda fields: fields.text("topk_method") == "noaux_tc"
    ),
    "PanguUltraMoEForCausalLM": Family(
        sandwich=("pre_mlp_layernorm", "post_mlp_layernorm"),
        corrected=lambda fields: fields.flag("router_enable_expert_bias"),
    ),
    "SarvamMLAForCausalLM": Family(
        experts=("num_experts",),
        shared=("num_shared_experts",),
        corrected=lambda fields: fields.flag("moe_router_enable_expert_bias", default=True),
    ),
}


def deepseek_v4(config: Mapping[str, Any]) -> Architecture:
    """
    Describe DeepSeek V4, with one key per token. Every 4 or 128 keys are compressed into one.

    `compress_ratios` has this number for each layer. 0 means that the layer has only a window. In
    the first `num_hash_layers` layers, the token itself determines its experts. Source:
    vllm/models/deepseek_v4.
    """
    fields = named_fields(config, "DeepseekV4ForCausalLM")
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    experts, inner = fields.whole("n_routed_experts"), fields.whole("moe_intermediate_size")
    count, hashed = fields.whole("num_hidden_layers"), fields.whole("num_hash_layers", default=0)
    ratios = fields.wholes("compress_ratios")
    if len(ratios) < count:
        raise too_short_error(fields, "compress_ratios", len(ratios))
    if unknown := sorted(set(ratios) - {0, 1, 4, 128}):
        raise FleetError(
            f"config.json of {fields.name}: `compress_ratios` has {unknown[0]}, but vLLM knows "
            "only 4 and 128: use the publisher's original file"
        )
    mixing = fields.whole("hc_mult")
    shared = fields.whole("n_shared_experts", default=0)
    drafts = fields.whole("num_nextn_predict_layers", default=0)
    layers = []
    for index, ratio in enumerate((*ratios, *(0,) * drafts)[: count + drafts]):
        matrices = routed_experts(hidden, inner, experts, prefix="ffn.", matrices=NUMBERED)
        if index < hashed:
            # The table has the experts of each token, as numbers of four bytes.
            chosen = fields.whole("num_experts_per_tok")
            table = Weight("ffn.gate.tid2eid", fields.whole("vocab_size"), chosen, linear=False)
            matrices += (replace(table, dtype="float32"),)
        else:
            matrices += (vector("ffn.gate.bias", experts, dtype="float32"),)
        if shared:
            prefix = "ffn.shared_experts."
            matrices += gated_mlp(hidden, shared * inner, prefix=prefix, names=NUMBERED)
        weights = (
            *_v4_attention(fields, hidden, heads, ratio),
            *_v4_mixing("hc_attn", mixing, hidden),
            *_v4_mixing("hc_ffn", mixing, hidden),
            *norm("attn_norm", hidden),
            *norm("ffn_norm", hidden),
        )
        if index >= count:
            weights += _v4_draft(hidden, mixing)
        layers.append(Layer(weights + matrices, _v4_cache(fields, ratio)))
    positions = fields.whole("max_position_embeddings")
    head = Weight("hc_head_fn", mixing, mixing * hidden, linear=False, dtype="float32")
    return assemble(
        fields,
        layers[:count],
        heads=heads,
        kv_heads=1,
        experts=experts,
        moe_intermediate_size=inner,
        embedding_name="embed",
        norm_name="norm",
        prefix="layers.",
        further=(
            rotary(positions, fields.whole("qk_rope_head_dim"), dtype="float32", tables=2),
            Part("mixing", (head,), StagePlacement.LAST),
        ),
        draft_layers=layers[count:],
    )


def _v4_draft(hidden: int, mixing: int) -> tuple[Weight, ...]:
    """
    Return the weights of a multi-token prediction layer in addition to those of a usual layer.

    Source: vllm/models/deepseek_v4/nvidia/mtp.py.
    """
    return (
        *norm("enorm", hidden),
        *norm("hnorm", hidden),
        Weight("e_proj", hidden, hidden),
        Weight("h_proj", hidden, hidden),
        *norm("norm", hidden),
        Weight("hc_head_fn", mixing, mixing * hidden, linear=False, dtype="float32"),
    )


def _v4_cache(fields: Fields, ratio: int) -> CompressedCache:
    compressed = ratio if ratio > 1 else 0
    index = fields.whole("index_head_dim") if compressed == _INDEXED_RATIO else 0
    return CompressedCache(
        fields.whole("head_dim"), fields.whole("sliding_window"), compressed, index
    )


_INDEXED_RATIO = 4
"""The compression ratio of the layers that select compressed tokens by an index."""


def _v4_attention(fields: Fields, hidden: int, heads: int, ratio: int) -> tuple[Weight, ...]:
    low, dim = fields.whole("q_lora_rank"), fields.whole("head_dim")
    groups, out = fields.whole("o_groups"), fields.whole("o_lora_rank")
    weights: tuple[Weight, ...] = (
        Weight("attn.wq_a", low, hidden),
        Weight("attn.wkv", dim, hidden),
        *norm("attn.q_norm", low),
        *norm("attn.kv_norm", dim),
        Weight("attn.wq_b", heads * dim, low, Split.ROWS),
        Weight("attn.wo_a", groups * out, heads * dim // max(groups, 1), Split.ROWS),
        Weight("attn.wo_b", hidden, groups * out, Split.COLUMNS),
        vector("attn.attn_sink", heads, dtype="float32"),
    )
    if ratio > 1:
        weights += _v4_compressor("attn.compressor.", hidden, dim, ratio)
    if ratio == _INDEXED_RATIO:
        own, size = "attn.indexer.", fields.whole("index_head_dim")
        many = fields.whole("index_n_heads")
        weights += (
            Weight(f"{own}wq_b", many * size, low),
            Weight(f"{own}weights_proj", many, hidden, linear=False),
            *_v4_compressor(f"{own}compressor.", hidden, size, ratio),
        )
    return weights


def _v4_compressor(prefix: str, hidden: int, dim: int, ratio: int) -> tuple[Weight, ...]:
    """
    Return the weights that compress `ratio` tokens into one.

    With a ratio of 4, each group also uses the four tokens before it.
    """
    width = dim * (2 if ratio == _INDEXED_RATIO else 1)
    return (
        Weight(f"{prefix}ape", ratio, width, linear=False, dtype="float32"),
        Weight(f"{prefix}wkv", width, hidden, linear=False),
        Weight(f"{prefix}wgate", width, hidden, linear=False),
        *norm(f"{prefix}norm", dim),
    )


def _v4_mixing(name: str, mixing: int, hidden: int) -> tuple[Weight, ...]:
    """Return the weights that mix the `hc_mult` streams of hidden states, in float32."""
    rows = (2 + mixing) * mixing
    return (
        Weight(f"{name}_fn", rows, mixing * hidden, linear=False, dtype="float32"),
        vector(f"{name}_base", rows, dtype="float32"),
        vector(f"{name}_scale", 3, dtype="float32"),
    )


BUILDERS: dict[str, Callable[[Mapping[str, Any]], Architecture]] = {
    **{name: partial(build, name, family) for name, family in _FAMILIES.items()},
    "DeepseekV4ForCausalLM": deepseek_v4,
    "LongcatFlashForCausalLM": longcat,
    "LongcatFlashNgramForCausalLM": longcat,
    "MiniCPM3ForCausalLM": minicpm3,
}
"""The builder of each latent-attention decoder, by its name in `architectures`."""
