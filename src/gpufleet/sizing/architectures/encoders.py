"""
Describe encoders that embed or score: they have weights, but no KV cache.  Pure.

Each token attends to all others, or to a window, in one step, so nothing is cached. Other encoders
are refused by name in `unsized.py`.

Source: vLLM's model_executor/models. bert.py and roberta.py were read in 0.31.0, their other heads
and colbert.py in 0.32.0, and bert_with_rope.py, modernbert.py and config.py in 0.23.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from gpufleet.sizing.architectures.building_blocks import (
    attention,
    default_dtype,
    gated_mlp,
    norm,
    plain_mlp,
    rotary,
    vector,
)
from gpufleet.sizing.architectures.components import (
    Architecture,
    Layer,
    Part,
    Split,
    StagePlacement,
    Weight,
)
from gpufleet.sizing.architectures.config_fields import Fields
from gpufleet.sizing.architectures.max_length import max_model_len
from gpufleet.sizing.architectures.poolers import dense, label_rows, token_vectors

_Head = Callable[[Fields, int], tuple[Weight, ...]]
"""Function that returns the weights after an encoder's layers, from its config and hidden size."""


def _bert(
    config: Mapping[str, Any], name: str, *, offset: bool, head: _Head | None = None
) -> Architecture:
    """
    Describe BERT or RoBERTa.

    With `offset`, the positions up to the padding's index are not used for tokens.
    """
    fields = Fields(config, name)
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    inner, layers = fields.whole("intermediate_size"), fields.whole("num_hidden_layers")
    vocab, positions = fields.whole("vocab_size"), fields.whole("max_position_embeddings")
    weights = (
        *attention(hidden, heads, heads, hidden // max(heads, 1), bias=True, out_bias=True),
        *plain_mlp(hidden, inner, bias=True),
        *norm("attention.output.LayerNorm", hidden, bias=True),
        *norm("output.LayerNorm", hidden, bias=True),
    )
    tables = tuple(
        Weight(f"embeddings.{key}", rows, hidden, Split.VOCABULARY, linear=False)
        for key, rows in (
            ("word_embeddings", vocab),
            ("position_embeddings", positions),
            ("token_type_embeddings", fields.whole("type_vocab_size", default=2)),
        )
    )
    normed = norm("embeddings.LayerNorm", hidden, bias=True)
    parts = [Part("embedding", (*tables, *normed), StagePlacement.FIRST)]
    if head:
        parts.append(Part("score", head(fields, hidden), StagePlacement.LAST))
    length = max_model_len(config)
    if offset:
        length -= fields.whole("pad_token_id", default=1) + 1
    return _encoder(
        fields, (weights,) * layers, parts, hidden=hidden, heads=heads, inner=inner, length=length
    )


def _encoder(
    fields: Fields,
    layers: Sequence[tuple[Weight, ...]],
    parts: Sequence[Part],
    *,
    hidden: int,
    heads: int,
    inner: int,
    length: int,
    longest: int = 0,
) -> Architecture:
    """
    Describe an encoder with these layers.

    `longest` is the largest accepted length if it is above the default, `length`.
    """
    alike = {layer: Layer(layer) for layer in layers}
    return Architecture(
        name=fields.name,
        hidden_size=hidden,
        vocab_size=fields.whole("vocab_size"),
        heads=heads,
        kv_heads=heads,
        layers=tuple(alike[layer] for layer in layers),
        parts=tuple(parts),
        max_model_len=length,
        dtype=default_dtype(fields),
        intermediate_size=inner,
        lengths=(((0,), length, max(length, longest)),),
        pooling=True,
        pipeline=False,
        prefix="encoder.layer.",
    )


def _rotary_embedding(fields: Fields, hidden: int, head_dim: int, positions: int) -> list[Part]:
    """
    Return the embedding of words, the embedding of token types if there is one, and the rotary
    table.
    """
    types = fields.whole("type_vocab_size", default=0)
    tables = [Weight("word_embeddings", fields.whole("vocab_size"), hidden, Split.VOCABULARY,
                     linear=False)]  # fmt: skip
    if types:
        tables.append(
            Weight("token_type_embeddings", types, hidden, Split.VOCABULARY, linear=False)
        )
    normed = norm("LayerNorm", hidden, bias=True)
    return [
        Part("embedding", (*tables, *normed), StagePlacement.FIRST),
        rotary(positions, head_dim),
    ]


def _norms(hidden: int) -> tuple[Weight, ...]:
    return (*norm("attn_ln", hidden, bias=True), *norm("mlp_ln", hidden, bias=True))


def _gte(config: Mapping[str, Any], name: str, *, scores: bool) -> Architecture:
    """
    Describe GTE or Snowflake's Arctic Embed 2, with a gated MLP whose first matrix has no bias.
    """
    fields = Fields(config, name)
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    inner, head_dim = fields.whole("intermediate_size"), hidden // max(heads, 1)
    weights = (
        *attention(hidden, heads, heads, head_dim, bias=True, out_bias=True),
        *gated_mlp(hidden, inner),
        vector("mlp.down_proj.bias", hidden),
        *_norms(hidden),
    )
    length = max_model_len(config)
    parts = _rotary_embedding(fields, hidden, head_dim, length)
    if scores:
        parts.append(Part("score", _score(fields, hidden), StagePlacement.LAST))
    layers = (weights,) * fields.whole("num_hidden_layers")
    return _encoder(fields, layers, parts, hidden=hidden, heads=heads, inner=inner, length=length)


def _nomic_bert(config: Mapping[str, Any], name: str) -> Architecture:
    """
    Describe Nomic BERT, with rotary positions, and experts in every n-th layer.

    The MLP can be gated or plain.

    The matrices of all experts of a layer are one weight. TP divides this weight, but expert
    parallelism does not (NomicMoE). The default length is `max_trained_positions`, but longer
    contexts are accepted.
    """
    fields = Fields(config, name)
    hidden, heads = fields.whole("n_embd"), fields.whole("n_head", "num_attention_heads")
    inner, head_dim = fields.whole("n_inner"), hidden // max(heads, 1)
    bias, every = fields.flag("qkv_proj_bias"), fields.whole("moe_every_n_layers", default=0)
    attend = attention(hidden, heads, heads, head_dim, bias=bias, out_bias=bias)
    if fields.text("activation_function") == "swiglu":
        mlp = gated_mlp(hidden, inner, bias=bias)
    else:
        mlp = plain_mlp(hidden, inner, bias=bias)
    layers = []
    for number in range(fields.whole("n_layer")):
        chosen = mlp
        if every and number % every == 1:
            experts = fields.whole("num_experts")
            chosen = (
                Weight("mlp.router", experts, hidden, linear=False),
                Weight("mlp.w1", inner, hidden, Split.ROWS, count=experts, linear=False),
                Weight("mlp.w2", hidden, inner, Split.COLUMNS, count=experts, linear=False),
                vector("mlp.bias", hidden),
            )
        layers.append((*attend, *chosen, *_norms(hidden)))
    longest = max_model_len(config)
    length = min(longest, fields.whole("max_trained_positions", default=longest))
    return _encoder(
        fields, layers, _rotary_embedding(fields, hidden, head_dim, longest),
        hidden=hidden, heads=heads, inner=inner, length=length, longest=longest,
    )  # fmt: skip


_WI_DIVIDED = (0, 32)
"""
The release from which TP divides ModernBERT's `Wi`.

In modernbert.py, `Wi` is a MergedColumnParallelLinear in 0.32.0, and an nn.Linear in 0.23.0. The
releases between them were not read. They are counted like 0.23.0, which needs more memory.
"""


def _modern_bert(config: Mapping[str, Any], name: str, *, scores: bool) -> Architecture:
    """
    Describe ModernBERT, by default without biases. Its first layer has no norm before attention.
    """
    fields = Fields(config, name)
    hidden, heads = fields.whole("hidden_size"), fields.whole("num_attention_heads")
    inner, head_dim = fields.whole("intermediate_size"), hidden // max(heads, 1)
    fields.texts("layer_types")  # marked as read: windows do not change the weights
    biased, normed = fields.flag("attention_bias"), fields.flag("norm_bias")
    first = Weight("mlp.Wi", 2 * inner, hidden, Split.ROWS, divided_since=_WI_DIVIDED)
    weights: tuple[Weight, ...] = (
        *attention(hidden, heads, heads, head_dim, bias=biased, out_bias=biased),
        first,
        Weight("mlp.Wo", hidden, inner, Split.COLUMNS),
        *norm("mlp_norm", hidden, bias=normed),
    )
    if fields.flag("mlp_bias"):
        bias = vector("mlp.Wi.bias", 2 * inner, Split.ROWS)
        weights += (replace(bias, divided_since=_WI_DIVIDED), vector("mlp.Wo.bias", hidden))
    following = (*weights, *norm("attn_norm", hidden, bias=normed))
    words = Weight("tok_embeddings", fields.whole("vocab_size"), hidden, Split.VOCABULARY,
                   linear=False)  # fmt: skip
    length = max_model_len(config)
    parts = [
        Part("embedding", (words, *norm("norm", hidden, bias=normed)), StagePlacement.FIRST),
        Part("norm", norm("final_norm", hidden, bias=normed), StagePlacement.LAST),
        rotary(length, head_dim, tables=2),  # one table for all tokens, and one for windows
    ]
    if scores:
        head = (
            Weight("head.dense", hidden, hidden, linear=False),
            *norm("head.norm", hidden, bias=normed),
            *((vector("head.dense.bias", hidden),) if fields.flag("classifier_bias") else ()),
            *dense("classifier", label_rows(fields), hidden),
        )
        parts.append(Part("score", head, StagePlacement.LAST))
    layers = (weights, *(following,) * (fields.whole("num_hidden_layers") - 1))
    return _encoder(fields, layers, parts, hidden=hidden, heads=heads, inner=inner, length=length)


def _score(fields: Fields, hidden: int) -> tuple[Weight, ...]:
    """Return a scoring head, which has a dense layer, and a matrix with one row for each label."""
    return (*dense("pooler.dense", hidden, hidden), *_labels(fields, hidden))


def _labels(fields: Fields, hidden: int) -> tuple[Weight, ...]:
    """Return a matrix with one row for each label, for the classification of each token."""
    return dense("classifier", label_rows(fields), hidden)


def _words(fields: Fields, hidden: int) -> tuple[Weight, ...]:
    """
    Return BERT's masked-language-model head, with which SPLADE's vectors have a number for each
    word of the vocabulary.
    """
    return (
        *dense("mlm_head.dense", hidden, hidden, dtype=None),
        *norm("mlm_head.layer_norm", hidden, bias=True),
        *dense("mlm_head.decoder", fields.whole("vocab_size"), hidden, dtype=None),
    )


def _m3(fields: Fields, hidden: int) -> tuple[Weight, ...]:  # noqa: ARG001  # a head's form
    """
    Return the layers with which BGE-M3 computes the sparse vector and the vector of each token.
    """
    return (
        *dense("sparse_linear", 1, hidden),
        *dense("colbert_linear", hidden, hidden),
    )


BUILDERS: dict[str, Callable[[Mapping[str, Any]], Architecture]] = {
    **{
        name: partial(_bert, name=name, head=head, offset=offset)
        for name, head, offset in (
            ("BertModel", None, False),
            ("BertForSequenceClassification", _score, False),
            ("BertForTokenClassification", _labels, False),
            ("BertForMaskedLM", _words, False),
            ("BertSpladeSparseEmbeddingModel", _words, False),
            ("HF_ColBERT", token_vectors, False),
            ("RobertaModel", None, True),
            ("RobertaForMaskedLM", None, True),
            ("RobertaForSequenceClassification", _score, True),
            ("RobertaForTokenClassification", _labels, True),
            ("XLMRobertaModel", None, True),
            ("XLMRobertaForSequenceClassification", _score, True),
            ("XLMRobertaForTokenClassification", _labels, True),
            ("BgeM3EmbeddingModel", _m3, True),
        )
    },
    **{
        name: partial(_gte, name=name, scores=scores)
        for name, scores in (
            ("GteModel", False),
            ("GteNewModel", False),
            ("GteNewForSequenceClassification", True),
        )
    },
    **{
        name: partial(_modern_bert, name=name, scores=scores)
        for name, scores in (
            ("ModernBertModel", False),
            ("ModernBertForSequenceClassification", True),
            ("ModernBertForTokenClassification", True),
        )
    },
    "NomicBertModel": partial(_nomic_bert, name="NomicBertModel"),
}
"""The builder of each architecture, by its name in `architectures`."""
