"""Ports between nodes: each replica has its own, and keeps them."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gpufleet.errors import FleetError
from gpufleet.planning.multinode.rank_ports import PORTS, Ports, assign_rank_ports, running_ports
from gpufleet.planning.stage import Running, Stage
from gpufleet.settings.serving_settings import Served

NIXL = {"kv-transfer-config": {"kv_connector": "NixlConnector", "kv_role": "kv_both"}}


def served(**changes):
    return Served.model_validate({"model": "/srv/models/m", "span_nodes": True} | changes)


def stages(name, *nodes, port=8000, data=1, replica=0):
    """The stages of one replica on these nodes, four GPUs on each."""
    return [
        Stage(
            model=name,
            replica=replica,
            node=node,
            gpus=(0, 1, 2, 3),
            gpu_uuids=("a", "b", "c", "d"),
            port=port,
            tensor_parallel=4 * len(nodes) // data,
            data_parallel=data,
            node_rank=rank,
            nodes=nodes if len(nodes) > 1 else (),
        )
        for rank, node in enumerate(nodes)
    ]


def two(first, second, **more):
    """The cluster ports of two replicas that share both of their nodes."""
    both = [*stages("a", "n1", "n2"), *stages("b", "n1", "n2", port=8001)]
    models = {"a": served(cluster_port=first), "b": served(cluster_port=second)}
    given = assign_rank_ports(both, models, **more)
    return {name: ports.cluster for name, ports in given.items()}


def test_replicas_that_share_a_node_have_ports_of_their_own():
    assert two(29500, 29500) == {"a-0": 29500, "b-0": 29500 + PORTS}
    assert two(29500, 30000) == {"a-0": 29500, "b-0": 30000}


def test_replicas_that_share_no_node_may_have_the_same():
    both = [*stages("a", "n1", "n2"), *stages("a", "n3", "n4", replica=1)]

    given = assign_rank_ports(both, {"a": served()})

    assert given == {"a-0": Ports(cluster=29500), "a-1": Ports(cluster=29500)}


def test_a_range_that_overlaps_is_taken_as_well():
    assert two(29500, 29510) == {"a-0": 29500, "b-0": 29526}


def test_who_runs_keeps_its_ports():
    assert two(29500, 29500, running={"b-0": Ports(29500)}) == {"a-0": 29516, "b-0": 29500}


def test_who_runs_on_ports_that_it_could_not_have_got_gets_others():
    """Somebody wrote another `cluster_port`: what runs follows."""
    assert two(29500, 30000, running={"b-0": Ports(29516)})["b-0"] == 30000


def test_ports_of_endpoints_are_stepped_over():
    assert two(7995, 29500)["a-0"] == 8011


def test_a_worker_without_a_server_leaves_its_endpoints_port_free():
    """Of `external` engines on the other hand every port counts."""
    model = served(cluster_port=8002, data_parallel_balancing="external")
    given = assign_rank_ports(stages("a", "n1", "n2", data=8), {"a": model})

    assert given["a-0"].cluster == 8018  # 8000 to 8003 are servers, 8004 their supervisor


def test_ports_that_any_program_may_be_given_are_not_taken():
    assert two(32752, 29500)["a-0"] == 32752
    with pytest.raises(FleetError) as caught:
        two(32752, 32752)
    assert (
        "serving.b.cluster_port: there are no 16 consecutive free ports from 32752 to 32767"
        in str(caught.value)
    )


def test_a_replica_on_one_node_needs_none():
    assert assign_rank_ports(stages("a", "n1"), {"a": served()}) == {"a-0": Ports()}


def test_every_engine_has_a_side_channel_on_its_node():
    """Rank n of a replica listens n ports behind the first, on whatever node it is."""
    replicas = [
        *stages("a", "n1", "n2", data=8),
        *stages("b", "n2", port=8001),
        *stages("c", "n3", port=8001),
    ]
    models = {name: served(flags=NIXL) for name in "abc"}

    given = assign_rank_ports(replicas, models)

    assert {name: ports.side_channel for name, ports in given.items()} == {
        "a-0": 5600,
        "b-0": 5608,
        "c-0": 5600,
    }


def test_the_order_in_which_a_running_fleet_is_told_does_not_matter():
    both = [*stages("a", "n1", "n2"), *stages("b", "n1", "n2", port=8001)]
    models = {"a": served(), "b": served()}
    first = assign_rank_ports(both, models)

    again = assign_rank_ports([replace(each) for each in reversed(both)], models, running=first)

    assert again == first


def test_the_ports_of_what_runs_are_those_of_its_units():
    """The rank's own come before those of what it starts."""
    lines = ("--replica a-0", "--node n1=10.1.0.1", "--node n2=10.1.0.2", "--port 29516")
    behind = ("-- /opt/vllm/releases/x/bin/vllm serve", "/srv/m", "--port 8000")
    ranks = [
        Running("a", 0, node, ("u",), 8000, rank, "x", (*lines, *behind), side_channel=5600)
        for rank, node in enumerate(("n1", "n2"))
    ]
    alone = Running("b", 1, "n1", ("u",), 8001, 0, "x", ("/srv/m", "--port 8001"))

    assert running_ports([*ranks, alone]) == {"a-0": Ports(29516, 5600), "b-1": Ports()}
