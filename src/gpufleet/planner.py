"""
Which GPUs of which node serve which replica, and why. Pure: values in, values out.

The rules, in the order in which they decide:

1. A model is placed on the nodes that declare it, by the same declaration on all of them.
2. Models are placed largest `tensor_parallel` first, then by name: small groups fill the gaps that
   large ones leave, never the other way round.
3. A replica goes to the node with the fewest replicas of its model so far, then the most free
   GPUs, then the first name.
4. On the node it takes GPUs of one NVLink island: the smallest remainder that is large enough,
   inside it GPUs of one NUMA node where they suffice, then the lowest indices. `allow_pcie` adds
   wider and wider parts of the PCIe tree behind the islands.
5. A GPU serves one stage.

Replicas are placed one after another and each choice looks only at those before it. So asking for
one more replica moves none of that model. It may move models that are placed later, when they had
the GPUs it now takes.

The same nodes and settings give the same plan, whatever their order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.settings import NodeSettings, Served
from gpufleet.topology import Node

SCHEMA = 1
"""Version of `FleetPlan.as_json()`; raised when a key changes its meaning or goes."""

# How NVML names the nearest common ancestor of two GPUs, nearest first: one switch, several
# switches, one host bridge, one NUMA node, anything.
PCIE_TIERS = ("PIX", "PXB", "PHB", "NODE", "SYS")


@dataclass(frozen=True)
class Stage:
    """The part of a replica that one node runs: a tensor-parallel group, one systemd unit."""

    model: str
    replica: int
    """Counted over the whole fleet, from 0."""
    node: str
    gpus: tuple[int, ...]
    """NVML indices, ascending."""
    gpu_uuids: tuple[str, ...]
    """Of the same GPUs, in the same order."""
    port: int
    tensor_parallel: int

    @property
    def id(self) -> str:
        """Names the stage on its node and in the fleet: `llama-0`."""
        return f"{self.model}-{self.replica}"

    @property
    def unit(self) -> str:
        """The systemd unit: `vllm-llama-0.service`."""
        return f"vllm-{self.id}.service"


@dataclass(frozen=True)
class FleetPlan:
    """Every stage of the fleet, ordered by model and replica, and a sentence for each choice."""

    stages: tuple[Stage, ...]
    reasons: tuple[str, ...]

    def on(self, node: str) -> tuple[Stage, ...]:
        """The stages `node` must run, and nothing else."""
        return tuple(stage for stage in self.stages if stage.node == node)

    def as_json(self) -> dict[str, Any]:
        """
        Plain values for `json.dumps`.

            {"schema": 1, "stages": [{"id": "llama-0", "unit": "vllm-llama-0.service", ...}],
             "reasons": ["llama: ..."]}
        """
        return {
            "schema": SCHEMA,
            "stages": [
                {
                    "id": stage.id,
                    "unit": stage.unit,
                    "model": stage.model,
                    "replica": stage.replica,
                    "node": stage.node,
                    "gpus": list(stage.gpus),
                    "gpu_uuids": list(stage.gpu_uuids),
                    "port": stage.port,
                    "tensor_parallel": stage.tensor_parallel,
                }
                for stage in self.stages
            ],
            "reasons": list(self.reasons),
        }


def plan(nodes: Iterable[Node], settings: Mapping[str, NodeSettings]) -> FleetPlan:
    """
    Place every declared replica of every model.

    `nodes` are the probed nodes, `settings` what each node's variables say, by node name.
    Raises `FleetError` with everything that stands in the way, over all nodes and models.
    """
    fleet = {node.name: node for node in nodes}
    faults = dict(_faults(fleet, settings))
    declared = _declarations(settings)
    disagreements = dict(_disagreements(declared))
    problems = [sentence for sentences in faults.values() for sentence in sentences]
    problems += disagreements.values()

    rooms = {name: _Room(fleet[name]) for name in sorted(fleet)}
    stages: list[Stage] = []
    reasons = [f"{name}: {_left_out(node)}" for name, node in sorted(fleet.items()) if node.unfit]
    for name, model in _in_order(declared):
        if name in disagreements or faults.keys() & declared[name].keys():
            continue  # whether it fits can only be said once these are put right
        placed = _place(name, model, [rooms[node] for node in declared[name]])
        stages += placed.stages
        reasons.append(placed.reason)
        problems += placed.misfit

    problems += _port_clashes(stages, settings)
    if problems:
        raise FleetError(*problems)
    return FleetPlan(
        stages=tuple(sorted(stages, key=lambda stage: (stage.model, stage.replica))),
        reasons=tuple(reasons),
    )


# What stands in the way before anything is placed


def _faults(
    fleet: Mapping[str, Node], settings: Mapping[str, NodeSettings]
) -> Iterator[tuple[str, list[str]]]:
    """Each node that cannot be planned with, and the sentences that say why."""
    for name, wanted in sorted(settings.items()):
        if not wanted.serving:
            continue
        if name not in fleet:
            sentences = [
                f"{name}: no probe of this node, and it declares {_listed(wanted.serving)}: make it "
                "reachable, or take it out of the inventory so that its replicas go elsewhere"
            ]
        elif not fleet[name].gpus:
            why = ": " + _left_out(fleet[name]) if fleet[name].unfit else ""
            sentences = [f"{name}: no GPU to use, and it declares {_listed(wanted.serving)}{why}"]
        else:
            continue
        yield name, sentences


def _left_out(node: Node) -> str:
    return "; ".join(f"GPU {index} is left out ({why})" for index, why in node.unfit.items())


def _declarations(settings: Mapping[str, NodeSettings]) -> dict[str, dict[str, Served]]:
    """For each model the nodes that declare it, with their declaration, both in order of name."""
    declared: dict[str, dict[str, Served]] = defaultdict(dict)
    for name, wanted in sorted(settings.items()):
        for model, declaration in sorted(wanted.serving.items()):
            declared[model][name] = declaration
    return dict(sorted(declared.items()))


def _disagreements(
    declared: Mapping[str, Mapping[str, Served]],
) -> Iterator[tuple[str, str]]:
    """Each model that two nodes declare differently, with the sentence that says how."""
    for name, by_node in declared.items():
        (first, reference), *rest = by_node.items()
        other = next((node for node, declaration in rest if declaration != reference), None)
        if other is None:
            continue
        differences = "; ".join(
            f"{key}: {getattr(reference, key)!r} and {getattr(by_node[other], key)!r}"
            for key in Served.model_fields
            if getattr(reference, key) != getattr(by_node[other], key)
        )
        yield (
            name,
            f"serving.{name} is not the same on {first} and {other} ({differences}): one model has "
            "one declaration; set it in a group that both are in, or give one of them another name",
        )


def _in_order(declared: Mapping[str, Mapping[str, Served]]) -> list[tuple[str, Served]]:
    """The models as they are placed: largest group first, then by name."""
    models = [(name, next(iter(by_node.values()))) for name, by_node in declared.items()]
    return sorted(models, key=lambda named: (-_width(named[1]), named[0]))


# Placing


class _Room:
    """The GPUs of one node that no stage has yet."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.free = {gpu.index for gpu in node.gpus}
        self._islands = node.islands
        self._numa_nodes = _numa_nodes(node)

    def group(self, model: Served) -> tuple[int, ...] | None:
        """The GPUs that a replica of `model` would get here; None without room."""
        size = _width(model)
        for parts in self._partitions(model):
            if pool := _best_fit(self.free, parts, size):
                near = _best_fit(pool, self._numa_nodes, size)
                return tuple(sorted(near or pool)[:size])
        return None

    def largest(self, model: Served) -> int:
        """The GPUs of the largest group that `model` could have here, were all of them free."""
        return max((len(part) for parts in self._partitions(model) for part in parts), default=0)

    def _partitions(self, model: Served) -> Iterator[tuple[tuple[int, ...], ...]]:
        """The ways to cut the node into parts that a group may lie in, best first."""
        yield self._islands
        if model.allow_pcie:
            for tier in range(len(PCIE_TIERS)):
                yield _pcie_parts(self.node, tier)


