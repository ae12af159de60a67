"""
Check that the nodes of a multi-node replica agree.  Pure.

The input is the plan's stages with the networks between them. `planning/multinode/launch.py`
refuses settings that a release or a backend does not support. This module checks the settings that
must be equal on all nodes, and warns of traffic that should not cross the network. The sources are
vllm/distributed/device_communicators/all2all.py (the package and the network of each backend) and
parallel_state.py (the ranks of a group) of 0.19 to 0.33.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpufleet.artifacts.release import pinned
from gpufleet.errors import FleetError
from gpufleet.formatting import join_names
from gpufleet.node.cluster_network import Network
from gpufleet.node.topology import Node
from gpufleet.planning.multinode.launch import OF_THE_NODE
from gpufleet.planning.stage import Stage
from gpufleet.settings.engine_flags import DEFAULT
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.serving_settings import Served
from gpufleet.versions import numbers

DEFAULT_ALL2ALL = "allgather_reducescatter"
"""The default of ParallelConfig.all2all_backend; until 0.13 vLLM chose it, with the same result."""

# The package that a backend imports. FlashInfer is among vLLM's own requirements, and
# nixl_ep is part of `nixl` (seen in the wheel of 1.5.0).
_PACKAGES = {
    "deepep_high_throughput": "deep_ep",
    "deepep_low_latency": "deep_ep",
    "deepep_v2": "deep_ep",
    "moonep": "moonep",
    "nixl_ep": "nixl",
}
# These backends write into the memory of other nodes' GPUs, over NVLink or by RDMA.
_BY_RDMA = frozenset({*_PACKAGES} - {"moonep"})
_BY_NVLINK = frozenset(
    {
        "flashinfer_all2allv",
        "flashinfer_nvlink_one_sided",
        "flashinfer_nvlink_two_sided",
        "moonep",
    }
)
# The parser still accepts these; ParallelConfig.__post_init__ warns and uses the default.
_GONE = {"pplx": (0, 17), "naive": (0, 19)}
_BY_AMD = frozenset({"mori", "mori_high_throughput", "mori_low_latency"})


def check_consistency(
    stages: Iterable[Stage],
    settings: Mapping[str, NodeSettings],
    nodes: Mapping[str, Node],
    locks: Mapping[str, str],
) -> tuple[str, ...]:
    """
    Return remarks about multi-node replicas.

    `locks` has the text of each readable lock that settings name. Raises `FleetError` with every
    problem that prevents a replica from starting.
    """
    replicas: dict[str, list[Stage]] = defaultdict(list)
    for stage in stages:
        replicas[stage.id].append(stage)
    problems: list[str] = []
    remarks: list[str] = []
    for replica in replicas.values():
        first = min(replica, key=lambda stage: stage.node_rank)
        served = settings[first.node].serving[first.model]
        if first.group is None:
            problems += _balancing_problems(first, served)
            continue
        here = {node: settings[node] for node in first.nodes}
        problems += _rank_differences(first, here)
        if first.engine != DEFAULT:
            continue
        problems += _package_problems(first, served, here, locks)
        remarks += _context_warnings(first, served)
        remarks += _removed_backend(first, served, here)
        remarks += _expert_remarks(first, served, nodes)
    if problems:
        raise FleetError(*dict.fromkeys(problems))
    return tuple(dict.fromkeys(remarks))


def _balancing_problems(stage: Stage, served: Served) -> Iterator[str]:
    if served.data_parallel_balancing == "external" and stage.data_parallel > 1:
        yield (
            f"serving.{stage.model}.data_parallel_balancing: the value is external, but {stage.id} "
            f"is only on {stage.node}, and on a single node one server divides the requests over "
            f"the {stage.data_parallel} engines of a replica: write `internal`, or `replicas: "
            f"{stage.data_parallel}` and `data_parallel: 1`"
        )


def _rank_differences(stage: Stage, settings: Mapping[str, NodeSettings]) -> Iterator[str]:
    """Yield differences between nodes that prevent ranks from joining each other."""
    (first, reference), *others = settings.items()
    one = reference.engine_of(stage.model)
    for node, wanted in others:
        other = wanted.engine_of(stage.model)
        for key in ("version", "lock", "python", "cluster_key_file"):
            mine, theirs = getattr(one, key), getattr(other, key)
            if mine != theirs:
                yield (
                    f"{one.engine}.{key}: the value is {mine} on {first}, but {theirs} on {node}. "
                    f"{stage.id} spans both nodes, and all ranks of a replica need the same value: "
                    f"set {one.engine}.{key} in a group that contains both nodes"
                )
        names = {
            name
            for name in {*one.environment, *other.environment} - OF_THE_NODE
            if one.environment.get(name) != other.environment.get(name)
        }
        if names:
            yield (
                f"{one.engine}.environment: {first} and {node} have different values of "
                f"{join_names(names)}, but {stage.id} spans both nodes: set the values in a group "
                "that contains both nodes"
            )


def _package_problems(
    stage: Stage,
    served: Served,
    settings: Mapping[str, NodeSettings],
    locks: Mapping[str, str],
) -> Iterator[str]:
    backend = _backend(stage, served)
    if backend in _BY_AMD:
        yield (
            f"serving.{stage.model}.flags.all2all-backend: {backend} is for GPUs of AMD: write "
            f"`{DEFAULT_ALL2ALL}`"
        )
    package = _PACKAGES.get(backend)
    if package is None:
        return
    named = {wanted.vllm.lock for wanted in settings.values() if wanted.vllm}
    for lock in sorted(named & locks.keys()):
        if pinned(locks[lock].encode(), package) is None:
            yield (
                f"serving.{stage.model}.flags.all2all-backend: {backend} needs the package "
                f"{package}, but {lock} does not contain this package: add the package to the "
                f"lock, or write `{DEFAULT_ALL2ALL}`"
            )


def _context_warnings(stage: Stage, served: Served) -> Iterator[str]:
    """
    Yield a remark if decode context parallelism crosses nodes.

    It divides a tensor-parallel group into runs of consecutive ranks.
    """
    size = _integer(_flags(stage, served).get("decode-context-parallel-size"))
    here = len(stage.gpus)
    if here % size:  # the sizes that keep a group on one node
        less = next(each for each in range(min(size, here), 0, -1) if here % each == 0)
        yield (
            f"{stage.id}: --decode-context-parallel-size {size} divides one context over ranks on "
            f"several nodes of {here} GPUs, so every layer of every step waits for the network: "
            f"write {less} or less to keep each context on one node"
        )


def _removed_backend(
    stage: Stage, served: Served, settings: Mapping[str, NodeSettings]
) -> Iterator[str]:
    backend = _backend(stage, served)
    releases = [numbers(each.vllm.version) for each in settings.values() if each.vllm]
    if backend in _GONE and releases and min(releases) >= _GONE[backend]:
        yield (
            f"serving.{stage.model}.flags.all2all-backend: vLLM no longer has {backend}, and uses "
            f"{DEFAULT_ALL2ALL} instead: write {DEFAULT_ALL2ALL}, or a backend that this release "
            "has"
        )


def _expert_remarks(stage: Stage, served: Served, nodes: Mapping[str, Node]) -> Iterator[str]:
    """
    Yield remarks on the network between experts on several nodes.

    These experts exchange tokens in every layer.
    """
    backend = _backend(stage, served)
    if not backend or stage.group is None:
        return
    if backend in _GONE:
        backend = DEFAULT_ALL2ALL
    joined = {nodes[node].domain for node in stage.nodes}
    one_domain = len(joined) == 1 and None not in joined
    networks = dict(stage.group.networks)
    rdma = all(each.hcas and not each.no_rdma for each in networks.values())
    spread = f"{stage.id}: the experts are on {len(stage.nodes)} nodes"
    if backend in _BY_NVLINK and not one_domain:
        yield (
            f"{spread}, and --all2all-backend {backend} needs NVLink between all these nodes. The "
            "nodes' probes do not show such NVLink (an NVL72 rack, one clique, NVIDIA's IMEX "
            "daemon). If the replica does not start, write "
            f"`{'deepep_low_latency' if rdma else DEFAULT_ALL2ALL}`"
        )
    elif backend in _BY_RDMA and not rdma and not one_domain:
        yield (
            f"{spread}, and --all2all-backend {backend} needs RDMA between these nodes, but "
            f"{_nodes_without_rdma(networks)} no RDMA. If the replica does not start, write "
            f"`{DEFAULT_ALL2ALL}`"
        )
    elif backend == DEFAULT_ALL2ALL and not rdma and not one_domain:
        yield (
            f"{spread}, but {_nodes_without_rdma(networks)} no RDMA. So every layer sends all "
            "tokens to all nodes over TCP, which takes most of the time: keep the experts on one "
            "node, or connect the nodes by InfiniBand or RoCE"
        )


# The declared backend


def _backend(stage: Stage, served: Served) -> str:
    """
    Return the backend that exchanges tokens between experts, or "" if no tokens are exchanged.
    """
    # Without expert parallelism each expert is divided over the engines, which exchange as much.
    experts = stage.expert_parallel or bool(stage.group and stage.group.experts)
    if not experts or stage.data_parallel == 1:
        return ""
    return str(_flags(stage, served).get("all2all-backend") or DEFAULT_ALL2ALL)


def _flags(stage: Stage, served: Served) -> dict[str, Any]:
    return {each.name: each.value for each in stage.flags} | served.flags


def _nodes_without_rdma(networks: Mapping[str, Network]) -> str:
    """
    Return the nodes without active RDMA ports near their GPUs, with a verb: `gpu-01 has`.

    All nodes if each has such ports.
    """
    names = [node for node, each in networks.items() if not each.hcas] or list(networks)
    return f"{join_names(names)} {'has' if len(names) == 1 else 'have'}"


def _integer(value: Any) -> int:
    try:
        return max(1, int(value))
    except (TypeError, ValueError):
        return 1
