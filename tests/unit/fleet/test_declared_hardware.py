"""`--as`: which hardware each node of an inventory is taken to be."""

from __future__ import annotations

import pytest

from gpufleet.errors import FleetError
from gpufleet.fleet.declared_hardware import hardware_documents, parse_hardware
from gpufleet.node.cluster_network import networks
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.node_variables import NodeVars
from tests.support.checkout import ROOT


def declared(groups: dict[str, tuple[str, ...]], **settings) -> dict[str, NodeVars]:
    """{node: its groups, least specific first}."""
    found = NodeSettings.model_validate(settings)
    return {name: NodeVars(name, own, found, {}) for name, own in groups.items()}


FLEET = {"a": ("gpu", "gpu_h100"), "b": ("gpu", "gpu_a100"), "c": ("gpu", "gpu_a100")}


def gpus(documents):
    return {name: (len(d["gpus"]), d["gpus"][0]["name"]) for name, d in documents.items()}


def test_a_nodes_own_name_counts_more_than_its_groups_and_an_inner_group_more_than_an_outer():
    hardware = parse_hardware(["t4x1", "gpu=h100x8,gpu_a100=a100x8", "c=a100x4-pcie"])

    found = gpus(hardware_documents(declared(FLEET), hardware))

    assert found["a"] == (8, "NVIDIA H100 80GB HBM3")
    assert found["b"] == (8, "NVIDIA A100-SXM4-80GB")
    assert found["c"][0] == 4


def test_no_two_nodes_share_a_gpu_or_an_address():
    found = hardware_documents(declared(FLEET), {"all": "h100x8"})

    uuids = [gpu["uuid"] for document in found.values() for gpu in document["gpus"]]
    assert len(set(uuids)) == 24
    joined = networks("m-0", found, dict.fromkeys(found, (0,)))
    assert len({each.address for each in joined.values()}) == 3


def test_addresses_lie_in_the_cluster_network_that_is_declared():
    fleet = declared(FLEET, cluster_network="10.20.0.0/24")

    found = hardware_documents(fleet, {"all": "h100x8"})

    named = {name: each.settings.cluster_network for name, each in fleet.items()}
    joined = networks("m-0", found, dict.fromkeys(found, (0,)), named)
    assert {each.address for each in joined.values()} == {"10.20.0.1", "10.20.0.2", "10.20.0.3"}


def test_the_driver_runs_the_cuda_that_the_release_brings():
    vllm = {"version": "0.32.0", "lock": str(ROOT / "locks/vllm-0.32.0.txt"), "listen": "127.0.0.1"}

    (found,) = hardware_documents(declared({"a": ()}, vllm=vllm), {"all": "a100x8"}).values()

    assert found["driver"]["cuda"] >= 13000


def test_nodes_without_hardware_are_named_with_what_to_write():
    with pytest.raises(
        FleetError, match=r"the hardware of b, c is not given: add `--as gpu_a100=NAME`"
    ):
        hardware_documents(declared(FLEET), {"gpu_h100": "h100x8"})

    assert set(hardware_documents(declared(FLEET), {"a": "h100x8"}, known=("b", "c"))) == {"a"}


@pytest.mark.parametrize(
    ("written", "says"),
    [
        (["gpu_h10=h100x8,all=h100x8"], "no GPU node 'gpu_h10'; did you mean"),
        (["h100x9"], "there is no hardware 'h100x9'; did you mean 'h100x8'"),
        (
            ["gpu=h100x8", "gpu=a100x8"],
            "--as gives gpu both h100x8 and a100x8: remove one of the two",
        ),
        (["gpu="], "there is no hardware ''"),
    ],
)
def test_a_name_that_is_not_known_is_refused(written, says):
    with pytest.raises(FleetError, match=says):
        hardware_documents(declared(FLEET), parse_hardware(written))
