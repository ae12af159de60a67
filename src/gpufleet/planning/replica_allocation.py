"""
Track each model's demand for replicas, its nodes, and the order of models. Pure.

The rules are in `planner.py`. This module keeps the state: running replicas that may stay, placed
replicas, and the sentences about both.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Self

from gpufleet.formatting import count_of, join_names
from gpufleet.node.cordon import uncordon_command
from gpufleet.node.topology import Node
from gpufleet.planning import candidates, gpu_shares, node_removal, suggestions
from gpufleet.planning.candidates import Candidate, CandidateSet, Sizer, Verdict
from gpufleet.planning.gpu_placement import NodeCapacity, Part, Picker, mask
from gpufleet.planning.gpu_shares import SharePicker
from gpufleet.planning.parallelism import Division, Kind
from gpufleet.planning.ports import Endpoint
from gpufleet.planning.stage import Balancing, ReplicaMove, Running, Stage
from gpufleet.planning.too_large import SizeRefusal
from gpufleet.settings.engine_flags import DEFAULT
from gpufleet.settings.serving_settings import Served
from gpufleet.sizing.architectures.description import HubSilence

if TYPE_CHECKING:
    from gpufleet.sizing.architectures.description import Description

_NODES_NAMED = 4
"""Maximum number of nodes whose GPUs a refusal lists."""


class UnsizedModel(str):
    """
    The problem of a model that cannot be planned because the Hub, which has its size, does not
    answer.
    """

    model: str

    def __new__(cls, sentence: str, model: str) -> Self:
        """Create the problem; `model` is the model's name in `serving`."""
        problem = super().__new__(cls, sentence)
        problem.model = model
        return problem


@dataclass(eq=False)
class Replica:
    """A replica with its GPUs. Its port is assigned last."""

    model: str
    number: int
    division: Division
    parts: list[Part]
    endpoint: Endpoint
    balancing: Balancing = "internal"
    gpu_share: float | None = None

    @property
    def id(self) -> str:
        """Return the replica's name, which its stages share: `llama-0`."""
        return f"{self.model}-{self.number}"

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
                tensor_parallel=self.division.tensor_parallel,
                pipeline_parallel=self.division.pipeline_parallel,
                data_parallel=self.division.data_parallel,
                expert_parallel=self.division.expert_parallel,
                node_rank=rank,
                nodes=nodes,
                balancing=self.balancing,
                gpu_share=self.gpu_share,
            )


