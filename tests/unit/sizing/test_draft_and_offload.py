"""Draft models, layers in the node's memory and lengthened contexts are counted, or named."""

from dataclasses import replace

import pytest

from gpufleet.errors import FleetError
from gpufleet.sizing.architectures.description import ModelFiles, describe
from gpufleet.sizing.architectures.overrides import with_overrides
from gpufleet.sizing.fit import size
from tests.support.rows import each_row
from tests.unit.sizing.test_fit import GIB, model, options

TARGET, DRAFT = "meta-llama--Meta-Llama-3.1-8B", "meta-llama--Llama-3.2-1B"
ASKED = {"vllm": (0, 32, 0), "max_model_len": 8192, "speculative_tokens": 3}


def test_a_draft_model_of_its_own_takes_weights_and_cache():
    """The draft's weights beside the target's, and its layers' tokens beside the target's."""
    draft = model(DRAFT)
    with_draft = replace(model(TARGET), draft=draft)
    asked = options(**ASKED, draft_model="/srv/draft", speculative_method="draft_model")
    found, plain = (
        size(with_draft, asked),
        size(model(TARGET), options(**ASKED | {"speculative_tokens": 0})),
    )
    alone = size(draft, options(**ASKED | {"speculative_tokens": 0}))

    assert found.fits
    own = found.weights_bytes_per_gpu - plain.weights_bytes_per_gpu
    assert own == alone.weights_bytes_per_gpu
    assert found.kv_bytes_per_token_per_gpu == (
        plain.kv_bytes_per_token_per_gpu + alone.kv_bytes_per_token_per_gpu
    )


@each_row(
    ("method", "draft", "why"),
    [
        ("draft_model", "it could not be read", "it could not be read"),
        (None, None, "draft model /srv/draft are not counted"),
        ("eagle3", None, "does not know which parts eagle3 shares with the target"),
        ("medusa", None, "which parts medusa shares"),
    ],
)
def test_a_draft_model_that_is_not_known_is_named_and_is_no_fit(method, draft, why):
    asked = options(**ASKED, draft_model="/srv/draft", speculative_method=method)
    found = size(replace(model(TARGET), draft=draft), asked)

    assert (found.fits, found.confidence) == (False, "unknown")
    assert "/srv/draft" in found.reasons[-1]
    assert why in found.reasons[-1]


@each_row("method", ["ngram", "suffix"])
def test_guessing_without_a_model_takes_nothing_more(method):
    found = size(model(TARGET), options(**ASKED, speculative_method=method))

    assert found.fits
    assert not found.notes


def test_layers_in_the_nodes_memory_leave_room_on_the_gpu():
    """Llama 3.1 8B starts on a 15 GiB card with 8 GiB of its layers outside, and a note."""
    small = {"gpu_memory_gib": 15.0, "vllm": (0, 32, 0), "max_model_len": 8192}
    inside = size(model(TARGET), options(**small))
    outside = size(model(TARGET), options(**small, cpu_offload_gib=8.0))

    assert not inside.fits
    assert outside.fits
    assert inside.weights_bytes_per_gpu - outside.weights_bytes_per_gpu == 8 * GIB
    assert "node's memory" in outside.notes[0]


def test_no_more_than_the_layers_leaves_the_gpu():
    """Embedding and head stay: 2 x 128256 x 4096 numbers of two bytes."""
    found = size(model(TARGET), options(vllm=(0, 32, 0), cpu_offload_gib=100.0))

    assert found.weights_bytes_per_gpu >= 2 * 2 * 128256 * 4096


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


@each_row(
    ("overrides", "vllm", "longest"),
    [
        ({}, (0, 29, 0), 32768),
        ({"rope_parameters": YARN}, (0, 29, 0), 131072),
        ({"rope_scaling": YARN}, (0, 9, 2), 131072),
        ({"rope_parameters": YARN}, (0, 32, 0), 32768),
        ({"rope_parameters": YARN, "max_position_embeddings": 131072}, (0, 32, 0), 131072),
        ({"max_position_embeddings": 65536}, (0, 32, 0), 65536),
    ],
)
def test_a_context_that_is_lengthened_by_overrides_is_sized(overrides, vllm, longest):
    """As each release derives it: from 0.30 on YaRN's factor alone lengthens nothing."""
    config = {**model("Qwen--Qwen3-8B").config, "max_position_embeddings": 32768}
    described = describe(with_overrides(ModelFiles(config), overrides))

    assert described.architecture.longest_length(vllm) == longest
    found = size(described, options(gpu="H200", vllm=vllm, max_model_len=longest))
    assert found.fits, found.reasons


@each_row(
    ("vllm", "advice"),
    [
        ((0, 10, 2), "with `rope_scaling` in `hf-overrides`"),
        ((0, 29, 0), "with `rope_parameters` in `hf-overrides`"),
        ((0, 32, 0), "with `rope_parameters` and `max_position_embeddings` (this"),
    ],
)
def test_the_advice_for_a_length_beyond_the_model_is_what_helps(vllm, advice):
    found = size(model(TARGET), options(vllm=vllm, max_model_len=1_000_000))

    assert advice in found.reasons[0]


def test_an_override_of_a_part_changes_what_it_names_of_that_part():
    files = ModelFiles({"text_config": {"a": 1, "b": 2}, "rope_scaling": {"factor": 2.0}})
    changed = with_overrides(files, {"text_config": {"b": 3}, "rope_parameters": {"factor": 4.0}})

    assert changed.config == {
        "text_config": {"a": 1, "b": 3},
        "rope_parameters": {"factor": 4.0},
    }
    assert with_overrides(files, {}) is files


@each_row(
    ("key", "value"),
    [
        ("text_config", None),
        ("rope_parameters", {"factor": 4.0}),
        ("quantization_config", {"quant_method": "fp8"}),
        ("id2label", {"0": "yes"}),
    ],
)
def test_an_override_of_anything_else_takes_its_place_whole(key, value):
    files = ModelFiles({key: {"a": 1, "b": 2}})

    assert with_overrides(files, {key: value}).config == {key: value}


@each_row(
    ("changes", "refused"),
    [
        ({"speculative_method": "draft_model"}, True),
        ({"speculative_method": None}, True),
        ({"speculative_method": None, "draft_model": "org/EAGLE-small"}, False),
        ({"speculative_method": "draft_model", "mixed_vocabularies": True}, False),
        ({"speculative_method": "draft_model", "vllm": (0, 14, 0)}, False),
    ],
)
def test_a_draft_of_another_vocabulary_is_refused(changes, refused):
    """Qwen 3 0.6B knows 151,936 tokens, and Llama 3.1 128,256."""
    asked = options(**ASKED | {"draft_model": "/srv/draft"} | changes)
    found = size(replace(model(TARGET), draft=model("Qwen--Qwen3-0.6B")), asked)

    assert any("a vocabulary of 151936 tokens" in reason for reason in found.reasons) is refused
    assert found.fits is not refused


def test_a_name_that_quantizes_nothing_is_refused_with_those_that_do():
    with pytest.raises(FleetError, match=r"only with fp8_per_tensor, fp8_per_block"):
        size(model(TARGET), options(vllm=(0, 32, 0), quantization="fp8"))
