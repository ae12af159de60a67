"""Who lets nodes of a replica talk by ports that ask for no key has said so."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpufleet.errors import FleetError
from gpufleet.node.cluster_network import Network
from gpufleet.planning.multinode.open_ports import require_guarded_ports
from gpufleet.planning.stage import Group, Handover, Stage
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.variables import Origin
from tests.unit.planning.multinode.test_launch import stages

VLLM = {"version": "0.33.0", "lock": "lock", "listen": "127.0.0.1"}
WORDS = ({"firewall": {}}, {"vllm": {**VLLM, "allow_unguarded_ports": True}})


def judge(planned: list[Stage], of_node: dict[str, dict[str, Any]], **served: Any) -> list[str]:
    """Return the refusals of a plan; `of_node` is what nodes say besides."""
    nodes = {each.node for each in planned}
    nodes |= {node for each in planned if each.handover for node, _ in each.handover.networks}
    serving = {"m": {"model": "/srv/m", **served}}
    settings = {
        node: NodeSettings.model_validate(
            {"vllm": VLLM, "serving": serving, **of_node.get(node, {})}
        )
        for node in nodes
    }
    lines = {("m", "span_nodes"): 7, ("m", "prefill"): 9}
    origins = {node: {"serving": Origin("group_vars/gpu.yml", 3, lines)} for node in nodes}
    try:
        require_guarded_ports(planned, settings, origins)
    except FleetError as error:
        return list(error.problems)
    return []


@pytest.fixture
def spanning() -> list[Stage]:
    found = list(stages(2, 8, tensor=16))
    networks = tuple(
        (each.node, Network("eth1", f"10.1.0.{rank}", ())) for rank, each in enumerate(found)
    )
    return [replace(each, group=Group(networks, 29500)) for each in found]


def test_a_replica_over_nodes_without_a_firewall_is_refused(spanning: list[Stage]) -> None:
    first, second = (each.node for each in spanning)
    (said,) = judge(spanning, {})
    assert said.startswith(
        "group_vars/gpu.yml:7: serving.m.span_nodes: m-0 uses ports without authentication"
    )
    assert f"{first}, {second} have no `firewall`" in said
    assert "write `firewall: {}`" in said
    assert "`allow_unguarded_ports: true` under `vllm`" in said
    for word in WORDS:
        assert judge(spanning, {first: word, second: word}) == []
        (said,) = judge(spanning, {first: word})
        assert f"but {second} has no `firewall`" in said


def test_a_replica_on_one_node_needs_no_word() -> None:
    assert judge(list(stages(1, 8, tensor=8)), {}) == []


def test_partners_in_prefill_and_decode_are_nodes_that_talk(spanning: list[Stage]) -> None:
    network = Network("eth1", "10.1.0.1", ())
    (alone,) = stages(1, 8, tensor=8)
    decode = replace(alone, handover=Handover(((alone.node, network), ("other", network)), 5600))
    (said,) = judge([decode], {}, prefill="p")
    assert said.startswith(
        "group_vars/gpu.yml:9: serving.m.prefill: m-0 uses ports without authentication"
    )
    assert "other have no `firewall`" in said
    (said,) = judge([decode], {alone.node: WORDS[0]}, prefill="p")
    assert "but other has no `firewall`" in said
    assert judge([decode], {alone.node: WORDS[0], "other": WORDS[1]}, prefill="p") == []
    here = replace(alone, handover=Handover(((alone.node, network),), 5600))
    assert judge([here], {}, prefill="p") == []


@pytest.mark.parametrize("section", ["vllm", "sglang"])
def test_sglang_on_one_node_without_a_firewall_is_refused_for_its_rendezvous(section: str) -> None:
    """torch's rendezvous listens on all addresses, also for one GPU."""
    sglang = {"version": "0.5.23", "lock": "lock", "listen": "127.0.0.1"}
    sections = {"vllm": VLLM, "sglang": sglang} if section == "vllm" else {"sglang": sglang}
    serving = {"m": {"model": "/srv/m", "engine": "sglang"}}
    stage = Stage("m", 0, "gpu-01", (0,), ("GPU-a",), 8000, 1, engine="sglang")

    def refusals(**more: Any) -> tuple[str, ...]:
        here = NodeSettings.model_validate({**sections, "serving": serving, **more})
        try:
            require_guarded_ports([stage], {"gpu-01": here}, {})
        except FleetError as error:
            return error.problems
        return ()

    (said,) = refusals()
    assert said.startswith("serving.m.engine: m-0 opens ports without authentication on all")
    assert f"`allow_unguarded_ports: true` under `{section}`" in said
    assert refusals(firewall={}) == ()
