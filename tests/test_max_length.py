"""The longest context is what each release derives, which changed twice."""

import json
from pathlib import Path

import pytest

from gpufleet.architecture.max_length import max_model_len

MODELS = Path(__file__).parent / "data" / "models"


@pytest.mark.parametrize(
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


@pytest.mark.parametrize(
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
