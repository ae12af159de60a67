"""Refuse a node whose GPUs are not what the plan needs.

The plan itself was made from the same probe, so most misfits stop the run before this: here is
what concerns one node alone. Reads only.
"""

from __future__ import annotations

from gpufleet.errors import FleetError
from gpufleet.fleet import Here


def gpu_check(here: Here) -> None:
    """
    Check the GPU count, that the driver answers for every GPU, and the NVLinks of each stage.

    Raises FleetError with every problem of this node. A node that is to have no GPUs (no `models`,
    no `gpus.count`) is not judged: a load balancer may be in the same inventory.
    """
    if not here.settings.models and here.settings.gpus.count is None:
        return
    problems = [f"{here.node.name}: {problem}" for problem in here.node.problems]
    declared = here.settings.gpus.count
    if declared is not None and declared != len(here.node.gpus):
        problems.append(
            f"{here.node.name}: gpus.count says {declared}, the driver shows "
            f"{len(here.node.gpus)}: look for a GPU that fell off the bus (`dmesg | grep -i xid`), "
            "or correct the setting"
        )
    allowed = {name for name, model in here.settings.models.items() if model.allow_pcie}
    problems += [
        f"{here.node.name}: {stage.id} runs on GPUs {first} and {second}, which no NVLink joins"
        for stage in here.stages
        if stage.model not in allowed
        for first in stage.gpus
        for second in stage.gpus
        if first < second and not here.node.nvlink.get((first, second))
    ]
    if problems:
        raise FleetError(*problems)
