"""Which nodes IMEX joins: those whose GPUs are in one fabric, and no others."""

from __future__ import annotations

import copy
import json

import pytest

from gpufleet.errors import FleetError
from gpufleet.node.imex_domain import addresses
from tests.support.checkout import ROOT

TRAY = json.loads((ROOT / "src/gpufleet/catalog/data/nodes/gb200x4.json").read_text())


def tray(address: str, cluster: str = "ab" * 16):
    """Return a compute tray of a rack, with this address."""
    found = copy.deepcopy(TRAY)
    for fabric in found["fabric"]:
        fabric |= {"cluster_uuid": cluster, "clique": 1, "state": 3, "status": 0}
    device = found["nics"]["default_route"]
    for net in found["nics"]["net"]:
        if net["name"] == device:
            net["ipv4"] = address
    return found


def test_nodes_of_one_fabric_are_one_domain_in_the_order_of_their_names():
    rack = {
        "b": tray("10.0.0.2"),
        "a": tray("10.0.0.1"),
        "other": tray("10.0.0.9", cluster="cd" * 16),
    }
    assert addresses(rack, "a") == addresses(rack, "b") == ("10.0.0.1", "10.0.0.2")
    assert addresses(rack, "other") == ("10.0.0.9",)


def test_a_domain_is_not_guessed_while_a_node_is_silent():
    rack = {"a": tray("10.0.0.1"), "b": "no answer within 60 s"}
    with pytest.raises(FleetError, match="b: no answer within 60 s"):
        addresses(rack, "a")


def test_gpus_outside_their_fabric_have_no_domain():
    rack = {"a": tray("10.0.0.1")}
    for fabric in rack["a"]["fabric"]:
        fabric["state"] = 2
    with pytest.raises(FleetError, match="have not joined"):
        addresses(rack, "a")


def test_a_member_without_an_address_is_named():
    rack = {"a": tray("10.0.0.1"), "b": tray("10.0.0.2")}
    rack["b"]["nics"]["default_route"] = {"missing": "absent"}
    with pytest.raises(FleetError, match=r"b: .*no known IPv4 address"):
        addresses(rack, "a")
