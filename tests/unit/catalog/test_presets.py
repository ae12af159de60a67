"""Presets: values have reasons, every release that they hold for takes them, operators win."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from gpufleet.catalog import presets
from gpufleet.flags.explain import explain_flag
from gpufleet.settings.serving_settings import Served

QWEN = "/srv/Qwen3-32B"


def served(*names: str, **more) -> Served:
    return Served.model_validate({"model": QWEN, "presets": names, **more})


@pytest.mark.parametrize("name", presets.names())
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
