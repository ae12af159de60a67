"""Small fleets as values: groups, loads, stages that run and that are planned."""

from __future__ import annotations

from gpufleet.planning.planner import FleetPlan
from gpufleet.planning.stage import Running, Stage
from gpufleet.upgrade.plan.replica_load import ReplicaLoad
from gpufleet.upgrade.plan.wave import Group


def group(replica: str, *nodes: str, **more) -> Group:
    """A group of one replica, on a node of its own unless it is said where."""
    return Group(replica, "stages", nodes or (f"on-{replica}",), (replica,), **more)


def load(replica: str, share: float = 0.0, **more) -> ReplicaLoad:
    """A replica of 100 slots, so full."""
    model = replica.rpartition("-")[0]
    said = {"running": 100 * share, "waiting": 0.0, "most_running": 100, "kv_usage": 0.0}
    return ReplicaLoad(replica, model, f"on-{replica}", **{**said, **more})


def replicas(model: str, count: int, share: float = 0.0) -> tuple[list[Group], list[ReplicaLoad]]:
    """So many replicas of a model, each so full, and a group for each."""
    names = [f"{model}-{number}" for number in range(count)]
    return [group(name) for name in names], [load(name, share) for name in names]


def runs(replica: str, node: str, *gpus: str, port: int = 8000, **more) -> Running:
    """What was found on a node."""
    model, _, number = replica.rpartition("-")
    arguments = more.pop("arguments", ("/opt/vllm/releases/0.31.0-ab/bin/vllm serve",))
    return Running(
        model, int(number), node, gpus, port, release="0.31.0-ab", arguments=arguments, **more
    )


def stage(replica: str, node: str, *gpus: str, port: int = 8000, **more) -> Stage:
    """What is planned for a node."""
    model, _, number = replica.rpartition("-")
    return Stage(model, int(number), node, tuple(range(len(gpus))), gpus, port, 1, **more)


def plan(*stages: Stage) -> FleetPlan:
    """A plan of nothing but its stages."""
    return FleetPlan(stages, ())
