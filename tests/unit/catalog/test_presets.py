"""Presets: values have reasons, every release that they hold for takes them, operators win."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from gpufleet.catalog import presets
from gpufleet.errors import FleetError
from gpufleet.flags import schema
from gpufleet.flags.explain import explain_flag
from gpufleet.settings.serving_settings import Served
from tests.support.rows import each_row

QWEN = "/srv/Qwen3-32B"


def served(*names: str, **more) -> Served:
    return Served.model_validate({"model": QWEN, "presets": names, **more})


@each_row("name", presets.names())
def test_every_value_has_a_reason_and_no_preset_sets_what_the_plan_decides(name):
    preset = presets.load(name)
    choices = [each for choices in preset.flags.values() for each in choices]
    assert all(len(each.because.split()) > 4 for each in choices)
    assert len(preset.situation.split()) > 10
    # As an operator's own they would be refused if they were the plan's.
    served(flags=dict.fromkeys(preset.flags, True))


def test_a_preset_that_does_not_exist_is_refused_with_the_one_that_was_meant():
    with pytest.raises(ValidationError, match="did you mean 'chat'"):
        served("chatt")


def test_an_explanation_names_the_presets_that_set_the_flag():
    assert explain_flag("--speculative-config").presets == ("speculative",)
    assert explain_flag("--seed").presets == ()


SUBJECT = presets.Subject("/srv/Qwen3-32B", (0, 32, 0), "Qwen3ForCausalLM", frozenset(), (9, 0))


@pytest.mark.parametrize(
    ("condition", "subject", "holds"),
    [
        ({}, {}, True),
        ({"since": "0.32.0"}, {}, True),
        ({"since": "0.33.0"}, {}, False),
        ({"without": ["state"]}, {}, True),
        ({"without": ["state"]}, {"caches": frozenset({"full", "state"})}, False),
        ({"without": ["state"]}, {"caches": None}, False),
        ({"capability": 9.0}, {}, True),
        ({"capability": 9.0}, {"capability": (8, 9)}, False),
        ({"capability": 8.9}, {"capability": (8, 9)}, True),
        ({"capability": 9.0}, {"capability": None}, False),
        ({"architectures": ["Qwen3ForCausalLM"]}, {}, True),
        ({"architectures": ["LlamaForCausalLM"]}, {}, False),
        ({"architectures": ["LlamaForCausalLM"]}, {"architecture": None}, False),
    ],
)
def test_a_choice_holds_only_where_all_that_it_needs_is_known_and_true(condition, subject, holds):
    choice = presets.Choice.model_validate({"value": 7, "because": "of this", **condition})
    otherwise = presets.Choice(value=8, because="of nothing else")
    found = presets.choose("chat", (choice, otherwise), replace(SUBJECT, **subject))

    assert found == ((7, "of this") if holds else (8, "of nothing else"))
    if not holds:
        assert presets.choose("chat", (choice,), replace(SUBJECT, **subject)) is None


def test_a_value_of_a_table_is_looked_up_by_the_models_family():
    choice = presets.Choice(value="tool-call-parser", because="of this", table="families")
    plain = presets.Choice(value="tool-call-parser", because="of this")

    assert presets.choose("tools", (choice,), SUBJECT) == ("hermes", "of this")
    assert presets.choose("tools", (plain,), SUBJECT) == ("tool-call-parser", "of this")


@pytest.mark.parametrize(
    ("model", "vllm", "says"),
    [
        ("/srv/gemma-4-27b", (0, 18, 0), "needs vLLM 0.19.0 or later"),
        (
            "org/deepseek-r1-distill-qwen",
            (0, 32, 0),
            "vLLM has no tool-call-parser for models like deepseek",
        ),
        ("org/strange", (0, 32, 0), "gpufleet knows no tool-call-parser for strange"),
    ],
)
def test_a_family_without_a_parser_is_refused_with_what_to_set(model, vllm, says):
    choice = presets.Choice(value="tool-call-parser", because="of this", table="families")
    with pytest.raises(FleetError, match=says) as refused:
        presets.choose("tools", (choice,), replace(SUBJECT, model=model, vllm=vllm))
    assert "set `flags.tool-call-parser` yourself" in str(refused.value)


def known(release: schema.Schema) -> tuple[str, ...]:
    flag = release.flag("--tool-call-parser")
    return flag.choices or flag.suggested


def test_every_release_since_then_has_the_tool_parser_of_a_family():
    """As the releases' own registries have it, which the flags' schemas were read from."""
    releases = [schema.load(each) for each in schema.versions()]
    for family in presets.families():
        parser = family.tool_call_parser
        first = schema.sort_key(family.since)
        lacking = [
            each.version
            for each in releases
            if parser and schema.sort_key(each.version) >= first and parser not in known(each)
        ]
        assert lacking == [], f"{family.model}: {parser}"


@pytest.mark.parametrize(
    ("model", "parser"),
    [
        ("deepseek-ai/DeepSeek-V4.1", "deepseek_v41"),
        ("deepseek-ai/DeepSeek-V4-Flash", "deepseek_v4"),
        ("stepfun-ai/Step-3.5-Flash", "step3p5"),
        ("ai-sage/GigaChat3-10B-A1.8B", "gigachat3"),
        ("XiaomiMiMo/MiMo-V2.6-Flash-RL", "mimo"),
    ],
)
def test_a_newer_family_is_not_taken_for_an_older_one(model, parser):
    choice = presets.Choice(value="tool-call-parser", because="of this", table="families")
    found = presets.choose("tools", (choice,), replace(SUBJECT, model=model, vllm=(0, 32, 0)))
    assert found == (parser, "of this")