class ModelAllocation:
    """One model: its demand, its allowed divisions, and its replicas placed so far."""

    def __init__(
        self,
        name: str,
        served: Served,
        description: Description | str | None,
        rooms: list[NodeCapacity],
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
        self.considered: dict[Kind, CandidateSet] = {
            kind: replace(
                candidates.evaluate_divisions(
                    name, served, description, kind, len(names), sizer=sizer
                ),
                names=tuple(names),
            )
            for kind, names in kinds.items()
        }
        self.divisions: dict[Kind, Division] = {
            kind: each.chosen.division for kind, each in self.considered.items() if each.chosen
        }
        whole = any(
            each.chosen.replicas and not each.chosen.division.spans_nodes
            for each in self.considered.values()
            if each.chosen
        )
        self.apart = [kind for kind, each in self.divisions.items() if whole and each.spans_nodes]
        """
        Kinds of node that get no new replica, because every layer would wait for the network there,
        but not on a different kind.
        """
        self.placed: dict[int, Replica] = {}
        self._lowest = 0
        self.on: Counter[str] = Counter()
        self.running: dict[int, tuple[Running, ...]] = {}
        self.why: dict[int, str] = {}
        """Why a running replica must move, by its number."""
        self.free_before = 0
        self.twice: list[ReplicaMove] = []
        """Duplicate replicas to stop."""
        self.keeping: dict[int, list[Part]] = {}
        """Running replicas that may stay and are not placed yet."""

    @property
    def required(self) -> int:
        """Return the number of replicas that a plan must have."""
        return 1 if self.served.replicas == "fit" else self.served.replicas

    @property
    def share(self) -> int:
        """Return a replica's share of one GPU, in thousandths; 0 for whole GPUs."""
        return gpu_shares.thousandths(self.served.gpu_share or 0)

    @property
    def width(self) -> float:
        """
        Return the number of GPUs of the largest group, or the share of one GPU.

        Models are ordered by this number.
        """
        return self.served.gpu_share or max(
            division.unit * division.units for division in self.divisions.values()
        )

    def may_stay(self, number: int) -> list[Part] | str:
        """
        Return a running replica's nodes and GPUs, or why the replica may not stay there.

        If a replica runs twice, because it was moved while its node was unreachable, only one of
        the two copies stays.
        """
        stages = self.running[number]
        found = self._may_stay(stages)
        places = _group_by_nodes(stages)
        if isinstance(found, str) and len(places) > 1:
            for place in places:
                parts = self._may_stay(place)
                if not isinstance(parts, str):
                    others = tuple(each for each in stages if each not in place)
                    where = join_names({each.node for each in place})
                    runs = "run" if len(place) > 1 else "runs"
                    self.twice.append(
                        ReplicaMove(self.name, number, f"{where} also {runs} this replica", others)
                    )
                    self.running[number] = place
                    return parts
        return found

    def _may_stay(self, stages: tuple[Running, ...]) -> list[Part] | str:
        parts: list[Part] = []
        if absent := [node for node in stages[0].nodes if node not in self.fleet]:
            return (
                f"{join_names(absent)} {'is' if len(absent) == 1 else 'are'} no longer in the "
                "inventory"
            )
        for stage in stages:
            if (room := self._by_name.get(stage.node)) is None:
                gone = stage.node not in self.fleet
                return (
                    f"{stage.node} "
                    f"{'is no longer in the inventory' if gone else 'no longer declares the model'}"
                )
            if room.kind not in self.divisions:
                return f"the model no longer fits on {stage.node}"
            if any(uuid not in room.indices for uuid in stage.gpu_uuids):
                left = f" ({unused_gpus(room.node)})" if room.node.unfit else ""
                return f"a GPU of {stage.node} can no longer be used{left}"
            parts.append((room, tuple(room.indices[uuid] for uuid in stage.gpu_uuids)))
        division = self.divisions[parts[0][0].kind]
        if len(parts) != division.nodes or len({room.name for room, _ in parts}) != len(parts):
            return (
                f"{division} needs {count_of(division.nodes, 'node')}, but the replica ran on "
                f"{count_of(len(parts), 'node')}"
            )
        whole: list[Part] = []
        for room, gpus in parts:
            if self.divisions[room.kind] != division or room.kind != parts[0][0].kind:
                return "the replica's nodes are no longer all of the same kind"
            if len(gpus) != division.unit * division.units:
                was, now = len(gpus), division.unit * division.units
                return (
                    f"the plan is {division} with {_gpus(now)} on each node, but the replica ran "
                    f"on {_gpus(was)}"
                )
            ordered = gpus if division.units > 1 else tuple(sorted(gpus))
            if not room.layout.may_hold(ordered, division, pcie=self.served.allow_pcie):
                return f"the replica's GPUs on {room.name} are not in the same NVLink island"
            whole.append((room, ordered))
        return whole

    def put(self, number: int, division: Division, parts: list[Part]) -> None:
        """Assign GPUs to a replica."""
        for room, gpus in parts:
            room.release((self.name, number))
            if self.share:
                room.take_share((self.name, number), gpus[0], self.share)
            else:
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
        by_ray = self.served.distributed_executor_backend == "ray"
        replica = Replica(
            self.name,
            number,
            division,
            parts,
            endpoint,
            "internal" if by_ray else self.served.data_parallel_balancing,
            self.served.gpu_share,
        )
        endpoint.width = max(1, *(len(stage.ports) for stage in replica.stages()))
        self.placed[number] = replica

    def keep(self, number: int) -> None:
        """Keep a running replica on its GPUs if these are still free."""
        parts = self.keeping.pop(number)
        for room, gpus in parts:
            if self.share:
                if not room.has_share(gpus[0], self.share, self.name, gpu_shares.MOST):
                    why = f"GPU {gpus[0]} on {room.name} no longer has room for the replica's share"
                    self.give_up(number, parts, why)
                    return
            elif mask(gpus) & ~room.free:
                self.give_up(number, parts, f"a different replica now uses its GPUs on {room.name}")
                return
        self.put(number, self.divisions[parts[0][0].kind], parts)

    def give_up(self, number: int, parts: list[Part], why: str) -> None:
        """Release the GPUs that a running replica holds, and record the reason."""
        self.why[number] = why
        for room, _ in parts:
            room.release((self.name, number))
        self._lowest = min(self._lowest, number)

    def displaced(self, room: NodeCapacity, gpus: tuple[int, ...]) -> list[tuple[str, int]]:
        """Return the held replicas that a new replica on these GPUs displaces."""
        if self.share:
            most = gpu_shares.MOST
            return room.displaced_by_share(gpus[0], self.share, self.name, most) or []
        return room.displaced(gpus)

    def next_number(self) -> int:
        """
        Return the lowest unused replica number. Running replicas that may stay keep their numbers.
        """
        while self._lowest in self.placed or self._lowest in self.keeping:
            self._lowest += 1
        return self._lowest

    # Results

    @property
    def removal_refusals(self) -> list[str]:
        """
        Return the refusals for running multi-node replicas that would lose a node.

        The list is empty for models with `when_a_node_leaves: replan`.
        """
        usable = {room.name: room.indices for room in self.rooms}
        without = {room.name: unused_gpus(room.node) for room in self.rooms}
        losing = {}
        for number, stages in self.running.items():
            losses = [
                node_removal.lost_nodes(place, self.fleet, usable, without)
                for place in _group_by_nodes(stages)
            ]
            # A replica that runs twice needs only one place.
            losing[number] = {} if {} in losses else losses[0]
        return node_removal.refusals(self.name, self.served, self.running, losing)

    @property
    def refusal(self) -> str:
        """Return why no kind of node has a division, and the setting to change."""
        nodes = join_names(room.name for room in self.rooms)
        description = self.description
        judged = [each for each in self.considered.values() if each.candidates]
        if not judged or (
            self.served.engine == DEFAULT and (description is None or isinstance(description, str))
        ):
            sentence = self._unsized(description)
            silent = isinstance(description, HubSilence)
            return UnsizedModel(sentence, self.name) if silent else sentence
        best = max(judged, key=lambda each: (each.kind.memory_mib * each.kind.gpus, str(each.kind)))
        last = max(best.candidates, key=_nearest)
        if last.verdict is Verdict.UNKNOWN:
            other = ""
            if self.served.engine == DEFAULT:
                other = ", or remove the setting that gpufleet cannot estimate"
            return (
                f"serving.{self.name}: gpufleet cannot determine whether the model fits on "
                f"{nodes}: {last.reason}. Set `tensor_parallel` to the number of GPUs that the "
                f"model needs (the plan does not check this number){other}"
            )
        ways: tuple[str, ...] = ()
        if self.served.engine != DEFAULT:
            ways = ("a larger `tensor_parallel`",)
        elif description is not None and not isinstance(description, str):
            ways = suggestions.remedies(
                self.served, description, best.kind, best.nodes, sizer=self.sizer
            )
        if ways:
            write = f"set {', or '.join(ways)}, or use nodes with more GPU memory"
        elif last.verdict is Verdict.NO and last.concurrency >= self.served.concurrency:
            write = (
                "make that change. If gpufleet has no setting for the change, write vLLM's flag "
                "under `flags`"
            )
        else:
            write = "use a smaller or quantized checkpoint, or nodes with more GPU memory"
        kinds = "" if len(judged) == 1 else f", the largest of {len(judged)} kinds of node"
        verdict = "is near the edge" if last.verdict is Verdict.NEAR else str(last.verdict)
        return (
            f"serving.{self.name}: no division fits on {nodes} ({best.kind}{kinds}). The closest "
            f"division, {last.division}, {verdict}: {last.reason}. To solve this, {write}"
        )

    def _unsized(self, description: Description | str | None) -> str:
        why = f" ({description})" if isinstance(description, str) else ""
        start = (
            f"serving.{self.name}: gpufleet does not know how much memory the model needs{why}, so "
        )
        if self.share:
            return (
                f"{start}it cannot check whether the model fits into `gpu_share: "
                f"{self.served.gpu_share:g}`: remove `gpu_share`, or also set `tensor_parallel: "
                "1` to place the model without this check"
            )
        return (
            f"{start}it cannot plan the number of GPUs: set `tensor_parallel` to the number of "
            "GPUs that the model needs"
        )

    @property
    def shortfall(self) -> str:
        """Return why not all replicas fit, and the setting to change."""
        if not any(each.chosen and each.chosen.replicas for each in self.considered.values()):
            considered = self.considered.values()
            return str(
                SizeRefusal(self.name, self.served, self.description, considered, sizer=self.sizer)
            )
        if self.share:
            return self._share_shortfall()
        nodes = join_names(room.name for room in self.rooms)
        width = min(division.unit for division in self.divisions.values())
        total = sum(len(room.layout.gpus) for room in self.rooms)
        taken = total - self.free_before
        others = f", of which {taken} are used by models that were placed earlier" if taken else ""
        count = len(self.placed)
        lower = f"lower `replicas` to {count}" if count else "lower another model's `replicas`"
        apart = "".join(f"; {each}" for each in self._separated_nodes())
        groups = " or ".join(
            _gpus(count) for count in sorted({each.gpus for each in self.divisions.values()})
        )
        narrower = (
            "lower `tensor_parallel`, or " if self.served.tensor_parallel or width > 1 else ""
        )
        return (
            f"serving.{self.name}: {count_of(self.required, 'replica')} of {groups} declared, of "
            f"which {count} fit on {nodes} ({_gpus(total)}{others}{apart}): {lower}, or "
            f"{narrower if max(d.gpus for d in self.divisions.values()) > 1 else ''}add "
            f"nodes{self._cordoned()}"
        )

    def _share_shortfall(self) -> str:
        """Return why not all replicas with a share of a GPU fit, and the setting to change."""
        here = "; ".join(
            f"{room.name}: {gpu_shares.shares_text(room)}" for room in self.rooms[:_NODES_NAMED]
        )
        more = len(self.rooms) - _NODES_NAMED
        others = f"; and {count_of(more, 'more node')}" if more > 0 else ""
        count, left = len(self.placed), max(map(self._largest_share, self.rooms), default=0)
        lower = [f"lower `gpu_share` to {left / 1000:g}"] if self._fits_into(left) else []
        lower += [f"lower `replicas` to {count}"] if count else ["lower another model's share"]
        return (
            f"serving.{self.name}: {count_of(self.required, 'replica')} of {self._size(1)} "
            f"declared, of which {count} fit ({here}{others}). The shares of a GPU can add up to "
            f"{gpu_shares.MOST / 1000:g} at most. A shared GPU can have only one replica of each "
            "model, and no replica that uses whole GPUs. To solve this, "
            f"{', or '.join([*lower, 'add nodes'])}{self._cordoned()}"
        )

    def _largest_share(self, room: NodeCapacity) -> int:
        """
        Return the largest free share of a GPU on a node for a new replica of this model, in
        thousandths.
        """
        return max(
            (
                gpu_shares.MOST - sum(room.shares_on(gpu).values())
                for gpu in room.layout.gpus
                if room.has_share(gpu, 0, self.name, gpu_shares.MOST) and not room.node.cordon
            ),
            default=0,
        )

    def _fits_into(self, share: int) -> bool:
        """Return whether the model fits into a smaller share, in thousandths."""
        if not 0 < share < self.share:
            return False
        smaller = self.served.model_copy(update={"gpu_share": share / 1000})
        return any(
            candidates.evaluate_divisions(
                self.name, smaller, self.description, each.kind, each.nodes, sizer=self.sizer
            ).chosen
            for each in self.considered.values()
        )

    def _cordoned(self) -> str:
        """Return the cordoned nodes with their cordons, and the commands that end them."""
        closed = [
            f"{room.name} ({mark}; {uncordon_command(room.name, mark.upgrade is not None)})"
            for room in self.rooms
            if (mark := room.node.cordon)
        ]
        return f", or uncordon {join_names(closed)}" if closed else ""

    def moves(self) -> Iterator[ReplicaMove]:
        """Yield the moves, restarts and stops of running replicas."""
        yield from self.twice
        for number, ran in self.running.items():
            now = self.placed.get(number)
            if now is None:
                why = self.why.get(number, f"`replicas` is {self.served.replicas}")
                yield ReplicaMove(self.name, number, why, ran)
                continue
            after = tuple(now.stages())
            if number in self.why:
                yield ReplicaMove(self.name, number, self.why[number], ran, after)
            elif ran[0].port not in (None, now.endpoint.port):
                why = f"the replica's port changes from {ran[0].port} to {now.endpoint.port}"
                yield ReplicaMove(self.name, number, why, ran, after)

    def reasons(self) -> Iterator[str]:
        """
        Yield sentences on the placed replicas: their number, their nodes, the links between their
        GPUs, and the division with its reason.

        The division has its reason.
        """
        replicas = [replica for _, replica in sorted(self.placed.items())]
        sizes = Counter(replica.division.gpus for replica in replicas)
        how_many = (
            f"{count_of(len(replicas), 'replica')} of {self._size(next(iter(sizes)))}"
            if len(sizes) == 1
            else f"{count_of(len(replicas), 'replica')}, "
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
            ways = sorted({layout.slowest_link(group) for layout, group in groups})
            cut = any(replica.division.spans_nodes for replica in replicas)
            each = "each node's part of a group" if cut else "each group"
            clauses.append(f"the GPUs of {each} are linked by {' or '.join(ways)}")
        clauses += self._crossing(replicas)
        clauses += self._excluded_nodes()
        yield "; ".join(clauses)
        yield from dict.fromkeys(self._chosen_divisions())

    def _size(self, gpus: int) -> str:
        share = self.served.gpu_share
        return _gpus(gpus) if share is None else f"{share:g} of a GPU"

    def _crossing(self, replicas: Iterable[Replica]) -> Iterator[str]:
        """Yield, for each group that is wider than a node, the network that connects its nodes."""
        found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
        for each in replicas:
            if each.division.spans_nodes:
                domains = {room.node.domain for room, _ in each.parts}
                if domains == {None}:
                    how = "every layer waits for the network"
                elif len(domains) == 1:
                    how = f"all nodes are within {domains.pop()}"
                else:
                    how = "every layer waits for the network, because no NVLink clique has room"
                found[each.division.width_reason][how].append(each.id)
        for wide, ways in found.items():
            said = (
                f"{how} ({join_names(ids)})" if len(ways) > 1 else how for how, ids in ways.items()
            )
            yield f"{wide} is wider than a node: {', '.join(said)}"

    def _shares(self) -> Iterator[str]:
        """
        Yield the replicas per node, most first: `2 each on gpu-01, gpu-02`, then `1 on gpu-03`.
        """
        by_count: dict[int, list[str]] = defaultdict(list)
        for node, count in self.on.items():
            by_count[count].append(node)
        for count, nodes in sorted(by_count.items(), reverse=True):
            yield f"{count}{' each' if len(nodes) > 1 else ''} on {join_names(nodes)}"

    def _excluded_nodes(self) -> Iterator[str]:
        """Yield the nodes that declare the model but can never have a replica, with reasons."""
        for considered in self.considered.values():
            kind, nodes = considered.kind, join_names(considered.names)
            largest = kind.gpus if self.served.allow_pcie else max(kind.islands)
            if considered.chosen is None:
                last = considered.candidates[-1:]
                yield f"none on {nodes}: {last[0].reason if last else 'no division fits'}"
            elif considered.chosen.replicas == 0:
                division = considered.chosen.division
                if division.nodes > 1:
                    yield (
                        f"none on {nodes}, because {division} needs {division.nodes} identical "
                        "nodes"
                    )
                elif largest < division.unit:
                    yield (
                        f"none on {nodes}, because no NVLink island there has "
                        f"{_gpus(division.unit)}"
                    )
                else:
                    yield f"none on {nodes}, because no node there has room for {division}"
        yield from self._separated_nodes()

    def _separated_nodes(self) -> Iterator[str]:
        for kind in self.apart:
            nodes = join_names(self.considered[kind].names)
            width = self.divisions[kind].width_reason
            yield f"none on {nodes}, because {width} would span the network there"

    def _chosen_divisions(self) -> Iterator[str]:
        for kind, each in self.considered.items():
            if chosen := each.chosen:
                if chosen.sizing is None:
                    yield f"{self.name}: {chosen.reason}"
                    continue
                yield f"{self.name} on {kind}: {chosen.division}, {_numbers_text(chosen)}"
                yield from (f"{self.name}: {note}" for note in chosen.sizing.notes)


def _numbers_text(chosen: Candidate) -> str:
    sizing = chosen.sizing
    if sizing is None:
        return chosen.reason
    return (
        f"{chosen.reason} ({sizing.weights_bytes_per_gpu / candidates.GIB:.1f} GiB of weights per "
        f"GPU, {chosen.concurrency:.1f} concurrent requests of {sizing.max_model_len:,} tokens)"
    )


# Placing


def placement_order(allocations: Iterable[ModelAllocation]) -> list[ModelAllocation]:
    """Return the models in placement order: largest group first, then by name."""
    return sorted(allocations, key=lambda allocation: (-allocation.width, allocation.name))


def place(allocations: Sequence[ModelAllocation]) -> None:
    """Place the declared replicas of each model, as far as they fit."""
    ordered = placement_order(allocations)
    by_name = {allocation.name: allocation for allocation in ordered}
    for allocation in ordered:
        _hold_running(allocation)
    for allocation in ordered:
        allocation.free_before = sum(room.free.bit_count() for room in allocation.rooms)
        for number in sorted(allocation.keeping):
            if len(allocation.placed) == allocation.required:
                break
            allocation.keep(number)
        if allocation.served.replicas != "fit":
            for number, parts in sorted(allocation.keeping.items()):
                allocation.give_up(number, parts, f"`replicas` is {allocation.required}")
            allocation.keeping.clear()
        for displace in (False, True):
            if len(allocation.placed) < allocation.required:
                picker = _picker(allocation, displace=displace)
                while len(allocation.placed) < allocation.required and _add_replica(
                    allocation, picker, by_name
                ):
                    pass
    _fill_free_gpus([each for each in ordered if each.served.replicas == "fit"], by_name)


def _hold_running(allocation: ModelAllocation) -> None:
    """Hold the GPUs of running replicas that may stay."""
    for number in sorted(allocation.running):
        parts = allocation.may_stay(number)
        if isinstance(parts, str):
            allocation.why[number] = parts
            continue
        allocation.keeping[number] = parts
        for room, gpus in parts:
            room.hold(
                (allocation.name, number),
                gpus,
                needed=allocation.served.replicas != "fit",
                share=allocation.share,
            )


def _picker(allocation: ModelAllocation, *, displace: bool = False) -> Picker | SharePicker:
    rooms = (
        (room, allocation.divisions[room.kind])
        for room in allocation.rooms
        if room.kind in allocation.divisions
        and room.kind not in allocation.apart
        and room.node.cordon is None
    )
    if allocation.share:
        return SharePicker(
            allocation.name,
            allocation.share,
            rooms,
            allocation.on,
            displace=displace,
            prefer=allocation.served.prefer,
        )
    return Picker(
        rooms,
        allocation.on,
        pcie=allocation.served.allow_pcie,
        displace=displace,
        prefer=allocation.served.prefer,
    )


def _add_replica(
    allocation: ModelAllocation,
    picker: Picker | SharePicker,
    by_name: Mapping[str, ModelAllocation],
) -> bool:
    """
    Place one more replica, and displace replicas that run on its GPUs.

    Returns False if there is no room.
    """
    found = picker.next()
    if found is None:
        return False
    division, parts = found
    for room, gpus in parts:
        for model, number in allocation.displaced(room, gpus):
            other = by_name[model]
            held = other.keeping.pop(number)
            why = f"{allocation.name}-{allocation.next_number()} needs its GPUs on {room.name}"
            other.give_up(number, held, why)
    allocation.put(allocation.next_number(), division, parts)
    return True


def _fill_free_gpus(
    allocations: Sequence[ModelAllocation], by_name: Mapping[str, ModelAllocation]
) -> None:
    """Assign the free GPUs, in turns, to the models with `replicas: fit`."""
    for allocation in allocations:
        for number in sorted(allocation.keeping):
            allocation.keep(number)
    growing = [(allocation, _picker(allocation)) for allocation in allocations]
    while growing:
        allocation, picker = min(growing, key=lambda turn: len(turn[0].placed))
        if not _add_replica(allocation, picker, by_name):
            growing = [turn for turn in growing if turn[0] is not allocation]


def _group_by_nodes(stages: Sequence[Running]) -> list[tuple[Running, ...]]:
    """Group a replica's running stages by the set of nodes in their units."""
    found: dict[tuple[str, ...], list[Running]] = defaultdict(list)
    for stage in stages:
        found[stage.nodes].append(stage)
    return [tuple(each) for each in found.values()]


def unused_gpus(node: Node) -> str:
    """Return a node's unused GPUs, with reasons."""
    return "; ".join(f"GPU {index} is not used ({why})" for index, why in node.unfit.items())


def _nearest(candidate: Candidate) -> tuple[bool, int, int, int]:
    """
    Return a sort key. The candidate with the largest key is the closest one that does not fit.

    The criteria are, in this order: near the edge or not checked, fewest problems, fewest nodes,
    most GPUs.
    """
    obstacles = len(candidate.sizing.reasons) if candidate.sizing else 0
    division = candidate.division
    nearer = candidate.verdict in {Verdict.NEAR, Verdict.UNKNOWN}
    return nearer, -obstacles, -division.nodes, division.gpus


def _gpus(count: int) -> str:
    return count_of(count, "GPU")
