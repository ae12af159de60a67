"""A config.json says what a model is made of; what it does not say is refused, never guessed."""

import importlib
import json
import re
from collections import Counter
from contextlib import suppress

import pytest

from gpufleet.errors import FleetError
from gpufleet.sizing.architectures.components import FullCache, Split, StagePlacement, WindowCache
from gpufleet.sizing.architectures.quantization import quantization
from gpufleet.sizing.architectures.registry import FAMILIES, architecture, builders
from gpufleet.sizing.rank_weights import Sharding
from gpufleet.sizing.weights import weight_bytes
from tests.support.checkout import ROOT
from tests.support.known_models import PAGE, page
from tests.support.rows import each_row

MODELS = ROOT / "tests/data/models"
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "num_hidden_layers": 6,
    "intermediate_size": 1024,
    "vocab_size": 1000,
    "max_position_embeddings": 4096,
    "torch_dtype": "bfloat16",
}


def config(name):
    return json.loads((MODELS / f"{name}.json").read_text())["config"]


def weight(model, name):
    """Return the first layer's weight of this name."""
    return next(each for each in model.layers[0].weights if each.name == name)


def test_llama_by_hand():
    """Every matrix and norm of a small Llama, counted by hand."""
    model = architecture(LLAMA)

    attention = 512 * 512 * 2 + 2 * (2 * 64) * 512
    layer = attention + 3 * 512 * 1024 + 2 * 512
    assert model.parameters == 6 * layer + 2 * 1000 * 512 + 512
    assert model.layers[0].cache == FullCache(2, 64)
    assert (model.heads, model.kv_heads, model.hidden_size, model.max_model_len) == (
        8,
        2,
        512,
        4096,
    )


def test_a_tied_head_has_no_weight_of_its_own():
    tied = architecture({**LLAMA, "tie_word_embeddings": True})

    assert tied.tied
    assert tied.parameters == architecture(LLAMA).parameters - 1000 * 512
    assert all(part.where is not StagePlacement.LAST or part.name != "head" for part in tied.parts)


@pytest.mark.parametrize(
    ("keys", "more"),
    [
        ({"attention_bias": True}, 512 + 2 * 128 + 512),
        ({"mlp_bias": True}, 2 * 1024 + 512),
        ({"head_dim": 128}, 512 * 512 * 2 + 2 * 128 * 512),
        ({"num_key_value_heads": 8}, 2 * 6 * 64 * 512),
    ],
)
def test_keys_that_add_weights_to_each_layer(keys, more):
    assert architecture({**LLAMA, **keys}).parameters == architecture(LLAMA).parameters + 6 * more


def test_how_each_matrix_is_divided():
    model = architecture(LLAMA)

    assert weight(model, "self_attn.q_proj").split is Split.ROWS
    assert weight(model, "self_attn.k_proj").split is Split.HEADS
    assert weight(model, "self_attn.o_proj").split is Split.COLUMNS
    assert weight(model, "mlp.down_proj").split is Split.COLUMNS
    assert weight(model, "input_layernorm").split is Split.NONE


def test_a_window_holds_for_all_layers_unless_they_have_their_own():
    mistral = {**LLAMA, "architectures": ["MistralForCausalLM"], "sliding_window": 1024}
    phi = {**LLAMA, "architectures": ["Phi3ForCausalLM"], "sliding_window": 1024}
    kinds = ["sliding_attention", "full_attention"] * 3

    assert {layer.cache for layer in architecture(phi).layers} == {WindowCache(2, 64, 1024)}
    assert {layer.cache for layer in architecture(mistral).layers} == {WindowCache(2, 64, 1024)}
    own = architecture({**mistral, "layer_types": kinds}).layers
    assert [isinstance(layer.cache, WindowCache) for layer in own] == [True, False] * 3


