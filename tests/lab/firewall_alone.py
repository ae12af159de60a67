"""A deploy of the firewall alone: no vLLM, and a replica on gpu-01 and gpu-02 that nobody planned.

Settings come from the inventory as ever. FIREWALL_STAGES says whether the replica is `planned` or
only `running`; with FIREWALL_VERIFY the rules are verified, and nothing is changed.
"""

import os

from pyinfra import host

from gpufleet.fleet.run import NodePlan, refusals
from gpufleet.inventory import loader
from gpufleet.node.cluster_network import Network
from gpufleet.node.topology import Node
from gpufleet.operations.apply_firewall import node_rules
from gpufleet.operations.verify_node import verify_firewall
from gpufleet.planning.stage import Group, Running, Stage
from roles.firewall import firewall

addresses = {"gpu-01": "10.61.0.11", "gpu-02": "10.61.0.12"}  # not those of ssh
NODES = tuple(addresses)
holds = os.environ.get("FIREWALL_STAGES") if host.name in NODES else None


def stage() -> Stage:
    return Stage(
        model="tiny",
        replica=0,
        node=host.name,
        gpus=(0,),
        gpu_uuids=("GPU-0",),
        port=8000,
        tensor_parallel=1,
        pipeline_parallel=2,
        node_rank=NODES.index(host.name),
        nodes=NODES,
        group=Group(
            networks=tuple((name, Network("eth1", addresses[name])) for name in NODES),
            cluster_port=29500,
            side_channel_port=5600,
        ),
    )


def found() -> Running:
    """Return the same as a probe reads it from the unit."""
    rank = NODES.index(host.name)
    lines = (f"--rank {rank}", *(f"--node {name}={addresses[name]}" for name in NODES))
    return Running(
        model="tiny",
        replica=0,
        node=host.name,
        gpu_uuids=("GPU-0",),
        port=8000,
        rank=rank,
        arguments=(*lines, "--port 29500", "-- /opt/vllm/releases/x/bin/vllm serve"),
    )


with refusals():
    here = NodePlan(
        node=Node(host.name, None, None, (), {}, {}),
        settings=loader.current().nodes[host.name].settings,
        stages=(stage(),) if holds == "planned" else (),
        running=(found(),) if holds == "running" else (),
    )
    if os.environ.get("FIREWALL_VERIFY"):
        verify_firewall(node_rules(here), name="verify the firewall")
    else:
        firewall(here, here.running)
