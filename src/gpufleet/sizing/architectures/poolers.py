"""
Describe decoders that embed, classify or score, with layers in place of the head. Pure.

For some of these names, vLLM converts the generating class to a pooling class: with `--runner
auto`, the suffix of the name means `--convert classify`. The models have a KV cache of every token
like the decoder, except for models in which each token attends to all others. Source:
_SUFFIX_TO_DEFAULTS and head_dtype in vllm/config/model.py, as_seq_cls_model in
model_executor/models/adapters.py, and the classes of the same names in model_executor/models of
0.32.0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from gpufleet.sizing.architectures.building_blocks import vector
from gpufleet.sizing.architectures.components import (
    Architecture,
    Part,
    Split,
    StagePlacement,
    Weight,
)
from gpufleet.sizing.architectures.config_fields import Fields
from gpufleet.sizing.architectures.registry import build_architecture

_HEAD = "float32"
"""Dtype of the layers that a pooling model has in place of the head."""


def label_rows(fields: Fields) -> int:
    """Return the number of labels of a classifier, or 2 if the config does not state it."""
    names = fields.value("id2label")
    return len(names) if isinstance(names, Mapping) else fields.whole("num_labels", default=2)


def dense(
    name: str, rows: int, columns: int, *, bias: bool = True, dtype: str | None = _HEAD
) -> tuple[Weight, ...]:
    """
    Return a linear layer of a pooling head. Every rank has all of it, and it is never quantized.
    """
    made = (Weight(name, rows, columns, linear=False, dtype=dtype),)
    return (*made, replace(vector(f"{name}.bias", rows), dtype=dtype)) if bias else made


def _nothing(fields: Fields, hidden: int) -> tuple[Weight, ...]:  # noqa: ARG001  # a head's form
    """Return no weights, because the model returns its hidden states."""
    return ()


def _score(fields: Fields, hidden: int) -> tuple[Weight, ...]:
    """Return a matrix with one row for each label."""
    return dense("score", label_rows(fields), hidden, bias=False)


def _text_score(fields: Fields, hidden: int) -> tuple[Weight, ...]:
    """Return a matrix with one row for each label in the config's text part."""
    return _score(fields.section("llm_config", "text_config") or fields, hidden)


def _biased_score(fields: Fields, hidden: int) -> tuple[Weight, ...]:
    """Return Jamba's matrix with one row for each label, and a bias if `score_bias` is set."""
    return dense("score", label_rows(fields), hidden, bias=fields.flag("score_bias"))


def _reward(fields: Fields, hidden: int, *, labels: int | None = None) -> tuple[Weight, ...]:
    """Return the two layers of Qwen 2's rewards and Jina's scores. TP divides both layers."""
    rows = labels or label_rows(fields.section("text_config") or fields)
    return (
        Weight("score.0", hidden, hidden, Split.ROWS, linear=False, dtype=_HEAD),
        replace(vector("score.0.bias", hidden, Split.ROWS), dtype=_HEAD),
        Weight("score.2", rows, hidden, Split.COLUMNS, linear=False, dtype=_HEAD),
        replace(vector("score.2.bias", rows), dtype=_HEAD),
    )


def _value_head(fields: Fields, hidden: int) -> tuple[Weight, ...]:  # noqa: ARG001  # a head's form
    """Return InternLM2's reward head: one row."""
    return (Weight("v_head", 1, hidden, Split.COLUMNS, linear=False, dtype=_HEAD),)