def _pcie_parts(node: Node, tier: int) -> tuple[tuple[int, ...], ...]:
    """GPUs that meet at `PCIE_TIERS[tier]` or nearer; a tree, so parts never overlap."""
    parts: list[set[int]] = []
    for index in sorted(gpu.index for gpu in node.gpus):
        near = [part for part in parts if any(_tier(node, index, other) <= tier for other in part)]
        parts = [part for part in parts if part not in near] + [{index}.union(*near)]
    return tuple(tuple(sorted(part)) for part in sorted(parts, key=min))


def _tier(node: Node, one: int, other: int) -> int:
    # An unknown pair is as far apart as can be: a group on it is still possible, and the last.
    found = node.pcie.get((min(one, other), max(one, other)), "SYS")
    return PCIE_TIERS.index(found) if found in PCIE_TIERS else len(PCIE_TIERS) - 1


def _numa_nodes(node: Node) -> tuple[tuple[int, ...], ...]:
    by_numa: dict[int | None, list[int]] = defaultdict(list)
    for gpu in node.gpus:
        by_numa[gpu.numa_node].append(gpu.index)
    return tuple(tuple(sorted(indices)) for indices in by_numa.values())


def _best_fit(free: Iterable[int], parts: Iterable[Iterable[int]], size: int) -> set[int]:
    """The free GPUs of the part with the fewest that still suffice; empty where none does."""
    pools = [set(part) & set(free) for part in parts]
    fitting = [pool for pool in pools if len(pool) >= size]
    return min(fitting, key=lambda pool: (len(pool), sorted(pool)), default=set())


