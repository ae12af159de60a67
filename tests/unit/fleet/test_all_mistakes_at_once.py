"""One refusal says all that is wrong: with nodes, with settings, and with the plan of both."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from gpufleet.errors import FleetError
from gpufleet.fleet import assessment
from gpufleet.fleet.declared_hardware import with_identity
from gpufleet.serving import vllm_node
from gpufleet.settings.parse import parse_settings
from tests.support.checkout import ROOT
from tests.support.sound_node import sound_node

VLLM = {
    "version": "0.32.0",
    "lock": str(ROOT / "locks/vllm-0.32.0.txt"),
    "api_key_file": "secrets/key",
}


@pytest.fixture(scope="module")
def sound() -> dict[str, Any]:
    return sound_node("/srv/q", "/srv/r")


@pytest.fixture
def worn(sound: dict[str, Any]) -> dict[str, Any]:
    """GPU 3 asks for a reset: all eight are there."""
    document = copy.deepcopy(sound)
    document["gpus"][3]["recovery_action"] = 1
    return document


@pytest.fixture
def smaller(sound: dict[str, Any]) -> dict[str, Any]:
    """Seven of eight GPUs are left, on the bus, too."""
    document = copy.deepcopy(sound)
    gone = document["gpus"].pop()["pci"]["bus_id"]
    document["pci"] = [each for each in document["pci"] if each["bus_id"] != gone]
    for key in ("nvlink", "numa", "fabric"):
        document[key].pop()
    for rows in (document["pcie"], *document["p2p"].values()):
        rows.pop()
        for row in rows:
            row.pop()
    return document


def refused(documents: dict[str, Any], *written: dict[str, Any], **more: Any) -> list[str]:
    """Return what a plan of nodes is refused for; each node has its own settings, or the first."""
    settings = [parse_settings({"vllm": VLLM, **copy.deepcopy(each)}) for each in written]
    declared: Any = {
        name: SimpleNamespace(
            groups=(), settings=settings[min(number, len(settings) - 1)], origins={}
        )
        for number, name in enumerate(documents)
    }
    own = {
        name: said if isinstance(said, str) else with_identity(said, name)
        for name, said in documents.items()
    }
    with pytest.raises(FleetError) as error:
        assessment.plan_fleet(own, declared, **more)
    return [*error.value.problems]


def serving(**written: Any) -> dict[str, Any]:
    return {"serving": {"q": {"model": "/srv/q", "context": 8192, **written}}}


def test_a_node_that_is_unfit_hides_no_mistake_of_the_plan(
    sound: dict[str, Any], worn: dict[str, Any]
) -> None:
    nodes = {"a": sound, "b": worn}
    wrong = {"flags": {"no-such-flag": 1}}
    for mistake, key in (
        (serving(**wrong), "serving.q.flags.no-such-flag"),
        (serving(replicas=17), "17 replicas"),
        (serving(context=400_000), "400000"),
        (serving(model="/srv/none"), "/srv/none"),
        (serving(presets=["multi-lora"]), "serving.q.presets"),
    ):
        found = refused(nodes, mistake)
        assert any("recovery-action" in each for each in found)
        assert any(key in each for each in found), found


def test_what_does_not_fit_on_the_gpus_that_are_left_is_no_mistake(
    sound: dict[str, Any], worn: dict[str, Any], smaller: dict[str, Any]
) -> None:
    """Sixteen replicas of one GPU fill both nodes, once the second is as it should be."""
    full = {**serving(replicas=16), "gpus": {"count": 8}}
    found = refused({"a": sound, "b": worn}, full)
    assert not any("replicas" in each for each in found), found
    found = refused({"a": sound, "b": smaller}, full)
    assert any("gpu-count" in each for each in found)
    assert not any("16 replicas" in each for each in found), found
    (open_question,) = (each for each in found if "not yet known" in each)
    assert open_question.startswith("it is not yet known whether q can be placed, because")
    assert " b " in open_question


@pytest.mark.parametrize("silent", ["no answer within 60 s", "its probe failed"])
def test_of_a_node_without_an_answer_settings_and_other_nodes_are_judged(
    sound: dict[str, Any], silent: str
) -> None:
    here = {"serving": {"q": {"model": "/srv/q", "flags": {"dtype": "bf16"}}}}
    there = {"serving": {"r": {"model": "/srv/r", "context": 400_000}}}
    found = refused({"a": silent, "b": sound}, here, there)
    assert found[0] == f"a: {silent}"
    assert any("serving.q.flags.dtype" in each for each in found)
    assert any("serving.r" in each and "400000" in each for each in found)
    assert any(each.startswith("it is not yet known whether q can be placed") for each in found)


def test_a_partner_of_what_is_not_judged_is_not_judged(sound: dict[str, Any]) -> None:
    """Its other half is declared, and it would be said to be missing."""
    here = serving()
    there = {"serving": {"r": {"model": "/srv/q", "prefill": "q", "context": 8192}}}
    found = refused({"a": "no answer", "b": sound}, here, there)
    assert any(each.startswith("it is not yet known whether q, r can be placed") for each in found)
    assert len(found) == 3, found


def test_a_flag_is_named_beside_a_model_that_does_not_fit(sound: dict[str, Any]) -> None:
    found = refused({"a": sound}, serving(context=400_000, flags={"dtype": "bf16"}))
    assert [("400000" in each, "flags.dtype" in each) for each in found] == [
        (True, False),
        (False, True),
    ]


def test_what_a_plan_judges_is_said_together(sound: dict[str, Any]) -> None:
    """A checkpoint's code without a lock, and a flag that its release does not have."""
    hub = {"model": "/srv/q", "context": 8192, "flags": {"dtype": "bf16"}}
    found = refused(
        {"a": sound},
        {"serving": {"q": hub, "r": {**hub, "port": 8100, "flags": {"max-num-seqs": "many"}}}},
    )
    assert len(found) == 2
    assert "serving.q.flags.dtype" in found[0]
    assert "serving.r.flags.max-num-seqs" in found[1]


def test_a_flag_of_a_preset_is_not_missed_in_what_no_plan_has(sound: dict[str, Any]) -> None:
    """`tools` brings the parser that the switch needs."""
    here = serving(presets=["tools"], flags={"enable-auto-tool-choice": True})
    found = refused({"a": "no answer"}, here)
    assert not any("enable-auto-tool-choice" in each for each in found), found


def test_locks_and_secrets_are_judged_all_at_once(tmp_path: Any) -> None:
    for name, content in {
        "empty": b"\n",
        "lines": b"one\ntwo\n",
        "lock": b"vllm==0.32.0\n",
    }.items():
        (tmp_path / name).write_bytes(content)

    def settings(**files: str) -> Any:
        names = {key: str(tmp_path / name) for key, name in files.items()}
        return parse_settings({"vllm": {**VLLM, **names}, **serving()})

    found = [
        problem
        for each in (
            settings(api_key_file="empty", lock="lock"),
            settings(api_key_file="lines", hf_token_file="none", lock="gone"),
        )
        for problem in vllm_node.file_problems(each)
    ]
    assert [sum(name in each for each in found) for name in ("empty", "lines", "none", "gone")] == [
        1
    ] * 4
    assert any("lock: has no hashes, but a lock needs a hash" in each for each in found)
    assert len(found) == 5
