"""What vLLM refuses is known beforehand, and every refusal names a setting that helps."""

from __future__ import annotations

import itertools
import json
import lzma
import re
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpufleet.catalog import vllm_support
from gpufleet.errors import FleetError
from gpufleet.sizing.architectures.description import Description, ModelFiles, describe
from gpufleet.sizing.architectures.quantization_scheme import FP8, NVFP4, Quantization, Scheme
from gpufleet.sizing.launch_rules.rules import FLAGS, Choice, Refused, refusals, with_nearest
from tests.support import start_up
from tests.support.checkout import ROOT
from tests.support.rows import each_row

MODELS = ROOT / "tests/data/models"
ORACLE = ROOT / "tests/data/models_oracle.json.xz"
PAGE = ROOT / "docs/plan/refusals.md"
NEWEST = (0, 33, 0)
HOPPER, ADA, AMPERE, TURING, VOLTA = (9, 0), (8, 9), (8, 0), (7, 5), (7, 0)

QUANTIZED = {
    "fp8 in blocks": Quantization("fp8", Scheme(8, "fp8", block=(128, 128), scale_bytes=4)),
    "fp8": Quantization("fp8", FP8),
    "awq": Quantization("awq", Scheme(4, group=128, symmetric=False), ignored=("lm_head",)),
    "gptq": Quantization("gptq", Scheme(4, group=128)),
    "compressed int4": Quantization("compressed-tensors", Scheme(4, group=128)),
    "compressed fp8 in blocks": Quantization(
        "compressed-tensors", Scheme(8, "fp8", block=(128, 128))
    ),
    "modelopt nvfp4": Quantization("modelopt", NVFP4),
    "bitsandbytes": Quantization("bitsandbytes", Scheme(4, "nf4", group=64)),
}


@cache
def described() -> dict[str, Description]:
    """Return every recorded model whose architecture is known, by name."""
    found = {}
    for path in sorted(MODELS.glob("*.json")):
        record = json.loads(path.read_text())
        try:
            found[path.stem] = describe(ModelFiles(record["config"], record.get("hf_quant_config")))
        except FleetError:
            continue
    return found


def model(name: str) -> Description:
    """Return one recorded model by the end of its name."""
    return next(found for full, found in described().items() if f"{full}|".endswith(f"{name}|"))


def asked(
    name: str,
    choice: Choice,
    *,
    gpu: tuple[int, int] | None = HOPPER,
    vllm: tuple[int, ...] = NEWEST,
    quantization: Quantization | None = None,
) -> dict[str, Refused]:
    """Return what is refused, by the rule's name."""
    found = model(name)
    weights = quantization or found.quantization
    return {one.name: one for one in refusals(found.architecture, weights, choice, gpu, vllm)}


# -- every refusal helps ---------------------------------------------------------------------------

CHOICES = st.builds(
    Choice,
    tensor=st.sampled_from([1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 32, 48, 64]),
    pipeline=st.sampled_from([1, 2, 4]),
    data=st.sampled_from([1, 2, 3, 8]),
    expert=st.booleans(),
    redundant_experts=st.sampled_from([None, 0, 3, 32]),
    decode_context=st.sampled_from([1, 2, 3, 4, 8]),
    max_model_len=st.sampled_from([None, 2048, 200_000, 20_000_000]),
    dtype=st.sampled_from(["auto", "bfloat16", "float16", "half", "float32"]),
    kv_cache_dtype=st.sampled_from(["auto", "fp8", "fp8_e5m2", "nvfp4", "fp8_ds_mla"]),
    quantization=st.sampled_from([None, None, "fp8", "awq", "gptq_marlin", "bitsandbytes"]),
    lora_rank=st.sampled_from([None, 1, 8, 24, 64, 600]),
    max_num_seqs=st.sampled_from([None, 256, 4096]),
    max_num_batched_tokens=st.sampled_from([None, 1024, 8192]),
    chunked_prefill=st.booleans(),
    whole_item=st.sampled_from([None, 2496]),
)
GPUS = st.sampled_from([None, (10, 0), (12, 0), HOPPER, ADA, AMPERE, TURING, VOLTA])
RELEASES = st.sampled_from([*vllm_support.releases(), (0, 15, 1), (0, 40, 0)])


