"""`gpufleet lab ...`: thin commands over `lab.nodes.Lab`.

All commands need root, because they create network interfaces, mounts and cgroups, or read the SSH
key of the nodes. A mistake raises FleetError. `gpufleet.cli.main` prints the error, and the command
ends with status 2.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import asdict

import click
from rich.console import Console
from rich.table import Table

from gpufleet.cli.common_options import json_option, print_json
from gpufleet.errors import FleetError
from lab import faults, provisioning_sources
from lab.active_faults import BY_HAND, OFFLINE
from lab.machine import Profile
from lab.nodes import DEFAULT_NODES, Lab, NodeStatus
from lab.progress import step
from lab.state import CHECKOUT, LabState, lab_ids
from lab.vendor import states


@click.group(name="lab", context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--id", "lab_id", help="Name of the lab (default: $GPUFLEET_LAB, else lab).")
@click.pass_context
def lab(ctx: click.Context, lab_id: str | None) -> None:
    """Run real Linux nodes with simulated GPUs."""
    ctx.obj = lab_id


def _open(ctx: click.Context, why: str) -> Lab:
    """Return the lab. Raises if this user is not root."""
    _require_root(f"gpufleet lab {ctx.info_name}", f"it {why}")
    return Lab.open(ctx.obj, _say)


def _require_root(command: str, why: str) -> None:
    if os.geteuid() != 0:
        raise FleetError(f"`{command}` needs root: {why}. Run it with sudo.")


def _say(line: str) -> None:
    click.echo(line, err=True)


@lab.command()
@click.argument("nodes", nargs=-1, metavar="[NODE=PROFILE ...]")
@click.option("--bare", is_flag=True, help="Start the nodes without downloads for them.")
@click.option(
    "--cable",
    "cables",
    multiple=True,
    metavar="NODE:INTERFACE=ADDRESS",
    help="A further interface, as gpu-01:eth1=10.60.1.1/24; may be repeated.",
)
@click.option(
    "--without-driver",
    multiple=True,
    metavar="NODE",
    help="Deliver NODE with GPUs, but without NVIDIA software; may be repeated.",
)
@click.pass_context
def up(
    ctx: click.Context,
    nodes: tuple[str, ...],
    *,
    bare: bool,
    cables: tuple[str, ...],
    without_driver: tuple[str, ...],
) -> None:
    """
    Make exactly these nodes run, healthy and reachable.

    Without arguments, the command starts the nodes of the last time, or gpu-01=h100x8 and
    gpu-02=a100x4-pcie the first time. A profile is the name of a file in lab/profiles/, or `none`
    for a node without GPUs (mon-03=none). Interfaces with addresses in the same network are on the
    same switch. If a node has further interfaces, its eth0 can reach only this machine.
    """
    wanted: dict[str, str] = {}
    for node in nodes:
        name, _, profile = node.partition("=")
        if not name or not profile or name in wanted:
            raise click.UsageError(f"{node!r}: write each node once, such as gpu-01=h100x8.")
        wanted[name] = profile
    laid: dict[str, dict[str, str]] = {}
    for cable in cables:
        where, _, address = cable.partition("=")
        name, _, interface = where.partition(":")
        if not (interface and address) or interface in laid.get(name, {}):
            raise click.UsageError(f"{cable!r}: write each once, such as gpu-01:eth1=10.60.1.1/24.")
        laid.setdefault(name, {})[interface] = address
    room = _open(ctx, "makes network interfaces, mounts and cgroups")
    begin = time.monotonic()
    room.up(wanted or None, laid or None, without_driver or None)
    if not bare:
        provisioning_sources.provide(room.facts, room.say)
    count = len(room.facts.nodes)
    click.echo(f"{count} nodes up: {time.monotonic() - begin:.1f} s", err=True)
    click.echo(f"ssh -F {room.facts.ssh_config} {room.facts.nodes[0].name}")


@lab.command()
@click.pass_context
def down(ctx: click.Context) -> None:
    """Switch off all nodes, and leave only their files."""
    _open(ctx, "removes network interfaces, mounts and cgroups").down()


@lab.command()
@click.pass_context
def purge(ctx: click.Context) -> None:
    """Switch off all nodes, and delete their files, keys and secrets; downloads stay."""
    _open(ctx, "removes mounts and the lab's files").purge()


@lab.command()
def clean() -> None:
    """Purge the labs of this checkout; list those of other checkouts, and keep them."""
    _require_root("gpufleet lab clean", "it removes mounts and the labs' files")
    for lab_id in lab_ids():
        owner = LabState.load(lab_id).checkout
        if owner != str(CHECKOUT):
            _say(
                f"lab {lab_id} stays, because it belongs to {owner or 'an unknown checkout'}; "
                f"`gpufleet lab --id {lab_id} purge` removes it"
            )
            continue
        with step(f"purge lab {lab_id}", _say):
            Lab.open(lab_id, _say).purge()


@lab.command()
@click.pass_context
def demo(ctx: click.Context) -> None:
    """Start two nodes, deploy the fleet on them and request completions."""
    from lab.demo import run

    run(_open(ctx, "makes network interfaces, mounts and cgroups").facts.id)


@lab.command("require-root", hidden=True)
@click.argument("command")
def require_root(command: str) -> None:
    """End with status 2 and a reason unless this is root: for the Makefile."""
    _require_root(command, "it boots nodes, which need mounts, namespaces and network interfaces")


@lab.command()
@json_option
@click.pass_context
def status(ctx: click.Context, *, as_json: bool) -> None:
    """Show the present state of every node."""
    room = _open(ctx, "reads the memory of the nodes' processes")
    found = room.status()
    if as_json:
        print_json([{**asdict(node), "faults": list(map(str, node.faults))} for node in found])
        return
    if not found:
        defaults = " ".join(f"{name}={profile}" for name, profile in DEFAULT_NODES.items())
        click.echo(f"Lab {room.facts.id!r} has no nodes; `gpufleet lab up` starts {defaults}.")
        return
    console = Console()
    console.print(_table(found))
    for node in found:
        if node.faults:
            console.print(f"[red]{node.name} has faults:[/] {', '.join(map(str, node.faults))}")
    harmed = states.current(room.state / "vendor")
    if harmed != states.GOOD:
        console.print(f"[red]vendor repository: {harmed}:[/] {states.STATES[harmed]}")


def _table(nodes: list[NodeStatus]) -> Table:
    table = Table("node", "address", "profile", "power", "ssh", box=None, pad_edge=False)
    table.add_column("processes", justify="right")
    table.add_column("memory", justify="right")
    for node in nodes:
        table.add_row(
            node.name,
            node.address,
            node.profile if node.driver else f"{node.profile} without driver",
            "on" if node.on else "[red]off[/]",
            "answers" if node.ssh else "[red]silent[/]",
            str(node.processes),
            f"{node.memory / 1e6:.0f} MB",
        )
    return table


@lab.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("node")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
@click.pass_context
def ssh(ctx: click.Context, node: str, command: tuple[str, ...]) -> None:
    """Log in to NODE as root, or run COMMAND there."""
    room = _open(ctx, "reads the SSH key of the nodes")
    room.facts.node(node)  # the error lists the nodes of the lab
    sys.stdout.flush()
    os.execvp("ssh", ["ssh", "-F", str(room.facts.ssh_config), node, *command])


@lab.command()
@click.argument("node")
@click.argument("action", type=click.Choice(["off", "on", "cycle"]))
@click.pass_context
def power(ctx: click.Context, node: str, action: str) -> None:
    """Cut NODE's power, switch NODE on, or both; for a clean shutdown run `poweroff` in NODE."""
    _open(ctx, "kills and starts the node's processes").power(node, action)


