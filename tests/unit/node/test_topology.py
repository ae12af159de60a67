"""Islands and widths: on recorded hardware, on hardware described by hand, and on drawn graphs."""

from __future__ import annotations

import json
from copy import deepcopy
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufleet.errors import FleetError
from gpufleet.node.topology import Gpu, islands, node_from_probe, nvlink_width
from tests.support.checkout import ROOT
from tests.support.rows import each_row

NODES = ROOT / "src/gpufleet/catalog/data/nodes"


@pytest.fixture
def document():
    """`document("h100x8")`: a recording, free to be changed."""
    return lambda profile: json.loads((NODES / f"{profile}.json").read_text())


def links_of(document, gpu):
    return document["nvlink"][gpu]["links"]


# --- what the recorded hardware is


@each_row(
    ("profile", "wanted"),
    [
        ("h100x8", [tuple(range(8))]),
        ("a100x8", [tuple(range(8))]),
        ("b200x8", [tuple(range(8))]),
        ("gb200x4", [tuple(range(4))]),
        ("a100x4-pcie", [(0, 1), (2, 3)]),  # bridges join pairs
        ("l40sx8", [(gpu,) for gpu in range(8)]),
        ("rtx4090x2", [(0,), (1,)]),
        ("t4x1", [(0,)]),
    ],
)
def test_islands_are_what_the_board_joins(recorded, profile, wanted):
    assert recorded(profile).islands == tuple(wanted)


@each_row(
    ("profile", "width"),
    [("h100x8", 18), ("a100x8", 12), ("b200x8", 18), ("gb200x4", 18), ("a100x4-pcie", 12)],
)
def test_widths_are_those_that_nvidia_smi_prints(recorded, profile, width):
    """NV18 on HGX H100 and B200 and on GB200, NV12 on A100, as its documentation shows them."""
    assert set(recorded(profile).nvlink.values()) == {width}


def test_a_gpu_is_told_in_the_operators_units(recorded):
    node = recorded("h100x8", "gpu-07")

    assert (node.name, node.driver, node.cuda) == ("gpu-07", "570.124.06", (12, 8))
    assert node.gpus[4] == Gpu(
        index=4,
        uuid=node.gpus[4].uuid,
        name="NVIDIA H100 80GB HBM3",
        bus_id=node.gpus[4].bus_id,
        memory_mib=81559,
        compute_capability=(9, 0),
        numa_node=1,
    )


# --- how wide a pair is


def test_a_dead_link_costs_its_gpu_one_link_to_each_other(document):
    """Through switches a pair has as many links as the one with fewer."""
    found = document("h100x8")
    links_of(found, 3)[7]["state"] = 0

    widths = node_from_probe("gpu-01", found).nvlink

    assert {links for pair, links in widths.items() if 3 in pair} == {17}
    assert {links for pair, links in widths.items() if 3 not in pair} == {18}


def test_a_link_asleep_joins_as_an_active_one_does(document):
    """State 2 is how an idle link saves power; the first byte wakes it."""
    found = document("h100x8")
    for gpu in range(8):
        for link in links_of(found, gpu):
            link["state"] = 2

    assert node_from_probe("gpu-01", found).islands == (tuple(range(8)),)


def test_a_link_that_one_end_alone_sees_is_down(document):
    """NCCL could not use it: the driver of the other GPU does not know it."""
    found = document("a100x4-pcie")
    links_of(found, 0)[0]["state"] = 0

    assert nvlink_width(found, 0, 1) == nvlink_width(found, 1, 0) == 11


def test_a_driver_that_counts_switch_links_needs_no_remote_type(document):
    """Field 147 is enough where links do not say what is at their other end."""
    found = document("gb200x4")
    for gpu in range(4):
        for link in links_of(found, gpu):
            link["remote_type"] = {"missing": "not_supported", "code": 3}

    assert set(node_from_probe("gpu-01", found).nvlink.values()) == {18}


@pytest.mark.parametrize(("status", "width"), [(0, 18), (5, 0)])
def test_a_virtual_machine_goes_by_peer_access(document, status, width):
    """Its switches are invisible; links to somewhere count where the driver lets them be used."""
    found = document("h100x8")
    for gpu in range(8):
        found["nvlink"][gpu]["switch_links"] = {"missing": "not_supported", "code": 3}
        for link in links_of(found, gpu):
            link["remote_type"] = 255
    found["p2p"]["nvlink"] = [[None if i == j else status for j in range(8)] for i in range(8)]

    assert nvlink_width(found, 0, 7) == width


def test_links_without_peer_access_join_nothing(document):
    """Without its fabric manager an HGX board shows 18 active links that no program may use."""
    found = document("h100x8")
    found["p2p"]["nvlink"] = [[None if i == j else 5 for j in range(8)] for i in range(8)]

    node = node_from_probe("gpu-01", found)

    assert node.islands == tuple((gpu,) for gpu in range(8))


# --- islands of any graph

