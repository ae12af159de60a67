"""Waves in which a prefill and its decode have two releases are pointed out."""

from __future__ import annotations

from typing import Any

from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.parse import parse_settings
from gpufleet.upgrade.plan.handover_partners import remarks
from gpufleet.upgrade.plan.wave import Group
from tests.unit.upgrade.fleets import group


def settings(**serving: dict[str, Any]) -> dict[str, NodeSettings]:
    vllm = {"version": "0.32.0", "lock": "none.txt", "listen": "127.0.0.1"}
    entries = {name: {"model": "/srv/q", **each} for name, each in serving.items()}
    return {"a": parse_settings({"vllm": vllm, "serving": entries})}


PAIR = settings(answers={"prefill": "prompts"}, prompts={"port": 8100}, other={"port": 8200})


def said(*changed: Group) -> list[str]:
    return list(remarks(changed, PAIR))


def test_both_sides_in_waves_are_named_once_with_what_to_do() -> None:
    (sentence,) = said(group("answers-0"), group("answers-1"), group("prompts-0"))
    assert sentence.startswith(
        "answers gets KV caches from prompts, and this upgrade changes both of them. "
    )
    assert "Send clients to other servers" in sentence


def test_one_side_alone_and_other_models_say_nothing() -> None:
    """What partners have to agree on is in both: one side alone changes something else."""
    assert said(group("answers-0"), group("other-0")) == []
    assert said(group("prompts-0"), group("other-0")) == []


def test_a_side_that_only_comes_or_goes_says_nothing() -> None:
    assert said(group("answers-0"), group("prompts-1", comes=("prompts-1",))) == []
    assert said(group("answers-0"), group("prompts-1", goes=("prompts-1",))) == []
