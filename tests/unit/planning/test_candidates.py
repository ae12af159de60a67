"""How a model is divided: on sizings written out for one rule each, and on real models."""

from __future__ import annotations

import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
import yaml

from gpufleet.errors import NotKnownError
from gpufleet.planning.candidates import Verdict, evaluate_divisions
from gpufleet.planning.parallelism import Division, Kind
from gpufleet.planning.serving_options import sizing_options
from gpufleet.planning.suggestions import remedies
from gpufleet.settings.serving_settings import Served
from gpufleet.sizing.fit import size
from gpufleet.sizing.options import Sizing
from tests.support.models import described
from tests.support.rows import each_row

GIB = 1 << 30
H100X8 = Kind("NVIDIA H100 80GB HBM3", 81559, (9, 0), (8,), "0.32.0")
L40SX8 = Kind("NVIDIA L40S", 46068, (8, 9), (1,) * 8, "0.32.0")
PAIRS = Kind("NVIDIA A100 80GB PCIe", 81920, (8, 0), (2, 2), "0.32.0")

GROWS = Sizing(
    fits=True,
    confidence="certain",
    reasons=(),
    weights_bytes_per_gpu=0,
    kv_bytes_per_token_per_gpu=1,
    kv_bytes_for_max_model_len_per_gpu=1000,
    kv_cache_bytes_per_gpu=0,
    kv_cache_tokens=0,
    max_concurrency=0.0,
    largest_max_model_len=0,
    smallest_gpus=1,
    activation_bytes_per_gpu=GIB,
    non_torch_bytes_per_gpu=GIB,
    cuda_graph_bytes_per_gpu=0,
    estimate_error_bytes_per_gpu=GIB // 2,
    max_model_len=1000,
    max_num_seqs=256,
    max_num_batched_tokens=8192,
    gpu_memory_utilization=0.9,
    block_size_tokens=16,
    vllm=(0, 32, 0),
)


def model(weights_gib, kv_heads=8, kv_bytes_per_token=1 << 17, experts=0, error_gib=0.5):
    """A model and its sizer: weights divided by TP and PP, KV heads as far as there are any."""
    description = SimpleNamespace(architecture=SimpleNamespace(kv_heads=kv_heads, experts=experts))

    def sizer(_, asked):
        ranks = asked.tensor_parallel * asked.pipeline_parallel
        ranks *= asked.data_parallel if asked.expert_parallel else 1
        weights = weights_gib * GIB / ranks
        token = kv_bytes_per_token / min(asked.tensor_parallel, kv_heads) / asked.pipeline_parallel
        length = asked.max_model_len or 8192
        left = 0.9 * asked.gpu_memory_gib * GIB - weights - 2 * GIB
        held = max(0, int(left))
        certain = (left - error_gib * GIB) / token / length >= 1
        near = not certain and (left + error_gib * GIB) / token / length >= 1
        return replace(
            GROWS,
            fits=certain,
            confidence="near the edge" if near else "certain",
            reasons=() if certain else ("too little is left for one request",),
            weights_bytes_per_gpu=int(weights),
            kv_cache_bytes_per_gpu=held,
            kv_cache_tokens=int(held / token),
            max_concurrency=held / token / length,
            largest_max_model_len=int(held / token),
            estimate_error_bytes_per_gpu=int(error_gib * GIB),
            max_model_len=length,
        )

    return description, sizer


def served(**changes):
    return Served.model_validate({"model": "/srv/model", **changes})


def considered(wanted, drawn, kind=H100X8, nodes=1):
    description, sizer = drawn
    return evaluate_divisions("m", wanted, description, kind, nodes, sizer=sizer)


def chosen(*arguments, **others):
    return considered(*arguments, **others).chosen.division


# Objectives


@each_row(
    ("objective", "weights_gib", "expected"),
    [
        # 71.3 GiB of budget, 2 of them for the start: beside 60 GiB of weights 9.3 GiB are left.
        pytest.param("balanced", 15, Division(1), id="one-gpu-is-enough"),
        pytest.param("balanced", 64, Division(2), id="a-tenth-is-for-the-cache"),
        pytest.param("memory", 64, Division(1), id="the-fewest-gpus"),
        pytest.param("latency", 140, Division(8), id="all-of-the-island"),
        pytest.param("throughput", 15, Division(1), id="many-small-groups"),
        pytest.param("throughput", 130, Division(4), id="where-weights-crowd-the-cache"),
    ],
)
def test_an_objective_decides_among_those_that_fit(objective, weights_gib, expected):
    assert chosen(served(objective=objective), model(weights_gib)) == expected


