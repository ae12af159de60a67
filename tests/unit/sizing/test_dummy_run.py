"""What the run at start takes, and which runner makes it."""

import json

import pytest

from gpufleet.sizing.architectures.description import ModelFiles, describe
from gpufleet.sizing.dummy_run import GIB, DummyRun, has_second_runner, peak_bytes
from tests.support.checkout import ROOT
from tests.support.rows import each_row


def model(name):
    document = json.loads((ROOT / "tests/data/models" / f"{name}.json").read_text())
    return describe(ModelFiles(document["config"]))


def peak(name, vllm, **run):
    found = model(name)
    asked = {"max_num_seqs": 1024, "max_num_batched_tokens": 8192, **run}
    low, high = peak_bytes(found.architecture, found.config, DummyRun(vllm=vllm, **asked))
    return low / GIB, high / GIB


def test_a_sort_took_more_than_a_kernel():
    """The sampler's dummy run shrank in 0.17: a third of what a sort of all logits had taken."""
    low, high = peak("Qwen--Qwen3-14B", (0, 16, 0))
    assert low <= 5.64 <= high  # a start-up log of 0.15.0
    low, high = peak("Qwen--Qwen3-14B", (0, 17, 0))
    assert low <= 2.21 <= high  # of 0.19.0
    assert high < 2.5


def test_which_of_two_samplers_a_release_before_0_11_1_has_is_not_known():
    """The one where FlashInfer is installed is the low end, the sort is the high one."""
    low, high = peak("Qwen--Qwen3-14B", (0, 10, 2))

    assert low == pytest.approx(peak("Qwen--Qwen3-14B", (0, 17, 0))[0])
    assert high == pytest.approx(peak("Qwen--Qwen3-14B", (0, 16, 0))[1])


def test_a_stage_that_does_not_sample_has_the_forward_pass_alone():
    last = peak("Qwen--Qwen3-14B", (0, 19, 0))
    inner = peak("Qwen--Qwen3-14B", (0, 19, 0), last_stage=False)

    assert inner[1] < last[0]


@each_row(
    ("name", "vllm", "second"),
    [
        ("Qwen--Qwen3-8B", (0, 21, 0), False),
        ("Qwen--Qwen3-8B", (0, 22, 0), True),
        ("meta-llama--Meta-Llama-3.1-8B", (0, 22, 0), False),
        ("meta-llama--Meta-Llama-3.1-8B", (0, 23, 0), True),
        ("Qwen--Qwen3-30B-A3B", (0, 28, 0), False),
        ("Qwen--Qwen3-30B-A3B", (0, 29, 0), True),
        ("microsoft--phi-4", (0, 24, 0), False),
        ("microsoft--phi-4", (0, 25, 0), True),
    ],
)
def test_the_second_runner_came_model_by_model(name, vllm, second):
    assert has_second_runner(model(name).architecture, vllm) is second
