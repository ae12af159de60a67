"""What a replica takes at most, by its unit or by its model."""

from __future__ import annotations

import json

from gpufleet.load_test.subjects import longest_request
from gpufleet.sizing.architectures.description import Description, ModelFiles, describe
from tests.support.checkout import ROOT
from tests.support.rows import each_row
from tests.unit.upgrade.fleets import runs

QWEN = ROOT / "tests/data/models/Qwen--Qwen3-32B.json"
SERVE = "/opt/vllm/releases/0.32.0-ab/bin/vllm serve"


def model() -> Description:
    return describe(ModelFiles(json.loads(QWEN.read_text())["config"]))


@each_row(
    "arguments, length",
    [
        (("--max-model-len 4096",), 4096),
        (("--max-model-len 8k",), 8000),
        # 40,960 positions, by the publisher's config.json.
        ((), 40960),
        (("--max-model-len auto",), None),
        (("--hf-overrides {}",), None),
    ],
    ids=str,
)
def test_the_longest_request_is_the_units_or_the_models_own(
    arguments: tuple[str, ...], length: int | None
) -> None:
    assert longest_request(runs("qwen-0", "a", arguments=(SERVE, *arguments)), model()) == length


def test_a_model_that_is_not_known_has_no_length_without_the_flag() -> None:
    told = runs("qwen-0", "a", arguments=(SERVE, "--max-model-len 4096"))
    assert longest_request(told, "its files cannot be read") == 4096
    assert longest_request(runs("qwen-0", "a", arguments=(SERVE,)), "no files") is None
