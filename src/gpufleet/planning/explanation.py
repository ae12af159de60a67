"""
Explain a plan and its changes: the text of `gpufleet plan --explain` and `--diff`.

Pure: takes plans, returns rows (values for tables and JSON) and text.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from gpufleet.formatting import node_ranges, ranges
from gpufleet.node.topology import Node
from gpufleet.planning.candidates import GIB, CandidateSet
from gpufleet.planning.gpu_shares import MOST, thousandths
from gpufleet.planning.gpu_totals import Block, equal_nodes, replica_names
from gpufleet.planning.planner import FleetPlan
from gpufleet.planning.stage import Running, Stage

# Candidates


@dataclass(frozen=True)
class Row:
    """One candidate of one model on one kind of node."""

    model: str
    nodes: str
    """The nodes' names in short form, and their kind."""
    chosen: bool
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int
    expert_parallel: bool
    replicas: int
    """Maximum number of replicas on these nodes, if the nodes run nothing else."""
    verdict: str
    """"fits", "near the edge", "does not fit" or "not checked"."""
    weights_gib_per_gpu: float | None
    """None if unknown. The next two fields are also None if they are unknown."""
    kv_cache_tokens: int | None
    """KV tokens of the whole replica."""
    max_concurrency: float | None
    """Number of requests of full length that the whole replica runs at once."""
    reason: str
    over_nodes: int = 1
    """Number of nodes that each replica uses."""


def candidate_rows(plan: FleetPlan) -> tuple[Row, ...]:
    """Return all candidates, in the order of their evaluation."""
    return tuple(row for considered in plan.candidates for row in _rows(considered))


def _rows(considered: CandidateSet) -> Iterable[Row]:
    where = f"{node_ranges(considered.names)}: {considered.kind}"
    for each in considered.candidates:
        sizing, division = each.sizing, each.division
        yield Row(
            model=considered.model,
            nodes=where,
            chosen=each.chosen,
            tensor_parallel=division.tensor_parallel,
            pipeline_parallel=division.pipeline_parallel,
            data_parallel=division.data_parallel,
            expert_parallel=division.expert_parallel,
            replicas=each.replicas,
            verdict=str(each.verdict),
            weights_gib_per_gpu=round(sizing.weights_bytes_per_gpu / GIB, 2) if sizing else None,
            kv_cache_tokens=each.kv_tokens if sizing else None,
            max_concurrency=round(each.concurrency, 2) if sizing else None,
            reason=each.reason,
            over_nodes=division.nodes,
        )


_COLUMNS = (
    *("", "TP", "PP", "DP", "EP", "nodes"),
    *("replicas", "fits", "weights/GPU", "KV tokens", "requests"),
)
_NODES = _COLUMNS.index("nodes")


def explain(plan: FleetPlan, nodes: Iterable[Node] = ()) -> str:
    """
    Return the text of `--explain`.

    The text has three parts, in this order:

    - the candidates of each model on each kind of node, with their reasons. `>` marks the chosen
      candidate;
    - the plan's sentences;
    - what runs on each GPU of the given `nodes`.
    """
    tables: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in candidate_rows(plan):
        tables[row.model, row.nodes].append(row)
    lines: list[str] = []
    for (model, where), found in tables.items():
        lines += [f"{model} on {where}", *_table(found), ""]
    lines += plan.reasons
    for block in equal_nodes(plan, nodes):
        lines += ["", *draw_block(block)]
    return "\n".join(lines) + "\n"


def _table(found: Sequence[Row]) -> list[str]:
    cells: list[tuple[str, ...]] = [
        _COLUMNS,
        *(
            (
                ">" if row.chosen else "",
                str(row.tensor_parallel),
                str(row.pipeline_parallel),
                str(row.data_parallel),
                "yes" if row.expert_parallel else "no",
                str(row.over_nodes),
                str(row.replicas),
                row.verdict,
                _format_value(row.weights_gib_per_gpu, ".1f", " GiB"),
                _format_value(row.kv_cache_tokens, ","),
                _format_value(row.max_concurrency, ".1f"),
            )
            for row in found
        ),
    ]
    if all(row.over_nodes == 1 for row in found):
        cells = [(*line[:_NODES], *line[_NODES + 1 :]) for line in cells]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    reasons = ["why", *(row.reason for row in found)]
    return [
        "  ".join(
            [*(cell.ljust(width) for cell, width in zip(line, widths, strict=True)), reason]
        ).rstrip()
        for line, reason in zip(cells, reasons, strict=True)
    ]


