"""Report which replicas serve, which do not, and why they last ended. Pure.

The input is the declaration, and the output of `on_node/serving/status.py` on each node. A replica
serves when all its endpoints are ready (`readiness.py`) and all its ranks are in the same
incarnation. If a replica's nodes do not answer, the replica's state is unknown, and the replica
does not count as serving.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from gpufleet.formatting import join_names
from gpufleet.serving.out_of_service import OutOfService, out_of_service
from gpufleet.serving.rank_status import Health, RankStatus, rank_status, reason
from gpufleet.settings.node_variables import NodeVars

SCHEMA = 1
"""Version of `FleetStatus.as_json()`, increased when a key changes its meaning or is removed."""

_WORST_FIRST = tuple(reversed(Health))


@dataclass(frozen=True)
class ReplicaStatus:
    """One replica, with its found ranks in order."""

    model: str
    number: int
    ranks: tuple[RankStatus, ...]
    health: Health
    why: tuple[str, ...]
    """A sentence for each reason why the replica does not serve."""

    @property
    def id(self) -> str:
        """Return the replica's name as in the plan, such as `llama-0`."""
        return f"{self.model}-{self.number}"

    @property
    def adapters(self) -> tuple[str, ...]:
        """Return the names of the LoRA adapters that the replica's servers load."""
        return tuple(sorted({name for rank in self.ranks for name in rank.adapters}))

    @property
    def incarnation(self) -> str:
        """
        Return the id of the incarnation that all ranks have in common.

        The result is "" for a single-node replica, or if the ranks are of different incarnations.
        """
        found = {rank.incarnation for rank in self.ranks}
        return found.pop() if len(found) == 1 else ""

    def as_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {
            "replica": self.id,
            "model": self.model,
            "number": self.number,
            "state": str(self.health),
            "why": list(self.why),
            "incarnation": self.incarnation,
            "ranks": [rank.as_json() for rank in self.ranks],
        }


@dataclass(frozen=True)
class FleetStatus:
    """All replicas by name, and the unknown parts of the fleet."""

    replicas: tuple[ReplicaStatus, ...]
    silent: Mapping[str, str]
    """The reason why a node's stages are unknown, by node."""
    missing: tuple[str, ...] = ()
    """A sentence for each model with fewer replicas than declared."""
    remarks: tuple[str, ...] = ()
    out: OutOfService = field(default_factory=OutOfService)
    may_have: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """
    For each model with missing replicas, the nodes without an answer that are declared to serve it.
    """

    def adapters(self) -> dict[tuple[str, ...], list[str]]:
        """Return the replicas' names, grouped by the adapters that their servers load."""
        alike: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for replica in self.replicas:
            alike[replica.adapters].append(replica.id)
        return dict(alike)

    def shared_gpus(self) -> dict[tuple[str, str], list[str]]:
        """Return the replicas of each shared GPU: {(node, GPU): names}."""
        on: dict[tuple[str, str], list[str]] = defaultdict(list)
        for replica in self.replicas:
            for rank in replica.ranks:
                for gpu, uuid in zip_longest(rank.indices, rank.gpus):
                    on[rank.node, uuid if gpu is None else str(gpu)].append(replica.id)
        return {place: names for place, names in sorted(on.items()) if len(names) > 1}

    @property
    def serves(self) -> bool:
        """Return whether all declared replicas serve and nothing is unknown."""
        good = all(replica.health is Health.SERVES for replica in self.replicas)
        return good and not self.silent and not self.missing

    def as_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {
            "schema": SCHEMA,
            "serves": self.serves,
            "replicas": [replica.as_json() for replica in self.replicas],
            "silent": dict(self.silent),
            "missing": list(self.missing),
            "remarks": list(self.remarks),
            **self.out.as_json(),
        }


