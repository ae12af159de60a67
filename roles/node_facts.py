"""Write gpufleet's node facts every minute into the node exporter's textfile directory."""

from __future__ import annotations

from pyinfra import host
from pyinfra.api import deploy
from pyinfra.context import ctx_state

from gpufleet.fleet import node_records, run
from gpufleet.fleet.facts_timer import FACTS, facts_state
from gpufleet.operations.converge import Converge
from gpufleet.operations.record_deploy import read_facts
from gpufleet.settings.node_settings import NodeSettings

# The program ends by its own deadlines before TimeoutStartSec= of the unit expires.
START_SECONDS = 60


@deploy("node facts")
def node_facts(settings: NodeSettings) -> None:
    """
    Converge the program, its timer and the node's declaration, and verify the facts.

    This is for every node of the fleet; a node without GPUs has no GPU facts.
    """
    told = facts_state(settings, gpu_count() if settings.gpu_node else None)
    node = Converge(told, watch=(FACTS,), probed=False)
    node.files(name="program, units and declaration")
    node.units(name="timer")
    read_facts(node, name="verify the facts", _timeout=START_SECONDS)


def gpu_count() -> int | None:
    """
    Return the number of GPUs on this node's PCI bus, with or without a driver, or None if unknown.
    """
    answer = run.documents(ctx_state.get())[host.name]
    return None if isinstance(answer, str) else node_records.gpus_on_bus(answer)
