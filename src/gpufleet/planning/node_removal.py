"""
Refuse a plan in which a multi-node replica loses a node.  Pure.

The replica's other nodes have parts of the model that are useless alone. A typing error in an
inventory, or a GPU that is reserved for others, would therefore end a service on other nodes. Such
a plan is refused, unless the operator requests a new plan (`when_a_node_leaves: replan`). A
single-node replica moves when its node is removed, and the plan shows the move.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from gpufleet.formatting import join_names
from gpufleet.planning.stage import Running
from gpufleet.settings.serving_settings import Served

# The settings that divide a replica, with their flags in the unit. A missing flag means 1.
_SIZES = {
    "tensor_parallel": "--tensor-parallel-size",
    "pipeline_parallel": "--pipeline-parallel-size",
    "data_parallel": "--data-parallel-size",
}


def lost_nodes(
    stages: Sequence[Running],
    fleet: Collection[str],
    usable: Mapping[str, Collection[str]],
    left_out: Mapping[str, str],
) -> dict[str, str]:
    """
    Return each node that a running multi-node replica loses, with the reason.

    The result is empty for a single-node replica. `stages` are the replica's running ranks, and
    `fleet` are the nodes of the inventory. For each node that declares the model, `usable` has the
    UUIDs of usable GPUs, and `left_out` has a sentence on unusable GPUs.

        {"gpu-02": "is no longer in the inventory"}
    """
    ran_on = {each.node: each for each in stages}
    nodes = dict.fromkeys(node for each in stages for node in (*each.nodes, each.node))
    found: dict[str, str] = {}
    if len(nodes) < 2:
        return found
    for node in nodes:
        if node not in fleet:
            found[node] = "is no longer in the inventory"
        elif node not in usable:
            found[node] = "no longer declares the model"
        elif node in ran_on and not set(ran_on[node].gpu_uuids) <= set(usable[node]):
            why = f" ({left_out[node]})" if left_out.get(node) else ""
            found[node] = f"ran the model on GPUs that can no longer be used{why}"
    return found


def refusals(
    name: str,
    served: Served,
    running: Mapping[int, Sequence[Running]],
    losing: Mapping[int, Mapping[str, str]],
) -> list[str]:
    """
    Return a refusal for each replica of a model that would lose a required node.

    `running` are the running replicas by number, and `losing` has the result of `lost_nodes` for
    each replica. A replica requires none of its nodes if it is no longer declared, or if its
    declared division has changed.
    """
    if served.when_a_node_leaves == "replan" or not served.span_nodes:
        return []
    kept = sum(1 for number in running if not losing.get(number))
    needed = [
        number
        for number in sorted(running)
        if losing.get(number) and not _is_reshaped(served, running[number])
    ]
    if served.replicas != "fit":
        needed = needed[: max(0, served.replicas - kept)]
    return [
        _sentence(f"{name}-{number}", name, running[number], losing[number], kept)
        for number in needed
    ]


def _sentence(
    replica: str, name: str, stages: Sequence[Running], gone: Mapping[str, str], kept: int
) -> str:
    nodes = dict.fromkeys(node for each in stages for node in (*each.nodes, each.node))
    whys = " and ".join(f"{node} {why}" for node, why in gone.items())
    drop = f"lower `replicas` to {kept}" if kept else "remove the model from `serving`"
    return (
        f"serving.{name}: {replica} runs on {join_names(nodes)} together, but {whys}. To keep "
        f"{replica} as it is, restore the node. To restart {replica} on the remaining nodes, set "
        f"`when_a_node_leaves: replan`. To remove {replica}, {drop}"
    )


def _is_reshaped(served: Served, stages: Sequence[Running]) -> bool:
    """
    Return whether the declared parallelism differs from the parallelism of the running replica.
    """
    arguments = next((each.arguments for each in stages if each.arguments), ())
    if not arguments:
        return False
    runs = {flag: int(size) for flag, size in map(_split_argument, arguments) if size.isdigit()}
    return any(
        wanted is not None and wanted != runs.get(flag, 1)
        for setting, flag in _SIZES.items()
        if (wanted := getattr(served, setting)) is not None
    )


def _split_argument(line: str) -> tuple[str, str]:
    flag, _, value = line.partition(" ")
    return flag, value
