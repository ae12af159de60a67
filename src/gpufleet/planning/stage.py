"""Describe planned stages, running stages, and the reasons for moves.  Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from gpufleet.formatting import join_names, ranges
from gpufleet.node.cluster_network import Network
from gpufleet.on_node.common.stage_units import unit_of
from gpufleet.planning import adapter_flags
from gpufleet.planning.flag_layers import LayeredFlag
from gpufleet.settings.engine_flags import DEFAULT, EngineName
from gpufleet.settings.serving_settings import ModelKind, Served

Balancing: TypeAlias = Literal["internal", "hybrid", "external"]


@dataclass(frozen=True)
class Group:
    """The common properties of the stages of a multi-node replica."""

    networks: tuple[tuple[str, Network], ...]
    """Network of each node, in the order of ranks."""
    cluster_port: int
    """The first of the ports on which the replica's nodes communicate."""
    side_channel_port: int = 0
    """NIXL's first port; 0 if the replica transfers no KV cache."""
    experts: bool | None = None
    """Whether the model has experts; None if unknown."""
    ray: tuple[int, ...] | None = None
    """
    The version of Ray that is installed with vLLM; None if the lock file does not contain Ray.
    """


@dataclass(frozen=True)
class Handover:
    """
    The transfer of a stage's KV cache to or from the stages of a different entry in `serving`.
    """

    networks: tuple[tuple[str, Network], ...]
    """The name and the network of each node that sends or receives the KV cache."""
    port: int
    """The first port of NIXL's side channel, which has a port for each engine of the replica."""


@dataclass(frozen=True)
class Stage:
    """The part of a replica that one node runs: one systemd unit."""

    model: str
    replica: int
    """The replica's number in the whole fleet, from 0."""
    node: str
    gpus: tuple[int, ...]
    """NVML indices in the order of ranks: one tensor-parallel group after another, ascending."""
    gpu_uuids: tuple[str, ...]
    """UUIDs of the same GPUs, in the same order."""
    port: int
    tensor_parallel: int
    pipeline_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False
    node_rank: int = 0
    """The index of this node in `nodes`. Only rank 0 answers on the port."""
    nodes: tuple[str, ...] = ()
    """All nodes of the replica in the order of ranks; empty for a single-node replica."""
    # Values of flags may be lists and objects, which have no hash.
    flags: tuple[LayeredFlag, ...] = field(default=(), hash=False)
    """Flags from presets and settings, without the operator's `flags`."""
    group: Group | None = None
    """Networks and ports between the replica's nodes; None for a single-node replica."""
    handover: Handover | None = None
    """
    Connection to the prefill or decode partners; None if the stage does both prefill and decode.
    """
    kind: ModelKind = "generate"
    """The kind of requests to the model."""
    engine: EngineName = DEFAULT
    """The engine of the server."""
    balancing: Balancing = "internal"
    """How requests are balanced over the engines of a replica that spans nodes."""
    gpu_share: float | None = None
    """The stage's fraction of the GPU's memory; None for whole GPUs."""

    @property
    def id(self) -> str:
        """Return the name of the stage's replica, unique on a node and in the fleet: `llama-0`."""
        return f"{self.model}-{self.replica}"

    @property
    def unit(self) -> str:
        """The systemd unit: `vllm-llama-0.service`."""
        return unit_of(self.id)

    @property
    def local_engines(self) -> int:
        """
        Return the number of whole data-parallel engines on this node, or 0 if an engine spans
        nodes.
        """
        return len(self.gpus) // (self.tensor_parallel * self.pipeline_parallel)

    @property
    def ports(self) -> tuple[int, ...]:
        """
        Return the ports on which the stage listens for clients and probes.

        The result is empty if the stage has no server.

        With `external` balancing and several engines per node, each engine has its own port,
        beginning with `port`. The port after these reports whether all engines are ready
        (`--data-parallel-supervisor-port`).
        """
        if len(self.nodes) < 2:
            return (self.port,)
        if self.balancing == "internal" or self.data_parallel == 1:
            return (self.port,) if self.node_rank == 0 else ()
        if not (local := self.local_engines):
            span = self.tensor_parallel * self.pipeline_parallel // len(self.gpus)
            return (self.port,) if self.node_rank % span == 0 else ()
        if self.balancing == "external" and local > 1:
            return tuple(range(self.port, self.port + local + 1))
        return (self.port,)

    @property
    def adapters(self) -> tuple[str, ...]:
        """
        Return the names of the adapters that the stage's servers load.

        The names are from `adapters`, or from the operator's flag.
        """
        found = (each.value for each in self.flags if each.name == adapter_flags.MODULES)
        return adapter_flags.module_names(next(found, None))

    @property
    def servers(self) -> tuple[int, ...]:
        """Return the ports in `ports` on which a server completes prompts."""
        return self.ports[:-1] if len(self.ports) > 1 else self.ports


