"""
Which GPUs of which node serve which replica, and why.  Pure: values in, values out.

The rules, in the order in which they decide:

1. A model is placed on the nodes that declare it, by the same declaration on all of them.
2. How a replica is divided is chosen for each kind of node by itself (`candidates.py`); what the
   operator sets is kept. A replica lies on nodes of one kind.
3. Models are placed largest group first, then by name: small groups fill the gaps that large ones
   leave, never the other way round. `replicas: fit` counts as one replica until all others are
   placed; then such models take turns, the one with the fewest replicas first.
4. A replica that runs where it may run stays: same node, GPUs, port and number. It makes way only
   for a model that is placed before its own and finds no other room, and the plan says so.
5. A new replica goes to the node with the fewest replicas of its model so far, then the most free
   GPUs, then the first name; on the node to the GPUs that `placement.py` says.
6. A GPU serves one stage, a port on a node one user (`endpoints.py`).

Replicas are placed one after another and each choice looks only at those before it. So asking for
one more replica moves none of that model. It may move models that are placed later, when they had
the GPUs it now takes.

The same nodes and settings give the same plan, whatever their order.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from gpufleet import candidates
from gpufleet.candidates import Candidate, Considered, Division, Kind, Sizer, Verdict
from gpufleet.endpoints import Endpoint, assigned
from gpufleet.errors import FleetError
from gpufleet.placement import Layout, NearNics, Part, Picker, Room, mask
from gpufleet.presets import LayeredFlag
from gpufleet.ranges import ranges
from gpufleet.settings import NodeSettings, Served
from gpufleet.sizing import Options, Sizing, size
from gpufleet.topology import Node

if TYPE_CHECKING:
    from gpufleet.architecture.description import Description

SCHEMA = 1
"""Version of `FleetPlan.as_json()`; raised when a key changes its meaning or goes."""


@dataclass(frozen=True)
class Stage:
    """The part of a replica that one node runs: one systemd unit."""

    model: str
    replica: int
    """Counted over the whole fleet, from 0."""
    node: str
    gpus: tuple[int, ...]
    """NVML indices in the order of ranks: one tensor-parallel group after another, ascending."""
    gpu_uuids: tuple[str, ...]
    """Of the same GPUs, in the same order."""
    port: int
    tensor_parallel: int
    pipeline_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False
    node_rank: int = 0
    """Which of `nodes` this is; only rank 0 answers on the port."""
    nodes: tuple[str, ...] = ()
    """All nodes of the replica in the order of their ranks; empty: this one alone."""
    flags: tuple[LayeredFlag, ...] = ()
    """What presets and settings set that the operator did not write as a flag."""

    @property
    def id(self) -> str:
        """Names the stage on its node and in the fleet: `llama-0`."""
        return f"{self.model}-{self.replica}"

    @property
    def unit(self) -> str:
        """The systemd unit: `vllm-llama-0.service`."""
        return f"vllm-{self.id}.service"


@dataclass(frozen=True)
class Running:
    """A stage as it was found on a node."""

    model: str
    replica: int
    node: str
    gpu_uuids: tuple[str, ...]
    """In the order of ranks."""
    port: int | None = None
    """None: not known, any will do."""
    rank: int = 0
    """Of the node in a replica that spans several."""
    release: str = ""
    """The id of the release that its unit starts; "": not known."""
    arguments: tuple[str, ...] = ()
    """As its unit has them, by line."""

    @property
    def id(self) -> str:
        """Names the stage as the plan does: `llama-0`."""
        return f"{self.model}-{self.replica}"


@dataclass(frozen=True)
class Move:
    """A replica that does not stay as it runs, and why."""

    model: str
    replica: int
    why: str
    before: tuple[Running, ...]
    after: tuple[Stage, ...] = ()
    """Empty: it stops."""

    def __str__(self) -> str:
        """Say it as a sentence of the plan."""
        name = f"{self.model}-{self.replica}"
        if not self.after:
            return f"{name} stops on {_listed({each.node for each in self.before})}: {self.why}"
        was, now = ({each.node for each in side} for side in (self.before, self.after))
        gpus = "; ".join(f"{stage.node} GPUs {ranges(stage.gpus)}" for stage in self.after)
        if was == now:
            return f"{name} starts anew on {gpus}: {self.why}"
        return f"{name} moves from {_listed(was)} to {gpus}: {self.why}"


@dataclass(frozen=True)
class FleetPlan:
    """Every stage of the fleet, ordered by model and replica, and a sentence for each choice."""

    stages: tuple[Stage, ...]
    reasons: tuple[str, ...]
    candidates: tuple[Considered, ...] = ()
    """For each model and kind of node: the divisions that were considered."""
    moves: tuple[Move, ...] = ()
    """What does not stay as it runs; empty where nothing runs yet."""

    def on(self, node: str) -> tuple[Stage, ...]:
        """The stages `node` must run, and nothing else."""
        return tuple(stage for stage in self.stages if stage.node == node)

    def as_json(self) -> dict[str, Any]:
        """
        Plain values for `json.dumps`.

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
                    "replica": stage.replica,
                    "node": stage.node,
                    "gpus": list(stage.gpus),
                    "gpu_uuids": list(stage.gpu_uuids),
                    "port": stage.port,
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
    sizer: Sizer = size,
) -> FleetPlan:
    """
    Place every declared replica of every model.

    `nodes` are the probed nodes, `settings` what each node's variables say, by node name.
    `described` has each model's description by its name in `serving`, or a sentence that says why
    it could not be read. `running` is what was found on the nodes. By node's name: `reserved` are
    GPUs that others use, `ports` what programs of others listen on, `nics` what
    `nic_affinity.nearest_nics` returns.

    Raises `FleetError` with everything that stands in the way, over all nodes and models.
    """
    fleet = {node.name: _without(node, (reserved or {}).get(node.name, ())) for node in nodes}
    faults = dict(_faults(fleet, settings))
    declared = _declarations(settings)
    disagreements = dict(_disagreements(declared))
    problems = [sentence for sentences in faults.values() for sentence in sentences]
    problems += disagreements.values()

    rooms = _rooms(fleet, settings, nics or {})
    sized = _remembered(sizer)
    found = _by_replica(running)
    models = []
    for name, by_node in declared.items():
        if name in disagreements or any(node in by_node for node in faults):
            continue  # whether it fits can only be said once these are put right
        served = next(iter(by_node.values()))
        description = (described or {}).get(name)
        its_rooms = [rooms[node] for node in by_node]
        wish = _Wish(name, served, description, its_rooms, fleet=fleet.keys(), sizer=sized)
        wish.running = found.pop(name, {})
        models.append(wish)

    chosen = [wish for wish in models if wish.divisions]
    problems += (wish.refusal for wish in models if not wish.divisions)
    _place(chosen)
    problems += (wish.misfit for wish in chosen if len(wish.placed) < wish.required)
    placed = [replica for wish in chosen for _, replica in sorted(wish.placed.items())]
    clashes, remarks = assigned(
        [each.endpoint for each in placed],
        {name: wanted for name, wanted in settings.items() if name in fleet},
        ports or {},
    )
    problems += clashes
    if problems:
        raise FleetError(*problems)

    moves = [move for wish in models for move in wish.moves()]
    moves += (
        Move(model, number, "no node declares it", stages)
        for model, replicas in found.items()
        for number, stages in replicas.items()
        if model not in declared
    )
    left_out = [f"{name}: {_left_out(node)}" for name, node in sorted(fleet.items()) if node.unfit]
    reasons = [*left_out, *(reason for wish in _in_order(chosen) for reason in wish.reasons())]
    return FleetPlan(
        stages=tuple(
            stage
            for replica in sorted(placed, key=lambda each: (each.model, each.number))
            for stage in replica.stages()
        ),
        reasons=(*reasons, *remarks, *map(str, moves)),
        candidates=tuple(each for wish in models for each in wish.considered.values()),
        moves=tuple(moves),
    )


