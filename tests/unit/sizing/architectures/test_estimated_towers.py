"""A tower that is not known is estimated with an honest error, or named as not counted."""

from gpufleet.sizing.architectures.description import ModelFiles, describe
from gpufleet.sizing.architectures.registry import architecture
from gpufleet.sizing.fit import size
from tests.unit.sizing.test_fit import GIB, model, options

TEXT = {
    "model_type": "qwen3",
    "hidden_size": 2048,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "intermediate_size": 6144,
    "vocab_size": 100000,
    "max_position_embeddings": 8192,
}
TOWER = {"hidden_size": 1024, "num_hidden_layers": 24, "intermediate_size": 4096}


def bee(**tower):
    return {
        "architectures": ["BeeForConditionalGeneration"],
        "text_config": TEXT,
        **({"vision_config": tower} if tower else {}),
    }


def sized(config, **more):
    return size(describe(ModelFiles(config)), options(vllm=(0, 32, 0), **more))


def test_a_gate_is_a_third_matrix_of_each_layer():
    plain, gated = (architecture(bee(**TOWER, hidden_act=each)) for each in ("gelu", "silu"))

    assert gated.parameters - plain.parameters == 24 * (4096 * 1024 + 4096)


def test_an_estimated_tower_counts_with_a_third_of_it_as_error():
    """Towers were off by 10 to 31 %: the stated error covers that, beside the start's own."""
    found = sized(bee(**TOWER))
    known = sized({**TEXT, "architectures": ["Qwen3ForCausalLM"]})

    tower = 2 * 24 * (4 * 1024 * 1024 + 2 * 4096 * 1024)
    assert found.estimate_error_bytes_per_gpu > 0.3 * tower
    assert found.estimate_error_bytes_per_gpu > known.estimate_error_bytes_per_gpu


def test_a_tower_of_which_the_config_says_nothing_makes_the_verdict_unknown():
    found = sized(bee())

    assert (found.fits, found.confidence) == (False, "unknown")
    assert "BeeForConditionalGeneration other than the text part is not counted" in found.reasons[0]
    assert sized(bee(), language_model_only=True).fits


def test_a_known_tower_keeps_its_small_error():
    found = size(model("google--gemma-3-27b-it"), options(gpu="H200", vllm=(0, 32, 0)))

    # That of a start with images; 35 % of all the weights, were it estimated, would be 18 GiB.
    assert found.estimate_error_bytes_per_gpu < 4 * GIB
