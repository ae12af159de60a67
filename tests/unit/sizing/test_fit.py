"""Does a model fit: the verdict, and the numbers beside it."""

import json
import re
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gpufleet.catalog.gpu_models import card
from gpufleet.errors import FleetError
from gpufleet.sizing.architectures.description import ModelFiles, describe
from gpufleet.sizing.fit import size, smallest_gpus
from gpufleet.sizing.options import AUTO_LENGTH, NEWEST, Options
from tests.support.checkout import ROOT
from tests.support.rows import each_row

MODELS = ROOT / "tests/data/models"
GIB = 1 << 30

NAMES = (
    "meta-llama--Meta-Llama-3.1-8B",
    "Qwen--Qwen3-32B",
    "Qwen--Qwen3-30B-A3B-FP8",
    "deepseek-ai--DeepSeek-V2-Lite",
    "openai--gpt-oss-20b",
    "google--gemma-2-9b",
)


QUANTIZED = {"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": False, "sym": True}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


@cache
def model(name):
    return describe(ModelFiles(json.loads((MODELS / f"{name}.json").read_text())["config"]))


def options(gpu="H100", **given):
    found = card(gpu)
    return Options(
        **{
            "gpu_memory_gib": found.memory_gib,
            "compute_capability": found.compute_capability,
            "vllm": (0, 19, 0),
            **given,
        }
    )


def test_json_has_every_key_and_no_key_without_its_unit():
    """Programs read these names; a number of bytes says so in its name."""
    document = size(model(NAMES[0]), options()).as_json()

    assert list(document)[:12] == [
        "fits",
        "confidence",
        "reasons",
        "weights_bytes_per_gpu",
        "kv_bytes_per_token_per_gpu",
        "kv_bytes_for_max_model_len_per_gpu",
        "kv_cache_bytes_per_gpu",
        "kv_cache_tokens",
        "max_concurrency",
        "largest_max_model_len",
        "smallest_gpus",
        "activation_bytes_per_gpu",
    ]
    assert json.loads(json.dumps(document)) == document


def test_a_start_that_was_logged():
    """
    Llama 3.1 8B on an H100 at 0.95 and 8,192 tokens, vLLM 0.19.0: 58.11 GiB for the cache,
    as in tests/data/start_up_logs.json.
    """
    found = size(
        model(NAMES[0]),
        options(
            max_model_len=8192,
            gpu_memory_utilization=0.95,
            max_num_seqs=1024,
            max_num_batched_tokens=8192,
        ),
    )

    assert found.fits
    assert found.kv_bytes_per_token_per_gpu == 131_072
    assert found.kv_cache_bytes_per_gpu / GIB == pytest.approx(58.11, abs=0.1)
    assert found.largest_max_model_len == 131_072


@each_row("name", NAMES)
@each_row("memory", [20.0, 24.0])
def test_given_the_caches_bytes_nothing_is_estimated(name, memory):
    """Tokens follow from the bytes, whatever the GPU and its utilization are."""
    asked = options(gpu_memory_gib=1000.0, kv_cache_memory_bytes=int(memory * GIB))

    found = size(model(name), asked)
    other = size(model(name), replace(asked, gpu_memory_gib=900.0, gpu_memory_utilization=0.3))

    assert found.confidence == "certain"
    assert found.estimate_error_bytes_per_gpu == 0
    assert found.kv_cache_bytes_per_gpu == memory * GIB
    assert (found.kv_cache_tokens, found.max_concurrency) == (
        other.kv_cache_tokens,
        other.max_concurrency,
    )


def test_the_caches_bytes_may_be_more_than_the_gpu_has():
    """vLLM does not look, and runs out of memory later: this is no fit."""
    found = size(model(NAMES[0]), options("L4", kv_cache_memory_bytes=20 * GIB))

    assert not found.fits
    assert "--kv-cache-memory-bytes" in found.reasons[0]


