"""What a checkpoint says of its quantization decides which weights are kept smaller, and how."""

import json

import pytest

from gpufleet.errors import FleetError
from gpufleet.sizing.architectures.quantization import online_quantization, quantization
from gpufleet.sizing.architectures.quantization_scheme import Quantization, Scheme
from tests.support.checkout import ROOT
from tests.support.rows import each_row

MODELS = ROOT / "tests/data/models"
Q = "model.layers.3.self_attn.q_proj"
UP = "model.layers.3.mlp.up_proj"


def said(**keys):
    found = quantization({"quantization_config": keys})
    assert found is not None
    return found


def group(targets=("Linear",), **weights):
    return {"config_groups": {"group_0": {"targets": list(targets), "weights": weights}}}


@each_row(
    ("keys", "scheme"),
    [
        pytest.param(
            {"quant_method": "fp8", "weight_block_size": [128, 128]},
            Scheme(8, "fp8", block=(128, 128), scale_bytes=4),
            id="fp8 by blocks",
        ),
        pytest.param(
            {"quant_method": "fp8", "activation_scheme": "static"},
            Scheme(8, "fp8", group=-1, scale_bytes=4),
            id="fp8",
        ),
        pytest.param(
            {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
            Scheme(4, group=128, symmetric=False, zero_points=True),
            id="awq",
        ),
        pytest.param(
            {"quant_method": "gptq", "bits": 8, "group_size": -1, "sym": True},
            Scheme(8, group=0, zero_points=True),
            id="gptq of one group",
        ),
        pytest.param(
            {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True},
            Scheme(4, group=32, zero_points=True, activation_order=True),
            id="gptq with act order",
        ),
        pytest.param(
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                **group(num_bits=4, type="int", strategy="group", group_size=128, symmetric=True),
            },
            Scheme(4, group=128),
            id="w4a16",
        ),
        pytest.param(
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                **group(num_bits=8, type="float", strategy="channel"),
            },
            Scheme(8, "fp8", scale_bytes=4),
            id="fp8 by channels",
        ),
        pytest.param(
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                **group(num_bits=8, type="float", strategy="block", block_structure=[128, 128]),
            },
            Scheme(8, "fp8", block=(128, 128), scale_bytes=4),
            id="compressed fp8 by blocks",
        ),
        pytest.param(
            {
                "quant_method": "compressed-tensors",
                "format": "int-quantized",
                **group(num_bits=8, type="int", strategy="channel"),
            },
            Scheme(8, scale_bytes=4),
            id="w8a8",
        ),
        pytest.param(
            {
                "quant_method": "compressed-tensors",
                "format": "nvfp4-pack-quantized",
                **group(num_bits=4, type="float", strategy="tensor_group", group_size=16),
            },
            Scheme(4, "nvfp4", group=16, scale_bytes=1),
            id="nvfp4",
        ),
        pytest.param(
            {"quant_algo": "FP8", "producer": {"name": "modelopt"}, "ignore": ["lm_head"]},
            Scheme(8, "fp8", group=-1, scale_bytes=4),
            id="modelopt fp8",
        ),
        pytest.param(
            {"quant_method": "modelopt", "quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
            Scheme(4, "nvfp4", group=16, scale_bytes=1),
            id="modelopt nvfp4",
        ),
        pytest.param(
            {"quant_method": "bitsandbytes", "load_in_4bit": True},
            Scheme(4, "nf4", group=64, scale_bytes=4),
            id="bitsandbytes",
        ),
        pytest.param(
            {
                "quant_method": "quark",
                "global_quant_config": {
                    "weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
                },
            },
            Scheme(8, "fp8", group=-1, scale_bytes=4),
            id="quark",
        ),
        pytest.param(
            {"quant_method": "fbgemm_fp8", "modules_to_not_convert": ["lm_head"]},
            Scheme(8, "fp8", scale_bytes=4),
            id="fbgemm",
        ),
        pytest.param(
            {"quant_method": "auto-round", "bits": 4, "group_size": 128, "sym": True},
            Scheme(4, group=128, zero_points=True),
            id="auto-round",
        ),
        pytest.param(
            {"quant_method": "auto-round", "data_type": "mx_fp", "bits": 4},
            Scheme(4, "mxfp4", group=32, scale_bytes=1),
            id="auto-round of floats",
        ),
        pytest.param(
            {
                "quant_method": "torchao",
                "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {}}},
            },
            Scheme(4, group=128, scale_bytes=4),
            id="torchao",
        ),
        pytest.param(
            {"quant_method": "torchao", "quant_type": "int4wo-64"},
            Scheme(4, group=64, scale_bytes=4),
            id="torchao, by its older name",
        ),
        pytest.param(
            {
                "quant_method": "hqq",
                "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}},
            },
            Scheme(4, group=64, scale_bytes=4),
            id="hqq",
        ),
        pytest.param(
            {"quant_method": "mxfp8", "ignored_layers": ["lm_head"]},
            Scheme(8, "mxfp8", group=32, scale_bytes=1),
            id="mxfp8",
        ),
    ],
)
def test_each_method_keeps_weights_as_its_kernels_do(keys, scheme):
    """And no method touches the head unasked."""
    found = said(**keys)

    assert found.scheme_of(Q) == scheme
    assert (found.bits, found.group, found.block) == (
        scheme.bits,
        max(0, scheme.group),
        scheme.block,
    )
    assert found.scheme_of("lm_head", head=True) is None


