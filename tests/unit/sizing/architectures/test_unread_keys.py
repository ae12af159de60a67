"""A key that changes a model's size, and that its class does not read, is refused by its name."""

import json
import re

import pytest

from gpufleet.errors import FleetError
from gpufleet.sizing.architectures import registry, unread_keys
from gpufleet.sizing.architectures.registry import architecture, builders
from tests.support.checkout import ROOT
from tests.support.rows import each_row

DATA = ROOT / "tests/data"
TEXT_PARTS = ("text_config", "llm_config", "language_config")

EXPERTS = ("n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts")
WINDOWS = ("sliding_window", "sliding_window_size", "attention_chunk_size")
KINDS = (
    "layer_types",
    "hybrid_override_pattern",
    "layers_block_type",
    "hybrid_layer_pattern",
    "linear_attn_config",
)
ALSO_KINDS = ("sliding_window_pattern", "block_configs")
MAMBA = ("mamba_d_state", "ssm_state_size", "state_size", "mamba_num_heads", "mamba_n_heads")
DELTA = ("linear_num_value_heads", "linear_attn_config")
GROUPS = {
    ("kv_lora_rank",): 96,
    ("index_head_dim",): 96,
    EXPERTS: 24,
    WINDOWS: 48,
    KINDS: ["linear_attention"] * 400,
    MAMBA: 24,
    DELTA: 24,
    ("conv_L_cache",): 5,
    ("num_kv_shared_layers",): 2,
    ("hidden_size_per_layer_input",): 32,
    ("altup_num_inputs",): 3,
    ("compress_ratios",): [4] * 400,
}
"""Names of one thing, and a value that makes the model another one."""


def known_configs():
    """Return a config for each class that the test data has one of."""
    found = [json.loads(file.read_text())["config"] for file in sorted(DATA.glob("models/*.json"))]
    families = json.loads((DATA / "families.json").read_text())["families"]
    small = json.loads((DATA / "small_models.json").read_text())
    found += [record["config"] for record in (*families.values(), *small.values())]
    return {
        next(name for name in config["architectures"] if name in builders()): config
        for config in reversed(found)
    }


CONFIGS = known_configs()


def with_key(config, key, value):
    part = next((name for name in TEXT_PARTS if name in config), None)
    if part:
        return {**config, part: {**config[part], key: value}}
    return {**config, key: value}


def stated(config, names):
    text = next((config[name] for name in TEXT_PARTS if name in config), config)
    return any(text.get(name) for name in names) or text.get("use_sliding_window") is False


@each_row("name", sorted(CONFIGS))
def test_a_key_that_changes_the_size_counts_or_is_refused_by_name(name):
    """No model is sized as one that it is not."""
    config = CONFIGS[name]
    known = architecture(config)
    keeps = any(layer.caches for layer in known.layers)
    for names, value in GROUPS.items():
        if not keeps and names in (WINDOWS, KINDS):
            continue  # which tokens a layer looks at changes nothing where none is kept
        if stated(config, (*names, *ALSO_KINDS) if names == KINDS else names):
            continue
        for key in names:
            sentence = refusal(with_key(config, key, value), known)
            assert not sentence or key in sentence or "has no `" in sentence, sentence


def refusal(config, known):
    """Return the sentence with which a config is refused; "" where it is another model."""
    try:
        found = architecture(config)
    except FleetError as error:
        return str(error)
    return "" if found != known else "it changes nothing"


def test_classes_that_may_leave_a_draft_unread_were_built_with_one():
    """Of each, vLLM's own class holds what the one without holds: test_families_against_vllm.py."""
    small = json.loads((DATA / "small_models.json").read_text())
    key = "num_nextn_predict_layers"
    configs = [record["config"] for record in small.values()]
    built = {config["architectures"][0] for config in configs if config.get(key)}
    excepted = {name for name, unread in unread_keys._WITHOUT_EFFECT if unread == key}

    assert excepted
    # It has LongCat's layers, and wants a runner that no model built alone has.
    assert excepted - built == {"LongcatFlashNgramForCausalLM"}


def test_there_are_as_many_classes_as_the_data_has():
    assert len(CONFIGS) > 100


LLAMA = {
    "model_type": "llama",
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_hidden_layers": 6,
    "intermediate_size": 1024,
    "vocab_size": 1000,
}
VISION = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}


@each_row(
    "name",
    [
        "Mistral3ForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "Gemma3ForConditionalGeneration",
        "InternVLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "UltravoxModel",
    ],
)
def test_an_unknown_text_part_is_not_taken_for_the_usual_one(name):
    """Mistral Small 4 is a latent mixture of experts in the wrapper of a dense model."""
    whole = {
        "architectures": [name],
        "model_type": "mistral3",
        "text_config": {**LLAMA, "model_type": "mistral4"},
        "vision_config": VISION,
    }

    with pytest.raises(FleetError, match=r"mistral4 \(`text_config\.model_type`"):
        architecture(whole)