@pytest.mark.parametrize(
    ("weights_gib", "kv_heads", "tensor"),
    [
        pytest.param(15, 8, 8, id="every-gpu-has-a-head"),
        pytest.param(3, 2, 2, id="heads-would-be-replicated-and-weights-are-small"),
        pytest.param(60, 2, 8, id="heads-would-be-replicated-and-weights-are-large"),
        pytest.param(0.5, 8, 1, id="there-is-next-to-nothing-to-read"),
    ],
)
def test_latency_stops_where_a_wider_group_helps_no_more(weights_gib, kv_heads, tensor):
    """And says why, for the operator will ask."""
    found = considered(served(objective="latency"), model(weights_gib, kv_heads)).chosen

    assert found.division == Division(tensor)
    assert (tensor == 8) != ("are no faster" in found.reason)


def test_throughput_says_of_the_others_how_much_they_hold_and_of_larger_ones_why_not():
    """Two GPUs hold less each, eight about as many as four."""
    found = considered(served(objective="throughput"), model(115))
    reasons = {each.division: each.reason for each in found.candidates}

    assert found.chosen.division == Division(4)
    assert re.fullmatch(
        r"fits, with [\d,]+ KV tokens per GPU, but .* has [\d,]+", reasons[Division(2)]
    )
    assert reasons[Division(8)].endswith("has about as many in more and smaller groups")


def test_throughput_takes_engines_with_whole_experts_for_a_latent_cache():
    """One KV head cannot be divided: TP 8 keeps the same cache eight times, engines their own."""
    found = considered(served(objective="throughput"), model(400, kv_heads=1, experts=64))

    assert found.chosen.division == Division(1, data_parallel=8, expert_parallel=True)
    assert found.chosen.division.unit == 8  # every layer sends tokens to all of them


@pytest.mark.parametrize("objective", ["balanced", "latency", "memory"])
def test_engines_with_experts_are_not_tried_unasked(objective):
    found = considered(served(objective=objective), model(100, experts=64))

    assert {each.division.data_parallel for each in found.candidates} == {1}


def test_every_candidate_has_a_verdict_and_a_reason():
    """Rejected or taken: the table has a sentence for each."""
    found = considered(served(), model(150)).candidates

    assert [(str(each.division), each.verdict, each.replicas) for each in found] == [
        ("TP 1", Verdict.NO, 8),
        ("TP 2", Verdict.NO, 4),
        ("TP 4", Verdict.FITS, 2),
        ("TP 8", Verdict.FITS, 1),
    ]
    assert found[0].reason == "too little is left for one request"
    assert found[3].reason == (
        "fits on more GPUs than needed: TP 4 fits with room for concurrent requests"
    )


# Headroom


def test_the_asked_headroom_has_to_fit_for_certain():
    """9.3 GiB hold 9.3 requests of 8,192 tokens, give or take half a GiB."""
    sized = model(60)

    def verdict(count):
        wanted = served(objective="memory", concurrency=count)
        return considered(wanted, sized).candidates[0].verdict

    assert [verdict(count) for count in (8, 9, 10)] == [Verdict.FITS, Verdict.NEAR, Verdict.NO]


def test_near_the_edge_is_never_taken_unasked():
    """The next larger group is, and the reason of the other is kept."""
    found = considered(served(objective="memory"), model(68.3))

    assert found.candidates[0].verdict is Verdict.NEAR
    assert found.chosen.division == Division(2)


def test_what_the_operator_sets_is_taken_near_the_edge_and_it_is_said():
    found = considered(served(tensor_parallel=1), model(68.3)).chosen

    assert found.division == Division(1)
    assert found.reason.startswith("used because `tensor_parallel` is set: too little")


def test_more_requests_than_fit_at_best_are_refused_where_one_is_near_the_edge():
    """A doubt about one request is none about the five hundred that cannot fit."""
    found = considered(served(tensor_parallel=1, concurrency=500), model(68.3))

    assert found.candidates[0].verdict is Verdict.NO
    assert "`concurrency` requires 500" in found.candidates[0].reason
    assert found.chosen is None


