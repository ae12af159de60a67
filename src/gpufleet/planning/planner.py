"""
Assign GPUs of nodes to replicas, with reasons. Pure: values in, values out.

The rules, in order of precedence:

1. A model is placed on the nodes that declare it. All of these nodes must have the same
   declaration.
2. The division of a replica is chosen separately for each kind of node (`candidates.py`). Values
   that the operator sets are not changed. A replica is placed on nodes of one kind, in equal shares
   (`planning/parallelism.py`), and in one NVLink domain if a domain has room.
3. Models are placed largest group first, then by name, so that small groups fill the gaps between
   large groups. A model with `replicas: fit` counts as one replica until all other models are
   placed. Then such models get further replicas in turns, the model with the fewest replicas first.
4. A cordoned node gets no new replica. The replicas that run on it may stay, like replicas on other
   nodes.
5. A running replica keeps its node, GPUs, port and number if these are still allowed. A different
   model displaces the replica only if that model is placed earlier and has no other room. The plan
   reports each displaced replica.
6. A multi-node replica that would lose a node is refused, unless its settings allow a new plan
   (`planning/node_removal.py`).
7. A new replica is placed on a node of the first group in its model's `prefer` that has room. Of
   these nodes, gpufleet chooses the node with the fewest replicas of the model so far, then the
   node with the most free GPUs, then the node with the first name. `planning/gpu_placement.py`
   chooses the GPUs on the node.
8. One stage uses a GPU alone, or several models share the GPU (`planning/gpu_shares.py`). Shares
   are placed after all replicas that use whole GPUs. A port on a node has one user (`ports.py`).

Replicas are placed one after another, and each choice depends only on the earlier choices. If a
model gets one more replica, the other replicas of this model therefore do not move. The new replica
may displace replicas of models that are placed later.

The same nodes and settings give the same plan. Their order does not matter.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from gpufleet.errors import FleetError
from gpufleet.formatting import join_names
from gpufleet.node.cordon import describe_cordon
from gpufleet.node.topology import Node
from gpufleet.planning.candidates import CandidateSet, Sizer
from gpufleet.planning.gpu_placement import Layout, NearNics, NodeCapacity
from gpufleet.planning.parallelism import Kind
from gpufleet.planning.ports import assign_ports
from gpufleet.planning.replica_allocation import (
    ModelAllocation,
    Replica,
    place,
    placement_order,
    unused_gpus,
)
from gpufleet.planning.stage import ReplicaMove, Running, Stage
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.serving_settings import Served
from gpufleet.sizing.fit import size
from gpufleet.sizing.options import Options, Sizing

if TYPE_CHECKING:
    from gpufleet.sizing.architectures.description import Description

SCHEMA = 1
"""Version of `FleetPlan.as_json()`; increased when a key changes its meaning or is removed."""


@dataclass(frozen=True)
class FleetPlan:
    """Every stage of the fleet, ordered by model and replica, and a sentence for each choice."""

    stages: tuple[Stage, ...]
    reasons: tuple[str, ...]
    candidates: tuple[CandidateSet, ...] = ()
    """For each model and kind of node: the divisions that were considered."""
    moves: tuple[ReplicaMove, ...] = ()
    """Running replicas that move or stop; empty if nothing runs yet."""

    def stages_on(self, node: str) -> tuple[Stage, ...]:
        """Return the stages of one node."""
        return tuple(stage for stage in self.stages if stage.node == node)

    def as_json(self) -> dict[str, Any]:
        """
        Return plain values for `json.dumps`.

            {"schema": 1, "stages": [{"id": "llama-0", "unit": "vllm-llama-0.service", ...}],
             "reasons": ["llama: ..."], "moves": [{"id": "llama-0", "why": "...", ...}]}
        """
        return {
            "schema": SCHEMA,
            "stages": [
                {
                    "id": stage.id,
                    "unit": stage.unit,
                    "model": stage.model,
                    "kind": stage.kind,
                    "engine": stage.engine,
                    "replica": stage.replica,
                    "node": stage.node,
                    "gpus": list(stage.gpus),
                    "gpu_uuids": list(stage.gpu_uuids),
                    **({"gpu_share": stage.gpu_share} if stage.gpu_share else {}),
                    "port": stage.port,
                    "ports": list(stage.ports),
                    "tensor_parallel": stage.tensor_parallel,
                    "pipeline_parallel": stage.pipeline_parallel,
                    "data_parallel": stage.data_parallel,
                    "expert_parallel": stage.expert_parallel,
                    "node_rank": stage.node_rank,
                    "nodes": list(stage.nodes or (stage.node,)),
                    "flags": [asdict(each) for each in stage.flags],
                }
                for stage in self.stages
            ],
            "reasons": list(self.reasons),
            "moves": [
                {
                    "id": f"{move.model}-{move.replica}",
                    "why": move.why,
                    "from": sorted({each.node for each in move.before}),
                    "to": [each.node for each in move.after],
                }
                for move in self.moves
            ],
        }


def plan(
    nodes: Iterable[Node],
    settings: Mapping[str, NodeSettings],
    described: Mapping[str, Description | str] | None = None,
    running: Iterable[Running] = (),
    *,
    reserved: Mapping[str, Collection[int]] | None = None,
    nics: Mapping[str, NearNics] | None = None,
    ports: Mapping[str, Collection[int]] | None = None,
    groups: Mapping[str, Collection[str]] | None = None,
) -> FleetPlan:
    """
    Place every declared replica of every model.

    `nodes` are the probed nodes, and `settings` has the settings of each node. `described` maps
    each model's name in `serving` to the model's description, or to a sentence why gpufleet could
    not read the model. `running` are the running stages. The other arguments have a value for each
    node:

    - `reserved`: the reserved GPUs;
    - `nics`: the result of `nic_affinity.nearest_nics`;
    - `ports`: the ports of other programs;
    - `groups`: the node's groups in the inventory.

    Raises `FleetError` with all obstacles of all nodes and models.
    """
    fleet = {
        node.name: without_reserved(node, (reserved or {}).get(node.name, ())) for node in nodes
    }
    declared = _declarations(settings)
    runs = _by_replica(running)
    problems, usable = _validate(fleet, settings, declared)
    allocations = _allocations(
        {name: declared[name] for name in usable},
        _node_capacities(fleet, settings, nics or {}, groups or {}),
        described or {},
        runs,
        fleet.keys(),
    )
    more, allocations, placed = _place(allocations)
    clashes, remarks = assign_ports(
        [each.endpoint for each in placed],
        {name: wanted for name, wanted in settings.items() if name in fleet},
        ports or {},
    )
    if problems := [*problems, *more, *clashes]:
        raise FleetError(*problems)
    undeclared = {model: replicas for model, replicas in runs.items() if model not in declared}
    return _report(fleet, allocations, placed, undeclared, remarks)


def _validate(
    fleet: Mapping[str, Node],
    settings: Mapping[str, NodeSettings],
    declared: Mapping[str, Mapping[str, Served]],
) -> tuple[list[str], list[str]]:
    """Return problems of nodes and declarations, and the models that can be placed."""
    faults = dict(_node_problems(fleet, settings))
    disagreements = dict(_disagreements(declared))
    problems = [sentence for sentences in faults.values() for sentence in sentences]
    # Whether the affected models fit is known only after their problems are corrected.
    usable = [
        name
        for name, by_node in declared.items()
        if name not in disagreements and not any(node in by_node for node in faults)
    ]
    return [*problems, *disagreements.values()], usable


def _allocations(
    declared: Mapping[str, Mapping[str, Served]],
    rooms: Mapping[str, NodeCapacity],
    described: Mapping[str, Description | str],
    running: Mapping[str, Mapping[int, tuple[Running, ...]]],
    fleet: Collection[str],
) -> list[ModelAllocation]:
    """Return the demand of each model, with its running replicas."""
    sizer = _cached_sizer(size)
    found = []
    for name, by_node in declared.items():
        allocation = ModelAllocation(
            name,
            next(iter(by_node.values())),
            described.get(name),
            [rooms[node] for node in by_node],
            fleet=fleet,
            sizer=sizer,
        )
        allocation.running = dict(running.get(name, {}))
        found.append(allocation)
    return found


def _place(
    allocations: Iterable[ModelAllocation],
) -> tuple[list[str], list[ModelAllocation], list[Replica]]:
    """
    Place all replicas that fit.

    Returns the problems, the models whose `removal_refusals` are empty, and the placed replicas.
    """
    problems: list[str] = []
    staying = []
    for allocation in allocations:
        if sentences := allocation.removal_refusals:
            problems += sentences
        else:
            staying.append(allocation)
    divided = [each for each in staying if each.divisions]
    problems += (each.refusal for each in staying if not each.divisions)
    place(divided)
    problems += (each.shortfall for each in divided if len(each.placed) < each.required)
    placed = [replica for each in divided for _, replica in sorted(each.placed.items())]
    return problems, staying, placed


def _report(
    fleet: Mapping[str, Node],
    allocations: Sequence[ModelAllocation],
    placed: Iterable[Replica],
    undeclared: Mapping[str, Mapping[int, tuple[Running, ...]]],
    remarks: Iterable[str],
) -> FleetPlan:
    """Return the plan of the placed replicas, with a sentence for each choice."""
    moves = [move for allocation in allocations for move in allocation.moves()]
    moves += (
        ReplicaMove(model, number, "no node declares the model", stages)
        for model, replicas in undeclared.items()
        for number, stages in replicas.items()
    )
    hurt = [f"{name}: {unused_gpus(node)}" for name, node in sorted(fleet.items()) if node.unfit]
    closed = [
        describe_cordon(name, node.cordon) for name, node in sorted(fleet.items()) if node.cordon
    ]
    choices = [reason for each in placement_order(allocations) for reason in each.reasons()]
    return FleetPlan(
        stages=tuple(
            stage
            for replica in sorted(placed, key=lambda each: (each.model, each.number))
            for stage in replica.stages()
        ),
        reasons=(*hurt, *closed, *choices, *remarks, *map(str, moves)),
        candidates=tuple(each for one in allocations for each in one.considered.values()),
        moves=tuple(moves),
    )


# Problems before the placement


def without_reserved(node: Node, reserved: Collection[int]) -> Node:
    """
    Return a node with its reserved GPUs marked as unfit, so that no replica is placed on them.
    """
    if not any(gpu.index in reserved for gpu in node.gpus):
        return node
    taken = {gpu.index: "reserved for others" for gpu in node.gpus if gpu.index in reserved}
    left = tuple(gpu for gpu in node.gpus if gpu.index not in taken)
    return replace(node, gpus=left, unfit=dict(sorted({**node.unfit, **taken}.items())))


def _node_problems(
    fleet: Mapping[str, Node], settings: Mapping[str, NodeSettings]
) -> Iterator[tuple[str, list[str]]]:
    """Yield each node that cannot be used, with sentences on the reason."""
    for name, wanted in sorted(settings.items()):
        if not wanted.serving:
            continue
        if name not in fleet:
            sentences = [
                f"{name}: gpufleet has no probe of this node, but the node declares "
                f"{join_names(wanted.serving)}: make the node reachable, or remove it from the "
                "inventory so that its replicas move to other nodes"
            ]
        elif not fleet[name].gpus:
            why = ": " + unused_gpus(fleet[name]) if fleet[name].unfit else ""
            sentences = [
                f"{name}: the node has no usable GPU, but declares "
                f"{join_names(wanted.serving)}{why}"
            ]
        else:
            continue
        yield name, sentences


def _declarations(settings: Mapping[str, NodeSettings]) -> dict[str, dict[str, Served]]:
    """Return each model's declarations by node, sorted by name."""
    declared: dict[str, dict[str, Served]] = defaultdict(dict)
    for name, wanted in sorted(settings.items()):
        for model, declaration in wanted.serving.items():
            declared[model][name] = declaration
    return dict(sorted(declared.items()))