# What stands in the way before anything is placed


def _without(node: Node, reserved: Collection[int]) -> Node:
    """Take GPUs that others use for unfit ones: nothing of ours may be placed on them."""
    if not any(gpu.index in reserved for gpu in node.gpus):
        return node
    taken = {gpu.index: "reserved for others" for gpu in node.gpus if gpu.index in reserved}
    left = tuple(gpu for gpu in node.gpus if gpu.index not in taken)
    return replace(node, gpus=left, unfit=dict(sorted({**node.unfit, **taken}.items())))


def _faults(
    fleet: Mapping[str, Node], settings: Mapping[str, NodeSettings]
) -> Iterator[tuple[str, list[str]]]:
    """Each node that cannot be planned with, and the sentences that say why."""
    for name, wanted in sorted(settings.items()):
        if not wanted.serving:
            continue
        if name not in fleet:
            sentences = [
                f"{name}: no probe of this node, and it declares {_listed(wanted.serving)}: make "
                "it reachable, or take it out of the inventory so that its replicas go elsewhere"
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
        for model, declaration in wanted.serving.items():
            declared[model][name] = declaration
    return dict(sorted(declared.items()))


def _disagreements(
    declared: Mapping[str, Mapping[str, Served]],
) -> Iterator[tuple[str, str]]:
    """Each model that two nodes declare differently, with the sentence that says how."""
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
            f"serving.{name} is not the same on {first} and {other} ({differences}): one model has "
            "one declaration; set it in a group that both are in, or give one of them another name",
        )


