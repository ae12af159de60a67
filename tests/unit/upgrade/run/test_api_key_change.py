"""A changed API key is refused before anything is drained: a gateway sends one to all servers."""

from __future__ import annotations

import hashlib
from typing import Any

import pytest

from gpufleet.converge.snapshot import FileState
from gpufleet.network.haproxy import GatewayState
from gpufleet.settings.parse import parse_settings
from gpufleet.upgrade.plan.wave import Group
from gpufleet.upgrade.run import api_key_change
from gpufleet.upgrade.run.api_key_change import WantedKey
from tests.unit.upgrade.fleets import group

OLD, NEW = (hashlib.sha256(key).hexdigest() for key in (b"old", b"new"))
TINY = WantedKey("tiny", ("gpu-01", "gpu-02"), "secrets/key", NEW)


def gateway(**keys: str) -> GatewayState:
    return GatewayState(runs=True, models=("tiny", "other"), keys=keys)


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        pytest.param({"tiny": NEW}, [], id="the-same"),
        pytest.param({"tiny": OLD}, ["Restore the former key and upgrade, and"], id="another"),
        pytest.param({}, ["First run `gpufleet deploy gateway INVENTORY`"], id="none"),
        pytest.param({"tiny": OLD, "other": NEW}, ["is not the key that the gateway gw"], id="of"),
    ],
)
def test_what_the_gateway_sends_decides(sent: dict[str, str], said: list[str]) -> None:
    found = list(api_key_change.problems([TINY], {"gw": gateway(**sent)}))

    assert len(found) == len(said)
    for sentence, part in zip(found, said, strict=True):
        assert sentence.startswith("tiny: ")
        assert part in sentence
        assert "secrets/key" in sentence


def test_each_gateway_has_to_send_it_and_a_model_that_it_has_not_yet_asks_nothing() -> None:
    states = {"gw-1": gateway(tiny=NEW), "gw-2": gateway(tiny=OLD), "gw-3": GatewayState(runs=True)}
    (found,) = api_key_change.problems([TINY], states)
    assert "gateway gw-2 sends" in found


def test_without_a_gateway_the_key_on_the_nodes_decides_and_unknown_is_no_pass() -> None:
    there = {"gpu-01": FileState("file", sha256=NEW), "gpu-02": FileState("file", sha256="")}
    (changed,) = api_key_change.problems([TINY], {}, there)
    assert "is not the key that its servers on gpu-02 have" in changed

    unknown = {"gpu-01": FileState("absent"), "gpu-02": FileState("unknown", error="EIO")}
    (silent,) = api_key_change.problems([TINY], {}, unknown)
    assert "it is unknown whether" in silent
    assert silent.endswith("EIO")
    assert len(list(api_key_change.problems([TINY], {}, {}))) == 2


def settings(key: str | None, **more: Any) -> Any:
    vllm = {"version": "0.32.0", "lock": "x", "api_key_file": key}
    vllm |= {"allow_unauthenticated": key is None}
    return parse_settings({"vllm": vllm | more, "serving": {"tiny": {"model": "/srv/tiny"}}})


def test_what_takes_any_key_and_what_goes_asks_nothing() -> None:
    nodes = {"gpu-01": settings("a"), "gpu-02": settings(None), "gpu-03": settings("a")}
    hashes = {"a": NEW}

    def of(*groups: Group) -> list[WantedKey]:
        return list(api_key_change.wanted_keys(groups, nodes, hashes))

    assert of(group("tiny-1", "gpu-02")) == []
    assert of(group("tiny-2", "gpu-03", goes=("tiny-2",))) == []
    assert of(group("tiny-0", "gpu-01"), group("tiny-2", "gpu-03")) == [
        WantedKey("tiny", ("gpu-01", "gpu-03"), "a", NEW)
    ]