@settings(max_examples=400, deadline=None)
@given(
    name=st.sampled_from(sorted(described())),
    weights=st.sampled_from([None, None, *sorted(QUANTIZED)]),
    choice=CHOICES,
    gpu=GPUS,
    vllm=RELEASES,
)
def test_what_a_refusal_tells_to_change_ends_it(
    name: str,
    weights: str | None,
    choice: Choice,
    gpu: tuple[int, int] | None,
    vllm: tuple[int, ...],
) -> None:
    """The one setting, changed as told, is not refused for that reason again."""
    found = described()[name]
    quantization = QUANTIZED[weights] if weights else found.quantization

    for one in refusals(found.architecture, quantization, choice, gpu, vllm):
        changed = with_nearest(one, quantization, choice, gpu, vllm)
        left = refusals(found.architecture, *changed)

        assert one.nearest != one.value
        assert one.name not in {other.name for other in left}, one.sentence


@settings(max_examples=200, deadline=None)
@given(name=st.sampled_from(sorted(described())), choice=CHOICES, gpu=GPUS, vllm=RELEASES)
def test_a_refusal_is_a_sentence_that_names_what_to_change(
    name: str, choice: Choice, gpu: tuple[int, int] | None, vllm: tuple[int, ...]
) -> None:
    """It says what was found, who says so in vLLM, and what to do."""
    found = described()[name]
    for one in refusals(found.architecture, found.quantization, choice, gpu, vllm):
        assert one.rule in one.sentence
        assert one.remedy in one.sentence
        assert not one.sentence.endswith(".")
        assert one.setting in FLAGS


@each_row("name", sorted(described()))
def test_no_release_that_serves_a_model_refuses_it_whole_on_a_hopper(name: str) -> None:
    """A published checkpoint on one GPU that has everything: nothing is to be refused."""
    found = described()[name]
    serving = [
        one
        for one in vllm_support.releases()
        if vllm_support.supports_architecture(found.architecture.name, one) and one >= (0, 21, 0)
    ]

    for vllm in serving:
        refused = refusals(found.architecture, found.quantization, Choice(), HOPPER, vllm)
        assert [one.sentence for one in refused if one.name != "quantization-method"] == []


@cache
def built() -> dict[str, dict[str, Any]]:
    """Return what vLLM 0.32.0's own classes could be built for on a Hopper GPU, by model."""
    found: dict[str, dict[str, Any]] = json.loads(lzma.decompress(ORACLE.read_bytes()))["models"]
    return found


@each_row("name", sorted(built().keys() & described().keys()))
def test_tensor_parallelism_is_refused_where_vllm_s_classes_are_not_built(name: str) -> None:
    """Rank 0 of 1, 2, 4 and 8 was built, or raised, in tests/data/models_oracle.py."""
    found = described()[name]
    refused = {
        str(ranks)
        for ranks in (1, 2, 4, 8)
        for one in refusals(
            found.architecture, found.quantization, Choice(tensor=ranks), HOPPER, (0, 32, 0)
        )
        if one.setting != "vllm"
    }

    assert refused == {"1", "2", "4", "8"} - built()[name]["tp"].keys()


@each_row("log", start_up.logs(), ids=str)
def test_no_published_start_is_refused(log: start_up.Log) -> None:
    """What others' servers loaded, on the GPU and with the flags of their logs, is not refused."""
    flags = log.flags
    length = flags.get("max_model_len")
    choice = Choice(
        max_model_len=length if isinstance(length, int) and length > 0 else None,
        tensor=log.tensor,
        pipeline=log.pipeline,
        data=flags.get("data_parallel_size", 1),
        expert=bool(flags.get("enable_expert_parallel")),
        decode_context=flags.get("decode_context_parallel_size", 1),
        dtype=flags.get("dtype", "auto"),
        kv_cache_dtype=flags.get("kv_cache_dtype", "auto"),
        quantization=flags.get("quantization"),
    )
    found = log.description
    refused = refusals(found.architecture, found.quantization, choice, log.capability, log.vllm)
    # Of some checkpoints only the config of the model that they were made from was found.
    lacking = {"quantization-flag"} if found.quantization is None else set()

    assert [one.sentence for one in refused if one.name not in lacking] == []