# What there is to place, and on what


def _rooms(
    fleet: Mapping[str, Node],
    settings: Mapping[str, NodeSettings],
    nics: Mapping[str, NearNics],
) -> dict[str, Room]:
    """Return a room for each node; nodes that are alike share their layout and their kind."""
    layouts: dict[tuple[object, ...], Layout] = {}
    kinds: dict[tuple[object, ...], Kind] = {}
    rooms = {}
    for order, (name, node) in enumerate(sorted(fleet.items())):
        near = nics.get(name, {})
        key = Layout.key(node, near)
        layout = layouts.get(key) or layouts.setdefault(key, Layout(node, near))
        vllm = settings[name].vllm if name in settings else None
        hardware = tuple((gpu.name, gpu.memory_mib, gpu.compute_capability) for gpu in node.gpus)
        alike = (key, hardware, vllm and vllm.version, vllm and vllm.device)
        if alike not in kinds:
            kinds[alike] = Kind(
                gpu=" and ".join(sorted({gpu.name for gpu in node.gpus})),
                # Where a node's GPUs differ, a group may get the least of them.
                memory_mib=min((gpu.memory_mib for gpu in node.gpus), default=0),
                compute_capability=min(
                    (gpu.compute_capability for gpu in node.gpus), default=(0, 0)
                ),
                islands=tuple(sorted(map(len, layout.islands), reverse=True)),
                vllm=vllm.version if vllm else "",
                device=vllm.device if vllm else "cuda",
            )
        rooms[name] = Room(node, kinds[alike], layout, order)
    return rooms


def _remembered(sizer: Sizer) -> Sizer:
    """Ask once for each model and set of options: kinds of node share GPUs."""
    known: dict[tuple[int, Options], Sizing] = {}

    def sized(description: Description, options: Options) -> Sizing:
        key = (id(description), options)
        if key not in known:
            known[key] = sizer(description, options)
        return known[key]

    return sized


def _by_replica(running: Iterable[Running]) -> dict[str, dict[int, tuple[Running, ...]]]:
    """Return the running stages of each model and replica, in the order of their ranks."""
    found: dict[str, dict[int, list[Running]]] = defaultdict(lambda: defaultdict(list))
    for each in sorted(running, key=lambda each: (each.model, each.replica, each.rank, each.node)):
        found[each.model][each.replica].append(each)
    return {
        model: {number: tuple(stages) for number, stages in replicas.items()}
        for model, replicas in found.items()
    }


