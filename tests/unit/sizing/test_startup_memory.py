"""What a start takes besides weights and cache, and the defaults that decide it."""

import json
import statistics

import pytest

from gpufleet.flags import schema
from gpufleet.sizing.architectures.description import ModelFiles, describe
from gpufleet.sizing.dummy_run import GIB, DummyRun
from gpufleet.sizing.options import FIRST, NEWEST
from gpufleet.sizing.startup_memory import batch_defaults, start_memory
from tests.support.checkout import ROOT
from tests.support.rows import each_row

DATA = ROOT / "tests/data"
H100 = {"gpu_memory_gib": 79.19, "compute_capability": (9, 0)}
A100 = {"gpu_memory_gib": 79.25, "compute_capability": (8, 0)}
B200 = {"gpu_memory_gib": 178.35, "compute_capability": (10, 0)}
GB10 = {"gpu_memory_gib": 121.63, "compute_capability": (12, 1)}
L4 = {"gpu_memory_gib": 22.03, "compute_capability": (8, 9)}


def model(name, **changes):
    document = json.loads((DATA / "models" / f"{name}.json").read_text())
    return describe(ModelFiles(document["config"] | changes))


@each_row(
    ("vllm", "gpu", "sequences", "tokens"),
    [
        pytest.param((0, 8, 3), H100, 1024, 8192, id="0.8.3: Hopper"),
        pytest.param((0, 8, 3), A100, 1024, 2048, id="0.8.3: others"),
        pytest.param((0, 8, 5), A100, 1024, 8192, id="0.8.5: by memory"),
        pytest.param((0, 9, 0), A100, 256, 2048, id="0.9: the A100 is small again"),
        pytest.param((0, 9, 0), {**A100, "gpu": "NVIDIA A800-SXM4-80GB"}, 1024, 8192, id="A800"),
        pytest.param((0, 19, 0), H100, 1024, 8192, id="H100"),
        pytest.param((0, 19, 0), L4, 256, 2048, id="L4"),
        pytest.param((0, 27, 0), B200, 1024, 8192, id="0.27: B200"),
        pytest.param((0, 28, 0), B200, 1024, 16384, id="0.28: B200"),
        pytest.param((0, 32, 0), GB10, 256, 2048, id="0.32: GB10, which NVML does not know"),
        pytest.param((0, 33, 0), GB10, 256, 2048, id="0.33: GB10"),
    ],
)
def test_batches_follow_the_gpu_and_the_release(vllm, gpu, sequences, tokens):
    found = batch_defaults(vllm=vllm, max_model_len=32768, **gpu)

    assert (found.max_num_seqs, found.max_num_batched_tokens) == (sequences, tokens)


def test_what_is_given_is_taken():
    found = batch_defaults(
        vllm=(0, 19, 0),
        max_model_len=4096,
        max_num_seqs=3,
        max_num_batched_tokens=64,
        gpu_memory_utilization=0.5,
        **H100,
    )

    assert (found.max_num_seqs, found.max_num_batched_tokens) == (3, 64)
    assert found.gpu_memory_utilization == 0.5


def test_no_more_sequences_than_tokens_and_no_more_tokens_than_sequences_hold():
    """A batch of 64 tokens holds 64 sequences at most; 4 sequences of 100 tokens hold 400."""
    few = batch_defaults(vllm=(0, 19, 0), max_model_len=4096, max_num_batched_tokens=64, **H100)
    short = batch_defaults(vllm=(0, 19, 0), max_model_len=100, max_num_seqs=4, **H100)

    assert few.max_num_seqs == 64
    assert short.max_num_batched_tokens == 400


@each_row(
    "release",
    [each for each in schema.versions() if schema.sort_key(each) >= FIRST],
)
def test_the_utilization_is_the_releases_own_default(release):
    """Read from the release's own parser."""
    flag = schema.load(release).by_dest["gpu_memory_utilization"]

    found = batch_defaults(vllm=schema.sort_key(release), max_model_len=4096, **H100)

    assert found.gpu_memory_utilization == flag.default