# -- the rules, one by one -------------------------------------------------------------------------


@each_row(
    ("name", "choice", "rule", "setting", "nearest"),
    [
        pytest.param("Qwen2-7B", Choice(tensor=8), "attention-heads", "tensor", 4, id="28-heads"),
        pytest.param("Qwen2-0.5B", Choice(tensor=4), "attention-heads", "tensor", 2, id="14-heads"),
        pytest.param(
            "microsoft--phi-4", Choice(tensor=4), "kv-heads", "tensor", 2, id="10-kv-heads"
        ),
        pytest.param(
            "Llama-3.1-8B", Choice(tensor=16, decode_context=3), "decode-context",
            "decode_context", 2, id="dcp-does-not-divide-tp",
        ),
        pytest.param(
            "Llama-3.1-8B", Choice(tensor=8, decode_context=2), "decode-context",
            "decode_context", 1, id="dcp-without-copies-of-kv-heads",
        ),
        pytest.param(
            "Llama-3.1-8B", Choice(expert=True), "expert-parallel", "expert", False, id="dense-ep"
        ),
        pytest.param(
            "Llama-3.1-8B", Choice(max_model_len=200_000), "max-model-len",
            "max_model_len", 131_072, id="too-long",
        ),
        pytest.param(
            "Mamba-Codestral-7B-v0.1", Choice(pipeline=2), "pipeline", "pipeline", 1, id="no-stages"
        ),
        pytest.param(
            "Llama-3.1-8B", Choice(lora_rank=24), "lora-rank", "lora_rank", 32, id="lora-rank"
        ),
        pytest.param(
            "Qwen3-30B-A3B", Choice(tensor=5), "expert-size", "tensor", 4, id="experts-over-five"
        ),
        pytest.param(
            "Llama-3.1-8B", Choice(max_num_batched_tokens=128, max_num_seqs=256),
            "batched-tokens-below-seqs", "max_num_batched_tokens", 256, id="batch",
        ),
    ],
)  # fmt: skip
def test_a_choice_is_refused_with_the_nearest_that_works(
    name: str, choice: Choice, rule: str, setting: str, nearest: Any
) -> None:
    """Each as the newest release has it."""
    refused = asked(name, choice)

    assert rule in refused
    assert (refused[rule].setting, refused[rule].nearest) == (setting, nearest)


@pytest.mark.parametrize(("release", "nearest"), [((0, 11, 0), 8), ((0, 11, 1), None)])
def test_adapters_of_rank_1_are_known_since_0_11_1(
    release: tuple[int, int, int], nearest: int | None
) -> None:
    refused = asked("Llama-3.1-8B", Choice(lora_rank=1), vllm=release)

    assert (refused["lora-rank"].nearest if "lora-rank" in refused else None) == nearest


def test_mla_has_no_kv_heads_to_divide_by_decode_context() -> None:
    """Every rank has the whole latent cache, so any divisor of the ranks may share it."""
    for size in (2, 4, 8):
        assert asked("DeepSeek-V3", Choice(tensor=8, decode_context=size)) == {}
    assert "decode-context" in asked("DeepSeek-V3", Choice(tensor=8, decode_context=3))