@each_row("name", NAMES)
def test_with_more_memory_no_first_then_near_the_edge_then_yes(name):
    """A verdict within the estimate's error of the limit is never a fit, and never certain."""
    verdicts = []
    for half in range(4 * 2, 96 * 2):
        found = size(model(name), options(gpu_memory_gib=half / 2, max_num_seqs=64))
        verdicts.append((found.fits, found.confidence))
        assert not (found.fits and found.confidence == "near the edge")

    changes = [verdicts[0], *(b for a, b in pairwise(verdicts) if a != b)]
    assert changes == [(False, "certain"), (False, "near the edge"), (True, "certain")]


@each_row("name", NAMES)
def test_every_no_has_a_reason(name):
    for step in range(10, 100, 7):
        found = size(model(name), options(gpu_memory_gib=float(step)))
        assert found.fits or found.reasons
        assert all("0x" not in reason and len(reason) > 30 for reason in found.reasons)


@settings(max_examples=60, deadline=None)
@given(
    name=st.sampled_from(NAMES),
    memory=st.floats(10, 180),
    vllm=st.sampled_from([(0, 9, 2), (0, 11, 2), (0, 16, 0), (0, 19, 0), (0, 24, 0), (0, 33, 0)]),
    tensor=st.sampled_from([1, 2, 4]),
)
@example(name="openai--gpt-oss-20b", memory=16.0, vllm=(0, 16, 0), tensor=1)
def test_the_longest_length_starts_and_no_longer_one(name, memory, vllm, tensor):
    """
    The next length does not start; this one has room for a request.

    Or it is said that it has none: some releases compare less than a request needs.
    """
    asked = options(gpu_memory_gib=memory, vllm=vllm, tensor_parallel=tensor, max_num_seqs=16)
    longest = size(model(name), asked).largest_max_model_len
    if not longest:
        return

    at = size(model(name), replace(asked, max_model_len=longest))
    room = at.kv_bytes_for_max_model_len_per_gpu <= at.kv_cache_bytes_per_gpu
    assert room or any("cannot serve one request" in reason for reason in at.reasons)
    if longest < model(name).architecture.max_model_len:
        beyond = size(model(name), replace(asked, max_model_len=longest + 1))
        assert beyond.largest_max_model_len == longest
        assert not beyond.fits


def test_auto_takes_the_longest_that_starts():
    asked = options("L4", max_model_len=AUTO_LENGTH)
    found = size(model(NAMES[0]), asked)

    assert found.max_model_len == found.largest_max_model_len
    assert 0 < found.max_model_len < 131_072


