"""What a rank holds follows from the shapes, from how they are divided, and from the kernels."""

import json
import time

import pytest

from gpufleet.errors import FleetError
from gpufleet.sizing.architectures.components import (
    Architecture,
    FullCache,
    Layer,
    Part,
    Split,
    StagePlacement,
    Weight,
)
from gpufleet.sizing.architectures.quantization import online_quantization, quantization
from gpufleet.sizing.architectures.quantization_scheme import Quantization, Scheme
from gpufleet.sizing.architectures.registry import architecture
from gpufleet.sizing.rank_weights import Sharding, allocated_bytes, packed_bytes
from gpufleet.sizing.weights import layer_ranges, weight_bytes
from tests.support.checkout import ROOT
from tests.support.rows import each_row

GIB = 1 << 30
MIB = 1 << 20
V = (0, 19, 0)
MODELS = ROOT / "tests/data/models"


def config(name):
    return json.loads((MODELS / f"{name}.json").read_text())["config"]


def loaded(name, tensor=1, *, said=None, **sharding):
    """Return the GiB of each stage's largest rank."""
    read = config(name)
    if said is not None:
        read = {**read, "quantization_config": said}
    stages = weight_bytes(
        architecture(read), quantization(read), Sharding(tensor, **sharding), vllm=V
    )
    return [round(stage.bytes / GIB, 2) for stage in stages]


def tiny(*weights, layers=1, tied=False, parts=()):
    """Return an architecture of these weights in each layer."""
    return Architecture(
        name="Tiny",
        hidden_size=128,
        vocab_size=1000,
        heads=8,
        kv_heads=2,
        layers=(Layer(tuple(weights), FullCache(2, 16)),) * layers,
        parts=tuple(parts),
        max_model_len=4096,
        dtype="bfloat16",
        tied=tied,
    )


def held(model, sharding, scheme=None, **options):
    said = Quantization("test", scheme) if scheme else None
    return [stage.bytes for stage in weight_bytes(model, said, sharding, vllm=V, **options)]


@each_row(
    ("model", "tensor", "gib"),
    [
        # `Model loading took` of vLLM 0.19.0's start-up logs, H100.
        ("meta-llama--Meta-Llama-3.1-8B", 1, 14.99),
        ("meta-llama--Meta-Llama-3.1-8B", 2, 7.51),
        ("meta-llama--Meta-Llama-3.1-8B", 4, 3.77),
        ("Qwen--Qwen2.5-7B-Instruct", 1, 14.25),
        ("Qwen--Qwen2.5-7B-Instruct", 2, 7.12),
        ("Qwen--Qwen3-30B-A3B", 1, 56.88),
        ("Qwen--Qwen3-8B", 1, 15.27),
        ("deepseek-ai--DeepSeek-V2-Lite", 1, 29.43),
        ("microsoft--phi-4", 1, 27.39),
        ("mistralai--Mixtral-8x7B-v0.1", 2, 43.51),
        ("google--gemma-2-27b", 1, 50.72),
    ],
)
def test_a_model_takes_what_its_start_up_log_says(model, tensor, gib):
    """Within the log's two digits: fused tensors, padding and rotary tables all count."""
    assert loaded(model, tensor) == [pytest.approx(gib, abs=0.011)]


def test_stages_take_what_their_logs_say():
    """Llama-3.1-8B over two and four stages, `Model loading took` of the first rank in 0.19.0."""
    assert loaded("meta-llama--Meta-Llama-3.1-8B", pipeline=2)[0] == 7.51
    assert loaded("meta-llama--Meta-Llama-3.1-8B", pipeline=4)[0] == 4.26


def test_rows_and_columns_are_divided_and_norms_are_not():
    norm = Weight("norm", 128, linear=False)
    rows = Weight("up", 512, 128, Split.ROWS)
    columns = Weight("down", 128, 512, Split.COLUMNS)

    one, four = (held(tiny(norm, rows, columns), Sharding(tensor))[0] for tensor in (1, 4))

    assert one - four == (2 * 512 * 128 * 2) * 3 // 4


@pytest.mark.parametrize(("tensor", "heads"), [(1, 8), (2, 4), (8, 1), (16, 1)])
def test_a_rank_has_at_least_one_whole_kv_head(tensor, heads):
    """Beyond their number KV heads are copied, so a rank's part stops getting smaller."""
    weight = Weight("k_proj", 8 * 64, 128, Split.HEADS, heads=8)

    assert held(tiny(weight), Sharding(tensor)) == [heads * 64 * 128 * 2]


