"""What a model is asked for, by the classes that vLLM 0.32 registers and the files beside them."""

from __future__ import annotations

from typing import Any

import pytest

from gpufleet.sizing.model_kinds import label_count, read_kind
from tests.support.rows import each_row

MODULES = [{"idx": 0, "type": "sentence_transformers.models.Transformer", "path": ""}]
THREE = {"id2label": {"0": "a", "1": "b", "2": "c"}}
ONE = {"id2label": {"0": "LABEL_0"}}


@each_row(
    ("name", "more", "kind"),
    [
        ("LlamaForCausalLM", {}, "generate"),
        ("Qwen3VLMoeForConditionalGeneration", {}, "generate"),
        ("ChatGLMModel", {}, "generate"),
        ("BertModel", {}, "embed"),
        ("XLMRobertaModel", {}, "embed"),
        ("NomicBertModel", {}, "embed"),
        ("Gemma3TextModel", {}, "embed"),
        ("BgeM3EmbeddingModel", {}, "embed"),
        ("BertForSequenceClassification", ONE, "rerank"),
        ("XLMRobertaForSequenceClassification", {"num_labels": 1}, "rerank"),
        ("ModernBertForSequenceClassification", THREE, "classify"),
        ("Qwen3ForSequenceClassification", {}, "classify"),
        (
            "Qwen3ForSequenceClassification",
            {"classifier_from_token": ["no", "yes"], "is_original_qwen3_reranker": True},
            "rerank",
        ),
        ("JinaVLForRanking", {}, "rerank"),
        ("Qwen2ForRewardModel", {}, "reward"),
        ("Qwen2ForProcessRewardModel", {}, "reward"),
        ("WhisperForConditionalGeneration", {}, "transcribe"),
        ("VoxtralForConditionalGeneration", {}, "generate"),
        ("HF_ColBERT", {}, None),
        ("BertForTokenClassification", {}, None),
        ("MyOwnNetwork", {}, None),
    ],
)
def test_a_class_says_what_it_is_asked_for_or_that_it_does_not_say(
    name: str, more: dict[str, Any], kind: str | None
) -> None:
    assert read_kind({"architectures": [name], **more}).kind == kind


def test_a_decoder_beside_a_modules_json_is_an_embedder() -> None:
    """Qwen3-Embedding has the class of a chat model."""
    found = read_kind({"architectures": ["Qwen3ForCausalLM"]}, MODULES)
    assert found.kind == "embed"
    assert found.converts
    assert "modules.json" in found.why


def test_a_classifier_stays_one_beside_a_modules_json() -> None:
    """Cross-encoders of sentence-transformers have that file, too."""
    config = {"architectures": ["BertForSequenceClassification"], **ONE}
    assert read_kind(config, MODULES).kind == "rerank"


@pytest.mark.parametrize("config", [{}, {"architectures": []}, {"architectures": None}])
def test_without_a_class_nothing_is_known_and_anything_may_be_declared(
    config: dict[str, Any],
) -> None:
    found = read_kind(config)
    assert found.kind is None
    assert len(found.possible) == 6


@each_row(
    ("config", "count"),
    [
        ({}, 2),  # transformers' default
        ({"num_labels": 1}, 1),
        (THREE, 3),
        ({"method": "from_2_way_softmax", "classifier_from_token": ["no", "yes"]}, 1),
        ({"method": "no_post_processing", "classifier_from_token": ["a", "b", "c"]}, 3),
    ],
)
def test_labels_are_counted_as_vllm_counts_them(config: dict[str, Any], count: int) -> None:
    assert label_count(config) == count
