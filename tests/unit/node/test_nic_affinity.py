"""Which NIC is nearest to which GPU, from places in sysfs as Linux writes them."""

from __future__ import annotations

import json
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufleet.node.nic_affinity import (
    nearest_by_class,
    nearest_nics,
    nic_classes,
    pci_distance,
    pci_location,
)
from gpufleet.node.smi_topology import PCIE
from gpufleet.node.topology import PCIE_LEVELS, value_or
from tests.support.checkout import ROOT
from tests.support.rows import each_row

NODES = ROOT / "src/gpufleet/catalog/data/nodes"

PCI_ROOT = "/sys/devices/pci0000:16"
SWITCH = f"{PCI_ROOT}/0000:16:01.0/0000:17:00.0"


@each_row(
    ("gpu", "nic", "wanted"),
    [
        # Ports of one switch, as HGX boards have them; and two functions of one card.
        (f"{SWITCH}/0000:18:00.0/0000:19:00.0", f"{SWITCH}/0000:18:01.0/0000:1a:00.0", "PIX"),
        (f"{SWITCH}/0000:18:00.0/0000:19:00.0", f"{SWITCH}/0000:18:00.0/0000:19:00.1", "PIX"),
        # Functions of one card on a root port (a NIC and a GPU on one board).
        (f"{PCI_ROOT}/0000:16:01.0/0000:17:00.0", f"{PCI_ROOT}/0000:16:01.0/0000:17:00.1", "PIX"),
        (f"{SWITCH}/0000:18:00.0/a", f"{SWITCH}/0000:18:01.0/b/0000:1c:00.0", "PXB"),
        # A second switch below the first one (DGX A100).
        (
            f"{SWITCH}/0000:18:00.0/0000:19:00.0",
            f"{SWITCH}/0000:18:01.0/0000:1a:00.0/0000:1b:00.0/0000:1c:00.0",
            "PXB",
        ),
        (
            f"{SWITCH}/0000:18:01.0/0000:1a:00.0/0000:1b:00.0/0000:1c:00.0",
            f"{SWITCH}/0000:18:00.0/0000:19:00.0",
            "PXB",
        ),
        # Two root ports of one host bridge; devices that sit on the host bridge itself.
        (f"{PCI_ROOT}/0000:16:01.0/0000:17:00.0", f"{PCI_ROOT}/0000:16:03.0/0000:1f:00.0", "PHB"),
        (f"{PCI_ROOT}/0000:16:01.0", f"{PCI_ROOT}/0000:16:03.0", "PHB"),
        # Two host bridges.
        (f"{PCI_ROOT}/0000:16:01.0/0000:17:00.0", "/sys/devices/pci0000:30/0000:30:01.0", "NODE"),
    ],
)
def test_how_far_up_two_paths_part_is_the_class(gpu, nic, wanted):
    assert pci_distance(gpu, 0, nic, 0) == wanted
    assert pci_distance(nic, 0, gpu, 0) == wanted


@each_row(
    ("one", "other", "wanted"),
    [(0, 0, "NODE"), (0, 1, "SYS"), (-1, -1, "NODE"), (None, None, "SYS"), (0, None, "SYS")],
)
def test_two_host_bridges_are_as_near_as_their_numa_nodes(one, other, wanted):
    """-1 is Linux' word on a machine without NUMA; an unknown node is taken for another one."""
    assert pci_distance(f"{PCI_ROOT}/a", one, "/sys/devices/pci0000:30/b", other) == wanted


def test_virtual_host_bridges_are_told_by_their_whole_name():
    """Azure and GB200 have domains beyond 0000: pci0001:00 is not pci0000:00."""
    assert pci_distance(
        "/sys/devices/pci0001:00/0001:00:00.0", 0, "/sys/devices/pci0000:00/x", 1
    ) == ("SYS")


@each_row("path", sorted(NODES.rglob("*.json")), ids=lambda path: path.stem)
def test_nvml_calls_two_gpus_as_near_as_their_paths_do(path):
    """What it says of GPUs alone is the same question: its answers check ours on whole machines."""
    document = json.loads(path.read_text())
    functions = {each["bus_id"]: each for each in value_or(document["pci"], [])}
    gpus = {
        gpu["index"]: pci_location(
            functions.get(gpu["pci"]["bus_id"], {}), document["numa"][at]["node"]
        )
        for at, gpu in enumerate(document["gpus"])
    }

    for i, j in combinations(gpus, 2):
        level = value_or(document["pcie"][i][j])
        if gpus[i][0] and gpus[j][0] and level is not None:
            assert pci_distance(*gpus[i], *gpus[j]) == PCIE_LEVELS[level]


@given(st.data())
def test_the_nearest_are_all_that_are_as_near_as_the_first(data):
    nics = {
        f"mlx5_{nic}": {gpu: data.draw(st.sampled_from(PCIE)) for gpu in range(4)}
        for nic in range(data.draw(st.integers(1, 5)))
    }

    for gpu, found in nearest_by_class(nics).items():
        best = min((gpus[gpu] for gpus in nics.values()), key=PCIE.index)
        assert found == [(nic, best) for nic, gpus in nics.items() if gpus[gpu] == best]


def function(path, numa):
    return {"path": path, "numa_node": numa}


@pytest.fixture
def document():
    """Two GPUs and a NIC beside each; a third GPU that does not answer; a NIC in software."""
    at = {
        "0000:19:00.0": function(f"{SWITCH}/0000:18:00.0/0000:19:00.0", 0),
        "0000:99:00.0": function("/sys/devices/pci0000:90/0000:90:01.0/0000:99:00.0", 1),
    }
    nic = {"bus_id": "0000:1a:00.0", **function(f"{SWITCH}/0000:18:01.0/0000:1a:00.0", 0)}
    far = {
        "bus_id": "0000:a0:00.0",
        **function("/sys/devices/pci0000:a0/0000:a0:01.0/0000:a1:00.0", 1),
    }
    return {
        "gpus": [
            {"index": 0, "pci": {"bus_id": "0000:19:00.0"}},
            {"index": 1, "pci": {"bus_id": "0000:99:00.0"}},
            {"index": 2, "missing": "lost"},
        ],
        "numa": [{"node": 0}, {"node": 1}, {"missing": "lost"}],
        "pci": [{"bus_id": bus_id, **each} for bus_id, each in at.items()],
        "nics": {
            "infiniband": [
                {"name": "mlx5_0", "pci": nic},
                {"name": "mlx5_1", "pci": far},
                {"name": "rxe0", "pci": {"missing": "absent"}},
            ]
        },
    }


def test_a_probe_has_all_that_is_needed(document):
    assert nic_classes(document) == {
        "mlx5_0": {0: "PIX", 1: "SYS"},
        "mlx5_1": {0: "SYS", 1: "NODE"},
    }
    assert nearest_nics(document) == {0: [("mlx5_0", "PIX")], 1: [("mlx5_1", "NODE")]}


def test_a_gpu_whose_place_is_unknown_has_no_near_nic(document):
    document["pci"] = {"missing": "absent"}

    assert nearest_nics(document) == {}


def test_a_node_without_rdma_has_none(document):
    document["nics"]["infiniband"] = {"missing": "absent"}

    assert nearest_nics(document) == {}
