"""Planned stages, running stages, and the reasons for moves.  Pure."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from gpufleet.formatting import join_names, ranges
from gpufleet.node.cluster_network import Network
from gpufleet.on_node.common.stage_units import unit_of
from gpufleet.planning import adapter_flags
from gpufleet.planning.flag_layers import LayeredFlag
from gpufleet.settings.serving_settings import ModelKind, Served

Balancing: TypeAlias = Literal["internal", "hybrid", "external"]


@dataclass(frozen=True)
class Group:
    """The common properties of a multi-node replica's stages."""

    networks: tuple[tuple[str, Network], ...]
    """Network of each node, in the order of ranks."""
    cluster_port: int
    """First of the ports between its nodes."""
    side_channel_port: int = 0
    """First of NIXL's; 0: the replica hands no KV cache over."""
    experts: bool | None = None
    """Whether the model has experts; None: not known."""
    ray: tuple[int, ...] | None = None
    """The release of Ray beside vLLM; None: there is none in the lock."""


@dataclass(frozen=True)
class Handover:
    """The transfer of a stage's KV cache to or from stages of another entry."""

    networks: tuple[tuple[str, Network], ...]
    """Network of each node on either side, by name."""
    port: int
    """First of NIXL's side channel, one for each engine of the replica."""


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
    """UUIDs of the same GPUs, in the same order."""
    port: int
    tensor_parallel: int
    pipeline_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False
    node_rank: int = 0
    """Which of `nodes` this is; only rank 0 answers on the port."""
    nodes: tuple[str, ...] = ()
    """All nodes of the replica in the order of their ranks; empty: this one alone."""
    # Their values may be lists and objects, which have no hash.
    flags: tuple[LayeredFlag, ...] = field(default=(), hash=False)
    """Flags that come from presets and settings, not from the operator's `flags`."""
    group: Group | None = None
    """How it reaches the other nodes of its replica; None: there are none."""
    handover: Handover | None = None
    """Connection to its prefill or decode partners; None: it does both."""
    kind: ModelKind = "generate"
    """What its model is asked for."""
    balancing: Balancing = "internal"
    """How requests are balanced over the engines of a replica that spans nodes."""
    gpu_share: float | None = None
    """The part of its GPU's memory that it has; None: it has whole GPUs."""

    @property
    def id(self) -> str:
        """Names the stage on its node and in the fleet: `llama-0`."""
        return f"{self.model}-{self.replica}"

    @property
    def unit(self) -> str:
        """The systemd unit: `vllm-llama-0.service`."""
        return unit_of(self.id)

    @property
    def local_engines(self) -> int:
        """Whole engines of data parallelism here; 0: an engine spans nodes."""
        return len(self.gpus) // (self.tensor_parallel * self.pipeline_parallel)

    @property
    def ports(self) -> tuple[int, ...]:
        """
        The ports on which it listens for clients and probes; empty: it has no server.

        With `external` balancing and several engines a node one for each engine, from `port` on,
        and behind them one that tells whether all are ready (`--data-parallel-supervisor-port`).
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
        """Names of the adapters that its servers load, of `adapters` or of the operator's flag."""
        found = (each.value for each in self.flags if each.name == adapter_flags.MODULES)
        return adapter_flags.module_names(next(found, None))

    @property
    def servers(self) -> tuple[int, ...]:
        """Ports of `ports` that complete prompts."""
        return self.ports[:-1] if len(self.ports) > 1 else self.ports


@dataclass(frozen=True)
class Running:
    """A stage that runs on a node."""

    model: str
    replica: int
    node: str
    gpu_uuids: tuple[str, ...]
    """In the order of ranks."""
    port: int | None = None
    """None: not known, any will do."""
    rank: int = 0
    """Rank of the node in a multi-node replica."""
    release: str = ""
    """The id of the release that its unit starts; "": not known."""
    arguments: tuple[str, ...] = ()
    """As its unit has them, by line."""
    kind: ModelKind = "generate"
    """What its model is asked for."""
    side_channel: int = 0
    """The first port of NIXL's; 0: it hands no KV cache over, or that is not known."""

    @property
    def id(self) -> str:
        """Names the stage as the plan does: `llama-0`."""
        return f"{self.model}-{self.replica}"

    @property
    def servers(self) -> tuple[int, ...]:
        """
        The ports on which it completes prompts, as its unit says; empty: it has no server.

        As `Stage.servers` has them for what is planned.
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
        """Names of the adapters that its servers load, as its unit has them."""
        name = f"--{adapter_flags.MODULES} "
        found = (each.removeprefix(name) for each in self.arguments if each.startswith(name))
        return adapter_flags.module_names(next(found, "").split())

    @property
    def cluster_port(self) -> int:
        """First of the ports between its nodes; 0: single-node, or unknown."""
        if not self.nodes[1:]:
            return 0
        # The first such line is the rank's; that of `vllm serve` comes behind it.
        ports = (line.partition(" ")[2] for line in self.arguments if line.startswith("--port "))
        found = next(ports, "")
        return int(found) if found.isdecimal() else 0

    @property
    def nodes(self) -> tuple[str, ...]:
        """
        All nodes of its replica in the order of their ranks, as its unit names them.

        Only this one for a replica on one node, or where the unit's arguments are not known.
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
    """Empty: it stops."""

    def __str__(self) -> str:
        """Return the sentence of the plan."""
        name = f"{self.model}-{self.replica}"
        if not self.after:
            return f"{name} stops on {join_names({each.node for each in self.before})}: {self.why}"
        was, now = ({each.node for each in side} for side in (self.before, self.after))
        gpus = "; ".join(f"{stage.node} GPUs {ranges(stage.gpus)}" for stage in self.after)
        if was == now:
            return f"{name} restarts on {gpus}: {self.why}"
        return f"{name} moves from {join_names(was)} to {gpus}: {self.why}"


def served_name(stage: Stage, model: Served) -> str:
    """Return what clients ask the stage for."""
    return model.served_name or stage.model