@dataclass(eq=False)
class _Replica:
    """A replica with its GPUs; its port comes last."""

    model: str
    number: int
    division: Division
    parts: list[Part]
    endpoint: Endpoint

    def stages(self) -> Iterator[Stage]:
        nodes = tuple(room.name for room, _ in self.parts) if len(self.parts) > 1 else ()
        for rank, (room, gpus) in enumerate(self.parts):
            yield Stage(
                model=self.model,
                replica=self.number,
                node=room.name,
                gpus=gpus,
                gpu_uuids=tuple(room.uuids[index] for index in gpus),
                port=self.endpoint.port,
                tensor_parallel=self.division.tensor,
                pipeline_parallel=self.division.pipeline,
                data_parallel=self.division.data,
                expert_parallel=self.division.expert,
                node_rank=rank,
                nodes=nodes,
            )


class _Wish:
    """One model: what is asked for, how it may be divided, and where its replicas are so far."""

    def __init__(
        self,
        name: str,
        served: Served,
        description: Description | str | None,
        rooms: list[Room],
        *,
        fleet: Collection[str],
        sizer: Sizer,
    ) -> None:
        self.fleet = fleet
        self.name = name
        self.served = served
        self.description = description
        self.rooms = rooms
        self._by_name = {room.name: room for room in rooms}
        self.sizer = sizer
        kinds: dict[Kind, list[str]] = defaultdict(list)
        for room in rooms:
            kinds[room.kind].append(room.name)
        self.considered: dict[Kind, Considered] = {
            kind: replace(
                candidates.consider(name, served, description, kind, len(names), sizer=sizer),
                names=tuple(names),
            )
            for kind, names in kinds.items()
        }
        self.divisions: dict[Kind, Division] = {
            kind: each.chosen.division for kind, each in self.considered.items() if each.chosen
        }
        self.placed: dict[int, _Replica] = {}
        self._lowest = 0
        self.on: Counter[str] = Counter()
        self.running: dict[int, tuple[Running, ...]] = {}
        self.why: dict[int, str] = {}
        """Of running replicas that do not stay."""
        self.free_before = 0
        self.twice: list[Move] = []
        """Of replicas that run at two places: what stops."""
        self.keeping: dict[int, list[Part]] = {}
        """Running replicas that may stay, and are not placed yet."""

    @property
    def required(self) -> int:
        """The replicas without which there is no plan."""
        return 1 if self.served.replicas == "fit" else self.served.replicas

    @property
    def width(self) -> int:
        """The GPUs of the largest group, as models are ordered by it."""
        return max(division.unit * division.units for division in self.divisions.values())

    def may_stay(self, number: int) -> list[Part] | str:
        """
        Return where a running replica is, or a sentence: why it may not stay there.

        One that runs twice, since it was moved while its node was away, stays at one place.
        """
        stages = self.running[number]
        found = self._may_stay(stages)
        if isinstance(found, str) and len(stages) > 1:
            for stage in stages:
                parts = self._may_stay((stage,))
                if not isinstance(parts, str):
                    others = tuple(each for each in stages if each is not stage)
                    self.twice.append(Move(self.name, number, f"{stage.node} runs it too", others))
                    self.running[number] = (stage,)
                    return parts
        return found

    def _may_stay(self, stages: tuple[Running, ...]) -> list[Part] | str:
        parts: list[Part] = []
        for stage in stages:
            if (room := self._by_name.get(stage.node)) is None:
                gone = stage.node not in self.fleet
                return f"{stage.node} {'is gone' if gone else 'does not declare it any more'}"
            if room.kind not in self.divisions:
                return f"it does not fit on {stage.node} any more"
            if any(uuid not in room.indices for uuid in stage.gpu_uuids):
                left = f" ({_left_out(room.node)})" if room.node.unfit else ""
                return f"a GPU of {stage.node} cannot be used any more{left}"
            parts.append((room, tuple(room.indices[uuid] for uuid in stage.gpu_uuids)))
        division = self.divisions[parts[0][0].kind]
        if len(parts) != division.nodes or len({room.name for room, _ in parts}) != len(parts):
            return f"{division} needs {_counted(division.nodes, 'node')}, it ran on {len(parts)}"
        whole: list[Part] = []
        for room, gpus in parts:
            if self.divisions[room.kind] != division or room.kind != parts[0][0].kind:
                return "its nodes are not of one kind any more"
            if len(gpus) != division.unit * division.units:
                was, now = len(gpus), division.unit * division.units
                return f"{division} is planned, for {_gpus(now)} of a node, and it ran on {was}"
            ordered = gpus if division.units > 1 else tuple(sorted(gpus))
            if not room.layout.may_hold(ordered, division, pcie=self.served.allow_pcie):
                return f"its GPUs on {room.name} are not in one NVLink island"
            whole.append((room, ordered))
        return whole

    def put(self, number: int, division: Division, parts: list[Part]) -> None:
        """Give a replica its GPUs."""
        for room, gpus in parts:
            room.release((self.name, number))
            room.take(gpus)
            self.on[room.name] += 1
        ran = self.running.get(number, ())
        stays = [(each.node, each.gpu_uuids) for each in ran] and number not in self.why
        endpoint = Endpoint(
            self.name,
            number,
            tuple(room.name for room, _ in parts),
            self.served.port,
            explicit="port" in self.served.model_fields_set,
            wished=ran[0].port if stays else None,
            room=max(len(room.layout.gpus) for room, _ in parts),
        )
        self.placed[number] = _Replica(self.name, number, division, parts, endpoint)

    def keep(self, number: int) -> None:
        """Let a running replica stay, if its GPUs are still free."""
        parts = self.keeping.pop(number)
        for room, gpus in parts:
            if mask(gpus) & ~room.free:
                self.give_up(number, parts, f"its GPUs on {room.name} serve another replica")
                return
        self.put(number, self.divisions[parts[0][0].kind], parts)

    def give_up(self, number: int, parts: list[Part], why: str) -> None:
        """Stop holding the GPUs on which a replica runs."""
        self.why[number] = why
        for room, _ in parts:
            room.release((self.name, number))
        self._lowest = min(self._lowest, number)

    def next_number(self) -> int:
        """The lowest that no replica has, nor one that runs and may stay."""
        while self._lowest in self.placed or self._lowest in self.keeping:
            self._lowest += 1
        return self._lowest

    # What became of it

    @property
    def refusal(self) -> str:
        """Why no kind of node has a division, and what to write."""
        nodes = _listed(room.name for room in self.rooms)
        description = self.description
        judged = [each for each in self.considered.values() if each.candidates]
        if description is None or isinstance(description, str) or not judged:
            why = f" ({description})" if isinstance(description, str) else ""
            return (
                f"serving.{self.name}: how much memory it takes is not known{why}, so the plan "
                "cannot say how many GPUs it needs: set `tensor_parallel` to that number"
            )
        best = max(judged, key=lambda each: (each.kind.memory_mib * each.kind.gpus, str(each.kind)))
        last = max(best.candidates, key=lambda each: each.division.gpus)
        ways = candidates.remedies(
            self.served, description, best.kind, best.nodes, sizer=self.sizer
        )
        write = f"set {', or '.join(ways)}" if ways else "take a checkpoint with smaller weights"
        kinds = "" if len(judged) == 1 else f", the largest of {len(judged)} kinds of node"
        verdict = "is near the edge" if last.verdict is Verdict.NEAR else str(last.verdict)
        return (
            f"serving.{self.name}: no division fits on {nodes} ({best.kind}{kinds}); the widest, "
            f"{last.division}, {verdict}: {last.reason}; {write}, or use nodes with more GPU memory"
        )

    @property
    def misfit(self) -> str:
        """Why not all replicas fit, and what to change."""
        name, nodes = self.name, _listed(room.name for room in self.rooms)
        pcie = self.served.allow_pcie
        largest = max(room.layout.largest(pcie=pcie) for room in self.rooms)
        least = min(self.divisions.values(), key=lambda division: division.unit)
        width = least.unit
        if largest < width:
            where = "node" if pcie else "NVLink island"
            wider = (
                ", or set `allow_pcie: true` if waiting for PCIe in every layer is acceptable"
                if not pcie and max(len(room.layout.gpus) for room in self.rooms) >= width
                else ""
            )
            if least.expert and least.data > 1:
                return (
                    f"serving.{name}: data_parallel {least.data} with experts on each GPU needs "
                    f"{_gpus(width)} in one {where}, and the largest on {nodes} has {largest}: "
                    f"lower `data_parallel` to {max(1, largest // least.tensor)}{wider}"
                )
            return (
                f"serving.{name}: tensor_parallel {width} needs {_gpus(width)} in one {where}, and "
                f"the largest on {nodes} has {largest}: lower `tensor_parallel` to {largest}{wider}"
            )
        total = sum(len(room.layout.gpus) for room in self.rooms)
        taken = total - self.free_before
        others = f", {taken} of them taken by models placed before" if taken else ""
        count = len(self.placed)
        if count:
            lower = f"lower `replicas` to {count}"
        elif taken:
            lower = "lower another model's `replicas`"
        else:
            deep = any(division.pipeline > 1 for division in self.divisions.values())
            lower = f"lower `{'pipeline_parallel' if deep else 'data_parallel'}`"
        groups = " or ".join(
            _gpus(count) for count in sorted({each.gpus for each in self.divisions.values()})
        )
        span = (
            ", or set `span_nodes: true`"
            if not self.served.span_nodes and all(d.pipeline > 1 for d in self.divisions.values())
            else ""
        )
        narrower = (
            "lower `tensor_parallel`, or " if self.served.tensor_parallel or width > 1 else ""
        )
        return (
            f"serving.{name}: {_counted(self.required, 'replica')} of {groups} asked for, "
            f"{count} fit on {nodes} ({_gpus(total)}{others}): {lower}{span}, or "
            f"{narrower if max(d.gpus for d in self.divisions.values()) > 1 else ''}add nodes"
        )

    def moves(self) -> Iterator[Move]:
        """Yield what does not stay as it runs."""
        yield from self.twice
        for number, ran in self.running.items():
            now = self.placed.get(number)
            if now is None:
                why = self.why.get(number, f"`replicas` is {self.served.replicas}")
                yield Move(self.name, number, why, ran)
                continue
            after = tuple(now.stages())
            if number in self.why:
                yield Move(self.name, number, self.why[number], ran, after)
            elif ran[0].port not in (None, now.endpoint.port):
                why = f"port {ran[0].port} cannot stay, it is {now.endpoint.port} now"
                yield Move(self.name, number, why, ran, after)

    def reasons(self) -> Iterator[str]:
        """Yield sentences: how many, where, over which links, and how it is divided and why."""
        replicas = [replica for _, replica in sorted(self.placed.items())]
        sizes = Counter(replica.division.gpus for replica in replicas)
        how_many = (
            f"{_counted(len(replicas), 'replica')} of {_gpus(next(iter(sizes)))}"
            if len(sizes) == 1
            else f"{_counted(len(replicas), 'replica')}, "
            + ", ".join(f"{count} of {_gpus(gpus)}" for gpus, count in sorted(sizes.items()))
        )
        clauses = [f"{self.name}: {how_many}" + "".join(f", {each}" for each in self._shares())]
        grouped = [
            (room, gpus)
            for replica in replicas
            if replica.division.unit > 1
            for room, gpus in replica.parts
        ]
        if grouped:
            groups = {
                (room.layout, gpus[start : start + self.divisions[room.kind].unit])
                for room, gpus in grouped
                for start in range(0, len(gpus), self.divisions[room.kind].unit)
            }
            ways = sorted({layout.way(group) for layout, group in groups})
            clauses.append(f"each group linked by {' or '.join(ways)}")
        clauses += self._passed_over()
        yield "; ".join(clauses)
        yield from dict.fromkeys(self._chosen())

    def _shares(self) -> Iterator[str]:
        """`2 each on gpu-01, gpu-02`, then `1 on gpu-03`: most replicas first."""
        by_count: dict[int, list[str]] = defaultdict(list)
        for node, count in self.on.items():
            by_count[count].append(node)
        for count, nodes in sorted(by_count.items(), reverse=True):
            yield f"{count}{' each' if len(nodes) > 1 else ''} on {_listed(nodes)}"

    def _passed_over(self) -> Iterator[str]:
        """Nodes that declare the model and that can never have a replica."""
        for considered in self.considered.values():
            kind, nodes = considered.kind, _listed(considered.names)
            if (division := self.divisions.get(kind)) is None:
                last = considered.candidates[-1:]
                yield f"none on {nodes}: {last[0].reason if last else 'no division fits'}"
            elif (kind.gpus if self.served.allow_pcie else max(kind.islands)) < division.unit:
                yield f"none on {nodes}, where no NVLink island has {_gpus(division.unit)}"

    def _chosen(self) -> Iterator[str]:
        for kind, each in self.considered.items():
            if chosen := each.chosen:
                if chosen.verdict is Verdict.UNKNOWN:
                    yield f"{self.name}: {chosen.reason}"
                else:
                    yield f"{self.name} on {kind}: {chosen.division}, {_numbers(chosen)}"


