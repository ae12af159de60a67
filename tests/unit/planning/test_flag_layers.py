"""Layers of flags: the strongest wins, every release takes what presets set, and says why."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from gpufleet.catalog import presets
from gpufleet.catalog.presets import Subject
from gpufleet.cli.plan_command import layers_table
from gpufleet.console import display
from gpufleet.errors import FleetError
from gpufleet.flags import schema
from gpufleet.flags.arguments import words
from gpufleet.flags.check import check
from gpufleet.planning import flag_layers
from gpufleet.planning.flag_layers import YOURS, LayeredFlag
from gpufleet.planning.stage import Stage
from gpufleet.settings.serving_settings import OLDEST_VLLM, Served
from gpufleet.versions import numbers
from tests.support.rows import each_row

SUPPORTED = [one for one in schema.versions() if schema.sort_key(one) >= OLDEST_VLLM]
NEEDS = {"multi-lora": {"lora-modules": ["a=/srv/a"], "max-lora-rank": 16}}
QWEN = "/srv/Qwen3-32B"
URL = "http://user:a-word@host"


def subject(model: str = QWEN, vllm: str = "0.32.0", **more) -> Subject:
    known = {"architecture": "Qwen3ForCausalLM", "caches": frozenset({"full"}),
             "capability": (9, 0)}  # fmt: skip
    return Subject(model, numbers(vllm), **known | more)


def served(*names: str, **more) -> Served:
    return Served.model_validate({"model": QWEN, "presets": names, **more})


def layered(*names: str, about: Subject | None = None, **more) -> dict[str, LayeredFlag]:
    found = flag_layers.resolve_flags(served(*names, **more), about or subject())
    return {each.name: each for each in found}


@each_row("name", presets.names())
@each_row("version", SUPPORTED)
def test_every_release_takes_what_a_preset_sets_for_it(name, version):
    found = layered(name, about=subject(vllm=version), flags=NEEDS.get(name, {}))
    assert found
    argv = [QWEN, *(word for each in found.values() for word in words(each.name, each.value))]
    wrong = [each for each in check(schema.load(version), argv, {}) if each.refuses]
    assert not wrong


def test_the_operators_own_value_wins_and_says_so():
    found = layered("low-latency-code", flags={"max-num-seqs": 8})
    assert (found["max-num-seqs"].value, found["max-num-seqs"].layer) == (8, YOURS)
    assert found["max-num-batched-tokens"].layer == "preset low-latency-code"
    assert found["max-num-batched-tokens"].because


def test_underscores_and_dashes_are_the_same_name():
    assert "max-num-seqs" not in layered("low-latency-code", flags={"max-num-seqs": None}) or (
        layered("low-latency-code", flags={"max-num-seqs": None})["max-num-seqs"].value is None
    )


def test_the_later_preset_wins():
    one = layered("batch", "low-latency-code")["max-num-seqs"]
    other = layered("low-latency-code", "batch")["max-num-seqs"]
    assert (one.value, other.value) == (32, 1024)


def test_a_release_without_the_flag_is_left_alone():
    assert layered("memory-constrained")["gpu-memory-utilization"].value == 0.95
    older = layered("memory-constrained", about=subject(vllm="0.20.2"))
    assert "gpu-memory-utilization" not in older


@each_row(
    ("about", "sets"),
    [
        (subject(), True),
        (subject(capability=(8, 0)), False),
        (subject(capability=None), False),
        (subject(caches=frozenset({"latent"})), False),
        (subject(caches=None), False),
    ],
)
def test_what_depends_on_gpu_or_model_is_left_out_where_that_is_not_known(about, sets):
    assert ("kv-cache-dtype" in layered("memory-constrained", about=about)) is sets


@each_row(
    ("model", "tools", "thoughts"),
    [
        ("Qwen/Qwen3-32B", "hermes", "qwen3"),
        ("Qwen/Qwen3-Coder-480B-A35B-Instruct", "qwen3_coder", None),
        ("openai/gpt-oss-120b", "openai", "openai_gptoss"),
        ("meta-llama/Llama-3.3-70B-Instruct", "llama3_json", None),
        ("/models/DeepSeek-R1-0528", "deepseek_v3", "deepseek_r1"),
        ("zai-org/GLM-4.6", "glm45", "glm45"),
    ],
)
def test_parsers_follow_the_model_family(model, tools, thoughts):
    assert layered("tools", about=subject(model))["tool-call-parser"].value == tools
    if thoughts:
        assert layered("reasoning", about=subject(model))["reasoning-parser"].value == thoughts
    else:
        with pytest.raises(FleetError, match="reasoning-parser"):
            layered("reasoning", about=subject(model))


def test_a_family_that_is_not_known_is_refused_until_the_operator_names_the_parser():
    about = subject("acme/unheard-of-7b")
    with pytest.raises(FleetError, match=r"set `flags\.tool-call-parser` yourself"):
        layered("tools", about=about)
    found = layered("tools", about=about, flags={"tool-call-parser": "hermes"})
    assert found["tool-call-parser"].layer == YOURS


def test_a_parser_that_the_release_does_not_have_yet_is_refused_with_the_release_that_has():
    about = subject("google/gemma-4-31B-it", vllm="0.18.0")
    with pytest.raises(FleetError, match=r"0\.19\.0 or later"):
        layered("tools", about=about)


def test_what_only_the_operator_knows_is_asked_for_all_at_once():
    with pytest.raises(FleetError) as refused:
        layered("multi-lora")
    assert [problem.split(":")[0] for problem in refused.value.problems] == [
        "preset multi-lora needs `flags.lora-modules`",
        "preset multi-lora needs `flags.max-lora-rank`",
    ]


def test_the_context_is_the_flag_and_cannot_be_set_twice():
    assert layered(context=4096)["max-model-len"].layer == "context"
    with pytest.raises(ValidationError, match="remove one of the two"):
        served(context=4096, flags={"max-model-len": 8192})


def test_a_preset_says_what_the_plan_looks_for_unless_the_operator_does():
    assert flag_layers.objective(served("low-latency-code")) == "latency"
    assert flag_layers.objective(served("low-latency-code", objective="balanced")) == "balanced"
    assert flag_layers.objective(served()) == "balanced"


def test_a_stage_with_any_presets_flags_can_be_a_key():
    """Roles look stages up; speculation's flag is an object."""
    flags = tuple(layered("speculative").values())
    assert any(isinstance(each.value, dict) for each in flags)
    stage = Stage(
        model="qwen",
        replica=0,
        node="gpu-01",
        gpus=(0,),
        gpu_uuids=("GPU-1",),
        port=8000,
        tensor_parallel=1,
        flags=flags,
    )
    assert {stage: 1}[stage] == 1


def test_the_table_of_flags_shows_no_key(capsys):
    """What an operator has written into a flag all the same."""
    flags = served(flags={"hf-overrides": {"token": "a-word"}, "otlp-traces-endpoint": URL}).flags
    layers = (LayeredFlag(name, value, YOURS) for name, value in flags.items())

    display(layers_table({("qwen", "0.32.0"): layers}))

    printed = capsys.readouterr().out
    assert "--hf-overrides" in printed
    assert "http://(not shown)@host" in printed
    assert "a-word" not in printed
