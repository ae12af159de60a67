"""
Describe dense decoders that no `Style` can describe, with one function for each. Pure.

Source: the classes in vLLM's model_executor/models.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.sizing.architectures.building_blocks import (
    attention,
    embedding,
    final_norm,
    gated_mlp,
    norm,
    plain_mlp,
    rotary,
    rotary_tables,
    uniform_layers,
    wrap_layers,
)
from gpufleet.sizing.architectures.components import (
    Architecture,
    Cache,
    FullCache,
    Layer,
    Part,
    StagePlacement,
    Weight,
)
from gpufleet.sizing.architectures.config_fields import Fields


def _gpt(config: Mapping[str, Any], name: str) -> Architecture:
    """
    Describe GPT-2 or GPTBigCode, with learnt positions and biases. GPTBigCode may have one KV head.
    """
    fields = Fields(config, name)
    hidden = fields.whole("hidden_size", "n_embd")
    heads = fields.whole("num_attention_heads", "n_head")
    layers = fields.whole("num_hidden_layers", "n_layer")
    many = name == "GPTBigCodeForCausalLM" and fields.flag("multi_query", default=True)
    kv_heads = 1 if many else heads
    intermediate = fields.whole("n_inner", "intermediate_size", default=4 * hidden)
    positions = fields.whole("max_position_embeddings", "n_positions")
    head_dim = hidden // max(heads, 1)
    weights = (
        attention(
            hidden,
            heads,
            kv_heads,
            head_dim,
            prefix="attn.",
            names=("c_attn", "c_attn", "c_attn", "c_proj"),
            bias=True,
            out_bias=True,
        )
        + plain_mlp(hidden, intermediate, names=("c_fc", "c_proj"), bias=True)
        + norm("ln_1", hidden, bias=True)
        + norm("ln_2", hidden, bias=True)
    )
    learnt = Weight("transformer.wpe", positions, hidden, linear=False)
    return wrap_layers(
        fields,
        layers=uniform_layers(weights, (FullCache(kv_heads, head_dim),) * layers),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=intermediate,
        tied=fields.flag("tie_word_embeddings", default=True),
        final=final_norm(hidden, "transformer.ln_f", bias=True),
        parts=(Part("positions", (learnt,), StagePlacement.EVERY),),
        embedding_name="transformer.wte",
        prefix="transformer.h.",
    )


def _gpt_j(config: Mapping[str, Any], name: str) -> Architecture:
    """Describe GPT-J, with attention and MLP in parallel after one norm, and a bias on the head."""
    fields = Fields(config, name)
    hidden = fields.whole("n_embd", "hidden_size")
    heads = fields.whole("n_head", "num_attention_heads")
    layers = fields.whole("n_layer", "num_hidden_layers")
    intermediate = fields.whole("n_inner", "intermediate_size", default=4 * hidden)
    head_dim = hidden // max(heads, 1)
    weights = (
        attention(
            hidden,
            heads,
            heads,
            head_dim,
            prefix="attn.",
            names=("q_proj", "k_proj", "v_proj", "out_proj"),
        )
        + plain_mlp(hidden, intermediate, names=("fc_in", "fc_out"), bias=True)
        + norm("ln_1", hidden, bias=True)
    )
    positions = fields.whole("max_position_embeddings", "n_positions", default=8192)
    return wrap_layers(
        fields,
        layers=uniform_layers(weights, (FullCache(heads, head_dim),) * layers),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        intermediate=intermediate,
        tied=False,
        final=final_norm(hidden, "transformer.ln_f", bias=True),
        parts=(rotary(positions, fields.whole("rotary_dim", default=64)),),
        embedding_name="transformer.wte",
        head_bias=True,
        prefix="transformer.h.",
    )


def _gpt_neox(config: Mapping[str, Any], name: str) -> Architecture:
    """
    Describe GPT-NeoX or Pythia, with one weight for queries, keys and values, biases and two norms.
    """
    fields = Fields(config, name)
    hidden = fields.whole("hidden_size")
    heads = fields.whole("num_attention_heads")
    layers = fields.whole("num_hidden_layers")
    intermediate = fields.whole("intermediate_size")
    bias = fields.flag("attention_bias", default=True)
    head_dim = hidden // max(heads, 1)
    fused = "query_key_value"
    weights = (
        attention(
            hidden,
            heads,
            heads,
            head_dim,
            prefix="attention.",
            names=(fused, fused, fused, "dense"),
            bias=bias,
            out_bias=bias,
        )
        + plain_mlp(hidden, intermediate, names=("dense_h_to_4h", "dense_4h_to_h"), bias=True)
        + norm("input_layernorm", hidden, bias=True)
        + norm("post_attention_layernorm", hidden, bias=True)
    )
    return wrap_layers(
        fields,
        layers=uniform_layers(weights, (FullCache(heads, head_dim),) * layers),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        intermediate=intermediate,
        tied=fields.flag("tie_word_embeddings"),
        final=final_norm(hidden, "gpt_neox.final_layer_norm", bias=True),
        parts=rotary_tables(fields, head_dim),
        embedding_name="gpt_neox.embed_in",
        head_name="embed_out",
        prefix="gpt_neox.layers.",
    )


def _falcon(config: Mapping[str, Any], name: str) -> Architecture:
    """
    Describe Falcon 7B, 40B, 180B or 11B, with attention and MLP in parallel, and one or two norms.
    """
    fields = Fields(config, name)
    hidden = fields.whole("hidden_size", "n_embed")
    heads = fields.whole("num_attention_heads", "n_head")
    layers = fields.whole("num_hidden_layers", "n_layer")
    new = fields.flag("new_decoder_architecture")
    if new:
        kv_heads = fields.whole("num_kv_heads", "n_head_kv", default=heads)
    else:
        kv_heads = 1 if fields.flag("multi_query", default=True) else heads
    head_dim = hidden // max(heads, 1)
    intermediate = 4 * hidden
    bias = fields.flag("bias")
    fused = "query_key_value"
    weights = attention(
        hidden,
        heads,
        kv_heads,
        head_dim,
        prefix="self_attention.",
        names=(fused, fused, fused, "dense"),
        bias=bias,
        out_bias=bias,
    ) + plain_mlp(hidden, intermediate, names=("dense_h_to_4h", "dense_4h_to_h"), bias=bias)
    parallel_norms = fields.whole("num_ln_in_parallel_attn", default=2 if new else 1)
    if parallel_norms == 2:
        weights += norm("ln_attn", hidden, bias=True) + norm("ln_mlp", hidden, bias=True)
    else:
        weights += norm("input_layernorm", hidden, bias=True)
        if not fields.flag("parallel_attn", default=True) and not new:
            weights += norm("post_attention_layernorm", hidden, bias=True)
    rotary_parts = () if fields.flag("alibi") else rotary_tables(fields, head_dim)
    return wrap_layers(
        fields,
        layers=uniform_layers(weights, (FullCache(kv_heads, head_dim),) * layers),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=intermediate,
        tied=fields.flag("tie_word_embeddings", default=True),
        final=final_norm(hidden, "transformer.ln_f", bias=True),
        parts=rotary_parts,
        embedding_name="transformer.word_embeddings",
        prefix="transformer.h.",
    )


def _bloom(config: Mapping[str, Any], name: str) -> Architecture:
    """Describe Bloom, with a norm after the embedding. ALiBi needs no table of positions."""
    fields = Fields(config, name)
    hidden = fields.whole("hidden_size", "n_embed")
    heads = fields.whole("num_attention_heads", "n_head")
    layers = fields.whole("num_hidden_layers", "n_layer")
    head_dim = hidden // max(heads, 1)
    fused = "query_key_value"
    weights = (
        attention(
            hidden,
            heads,
            heads,
            head_dim,
            prefix="self_attention.",
            names=(fused, fused, fused, "dense"),
            bias=True,
            out_bias=True,
        )
        + plain_mlp(hidden, 4 * hidden, names=("dense_h_to_4h", "dense_4h_to_h"), bias=True)
        + norm("input_layernorm", hidden, bias=True)
        + norm("post_attention_layernorm", hidden, bias=True)
    )
    first = Part(
        "embedding norm",
        norm("transformer.word_embeddings_layernorm", hidden, bias=True),
        StagePlacement.EVERY,
    )
    return wrap_layers(
        fields,
        layers=uniform_layers(weights, (FullCache(heads, head_dim),) * layers),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        intermediate=4 * hidden,
        tied=fields.flag("tie_word_embeddings", default=True),
        final=final_norm(hidden, "transformer.ln_f", bias=True),
        parts=(first,),
        embedding_name="transformer.word_embeddings",
        prefix="transformer.h.",
    )


def _opt(config: Mapping[str, Any], name: str) -> Architecture:
    """
    Describe OPT, with two more learnt positions than the config states.

    The embedding of OPT 350M has a different width than its layers.
    """
    fields = Fields(config, name)
    hidden = fields.whole("hidden_size")
    heads = fields.whole("num_attention_heads")
    layers = fields.whole("num_hidden_layers")
    intermediate = fields.whole("ffn_dim")
    width = fields.whole("word_embed_proj_dim", default=hidden)
    positions = fields.whole("max_position_embeddings", default=2048)
    bias = fields.flag("enable_bias", default=True)
    head_dim = hidden // max(heads, 1)
    weights = (
        attention(
            hidden,
            heads,
            heads,
            head_dim,
            names=("q_proj", "k_proj", "v_proj", "out_proj"),
            bias=bias,
            out_bias=bias,
        )
        + plain_mlp(hidden, intermediate, prefix="", names=("fc1", "fc2"), bias=bias)
        + norm("self_attn_layer_norm", hidden, bias=True)
        + norm("final_layer_norm", hidden, bias=True)
    )
    learnt = Weight("model.decoder.embed_positions", positions + 2, hidden, linear=False)
    parts = [Part("positions", (learnt,), StagePlacement.EVERY)]
    if width != hidden:
        parts.append(
            Part(
                "projections",
                (
                    Weight("model.decoder.project_in", hidden, width),
                    Weight("model.decoder.project_out", width, hidden),
                ),
                StagePlacement.EVERY,
            )
        )
    normed = fields.flag("do_layer_norm_before", default=True) and not fields.flag(
        "_remove_final_layer_norm"
    )
    built = wrap_layers(
        fields,
        layers=uniform_layers(weights, (FullCache(heads, head_dim),) * layers),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        intermediate=intermediate,
        tied=fields.flag("tie_word_embeddings", default=True),
        final=final_norm(hidden, "model.decoder.final_layer_norm", bias=True) if normed else None,
        parts=tuple(parts),
        prefix="model.decoder.layers.",
    )
    if width == hidden:
        return built
    narrow = embedding(built.vocab_size, width, "model.decoder.embed_tokens")
    return replace(built, parts=(narrow, *built.parts[1:]))


def _mpt(config: Mapping[str, Any], name: str) -> Architecture:
    """Describe MPT, with ALiBi. The head is the embedding. The published models have no biases."""
    fields = Fields(config, name)
    hidden = fields.whole("d_model")
    heads = fields.whole("n_heads")
    layers = fields.whole("n_layers")
    inner = fields.section("attn_config")
    kv_heads = inner.whole("kv_n_heads", default=heads) if inner else heads
    head_dim = hidden // max(heads, 1)
    intermediate = int(fields.number("expansion_ratio", default=4) * hidden)
    bias = not fields.flag("no_bias", default=True)
    weights = (
        attention(
            hidden,
            heads,
            kv_heads,
            head_dim,
            prefix="attn.",
            names=("Wqkv", "Wqkv", "Wqkv", "out_proj"),
            bias=bias,
            out_bias=bias,
        )
        + plain_mlp(hidden, intermediate, prefix="ffn.", bias=bias)
        + norm("norm_1", hidden, bias=bias)
        + norm("norm_2", hidden, bias=bias)
    )
    if inner and inner.flag("qk_ln"):
        weights += norm("attn.q_ln", hidden, bias=bias) + norm("attn.k_ln", hidden, bias=bias)
    return wrap_layers(
        fields,
        layers=uniform_layers(weights, (FullCache(kv_heads, head_dim),) * layers),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=intermediate,
        tied=True,
        final=final_norm(hidden, "transformer.norm_f", bias=bias),
        embedding_name="transformer.wte",
        prefix="transformer.blocks.",
    )


def _phi(config: Mapping[str, Any], name: str) -> Architecture:
    """
    Describe Phi-1, 1.5 or 2, with attention and MLP in parallel after one norm, and biases
    everywhere.
    """
    fields = Fields(config, name)
    hidden = fields.whole("hidden_size")
    heads = fields.whole("num_attention_heads")
    layers = fields.whole("num_hidden_layers")
    kv_heads = fields.whole("num_key_value_heads", default=heads)
    intermediate = fields.whole("intermediate_size", "n_inner", default=4 * hidden)
    head_dim = hidden // max(heads, 1)
    weights = (
        attention(
            hidden,
            heads,
            kv_heads,
            head_dim,
            names=("q_proj", "k_proj", "v_proj", "dense"),
            bias=True,
            out_bias=True,
        )
        + plain_mlp(hidden, intermediate, names=("fc1", "fc2"), bias=True)
        + norm("input_layernorm", hidden, bias=True)
    )
    return wrap_layers(
        fields,
        layers=uniform_layers(weights, (FullCache(kv_heads, head_dim),) * layers),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=intermediate,
        tied=False,
        final=final_norm(hidden, "model.final_layernorm", bias=True),
        parts=rotary_tables(fields, head_dim),
        head_bias=True,
    )


def _persimmon(config: Mapping[str, Any], name: str) -> Architecture:
    """
    Describe Persimmon, with biases everywhere.

    The queries and keys of each head have norms, which also have biases.
    """
    fields = Fields(config, name)
    hidden = fields.whole("hidden_size")
    heads = fields.whole("num_attention_heads")
    layers = fields.whole("num_hidden_layers")
    intermediate = fields.whole("intermediate_size")
    head_dim = hidden // max(heads, 1)
    fused = "query_key_value"
    weights = (
        attention(
            hidden,
            heads,
            heads,
            head_dim,
            names=(fused, fused, fused, "dense"),
            bias=True,
            out_bias=True,
        )
        + plain_mlp(hidden, intermediate, names=("dense_h_to_4h", "dense_4h_to_h"), bias=True)
        + norm("input_layernorm", hidden, bias=True)
        + norm("post_attention_layernorm", hidden, bias=True)
    )
    if fields.flag("qk_layernorm", default=True):
        weights += norm("self_attn.q_layernorm", head_dim, bias=True)
        weights += norm("self_attn.k_layernorm", head_dim, bias=True)
    return wrap_layers(
        fields,
        layers=uniform_layers(weights, (FullCache(heads, head_dim),) * layers),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        intermediate=intermediate,
        tied=False,
        final=final_norm(hidden, "model.final_layernorm", bias=True),
        parts=rotary_tables(fields, head_dim),
    )


def _chatglm(config: Mapping[str, Any], name: str) -> Architecture:
    """
    Describe ChatGLM 2 or 3 or GLM-4-9B, with fused weights.

    Only queries, keys and values have biases.
    """
    fields = Fields(config, name)
    hidden = fields.whole("hidden_size")
    heads = fields.whole("num_attention_heads")
    layers = fields.whole("num_layers", "num_hidden_layers")
    kv_heads = (
        fields.whole("multi_query_group_num") if fields.flag("multi_query_attention") else heads
    )
    head_dim = fields.whole("kv_channels", default=hidden // max(heads, 1))
    intermediate = fields.whole("ffn_hidden_size")
    bias = fields.flag("add_bias_linear")
    fused = "query_key_value"
    weights = (
        attention(
            hidden,
            heads,
            kv_heads,
            head_dim,
            prefix="self_attention.",
            names=(fused, fused, fused, "dense"),
            bias=bias or fields.flag("add_qkv_bias"),
            out_bias=bias,
        )
        + gated_mlp(
            hidden,
            intermediate,
            names=("dense_h_to_4h", "dense_h_to_4h", "dense_4h_to_h"),
            bias=bias,
        )
        + norm("input_layernorm", hidden, bias=not fields.flag("rmsnorm", default=True))
        + norm("post_attention_layernorm", hidden, bias=not fields.flag("rmsnorm", default=True))
    )
    positions = fields.whole("seq_length", default=8192)
    return wrap_layers(
        fields,
        layers=uniform_layers(weights, (FullCache(kv_heads, head_dim),) * layers),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        intermediate=intermediate,
        tied=fields.flag("tie_word_embeddings"),
        final=final_norm(hidden, "transformer.encoder.final_layernorm"),
        parts=(rotary(positions, head_dim // 2),),
        embedding_name="transformer.embedding.word_embeddings",
        head_name="transformer.output_layer",
        prefix="transformer.encoder.layers.",
        vocab=fields.whole("padded_vocab_size", "vocab_size"),
    )


def _qwen(config: Mapping[str, Any], name: str) -> Architecture:
    """
    Describe the Qwen of 2023, with one weight for queries, keys and values.

    The width of its MLP is half of the width in the config.
    """
    fields = Fields(config, name)
    hidden = fields.whole("hidden_size")
    heads = fields.whole("num_attention_heads")
    layers = fields.whole("num_hidden_layers")
    head_dim = fields.whole("kv_channels", default=hidden // max(heads, 1))
    intermediate = fields.whole("intermediate_size") // 2
    weights = (
        attention(
            hidden,
            heads,
            heads,
            head_dim,
            prefix="attn.",
            names=("c_attn", "c_attn", "c_attn", "c_proj"),
            bias=True,
        )
        + gated_mlp(hidden, intermediate, names=("w2", "w1", "c_proj"))
        + norm("ln_1", hidden)
        + norm("ln_2", hidden)
    )
    return wrap_layers(
        fields,
        layers=uniform_layers(weights, (FullCache(heads, head_dim),) * layers),
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        intermediate=intermediate,
        tied=fields.flag("tie_word_embeddings"),
        final=final_norm(hidden, "transformer.ln_f"),
        parts=rotary_tables(fields, head_dim),
        embedding_name="transformer.wte",
        prefix="transformer.h.",
    )


def _deci(config: Mapping[str, Any], name: str) -> Architecture:
    """Describe Nemotron-NAS. Each layer has its own MLP width and KV heads, or no attention."""
    fields = Fields(config, name)
    hidden = fields.whole("hidden_size")
    heads = fields.whole("num_attention_heads")
    head_dim = fields.whole("head_dim", default=hidden // max(heads, 1))
    blocks = fields.value("block_configs")
    if not isinstance(blocks, Sequence) or isinstance(blocks, str):
        raise fields.missing_error("block_configs")
    bias = fields.flag("attention_bias", "bias")
    layers: list[Layer] = []
    widest, most = 0, 1
    for number, block in enumerate(blocks):
        attended = Fields(block.get("attention") or {}, name, f"block_configs[{number}].attention.")
        forward = Fields(block.get("ffn") or {}, name, f"block_configs[{number}].ffn.")
        if attended.flag("replace_with_linear") or forward.flag("replace_with_linear"):
            raise FleetError(
                f"config.json of {name}: block_configs[{number}] replaces a part with a linear "
                "layer, but vLLM does not load such layers: use a model without such layers"
            )
        weights: tuple[Weight, ...] = ()
        cache: Cache | None = None
        if not attended.flag("no_op"):
            kv_heads = (
                heads // attended.whole("n_heads_in_group")
                if attended.value("n_heads_in_group")
                else attended.whole(
                    "num_key_value_heads",
                    default=fields.whole("num_key_value_heads", default=heads),
                )
            )
            weights += attention(hidden, heads, kv_heads, head_dim, bias=bias, out_bias=bias)
            weights += norm("input_layernorm", hidden)
            cache = FullCache(kv_heads, head_dim)
            most = max(most, kv_heads)
        if not forward.flag("no_op"):
            width = (
                _round_width(2 * float(forward.number("ffn_mult", default=0)) * hidden / 3)
                if forward.value("ffn_mult") is not None
                else forward.whole("intermediate_size")
            )
            weights += gated_mlp(hidden, width, bias=fields.flag("mlp_bias"))
            weights += norm("post_attention_layernorm", hidden)
            widest = max(widest, width)
        layers.append(Layer(weights, cache))
    same: dict[Layer, Layer] = {}
    return wrap_layers(
        fields,
        layers=tuple(same.setdefault(layer, layer) for layer in layers),
        hidden=hidden,
        heads=heads,
        kv_heads=most,
        intermediate=widest,
        tied=fields.flag("tie_word_embeddings"),
        final=final_norm(hidden),
        parts=rotary_tables(fields, head_dim),
    )


def _round_width(width: float) -> int:
    """
    Return a width rounded up to a multiple of 256.

    Source: _ffn_mult_to_intermediate_size in vLLM's nemotron_nas.py.
    """
    return -(-int(width) // 256) * 256


BUILDERS: dict[str, Callable[[Mapping[str, Any]], Architecture]] = {
    name: partial(build, name=name)
    for build, names in (
        (_gpt, ("GPT2LMHeadModel", "GPTBigCodeForCausalLM")),
        (_gpt_j, ("GPTJForCausalLM",)),
        (_gpt_neox, ("GPTNeoXForCausalLM",)),
        (_falcon, ("FalconForCausalLM", "RWForCausalLM")),
        (_bloom, ("BloomForCausalLM",)),
        (_opt, ("OPTForCausalLM",)),
        (_mpt, ("MPTForCausalLM", "MptForCausalLM")),
        (_phi, ("PhiForCausalLM",)),
        (_chatglm, ("ChatGLMModel", "ChatGLMForConditionalGeneration")),
        (_qwen, ("QWenLMHeadModel",)),
        (_persimmon, ("PersimmonForCausalLM",)),
        (_deci, ("DeciLMForCausalLM",)),
    )
    for name in names
}
"""The builder of each architecture, by its name in `architectures`."""