def test_a_window_that_is_switched_off_is_none():
    """Qwen 2.5's configs have a window and `use_sliding_window` false."""
    model = architecture(
        {
            **LLAMA,
            "architectures": ["Qwen2ForCausalLM"],
            "sliding_window": 1024,
            "use_sliding_window": False,
        }
    )

    assert {layer.cache for layer in model.layers} == {FullCache(2, 64)}


def test_layers_of_one_kind_are_one_object():
    """Sizing weighs each kind once, which is what makes it fast."""
    model = architecture(config("meta-llama--Meta-Llama-3.1-405B"))

    assert len({id(layer) for layer in model.layers}) == 1


def test_rotary_tables_grow_with_what_scales_the_context():
    """YaRN by its factor, M-RoPE four times, LongRoPE by a second table."""

    def rows(**keys):
        return [
            (weight.rows, weight.columns)
            for part in architecture({**LLAMA, **keys}).parts
            if part.name == "rotary"
            for weight in part.weights
        ]

    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}
    assert rows() == [(4096, 64)]
    assert rows(rope_scaling=yarn) == [(16384, 64)]
    assert rows(rope_scaling={"type": "mrope", "mrope_section": [8, 12, 12]}) == [(16384, 64)]
    assert rows(partial_rotary_factor=0.5) == [(4096, 32)]
    longrope = {"rope_type": "longrope"}
    assert rows(rope_scaling=longrope, original_max_position_embeddings=2048) == [(6144, 64)]


def test_an_unknown_architecture_is_refused_with_near_names():
    with pytest.raises(FleetError, match=r"LlamaForCausalML .*similar names.*LlamaForCausalLM"):
        architecture({**LLAMA, "architectures": ["LlamaForCausalML"]})


def test_a_config_without_architectures_is_refused():
    with pytest.raises(FleetError, match="no `architectures`"):
        architecture({"model_type": "llama"})


@pytest.mark.parametrize("name", ["Terratorch", "MllamaForConditionalGeneration"])
def test_what_has_no_size_in_tokens_is_refused_by_name(name):
    with pytest.raises(FleetError, match=name):
        architecture({**LLAMA, "architectures": [name]})


@pytest.mark.parametrize(
    "key", ["hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size"]
)
def test_a_missing_key_is_named(key):
    """A size is never made of a default that the config does not state."""
    with pytest.raises(FleetError, match=f"no `{key}`"):
        architecture({each: value for each, value in LLAMA.items() if each != key})


@each_row("value", ["many", -1, 1.5, True, [1], {}])
def test_a_number_of_another_kind_is_refused(value):
    with pytest.raises(FleetError, match="`hidden_size` is"):
        architecture({**LLAMA, "hidden_size": value})


@each_row(
    ("wrong", "says"),
    [
        (
            {"num_attention_heads": 0},
            "the 0 attention heads cannot be divided evenly among the 2 KV heads",
        ),
        (
            {"num_key_value_heads": 3},
            "the 8 attention heads cannot be divided evenly among the 3 KV heads",
        ),
        (
            {"num_key_value_heads": 16},
            "the 8 attention heads cannot be divided evenly among the 16 KV heads",
        ),
        ({"architectures": "LlamaForCausalLM"}, "is the text 'LlamaForCausalLM', but must be"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": "4.0"}},
            "`factor` in config.json or --hf-overrides is '4.0', but must be a number",
        ),
        ({"rope_scaling": {"rope_type": "yarn", "original_max_position_embeddings": [1]}}, None),
    ],
)
def test_what_no_model_has_is_refused_in_our_words(wrong, says):
    """No word of Python's, whatever the value: "invalid literal", "not subscriptable"."""
    with pytest.raises(FleetError) as error:
        architecture({**LLAMA, **wrong})
    assert says is None or says in str(error.value)
    assert not re.search("literal|object|subscript|iterable|operand|NoneType", str(error.value))