def test_the_newest_release_is_the_newest_of_the_package():
    """When a release is added to the flags, somebody has to read its arithmetic, too."""
    assert schema.sort_key(schema.versions()[-1])[:2] == NEWEST


def printed():
    """Return the start-up logs that print the activation peak and the rest."""
    logs = json.loads((DATA / "start_up_logs.json").read_text())
    found = [
        log
        for log in logs
        if "activation_peak_gib" in log["lines"]
        and "non_torch_gib" in log["lines"]
        and isinstance(log["config"], str)
        and log["flags"].get("pipeline_parallel_size", 1) == 1
        and (0, 17) <= schema.sort_key(log.get("behaves_as", log["vllm"])) < (0, 27)
    ]
    assert len(found) >= 40
    return found


def predicted(log):
    flags = log["flags"]
    description = model(log["config"], **log.get("config_changes", {}))
    bytes_each = 4 if flags.get("dtype") == "float32" else 2
    return start_memory(
        description.architecture,
        description.config,
        DummyRun(
            vllm=schema.sort_key(log["vllm"])[:3],
            max_num_seqs=flags["max_num_seqs"],
            max_num_batched_tokens=flags["max_num_batched_tokens"],
            tensor=flags.get("tensor_parallel_size", 1),
            dtype_bytes=bytes_each,
            mxfp4="gpt-oss" in log["config"],
            compute_capability=(9, 0),
        ),
    )


def test_estimates_lie_within_their_errors():
    """Of what start-up logs print: nine of ten within the range, half within 0.15 GiB of it."""
    off, inside = [], 0
    for log in printed():
        if "max_num_seqs" not in log["flags"] or "max_num_batched_tokens" not in log["flags"]:
            continue
        found, lines = predicted(log), log["lines"]
        peak = found.activation.bytes / GIB - lines["activation_peak_gib"]
        rest = found.non_torch.bytes / GIB - lines["non_torch_gib"]
        off.append(abs(peak))
        inside += (
            abs(peak) <= found.activation.error_bytes / GIB
            and abs(rest) <= found.non_torch.error_bytes / GIB
        )

    assert statistics.median(off) <= 0.15
    assert inside >= 0.9 * len(off)


def test_engines_that_dispatch_tokens_hold_at_most_what_gathering_would():
    """Nobody has measured how much: from an engine's own tokens to those of all, and it is said."""
    found = model("deepseek-ai--DeepSeek-V3")
    wide = {"vllm": (0, 33, 0), "max_num_seqs": 256, "max_num_batched_tokens": 8192}

    def activation(**run):
        run = DummyRun(**wide, expert=True, **run)
        return start_memory(found.architecture, found.config, run).activation

    own, gathered = activation(data=1), activation(data=32)
    between = activation(data=32, dispatches=True)

    assert between.bytes - between.error_bytes <= own.bytes
    assert between.bytes + between.error_bytes >= gathered.bytes
    assert activation(data=1, dispatches=True) == own


def test_graphs_belong_to_the_budget_since_0_20():
    """Before, they came on top of it."""
    llama = model("meta-llama--Meta-Llama-3.1-8B")
    run = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192}
    older, newer = (
        start_memory(llama.architecture, llama.config, DummyRun(vllm=vllm, **run))
        for vllm in ((0, 19, 0), (0, 20, 0))
    )

    assert older.whole_range == older.activation + older.non_torch
    assert newer.whole_range == newer.activation + newer.non_torch + newer.cuda_graphs
    assert newer.budget.error_bytes > older.budget.error_bytes


def test_eager_execution_captures_no_graphs():
    llama = model("meta-llama--Meta-Llama-3.1-8B")
    run = DummyRun(
        vllm=(0, 24, 0), max_num_seqs=256, max_num_batched_tokens=2048, enforce_eager=True
    )

    assert start_memory(llama.architecture, llama.config, run).cuda_graphs.high == 0