def test_a_text_part_of_the_wrappers_own_type_is_the_usual_one():
    """Several wrappers name their text part after themselves."""
    whole = {
        "architectures": ["UltravoxModel"],
        "model_type": "ultravox",
        "text_config": {**LLAMA, "model_type": "ultravox_text"},
    }

    assert (
        architecture(whole).layers
        == architecture({**LLAMA, "architectures": ["LlamaForCausalLM"]}).layers
    )


@each_row(
    ("keys", "named"),
    [
        ({"kv_lora_rank": 256, "q_lora_rank": 1024}, "`kv_lora_rank`, `q_lora_rank`"),
        ({"n_routed_experts": 8, "moe_intermediate_size": 64}, "`n_routed_experts`"),
        ({"num_experts": 8, "n_shared_experts": 1}, "`n_shared_experts`"),
    ],
)
def test_all_keys_are_named_at_once(keys, named):
    with pytest.raises(FleetError, match=named):
        architecture({**LLAMA, **keys, "architectures": ["LlamaForCausalLM"]})


@each_row(
    ("key", "value"),
    [
        ("num_moe_experts", 64),
        ("n_expert", 64),
        ("mlp_layer_types", ["sparse"] * 6),
        ("moe_config", {"experts": 8}),
        ("swa_head_dim", 32),
        ("global_head_dim", 512),
        ("num_global_key_value_heads", 2),
        ("v_head_dim", 32),
        ("qk_rope_head_dim", 64),
        ("o_lora_rank", 64),
        ("num_nextn_predict_layers", 1),
        ("mtp_num_hidden_layers", 1),
        ("ssm_cfg", {"d_state": 64}),
        ("mamba_anything", 64),
        ("full_attention_interval", 4),
        ("vision_config", VISION),
    ],
)
def test_a_plain_model_has_no_key_that_another_builder_reads(key, value):
    with pytest.raises(FleetError, match=f"`{key}`"):
        architecture({**LLAMA, key: value, "architectures": ["LlamaForCausalLM"]})


@each_row(
    "keys",
    [
        {"mlp_layer_types": ["dense"] * 6},
        {"v_head_dim": 64, "head_dim": 64},
        {"num_experts_per_tok": 2, "moe_aux_loss": 0.1},
        {"num_moe_experts": 1},
        {"ssm_cfg": None, "use_mamba_kernels": True},
        {"num_nextn_predict_layers": 0},
        {"num_experts": 0, "n_shared_experts": 2},
        {"num_local_experts": 1},
        {"kv_lora_rank": None},
        {"sliding_window": 4096, "use_sliding_window": False},
        {"layer_types": ["full_attention"] * 6},
        {"moe_intermediate_size": 512},
    ],
)
def test_a_key_that_says_nothing_is_no_reason_to_refuse(keys):
    qwen = {**LLAMA, "architectures": ["Qwen2ForCausalLM"]}

    assert architecture({**qwen, **keys}) == architecture(qwen)


def test_layers_that_only_a_draft_uses_refuse_no_known_model():
    """vLLM loads MiMo's further layers with `--speculative-config` alone."""
    config = CONFIGS["MiMoForCausalLM"]
    bare = {key: config[key] for key in config if key != "num_nextn_predict_layers"}

    assert config["num_nextn_predict_layers"]
    assert architecture(config) == architecture(bare)


def test_every_width_and_count_that_a_builder_reads_is_in_a_group(monkeypatch):
    """Without a group a key that one builder reads is passed over in every other class."""
    found: set[str] = set()
    monkeypatch.setattr(registry, "refuse_unread", lambda _config, read, _name: found.update(read))
    for config in CONFIGS.values():
        architecture(config)
    groups = {key for names in unread_keys.SIZE_KEYS.values() for key in names}

    assert {
        key for key in found if OF_ONE_KIND.search(key)
    } - groups - OF_ANY - TEXT == WITH_ANOTHER


OF_ONE_KIND = re.compile(
    "head_dim|kv_heads|value_heads|lora_rank$|layer_types|predict_layers|num_.*experts?$|_config$"
)
OF_ANY = {"head_dim", "num_kv_heads", "num_key_value_heads"}
TEXT = {"text_config", "llm_config", "language_config", "thinker_config"}
WITH_ANOTHER = {
    # Beside a group's key, which says that the model has the thing at all.
    "linear_key_head_dim",
    "linear_value_head_dim",
    "mamba_head_dim",
    "qk_nope_head_dim",
    # By its name.
    "o_lora_rank",
}