@lab.command()
@click.argument("node")
@click.argument("action", type=click.Choice(["cut", "heal", "loss", "delay", "deaf", "rate"]))
@click.argument("amount", required=False)
@click.pass_context
def net(ctx: click.Context, node: str, action: str, amount: str | None) -> None:
    """
    Damage NODE's network link, or repair it.

    The damages are cut, loss PERCENT, delay MILLISECONDS, rate RATE (1mbit) and deaf OTHER-NODE.
    With deaf, only the packets from OTHER-NODE to NODE are lost. A damage stays until you set it
    again or run heal.
    """
    _open(ctx, "changes network interfaces").net(node, action, amount)


@lab.command("vendor")
@click.argument("state", required=False, type=click.Choice(list(states.STATES)))
@click.pass_context
def vendor_state(ctx: click.Context, state: str | None) -> None:
    """
    Bring the vendor's package repository into STATE, or show its present state.

    The state stays until you set it again; `good` repairs the repository.
    """
    room = _open(ctx, "writes the lab's files")
    folder = room.state / "vendor"
    if state is not None:
        states.put(folder, state)
    now = states.current(folder)
    click.echo(f"vendor repository: {now}: {states.STATES[now]}")


@lab.command()
@click.argument("node", required=False)
@click.argument("fault", required=False)
@click.option("--gpu", type=int, help="The GPU with the fault (default: 0).")
@click.option("--clear", is_flag=True, help="Clear all faults of NODE.")
@click.option("--list", "listed", is_flag=True, help="Show all faults, or NODE's possible faults.")
@click.pass_context
def fault(
    ctx: click.Context,
    node: str | None,
    fault: str | None,
    *,
    gpu: int | None,
    clear: bool,
    listed: bool,
) -> None:
    """
    Set FAULT on NODE's hardware or software, at once if NODE runs.

    A node can have several faults. A fault stays until you clear it, also through reboots.
    """
    if (fault is not None) + clear + listed != 1 or (node is None and not listed):
        raise click.UsageError("write NODE FAULT, NODE --clear, or [NODE] --list.")
    if gpu is not None and fault is None:
        raise click.UsageError("--gpu needs a FAULT.")
    if listed:
        _list_faults(ctx, node)
        return
    room = _open(ctx, "writes into the node")
    if fault is not None:
        new = room.fault(str(node), fault, gpu)
        click.echo(f"{node}: {new}: {faults.FAULTS[new.fault].says}")
        return
    for gone in room.clear(str(node)):
        click.echo(f"{node}: {gone} is cleared")


def _list_faults(ctx: click.Context, node: str | None) -> None:
    """Print each fault with a sentence; for a node, its possible and its active faults."""
    names, have = list(faults.FAULTS), []
    if node is not None:
        room = _open(ctx, "reads the lab's files")
        asked = room.facts.node(node)
        possible = faults.possible(Profile.of(asked.profile))
        names = [name for name in possible if asked.driver or name not in BY_HAND]
        have = [each.fault for each in room.faults(node)]
    table = Table("fault", "what is wrong", box=None, pad_edge=False)
    for name in names:
        offline = f" [dim](not live: {OFFLINE[name]})[/]" if name in OFFLINE else ""
        on = "[red]on[/] " if name in have else ""
        table.add_row(name, f"{on}{faults.FAULTS[name].says}{offline}")
    Console().print(table)
