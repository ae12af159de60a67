"""
Encoders that embed or score: weights, and no KV cache.  Pure.

Every token sees all others at once, so nothing is kept. Source: bert.py and roberta.py in vLLM's
model_executor/models of 0.31.0. Encoders with rotary positions, or windows, are refused by name in
`unsized.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from gpufleet.sizing.architectures.building_blocks import (
    attention,
    default_dtype,
    norm,
    plain_mlp,
    vector,
)
from gpufleet.sizing.architectures.components import (
    Architecture,
    Layer,
    Part,
    Split,
    Weight,
    Where,
)
from gpufleet.sizing.architectures.config_fields import Fields
from gpufleet.sizing.architectures.max_length import max_model_len


def _bert(config: Mapping[str, Any], name: str, *, scores: bool, offset: bool) -> Architecture:
    """
    Return BERT or RoBERTa.

    `scores`: with a dense layer and a row for each label. `offset`: the first positions, up to the
    padding's, are of no token.
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
    parts = [Part("embedding", (*tables, *normed), Where.FIRST)]
    if scores:
        parts.append(Part("score", _score(fields, hidden), Where.LAST))
    length = max_model_len(config)
    if offset:
        length -= fields.whole("pad_token_id", default=1) + 1
    return Architecture(
        name=name,
        hidden_size=hidden,
        vocab_size=vocab,
        heads=heads,
        kv_heads=heads,
        layers=(Layer(weights),) * layers,
        parts=tuple(parts),
        max_model_len=length,
        dtype=default_dtype(fields),
        intermediate_size=inner,
        lengths=(((0,), length, length),),
        pooling=True,
        pipeline=False,
        prefix="encoder.layer.",
    )


def _score(fields: Fields, hidden: int) -> tuple[Weight, ...]:
    names = fields.value("id2label")
    labels = len(names) if isinstance(names, Mapping) else fields.whole("num_labels", default=2)
    return (
        Weight("pooler.dense", hidden, hidden, linear=False),
        vector("pooler.dense.bias", hidden),
        Weight("classifier", labels, hidden, linear=False),
        vector("classifier.bias", labels),
    )


BUILDERS: dict[str, Callable[[Mapping[str, Any]], Architecture]] = {
    name: partial(_bert, name=name, scores=scores, offset=offset)
    for name, scores, offset in (
        ("BertModel", False, False),
        ("BertForSequenceClassification", True, False),
        ("RobertaModel", False, True),
        ("RobertaForSequenceClassification", True, True),
        ("XLMRobertaModel", False, True),
        ("XLMRobertaForSequenceClassification", True, True),
    )
}
"""Each name that `architectures` may have, with what reads such a config."""