@each_row("name", sorted(builders()))
def test_no_builder_breaks_on_a_config_that_says_nothing(name):
    """Whatever is missing, an operator reads a sentence."""
    with pytest.raises(FleetError):
        architecture({"architectures": [name]})


def keys_of(read, above=()):
    """Yield the path of every key of a config, its parts' too."""
    for key, value in read.items():
        yield (*above, key)
        if isinstance(value, dict):
            yield from keys_of(value, (*above, key))


def changed(read, path, value):
    """Return the config with this key's value, MISSING for without it."""
    rest = {key: each for key, each in read.items() if key != path[0]}
    if path[1:]:
        return {**rest, path[0]: changed(read[path[0]], path[1:], value)}
    return rest if value is MISSING else {**rest, path[0]: value}


MISSING = object()


@each_row(
    "name",
    [
        "Qwen--Qwen2.5-VL-7B-Instruct",
        "RedHatAI--Llama-4-Scout-17B-16E-Instruct-FP8-dynamic",
        "deepseek-ai--DeepSeek-V2-Lite",
        "google--gemma-3-4b-it",
        "openai--gpt-oss-20b",
    ],
)
def test_a_config_with_a_wrong_value_is_read_or_refused_by_sentence(name):
    """Whichever key has whatever value: never another exception."""
    read = config(name)
    for path in keys_of(read):
        for value in (MISSING, None, "x", 0, -1, 1.5, [], {}, [1, "a", None]):
            with suppress(FleetError):
                wrong = changed(read, path, value)
                model, said = architecture(wrong), quantization(wrong)
                weight_bytes(model, said, Sharding(2, 2), vllm=(0, 19, 0))


def test_a_dtype_that_is_not_loaded_is_refused():
    with pytest.raises(FleetError, match="`torch_dtype` is 'float8'"):
        architecture({**LLAMA, "torch_dtype": "float8"})
    assert architecture({**LLAMA, "torch_dtype": "float32"}).dtype == "bfloat16"


def test_a_wrapper_has_its_text_part_and_a_tower():
    """Qwen3-VL-8B: 8,767,123,696 numbers, 576 million of them in the tower."""
    model = architecture(config("Qwen--Qwen3-VL-8B-Instruct"))
    tower = next(part for part in model.parts if part.name == "tower")

    assert model.parameters == 8_767_123_696
    assert tower.where is StagePlacement.FIRST
    assert (tower.everywhere, tower.everywhere_until) == (True, (0, 33))
    assert sum(each.parameters for each in tower.weights) == 576_388_336
    assert model.multimodal
    assert model.notes == ()
    assert model.name == "Qwen3VLForConditionalGeneration"


QWEN_2_7B = {
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
}
SIGLIP = {
    "hidden_size": 1152,
    "intermediate_size": 4304,
    "model_type": "siglip_vision_model",
    "num_attention_heads": 16,
    "num_hidden_layers": 27,
    "patch_size": 14,
}
CLIP = {
    "model_type": "clip_vision_model",
    "hidden_size": 1024,
    "image_size": 336,
    "intermediate_size": 4096,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "patch_size": 14,
}
CLIP_LAYER = 4 * 1024 * 1024 + 2 * 1024 * 4096 + 9 * 1024 + 4096