def test_data_parallel_divides_experts_until_they_are_divided_as_a_whole() -> None:
    """Qwen3's 768 inner numbers go over 2 x 8 ranks, but not over 5 x 8."""
    assert "expert-size" not in asked("Qwen3-30B-A3B", Choice(tensor=2, data=8))
    refused = asked("Qwen3-30B-A3B", Choice(tensor=1, data=5))["expert-size"]
    assert (refused.setting, refused.nearest) == ("expert", True)
    assert asked("Qwen3-30B-A3B", Choice(tensor=1, data=5, expert=True)) == {}


@pytest.mark.parametrize(
    ("vllm", "refused"),
    [((0, 28, 0), True), ((0, 29, 0), False), ((0, 33, 0), False)],
)
def test_fp8_blocks_of_experts_are_refined_since_0_29(vllm: tuple[int, ...], refused: bool) -> None:
    """768 over 4 ranks leaves 192, one and a half blocks of 128."""
    found = asked("Qwen3-30B-A3B-FP8", Choice(tensor=4), vllm=vllm)

    assert ("fp8-expert-block" in found) is refused


def test_fp8_blocks_of_experts_are_no_matter_where_experts_stay_whole() -> None:
    """As the recipes for these models say: divide experts as a whole instead."""
    refused = asked("Qwen3-30B-A3B-FP8", Choice(tensor=4), vllm=(0, 28, 0))["fp8-expert-block"]

    assert "--enable-expert-parallel" in refused.remedy
    assert asked("Qwen3-30B-A3B-FP8", Choice(tensor=4, expert=True), vllm=(0, 28, 0)) == {}


@pytest.mark.parametrize("weights", ["awq", "gptq", "compressed int4"])
def test_a_quantization_group_stays_on_one_gpu(weights: str) -> None:
    """Qwen2.5-7B's 18944 inner numbers over 4 GPUs are 37 groups of 128, over 2 they are 74."""
    quantization = QUANTIZED[weights]

    assert asked("Qwen2.5-7B-Instruct", Choice(tensor=4), quantization=quantization) == {}
    wide = replace(quantization, scheme=Scheme(4, group=256))
    assert "quantization-group" in asked("Qwen2.5-7B-Instruct", Choice(tensor=4), quantization=wide)


@each_row(
    ("weights", "tensor", "vllm", "refused"),
    [
        pytest.param("compressed int4", 4, NEWEST, True, id="compressed-tensors"),
        pytest.param("compressed int4", 4, (0, 23, 0), False, id="compressed-tensors-once"),
        pytest.param("awq", 4, NEWEST, False, id="half-an-awq-group-divides"),
        pytest.param("awq", 16, NEWEST, True, id="no-part-of-an-awq-group-divides"),
        pytest.param("gptq", 16, (0, 10, 0), True, id="no-part-of-a-gptq-group-divides"),
    ],
)
def test_quantization_groups_of_experts(
    weights: str, tensor: int, vllm: tuple[int, ...], refused: bool
) -> None:
    """Qwen3's 768 inner numbers leave 192 on each of 4 GPUs, 48 on each of 16."""
    choice = Choice(tensor=tensor)
    found = asked("Qwen3-30B-A3B", choice, vllm=vllm, quantization=QUANTIZED[weights])
    whole = replace(choice, expert=True)

    assert ("expert-group" in found) is refused
    assert "expert-group" not in asked(
        "Qwen3-30B-A3B", whole, vllm=vllm, quantization=QUANTIZED[weights]
    )


@pytest.mark.parametrize("vllm", [(0, 12, 0), (0, 20, 0), (0, 24, 0), NEWEST])
def test_auto_round_is_served_under_either_name(vllm: tuple[int, ...]) -> None:
    """Its class is called INC's from 0.24 on; the checkpoints stay the same."""
    weights = Quantization("auto-round", Scheme(4, group=128))

    assert asked("Llama-3.1-8B", Choice(), vllm=vllm, quantization=weights) == {}


