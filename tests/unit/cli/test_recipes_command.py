"""`gpufleet recipes`: settings to copy, and what is left to decide."""

from __future__ import annotations

import pytest
import yaml
from click.testing import CliRunner, Result

from gpufleet.cli.recipes_command import recipes
from gpufleet.errors import FleetError


def run(*arguments: str) -> Result:
    return CliRunner().invoke(recipes, arguments, standalone_mode=False)


def test_a_recipe_is_printed_as_settings_and_what_is_to_decide_beside_them() -> None:
    found = run("Qwen/Qwen3-32B-FP8", "--gpu", "H100", "--vllm", "0.32.0")
    assert found.return_value == 1  # its revision
    served = yaml.safe_load(found.stdout)["serving"]["qwen3-32b-fp8"]
    assert served["model"] == "Qwen/Qwen3-32B-FP8"
    assert served["flags"]["reasoning-parser"] == "qwen3"
    assert "to decide: qwen3-32b-fp8: `revision`" in found.stderr
    assert "Qwen/Qwen3-32B (bf16), Qwen/Qwen3-32B-AWQ (int4)" in found.stderr


def test_a_release_that_is_older_than_the_recipe_is_said() -> None:
    found = run("deepseek-ai/DeepSeek-V3.2", "--vllm", "0.17.0")
    assert found.return_value == 1
    assert "needs vLLM 0.18.0 or newer" in found.stderr


def test_a_precision_chooses_among_checkpoints_of_one_name() -> None:
    with pytest.raises(FleetError, match=r"--precision nvfp4: .* in bf16"):
        raise run("Qwen/Qwen3-32B", "--precision", "nvfp4").exception or AssertionError


def test_without_a_model_every_recipe_has_a_line_with_the_gpus_that_it_was_verified_on() -> None:
    found = run()
    [line] = [each for each in found.stdout.splitlines() if each.startswith("openai/gpt-oss-20b ")]
    assert "H100" in line
    assert "github.com/vllm-project/recipes at commit" in found.stderr


def test_a_model_that_makes_no_text_is_printed_with_its_kind_and_where_that_is_from() -> None:
    found = run("Qwen/Qwen3-Reranker-4B", "--vllm", "0.32.0")
    served = yaml.safe_load(found.stdout)["serving"]["qwen3-reranker-4b"]
    assert served["kind"] == "rerank"
    assert served["flags"]["hf-overrides"]["is_original_qwen3_reranker"] is True
    assert "docs/models/pooling_models/scoring.md of vLLM's documentation" in found.stdout


def test_a_model_of_speech_is_printed_with_the_lock_that_it_needs() -> None:
    found = run("openai/whisper-large-v3", "--vllm", "0.32.0")
    assert found.return_value == 1
    served = yaml.safe_load(found.stdout)["serving"]["whisper-large-v3"]
    assert served["kind"] == "transcribe"
    assert "packages lock vllm 0.32.0 --also 'vllm[audio]==0.32.0'" in found.stderr