@each_row("name", NAMES)
@each_row("gpu", ["L4", "H100"])
def test_the_smallest_number_of_gpus_fits_and_half_of_it_does_not(name, gpu):
    asked = options(gpu)
    fewest = smallest_gpus(model(name), asked)

    def fits(gpus):
        divisions = ((tensor, gpus // tensor) for tensor in (1, 2, 4, 8) if gpus >= tensor)
        return any(
            size(model(name), replace(asked, tensor_parallel=tensor, pipeline_parallel=stages)).fits
            for tensor, stages in divisions
        )

    assert fewest is not None
    assert fits(fewest)
    assert fewest == 1 or not fits(fewest // 2)


def test_a_pipelines_tightest_stage_decides():
    """The last stage has the head and the sampler: the cache is what is left there."""
    llama = model(NAMES[0])
    one, two = (size(llama, options(pipeline_parallel=stages)) for stages in (1, 2))

    assert two.weights_bytes_per_gpu < one.weights_bytes_per_gpu
    assert two.kv_bytes_per_token_per_gpu == one.kv_bytes_per_token_per_gpu // 2
    assert two.activation_bytes_per_gpu == one.activation_bytes_per_gpu


def test_a_stage_without_attention_needs_no_cache():
    """Many of Nemotron Super's layers have no attention: some stages have no cache."""
    found = size(model("nvidia--Llama-3_3-Nemotron-Super-49B-v1"), options(pipeline_parallel=16))

    assert found.kv_cache_tokens > 0


def test_more_stages_than_layers_are_refused():
    with pytest.raises(FleetError, match="--pipeline-parallel-size 100: the model has 32 layers"):
        size(model(NAMES[0]), options(pipeline_parallel=100))


def test_what_vllm_refuses_is_no_fit_and_certain():
    """Three GPUs do not divide 32 heads, whatever the memory."""
    found = size(model(NAMES[0]), options(tensor_parallel=3))

    assert (found.fits, found.confidence) == (False, "certain")
    assert "--tensor-parallel-size 3" in found.reasons[0]


def test_a_newer_release_is_counted_as_the_newest_known_with_twice_the_error():
    known, newer = (
        size(model(NAMES[0]), options(vllm=vllm)) for vllm in ((*NEWEST, 0), (0, 99, 0))
    )

    assert newer.kv_cache_tokens == known.kv_cache_tokens
    assert newer.estimate_error_bytes_per_gpu == 2 * known.estimate_error_bytes_per_gpu
    assert any("newer than the releases that gpufleet knows" in note for note in newer.notes)


@each_row(
    ("given", "says"),
    [
        ({"vllm": (0, 7, 3)}, "--vllm 0.7.3: gpufleet does not support releases before 0.8"),
        ({"dtype": "int3"}, "--dtype int3: vLLM accepts"),
        ({"gpu_memory_utilization": 1.5}, "--gpu-memory-utilization 1.5: the value must be"),
        ({"max_model_len": 0}, "--max-model-len 0: the value must be above 0"),
        ({"quantization": "awq"}, "--quantization awq: the checkpoint is not quantized"),
        ({"kv_cache_dtype": "fp3"}, "--kv-cache-dtype fp3"),
    ],
)
def test_what_cannot_be_is_refused_by_name(given, says):
    with pytest.raises(FleetError, match=says):
        size(model(NAMES[0]), options(**given))


def test_all_mistakes_are_named_at_once():
    with pytest.raises(FleetError) as refused:
        size(model(NAMES[0]), options(vllm=(0, 5, 0), dtype="int3", max_model_len=-7))

    assert len(refused.value.problems) == 3


def test_a_checkpoint_quantized_while_loading_has_to_fit_unquantized_before_0_16():
    """Qwen3 32B is 61 GiB in bfloat16: FP8 fits a 48 GB GPU, its loading only since 0.16."""
    asked = {"quantization": "fp8", "max_model_len": 2048, "max_num_seqs": 16}
    older, newer = (
        size(model("Qwen--Qwen3-32B"), options("RTX-6000-Ada", vllm=vllm, **asked))
        for vllm in ((0, 13, 0), (0, 16, 0))
    )

    assert newer.fits
    assert not older.fits
    assert "before it quantizes" in older.reasons[-1]


def test_graphs_outside_the_budget_make_a_high_utilization_no_fit():
    """Before 0.20, 0.98 of a small GPU leaves no room for the graphs that are captured later."""
    asked = {"max_model_len": 4096, "gpu_memory_utilization": 0.97}
    older, newer = (
        size(model(NAMES[0]), options("L4", vllm=vllm, **asked))
        for vllm in ((0, 19, 0), (0, 21, 0))
    )

    assert not older.fits
    assert "CUDA graphs" in older.reasons[-1]
    assert newer.fits


def test_on_a_cpu_the_cache_has_what_it_is_given():
    found = size(
        model(NAMES[0]),
        Options(gpu_memory_gib=64.0, vllm=(0, 32, 0), device="cpu", kv_cache_memory_bytes=64 << 20),
    )

    assert found.block_size_tokens == 128
    assert found.kv_cache_tokens == (64 << 20) // 131_072 // 128 * 128


def test_a_cache_that_is_given_and_too_small_names_what_would_do():
    tried = options(kv_cache_memory_bytes=1 << 20, max_model_len=4096, vllm=(0, 32, 0))
    found = size(model(NAMES[0]), tried)
    assert not found.fits
    assert "1.00 MiB" in found.reasons[0]
    needed = int(re.search(r"--kv-cache-memory-bytes (\d+)", found.remedy)[1])
    assert size(model(NAMES[0]), replace(tried, kv_cache_memory_bytes=needed)).fits


def test_a_model_of_few_layers_is_not_divided_further_than_its_layers():
    """No pipeline is tried with more stages than layers, however small the GPU."""
    config = dict(model(NAMES[0]).config) | {"num_hidden_layers": 2}
    found = size(describe(ModelFiles(config)), options(gpu_memory_gib=0.5))
    assert not found.fits
    assert found.smallest_gpus is None


@each_row("gpu", [15.0, 22.0, 39.4])
@each_row("length", [None, 8192])
def test_every_change_that_is_proposed_makes_it_start(gpu, length):
    """A flag with its value as it stands in the sentence, and nothing else, is a certain fit."""
    description = model("Qwen--Qwen3-32B-FP8")
    tried = Options(gpu_memory_gib=gpu, vllm=(0, 32, 0), max_model_len=length)
    found = size(description, tried)
    assert not found.fits
    proposed = re.findall(r"--([a-z-]+) (\w+)", found.remedy)
    assert proposed
    for flag, value in proposed:
        name = {"tensor-parallel-size": "tensor_parallel"}.get(flag, flag.replace("-", "_"))
        changed = replace(tried, **{name: int(value) if value.isdigit() else value})
        assert size(description, changed).fits, flag


@each_row(
    ("name", "wrong"),
    [
        ("microsoft--Phi-3.5-MoE-instruct", {"num_key_value_heads": 0}),
        ("OrionStarAI--Orion-14B", {"num_attention_heads": 10**30}),
        ("meta-llama--Meta-Llama-3.1-8B", {"max_position_embeddings": 0}),
        ("ibm-granite--granite-4.0-h-small", {"hidden_size": 3}),
        ("meta-llama--Meta-Llama-3.1-8B", {"rope_scaling": {"factor": 10**30}}),
        (
            "meta-llama--Meta-Llama-3.1-8B-GPTQ-Int4",
            {"quantization_config": QUANTIZED | {"bits": 1e999}},
        ),
        ("meta-llama--Meta-Llama-3.1-8B", {"quantization_config": FP8 | {"ignore": ["re:("]}}),
        (
            "meta-llama--Meta-Llama-3.1-8B",
            {"quantization_config": FP8 | {"weight_block_size": [0, 0]}},
        ),
    ],
)
def test_a_config_that_no_model_can_have_is_refused_in_a_sentence(name, wrong):
    """Heads, lengths and bits of nothing, or of more than there is."""
    config = json.loads((MODELS / f"{name}.json").read_text())["config"]

    with pytest.raises(FleetError, match="a value of an unexpected type"):
        size(describe(ModelFiles({**config, **wrong})), options())


def test_a_quantization_that_is_no_mapping_is_refused():
    """vLLM ends there; weights of another size than they are would be an answer."""
    config = json.loads((MODELS / f"{NAMES[0]}.json").read_text())["config"]

    for wrong in (["awq"], "awq", 4):
        with pytest.raises(FleetError, match="`quantization_config` in config"):
            describe(ModelFiles({**config, "quantization_config": wrong}))
    for nothing in (None, {}):
        assert describe(ModelFiles({**config, "quantization_config": nothing})).quantization is None


@pytest.mark.parametrize(
    ("gpu", "given"),
    [
        ("L4", {"max_num_seqs": 4096}),
        ("H100", {"max_num_seqs": 20_000}),
        ("H100", {"max_num_batched_tokens": 512, "vllm": (0, 10, 0)}),
    ],
)
def test_a_batch_smaller_than_its_sequences_is_refused_by_the_other_s_default_too(gpu, given):
    """One of the two is given, and the release's default of the other does not go with it."""
    found = size(model(NAMES[0]), options(gpu, max_model_len=4096, **given))

    assert not found.fits
    assert "is less than --max-num-seqs" in found.reasons[0]


def test_fewer_tokens_than_sequences_lower_the_sequences_since_0_10_1():
    found = size(model(NAMES[0]), options(max_num_batched_tokens=512, vllm=(0, 10, 1)))

    assert found.fits
    assert found.max_num_seqs == 512


@each_row(
    ("given", "says"),
    [
        ({"gpu_memory_gib": float("nan")}, "--gpu-memory-gib nan"),
        ({"gpu_memory_gib": float("inf")}, "--gpu-memory-gib inf"),
        ({"tensor_parallel": 10**20}, "--tensor-parallel-size 1"),
        ({"pipeline_parallel": 10**10}, "--pipeline-parallel-size 10000000000"),
        ({"data_parallel": 0}, "--data-parallel-size 0"),
        ({"decode_context_parallel": 10**30}, "--decode-context-parallel-size 1"),
    ],
)
def test_numbers_that_nobody_means_are_refused_at_once(given, says):
    with pytest.raises(FleetError, match=says):
        size(model(NAMES[0]), options(**given))


def test_a_start_that_cannot_serve_one_request_says_so():
    """0.13 checks Llama 4's chunks, and its cache keeps the whole context."""
    scout = model("meta-llama--Llama-4-Scout-17B-16E-Instruct")
    given = {"tensor_parallel": 4, "kv_cache_memory_bytes": 10 * GIB, "max_model_len": 400_000}

    found = size(scout, options("B200", vllm=(0, 13, 0), **given))

    assert found.max_concurrency < 1
    assert any("cannot serve one request of 400,000 tokens" in each for each in found.reasons)


def test_performance_mode_throughput_doubles_what_is_not_given_since_0_17():
    """vLLM does so before it makes the dummy run."""

    def batch(**given):
        found = size(model(NAMES[0]), options(max_model_len=4096, throughput=True, **given))
        return found.max_num_seqs, found.max_num_batched_tokens

    assert batch(vllm=(0, 19, 0)) == (2048, 16384)
    assert batch(vllm=(0, 16, 0)) == (1024, 8192)
    assert batch(vllm=(0, 19, 0), max_num_seqs=64) == (64, 16384)


@pytest.mark.parametrize(("gib", "said"), [(18.0, True), (18.25, False), (19.0, False)])
def test_a_hundredth_less_than_one_request_is_taken_for_rounding(gib, said):
    """1.8 % short is too little, 0.3 % is what the pool sets aside."""
    scout = model("meta-llama--Llama-4-Scout-17B-16E-Instruct")
    given = {"tensor_parallel": 4, "max_model_len": 400_000}

    found = size(
        scout, options("B200", vllm=(0, 13, 0), kv_cache_memory_bytes=int(gib * GIB), **given)
    )

    assert found.max_concurrency == pytest.approx(gib * 0.0546, abs=0.002)
    assert any("cannot serve one request" in each for each in found.reasons) is said


@pytest.mark.parametrize(("utilization", "fits"), [(0.97, True), (0.98, False)])
def test_a_budget_has_to_leave_the_half_gib_that_is_there_before_vllm_measures(utilization, fits):
    """2 % of an L4 is 0.44 GiB."""
    tried = options("L4", vllm=(0, 21, 0), max_model_len=4096, gpu_memory_utilization=utilization)

    found = size(model(NAMES[0]), tried)

    assert found.fits is fits
    assert any("leaves 0.44 GiB" in each for each in found.reasons) is not fits


def test_fewer_sequences_are_proposed_only_where_there_are_more():
    """The dummy run of 4,096 sequences takes the room; that of 256 does not, and is vLLM's own."""
    tried = options("A100-40GB", max_num_batched_tokens=8192)

    def remedy(**given):
        return size(model(NAMES[0]), replace(tried, **given)).remedy

    assert "--max-num-seqs 256" in remedy(max_num_seqs=4096)
    assert "--max-num-seqs" not in remedy(max_num_seqs=256, max_model_len=120_000)
    assert "--max-num-seqs" not in remedy(max_num_seqs=16, gpu_memory_gib=17.0)


@each_row(
    ("name", "capability", "said"),
    [
        ("Qwen--Qwen3-32B-FP8", (8, 0), ["FP8"]),
        ("Qwen--Qwen3-32B-FP8", (8, 9), []),
        ("nvidia--Gemma-4-31B-IT-NVFP4", (9, 0), ["FP4"]),
        ("nvidia--Gemma-4-31B-IT-NVFP4", (10, 0), []),
        ("Qwen--Qwen3-32B", (8, 0), []),
    ],
)
def test_a_quantization_that_the_gpu_cannot_multiply_by_is_remarked_on(name, capability, said):
    """It saves memory alone, and an operator may have wanted it for speed."""
    found = size(model(name), options(vllm=(0, 32, 0), compute_capability=capability))

    assert [each.split()[0] for each in found.notes if "Marlin" in each] == said