@dataclass(frozen=True)
class _Placed:
    stages: tuple[Stage, ...]
    reason: str
    misfit: tuple[str, ...]


def _place(name: str, model: Served, rooms: list[_Room]) -> _Placed:
    """Place as many replicas as fit, and take their GPUs out of `rooms`."""
    before = {room.node.name: len(room.free) for room in rooms}
    stages: list[Stage] = []
    for replica in range(_replicas(model)):
        on = Counter(stage.node for stage in stages)
        stage = _next_replica(name, model, replica, rooms, on)
        if stage is None:
            break
        stages.append(stage)
    misfit = (
        () if len(stages) == _replicas(model) else (_misfit(name, model, rooms, stages, before),)
    )
    return _Placed(tuple(stages), _reason(name, model, rooms, stages), misfit)


def _next_replica(
    name: str, model: Served, replica: int, rooms: list[_Room], on: Mapping[str, int]
) -> Stage | None:
    spread = sorted(
        rooms, key=lambda room: (on.get(room.node.name, 0), -len(room.free), room.node.name)
    )
    for room in spread:
        if gpus := room.group(model):
            room.free -= set(gpus)
            uuids = {gpu.index: gpu.uuid for gpu in room.node.gpus}
            return Stage(
                model=name,
                replica=replica,
                node=room.node.name,
                gpus=gpus,
                gpu_uuids=tuple(uuids[index] for index in gpus),
                port=model.port + on.get(room.node.name, 0),
                tensor_parallel=_width(model),
            )
    return None


def _width(model: Served) -> int:
    return model.tensor_parallel or 1


def _replicas(model: Served) -> int:
    return 1 if model.replicas == "fit" else model.replicas


# Sentences


def _misfit(
    name: str,
    model: Served,
    rooms: list[_Room],
    stages: list[Stage],
    before: Mapping[str, int],
) -> str:
    """Why not all replicas of `model` fit, and what to change."""
    nodes = _listed(room.node.name for room in rooms)
    largest = max(room.largest(model) for room in rooms)
    size = _width(model)
    if largest < size:
        where = "node" if model.allow_pcie else "NVLink island"
        pcie = (
            ", or set `allow_pcie: true` if waiting for PCIe in every layer is acceptable"
            if not model.allow_pcie and max(len(room.node.gpus) for room in rooms) >= size
            else ""
        )
        return (
            f"serving.{name}: tensor_parallel {size} needs {_gpus(size)} in one {where}, and the "
            f"largest on {nodes} has {largest}: lower `tensor_parallel` to {largest}{pcie}"
        )
    total = sum(len(room.node.gpus) for room in rooms)
    taken = total - sum(before.values())
    others = f", {taken} of them taken by models placed before" if taken else ""
    lower = f"lower `replicas` to {len(stages)}" if stages else "lower another model's `replicas`"
    return (
        f"serving.{name}: {_counted(_replicas(model), 'replica')} of {_gpus(size)} asked for, "
        f"{len(stages)} fit on {nodes} ({_gpus(total)}{others}): {lower}, or "
        f"{'lower `tensor_parallel`, or ' if size > 1 else ''}add nodes"
    )


