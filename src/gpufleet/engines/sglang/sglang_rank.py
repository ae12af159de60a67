"""Build the launch arguments of a rank of an SGLang replica that spans several nodes. Pure.

The rank's program (on_node/rank/rank.py) inserts the ports, starts the head first, and ends all
ranks together. This is needed because all ranks except the head ignore SIGTERM, and because the
head does not notice a rank that dies while the rank starts (docs/develop/sglang.md, 0.5.23).
"""

from __future__ import annotations

from gpufleet.planning.multinode import launch
from gpufleet.planning.multinode.launch import MASTER_PORT, RPC_PORT, Rank
from gpufleet.planning.stage import Stage
from gpufleet.settings.serving_settings import Argument, EngineSettings, Served


def rank(stage: Stage, _model: Served, sglang: EngineSettings) -> Rank:
    """Return the additional launch arguments of a stage of a multi-node replica."""
    if stage.group is None:
        raise ValueError(f"{stage.id} is on one node")
    networks = dict(stage.group.networks)
    head = networks[stage.nodes[0]].address
    flags: dict[str, Argument] = {
        "nnodes": len(stage.nodes),
        "node-rank": stage.node_rank,
        "dist-init-addr": f"[{head}]:{MASTER_PORT}" if ":" in head else f"{head}:{MASTER_PORT}",
    }
    if stage.node_rank:
        # The server of this rank only shows that the process is alive, so clients must not reach
        # it.
        flags |= {"host": "127.0.0.1", "port": RPC_PORT}
    variables = launch.interface_variables(networks[stage.node], sglang.device)
    return Rank(
        serves=True,
        flags=flags,
        drops=("host", "port") if stage.node_rank else (),
        variables=variables,
        ready_port="" if stage.node_rank else MASTER_PORT,
        endpoints=() if stage.node_rank else (stage.port,),
    )