@each_row(
    ("ignored", "kept", "quantized"),
    [
        (["model.layers.3.mlp.up_proj"], UP, Q),
        (["model.layers.3.mlp"], UP, Q),
        (["model.language_model.layers.3.self_attn*"], Q, UP),
        (["language_model.model.layers.3.self_attn.q_proj"], Q, UP),
        (["re:.*self_attn.*"], Q, UP),
        (["re:model.layers.3.mlp.*"], UP, Q),
        (["*.mlp.*"], UP, Q),
        (["model.layers.*.self_attn"], Q, UP),
        (["model.layers.30.self_attn*"], "model.layers.30.self_attn.q_proj", Q),
        (["gate"], "model.layers.3.mlp.gate", "model.layers.3.mlp.gate_proj"),
        (["visual"], "visual.blocks.0.attn.qkv", Q),
    ],
)
def test_what_is_ignored_is_left_as_it_is(ignored, kept, quantized):
    """From whichever root the checkpoint names it, and no neighbour whose name begins alike."""
    found = Quantization("fp8", Scheme(8, "fp8"), tuple(ignored))

    assert found.scheme_of(kept) is None
    assert found.scheme_of(quantized) == Scheme(8, "fp8")


def test_an_expert_is_ignored_by_its_number():
    """Lists name each expert; here one weight stands for all of a layer."""
    found = Quantization("x", Scheme(4), ("model.layers.3.mlp.experts.0.up_proj",))

    assert found.scheme_of("model.layers.3.mlp.experts.up_proj", expert=True) is None
    assert found.scheme_of("model.layers.3.mlp.experts.down_proj", expert=True) == Scheme(4)


def test_mxfp4_is_of_experts_only():
    found = said(quant_method="mxfp4", modules_to_not_convert=["model.layers.*.self_attn"])

    assert found.scheme_of(UP) is None
    assert found.scheme_of("model.layers.3.mlp.experts.up_proj", expert=True) is not None


def test_mixed_precision_says_of_each_layer_how_it_is_kept():
    """What it does not name stays as it is."""
    layers = {Q: {"quant_algo": "FP8"}, UP: {"quant_algo": "NVFP4", "group_size": 16}}
    found = said(quant_method="modelopt", quant_algo="MIXED_PRECISION", quantized_layers=layers)

    assert found.scheme_of(Q).kind == "fp8"
    assert found.scheme_of(UP).kind == "nvfp4"
    assert found.scheme_of("model.layers.4.mlp.up_proj") is None
    assert found.kinds == {"fp8", "nvfp4"}


def test_mixed_precision_may_be_in_a_file_of_its_own():
    """Older ModelOpt checkpoints say it in hf_quant_config.json."""
    file = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
    }

    found = quantization({}, file)

    assert found.method == "modelopt"
    assert found.scheme_of(Q).kind == "nvfp4"
    assert found.scheme_of("lm_head", head=True) is None