@each_row(
    ("published", "unloaded", "config"),
    [
        pytest.param(
            8_291_375_616,
            0,
            {
                "architectures": ["Qwen2VLForConditionalGeneration"],
                **QWEN_2_7B,
                "vision_config": {
                    "depth": 32,
                    "embed_dim": 1280,
                    "mlp_ratio": 4,
                    "num_heads": 16,
                    "hidden_size": 3584,
                },
            },
            id="Qwen2-VL-7B",
        ),
        pytest.param(
            2_923_466_480,
            0,
            {
                "architectures": ["PaliGemmaForConditionalGeneration"],
                "text_config": {
                    "model_type": "gemma",
                    "hidden_size": 2048,
                    "intermediate_size": 16384,
                    "num_attention_heads": 8,
                    "num_hidden_layers": 18,
                    "num_key_value_heads": 1,
                    "head_dim": 256,
                    "vocab_size": 257216,
                },
                "vision_config": {**SIGLIP, "image_size": 224},
            },
            id="PaliGemma-3B",
        ),
        pytest.param(
            8_099_175_152,
            0,
            {
                "architectures": ["MiniCPMV"],
                **QWEN_2_7B,
                "vocab_size": 151666,
                "query_num": 64,
                "drop_vision_last_layer": False,
                "vision_config": {**SIGLIP, "image_size": 980},
            },
            id="MiniCPM-V-2.6",
        ),
        pytest.param(
            8_075_365_376,
            0,
            {
                "architectures": ["InternVLChatModel"],
                "downsample_ratio": 0.5,
                "select_layer": -1,
                "llm_config": {
                    "architectures": ["InternLM2ForCausalLM"],
                    "hidden_size": 4096,
                    "intermediate_size": 14336,
                    "num_attention_heads": 32,
                    "num_key_value_heads": 8,
                    "num_hidden_layers": 32,
                    "vocab_size": 92553,
                },
                "vision_config": {**CLIP, "image_size": 448, "qkv_bias": True},
            },
            id="InternVL2.5-8B",
        ),
        pytest.param(
            10_292_777_472,
            0,
            {
                "architectures": ["Glm4vForConditionalGeneration"],
                "text_config": {
                    "model_type": "glm4v_text",
                    "hidden_size": 4096,
                    "intermediate_size": 13696,
                    "num_hidden_layers": 40,
                    "num_attention_heads": 32,
                    "num_key_value_heads": 2,
                    "vocab_size": 151552,
                    "attention_bias": True,
                },
                "vision_config": {"hidden_size": 1536, "depth": 24, "out_hidden_size": 4096},
            },
            id="GLM-4.1V-9B",
        ),
        pytest.param(
            7_063_427_072,
            CLIP_LAYER + 2 * 1024,
            {
                "architectures": ["LlavaForConditionalGeneration"],
                "text_config": {"model_type": "llama", "vocab_size": 32064},
                "vision_config": CLIP,
                "vision_feature_layer": -2,
            },
            id="LLaVA-1.5-7B, whose last tower layer is not loaded",
        ),
    ],
)
def test_towers_have_the_numbers_that_are_published(published, unloaded, config):
    """The safetensors total of the model's page, to the last one."""
    assert architecture(config).parameters == published - unloaded


def test_a_tower_that_is_not_known_is_estimated_and_says_so():
    seen = {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12}
    text = {**LLAMA, "model_type": "llama"}
    model = architecture(
        {"architectures": ["UltravoxModel"], "text_config": text, "audio_config": seen}
    )

    assert model.parameters > architecture(LLAMA).parameters + 12 * 12 * 768 * 768
    assert "estimated" in model.notes[0]


def test_a_text_part_of_an_unknown_class_is_refused():
    with pytest.raises(FleetError, match="the text part of LlavaForConditionalGeneration is Xyz"):
        architecture(
            {
                "architectures": ["LlavaForConditionalGeneration"],
                "text_config": {**LLAMA, "architectures": ["Xyz"]},
                "vision_config": {"model_type": "clip_vision_model", "hidden_size": 1024},
            }
        )


def test_no_name_is_read_by_two_modules_unawares():
    """The later one would win, and which that is nobody would see."""
    names = Counter(
        name
        for family in FAMILIES
        for name in importlib.import_module(f"gpufleet.sizing.architectures.{family}").BUILDERS
    )

    assert [name for name, often in names.items() if often > 1] == []


def test_the_page_names_every_architecture_that_is_known():
    """After one is added: `python -m tests.support.known_models`, into the page."""
    assert PAGE.read_text() == page()
