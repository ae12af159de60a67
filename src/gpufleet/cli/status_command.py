"""`gpufleet status`: show whether replicas serve."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from gpufleet.cli.common_options import (
    fleet_command,
    inventory_argument,
    json_option,
    limit_option,
    print_json,
)
from gpufleet.cli.fleet_inputs import (
    select_limit,
    use_gevent,
)
from gpufleet.console import add_row, display, new_table
from gpufleet.formatting import count_of, join_names, node_ranges, ranges
from gpufleet.sanitize import printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.text import Text

    from gpufleet.serving.rank_status import Health
    from gpufleet.serving.status import FleetStatus


_STYLES = {  # by the word of a `Health`
    "serves": "green",
    "runs": "green",
    "starts": "yellow",
    "busy": "yellow",
    "unknown": "magenta",
}


@fleet_command()
@inventory_argument
@limit_option
@click.option(
    "--completion",
    is_flag=True,
    help="Also send every endpoint a request of the kind that its model answers; a model "
    "for text generates one token.",
)
@click.option(
    "--seconds",
    type=click.FloatRange(min=1, max=3600),
    help="Most seconds to wait for the answer of each node.  [default: 40; 160 with --completion]",
)
@json_option
def status(
    inventory_file: str,
    *,
    limit: tuple[str, ...],
    completion: bool,
    seconds: float | None,
    as_json: bool,
) -> int:
    """
    Show whether the replicas serve. Read-only.

    \b
    gpufleet status inventories/prod.py
    gpufleet status inventories/prod.py --limit gpu-07
    gpufleet status inventories/prod.py --json

    On each node, the command queries the health and the models of every endpoint.

    Exit status: 0: all replicas serve. 1: a replica does not serve, or its state is unknown. 2:
    error.
    """
    use_gevent()

    from gpufleet.fleet import live
    from gpufleet.inventory.loader import read
    from gpufleet.remote import payload
    from gpufleet.serving.status import fleet_status

    declared = read(inventory_file)
    wanted = select_limit(declared, limit)
    program = payload.program("serving/status", completion=completion)
    with live.connect(inventory_file, wanted) as ask:
        answers = ask(
            lambda node: program if node in declared.gpu_nodes else None,
            seconds or (160 if completion else 40),
            "the look",
        )
    found = fleet_status(answers, declared.gpu_nodes, whole=not limit)
    if as_json:
        print_json(found.as_json())
    else:
        display(status_table(found, time.time()))
    return int(not found.serves)


def status_table(found: FleetStatus, now: float) -> RenderableType:
    """Return one line per rank, then the problems, then how many replicas serve."""
    from rich.console import Group
    from rich.text import Text

    from gpufleet.serving.rank_status import Health

    table = new_table(
        "replica", "rank", "node", "", "since", "GPUs", "port", "restarts", "last restart"
    )
    for replica in found.replicas:
        for rank in replica.ranks:
            last = rank.last_restart
            add_row(
                table,
                replica.id,
                str(rank.rank),
                rank.node,
                _health(rank.health, drained=found.out.drains(replica.id, rank.node)),
                "" if rank.since is None else _ago(now - rank.since),
                ranges(rank.indices) if rank.indices else count_of(len(rank.gpus), "GPU"),
                ranges(rank.ports) or "-",
                "" if rank.restarts is None else str(rank.restarts),
                f"{_ago(now - last.when)} ago: {last.cause}" if last else "",
            )
    parts: list[RenderableType] = [table] if found.replicas else []
    lines = [
        *_incarnations(found, now),
        *_shared_gpus(found),
        *_adapters(found),
        *_amiss(found),
        *_marks(found, now),
    ]
    if lines:
        parts += [Text(), *(Text(printable(line)) for line in lines)]
    serving = sum(each.health is Health.SERVES for each in found.replicas)
    said = f"{serving} of {len(found.replicas)} replicas serve"
    if drained := len({replica for replica, _, _ in found.out.drained}):
        said += f"; {drained} drained"
    style = _STYLES[Health.SERVES] if found.serves else "bold red"
    return Group(*parts, Text(), Text(said if found.replicas else "no replica", style=style))


def _health(health: Health, *, drained: bool) -> Text:
    from rich.text import Text

    if drained:
        return Text(f"{health}, drained", style="yellow" if health.is_good else "red")
    return Text(str(health), style=_STYLES.get(health, "red"))


def _marks(found: FleetStatus, now: float) -> Iterator[str]:
    """Yield a line for each node or replica out of service, and for each unfinished upgrade."""
    for node, mark in found.out.cordoned:
        yield f"{node} cordoned {_ago(now - mark.since)} ago by {mark}"
    for replica, node, mark in found.out.drained:
        yield f"{replica} on {node} drained {_ago(now - mark.since)} ago by {mark}"
    for each in found.out.changes:
        lock = each.lock
        yield (
            f"upgrade {lock.id} has not finished: {lock.owner} from {lock.origin}, started "
            f"{_ago(now - lock.since)} ago: {lock.what}; it has locked "
            f"{node_ranges(each.nodes)}"
        )


def _incarnations(found: FleetStatus, now: float) -> Iterator[str]:
    for replica in found.replicas:
        formed = [rank.formed for rank in replica.ranks if rank.formed is not None]
        if replica.incarnation:
            since = f", {_ago(now - min(formed))} old" if formed else ""
            yield (
                f"{replica.id}: {count_of(len(replica.ranks), 'rank')} of incarnation "
                f"{replica.ranks[0].incarnation_number}, {replica.incarnation}{since}"
            )


def _shared_gpus(found: FleetStatus) -> Iterator[str]:
    """Yield a line for each GPU that several replicas share."""
    for (node, gpu), names in found.shared_gpus().items():
        yield f"{node} GPU {gpu}: shared by {join_names(names)}"


def _adapters(found: FleetStatus) -> Iterator[str]:
    """Yield a line with the adapters that the replicas of a model load."""
    for names, replicas in found.adapters().items():
        if names:
            yield f"{join_names(replicas)}: adapter{'s' * (len(names) > 1)} {join_names(names)}"


def _amiss(found: FleetStatus) -> Iterator[str]:
    for replica in found.replicas:
        for why in replica.why:
            yield f"{replica.id} {replica.health}: {why}"
    for node, why in found.silent.items():
        yield f"{node} unknown: {why}"
    yield from (f"missing: {each}" for each in found.missing)
    yield from (f"note: {each}" for each in found.remarks)


def _ago(seconds: float) -> str:
    """Return a duration in seconds as text, with its two largest units: `3 d 4 h`."""
    left = max(0, int(seconds))
    parts: list[str] = []
    for name, size in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        count, left = divmod(left, size)
        if count or parts:
            parts.append(f"{count} {name}")
    return " ".join(each for each in parts[:2] if not each.startswith("0 ")) or "0 s"
