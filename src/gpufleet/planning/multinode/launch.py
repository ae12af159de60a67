"""
Launch arguments of multi-node replicas: flags, variables, Ray's commands.  Pure.

The input is a stage of the plan, and the network of each node of its replica. The results are the
arguments and variables of the stage's process beside those of every stage (`Engine.arguments`,
`Engine.environment`), and the command line of the rank's program, which starts the process. The
meaning of flags, and their conflicts, come from vllm/engine/arg_utils.py, vllm/config/parallel.py
and vllm/entrypoints/cli/serve.py of 0.18 to 0.33.

The launch method depends on the parallelism that spans nodes:

- tensor or pipeline parallelism: `--nnodes`, by vLLM's own processes (`mp`), or a Ray cluster;
- whole engines of data parallelism: `--data-parallel-*`; behind one server (`internal`), one server
per node (`hybrid`), or one server per engine (`external`);
- both, if an engine is larger than a node: `--nnodes` with `--data-parallel-size`.

All addresses and interfaces are set: vLLM would otherwise use the address of the route to 8.8.8.8,
and Gloo and NCCL the interfaces that they find.

Ports are written as `{master_port}` and `{rpc_port}`: the rank's program fills in the ports of the
new incarnation, so that no process of an older incarnation can join it.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, TypeAlias

from gpufleet.errors import FleetError
from gpufleet.flags.arguments import words
from gpufleet.node.cluster_network import Network
from gpufleet.planning.stage import Balancing, Stage
from gpufleet.settings.serving_settings import Argument, Served

Version: TypeAlias = tuple[int, ...]

MASTER_PORT = "{master_port}"
RPC_PORT = "{rpc_port}"
"""Placeholders that on_node/rank/rank.py replaces."""

OF_THE_NODE = frozenset(
    {
        "GLOO_SOCKET_IFNAME",
        "NCCL_IB_HCA",
        "NCCL_SOCKET_IFNAME",
        "UCX_NET_DEVICES",
        "VLLM_HOST_IP",
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
    }
)
"""Variables with a different value on each node of a replica."""

RAY_TOKEN = "ray-token"  # noqa: S105  # a name
"""The unit's systemd credential for Ray; `RAY_AUTH_TOKEN_PATH` points to it."""

NIXL_PORT = 5600
"""The default of VLLM_NIXL_SIDE_CHANNEL_PORT (vllm/envs.py)."""

# Size of Ray's object store: vLLM's engines exchange small messages through it, and tensors by
# NCCL. Ray's default is 30 % of the machine's memory.
_STORE_BYTES = 1 << 30
_STORE_BYTES_CPU = 200_000_000  # measured: two ranks on CPU; Ray refuses less than 75 MB

# After the drain: 5 s that vLLM gives its workers, and the exit. With 5 s of grace of the rank's
# program this is within the 30 s that systemd gives the unit (`units.stop_seconds`).
_EXIT_SECONDS = 20

# --data-parallel-multi-port-external-lb: in the schemas from 0.22 on.
_MULTI_PORT_SINCE = (0, 22)
# Flags that its supervisor accepts (validate_multi_port_external_lb_args of 0.33's
# dp_supervisor.py).
_OF_ONE_SERVER: Mapping[str, tuple[Argument, ...]] = {
    "api-server-count": (None, 1),
    "grpc": (None, False),
}
# RAY_AUTH_MODE=token: docs.ray.io, "Ray token authentication".
_TOKEN_SINCE = (2, 52)


@dataclass(frozen=True)
class Rank:
    """Additional launch arguments of one rank."""

    serves: bool
    """Whether the rank runs `vllm serve`; a Ray worker runs only Ray."""
    flags: Mapping[str, Argument] = field(default_factory=dict)
    """Flags of `vllm serve`, without their dashes, in the form for `arguments.words`."""
    drops: tuple[str, ...] = ()
    """Flags that this process refuses, whatever set them."""
    variables: Mapping[str, str] = field(default_factory=dict)
    unset: tuple[str, ...] = ()
    """Variables of the node that `vllm serve` must not see: vLLM would copy them to all nodes."""
    ray: tuple[str, ...] = ()
    """The arguments of the command that starts Ray here, `ray` first; empty without Ray."""
    ready_port: str = ""
    """The port on which this rank listens once the others may start; "" if they need not wait."""
    endpoints: tuple[int, ...] = ()
    """Ports on which `vllm serve` listens here for clients and probes; empty without a server."""