def _reason(name: str, model: Served, rooms: list[_Room], stages: list[Stage]) -> str:
    """One sentence: how many, where, over which links, and which nodes were passed over."""
    nodes = {room.node.name: room.node for room in rooms}
    clauses = [
        f"{name}: {_counted(len(stages), 'replica')} of {_gpus(_width(model))}"
        + "".join(f", {share}" for share in _shares(stages))
    ]
    if _width(model) > 1 and stages:
        ways = sorted({_way(nodes[stage.node], stage.gpus) for stage in stages})
        clauses.append(f"each group linked by {' or '.join(ways)}")
    small = [room.node.name for room in rooms if room.largest(model) < _width(model) and stages]
    if small:
        clauses.append(
            f"none on {_listed(small)}, where no NVLink island has {_gpus(_width(model))}"
        )
    return "; ".join(clauses)


def _shares(stages: list[Stage]) -> Iterator[str]:
    """`2 each on gpu-01, gpu-02`, then `1 on gpu-03`: most replicas first."""
    on = Counter(stage.node for stage in stages)
    for count in sorted(set(on.values()), reverse=True):
        nodes = [node for node, replicas in on.items() if replicas == count]
        yield f"{count}{' each' if len(nodes) > 1 else ''} on {_listed(nodes)}"


def _way(node: Node, gpus: tuple[int, ...]) -> str:
    """What the slowest pair of a group talks over: `NVLink (NV18)`, `PCIe (PHB)`."""
    pairs = [(one, other) for one in gpus for other in gpus if one < other]
    links = min(node.nvlink.get(pair, 0) for pair in pairs)
    if links:
        return f"NVLink (NV{links})"
    return f"PCIe ({PCIE_TIERS[max(_tier(node, *pair) for pair in pairs)]}, by `allow_pcie`)"


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _gpus(count: int) -> str:
    return _counted(count, "GPU")


def _listed(names: Iterable[str], limit: int = 4) -> str:
    """`gpu-01, gpu-02, gpu-03 and 497 more`: a sentence about a large fleet stays a sentence."""
    ordered = sorted(names)
    if len(ordered) <= limit:
        return ", ".join(ordered)
    return f"{', '.join(ordered[: limit - 1])} and {len(ordered) - limit + 1} more"


# Ports


def _port_clashes(stages: Iterable[Stage], settings: Mapping[str, NodeSettings]) -> Iterator[str]:
    """One sentence for each pair of keys that want the same port, with the nodes it concerns."""
    users: dict[tuple[str, int], list[str]] = defaultdict(list)
    for node, wanted in sorted(settings.items()):
        users[node, wanted.node_exporter.port].append("node_exporter.port")
        if wanted.dcgm:
            users[node, wanted.dcgm.port].append("dcgm.port")
    for stage in stages:
        users[stage.node, stage.port].append(f"serving.{stage.model}.port")
    clashes: dict[tuple[int, tuple[str, ...]], list[str]] = defaultdict(list)
    for (node, port), keys in users.items():
        if len(keys) > 1:
            clashes[port, tuple(sorted(keys))].append(node)
    for (port, wanting), nodes in sorted(clashes.items()):
        yield (
            f"port {port} is wanted by {' and '.join(wanting)} on {_listed(nodes)}: give one of "
            "them another port (a model's further replicas on a node take those after its first)"
        )
    for stage in stages:
        if stage.port > 65535:
            yield (
                f"serving.{stage.model}.port: its replicas on {stage.node} would need port "
                f"{stage.port}, and 65535 is the last: lower it"
            )
