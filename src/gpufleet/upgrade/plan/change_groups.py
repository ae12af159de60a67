"""Group the parts of a fleet that differ from the plan and must change together. Pure.

A group consists of:

1. A replica, on all of its present and planned nodes.
2. Replicas of which one gets a GPU or a port that another replica frees.
3. For software below vLLM (a driver): whole nodes, with every replica on them. All nodes of a
   multi-node replica are in the same group.

Groups are as small as these rules allow; waves combine them.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from gpufleet.formatting import join_names
from gpufleet.node.cordon import uncordon_command
from gpufleet.planning.explanation import Action, Change
from gpufleet.planning.multinode.rank_ports import PORTS
from gpufleet.planning.planner import FleetPlan
from gpufleet.planning.stage import Running, Stage
from gpufleet.serving.restarts import NO_ARGUMENT
from gpufleet.upgrade.plan.wave import Group, Kind

STOPPED = "the unit does not run, or its start parameters are unknown"


def groups(
    plan: FleetPlan,
    running: Iterable[Running],
    restarts: Mapping[str, str],
    changes: Iterable[Change],
    node_changes: Mapping[str, str] | None = None,
) -> tuple[Group, ...]:
    """
    Return the changes in groups; each replica and each node is in one group.

    `restarts` is {replica's id: difference} (`restarts.find_restarts`, `changed_replicas`),
    `changes` is the result of `explanation.difference`, `node_changes` is {node: difference below
    vLLM}. The groups are sorted by id, with numbers compared as numbers; `waves.waves` decides
    which group changes first.
    """
    why: dict[str, list[str]] = defaultdict(list)
    for change in changes:
        if change.action is not Action.STAY:
            why[change.replica] += [change.why or _sentence(change)]
    for name, said in restarts.items():
        # What starts, moves or makes way has been started with something else in any case.
        if not (why[name] and said in {NO_ARGUMENT, STOPPED}):
            why[name] += [said]
    found = _Fleet(plan.stages, tuple(running), why, dict(node_changes or {}))
    return tuple(sorted(found.groups(), key=lambda each: natural_key(each.id)))


def changed_replicas(
    restarts: Mapping[str, str],
    wanted: Mapping[tuple[str, str], str],
    started: Mapping[tuple[str, str], str | None],
) -> dict[str, str]:
    """
    Return `restarts`, and the replicas of which only the fingerprint differs.

    `wanted` has the fingerprint of each rendered unit, `started` that of each running unit, both by
    (node, replica's id). None or no entry in `started` means that the unit does not run, or that
    its start parameters are unknown. In both cases the unit must be started.
    """
    found: dict[str, str] = {}
    for key, fingerprint in sorted(wanted.items()):
        runs = started.get(key)
        if runs != fingerprint:
            found[key[1]] = NO_ARGUMENT if runs else found.get(key[1], STOPPED)
    return {**found, **restarts}


def without_cordoned(
    found: Iterable[Group], cordoned: Mapping[str, str]
) -> tuple[tuple[Group, ...], tuple[Group, ...], tuple[str, ...]]:
    """
    Return groups to change, groups to leave unchanged, and a sentence for each unchanged group.

    `cordoned` is {node: why} for the nodes that a person has cordoned. Nothing is stopped or
    started on these nodes, and their outdated replicas are reported.
    """
    on, off, sentences = [], [], []
    for group in found:
        if kept := [node for node in group.nodes if node in cordoned]:
            off.append(group)
            reasons = "; ".join(f"{node}: {cordoned[node]}" for node in kept)
            sentences.append(
                f"{group.id} is left unchanged, because a person has cordoned {join_names(kept)} "
                f"({reasons}). When that work is done, run {uncordon_command(kept[0])} and upgrade "
                "again"
            )
        else:
            on.append(group)
    return tuple(on), tuple(off), tuple(sentences)


def natural_key(text: str) -> tuple[tuple[str, int], ...]:
    """
    Return a key that sorts numbers in names as numbers.

    >>> sorted(["tiny-10", "tiny-9"], key=natural_key)
    ['tiny-9', 'tiny-10']
    """
    return tuple((word, int(digits or -1)) for word, digits in re.findall(r"(\D*)(\d*)", text))


def _sentence(change: Change) -> str:
    return f"{change.action}: {change.before or 'nothing'} -> {change.after or 'nothing'}"


@dataclass
class _Fleet:
    """Running and planned replicas by id, and their differences."""

    stages: tuple[Stage, ...]
    running: tuple[Running, ...]
    why: Mapping[str, list[str]]
    node_why: Mapping[str, str]
    before: dict[str, list[Running]] = field(default_factory=lambda: defaultdict(list))
    after: dict[str, list[Stage]] = field(default_factory=lambda: defaultdict(list))

    def __post_init__(self) -> None:
        for each in self.running:
            self.before[each.id].append(each)
        for stage in self.stages:
            self.after[stage.id].append(stage)

    def nodes(self, replica: str) -> set[str]:
        """Return the nodes on which a replica runs or is planned."""
        was, now = self.before.get(replica, ()), self.after.get(replica, ())
        return {each.node for each in was} | {each.node for each in now}

    def groups(self) -> Iterator[Group]:
        """Yield the groups of all changes."""
        whole = set(self.node_why)
        while True:
            parts = self._joined(whole)
            # A replica over nodes brings its other nodes in, and those what else is on them.
            reached = {node for part in parts if part.nodes & whole for node in part.nodes}
            if reached <= whole:
                break
            whole |= reached
        for part in parts:
            kind: Kind = "node" if part.nodes & whole else "stages"
            yield self._group(part, kind)

    def _joined(self, whole: set[str]) -> list[_Part]:
        changed = {*self.why} | {
            replica for replica in {*self.before, *self.after} if self.nodes(replica) & whole
        }
        parts = _Parts()
        for node in sorted(whole):
            parts.join(("node", node))
        for replica in sorted(changed):
            parts.join(("replica", replica), *(("node", n) for n in self.nodes(replica) & whole))
            for other in self._owners_before(replica) & changed:
                parts.join(("replica", replica), ("replica", other))
        found = []
        for part in parts.all():
            replicas = {name for what, name in part if what == "replica"}
            nodes = {name for what, name in part if what == "node"}
            found.append(_Part(replicas, nodes.union(*map(self.nodes, replicas))))
        return found

    @cached_property
    def _owners(self) -> Mapping[tuple[str, str | int], set[str]]:
        """Return the replicas that have each GPU or port now, by (node, GPU or port)."""
        found: dict[tuple[str, str | int], set[str]] = defaultdict(set)
        for each in self.running:
            for thing in _had(each):
                found[each.node, thing].add(each.id)
        return found

    def _owners_before(self, replica: str) -> set[str]:
        """Return the other replicas that now have a GPU or port planned for this replica."""
        return {
            owner
            for stage in self.after.get(replica, ())
            for thing in _gets(stage)
            for owner in self._owners.get((stage.node, thing), ())
        } - {replica}

    def _group(self, part: _Part, kind: Kind) -> Group:
        replicas = tuple(sorted(part.replicas, key=natural_key))
        nodes = tuple(sorted(part.nodes))
        why = [f"{node}: {self.node_why[node]}" for node in nodes if node in self.node_why]
        for replica in replicas:
            named = f"{replica}: " if len(replicas) > 1 or kind == "node" else ""
            why += [f"{named}{said}" for said in dict.fromkeys(self.why.get(replica, ()))]
        return Group(
            id="+".join(nodes if kind == "node" else replicas),
            kind=kind,
            nodes=nodes,
            replicas=replicas,
            why=tuple(why),
            comes=tuple(each for each in replicas if not self.before.get(each)),
            goes=tuple(each for each in replicas if not self.after.get(each)),
        )


@dataclass(frozen=True)
class _Part:
    replicas: set[str]
    nodes: set[str]


class _Parts:
    """A union-find of replicas and nodes."""

    def __init__(self) -> None:
        self._above: dict[tuple[str, str], tuple[str, str]] = {}

    def join(self, first: tuple[str, str], *others: tuple[str, str]) -> None:
        """Merge the parts of all items into the first item's part."""
        root = self._root(first)
        for other in others:
            self._above[self._root(other)] = root

    def all(self) -> list[list[tuple[str, str]]]:
        """Return the parts."""
        found: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
        for thing in list(self._above):
            found[self._root(thing)].append(thing)
        return list(found.values())

    def _root(self, thing: tuple[str, str]) -> tuple[str, str]:
        self._above.setdefault(thing, thing)
        while (above := self._above[thing]) != thing:
            self._above[thing] = self._above[above]
            thing = above
        return thing


def _had(running: Running) -> set[str | int]:
    """Return the GPUs and ports of a running stage."""
    servers = running.servers
    # Behind several servers is the port of their supervisor (`Stage.ports`).
    supervisor = {servers[-1] + 1} if len(servers) > 1 else set()
    cluster = _range(running.cluster_port, PORTS)
    side_channel = _range(running.side_channel, _data_parallel(running))
    return {*running.gpu_uuids, *servers, *supervisor, *cluster, *side_channel}


def _gets(stage: Stage) -> set[str | int]:
    """Return the GPUs and ports of a planned stage."""
    ports = set(stage.ports)
    if stage.group:
        ports |= _range(stage.group.cluster_port, PORTS)
        ports |= _range(stage.group.side_channel_port, stage.data_parallel)
    if stage.handover:
        ports |= _range(stage.handover.port, stage.data_parallel)
    return {*stage.gpu_uuids, *ports}


def _range(first: int, ports: int) -> set[int]:
    """Return the ports of a range; empty if `first` is 0."""
    return set(range(first, first + ports)) if first else set()


def _data_parallel(running: Running) -> int:
    name = "--data-parallel-size "
    found = (each.removeprefix(name) for each in running.arguments if each.startswith(name))
    said = next(found, "1")
    return int(said) if said.isdecimal() else 1