def _numbers(chosen: Candidate) -> str:
    sizing = chosen.sizing
    if sizing is None:
        return chosen.reason
    return (
        f"{chosen.reason} ({sizing.weights_bytes_per_gpu / candidates.GIB:.1f} GiB of weights on a "
        f"GPU, {chosen.concurrency:.1f} requests of {sizing.max_model_len:,} tokens at once)"
    )


# Placing


def _in_order(wishes: Iterable[_Wish]) -> list[_Wish]:
    """The models as they are placed: largest group first, then by name."""
    return sorted(wishes, key=lambda wish: (-wish.width, wish.name))


def _place(wishes: Sequence[_Wish]) -> None:
    """Place as many replicas of each as are asked for and fit."""
    ordered = _in_order(wishes)
    by_name = {wish.name: wish for wish in ordered}
    for wish in ordered:
        _hold(wish)
    for wish in ordered:
        wish.free_before = sum(room.free.bit_count() for room in wish.rooms)
        for number in sorted(wish.keeping):
            if len(wish.placed) == wish.required:
                break
            wish.keep(number)
        if wish.served.replicas != "fit":
            for number, parts in sorted(wish.keeping.items()):
                wish.give_up(number, parts, f"`replicas` is {wish.required}")
            wish.keeping.clear()
        for displace in (False, True):
            if len(wish.placed) < wish.required:
                picker = _picker(wish, displace=displace)
                while len(wish.placed) < wish.required and _add(wish, picker, by_name):
                    pass
    _fill([wish for wish in ordered if wish.served.replicas == "fit"], by_name)


