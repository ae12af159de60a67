"""`gpufleet monitoring ...`: write files for your own monitoring servers, and silence alerts."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from gpufleet.cli import completers
from gpufleet.cli.common_options import FleetCommand, inventory_argument, json_option, operator_name
from gpufleet.cli.fleet_inputs import use_gevent
from gpufleet.cli.strict_command import StrictCommand
from gpufleet.errors import FleetError

if TYPE_CHECKING:
    from gpufleet.inventory.loader import Fleet
    from gpufleet.monitoring.rules.capacity_rules import MeasuredReplica
    from gpufleet.monitoring.silences import Silence
    from gpufleet.serving.servers import Server
    from gpufleet.settings.monitoring_settings import Monitoring

# Time for a request of 10 s for each silence, and for the connection.
SECONDS = 60


_nodes = click.argument(
    "nodes", metavar="NODE...", nargs=-1, required=True, shell_complete=completers.nodes
)


@click.group()
def monitoring() -> None:
    """Write rules and dashboards, and silence alerts."""


@monitoring.command(cls=StrictCommand)
@click.argument("directory", metavar="DIR", type=click.Path(path_type=Path))
@click.argument(
    "inventory_file",
    metavar="[INVENTORY]",
    required=False,
    shell_complete=completers.inventories,
)
@click.option(
    "--ask/--no-ask",
    default=True,
    help="Query the nodes for running vLLM servers. Without a query, the servers in DIR are kept.",
)
def render(directory: Path, inventory_file: str | None, *, ask: bool) -> None:
    """
    Write rules, scrape configuration, routes and dashboards to DIR, for your own monitoring.

    \b
    gpufleet monitoring render /srv/monitoring
    gpufleet monitoring render /srv/monitoring inventories/prod.py

    Without INVENTORY, the scrape configuration has no targets. The command queries nodes but does
    not change them. It refuses to overwrite files in DIR that it did not write, or that were
    changed since. With --no-ask, there are no alerts on measured rates, because they apply only to
    running servers.
    """
    from gpufleet.monitoring import output_folder, prometheus
    from gpufleet.monitoring.render import needed_secrets, render_files
    from gpufleet.settings.monitoring_settings import Monitoring

    wanted, nodes = Monitoring(), {}
    servers: tuple[Server, ...] = ()
    silent: frozenset[str] = frozenset()
    measured: tuple[MeasuredReplica, ...] = ()
    if inventory_file:
        if ask:
            use_gevent()  # before pyinfra is imported
        from gpufleet.inventory.loader import read

        fleet = read(inventory_file)
        nodes = dict(fleet.nodes)
        wanted = _declared(fleet)
        silent = frozenset(fleet.gpu_nodes)
        if ask and silent:
            servers, silent, measured = _running(fleet, inventory_file)
    scrapes = prometheus.keep_silent_targets(
        prometheus.scrapes(nodes, servers), _before(directory / "prometheus"), silent
    )
    for remark in prometheus.unreachable_servers(nodes, servers, ""):
        click.echo(f"note: {remark}", err=True)
    done = output_folder.write(directory, render_files(wanted, nodes, scrapes, measured))
    for line in done or [f"nothing to write: {directory} is up to date"]:
        click.echo(line)
    for path, file in sorted(needed_secrets(wanted, scrapes).items()):
        if not (directory / path).exists():
            click.echo(
                f"note: copy the content of {file} to {directory / path}, and set the mode "
                "of the copy to 0640",
                err=True,
            )


@monitoring.command(cls=FleetCommand)
@inventory_argument
@_nodes
@click.option("--for", "length", metavar="TIME", default="30m", show_default=True, help="Duration.")
@click.option(
    "--why", metavar="TEXT", required=True, help="Reason, which the list of silences shows."
)
def silence(inventory_file: str, nodes: tuple[str, ...], length: str, why: str) -> None:
    """
    Silence alerts about NODE... for a time.

    \b
    gpufleet monitoring silence inventories/prod.py gpu-07 --for 30m --why "new driver"

    The alerts still fire and are shown, but no notifications are sent. The silence ends by itself
    after this time.
    """
    from gpufleet.monitoring import silences

    now = dt.datetime.now(dt.UTC)
    until = now + silences.duration(length)
    fleet = _read(inventory_file, nodes)
    by = operator_name()
    wanted = [silences.new_silence(node, by, why, until, now) for node in nodes]
    for home, found in _asked(fleet, inventory_file, wanted).items():
        click.echo(f"{home}: {', '.join(nodes)} silent until {_moment(until)}")
        for each in found:
            if each.ours and set(each.nodes) & set(nodes) and each.until > until:
                click.echo(f"note: {home}: {_line(each)} lasts longer", err=True)


@monitoring.command(cls=FleetCommand)
@inventory_argument
@_nodes
def unsilence(inventory_file: str, nodes: tuple[str, ...]) -> None:
    """
    End the silences for NODE... that `gpufleet monitoring silence` created. Other silences stay.
    """
    from gpufleet.monitoring import silences

    fleet = _read(inventory_file, nodes)
    found = _asked(fleet, inventory_file)
    closing = {home: silences.silences_to_close(each, nodes) for home, each in found.items()}
    left = _asked(
        fleet, inventory_file, close={home: [s.id for s in each] for home, each in closing.items()}
    )
    for home, gone in closing.items():
        for each in gone:
            click.echo(f"{home}: ended: {_line(each)}")
        if not gone:
            click.echo(f"{home}: there is no silence by gpufleet for {', '.join(nodes)}")
        for each in left[home]:
            if set(each.nodes) & set(nodes):
                click.echo(f"note: {home}: still there: {_line(each)}", err=True)


@monitoring.command("silences", cls=FleetCommand)
@inventory_argument
@json_option
def list_silences(inventory_file: str, *, as_json: bool) -> None:
    """List the silences: which alerts, who created the silence, why, and until when."""
    found = _asked(_read(inventory_file, ()), inventory_file)
    if as_json:
        shown = {home: [each.as_json() for each in those] for home, those in found.items()}
        click.echo(json.dumps(shown, indent=2))
        return
    for home, those in found.items():
        for each in those:
            click.echo(f"{home}: {_line(each)}")
        if not those:
            click.echo(f"{home}: no silences")


def _declared(fleet: Fleet) -> Monitoring:
    """
    Return the inventory's monitoring settings. If nodes have different ones, use the first node's.
    """
    from gpufleet.settings.monitoring_settings import Monitoring

    found = {name: m for name, node in fleet.nodes.items() if (m := node.settings.monitoring)}
    if not found:
        return Monitoring()
    first = next(iter(found))
    if any(each != found[first] for each in found.values()):
        click.echo(
            f"note: the monitoring nodes have different settings; the settings of {first} are used",
            err=True,
        )
    return found[first]


def _running(
    fleet: Fleet, inventory_file: str
) -> tuple[tuple[Server, ...], frozenset[str], tuple[MeasuredReplica, ...]]:
    """Return the running servers, the nodes that did not answer, and the measured replicas."""
    from gpufleet.fleet import fleet_plan
    from gpufleet.fleet.live import probe
    from gpufleet.fleet.measured_rates import rates_for_rules
    from gpufleet.serving.servers import running_servers

    answers = probe(inventory_file)
    there = {name: said for name, said in answers.items() if not isinstance(said, str)}
    for name, said in answers.items():
        if isinstance(said, str):
            click.echo(
                f"note: {name}: {said}; the targets of this node in the directory are kept",
                err=True,
            )
    measured, problems = rates_for_rules(fleet, answers)
    for problem in problems:
        click.echo(f"note: {problem}", err=True)
    silent = frozenset(answers) - frozenset(there)
    return running_servers(fleet_plan.running_stages(there)), silent, measured


def _before(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the contents of the files with scrape targets that are already in a directory."""
    found = {}
    for path in directory.glob("targets/*.json"):
        try:
            found[f"targets/{path.name}"] = json.loads(path.read_bytes())
        except (OSError, ValueError) as error:
            raise FleetError(f"{path}: cannot be read: {error}") from None
    return found


