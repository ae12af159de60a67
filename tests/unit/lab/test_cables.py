"""What further interfaces lab nodes may have; that they are laid is tested on nodes."""

from __future__ import annotations

from dataclasses import replace
from ipaddress import IPv4Network

import pytest

from gpufleet.errors import FleetError
from lab.state import LAST_NODE, MOST_NETWORKS, LabState, check_cables
from tests.support.rows import each_row

NET = IPv4Network("10.201.7.0/24")
PROFILES = {"gpu-01": "t4x1", "gpu-02": "t4x1"}
CABLES = {
    "gpu-01": {"eth1": "10.60.9.11/24", "eth2": "10.60.1.11/24"},
    "gpu-02": {"eth1": "10.60.9.12/24"},
}


def test_interfaces_with_addresses_in_one_network_are_on_one_switch():
    state = LabState("lab", NET, PROFILES, CABLES)

    assert state.networks == (IPv4Network("10.60.1.0/24"), IPv4Network("10.60.9.0/24"))


def test_the_names_of_switches_and_their_ports_fit_into_the_kernels_limit():
    """15 characters, and no lab's are another's: ids of labs may begin alike."""
    longest = replace(LabState("abcdefgh"), profiles={"gpu-240": "t4x1"})

    assert len(f"{longest.switch(MOST_NETWORKS)}.{LAST_NODE}") == 15
    assert not LabState("lab2").switch(1).startswith(LabState("lab").switch(1) + ".")


def test_a_lab_remembers_its_cables(tmp_path, monkeypatch):
    monkeypatch.setattr("lab.state.STATE", tmp_path)
    LabState("lab", NET, PROFILES, CABLES).save()

    assert LabState.load("lab").cables == CABLES


@each_row(
    ("node", "interface", "address", "says"),
    [
        ("gpu-03", "eth1", "10.60.1.1/24", "there is no node 'gpu-03'"),
        ("gpu-01", "eth0", "10.60.1.1/24", "further interfaces are eth1 to eth9"),
        ("gpu-01", "eth1", "10.60.1.1", "write the address with its network"),
        ("gpu-01", "eth1", "10.60.1.300/24", "10.60.1.300"),
        ("gpu-01", "eth1", "10.201.7.99/16", "is the lab's own"),
    ],
)
def test_a_cable_that_cannot_be_laid_is_refused_beside_all_others(node, interface, address, says):
    wrong = {node: {interface: address}, "gpu-02": {"wlan0": "10.60.1.2/24"}}

    with pytest.raises(FleetError) as refused:
        check_cables(wrong, PROFILES, NET)

    assert len(refused.value.problems) == 2
    assert says in refused.value.problems[0]
