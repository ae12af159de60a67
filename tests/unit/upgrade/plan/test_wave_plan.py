"""The plan of waves as it is shown: to people as tables and sentences, to programs as JSON."""

from __future__ import annotations

import json

import pytest
from rich.console import Console

from gpufleet.errors import FleetError
from gpufleet.settings.upgrade_settings import Upgrade
from gpufleet.upgrade.plan.wave import Group
from gpufleet.upgrade.plan.wave_plan import plan_waves
from gpufleet.upgrade.report import plan_table
from tests.support.checkout import ROOT
from tests.unit.upgrade.fleets import group, load, replicas


def shown(plan):
    console = Console(width=200, record=True, highlight=False, file=None, quiet=False)
    with console.capture() as capture:
        console.print(plan_table.waves(plan))
    return capture.get()


def test_a_person_sees_what_goes_when_why_and_what_is_left():
    groups, loads = replicas("tiny", 4, 0.5625)
    groups = [Group(g.id, g.kind, g.nodes, g.replicas, ("vLLM 0.31.0 -> 0.32.0",)) for g in groups]

    lines = shown(plan_waves(groups, loads, Upgrade(), starts={"tiny-0": 30})).splitlines()

    assert lines[1].split() == [
        *("1", "canary", "tiny-0", "on-tiny-0", "vLLM", "0.31.0", "->", "0.32.0"),
        *("tiny:", "3", "of", "4,", "3", "needed", "at", "least", "1", "min", "30", "s"),
    ]
    assert any(line.split() == ["tiny", "4", "2.25", "3", "1"] for line in lines)
    assert lines[-1].strip() == "4 groups in 4 waves, time: at least 6 min"


def test_what_a_node_says_cannot_give_the_terminal_orders():
    cordoned = {"on-tiny-0": "\x1b[2Jgone"}
    plan = plan_waves(*replicas("tiny", 2), Upgrade(), cordoned=cordoned)
    assert "\x1b[2J" not in shown(plan)
    assert "gone" in shown(plan)


def test_nothing_to_change_is_said():
    plan = plan_waves([], [load("tiny-0")], Upgrade())
    assert (plan.waves, plan.seconds) == ((), 0)
    assert "nothing differs" in shown(plan)


def test_what_is_cordoned_is_left_out_and_said():
    plan = plan_waves(*replicas("tiny", 3), Upgrade(), cordoned={"on-tiny-1": "RMA"})
    assert [each.id for each in plan.left_out] == ["tiny-1"]
    assert "tiny-1" not in [each.id for wave in plan.waves for each in wave.groups]
    assert any("RMA" in each for each in plan.remarks)


def test_programs_get_the_same_as_json():
    groups, loads = replicas("tiny", 3, 0.1)
    found = json.loads(json.dumps(plan_waves(groups, loads, Upgrade(waves=(2,))).as_json()))
    assert found["schema"] == 1
    assert [len(wave["groups"]) for wave in found["waves"]] == [1, 2]
    assert [Group.from_json(each) for each in found["waves"][0]["groups"]] == [group("tiny-0")]
    assert found["waves"][1]["left"][0]["left"] == 1
    assert found["needs"]["tiny"]["load"] == pytest.approx(0.3)


# -- docs/upgrade/waves.md
# ---------------------------------------------------------------------------------

PAGE = " ".join((ROOT / "docs/upgrade/waves.md").read_text().split())


def said(plan):
    """A plan as the page writes it: wave, groups, what is left."""
    return [
        " ".join(
            [
                *([str(wave.number), "canary"] if wave.canary else [str(wave.number)]),
                *(each.id for each in wave.groups),
                "; ".join(
                    f"{each.model}: {each.left} of {each.serving}, {each.needed} needed"
                    for each in plan.left
                    if each.wave == wave.number
                ),
            ]
        )
        for wave in plan.waves
    ]


def test_the_pages_refusal_is_the_one_that_is_raised():
    with pytest.raises(FleetError) as error:
        plan_waves(*replicas("tiny", 4, 0.5625), Upgrade(waves=(2,)))
    assert str(error.value) in PAGE


def test_the_pages_waves_are_those_that_are_made():
    tiny = plan_waves(*replicas("tiny", 4, 0.5625), Upgrade(waves=(1,)))
    (chat, chat_loads), (code, code_loads) = replicas("chat", 6, 0.45), replicas("code", 2, 0.3)
    both = plan_waves([*chat, *code], [*chat_loads, *code_loads], Upgrade(waves=(2,)))

    assert [line for line in said(tiny) + said(both) if line not in PAGE] == []
    assert (len(tiny.waves), len(both.waves)) == (4, 5)