@dataclass(frozen=True)
class Running:
    """A stage that has a unit on a node."""

    model: str
    replica: int
    node: str
    gpu_uuids: tuple[str, ...]
    """UUIDs of the GPUs in the order of ranks."""
    port: int | None = None
    """The port of the endpoint; None if unknown. The plan then accepts any port."""
    rank: int = 0
    """Rank of the node in a multi-node replica."""
    release: str = ""
    """The id of the release that the unit starts; "" if unknown."""
    arguments: tuple[str, ...] = ()
    """The arguments in the unit, one item per line."""
    kind: ModelKind = "generate"
    """The kind of requests to the model."""
    side_channel: int = 0
    """NIXL's first port; 0 if no KV cache is transferred, or if unknown."""

    @property
    def id(self) -> str:
        """Return the stage's name in the plan: `llama-0`."""
        return f"{self.model}-{self.replica}"

    @property
    def servers(self) -> tuple[int, ...]:
        """
        Return the ports on which the stage completes prompts, from its unit.

        The result is empty if the stage has no server.

        For a planned stage, see `Stage.servers`.
        """
        has_server = any(line.endswith("vllm serve") for line in self.arguments)
        if self.port is None or (self.rank and (not has_server or "--headless" in self.arguments)):
            return ()
        if "--data-parallel-multi-port-external-lb" not in self.arguments:
            return (self.port,)
        name = "--data-parallel-size-local "
        local = (each.removeprefix(name) for each in self.arguments if each.startswith(name))
        return tuple(self.port + number for number in range(int(next(local, "1"))))

    @property
    def adapters(self) -> tuple[str, ...]:
        """Return the names of the adapters that the stage's servers load, from its unit."""
        name = f"--{adapter_flags.MODULES} "
        found = (each.removeprefix(name) for each in self.arguments if each.startswith(name))
        return adapter_flags.module_names(next(found, "").split())

    @property
    def cluster_port(self) -> int:
        """
        Return the first of the ports on which the replica's nodes communicate.

        The result is 0 for a single-node replica, or if the port is unknown.
        """
        if not self.nodes[1:]:
            return 0
        # The first such line belongs to the rank's program; that of `vllm serve` comes after it.
        ports = (line.partition(" ")[2] for line in self.arguments if line.startswith("--port "))
        found = next(ports, "")
        return int(found) if found.isdecimal() else 0

    @property
    def nodes(self) -> tuple[str, ...]:
        """
        Return all nodes of the replica in the order of ranks, from the unit.

        The result has only this node if the replica has a single node, or if the unit's arguments
        are unknown.
        """
        named = (line.partition(" ") for line in self.arguments)
        found = tuple(value.partition("=")[0] for name, _, value in named if name == "--node")
        return found or (self.node,)


@dataclass(frozen=True)
class ReplicaMove:
    """A running replica that the plan moves, restarts or stops, and why."""

    model: str
    replica: int
    why: str
    before: tuple[Running, ...]
    after: tuple[Stage, ...] = ()
    """The planned stages; empty if the replica stops."""

    def __str__(self) -> str:
        """Return the plan's sentence on the move."""
        name = f"{self.model}-{self.replica}"
        if not self.after:
            return f"{name} stops on {join_names({each.node for each in self.before})}: {self.why}"
        was, now = ({each.node for each in side} for side in (self.before, self.after))
        gpus = "; ".join(f"{stage.node} GPUs {ranges(stage.gpus)}" for stage in self.after)
        if was == now:
            return f"{name} restarts on {gpus}: {self.why}"
        return f"{name} moves from {join_names(was)} to {gpus}: {self.why}"


def served_name(stage: Stage, model: Served) -> str:
    """Return the model name that clients use for the stage."""
    return model.served_name or stage.model