def _projector(fields: Fields, hidden: int) -> tuple[Weight, ...]:
    """Return Jina's two layers, which compute the vector of a document from the hidden state."""
    return (
        *dense("projector.0", hidden // 2, hidden, bias=False, dtype=None),
        *dense("projector.2", fields.whole("embedding_size"), hidden // 2, bias=False, dtype=None),
    )


def _linear(fields: Fields, hidden: int) -> tuple[Weight, ...]:
    """Return Voyage's layer, which computes the vector from the hidden state."""
    return dense("linear", fields.whole("num_labels", default=2), hidden, bias=False, dtype=None)


_WIDTHS = ("embedding_dim", "embed_dim", "dims", "dim", "projection_dim", "colbert_dim")


def token_vectors(fields: Fields, hidden: int) -> tuple[Weight, ...]:
    """
    Return the layer that computes a token's vector for late interaction from its hidden state.

    If the config does not state the width, vLLM reads it from the checkpoint. The width is then
    counted as the hidden size, which it does not exceed.
    """
    width = fields.whole(*_WIDTHS, default=0) or hidden
    return dense("custom_text_proj", width, hidden, bias=False)


@dataclass(frozen=True)
class _Pooler:
    """A pooling class that is derived from a generating class."""

    decoder: str
    added: Callable[[Fields, int], tuple[Weight, ...]] = _nothing
    """
    Function that returns the weights in place of the head, from the config and the hidden size.
    """
    keeps_cache: bool = True
    """Whether layers have a KV cache. False if each token attends to all others."""
    keeps_head: bool = False
    """Whether vLLM also loads the decoder's head, although it does not use it."""
    registered: bool = True
    """Whether vLLM has a class of this name. If not, it uses the class of the decoder."""


_POOLERS: dict[str, _Pooler] = {
    **{
        f"{family}ForSequenceClassification": _Pooler(
            f"{family}ForCausalLM", _score, registered=False
        )
        for family in ("Gemma", "Gemma2", "Llama", "Mistral", "Phi3", "Qwen2", "Qwen3", "Qwen3Moe")
    },
    "GPT2ForSequenceClassification": _Pooler("GPT2LMHeadModel", _score),
    "JambaForSequenceClassification": _Pooler("JambaForCausalLM", _biased_score, keeps_head=True),
    "LlamaBidirectionalForSequenceClassification": _Pooler(
        "LlamaForCausalLM", _score, keeps_cache=False
    ),
    "LlamaBidirectionalModel": _Pooler("LlamaForCausalLM", keeps_cache=False),
    "Gemma2Model": _Pooler("Gemma2ForCausalLM"),
    "Gemma3TextModel": _Pooler("Gemma3ForCausalLM", keeps_cache=False),
    "VoyageQwen3BidirectionalEmbedModel": _Pooler("Qwen3ForCausalLM", _linear, keeps_cache=False),
    "Qwen2ForRewardModel": _Pooler("Qwen2ForCausalLM", partial(_reward, labels=1)),
    "Qwen2ForProcessRewardModel": _Pooler("Qwen2ForCausalLM", partial(_reward, labels=2)),
    "InternLM2ForRewardModel": _Pooler("InternLM2ForCausalLM", _value_head),
    "JinaForRanking": _Pooler("Qwen3ForCausalLM", _projector),
    "JinaVLForRanking": _Pooler("Qwen2VLForConditionalGeneration", _reward, keeps_head=True),
    "LlamaNemotronVLForSequenceClassification": _Pooler("LlamaNemotronVLModel", _text_score),
    "ColPaliForRetrieval": _Pooler(
        "PaliGemmaForConditionalGeneration", token_vectors, keeps_head=True
    ),
    "ColQwen3": _Pooler("Qwen3VLForConditionalGeneration", token_vectors, keeps_head=True),
    "OpsColQwen3Model": _Pooler("Qwen3VLForConditionalGeneration", token_vectors, keeps_head=True),
}


def _build(config: Mapping[str, Any], name: str, pooler: _Pooler) -> Architecture:
    """Return the decoder with its pooling layers in place of the head."""
    read = build_architecture(pooler.decoder, {**config, "architectures": [pooler.decoder]})
    fields = Fields(config, name)
    kept = (part for part in read.parts if pooler.keeps_head or part.name != "head")
    added = pooler.added(fields, read.hidden_size)
    parts = (*kept, *((Part("score", added, StagePlacement.LAST),) if added else ()))
    layers = read.layers
    if not pooler.keeps_cache:
        bare = [replace(layer, cache=None, more=()) for layer in layers]
        alike = {layer: layer for layer in bare}
        layers = tuple(alike[layer] for layer in bare)
    name = name if pooler.registered else read.name
    return replace(read, name=name, parts=parts, layers=layers, pooling=True)


def _jina_v5(config: Mapping[str, Any]) -> Architecture:
    """
    Describe Jina Embeddings 5: Qwen 3, or an encoder with Llama's layers if `is_decoder` is false.
    """
    if Fields(config, "JinaEmbeddingsV5Model").flag("is_decoder", default=True):
        pooler = _Pooler("Qwen3ForCausalLM")
    else:
        pooler = _Pooler("LlamaForCausalLM", keeps_cache=False)
    return _build(config, "JinaEmbeddingsV5Model", pooler)


BUILDERS: dict[str, Callable[[Mapping[str, Any]], Architecture]] = {
    **{name: partial(_build, name=name, pooler=pooler) for name, pooler in _POOLERS.items()},
    "JinaEmbeddingsV5Model": _jina_v5,
}
"""The builder of each architecture, by its name in `architectures`."""
