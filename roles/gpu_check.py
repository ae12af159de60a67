"""Refuse a node whose GPUs are not what the plan needs.

The planner compares the GPU count and name with what is declared; here is what it leaves: a driver
that does not answer for every GPU, and the NVLinks of each stage's own GPUs. Reads only.
"""

from __future__ import annotations

from gpufleet.errors import FleetError
from gpufleet.fleet import Here


def gpu_check(here: Here) -> None:
    """
    Check that the driver answers for every GPU, and the NVLinks of each stage.

    Raises FleetError with every problem of this node. A node that is to have no GPUs (no `models`,
    no `gpus.count`) is not judged: a load balancer may be in the same inventory.
    """
    if not here.settings.models and here.settings.gpus.count is None:
        return
    problems = [f"{here.node.name}: {problem}" for problem in here.node.problems]
    allowed = {name for name, model in here.settings.models.items() if model.allow_pcie}
    problems += [
        f"{here.node.name}: {stage.id} runs on GPUs {first} and {second}, which no NVLink "
        "joins: look at `nvidia-smi topo -m` and nvidia-fabricmanager, then run the deploy again"
        for stage in here.stages
        if stage.model not in allowed
        for first in stage.gpus
        for second in stage.gpus
        if first < second and not here.node.nvlink.get((first, second))
    ]
    if problems:
        raise FleetError(*problems)