def _hold(wish: _Wish) -> None:
    """Mark the GPUs on which replicas run that may stay there."""
    for number in sorted(wish.running):
        parts = wish.may_stay(number)
        if isinstance(parts, str):
            wish.why[number] = parts
            continue
        wish.keeping[number] = parts
        for room, gpus in parts:
            room.hold((wish.name, number), gpus)


def _picker(wish: _Wish, *, displace: bool = False) -> Picker:
    return Picker(
        ((room, wish.divisions[room.kind]) for room in wish.rooms if room.kind in wish.divisions),
        wish.on,
        pcie=wish.served.allow_pcie,
        displace=displace,
    )


def _add(wish: _Wish, picker: Picker, by_name: Mapping[str, _Wish]) -> bool:
    """Place one more replica; what runs on its GPUs makes way. False without room."""
    found = picker.next()
    if found is None:
        return False
    division, parts = found
    for room, gpus in parts:
        for model, number in room.displaced(gpus):
            other = by_name[model]
            held = other.keeping.pop(number)
            why = f"{wish.name}-{wish.next_number()} needs its GPUs on {room.name}"
            other.give_up(number, held, why)
    wish.put(wish.next_number(), division, parts)
    return True


def _fill(wishes: Sequence[_Wish], by_name: Mapping[str, _Wish]) -> None:
    """Give models of which as many are asked for as fit what is left, in turns."""
    for wish in wishes:
        for number in sorted(wish.keeping):
            wish.keep(number)
    growing = [(wish, _picker(wish)) for wish in wishes]
    while growing:
        wish, picker = min(growing, key=lambda turn: len(turn[0].placed))
        if not _add(wish, picker, by_name):
            growing = [turn for turn in growing if turn[0] is not wish]


# Words


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