def _disagreements(
    declared: Mapping[str, Mapping[str, Served]],
) -> Iterator[tuple[str, str]]:
    """Yield each model that two nodes declare differently, with a sentence on the difference."""
    for name, by_node in declared.items():
        (first, reference), *rest = by_node.items()
        other = next((node for node, each in rest if vars(each) != vars(reference)), None)
        if other is None:
            continue
        differences = "; ".join(
            f"{key}: {getattr(reference, key)!r} and {getattr(by_node[other], key)!r}"
            for key in Served.model_fields
            if getattr(reference, key) != getattr(by_node[other], key)
        )
        yield (
            name,
            f"serving.{name} differs between {first} and {other} ({differences}), but all nodes "
            "must declare a model in the same way: declare the model in a group that contains "
            "both nodes, or rename the model on one of them",
        )


# Demand and capacity


def _node_capacities(
    fleet: Mapping[str, Node],
    settings: Mapping[str, NodeSettings],
    nics: Mapping[str, NearNics],
    groups: Mapping[str, Collection[str]],
) -> dict[str, NodeCapacity]:
    """Return each node's capacity with all GPUs free; equal nodes share layout and kind."""
    layouts: dict[tuple[object, ...], Layout] = {}
    kinds: dict[tuple[object, ...], Kind] = {}
    rooms = {}
    for order, (name, node) in enumerate(sorted(fleet.items())):
        near = nics.get(name, {})
        key = Layout.key(node, near)
        layout = layouts.get(key) or layouts.setdefault(key, Layout(node, near))
        here = settings.get(name)
        vllm, servers = here and here.vllm, here and here.servers
        hardware = tuple((gpu.name, gpu.memory_mib, gpu.compute_capability) for gpu in node.gpus)
        alike = (key, hardware, vllm and vllm.version, servers and servers.device)
        if alike not in kinds:
            kinds[alike] = Kind(
                gpu=" and ".join(sorted({gpu.name for gpu in node.gpus})),
                # If a node's GPUs differ, a group may get the weakest of them.
                memory_mib=min((gpu.memory_mib for gpu in node.gpus), default=0),
                compute_capability=min(
                    (gpu.compute_capability for gpu in node.gpus), default=(0, 0)
                ),
                islands=tuple(sorted(map(len, layout.islands), reverse=True)),
                vllm=vllm.version if vllm else "",
                device=servers.device if servers else "cuda",
                more_groups=tuple(layout.more_groups.items()),
            )
        rooms[name] = NodeCapacity(
            node, kinds[alike], layout, order, frozenset(groups.get(name, ()))
        )
    return rooms


def _cached_sizer(sizer: Sizer) -> Sizer:
    """
    Return a sizer that caches its results, because several kinds of node may have the same GPUs.
    """
    known: dict[tuple[int, Options], Sizing] = {}

    def cached_sizer(description: Description, options: Options) -> Sizing:
        key = (id(description), options)
        if key not in known:
            known[key] = sizer(description, options)
        return known[key]

    return cached_sizer


def _by_replica(running: Iterable[Running]) -> dict[str, dict[int, tuple[Running, ...]]]:
    """Return the running stages of each model and replica, in the order of their ranks."""
    found: dict[str, dict[int, list[Running]]] = defaultdict(lambda: defaultdict(list))
    for each in sorted(running, key=lambda each: (each.model, each.replica, each.rank, each.node)):
        found[each.model][each.replica].append(each)
    return {
        model: {number: tuple(stages) for number, stages in replicas.items()}
        for model, replicas in found.items()
    }