def _read(inventory_file: str, nodes: Iterable[str]) -> Fleet:
    """Return the inventory. Raises `FleetError` for nodes that it does not have."""
    use_gevent()  # before pyinfra is imported
    from gpufleet.formatting import suggestion
    from gpufleet.inventory.loader import read

    fleet = read(inventory_file)
    if unknown := [name for name in nodes if name not in fleet.nodes]:
        raise FleetError(
            *(f"{inventory_file} has no {n!r}{suggestion(n, list(fleet.nodes))}" for n in unknown)
        )
    return fleet


def _asked(
    fleet: Fleet,
    inventory_file: str,
    wanted: Iterable[Mapping[str, Any]] = (),
    close: Mapping[str, Iterable[str]] | None = None,
) -> dict[str, tuple[Silence, ...]]:
    """
    Create and end silences on every Alertmanager of the inventory. Return all silences by node.

    Raises `FleetError` if there is no Alertmanager, and with a problem for each one that failed.
    """
    from gpufleet.fleet.live import connect
    from gpufleet.monitoring import silences
    from gpufleet.remote import payload
    from gpufleet.upgrade.run.wave_silences import alertmanagers

    homes = alertmanagers(fleet.nodes)
    if not homes:
        raise FleetError(
            f"{inventory_file} has no node with `monitoring.alertmanager`, so there are no silences"
        )

    def program(home: str) -> str:
        ends = list((close or {}).get(home, ()))
        return payload.program(
            "monitoring/silences", url=homes[home], open=list(wanted), close=ends
        )

    with connect(inventory_file, tuple(homes)) as ask:
        answers = ask(program, SECONDS, "the query of silences")
    problems: list[str] = []
    found = {}
    for home, said in answers.items():
        try:
            found[home] = silences.read_answer(home, said)
        except FleetError as error:
            problems += error.problems
    if problems:
        raise FleetError(*problems)
    return found


def _line(found: Silence) -> str:
    from gpufleet.sanitize import printable

    about = ", ".join(found.nodes) or "not about a node"
    return printable(f"{about} until {_moment(found.until)}, {found.by}: {found.why}")


def _moment(moment: dt.datetime) -> str:
    return moment.astimezone(dt.UTC).strftime("%Y-%m-%d %H:%M UTC")