def test_dynamic_rules_of_gptq_override_and_skip():
    found = said(
        quant_method="gptq",
        bits=4,
        group_size=128,
        dynamic={"-:.*self_attn.*": {}, "+:.*mlp.*": {"bits": 8, "group_size": 64}},
    )

    assert found.scheme_of(Q) is None
    assert (found.scheme_of(UP).bits, found.scheme_of(UP).group) == (8, 64)


def test_layers_of_auto_round_may_be_kept_whole_or_finer():
    found = said(
        quant_method="auto-round",
        bits=4,
        group_size=128,
        extra_config={Q: {"bits": 16}, UP: {"bits": 8, "group_size": None}},
    )

    assert found.scheme_of(Q) is None
    assert (found.scheme_of(UP).bits, found.scheme_of(UP).group) == (8, 128)


def test_a_checkpoint_s_own_method_counts_more_than_its_producer():
    """DeepSeek V4's NVFP4 checkpoints are fp8 with experts of four bits."""
    kept = {
        "model_type": "deepseek_v4",
        "quantization_config": {
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
            "moe_quant_algo": "NVFP4",
            "quant_algo": "MIXED_PRECISION",
            "producer": {"name": "modelopt"},
            "quantized_layers": {"layers.0.ffn.experts": {"quant_algo": "NVFP4"}},
        },
    }

    found = quantization(kept)

    assert found.method == "fp8"
    assert found.scheme_of("layers.3.attn.wo_b").kind == "fp8"
    assert found.scheme_of("layers.3.ffn.experts.w1", expert=True).kind == "nvfp4"


def test_groups_of_compressed_tensors_are_by_name():
    found = said(
        quant_method="compressed-tensors",
        format="mixed-precision",
        config_groups={
            "group_0": {
                "targets": ["re:.*self_attn.*"],
                "format": "float-quantized",
                "weights": {"num_bits": 8, "type": "float", "strategy": "channel"},
            },
            "group_1": {
                "targets": ["re:.*mlp.*"],
                "format": "nvfp4-pack-quantized",
                "weights": {"num_bits": 4, "type": "float", "group_size": 16},
            },
        },
        ignore=["lm_head"],
    )

    assert (found.scheme_of(Q).kind, found.scheme_of(UP).kind) == ("fp8", "nvfp4")


def test_a_text_part_has_its_own_quantization():
    kept = json.loads((MODELS / "moonshotai--Kimi-K2.5.json").read_text())["config"]

    found = quantization(kept)

    name = "language_model.model.layers.5.mlp.experts.gate_proj"
    assert found.scheme_of(name, expert=True) == Scheme(4, group=32)
    assert found.scheme_of("language_model.model.layers.5.self_attn.o_proj") is None
    assert found.scheme_of("language_model.model.layers.0.mlp.gate_proj") is None


def test_a_model_without_quantization_has_none():
    assert quantization({"architectures": ["LlamaForCausalLM"]}) is None


@each_row(
    ("keys", "sentence"),
    [
        ({"quant_method": "gguf"}, "the quantization 'gguf'"),
        ({"quant_method": "modelopt", "quant_algo": "FP3"}, "`quant_algo` 'FP3'"),
        (
            {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION"},
            "no `quantized_layers`",
        ),
        (
            {
                "quant_method": "compressed-tensors",
                "sparsity_config": {"format": "sparse-24-bitmask"},
            },
            "sparse-24-bitmask",
        ),
        ({"quant_method": "torchao", "quant_type": "uintx"}, "`quant_type` 'uintx'"),
        ({"quant_method": "awq", "group_size": "many"}, "of an unexpected type"),
    ],
)
def test_what_is_not_known_is_refused_by_name(keys, sentence):
    with pytest.raises(FleetError, match=sentence):
        said(**keys)


@each_row(
    ("method", "release", "quantizes"),
    [
        ("fp8", (0, 19, 0), True),
        ("fp8", (0, 30, 0), True),
        ("fp8", (0, 31, 0), False),
        ("fp8_per_tensor", (0, 33, 0), True),
        ("bitsandbytes", (0, 19, 0), True),
        ("awq", (0, 19, 0), False),
    ],
)
def test_a_release_quantizes_online_by_the_names_it_has(method, release, quantizes):
    assert (online_quantization(method, release) is not None) is quantizes