@each_row(
    ("flag", "gpu", "vllm", "rules"),
    [
        pytest.param("fp8", HOPPER, (0, 30, 0), set(), id="fp8-until-0.30"),
        pytest.param("fp8", HOPPER, NEWEST, {"quantization-flag"}, id="fp8-no-longer"),
        pytest.param("fp8_per_tensor", TURING, NEWEST, set(), id="online-on-turing"),
        pytest.param("mxfp4", TURING, NEWEST, set(), id="online-mxfp4-on-turing"),
        pytest.param("fp8_per_tensor", VOLTA, (0, 20, 0),
                     {"gpu-generation", "quantization-gpu"}, id="online-on-volta"),
        pytest.param("awq", HOPPER, NEWEST, {"quantization-flag"}, id="not-quantized"),
    ],
)  # fmt: skip
def test_quantizing_while_loading(
    flag: str, gpu: tuple[int, int], vllm: tuple[int, ...], rules: set[str]
) -> None:
    """Of a checkpoint in bfloat16, by the names that the release has for it."""
    assert set(asked("Llama-3.1-8B", Choice(quantization=flag), gpu=gpu, vllm=vllm)) == rules


def test_gpt_oss_has_no_more_ranks_than_kv_heads() -> None:
    """Its class divides the 8 KV heads and never copies them."""
    assert asked("gpt-oss-20b", Choice(tensor=8)) == {}
    assert asked("gpt-oss-20b", Choice(tensor=16))["kv-heads"].nearest == 8


def test_compressed_tensors_blocks_are_checked_in_merged_projections() -> None:
    """Llama-3.2-1B's 8 KV heads of 64 leave half a block on each of 8 GPUs."""
    choice = Choice(tensor=8)
    compressed = QUANTIZED["compressed fp8 in blocks"]

    assert "fp8-block" in asked("Llama-3.2-1B", choice, quantization=compressed)
    assert asked("Llama-3.2-1B", choice, quantization=QUANTIZED["fp8 in blocks"]) == {}


@each_row(
    ("weights", "gpu", "vllm", "least"),
    [
        pytest.param("fp8", TURING, (0, 13, 0), (8, 0), id="fp8-on-turing-once"),
        pytest.param("fp8", TURING, NEWEST, None, id="fp8-on-turing-now"),
        pytest.param("modelopt nvfp4", TURING, (0, 13, 0), (8, 0), id="nvfp4-on-turing-once"),
        pytest.param("compressed int4", TURING, (0, 11, 0), (8, 0), id="marlin-on-turing-once"),
        pytest.param("compressed int4", TURING, NEWEST, None, id="marlin-on-turing-now"),
        pytest.param("fp8", AMPERE, (0, 8, 5), None, id="fp8-weights-on-ampere"),
    ],
)
def test_a_gpu_has_to_have_what_the_weights_need(
    weights: str,
    gpu: tuple[int, int],
    vllm: tuple[int, ...],
    least: tuple[int, int] | None,
) -> None:
    """What a method asks for has come down over the releases."""
    refused = asked(
        "Llama-3.1-8B", Choice(dtype="float16"), gpu=gpu, vllm=vllm,
        quantization=QUANTIZED[weights],
    )  # fmt: skip

    nearest = refused["quantization-gpu"].nearest if "quantization-gpu" in refused else None
    assert nearest == least


def test_gpt_oss_needs_ampere_and_bfloat16() -> None:
    """MXFP4's class computes in bfloat16 only, which Turing has not."""
    assert asked("gpt-oss-20b", Choice(), gpu=AMPERE) == {}
    assert asked("gpt-oss-20b", Choice(dtype="float16"))["quantization-dtype"].nearest == "bfloat16"
    assert asked("gpt-oss-20b", Choice(), gpu=TURING)["quantization-gpu"].nearest == (8, 0)


def test_bfloat16_is_refused_on_turing_only_where_it_is_asked_for() -> None:
    """`auto` falls back to float16 from 0.9.1 on; before, it stayed with the checkpoint's."""
    assert asked("Llama-3.1-8B", Choice(), gpu=TURING) == {}
    assert asked("Llama-3.1-8B", Choice(dtype="bfloat16"), gpu=TURING)["bfloat16"].nearest == (
        "float16"
    )
    assert "bfloat16" in asked("Llama-3.1-8B", Choice(), gpu=TURING, vllm=(0, 9, 0))
    assert "bfloat16" not in asked("Llama-3.1-8B", Choice(), gpu=TURING, vllm=(0, 9, 1))