def test_what_the_operator_sets_is_not_taken_where_it_is_certain_to_fail():
    found = considered(served(tensor_parallel=1), model(140))

    assert found.chosen is None
    assert remedies(served(tensor_parallel=1), model(140)[0], H100X8, 1, sizer=model(140)[1]) == (
        "`tensor_parallel: 4`",
        "`span_nodes: true`",
    )


def test_of_the_sequences_that_fit_the_most_are_named():
    """A Mamba layer has a state for each: those of 256 fit beside the weights, those of 512 not."""
    codestral = described("mistralai--Mamba-Codestral-7B-v0.1")

    found = remedies(
        served(), codestral, replace(PAIRS, memory_mib=57732, islands=(1,) * 8), 2, sizer=size
    )

    assert [each for each in found if "max-num-seqs" in each] == ["`max-num-seqs: 256` in `flags`"]


# Beyond an island, beyond a node


def test_a_group_leaves_its_island_only_by_word_and_need():
    small, large = model(15), model(60)

    assert chosen(served(allow_pcie=True), small, L40SX8) == Division(1)
    assert considered(served(), large, L40SX8).chosen is None
    assert chosen(served(allow_pcie=True), large, L40SX8) == Division(2)


def test_a_pipeline_spans_nodes_only_by_word_and_need():
    huge = model(800)

    assert considered(served(), huge, nodes=4).chosen is None
    assert considered(served(span_nodes=True), huge, nodes=1).chosen is None
    assert chosen(served(span_nodes=True), huge, nodes=4) == Division(
        8, pipeline_parallel=2, nodes=2
    )
    assert chosen(served(span_nodes=True), model(140), nodes=4) == Division(4)
    # Cards without NVLink: stages on one node, before any network is between them.
    assert chosen(served(span_nodes=True), model(60), L40SX8, nodes=4) == Division(
        1, pipeline_parallel=2
    )


def test_an_own_pipeline_lies_on_as_few_nodes_as_hold_it():
    wanted = served(tensor_parallel=4, pipeline_parallel=2)

    assert chosen(wanted, model(140)) == Division(4, pipeline_parallel=2)
    spread = chosen(
        wanted.model_copy(update={"span_nodes": True, "pipeline_parallel": 4}), model(140), nodes=2
    )
    assert spread == Division(4, pipeline_parallel=4, nodes=2)
    assert spread.units == 2


@pytest.mark.parametrize(("nodes", "count"), [(1, 2), (7, 14)])
def test_the_choice_does_not_depend_on_how_many_nodes_there_are(nodes, count):
    """It would move what runs whenever a node comes or goes."""
    found = considered(served(), model(140), nodes=nodes).chosen

    assert (found.division, found.replicas) == (Division(4), count)


# What is not known


def test_without_a_description_only_what_is_set_is_taken():
    """And nobody is told that it fits."""
    found = evaluate_divisions(
        "m", served(tensor_parallel=2), "its Hub did not answer", H100X8, 1, sizer=size
    )
    nothing = evaluate_divisions("m", served(), "its Hub did not answer", H100X8, 1, sizer=size)

    assert found.chosen.verdict is Verdict.UNKNOWN
    assert found.chosen.reason == "gpufleet did not check the memory: its Hub did not answer"
    assert nothing.chosen is None


def test_what_cannot_be_sized_counts_as_not_known():
    def refuses(*_):
        raise NotKnownError("vLLM 0.7.0 is older than what is sized")

    found = evaluate_divisions(
        "m", served(tensor_parallel=2), model(1)[0], H100X8, 1, sizer=refuses
    )

    assert (
        found.chosen.reason
        == "gpufleet did not check the memory: vLLM 0.7.0 is older than what is sized"
    )


# Flags


def test_flags_that_take_memory_reach_the_sizing():
    """Numbers as vLLM reads them, names with either stroke."""
    wanted = served(
        flags={
            "max-model-len": "32k",
            "gpu-memory-utilization": 0.8,
            "kv-cache-dtype": "fp8",
            "max-num-seqs": 64,
            "enforce-eager": True,
            "enable-prefix-caching": False,
            "performance-mode": "throughput",
            "speculative-config": {"method": "ngram", "num_speculative_tokens": 3},
        }
    )

    asked = sizing_options(wanted, H100X8, Division(2))

    assert (asked.tensor_parallel, asked.max_model_len, asked.vllm) == (2, 32000, (0, 32, 0))
    assert (asked.gpu_memory_utilization, asked.kv_cache_dtype) == (0.8, "fp8")
    assert (asked.max_num_seqs, asked.enforce_eager, asked.prefix_caching) == (64, True, False)
    assert (asked.speculative_tokens, asked.throughput) == (3, True)
    assert asked.gpu_memory_gib < 81559 / 1024  # what CUDA reports, less than NVML's
    assert sizing_options(served(context=4096), H100X8, Division(1)).max_model_len == 4096