_BALANCING = "set `data_parallel_balancing` instead"
# Flags that `rank_launch` sets for some replicas, and what an operator writes instead.
_OURS = {
    "data-parallel-address": "set `cluster_network` instead",
    "data-parallel-backend": "set `distributed_executor_backend` instead",
    "data-parallel-external-lb": _BALANCING,
    "data-parallel-hybrid-lb": _BALANCING,
    "data-parallel-multi-port-external-lb": _BALANCING,
    "data-parallel-rank": "",
    "data-parallel-rpc-port": "set `cluster_port` instead",
    "data-parallel-size-local": "",
    "data-parallel-start-rank": "",
    "data-parallel-supervisor-port": "",
    "distributed-executor-backend": "set `distributed_executor_backend` beside `flags` instead",
    "headless": "",
    "master-addr": "set `cluster_network` instead",
    "master-port": "set `cluster_port` instead",
    "nnodes": "",
    "node-rank": "",
}


@dataclass(frozen=True)
class _Shape:
    """The number and size of a replica's engines and nodes."""

    engine_gpus: int
    node_gpus: int
    nodes: int
    engines: int

    @property
    def local(self) -> int:
        """Return the number of whole engines on a node, or 0 if an engine spans nodes."""
        return self.node_gpus // self.engine_gpus

    @property
    def span(self) -> int:
        """Return the number of nodes of an engine."""
        return max(self.engine_gpus // self.node_gpus, 1)


def rank_launch(
    stage: Stage,
    model: Served,
    networks: Mapping[str, Network],
    *,
    vllm: Version,
    device: Literal["cuda", "cpu"] = "cuda",
    ray: Version | None = None,
    experts: bool | None = None,
    side_channel_port: int = NIXL_PORT,
) -> Rank:
    """
    Return the additional arguments and variables of a multi-node replica's stage.

    `networks` has every node of the replica, `vllm` is vLLM's release, `ray` is the release of Ray
    in vLLM's lock, and `experts` states whether the model has experts (None if unknown).
    `side_channel_port` is the first port of NIXL's side channel, if the model transfers KV caches.

    Raises `FleetError` for settings that this release, backend or model does not support.
    """
    shape = _shape(stage)
    balancing: Balancing = model.data_parallel_balancing
    if problems := _problems(stage, model, shape, vllm=vllm, ray=ray, experts=experts):
        raise FleetError(*problems)
    here, head = networks[stage.node], networks[stage.nodes[0]]
    variables = {
        "VLLM_HOST_IP": here.address,
        **interface_variables(here, device),
        **transfer_variables(stage, model, here, port=side_channel_port),
    }
    if model.distributed_executor_backend == "ray":
        return _ray_flags(
            stage, shape, here, head, variables, device=device, ray=ray or (), vllm=vllm
        )
    listens = endpoint_ports(stage, model)
    flags: dict[str, Argument] = {}
    if not shape.local:
        flags |= _node_flags(stage, head)
    if shape.engines > 1:
        flags |= _engine_flags(stage, shape, balancing, head, headless=not listens)
    if not listens:
        flags["headless"] = True
    # With several engines, the head opens their port first.
    ready = RPC_PORT if shape.engines > 1 else MASTER_PORT
    return Rank(
        serves=True,
        flags=flags,
        # With this flag a headless process dies of a ValueError in vllm/entrypoints/cli/serve.py.
        drops=() if listens else ("api-server-count",),
        variables=variables,
        ready_port=ready if stage.node_rank == 0 else "",
        endpoints=listens,
    )


def transfer_variables(
    stage: Stage, model: Served, network: Network, *, port: int = NIXL_PORT
) -> dict[str, str]:
    """
    Return the variables of a stage that sends or receives KV caches; empty for other stages.

    NIXL binds its side channel to localhost by default, and transfers KV over UCX, which NCCL's
    variables do not affect. Replicas on one node also need these variables, because prefill and
    decode run on different nodes.
    """
    if not has_handover(stage, model):
        return {}
    devices = (*(() if network.no_rdma else network.hcas), network.interface)
    return {
        "VLLM_NIXL_SIDE_CHANNEL_HOST": network.address,
        "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        "UCX_NET_DEVICES": ",".join(devices),
    }


def has_handover(stage: Stage, model: Served) -> bool:
    """
    Return whether a stage transfers its KV cache by NIXL, alone or beside other connectors.

    The operator, a preset or `prefill` sets `kv-transfer-config`.
    """
    name = "kv-transfer-config"
    configs = [each.value for each in stage.flags if each.name == name] + [model.flags.get(name)]
    return any(
        '"Nixl' in (config if isinstance(config, str) else json.dumps(config)) for config in configs
    )


def command(
    stage: Stage,
    model: Served,
    rank: Rank,
    networks: Mapping[str, Network],
    *,
    port: int,
    same: Mapping[str, str],
    programs: str,
    server: Sequence[str],
    serve: Sequence[tuple[str, ...]],
) -> list[tuple[str, ...]]:
    """
    Return the arguments of the rank's program (on_node/rank/rank.py), one tuple for each line.

    `port` is the first of the replica's ports between its nodes, `same` has the values that must be
    equal on all nodes, `programs` is the directory of the release's programs, `server` has the
    words that start a server, as `vllm serve`, and `serve` the lines after them that every stage
    has. Flags that this process refuses are omitted.
    """
    lines: list[tuple[str, ...]] = [
        ("--replica", stage.id),
        ("--rank", str(stage.node_rank)),
        *(("--node", f"{node}={networks[node].address}") for node in stage.nodes),
        ("--port", str(port)),
        *(("--same", f"{name}={value}") for name, value in sorted(same.items())),
        ("--start-seconds", str(model.start_seconds)),
        ("--drain-seconds", str(model.drain_seconds + _EXIT_SECONDS)),
    ]
    if rank.endpoints and stage.node_rank:
        lines.append(("--serves",))  # on a stop, the requests of its own server finish, too
    if rank.ready_port:
        lines.append(("--ready-port", rank.ready_port))
    if rank.ray:
        lines += _split_by_option(("--", f"{programs}/{rank.ray[0]}", *rank.ray[1:]))
    if rank.serves:
        without = [word for name in rank.unset for word in ("-u", name)]
        lines.append(("--", *(["/usr/bin/env", *without] if without else []), *server))
        refused = {word for name in rank.drops for word in (f"--{name}", f"--no-{name}")}
        lines += [line for line in serve if line[0].partition("=")[0] not in refused]
        lines += [said for name, value in rank.flags.items() if (said := words(name, value))]
    return lines


def ray_token(cluster_key: bytes) -> bytes:
    """
    Return the token with which a fleet's Ray processes authenticate to each other.

    The token is derived from the cluster key, so that no second secret is needed. The key cannot be
    computed from the token, which Ray sends unencrypted with each request.
    """
    return hmac.new(cluster_key, b"gpufleet: Ray's token", hashlib.sha256).hexdigest().encode()


def _split_by_option(line: Sequence[str]) -> list[tuple[str, ...]]:
    """Split a command line before each option."""
    lines: list[list[str]] = [[line[0]]]
    for word in line[1:]:
        if word.startswith("--"):
            lines.append([word])
        else:
            lines[-1].append(word)
    return [tuple(each) for each in lines]


def fill_ports(text: str, port: int) -> str:
    """
    Return an argument with the ports of a replica's first incarnation, for validation.

    >>> fill_ports("10.1.0.1:{master_port}", 29500)
    '10.1.0.1:29502'
    """
    return text.replace(MASTER_PORT, str(port + 2)).replace(RPC_PORT, str(port + 10))


def endpoint_ports(stage: Stage, model: Served) -> tuple[int, ...]:
    """
    Return the ports on which a stage listens for clients and probes, like `Stage.ports`.

    The balancing is the model's declared one (`internal` with Ray), not the stage's.
    """
    by_ray = model.distributed_executor_backend == "ray"
    return replace(stage, balancing="internal" if by_ray else model.data_parallel_balancing).ports


# Refusals


def _shape(stage: Stage) -> _Shape:
    if len(stage.nodes) < 2:
        raise ValueError(f"{stage.id} is not part of a replica that spans nodes")
    shape = _Shape(
        engine_gpus=stage.tensor_parallel * stage.pipeline_parallel,
        node_gpus=len(stage.gpus),
        nodes=len(stage.nodes),
        engines=stage.data_parallel,
    )
    if shape.engine_gpus * shape.engines != shape.node_gpus * shape.nodes:
        raise ValueError(f"{stage.id}: {shape} does not divide evenly")
    return shape


def _problems(
    stage: Stage,
    model: Served,
    shape: _Shape,
    *,
    vllm: Version,
    ray: Version | None,
    experts: bool | None,
) -> list[str]:
    key = f"serving.{stage.model}"
    balancing = model.data_parallel_balancing
    alone = balancing == "external" or (balancing == "hybrid" and shape.local < 2)
    by_ray = model.distributed_executor_backend == "ray"
    found = [
        f"{key}.flags.{name}: the plan sets this flag for a replica that spans nodes"
        + (f": {instead}" if instead else ": remove the flag")
        for name, instead in _OURS.items()
        if name in model.flags
    ]
    if shape.engine_gpus % shape.node_gpus and shape.node_gpus % shape.engine_gpus:
        found.append(
            f"{key}: an engine has {shape.engine_gpus} GPUs, and each node gives {shape.node_gpus} "
            "GPUs, so engines would span nodes unevenly: choose `tensor_parallel` and "
            "`pipeline_parallel` so that one of these two numbers is a multiple of the other"
        )
    if by_ray and ray is None:
        found.append(
            f"{key}.distributed_executor_backend: the value is ray, but `vllm.lock` does not "
            "contain Ray, and since 0.18 vLLM does not install Ray itself: add `ray` to the lock, "
            "or write `mp`"
        )
    if stage.data_parallel == 1:
        return found
    if by_ray and balancing != "internal":
        found.append(
            f"{key}.data_parallel_balancing: the value is {balancing}, but with "
            "`distributed_executor_backend: ray` one server starts all engines: write `internal`, "
            "or set `distributed_executor_backend: mp`"
        )
    elif alone and experts is False:
        found.append(
            f"{key}.data_parallel_balancing: the value is {balancing}, so each engine would have "
            "its own server, but vLLM accepts this only for models with experts: write `replicas: "
            f"{stage.data_parallel}` and `data_parallel: 1`"
        )
    elif balancing == "external" and shape.local > 1 and vllm[:2] < _MULTI_PORT_SINCE:
        found.append(
            f"{key}.data_parallel_balancing: the value is external, and each node has "
            f"{shape.local} engines, which needs vLLM {'.'.join(map(str, _MULTI_PORT_SINCE))} or "
            f"newer, but the release is {'.'.join(map(str, vllm))}: write `hybrid`"
        )
    elif balancing == "external" and shape.local > 1:
        found += (
            f"{key}.flags.{name}: the value is {model.flags[name]}, but with "
            "`data_parallel_balancing: external` each engine of a node has its own server: remove "
            "the flag"
            for name, taken in _OF_ONE_SERVER.items()
            if model.flags.get(name, taken[0]) not in taken
        )
    return found


# vLLM's own processes


def _node_flags(stage: Stage, head: Network) -> dict[str, Argument]:
    """
    Return the flags of an engine that spans nodes.

    The engine spans all nodes, or several engines span several nodes each; the node's rank
    determines its part.
    """
    return {
        "distributed-executor-backend": "mp",
        "nnodes": len(stage.nodes),
        "node-rank": stage.node_rank,
        "master-addr": head.address,
        "master-port": MASTER_PORT,
    }


def _engine_flags(
    stage: Stage, shape: _Shape, balancing: Balancing, head: Network, *, headless: bool
) -> dict[str, Argument]:
    """Return the flags of several engines, which connect through the head node."""
    flags: dict[str, Argument] = {
        "data-parallel-address": head.address,
        "data-parallel-rpc-port": RPC_PORT,
    }
    if not shape.local:
        return flags if balancing == "internal" else {**flags, "data-parallel-external-lb": True}
    first = stage.node_rank * shape.local
    if balancing != "internal" and shape.local == 1:
        # vLLM then treats hybrid as external, with a warning.
        return {**flags, "data-parallel-rank": first}
    flags["data-parallel-size-local"] = shape.local
    if balancing != "internal" or headless:  # on an internal head it would mean hybrid
        flags["data-parallel-start-rank"] = first
    if balancing == "hybrid":
        flags["data-parallel-hybrid-lb"] = True
    elif balancing == "external":
        flags["data-parallel-multi-port-external-lb"] = True
        flags["data-parallel-supervisor-port"] = stage.port + shape.local
    return flags


# Ray


def _ray_flags(
    stage: Stage,
    shape: _Shape,
    here: Network,
    head: Network,
    variables: dict[str, str],
    *,
    device: Literal["cuda", "cpu"],
    ray: Version,
    vllm: Version,
) -> Rank:
    address = f"{head.address}:{MASTER_PORT}"
    variables = {
        **variables,
        "RAY_ADDRESS": address,
        "RAY_USAGE_STATS_ENABLED": "0",
        # The head's autoscaler has nothing to scale, and would publish metrics on port 44217. An
        # invalid port prevents that: it logs the error and continues (monitor.py of 2.60).
        "AUTOSCALER_METRIC_PORT": "-1",
    }
    if ray >= _TOKEN_SINCE:
        variables["RAY_AUTH_MODE"] = "token"
        # Where systemd puts the credentials of a unit (systemd.exec(5), LoadCredential=).
        variables["RAY_AUTH_TOKEN_PATH"] = f"/run/credentials/{stage.unit}/{RAY_TOKEN}"
    common = [
        *("--node-ip-address", here.address),
        # By default Ray counts CPUs, and would start an idle process for each. One CPU per GPU is
        # more than engines request (one each).
        *("--num-gpus", str(shape.node_gpus), "--num-cpus", str(shape.node_gpus)),
        *("--object-store-memory", str(_STORE_BYTES if device == "cuda" else _STORE_BYTES_CPU)),
        "--disable-usage-stats",
        "--block",
    ]
    if stage.node_rank > 0:
        return Rank(
            serves=False,
            variables=variables,
            # The server divides engines over the nodes that Ray has at that time, and dies if these
            # are too few (vllm/v1/engine/utils.py), so it waits for the port of each node's
            # manager.
            ray=("ray", "start", "--address", address, "--node-manager-port", RPC_PORT, *common),
            ready_port=RPC_PORT,
        )
    flags: dict[str, Argument] = {"distributed-executor-backend": "ray"}
    if shape.engines > 1:
        flags |= {"data-parallel-backend": "ray", "data-parallel-address": head.address}
        if shape.local:
            flags["data-parallel-size-local"] = shape.local
        variables["VLLM_RAY_DP_PACK_STRATEGY"] = "strict" if shape.local else "span"
    # An engine that is itself a Ray actor also got the head's addresses (vllm/v1/engine/utils.py).
    actors = shape.engines > 1 and vllm < _ADDRESSES_STAY_SINCE
    copied = _COPIED | (_ADDRESSES if actors else set())
    return Rank(
        serves=True,
        flags=flags,
        variables=variables,
        # Some releases replace each node's variables with the server's own (vllm/ray/ray_env.py).
        unset=tuple(sorted(name for name in variables if name in copied)),
        ray=(
            *("ray", "start", "--head", "--port", MASTER_PORT),
            # Off if possible. Ray's client server, if its dependencies are installed, gets a port
            # of the plan instead of 10001, which a second replica on the node could not use.
            *("--include-dashboard", "false", "--ray-client-server-port", RPC_PORT),
            *common,
        ),
        ready_port=MASTER_PORT,
        endpoints=(stage.port,),
    )


# Variables

# Variables that vLLM copies to the Ray workers of other nodes, by their prefixes.
_COPIED = {"NCCL_SOCKET_IFNAME", "NCCL_IB_HCA", "UCX_NET_DEVICES"}
_ADDRESSES = {"VLLM_HOST_IP", "VLLM_NIXL_SIDE_CHANNEL_HOST"}
_ADDRESSES_STAY_SINCE = (0, 22)


def interface_variables(here: Network, device: Literal["cuda", "cpu"]) -> dict[str, str]:
    """Return the variables by which Gloo and NCCL use the network between a replica's nodes."""
    variables = {"GLOO_SOCKET_IFNAME": here.interface}
    if device == "cpu":
        return variables
    # `=`: only this name, not also names that begin with it, as mlx5_10 begins with mlx5_1 (NCCL's
    # manual).
    variables["NCCL_SOCKET_IFNAME"] = f"={here.interface}"
    if here.no_rdma:
        variables["NCCL_IB_DISABLE"] = "1"
    elif here.hcas:
        variables["NCCL_IB_HCA"] = f"={','.join(here.hcas)}"
    return variables