def test_gemma_2_takes_no_float16() -> None:
    """Its activations overflow; on Turing only float32 is left, which `auto` takes."""
    assert asked("gemma-2-9b", Choice(dtype="half"))["float16"].nearest == "bfloat16"
    assert asked("gemma-2-9b", Choice(dtype="half"), gpu=TURING)["float16"].nearest == "float32"
    assert asked("gemma-2-9b", Choice(), gpu=TURING) == {}


def test_an_unknown_gpu_is_not_judged() -> None:
    """Nothing is refused on a guess."""
    assert asked("gpt-oss-20b", Choice(), gpu=None) == {}


@pytest.mark.parametrize(
    ("vllm", "nearest"),
    [
        pytest.param((0, 10, 1), (0, 10, 2), id="too-old"),
        pytest.param((0, 10, 2), None, id="the-first"),
        pytest.param((0, 40, 0), None, id="newer-than-known"),
    ],
)
def test_a_release_without_the_class_is_told_to_change(
    vllm: tuple[int, ...], nearest: tuple[int, ...] | None
) -> None:
    """Qwen3-Next came with 0.10.2."""
    refused = asked("Qwen3-Next-80B-A3B-Instruct", Choice(), vllm=vllm)

    assert (refused["architecture"].nearest if refused else None) == nearest


def test_nothing_is_said_of_a_release_between_two_that_differ() -> None:
    """0.14.0 lacks it and 0.16.0 has it, so 0.15 may."""
    between = [
        (before, after, name)
        for before, after in itertools.pairwise(vllm_support.releases())
        for name in ("Step3p5ForCausalLM",)
        if vllm_support.supports_architecture(name, before) is False
        and vllm_support.supports_architecture(name, after)
    ]

    assert between == [((0, 14, 0), (0, 16, 0), "Step3p5ForCausalLM")]
    assert vllm_support.supports_architecture("Step3p5ForCausalLM", (0, 15, 0)) is None


def test_sparse_attention_needs_hopper() -> None:
    """DeepSeek V3.2 has no backend on Ampere and Ada."""
    assert asked("DeepSeek-V3.2", Choice(tensor=8), gpu=AMPERE)["sparse-attention"].nearest == (
        9,
        0,
    )


@pytest.mark.parametrize(
    ("gpu", "vllm", "refused"),
    [
        ((12, 0), (0, 21, 0), True),
        ((12, 0), (0, 22, 0), False),
        ((10, 0), (0, 21, 0), False),
        (HOPPER, (0, 21, 0), False),
        (ADA, (0, 22, 0), True),
    ],
)
def test_sparse_attention_runs_on_consumer_blackwell_since_0_22(
    gpu: tuple[int, int], vllm: tuple[int, ...], refused: bool
) -> None:
    assert ("sparse-attention" in asked("DeepSeek-V3.2", Choice(tensor=8), gpu=gpu, vllm=vllm)) is (
        refused
    )


@pytest.mark.parametrize(
    ("name", "tensor", "vllm", "refused"),
    [
        # It has eight groups.
        ("Mamba-Codestral-7B-v0.1", 2, (0, 10, 2), True),
        ("Mamba-Codestral-7B-v0.1", 2, (0, 11, 0), False),
        ("Mamba-Codestral-7B-v0.1", 16, (0, 11, 0), True),
        ("Mamba-Codestral-7B-v0.1", 16, (0, 13, 0), True),
        ("Mamba-Codestral-7B-v0.1", 16, (0, 14, 0), False),
        ("Mamba-Codestral-7B-v0.1", 1, (0, 10, 2), False),
        ("Llama-3.1-8B", 2, (0, 10, 2), False),
    ],
)
def test_quantized_mamba_2_layers_are_divided_by_groups_since_0_11_and_anyhow_since_0_14(
    name: str, tensor: int, vllm: tuple[int, ...], refused: bool
) -> None:
    found = asked(name, Choice(tensor=tensor), vllm=vllm, quantization=QUANTIZED["fp8"])

    assert ("quantized-state" in found) is refused