def _format_value(value: float | None, form: str, unit: str = "") -> str:
    return "?" if value is None else f"{value:{form}}{unit}"


# Pictures


def draw_block(block: Block) -> list[str]:
    """
    Return a line for each GPU of a block of equal nodes.

    The line has the GPU's replica, and the GPU's link to the other GPUs of its group.

        gpu-[01-02]
          GPU 0  llama-[0-1]  rank 0  port 8000  NV18
          GPU 1  llama-[0-1]  rank 1  port 8000  NV18
          GPU 2  chat-[0-1] 0.6 port 8001, embed-[0-1] 0.2 port 8002, free 0.15
          GPU 3  free
    """
    node = block.nodes[0]
    serving: dict[int, tuple[Stage, str, int]] = {}
    shared: dict[int, list[tuple[Stage, str]]] = defaultdict(list)
    for stage, replicas in zip(block.stages, block.replicas, strict=True):
        name = replica_names(stage.model, replicas)
        if stage.gpu_share is not None:
            shared[stage.gpus[0]].append((stage, name))
            continue
        for rank, gpu in enumerate(stage.gpus, stage.node_rank * len(stage.gpus)):
            serving[gpu] = (stage, name, rank)
    lines = [block.names]
    width = max((len(name) for _, name, _ in serving.values()), default=0)
    for gpu in sorted({gpu.index for gpu in node.gpus} | set(node.unfit)):
        if gpu in node.unfit:
            lines.append(f"  GPU {gpu}  not used: {node.unfit[gpu]}")
        elif gpu in serving:
            stage, name, rank = serving[gpu]
            lines.append(
                f"  GPU {gpu}  {name:{width}}  rank {rank}{_port_text(stage)}"
                f"{_link_text(node, stage, gpu)}"
            )
        elif gpu in shared:
            lines.append(f"  GPU {gpu}  {_shares(shared[gpu])}")
        else:
            lines.append(f"  GPU {gpu}  free")
    return lines


def _shares(found: Iterable[tuple[Stage, str]]) -> str:
    """Return the shares of one GPU, largest first, then the free share."""
    every = [(thousandths(stage.gpu_share or 0), name, stage) for stage, name in found]
    every.sort(key=lambda each: (-each[0], each[1]))
    said = [f"{name} {share / 1000:g}{_port_text(stage)}" for share, name, stage in every]
    free = MOST - sum(share for share, _, _ in every)
    return ", ".join(" ".join(each.split()) for each in [*said, f"free {free / 1000:g}"])


def _port_text(stage: Stage) -> str:
    """Return a stage's ports as text, or "" if the stage has no server on its node."""
    ports = stage.ports
    return f"  port{'s' if len(ports) > 1 else ''} {ranges(ports)}" if ports else ""


def _link_text(node: Node, stage: Stage, gpu: int) -> str:
    """Return the link from a GPU to the farthest GPU of its tensor-parallel group on this node."""
    size = stage.tensor_parallel
    experts = stage.expert_parallel and stage.data_parallel > 1 and len(stage.nodes) > 1
    across = "  over nodes" if size > len(stage.gpus) or experts else ""
    at = stage.gpus.index(gpu) // size * size
    pairs = [tuple(sorted((gpu, other))) for other in stage.gpus[at : at + size] if other != gpu]
    if not pairs:
        return across
    links = min(node.nvlink.get((one, other), 0) for one, other in pairs)
    if links:
        return f"  NV{links}{across}"
    near = {node.pcie.get((one, other), "SYS") for one, other in pairs}
    order = ("SYS", "NODE", "PHB", "PXB", "PIX")
    return f"  {next((tier for tier in order if tier in near), 'SYS')}{across}"