def fleet_status(
    answers: Mapping[str, Mapping[str, Any] | str],
    declared: Mapping[str, NodeVars],
    *,
    whole: bool = True,
) -> FleetStatus:
    """
    Return the state of the fleet's replicas.

    `answers` has, for each queried node, the document of on_node/serving/status.py, or a sentence
    why there is none. If `whole` is true, these are all nodes of the fleet, so a declared replica
    that is not found counts as missing.
    """
    silent: dict[str, str] = {}
    remarks: list[str] = []
    found: dict[tuple[str, int], list[RankStatus]] = defaultdict(list)
    members: dict[tuple[str, int], tuple[str, ...]] = {}
    for node, answer in sorted(answers.items()):
        if isinstance(answer, str):
            silent[node] = answer
            continue
        try:
            if isinstance(answer["stages"], Mapping):
                silent[node] = f"the node's units cannot be read: {reason(answer['stages'])}"
                continue
            for stage in _stages(answer):
                if "model" not in stage:
                    if "foreign" in stage:
                        remarks.append(
                            f"{node}: gpufleet does not manage {stage['unit']}, and does not "
                            "change it"
                        )
                    else:
                        why = f"{stage['unit']} could not be read: {reason(stage)}"
                        silent[node] = "; ".join(filter(None, [silent.get(node), why]))
                    continue
                key = str(stage["model"]), int(stage["replica"])
                rank = rank_status(node, stage, answer)
                rank.as_json()  # raises for a time that is not a date
                names = tuple(map(str, stage["nodes"]))
                found[key].append(rank)
                members[key] = max(members.get(key, ()), names, key=len)
        # A broken or hostile node must not affect the others.
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as problem:
            silent[node] = f"the node's answer is invalid ({type(problem).__name__}: {problem})"
    replicas = tuple(
        _replica(key, tuple(ranks), members[key], silent) for key, ranks in sorted(found.items())
    )
    lacking, undeclared = _compared(replicas, declared) if whole else ({}, ())
    may_have = _may_have(lacking, declared, silent)
    missing = tuple(
        sentence + (f"; some may be on {join_names(may_have[model])}" if may_have[model] else "")
        for model, sentence in lacking.items()
    )
    out, unread = out_of_service(answers)
    adapters = _adapter_remarks(replicas, declared)
    said = (*remarks, *undeclared, *adapters, *unread)
    return FleetStatus(replicas, silent, missing, said, out, may_have)


