"""The plan counts what takes memory, or names it and takes nothing for granted."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpufleet.errors import FleetError
from gpufleet.planning.candidates import Verdict, evaluate_divisions
from gpufleet.planning.explanation import explain
from gpufleet.planning.parallelism import Kind
from gpufleet.settings.serving_settings import Served
from gpufleet.sizing.fit import size
from tests.support.models import described
from tests.support.planned import machine, planned
from tests.support.rows import each_row

L40S = Kind("NVIDIA L40S", 46068, (8, 9), (1,) * 4, "0.32.0")
LLAMA, SMALL = "meta-llama--Meta-Llama-3.1-8B", "meta-llama--Llama-3.2-1B"
LORA = {"enable-lora": True, "max-loras": 32, "max-lora-rank": 512}
DRAFT = {"speculative-config": {"model": "/srv/draft", "num_speculative_tokens": 3}}


def judged(flags, model=LLAMA, draft=None, **settings):
    served = Served.model_validate(
        {"model": "/srv/m", "context": 16384, "flags": flags, **settings}
    )
    description = replace(described(model), draft=draft)
    return evaluate_divisions("m", served, description, L40S, 1, sizer=size)


def test_adapters_change_what_fits():
    """32 adapters of rank 512 are twice Llama 3.1 8B: one L40S holds the model, and not them."""
    assert judged({}).chosen.division.gpus == 1
    assert judged(LORA).candidates[0].verdict is Verdict.NO


@each_row(
    ("flags", "model", "named"),
    [
        (LORA, "Qwen--Qwen3-30B-A3B-FP8", "--enable-lora"),
        (DRAFT, LLAMA, "/srv/draft"),
        ({"speculative-config": '{"method": "eagle3", "model": "e/x"}'}, LLAMA, "e/x"),
    ],
)
def test_what_is_not_counted_is_not_checked_and_is_taken_only_by_the_operators_number(
    flags, model, named
):
    unasked = judged(flags, model)
    assert unasked.chosen is None
    assert {each.verdict for each in unasked.candidates} <= {Verdict.UNKNOWN, Verdict.NO}
    assert any(named in each.reason for each in unasked.candidates)

    chosen = judged(flags, model, tensor_parallel=1).chosen
    assert chosen.verdict is Verdict.UNKNOWN
    assert chosen.reason.startswith("used because `tensor_parallel` is set: ")
    assert named in chosen.reason


def test_a_draft_model_that_was_read_is_counted():
    plain, found = judged({}).chosen, judged(DRAFT, draft=described(SMALL)).chosen

    assert found.verdict is Verdict.FITS
    assert found.sizing.weights_bytes_per_gpu > plain.sizing.weights_bytes_per_gpu + (2 << 30)
    assert found.sizing.kv_cache_tokens < plain.sizing.kv_cache_tokens


def fleet(flags, **settings):
    """Plan for one machine with Llama 3.1 8B at /srv/m, and Llama 3.2 1B at /srv/draft."""
    node = machine("h100x8", 1, {"/srv/m": LLAMA, "/srv/draft": SMALL})
    served = {"model": "/srv/m", "context": 8192, "flags": flags, **settings}
    vllm = {"version": "0.32.0", "lock": "vllm.txt", "listen": "127.0.0.1"}
    return planned({"gpu-01": node}, {"gpu-01": {"serving": {"m": served}, "vllm": vllm}})


def test_a_plan_without_what_is_counted_refuses_and_says_what_to_write():
    flags = {"speculative-config": {"method": "eagle3", "model": "/srv/draft"}}
    with pytest.raises(
        FleetError, match=r"serving\.m: gpufleet cannot determine .*/srv/draft.*eagle3.*Set "
    ):
        fleet(flags)

    said = fleet(flags, tensor_parallel=1).plan.reasons
    assert any("used because" in each and "/srv/draft" in each for each in said)


def test_the_notes_of_sizing_reach_the_plan_and_its_explanation():
    found = fleet({"cpu-offload-gb": 4}).plan
    (note,) = [reason for reason in found.reasons if "--cpu-offload-gb 4" in reason]

    assert note.startswith("m: ")
    assert "not compared" not in note  # suspect_settings compares it with the node's memory
    assert note in explain(found)
    assert not any("--cpu-offload-gb" in reason for reason in fleet({}).plan.reasons)


def test_the_plan_reads_a_draft_model_where_it_lies():
    def tokens(flags):
        return fleet(flags).plan.candidates[0].chosen.kv_tokens

    assert tokens(DRAFT) < tokens({})


def test_a_context_that_the_operator_lengthens_is_planned():
    """YaRN in `hf-overrides`, as a model's card says; without it the length is refused."""
    long = {"context": 262144}
    scaled = {
        "rope_parameters": {
            "rope_type": "yarn",
            "factor": 2.0,
            "original_max_position_embeddings": 131072,
        },
        "max_position_embeddings": 262144,
    }

    with pytest.raises(FleetError, match=r"`max_position_embeddings`.* in `hf-overrides`"):
        fleet({}, **long)
    assert fleet({"hf-overrides": scaled}, **long).plan.stages


def test_a_model_larger_than_the_gpu_is_planned_with_layers_in_the_nodes_memory():
    big = Kind("NVIDIA L4", 23034, (8, 9), (1,), "0.32.0")
    flags = {"cpu-offload-gb": 16}
    served = {"model": "/srv/m", "context": 8192, "tensor_parallel": 1}

    def fits(flags):
        wanted = Served.model_validate({**served, "flags": flags})
        description = described("microsoft--phi-4")
        found = evaluate_divisions("m", wanted, description, big, 1, sizer=size)
        return found.candidates[0].verdict is Verdict.FITS

    assert not fits({})
    assert fits(flags)


@each_row(
    ("model", "flags"),
    [
        (LLAMA, {"runner": "pooling"}),
        (LLAMA, {"convert": "embed"}),
        ("Qwen--Qwen2.5-VL-7B-Instruct", {"language-model-only": True}),
        ("Qwen--Qwen2.5-VL-7B-Instruct", {"limit-mm-per-prompt": '{"image": 0, "video": 0}'}),
    ],
)
def test_flags_that_load_less_leave_more_for_the_cache(model, flags):
    plain, found = judged({}, model).chosen, judged(flags, model).chosen

    assert found.sizing.weights_bytes_per_gpu < plain.sizing.weights_bytes_per_gpu
    assert found.sizing.kv_cache_tokens > plain.sizing.kv_cache_tokens
