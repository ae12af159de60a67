"""The longest context is what each release derives, which changed twice."""

import json

import pytest

from gpufleet.sizing.architectures.max_length import max_model_len
from gpufleet.sizing.architectures.registry import architecture
from tests.support.checkout import ROOT
from tests.support.rows import each_row

MODELS = ROOT / "tests/data/models"


@each_row(
    ("name", "length"),
    [
        ("meta-llama--Meta-Llama-3.1-8B", 131072),
        ("Qwen--Qwen3-8B", 40960),
        ("Qwen--Qwen3-VL-8B-Instruct", 262144),
        ("deepseek-ai--DeepSeek-V3", 163840),
        ("openai--gpt-oss-120b", 131072),
        ("tiiuae--falcon-40b", 2048),
        ("openai-community--gpt2", 1024),
        ("mosaicml--mpt-7b", 2048),
        ("moonshotai--Kimi-K2.5", 262144),
    ],
)
def test_published_models(name, length):
    """Read from the text part where there is one, under whichever key it is stated."""
    assert max_model_len(json.loads((MODELS / f"{name}.json").read_text())["config"]) == length


@each_row(
    ("scaling", "release", "length"),
    [
        pytest.param({"rope_type": "linear", "factor": 4.0}, (0, 33), 16384, id="linear"),
        pytest.param({"type": "dynamic", "factor": 2.0}, (0, 10), 8192, id="dynamic, old key"),
        pytest.param({"rope_type": "llama3", "factor": 8.0}, (0, 33), 4096, id="llama 3"),
        pytest.param(
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
            (0, 28),
            8192,
            id="yarn from its original length",
        ),
        pytest.param(
            {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
            (0, 30),
            4096,
            id="yarn as stated",
        ),
        pytest.param({"rope_type": "longrope"}, (0, 10, 2), 4096, id="longrope, whole"),
        pytest.param({"rope_type": "longrope"}, (0, 11, 0), 1024, id="longrope, original"),
        pytest.param({"type": "mrope", "mrope_section": [1]}, (0, 33), 4096, id="m-rope"),
        pytest.param({"rope_type": "linear", "factor": None}, (0, 33), 4096, id="null factor"),
    ],
)
def test_rotary_scaling_counts_by_its_kind_and_by_release(scaling, release, length):
    config = {
        "model_type": "x",
        "max_position_embeddings": 4096,
        "original_max_position_embeddings": 1024,
        "rope_scaling": scaling,
    }

    assert max_model_len(config, release) == length


def test_gemma_3_states_the_scaled_length():
    config = {
        "model_type": "gemma3_text",
        "max_position_embeddings": 131072,
        "rope_scaling": {"rope_type": "linear", "factor": 8.0},
    }

    assert max_model_len(config) == 131072


def test_the_smallest_key_counts_and_command_r_has_one_that_wins():
    assert max_model_len({"max_position_embeddings": 8192, "n_positions": 2048}) == 2048
    assert max_model_len({"max_position_embeddings": 8192, "model_max_length": 131072}) == 131072


def test_a_config_without_any_key_has_the_default():
    assert max_model_len({}) == 2048


def test_more_may_be_asked_of_longrope_than_it_takes_untold():
    """Phi-3.5-mini starts with 4,096 tokens since 0.11, and serves 131,072 where told to."""
    read = json.loads((MODELS / "microsoft--Phi-3.5-mini-instruct.json").read_text())["config"]
    model = architecture(read)

    assert model.default_length((0, 19, 0)) == 4096
    assert model.default_length((0, 10, 2)) == 131072
    assert model.longest_length((0, 19, 0)) == 131072


def test_a_release_counts_yarn_as_it_did():
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}
    read = json.loads((MODELS / "Qwen--Qwen3-8B.json").read_text())["config"]
    model = architecture({**read, "max_position_embeddings": 32768, "rope_scaling": yarn})

    assert (model.longest_length((0, 28)), model.longest_length((0, 30))) == (131072, 32768)


def test_a_config_without_a_length_has_its_class_s():
    """Gemma 3's text parts leave out what transformers' class has."""
    read = json.loads((MODELS / "google--gemma-3-4b-it.json").read_text())["config"]
    text = {key: value for key, value in read["text_config"].items() if "position" not in key}

    assert architecture({**read, "text_config": text}).default_length((0, 19)) == 131072