# What changes


class Action(StrEnum):
    """What the plan does with a replica."""

    START = "start"
    STOP = "stop"
    MOVE = "move"
    RESTART = "restart"
    STAY = "stay"


@dataclass(frozen=True)
class Change:
    """
    The change of one replica.

    `before` is "" if the replica starts, and `after` is "" if the replica stops.
    """

    action: Action
    replica: str
    before: str
    after: str
    why: str

    def as_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {**asdict(self), "action": str(self.action)}


def plan_changes(
    plan: FleetPlan,
    running: Iterable[Running],
    restarts: Mapping[str, str] | None = None,
    nodes: Iterable[Node] = (),
) -> tuple[Change, ...]:
    """
    Return the plan's change to each running or planned replica, sorted by model and replica.

    A replica stays if its nodes, GPUs and port are unchanged, and if `restarts` does not have its
    name. `restarts` maps the name of a replica (`llama-0`) to another reason for a restart, for
    example changed flags. gpufleet reads the indices of GPUs that only running replicas use from
    `nodes`.
    """
    planned: dict[tuple[str, int], list[Stage]] = defaultdict(list)
    for stage in plan.stages:
        planned[stage.model, stage.replica].append(stage)
    found: dict[tuple[str, int], list[Running]] = defaultdict(list)
    for each in running:
        found[each.model, each.replica].append(each)
    why = {(move.model, move.replica): move.why for move in plan.moves}
    indices = {gpu.uuid: gpu.index for node in nodes for gpu in node.gpus} | {
        uuid: gpu
        for stage in plan.stages
        for gpu, uuid in zip(stage.gpus, stage.gpu_uuids, strict=True)
    }
    changes = []
    for key in sorted({*planned, *found}):
        name = f"{key[0]}-{key[1]}"
        was, now = found.get(key, []), planned.get(key, [])
        # The replica ran twice, and one copy stops. This is not a move to fewer nodes.
        if len(was) > len(now) > 0 and len({each.nodes for each in was}) > 1:
            here = {each.node for each in now}
            for each in (each for each in was if each.node not in here):
                place = _place(each.node, each.gpu_uuids, each.port, indices)
                why_not = why.pop(key, "the same replica also runs on a different node")
                changes.append(Change(Action.STOP, name, place, "", why_not))
            was = [each for each in was if each.node in here] or was[:1]
        before = "; ".join(
            _place(each.node, each.gpu_uuids, each.port, indices)
            for each in sorted(was, key=lambda each: (each.rank, each.node))
        )
        after = "; ".join(_place(each.node, each.gpu_uuids, each.port, indices) for each in now)
        reason = why.get(key, "")
        if not was:
            action = Action.START
        elif not now:
            action, reason = Action.STOP, reason or "the plan does not have this replica"
        elif {each.node for each in was} != {each.node for each in now}:
            action = Action.MOVE
        elif _differs(was, now):
            action = Action.RESTART
        elif name in (restarts or {}):
            action, reason = Action.RESTART, (restarts or {})[name]
        else:
            action = Action.STAY
        changes.append(Change(action, name, before, after, reason))
    return tuple(changes)


def _differs(was: Sequence[Running], now: Sequence[Stage]) -> bool:
    ran = {(each.node, tuple(sorted(each.gpu_uuids))) for each in was}
    ports = {each.port for each in was} - {None}
    return ran != {(each.node, tuple(sorted(each.gpu_uuids))) for each in now} or bool(
        ports - {each.port for each in now}
    )


def _place(node: str, uuids: Sequence[str], port: int | None, indices: Mapping[str, int]) -> str:
    """
    Format a stage's GPUs and port: `gpu-01 GPUs 0-3 port 8000`, with UUIDs if an index is unknown.
    """
    known = [indices[uuid] for uuid in uuids if uuid in indices]
    gpus = ranges(known) if len(known) == len(uuids) else ", ".join(uuids)
    return f"{node} GPU{'s' if len(uuids) > 1 else ''} {gpus}" + (f" port {port}" if port else "")
