"""
Connect related stages: the ranks of a replica, and stages that transfer KV caches.

Pure, except that this module reads the lock for Ray's release.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gpufleet.artifacts.release import pinned
from gpufleet.errors import FleetError
from gpufleet.node import cluster_network
from gpufleet.node.cluster_network import Network, networks
from gpufleet.planning.multinode import rank_ports
from gpufleet.planning.multinode.disaggregation import Pairs
from gpufleet.planning.stage import Group, Handover, Running, Stage
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.sizing.architectures.description import Described, Description
from gpufleet.versions import numbers


def join_ranks(
    stages: tuple[Stage, ...],
    documents: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, NodeSettings],
    models: Mapping[str, Described],
    pairs: Pairs,
    *,
    runs: Iterable[Running],
) -> tuple[Stage, ...]:
    """
    Add networks and ports to stages that span nodes, and to those that transfer KV caches.

    Raises `FleetError` with every replica whose nodes have no common network or no free ports.
    """
    spanning: dict[str, list[Stage]] = {}
    for stage in stages:
        if len(stage.nodes) > 1:
            spanning.setdefault(stage.id, []).append(stage)
    if not spanning and not pairs.prefill:
        return stages
    serving = {stage.model: settings[stage.node].serving[stage.model] for stage in stages}
    ports = rank_ports.assign_rank_ports(stages, serving, running=rank_ports.running_ports(runs))
    groups: dict[str, Group] = {}
    problems: list[str] = []
    for name, ranks in spanning.items():
        by_rank = sorted(ranks, key=lambda each: each.node_rank)
        try:
            found = networks(
                name,
                {each.node: documents[each.node] for each in by_rank},
                {each.node: each.gpus for each in by_rank},
                {each.node: settings[each.node].cluster_network for each in by_rank},
            )
        except FleetError as error:
            problems += error.problems
            continue
        description = models.get(by_rank[0].model)
        groups[name] = Group(
            networks=tuple(found.items()),
            cluster_port=ports[name].cluster,
            side_channel_port=ports[name].side_channel,
            experts=(
                description.architecture.experts > 0
                if isinstance(description, Description)
                else None
            ),
            ray=_ray(settings[by_rank[0].node]),
        )
    handovers: dict[tuple[str, str], Handover] = {}
    for stage in stages:
        if not pairs.role(stage.model):
            continue
        try:
            handovers[stage.node, stage.id] = Handover(
                networks=tuple(_partners(stage, stages, documents, settings, pairs).items()),
                port=ports[stage.id].side_channel,
            )
        except FleetError as error:
            problems += error.problems
    if problems:
        raise FleetError(*dict.fromkeys(problems))
    return tuple(
        replace(
            stage,
            group=groups.get(stage.id),
            handover=handovers.get((stage.node, stage.id)),
        )
        for stage in stages
    )


def _partners(
    stage: Stage,
    stages: Iterable[Stage],
    documents: Mapping[str, Mapping[str, Any]],
    settings: Mapping[str, NodeSettings],
    pairs: Pairs,
) -> dict[str, Network]:
    """Return the networks between the nodes of a handover, with the NICs for the stage's GPUs."""
    entries = pairs.partners(stage.model)
    gpus: dict[str, set[int]] = {}
    for each in stages:
        if each.model in entries:
            gpus.setdefault(each.node, set()).update(each.gpus)
    gpus[stage.node] = set(stage.gpus)
    names = sorted(gpus)
    return networks(
        f"the handover between {' and '.join(sorted(entries))}",
        {name: documents[name] for name in names},
        {name: sorted(gpus[name]) for name in names},
        {name: settings[name].cluster_network for name in names},
    )


def network_sentences(stages: Iterable[Stage]) -> Iterator[str]:
    """
    Yield a sentence on the network of each multi-node replica, with the reason for its choice.
    """
    found = {
        stage.id: dict(stage.group.networks)
        for stage in stages
        if stage.group and len(stage.nodes) > 1
    }
    for name, between in found.items():
        yield cluster_network.describe_networks(name, between)


def _ray(settings: NodeSettings) -> tuple[int, ...] | None:
    """Return the release of Ray in the node's lock, or None if the lock has no Ray."""
    try:
        lock = Path(settings.vllm.lock).read_bytes() if settings.vllm else b""
    except OSError:
        return None  # the role that installs the release reports the problem of its lock
    found = pinned(lock, "ray")
    return numbers(found) if found else None