def test_vocabularies_are_padded_to_64_before_they_are_divided():
    part = Part(
        "embedding", (Weight("e", 1000, 128, Split.VOCABULARY, linear=False),), StagePlacement.FIRST
    )

    assert held(tiny(parts=[part]), Sharding(2)) == [1024 // 2 * 128 * 2]


def test_experts_are_divided_as_a_whole_with_expert_parallelism():
    """
    Without it each expert is cut over tensor x data ranks; with it ranks hold whole experts, the
    fullest one more where they do not divide.
    """
    weight = Weight("experts.up", 512, 128, Split.ROWS, count=10, expert=True)
    model = tiny(weight)

    assert held(model, Sharding(2, data=2)) == [10 * 512 // 4 * 128 * 2]
    assert held(model, Sharding(2, data=2, expert=True)) == [3 * 512 * 128 * 2]


def test_data_parallelism_alone_divides_nothing_of_a_dense_model():
    model = tiny(Weight("up", 512, 128, Split.ROWS))

    assert held(model, Sharding(data=4)) == held(model, Sharding())


def test_a_tied_head_is_the_embedding_once_on_one_stage_and_twice_on_two():
    part = Part(
        "embedding", (Weight("e", 1024, 128, Split.VOCABULARY, linear=False),), StagePlacement.FIRST
    )
    layer = Weight("up", 512, 128, Split.ROWS)
    whole = tiny(layer, layers=2, tied=True, parts=[part])

    (one,) = held(whole, Sharding())
    first, last = held(whole, Sharding(pipeline=2))

    assert first == last
    assert first + last == one + 1024 * 128 * 2


@pytest.mark.parametrize(
    ("layers", "pipeline", "counts"),
    [
        (32, 4, [8, 8, 8, 8]),
        (61, 4, [15, 15, 16, 15]),
        (61, 8, [7, 7, 8, 8, 8, 8, 8, 7]),
        (30, 4, [7, 8, 8, 7]),
    ],
)
def test_odd_layers_go_to_the_stages_before_the_last(layers, pipeline, counts):
    """As get_pp_indices has it: the last stage has the head, so it gets none of them."""
    ranges = layer_ranges(layers, pipeline)

    assert [len(each) for each in ranges] == counts
    assert [layer for each in ranges for layer in each] == list(range(layers))


def test_a_partition_has_to_add_up():
    assert [len(each) for each in layer_ranges(10, 2, (3, 7))] == [3, 7]
    with pytest.raises(FleetError, match="write 2 numbers that add up to 10"):
        layer_ranges(10, 2, (3, 6))


@each_row(
    ("scheme", "size"),
    [
        pytest.param(Scheme(4, group=128), 4096 * 2048 + 4096 * 32 * 2, id="W4A16"),
        pytest.param(
            Scheme(4, group=128, symmetric=False, zero_points=True),
            4096 * 2048 + 4096 * 32 * 2 + 4096 * 32 // 2,
            id="AWQ",
        ),
        pytest.param(
            Scheme(8, "fp8", block=(128, 128), scale_bytes=4), 4096 * 4096 + 32 * 32 * 4, id="FP8"
        ),
        pytest.param(Scheme(8, "fp8", group=-1, scale_bytes=4), 4096 * 4096 + 4, id="per tensor"),
        pytest.param(Scheme(8, group=0, scale_bytes=4), 4096 * 4096 + 4096 * 4, id="INT8"),
        pytest.param(
            Scheme(4, "nvfp4", group=16, scale_bytes=1), 4096 * 2048 + 4096 * 256, id="NVFP4"
        ),
        pytest.param(
            Scheme(4, "mxfp4", group=32, scale_bytes=1), 4096 * 2048 + 4096 * 128, id="MXFP4"
        ),
    ],
)
def test_a_packed_weight_brings_its_scales_and_zero_points(scheme, size):
    assert packed_bytes(4096, 4096, scheme) == size


def test_mxfp4_experts_are_padded_for_their_kernel():
    """gpt-oss: 2880 becomes 3072 inputs and 2944 outputs, as its logs say (65.97, 17.22 GiB)."""
    assert loaded("openai--gpt-oss-120b") == [pytest.approx(65.97, rel=0.002)]
    assert loaded("openai--gpt-oss-120b", 4) == [pytest.approx(17.22, rel=0.002)]


@pytest.mark.parametrize(
    ("capability", "scales"),
    [((9, 0), 4 * 32 * 32), ((8, 9), 4 * 32 * 32), ((8, 0), 2 * 32 * 4096), (None, 4 * 32 * 32)],
)
def test_fp8_blocks_have_a_scale_for_each_output_before_ada(capability, scales):
    """Marlin's kernel, which older GPUs take, knows groups of inputs and no blocks."""
    blocks = Scheme(8, "fp8", block=(128, 128), scale_bytes=4)
    model = tiny(Weight("mlp.down_proj", 4096, 4096, Split.COLUMNS))

    with_blocks = held(model, Sharding(), blocks, compute_capability=capability)
    of_channels = held(model, Sharding(), Scheme(8, "fp8", group=0, scale_bytes=0))

    assert with_blocks[0] - of_channels[0] == scales


def test_online_fp8_halves_linear_layers_and_leaves_the_head():
    """Llama-3.1-8B with `--quantization fp8` in 0.19.0: 8.49 GiB."""
    model = architecture(config("meta-llama--Meta-Llama-3.1-8B"))

    (stage,) = weight_bytes(model, online_quantization("fp8", V), Sharding(), vllm=V)

    assert round(stage.bytes / GIB, 2) == 8.49


def test_every_number_takes_four_bytes_in_float32():
    """Llama-3.1-8B with `--dtype float32` in 0.19.0: 29.98 GiB."""
    model = architecture(config("meta-llama--Meta-Llama-3.1-8B"))

    (stage,) = weight_bytes(model, None, Sharding(), dtype="float32", vllm=V)

    assert round(stage.bytes / GIB, 2) == 29.98


@each_row(
    ("asked", "vllm", "given"),
    [
        (700, V, 1024),
        (10 * MIB, V, 10 * MIB),
        (31 * MIB, V, 32 * MIB),
        (24 * MIB + 512, V, 24 * MIB + 512),
        (24 * MIB + 512, (0, 21, 0), 26 * MIB),
        (16 * MIB + 512, (0, 21, 0), 16 * MIB + 512),
    ],
)
def test_the_allocator_keeps_a_rest_of_up_to_a_mebibyte_or_all_of_it(asked, vllm, given):
    """From 0.21 on nothing is split off a tensor of 20 MiB or more while weights are loaded."""
    assert allocated_bytes(asked, vllm) == given


def test_latent_attention_brings_a_workspace_in_the_releases_that_allocate_it_early():
    model = architecture(config("deepseek-ai--DeepSeek-V2-Lite"))

    early, lazy = (
        weight_bytes(model, None, Sharding(), vllm=release)[0].bytes
        for release in ((0, 24, 0), (0, 25, 0))
    )

    assert early - lazy == 128 * MIB


def headers(name, quantized=None):
    """Return a checkpoint's headers, as its arithmetic has them."""
    model = architecture(config(name))
    stored = {}
    for number, layer in enumerate(model.layers):
        for weight in layer.weights:
            stored[f"{model.prefix}{number}.{weight.name}.weight"] = (
                "BF16",
                (weight.rows, weight.columns),
            )
    for part in model.parts:
        for weight in part.weights:
            if not weight.buffer:
                stored[f"{weight.name}.weight"] = ("BF16", (weight.rows, weight.columns))
    return model, stored


def test_headers_that_agree_change_nothing():
    model, stored = headers("meta-llama--Meta-Llama-3.1-8B")

    (with_headers,) = weight_bytes(model, None, Sharding(2), stored=stored, vllm=V)
    (without,) = weight_bytes(model, None, Sharding(2), vllm=V)

    assert with_headers.bytes == pytest.approx(without.bytes, rel=1e-6)


def test_headers_win_over_what_the_config_says():
    """Where the checkpoint left the MLP as it is, its layers weigh more than the config says."""
    model, stored = headers("meta-llama--Meta-Llama-3.1-8B")
    said = Quantization("fp8", Scheme(8, "fp8", group=-1, scale_bytes=4))
    mixed = {
        name: ("F8_E4M3", shape) if "self_attn" in name else (dtype, shape)
        for name, (dtype, shape) in stored.items()
    }

    (measured,) = weight_bytes(model, said, Sharding(), stored=mixed, vllm=V)

    expected = sum(
        shape[0] * shape[1] * (1 if dtype == "F8_E4M3" else 2) for dtype, shape in mixed.values()
    )
    assert measured.bytes == pytest.approx(expected, rel=0.01)


def test_a_second_call_is_fast_enough_for_a_planner():
    """At most 2 ms of a processor; the least of several, since other work shares its caches."""
    read = config("zai-org--GLM-5-FP8")
    model, said = architecture(read), quantization(read)
    spent = []
    for _ in range(20):
        began = time.process_time()
        weight_bytes(model, said, Sharding(8), vllm=V)
        spent.append(time.process_time() - began)

    assert min(spent) <= 0.002


def test_an_index_s_total_fills_in_what_the_config_does_not_say():
    """Only where the architecture is not known exactly: a total says nothing of layers."""
    text = {**config("meta-llama--Meta-Llama-3.1-8B"), "model_type": "llama"}
    heard = {"hidden_size": 1024, "num_hidden_layers": 4}
    loose = architecture(
        {"architectures": ["UltravoxModel"], "text_config": text, "audio_config": heard}
    )
    exact = architecture(text)

    for model, more in ((loose, GIB), (exact, 0)):
        stored = 2 * model.parameters + GIB
        (said,) = weight_bytes(model, None, Sharding(), stored=stored, vllm=V)
        (counted,) = weight_bytes(model, None, Sharding(), vllm=V)
        assert said.bytes - counted.bytes == more


def test_some_classes_have_embedding_and_head_on_every_stage():
    """Qwen3-30B-A3B's class does, Qwen3-8B's leaves them out where they are of no use."""
    head = 151936 * 2048 * 2

    first, last = (
        stage.bytes
        for stage in weight_bytes(
            architecture(config("Qwen--Qwen3-30B-A3B")), None, Sharding(pipeline=2), vllm=V
        )
    )
    assert last - first < head // 100
    one, two = loaded("Qwen--Qwen3-30B-A3B"), loaded("Qwen--Qwen3-30B-A3B", pipeline=2)
    assert sum(two) - sum(one) == pytest.approx(2 * head / GIB, rel=0.02)
    one, two = loaded("Qwen--Qwen3-8B"), loaded("Qwen--Qwen3-8B", pipeline=2)
    assert sum(two) == pytest.approx(sum(one), abs=0.02)


def test_shared_experts_are_whole_on_each_rank_that_gets_a_part_of_the_tokens():
    """With TP, DP and expert parallelism together (use_sequence_parallel_moe); else divided."""
    model = tiny(Weight("mlp.shared_experts.up_proj", 512, 128, Split.ROWS))

    assert held(model, Sharding(2, data=2, expert=True)) == [512 * 128 * 2]
    assert held(model, Sharding(2, data=2)) == [256 * 128 * 2]
    assert held(model, Sharding(2, expert=True)) == [256 * 128 * 2]


def test_a_quantized_latent_is_kept_once_more_for_decoding():
    """MLA absorbs kv_b_proj in the model's dtype, and keeps the packed one (MLAAttention)."""
    model = tiny(Weight("self_attn.kv_b_proj", 512, 128, Split.ROWS))
    fp8 = Scheme(8, "fp8", group=-1, scale_bytes=4)

    # Beside it the scale, which shares the copy's tensor here.
    assert held(model, Sharding(), fp8) == [512 * 128 + 512 * 128 * 2 + 512]
    assert held(model, Sharding()) == [512 * 128 * 2]


@pytest.mark.parametrize(("tensor", "group"), [(1, 128), (4, 64), (8, 32)])
def test_narrow_experts_get_a_finer_group(tensor, group):
    """Experts of 768 inputs over 8 ranks have 96, which 128 does not divide (moe_wna16.py)."""
    down = Weight("experts.down_proj", 1024, 768, Split.COLUMNS, count=4, expert=True)
    inputs = 768 // tensor

    packed = 4 * 1024 * inputs // 2
    scales = 4 * 1024 * (inputs // group) * 2
    assert held(tiny(down), Sharding(tensor), Scheme(4, group=128)) == [packed + scales]


@pytest.mark.parametrize(("method", "size"), [("gptq", 2), ("awq", 2), ("fp8", 1)])
def test_a_tower_is_packed_only_where_the_method_packs_more_than_text(method, size):
    """AWQ's and GPTQ's tools leave towers as they are, and do not say so."""
    tower = Part("tower", (Weight("visual.fc1", 512, 128, Split.ROWS),), StagePlacement.FIRST)
    said = Quantization(method, Scheme(8, "fp8", group=-1, scale_bytes=0))

    (stage,) = weight_bytes(tiny(parts=[tower]), said, Sharding(), vllm=V)

    assert stage.bytes == 512 * 128 * size


def test_a_tower_is_on_the_first_stage_alone_from_0_33():
    tower = Part(
        "tower",
        (Weight("visual.fc1", 512, 128, Split.ROWS),),
        StagePlacement.FIRST,
        everywhere=True,
        everywhere_until=(0, 33),
    )
    model = tiny(Weight("up", 512, 128, Split.ROWS), layers=2, parts=[tower])

    def last(release):
        return weight_bytes(model, None, Sharding(pipeline=2), vllm=release)[1].bytes

    assert last((0, 32, 0)) - last((0, 33, 0)) == 512 * 128 * 2