def test_several_things_are_told_at_once() -> None:
    """Who changes one does not learn of the next only then."""
    refused = asked(
        "Qwen2-7B", Choice(tensor=8, dtype="bfloat16", lora_rank=3, max_model_len=10**6), gpu=TURING
    )

    assert {"attention-heads", "bfloat16", "lora-rank", "max-model-len"} <= set(refused)


def test_every_rule_is_in_the_manual() -> None:
    """The page names each rule that the code can name, and no other."""
    rules = sorted((ROOT / "src/gpufleet/sizing/launch_rules").glob("*.py"))
    source = "".join(path.read_text() for path in rules)
    in_code = set(
        re.findall(
            r'(?:Fault|Refused|refuse_gpu|_refuse_dtype)\(\s*(?:case,\s*)?"([a-z0-9-]+)"', source
        )
    )
    in_code |= {"decode-context"}

    assert set(re.findall(r"^\| `([a-z0-9-]+)` \|", PAGE.read_text(), re.MULTILINE)) == in_code


# -- experts that are balanced ---------------------------------------------------------------------


@each_row(
    ("tensor", "data", "copies", "nearest"),
    [(3, 1, 0, 1), (8, 1, 4, 8), (4, 4, 8, 16), (6, 1, 1, 4)],
)
def test_balanced_experts_have_to_divide_evenly(
    tensor: int, data: int, copies: int, nearest: int
) -> None:
    """Qwen3-30B-A3B has 128 experts."""
    choice = Choice(tensor=tensor, data=data, expert=True, redundant_experts=copies)
    refused = asked("Qwen3-30B-A3B", choice)["expert-balance"]
    assert refused.nearest == nearest
    assert f"num_redundant_experts in --eplb-config to {nearest}" in refused.remedy


@each_row(
    "choice",
    [
        Choice(tensor=8, expert=True, redundant_experts=0),
        Choice(tensor=8, expert=True, redundant_experts=8),
        Choice(tensor=3, expert=True),
        Choice(tensor=3, redundant_experts=0),
        Choice(expert=True, redundant_experts=5),
    ],
    ids=["even", "even-with-copies", "not-balanced", "without-ep", "one-gpu"],
)
def test_experts_that_need_no_balance_are_taken(choice: Choice) -> None:
    assert "expert-balance" not in asked("Qwen3-30B-A3B", choice)


# -- a latent cache in FP8 -------------------------------------------------------------------------


@each_row(
    ("vllm", "gpu", "refused"),
    [
        ((0, 11, 0), AMPERE, False),
        ((0, 11, 1), AMPERE, True),
        ((0, 17, 1), AMPERE, True),
        ((0, 18, 0), AMPERE, False),
        ((0, 16, 0), ADA, True),
        ((0, 16, 0), (12, 0), True),
        ((0, 16, 0), HOPPER, False),
        ((0, 16, 0), (10, 3), False),
        ((0, 16, 0), None, False),
    ],
)
def test_a_latent_cache_in_fp8_needs_a_backend_of_the_gpu(
    vllm: tuple[int, ...], gpu: tuple[int, int] | None, refused: bool
) -> None:
    found = asked("DeepSeek-V2-Lite", Choice(kv_cache_dtype="fp8"), gpu=gpu, vllm=vllm)
    assert ("kv-cache-dtype" in found) is refused


def test_a_cache_of_heads_in_fp8_is_read_on_every_gpu() -> None:
    found = asked("Llama-3.1-8B", Choice(kv_cache_dtype="fp8"), gpu=AMPERE, vllm=(0, 16, 0))
    assert "kv-cache-dtype" not in found