def _stages(answer: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the stages in a node's report. Raises `ValueError` for an unknown schema."""
    if answer["schema"] != 1:
        raise ValueError(f"schema {answer['schema']!r}, expected 1")
    return list(answer["stages"])


# -- one rank


# -- why it restarted


# -- replicas


def _replica(
    key: tuple[str, int],
    ranks: tuple[RankStatus, ...],
    members: tuple[str, ...],
    silent: Mapping[str, str],
) -> ReplicaStatus:
    model, number = key
    ranks = tuple(sorted(ranks, key=lambda each: (each.rank, each.node)))
    several = len(ranks) > 1 or len(members) > 1
    told = [
        (rank.health, f"rank {rank.rank} on {rank.node}: {rank.why}" if several else rank.why)
        for rank in ranks
        if not rank.health.is_good
    ]
    told += [*_doubled(ranks), *_absent(ranks, members, silent), *_estranged(ranks)]
    health = next((each for each in _WORST_FIRST if each in {s for s, _ in told}), Health.SERVES)
    if not told and not any(rank.health is Health.SERVES for rank in ranks):
        health, told = Health.UNKNOWN, [(Health.UNKNOWN, "no rank of the replica has an endpoint")]
    return ReplicaStatus(model, number, ranks, health, tuple(text for _, text in told))


def _doubled(ranks: Iterable[RankStatus]) -> Iterator[tuple[Health, str]]:
    """Yield a sentence for each rank that several nodes run."""
    nodes: dict[int, list[str]] = defaultdict(list)
    for rank in ranks:
        nodes[rank.rank].append(rank.node)
    for number, names in nodes.items():
        if len(names) > 1:
            yield (
                Health.WRONG,
                f"{' and '.join(names)} both run rank {number} of this replica, because one of the "
                "two is left from an earlier deploy: run deploys/vllm.py",
            )


def _absent(
    ranks: Iterable[RankStatus], members: Sequence[str], silent: Mapping[str, str]
) -> Iterator[tuple[Health, str]]:
    """Yield a sentence for each rank that was not found."""
    there = {rank.node for rank in ranks}
    for number, node in enumerate(members):
        if node in there:
            continue
        if node in silent:
            yield Health.UNKNOWN, f"rank {number} on {node}: {silent[node]}"
        else:
            yield (
                Health.UNKNOWN,
                f"rank {number} on {node}: the node was not queried, or has no unit of the rank",
            )


def _estranged(ranks: Sequence[RankStatus]) -> Iterator[tuple[Health, str]]:
    """Yield a sentence if running ranks have different incarnations."""
    running = [rank for rank in ranks if rank.health.is_good and rank.incarnation]
    if len({rank.incarnation for rank in running}) > 1:
        which = ", ".join(f"rank {rank.rank} {rank.incarnation}" for rank in running)
        yield Health.WRONG, f"the ranks of the replica are of different incarnations: {which}"


def _compared(
    replicas: Iterable[ReplicaStatus], declared: Mapping[str, NodeVars]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """
    Return {model: sentence} for models with too few replicas, and sentences on undeclared models.
    """
    counts: dict[str, int] = defaultdict(int)
    for replica in replicas:
        counts[replica.model] += 1
    wanted: dict[str, int] = {}
    for each in declared.values():
        if each.settings.servers is not None:
            for model, served in each.settings.serving.items():
                wanted[model] = 1 if served.replicas == "fit" else served.replicas
    missing = {
        model: f"{model}: {_counted(count, 'replica')} declared, {counts[model] or 'none'} found"
        for model, count in sorted(wanted.items())
        if counts[model] < count
    }
    undeclared = tuple(
        f"{model} is not declared any more, so the next deploy stops it"
        for model in sorted(counts)
        if model not in wanted
    )
    return missing, undeclared


def _may_have(
    models: Iterable[str], declared: Mapping[str, NodeVars], silent: Iterable[str]
) -> dict[str, tuple[str, ...]]:
    """Return, for each model, the nodes without an answer that are declared to serve the model."""
    return {
        model: tuple(
            node
            for node in sorted(silent)
            if node in declared
            and declared[node].settings.servers is not None
            and model in declared[node].settings.serving
        )
        for model in models
    }


def declared_adapters(declared: Mapping[str, NodeVars]) -> dict[str, tuple[str, ...]]:
    """
    Return the names of each model's declared adapters.

    Models whose own `flags` name adapters are omitted.
    """
    return {
        model: tuple(sorted(served.adapters))
        for each in declared.values()
        for model, served in each.settings.serving.items()
        if not any(flag.lstrip("-").replace("_", "-") == "lora-modules" for flag in served.flags)
    }


def _adapter_remarks(
    replicas: Iterable[ReplicaStatus], declared: Mapping[str, NodeVars]
) -> Iterator[str]:
    """Yield a sentence for each replica whose adapters differ from the declared ones."""
    wanted = declared_adapters(declared)
    for replica in replicas:
        loads = {*replica.adapters}
        names = {*wanted.get(replica.model, loads)}
        told = [
            f"{word} {', '.join(sorted(found))}"
            for word, found in (("does not load", names - loads), ("still loads", loads - names))
            if found
        ]
        if told and any(rank.port is not None for rank in replica.ranks):
            yield (
                f"{replica.id} {' and '.join(told)}, because `adapters` of its entry in `serving` "
                "has changed: run an upgrade or deploys/vllm.py"
            )


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"
