"""`params.json` is sized as the config.json of the same model is."""

from __future__ import annotations

import json

import pytest

from gpufleet.errors import FleetError
from gpufleet.sizing import checkpoint_reader
from gpufleet.sizing.architectures.description import describe
from gpufleet.sizing.mistral_format import config_of
from tests.support.checkout import ROOT
from tests.support.rows import each_row

# Mistral 7B v0.3, as its params.json has it; Mixtral 8x7B has experts besides.
MISTRAL = {
    "dim": 4096, "n_layers": 32, "head_dim": 128, "hidden_dim": 14336, "n_heads": 32,
    "n_kv_heads": 8, "norm_eps": 1e-05, "vocab_size": 32768, "rope_theta": 1000000.0,
}  # fmt: skip
MIXTRAL = {**MISTRAL, "vocab_size": 32000, "moe": {"num_experts_per_tok": 2, "num_experts": 8}}
MINISTRAL = {
    "dim": 3072, "n_layers": 26, "head_dim": 128, "hidden_dim": 9216, "n_heads": 32,
    "n_kv_heads": 8, "norm_eps": 1e-05, "vocab_size": 131072, "tied_embeddings": True,
    "max_position_embeddings": 262144,
    "yarn": {"original_max_position_embeddings": 16384, "factor": 16, "apply_scale": False,
             "beta": 32, "alpha": 1},
    "vision_encoder": {
        "hidden_size": 1024, "num_channels": 3, "image_size": 1540, "patch_size": 14,
        "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "rope_theta": 10000.0, "spatial_merge_size": 2, "mm_projector_id": "patch_merge",
        "adapter_bias": False,
    },
}  # fmt: skip
LARGE = {
    **MISTRAL, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64, "v_head_dim": 128,
    "moe": {"num_experts": 128, "first_k_dense_replace": 3, "route_every_n": 1,
            "num_shared_experts": 1, "expert_hidden_dim": 4096, "num_experts_per_tok": 4},
}  # fmt: skip


def described(folder, params):
    (folder / "params.json").write_text(json.dumps(params))
    return describe(checkpoint_reader.read(str(folder)))


def published(name):
    found = json.loads((ROOT / f"tests/data/models/mistralai--{name}.json").read_text())
    return found["published"]["parameters"]


@each_row(("params", "name"), [(MISTRAL, "Mistral-7B-v0.3"), (MIXTRAL, "Mixtral-8x7B-v0.1")])
def test_a_checkpoint_has_as_many_numbers_as_are_published(tmp_path, params, name):
    assert described(tmp_path, params).architecture.parameters == published(name)


def test_an_image_encoder_is_counted_as_in_the_other_format(tmp_path):
    recorded = json.loads(
        (ROOT / "tests/data/models/mistralai--Ministral-3-3B-2512.json").read_text()
    )
    other = tmp_path / "config.json"
    other.write_text(json.dumps(recorded["config"]))
    hugging_face = describe(checkpoint_reader.read(str(other))).architecture
    other.unlink()

    found = described(tmp_path, MINISTRAL).architecture

    assert found.parameters == hugging_face.parameters
    assert (found.kv_heads, found.max_model_len) == (8, hugging_face.max_model_len)


def test_what_is_quantized_says_so(tmp_path):
    params = {**MISTRAL, "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}}

    assert described(tmp_path, params).quantization.method == "fp8"
    assert described(tmp_path, MISTRAL).quantization is None


def test_a_list_of_windows_is_one_of_each_layer():
    config = config_of({**MISTRAL, "sliding_window": [None, 4096, 4096, 4096]}, "m")

    assert config["sliding_window"] == 4096
    assert config["layer_types"] == (["full_attention"] + ["sliding_attention"] * 3) * 8


@each_row(
    ("params", "name", "experts"),
    [
        (MISTRAL, "MistralForCausalLM", 0),
        (MIXTRAL, "MixtralForCausalLM", 8),
        (LARGE, "MistralLarge3ForCausalLM", 128),
        (MINISTRAL, "PixtralForConditionalGeneration", 0),
    ],
)
def test_the_class_follows_from_what_the_file_has(tmp_path, params, name, experts):
    found = described(tmp_path, params).architecture

    assert (found.name, found.experts) == (name, experts)


@each_row(
    ("params", "sentence"),
    [
        ({"dim": 4096}, "params.json has no `n_layers`"),
        ({**MISTRAL, "quantization": {"qformat_weight": "nf4"}}, "`quantization` that vLLM does"),
        ({**MISTRAL, "multimodal": {"whisper_model_args": {"dim": 1}}}, "has an audio encoder"),
    ],
)
def test_what_is_not_known_of_it_is_a_sentence(tmp_path, params, sentence):
    with pytest.raises(FleetError, match=sentence):
        described(tmp_path, params)


def test_config_json_counts_where_both_are_there(tmp_path):
    (tmp_path / "params.json").write_text(json.dumps(MIXTRAL))
    (tmp_path / "config.json").write_text(json.dumps(config_of(MISTRAL, "m")))

    assert describe(checkpoint_reader.read(str(tmp_path))).architecture.experts == 0


def test_the_file_itself_may_be_named(tmp_path):
    file = tmp_path / "params.json"
    file.write_text(json.dumps(MISTRAL))
    (tmp_path / "consolidated.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 14_496_047_104}, "weight_map": {}})
    )

    found = describe(checkpoint_reader.read(str(file)))

    assert found.architecture.parameters == published("Mistral-7B-v0.3")
    assert found.stored_bytes == 14_496_047_104