# Real models


@each_row(
    ("name", "kind", "objective", "expected"),
    [
        # Weights alone are 65.7 GiB of 73.3 on each of two: room for one short request, not more.
        ("meta-llama--Meta-Llama-3.1-70B", H100X8, "balanced", Division(4)),
        ("meta-llama--Meta-Llama-3.1-8B", H100X8, "balanced", Division(1)),
        ("meta-llama--Meta-Llama-3.1-8B", H100X8, "latency", Division(8)),
        ("Qwen--Qwen3-0.6B", H100X8, "throughput", Division(1)),
        ("Qwen--Qwen3-32B", PAIRS, "balanced", Division(1)),
    ],
)
def test_real_models_are_divided_as_one_would(name, kind, objective, expected):
    wanted = served(objective=objective, context=8192)

    found = evaluate_divisions("m", wanted, described(name), kind, 1, sizer=size)

    assert found.chosen.division == expected


@each_row(
    ("name", "kind", "changes"),
    [
        ("meta-llama--Meta-Llama-3.1-70B", H100X8, {"tensor_parallel": 2, "concurrency": 64}),
        ("meta-llama--Meta-Llama-3.1-70B", H100X8, {"tensor_parallel": 2}),
        ("meta-llama--Meta-Llama-3.1-8B", PAIRS, {"expert_parallel": True}),
        ("Qwen--Qwen3-32B", L40SX8, {}),
        # The states of as many sequences as it takes by default do not fit on one GPU.
        ("mistralai--Mamba-Codestral-7B-v0.1", L40SX8, {}),
    ],
)
def test_a_remedy_is_tried_before_it_is_named(name, kind, changes):
    """Each of them, written by itself, makes the model fit."""
    wanted, description = served(**changes), described(name)

    found = remedies(wanted, description, kind, 2, sizer=size)

    assert found
    for each in found:
        told = re.findall(r"`([\w-]+): (\w+)`( in `flags`)?", each)
        settings = {key: yaml.safe_load(value) for key, value, flag in told if not flag}
        flags = {key: value for key, value, flag in told if flag}
        changed = wanted.model_copy(update={**settings, "flags": flags})
        assert told
        assert evaluate_divisions("m", changed, description, kind, 2, sizer=size).chosen


# Engines whose memory is not known


def of_sglang(weights_gib, kind=H100X8, **changes):
    description = replace(described("Qwen--Qwen3-0.6B"), stored_bytes=int(weights_gib * GIB))
    wanted = served(engine="sglang", **changes)
    return evaluate_divisions("m", wanted, description, kind, 1, sizer=None)


def test_of_an_engine_that_is_not_sized_only_the_weights_are_compared_and_nothing_is_chosen():
    found = of_sglang(weights_gib=200)
    assert found.chosen is None
    verdicts = {each.division.tensor_parallel: each.verdict for each in found.candidates}
    assert verdicts == {
        1: Verdict.NO,
        2: Verdict.NO,
        4: Verdict.UNKNOWN,
        8: Verdict.UNKNOWN,
    }
    reasons = [each.reason for each in found.candidates]
    assert reasons[0] == "the weights alone need 200.0 GiB per GPU, but a GPU has only 79.2 GiB"
    assert reasons[2].startswith("the weights need 50.0 GiB per GPU, and a GPU has 79.2 GiB")
    assert "how much additional memory SGLang needs" in reasons[2]


def test_the_operators_own_division_of_it_is_taken_unless_the_weights_do_not_fit():
    assert of_sglang(200, tensor_parallel=4).chosen.verdict is Verdict.UNKNOWN
    assert of_sglang(200, tensor_parallel=2, pipeline_parallel=2).chosen.division == Division(2, 2)
    assert of_sglang(200, tensor_parallel=2).chosen is None


def test_weights_that_are_changed_while_they_are_loaded_are_not_compared():
    (only,) = of_sglang(200, tensor_parallel=1, flags={"quantization": "fp8"}).candidates
    assert only.chosen
    assert only.reason == "gpufleet does not know how much memory SGLang needs"
