"""Which interface of each node reaches the others: several networks in a node are the rule."""

from __future__ import annotations

import json
from copy import deepcopy
from ipaddress import IPv4Network

import pytest

from gpufleet.errors import FleetError
from gpufleet.node.cluster_network import Network, describe_networks, networks
from tests.support.checkout import ROOT
from tests.support.rows import each_row

NODES = ROOT / "src/gpufleet/catalog/data/nodes"
ABSENT = {"missing": "absent"}


def nic(name, *addresses, speed=25000, state="up", pci=None, kind=ABSENT, lower=(), mtu=1500):
    """A net device as the probe describes it; `addresses` with their prefixes."""
    return {
        "name": name,
        "mac": "02:00:00:00:00:01",
        "state": state,
        "mtu": mtu,
        "speed": speed,
        "pci": {"bus_id": pci, "path": "/sys/devices/x"} if pci else ABSENT,
        "ipv4": addresses[0].partition("/")[0] if addresses else ABSENT,
        "ipv6": [],
        "networks": list(addresses) if addresses else ABSENT,
        "kind": kind,
        "lower": list(lower),
    }


def node(*devices, profile="t4x1"):
    """A recorded machine with other net devices."""
    document = json.loads((NODES / f"{profile}.json").read_text())
    document["nics"]["net"] = list(devices)
    return document


def hgx(*devices):
    """Eight H100 and eight ConnectX-7, one near each; mlx5_0 is at 0000:17:00.0."""
    return node(*devices, profile="h100x8")


def chosen(*documents, gpus=(0,), named=None):
    names = [f"gpu-{number:02}" for number in range(1, len(documents) + 1)]
    found = networks(
        "llama-0",
        dict(zip(names, documents, strict=True)),
        dict.fromkeys(names, gpus),
        {name: IPv4Network(named) for name in names} if isinstance(named, str) else named,
    )
    assert list(found) == names
    return list(found.values())


def refused(*documents, named=None):
    with pytest.raises(FleetError) as caught:
        chosen(*documents, named=named)
    return str(caught.value)


def taken(found):
    return [(each.interface, each.address) for each in found]


# Which network


def test_of_three_networks_the_one_that_reaches_the_peers_is_taken():
    """Docker's has the same address on both nodes; the storage network is each node's own."""
    one = node(
        nic("docker0", "172.17.0.1/16", kind="bridge"),
        nic("enp1", "10.8.1.4/24", speed=200000, pci="0000:01:00.0"),
        nic("eno1", "10.1.0.4/24", speed=10000, pci="0000:02:00.0"),
    )
    other = node(
        nic("docker0", "172.17.0.1/16", kind="bridge"),
        nic("enp1", "10.8.2.5/24", speed=200000, pci="0000:01:00.0"),
        nic("eno2", "10.1.0.5/24", speed=10000, pci="0000:02:00.0"),
    )

    found = chosen(one, other)

    assert taken(found) == [("eno1", "10.1.0.4"), ("eno2", "10.1.0.5")]
    assert "the only network that all these nodes have" in found[0].why


