"""A replica over two nodes behind the firewall, with real vLLM: it serves, and a stranger who tries
every port that anything listens on gets in at ssh and at the endpoint alone."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest
import yaml

from tests.lab.conftest import Fleet, standing
from tests.lab.test_replicas_over_nodes import NODES, Shape, answers, declare, deploy
from tests.support.checkout import own_lab

LAB_ID = own_lab("gfwr")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with standing(LAB_ID, dict.fromkeys(NODES, "h100x8"), tmp_path_factory.mktemp("pair")) as found:
        yield found


def guard(fleet: Fleet, shape: Shape, policy: str) -> None:
    declare(fleet, shape)
    path = fleet.project / "group_vars/lab.yml"
    path.write_text(
        yaml.safe_dump(yaml.safe_load(path.read_text()) | {"firewall": {"policy": policy}})
    )
    deploy(fleet)


def listening(fleet: Fleet, node: str) -> set[int]:
    """Return the ports that something listens on, other than for the node alone."""
    said = fleet.ssh(node, "ss -Hltn | awk '{print $4}'")
    pairs = (line.rpartition(":") for line in said.split())
    return {int(port) for address, _, port in pairs if not address.startswith("127.")}


def reached(fleet: Fleet, node: str) -> set[int]:
    """Return which of them this machine gets into, which is no node of the replica."""
    found = set()
    for port in listening(fleet, node):
        try:
            socket.create_connection((fleet.address(node), port), timeout=1).close()
        except OSError:
            continue
        found.add(port)
    return found


@pytest.mark.long
@pytest.mark.parametrize("policy", ["own_ports", "drop"])
@pytest.mark.parametrize("shape", [Shape("mp", pipeline=2), Shape("ray", tensor=2)], ids=str)
def test_a_replica_serves_and_strangers_get_in_at_its_endpoint_alone(
    pair: Fleet, shape: Shape, policy: str
) -> None:
    guard(pair, shape, policy)

    assert len(answers(pair)) > 0
    others = {"own_ports": {22, 9100}, "drop": {22}}[policy]
    assert len(listening(pair, "gpu-01")) > len(others) + 2  # there is something to guard
    # The endpoint, and the watchdog that gateways ask about it.
    assert reached(pair, "gpu-01") == others | {8000, 8406}
    assert reached(pair, "gpu-02") == others

    again = pair.pyinfra("-y", "--json")
    assert again.changed == {}, again.output
    verified = pair.pyinfra("-y", deploy="deploys/verify.py")
    assert verified.status == 0, verified.output