# DGX-1 with V100: two meshes of four, and one link from each GPU to its twin (NVIDIA's DGX-1
# system architecture white paper). One component of eight, and no five all joined.
HYBRID_CUBE_MESH = {
    *combinations(range(4), 2),
    *combinations(range(4, 8), 2),
    *((gpu, gpu + 4) for gpu in range(4)),
}


def test_islands_are_cliques_not_components():
    assert islands(range(8), HYBRID_CUBE_MESH) == ((0, 1, 2, 3), (4, 5, 6, 7))


def by_brute_force(gpus, links):
    """Every group of every size is looked at, the largest first, the lowest indices first."""
    left, found = sorted(gpus), []
    while left:
        island = next(
            group
            for size in range(len(left), 0, -1)
            for group in combinations(left, size)
            if all(pair in links for pair in combinations(group, 2))
        )
        found.append(island)
        left = [gpu for gpu in left if gpu not in island]
    return tuple(found)


@given(st.data(), st.integers(0, 8))
def test_islands_are_what_trying_every_group_gives(data, count):
    links = {pair for pair in combinations(range(count), 2) if data.draw(st.booleans())}

    assert islands(range(count), links) == by_brute_force(range(count), links)


@given(st.sets(st.sampled_from(list(combinations(range(16), 2))), min_size=60))
def test_every_gpu_is_on_one_island_and_sixteen_are_not_too_many(links):
    found = islands(range(16), links)

    assert sorted(gpu for island in found for gpu in island) == list(range(16))
    assert [len(island) for island in found] == sorted(map(len, found), reverse=True)


# --- what keeps a node from being planned on


def whole_gpu_missing(document, index, **why):
    document["gpus"][index] = {"index": index, **why}
    for section in ("nvlink", "numa", "fabric"):
        document[section][index] = why
    for matrix in (*document["p2p"].values(), document["pcie"]):
        for other in range(len(matrix)):
            matrix[index][other] = matrix[other][index] = {"missing": "no_gpu"}
    document["errors"].append({"about": f"gpus[{index}]", **why})


@pytest.mark.parametrize("why", ["lost", "timeout", "crashed", "unknown"])
def test_a_silent_gpu_is_in_no_island(document, why):
    found = document("h100x8")
    whole_gpu_missing(found, 5, missing=why)

    node = node_from_probe("gpu-01", found)

    assert node.islands == ((0, 1, 2, 3, 4, 6, 7),)


def test_a_gpu_that_tells_only_half_of_itself_is_left_out(document):
    found = document("t4x1")
    found["gpus"][0]["uuid"] = {"missing": "lost", "code": 15}

    assert node_from_probe("gpu-01", found).gpus == ()


def test_a_node_without_a_driver_is_a_node_without_gpus(document):
    found = document("h100x8")
    absent = {"missing": "driver_not_loaded"}
    found["driver"].update(dict.fromkeys(("init", "version", "cuda", "gpu_count"), absent))
    for section in ("gpus", "nvlink", "numa", "fabric", "pcie"):
        found[section] = []
    found["p2p"] = {kind: [] for kind in found["p2p"]}

    node = node_from_probe("gpu-01", found)

    assert (node.driver, node.cuda, node.gpus, node.islands) == (None, None, (), ())


def test_pairs_that_could_not_be_asked_are_joined_by_their_links(document):
    """Unknown peer access is not refused access."""
    found = document("a100x4-pcie")
    absent = {"missing": "timeout", "seconds": 15}
    for matrix in (*found["p2p"].values(), found["pcie"]):
        matrix[1] = [None if column == 1 else absent for column in range(4)]
    found["errors"].append({"about": "p2p[1]", **absent})

    node = node_from_probe("gpu-01", found)

    assert node.islands == ((0, 1), (2, 3))


def test_another_schema_is_refused_by_name(document):
    with pytest.raises(FleetError, match=r"gpu-01: the probe has schema 99.*probe the node again"):
        node_from_probe("gpu-01", {**document("t4x1"), "schema": 99})


# --- where a GPU sits


@pytest.mark.parametrize(
    ("numa", "node"),
    [
        ({"node": 1, "memory_nodes": "0"}, 1),  # Linux' word first
        ({"node": {"missing": "absent"}, "memory_nodes": "1"}, 1),
        ({"node": -1, "memory_nodes": {"missing": "not_supported"}}, None),
        ({"node": -1, "memory_nodes": "0-1"}, None),
    ],
)
def test_a_gpu_has_a_numa_node_only_if_one_is_named(document, numa, node):
    found = document("t4x1")
    found["numa"] = [numa]

    assert node_from_probe("gpu-01", found).gpus[0].numa_node == node


def test_the_address_is_that_of_the_default_route(document):
    found = document("t4x1")
    nets = [{"name": "eth0", "ipv4": "192.0.2.7"}, {"name": "ib0", "ipv4": {"missing": "absent"}}]
    found["nics"] = {"net": nets, "default_route": "eth0", "infiniband": []}
    elsewhere = deepcopy(found)
    elsewhere["nics"]["default_route"] = "ib0"

    assert node_from_probe("gpu-01", found).address == "192.0.2.7"
    assert node_from_probe("gpu-01", elsewhere).address is None