@pytest.mark.parametrize(
    ("better", "worse", "why"),
    [
        ({"speed": 100000}, {"speed": 25000}, "the faster"),
        ({"speed": 100000}, {"speed": -1}, "a known speed"),
        ({"name": "eth3"}, {"name": "eth4"}, "the first by name"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_among_networks_that_all_have_the_best_is_taken_and_the_others_are_said(better, worse, why):
    def both(end):
        return node(
            nic(**{"name": "eth1", **worse}) | addressed(f"10.2.0.{end}"),
            nic(**{"name": "eth5", **better}) | addressed(f"10.3.0.{end}"),
        )

    def addressed(address):
        return {"ipv4": address, "networks": [f"{address}/24"]}

    found = chosen(both(1), both(2))

    assert [each.address for each in found] == ["10.3.0.1", "10.3.0.2"], why
    assert "10.2.0.0/24" in found[0].why
    assert "set `cluster_network`" in found[0].why


def test_rdma_comes_before_speed_and_its_rate_counts_where_linux_knows_no_speed():
    def both(end):
        return hgx(
            nic("eno1", f"10.0.0.{end}/24", speed=800000),
            nic("ib0", f"10.1.0.{end}/24", speed=-1, pci="0000:17:00.0"),
        )

    found = chosen(both(1), both(2))

    assert [each.interface for each in found] == ["ib0", "ib0"]
    assert "400 Gbit/s, RDMA" in found[0].why


def test_equal_networks_are_told_apart_by_whether_the_name_is_the_same_everywhere():
    one = node(nic("eth1", "10.1.0.1/24"), nic("eth2", "10.2.0.1/24"))
    other = node(nic("eth9", "10.1.0.2/24"), nic("eth2", "10.2.0.2/24"))

    assert [each.interface for each in chosen(one, other)] == ["eth2", "eth2"]


@each_row(
    "device",
    [
        nic("docker0", "10.5.0.1/16"),
        nic("br-0123456789ab", "10.5.0.1/16"),
        nic("tailscale0", "10.5.0.1/16"),
        nic("office", "10.5.0.1/16", kind="wireguard"),
        nic("vmbr9", "10.5.0.1/16", kind="bridge", lower=["veth12"]),
        nic("usb0", "169.254.3.1/24"),
        nic("eth7", "10.5.0.1/16", state="down"),
        nic("eth7"),
    ],
    ids=lambda device: device["name"] + str(device["state"]),
)
def test_what_ends_in_the_node_or_is_down_is_never_taken_by_itself(device):
    def both(end):
        own = deepcopy(device)
        own["speed"] = 400000
        if own["networks"] != ABSENT:
            first, _, prefix = own["networks"][0].partition("/")
            own["networks"] = [f"{first.rpartition('.')[0]}.{end}/{prefix}"]
        return node(own, nic("eno1", f"10.1.0.{end}/24", speed=1000))

    assert [each.interface for each in chosen(both(1), both(2))] == ["eno1", "eno1"]


def test_a_bond_a_vlan_and_a_bridge_of_hardware_are_hardware():
    def both(end):
        return hgx(
            nic("eth1", pci="0000:17:00.0"),
            nic("eth2", pci="0000:29:00.0"),
            nic("bond0", kind="bond", lower=["eth1", "eth2"]),
            nic("br0", f"10.1.0.{end}/24", kind="bridge", lower=["bond0", "veth3"]),
        )

    found = chosen(both(1), both(2))

    assert found[0].interface == "br0"
    assert "800 Gbit/s, RDMA" in found[0].why


def test_a_network_is_as_fast_as_its_slowest_node():
    one = node(nic("eth1", "10.1.0.1/24", speed=400000), nic("eth2", "10.2.0.1/24", speed=100000))
    other = node(nic("eth1", "10.1.0.2/24", speed=10000), nic("eth2", "10.2.0.2/24", speed=100000))

    assert [each.interface for each in chosen(one, other)] == ["eth2", "eth2"]


def test_a_bond_does_rdma_only_if_all_its_parts_do():
    def both(end):
        return hgx(
            nic("eth1", pci="0000:17:00.0"),
            nic("eth2", pci="0000:ee:00.0"),
            nic("bond0", f"10.1.0.{end}/24", kind="bond", lower=["eth1", "eth2"]),
        )

    assert "RDMA" not in chosen(both(1), both(2))[0].why


def test_of_a_nodes_interfaces_in_one_network_the_one_with_rdma_is_taken():
    def both(end):
        return hgx(
            nic("eth1", f"10.1.0.{end}/24", speed=800000),
            nic("ib1", f"10.1.0.{end + 10}/24", pci="0000:17:00.0"),
        )

    assert taken(chosen(both(1), both(2))) == [("ib1", "10.1.0.11"), ("ib1", "10.1.0.12")]


def test_every_address_of_an_interface_counts():
    one = node(nic("eth0", "192.0.2.1/25", "10.1.0.1/24"))
    other = node(nic("eth0", "192.0.2.201/25", "10.1.0.2/24"))

    assert taken(chosen(one, other)) == [("eth0", "10.1.0.1"), ("eth0", "10.1.0.2")]


# No network


def test_without_a_network_every_interface_is_named_and_why_it_is_not_the_one():
    one = node(
        nic("docker0", "172.17.0.1/16", kind="bridge"),
        nic("eth0", "10.1.0.1/24"),
        nic("ib0", state="down"),
    )
    other = node(nic("eth0", "10.2.0.1/24"), nic("eth1"))

    said = refused(one, other)

    assert "llama-0 spans gpu-01 and gpu-02" in said
    for part in (
        "docker0 172.17.0.1/16 (is a bridge without a NIC)",
        "eth0 10.1.0.1/24 (not on gpu-02)",
        "ib0 (is down)",
        "eth0 10.2.0.1/24 (not on gpu-01)",
        "eth1 (no IPv4 address)",
        "`cluster_network`",
    ):
        assert part in said


def test_the_same_address_on_two_nodes_is_no_network():
    said = refused(node(nic("eth0", "10.1.0.1/24")), node(nic("eth0", "10.1.0.1/24")))

    assert "10.1.0.1/24 (gpu-01 has the same address)" in said


def test_an_older_probes_document_is_refused_with_what_to_do_and_taken_if_a_network_is_named():
    def both(end):
        document = node(nic("eth0", f"10.1.0.{end}/24"))
        for key in ("networks", "kind", "lower"):
            del document["nics"]["net"][0][key]
        return document

    assert "probe these nodes again" in refused(both(1), both(2))
    assert taken(chosen(both(1), both(2), named="10.1.0.0/16")) == [
        ("eth0", "10.1.0.1"),
        ("eth0", "10.1.0.2"),
    ]


# The operator's network


def test_the_named_network_decides_also_over_a_router_and_on_what_seems_virtual():
    one = node(nic("eth0", "192.0.2.1/24", speed=400000), nic("vpn", "10.1.1.1/24", kind="tun"))
    other = node(nic("eth0", "192.0.2.2/24", speed=400000), nic("eth3", "10.1.2.1/24"))

    found = chosen(one, other, named="10.1.0.0/16")

    assert taken(found) == [("vpn", "10.1.1.1"), ("eth3", "10.1.2.1")]
    assert found[0].why == "cluster_network is set to 10.1.0.0/16"


def test_of_several_interfaces_in_the_named_network_the_best_is_taken_and_the_others_are_said():
    one = node(nic("eth0", "10.1.0.1/24", speed=1000), nic("eth1", "10.1.1.1/24", speed=100000))
    other = node(nic("eth0", "10.1.0.2/24"))

    found = chosen(one, other, named="10.1.0.0/16")

    assert found[0].interface == "eth1"
    assert "other interfaces in this network: gpu-01 eth0" in found[0].why


def test_a_node_without_an_address_in_the_named_network_is_refused_with_what_it_has():
    said = refused(
        node(nic("eth0", "10.1.0.1/24")),
        node(nic("eth0", "10.2.0.1/24"), nic("eth1", "10.1.0.2/24", state="down")),
        named="10.1.0.0/16",
    )

    assert said == (
        "gpu-02: no interface has an address in cluster_network 10.1.0.0/16, but llama-0 needs "
        "such an address on this node: eth1 10.1.0.2/24 is down"
    )


def test_a_network_that_only_some_nodes_name_is_a_mistake():
    documents = (node(nic("eth0", "10.1.0.1/24")), node(nic("eth0", "10.1.0.2/24")))

    said = refused(*documents, named={"gpu-01": IPv4Network("10.1.0.0/24"), "gpu-02": None})

    assert "gpu-02: cluster_network is not set" in said
    assert "10.1.0.0/24" in said


def test_two_nodes_with_one_address_are_refused_also_if_their_network_is_named():
    said = refused(
        node(nic("virbr0", "192.168.122.1/24")),
        node(nic("virbr0", "192.168.122.1/24")),
        named="192.168.122.0/24",
    )

    assert "gpu-01 and gpu-02 have the same address 192.168.122.1" in said


# What is worth knowing of it


def test_different_mtus_are_said():
    found = chosen(
        node(nic("eth0", "10.1.0.1/24", mtu=9000)), node(nic("eth0", "10.1.0.2/24", mtu=1500))
    )

    assert "9000 on gpu-01, 1500 on gpu-02" in found[0].why
    assert [each.mtu for each in found] == [9000, 1500]


def test_the_choice_is_a_line_of_the_plan():
    found = {
        "gpu-01": Network("eth0", "10.1.0.1", why="cluster_network is set to 10.1.0.0/24"),
        "gpu-02": Network("eth1", "10.1.0.2", why="cluster_network is set to 10.1.0.0/24"),
    }

    assert describe_networks("llama-0", found) == (
        "llama-0: the nodes of this replica communicate over gpu-01 eth0 10.1.0.1, gpu-02 eth1 "
        "10.1.0.2: "
        "cluster_network is set to 10.1.0.0/24"
    )


# RDMA devices


def rdma(end, *, layer="InfiniBand", down=()):
    document = hgx(nic("eth0", f"10.1.0.{end}/24"))
    for device in document["nics"]["infiniband"]:
        for port in device["ports"]:
            port["link_layer"] = layer
            if device["name"] in down:
                port["state"] = "1: DOWN"
    return document


def test_nccl_gets_the_hcas_near_the_gpus_that_the_replica_has():
    everything = chosen(rdma(1), rdma(2), gpus=range(8))
    some = chosen(rdma(1), rdma(2), gpus=(0, 1))

    assert everything[0].hcas == tuple(f"mlx5_{number}:1" for number in range(8))
    assert some[0].hcas == ("mlx5_0:1", "mlx5_1:1")
    assert not some[0].no_rdma


def test_hcas_are_in_the_order_of_their_numbers():
    def many(end):
        document = rdma(end)
        for device in document["nics"]["infiniband"]:
            device["name"] = device["name"].replace("mlx5_1", "mlx5_10")
        return document

    assert chosen(many(1), many(2), gpus=(1, 2))[0].hcas == ("mlx5_2:1", "mlx5_10:1")


def test_a_port_that_is_down_makes_way_for_the_next_nearest():
    found = chosen(rdma(1, down=["mlx5_0"]), rdma(2), gpus=(0,))

    assert found[0].hcas
    assert "mlx5_0:1" not in found[0].hcas
    assert found[1].hcas == ("mlx5_0:1",)


@pytest.mark.parametrize(
    "other", [rdma(2, layer="Ethernet"), node(nic("eth0", "10.1.0.2/24"))], ids=["roce", "none"]
)
def test_rdma_is_for_all_nodes_or_for_none(other):
    """NCCL on one node would wait for what the other cannot do."""
    found = chosen(rdma(1), other)

    assert [(each.hcas, each.no_rdma) for each in found] == [((), True), ((), True)]
    assert "without RDMA" in found[0].why


def test_without_rdma_anywhere_nothing_is_said_of_it():
    (one, _) = chosen(node(nic("eth0", "10.1.0.1/24")), node(nic("eth0", "10.1.0.2/24")))

    assert (one.hcas, one.no_rdma) == ((), False)
    assert "RDMA" not in one.why
