"""`gpufleet ...`: looks at a fleet before anything is done with it, and changes it under load.

With `--record` what was found is written on the nodes, for their exporters. What changes a node is
named for it: `upgrade`, `rollback`, and marks as `cordon`; all else only looks.
Thin: reads files, calls the modules that know, prints. Mistakes of the operator end in one line
`error: ...` each on stderr and status 2, never in a traceback; Ctrl-C ends in status 130.
"""

from __future__ import annotations

import atexit
import gc
import json
import signal
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NoReturn

import click

from gpufleet.errors import FleetError
from gpufleet.sanitize import printable

if TYPE_CHECKING:
    from gpufleet.fleet.node_records import Samples
    from gpufleet.inventory.loader import Fleet
    from gpufleet.remote.query import Answer
    from gpufleet.serving.logs import Journals, Line
    from gpufleet.settings.node_variables import NodeVars

CHECKOUT = Path(__file__).resolve().parents[3]

# Between two looks at journals that are followed. A look costs a node one short Python process.
FOLLOW_SECONDS = 2

INTERRUPTED = 128 + signal.SIGINT  # as a shell has it

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")
record_option = click.option(
    "--record", is_flag=True, help="Write on each node what was found there, for alerts."
)
# Of `--record`: one small file on each node; connecting is what may take time.
RECORD_SECONDS = 30


# Commands with a module of their own, loaded only when one is named: `lab` needs the checkout, and
# none may slow the others down.
_GROUPS = {
    "bundle": "A mirror of all that nodes download, for a network without the internet.",
    "cordon": "Place nothing new on a node; what runs there stays.",
    "drain": "Cordon a node, send it no requests, and wait until it has none.",
    "drift": "What on the nodes is not as declared, now or after the next reboot.",
    "flags": "What vLLM's flags are in each release, and a command line judged by it.",
    "import": "What you have (models.yml, vllm serve, docker run, compose) as settings.",
    "lab": "Real Linux nodes with simulated GPUs.",
    "lock": "What a group's nodes run, written down so that they keep to it.",
    "monitoring": "Rules, dashboards and scraping for servers of yours, and silences of alerts.",
    "rollback": "Bring every replica that the last upgrade changed back to what it was.",
    "size": "What a model takes on one GPU, and whether it starts with these options.",
    "uncordon": "Let new replicas be placed on a node again.",
    "undrain": "Send requests to a node's replicas again.",
    "upgrade": "Bring a fleet to what is declared while it serves, wave by wave.",
}


class _Commands(click.Group):
    """The commands, and the groups of commands."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_GROUPS])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _GROUPS:
            return super().get_command(ctx, cmd_name)
        if "--help" in sys.argv[1:2] or "-h" in sys.argv[1:2]:  # only its name is asked for
            return click.Command(cmd_name, help=_GROUPS[cmd_name])
        loaders = {
            "bundle": _bundle,
            "cordon": lambda: _cordoning("cordon"),
            "drain": lambda: _cordoning("drain"),
            "drift": _drift,
            "flags": _flags,
            "import": _import,
            "lab": _lab,
            "lock": _lock,
            "monitoring": _monitoring,
            "rollback": _rollback,
            "size": _size,
            "uncordon": lambda: _cordoning("uncordon"),
            "undrain": lambda: _cordoning("undrain"),
            "upgrade": _upgrade,
        }
        return loaders[cmd_name]()


@click.group(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="gpufleet")
def gpufleet() -> None:
    """Look at a GPU fleet: what is declared for it, what it is, what it would serve."""


@gpufleet.command()
@click.argument("inventory_file", metavar="INVENTORY")
@click.argument("node", required=False)
@json_option
def inventory(inventory_file: str, node: str | None, as_json: bool) -> None:
    """Show every value of the nodes of INVENTORY, or of one NODE, and the line that set it."""
    from gpufleet.cli import tables
    from gpufleet.inventory.loader import read

    fleet = read(inventory_file)
    names = _selected(list(fleet.nodes), (node,) if node else (), inventory_file)
    if as_json:
        _print_json(fleet.as_json(names))
        return
    tables.display(tables.nodes_table(fleet, names))
    click.echo()
    tables.display(tables.values_table(fleet, names))
    for remark in fleet.remarks:
        click.echo(f"note: {remark}", err=True)


@gpufleet.command()
@click.argument("inventory_file", metavar="INVENTORY")
@click.option("--limit", multiple=True, help="Only this node or group; may be repeated.")
@json_option
def probe(inventory_file: str, limit: tuple[str, ...], as_json: bool) -> None:
    """Ask the nodes of INVENTORY what they are. Installs nothing on them."""
    cooperate()
    from gpufleet.cli import tables
    from gpufleet.fleet import run as fleet
    from gpufleet.fleet.assessment import every
    from gpufleet.inventory.loader import read
    from gpufleet.node.topology import node_from_probe

    wanted = limited(read(inventory_file), limit)
    documents = every(fleet.probe(inventory_file, wanted))
    if as_json:
        _print_json(documents)
        return
    nodes = [node_from_probe(name, document) for name, document in documents.items()]
    tables.display(tables.probe_table(nodes))


@gpufleet.command()
@click.argument("inventory_file", metavar="[INVENTORY]", required=False)
@click.option("--limit", multiple=True, help="Only this node or group; may be repeated.")
@click.option(
    "--from", "files", multiple=True, metavar="FILE", help="Judge recorded probes, not live nodes."
)
@click.option("--vars", "vars_file", metavar="FILE", help="With --from: the variables of all.")
@click.option("--all", "everything", is_flag=True, help="Show the checks that passed, too.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=1, max=3600),
    default=60,
    show_default=True,
    help="Deadline for every node.",
)
@click.option("--list", "listing", is_flag=True, help="Name every check, and do nothing.")
@record_option
@json_option
def check(
    inventory_file: str | None,
    *,
    limit: tuple[str, ...],
    files: tuple[str, ...],
    vars_file: str | None,
    everything: bool,
    seconds: float,
    listing: bool,
    record: bool,
    as_json: bool,
) -> int:
    """
    Say whether the nodes of INVENTORY are fit to serve. Reads only, installs nothing.

    \b
    gpufleet check inventories/prod.py
    gpufleet check inventories/prod.py --json > report.json
    gpufleet check inventories/prod.py --record
    gpufleet check --from report.json

    With --record each node is told what was found on it, one small file, for alerts.

    Exit status: 0 fit, 1 something is blocked or could not be checked, 2 could not run.
    """
    from gpufleet.cli import tables
    from gpufleet.fleet.assessment import judged

    if listing:
        tables.display(tables.checks_table())
        return 0
    if bool(inventory_file) == bool(files):
        raise click.UsageError("Give one INVENTORY, or recorded probes with --from.")
    if inventory_file:
        if vars_file:
            raise click.UsageError("--vars is for --from: an inventory has its own variables.")
        answers, declared = live(inventory_file, limit, seconds)
    else:
        if record:
            raise click.UsageError("--record is for live nodes: leave it out with --from.")
        recorded = documents(files)
        names = _selected(list(recorded), limit, ", ".join(files))
        answers = {name: recorded[name] for name in names}
        declared = _declared(vars_file, names) if vars_file else {}
    report = judged(answers, declared)
    if as_json:
        _print_json(report.as_json())
    else:
        tables.display(tables.report(report, everything=everything))
    if inventory_file and record:
        import time

        from gpufleet.fleet import node_records

        now = time.time()
        write_down(
            inventory_file,
            node_records.CHECK,
            {
                name: node_records.of_check(
                    report.of_nodes[name], node_records.probed_at(answer, now)
                )
                for name, answer in answers.items()
            },
        )
    return int(report.verdict().stops)


@gpufleet.command()
@click.argument("targets", metavar="[INVENTORY]", nargs=-1)
@click.option(
    "--nodes", multiple=True, metavar="FILE...", help="Plan for saved probes, not for live nodes."
)
@click.option("--vars", "vars_file", metavar="FILE", help="With --nodes: the variables of all.")
@click.option(
    "--explain", "explained", is_flag=True, help="Show every candidate, and why it was not taken."
)
@click.option("--diff", "compared", is_flag=True, help="Show what changes against what runs now.")
@json_option
def plan(
    targets: tuple[str, ...],
    *,
    nodes: tuple[str, ...],
    vars_file: str | None,
    explained: bool,
    compared: bool,
    as_json: bool,
) -> None:
    """
    Show which GPUs of which node would serve what, and why. Changes nothing.

    \b
    gpufleet plan inventories/prod.py
    gpufleet plan inventories/prod.py --explain
    gpufleet plan inventories/prod.py --diff
    gpufleet plan --vars serving.yml --nodes probes.json

    The files of --nodes are what `gpufleet probe --json` prints, or one node's probe each, named
    after the node.
    """
    if nodes or vars_file:
        files = (*nodes, *targets)
        if not (files and vars_file):
            raise click.UsageError("--nodes and --vars belong together: give both.")
        answers = documents(files)
        declared: Mapping[str, NodeVars] = _declared(vars_file, answers)
    elif len(targets) == 1:
        answers, declared = live(targets[0])
    else:
        raise click.UsageError("Give one INVENTORY, or --nodes and --vars.")

    from gpufleet.cli import tables
    from gpufleet.fleet.assessment import planned
    from gpufleet.planning.explanation import explain
    from gpufleet.sanitize import printable

    found = planned(answers, declared)
    for remark in found.remarks:
        click.echo(printable(f"note: {remark}"), err=True)
    if as_json:
        _print_json(found.as_json())
        return
    if explained:
        click.echo(printable(explain(found.plan, found.nodes.values())), nl=False)
    if compared:
        tables.display(tables.changes_table(found.changes))
    if explained or compared:
        return
    tables.display(tables.plan_table(found.plan, found.nodes))
    if found.layers:
        click.echo()
        tables.display(tables.layers_table(found.layers))
    click.echo()
    for reason in found.plan.reasons:
        click.echo(printable(reason))


@gpufleet.command()
@click.argument("inventory_file", metavar="INVENTORY")
@click.argument("replica", required=False)
@json_option
def reach(inventory_file: str, replica: str | None, *, as_json: bool) -> int:
    """
    Have the nodes of REPLICA, or of all that span nodes, prove that they reach each other.

    \b
    gpufleet reach inventories/prod.py
    gpufleet reach inventories/prod.py llama-0 --json

    As a deploy does before it starts one: connections from each node's address to each other's, on
    the ports between them, full packets, clocks, the release and the model's files. Ports that are
    in use are left alone, and nothing is installed.

    Exit status: 0 they do, 1 they do not, 2 could not run.
    """
    cooperate()
    from gpufleet.cli import reach_table, tables
    from gpufleet.fleet import run as fleet
    from gpufleet.fleet.assessment import planned
    from gpufleet.operations import check_reachability

    answers, declared = live(inventory_file)
    plan = planned(answers, declared, unfit_stops=False).plan
    spanning = {stage.id: stage for stage in plan.stages if stage.group}
    wanted = _selected(
        list(spanning), (replica,) if replica else (), f"the plan over {inventory_file}"
    )
    settings = {name: each.settings for name, each in declared.items()}
    replicas = [check_reachability.replica(spanning[name], settings) for name in wanted]
    if not replicas:
        click.echo("no replica spans nodes")
        return 0
    nodes = tuple(sorted({node for each in replicas for node in each.nodes}))
    with fleet.asking(inventory_file, nodes) as ask:
        found = [check_reachability.prove(each, ask) for each in replicas]
    if as_json:
        _print_json([each.as_json() for each in found])
    else:
        for each in found:
            tables.display(reach_table.reach(each))
    return int(any(each.problems for each in found))


@gpufleet.command()
@click.argument("inventory_file", metavar="INVENTORY")
@click.option("--limit", multiple=True, help="Only this node or group; may be repeated.")
@click.option("--completion", is_flag=True, help="Ask every endpoint for one token, too.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=1, max=3600),
    help="Deadline for every node.  [default: 40; 100 with --completion]",
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
    Say whether the replicas on the nodes of INVENTORY serve. Reads only, installs nothing.

    \b
    gpufleet status inventories/prod.py
    gpufleet status inventories/prod.py --limit gpu-07
    gpufleet status inventories/prod.py --json

    Every endpoint is asked, on its node, for its health and its models.

    Exit status: 0 all serve, 1 something does not or is not known, 2 could not run.
    """
    cooperate()
    import time

    from gpufleet.cli import status_table, tables
    from gpufleet.fleet import run as fleet
    from gpufleet.inventory.loader import read
    from gpufleet.remote import payload
    from gpufleet.serving import status as rank_status

    declared = read(inventory_file)
    wanted = limited(declared, limit)
    program = payload.program("serving/status", completion=completion)
    with fleet.asking(inventory_file, wanted) as ask:
        answers = ask(
            lambda node: program if node in declared.gpu_nodes else None,
            seconds or (100 if completion else 40),
            "the look",
        )
    found = rank_status.status(answers, declared.gpu_nodes, whole=not limit)
    if as_json:
        _print_json(found.as_json())
    else:
        tables.display(status_table.status(found, time.time()))
    return int(not found.serves)


@gpufleet.command()
@click.argument("inventory_file", metavar="INVENTORY")
@click.argument("replica")
@click.option("--limit", multiple=True, help="Only this node or group; may be repeated.")
@click.option(
    "--since", metavar="TIME", help="From then on: 10m, 2h, 1d ago, or 2026-11-21T19:40 (UTC)."
)
@click.option("--lines", default=200, show_default=True, help="At most so many, the last ones.")
@click.option("--follow", "-f", is_flag=True, help="Go on with what is written from now on.")
@click.option(
    "--seconds",
    type=click.FloatRange(min=1, max=3600),
    default=30,
    show_default=True,
    help="Deadline for every node.",
)
@click.option("--json", "as_json", is_flag=True, help="Print a JSON object a line, for programs.")
def logs(
    inventory_file: str,
    replica: str,
    *,
    limit: tuple[str, ...],
    since: str | None,
    lines: int,
    follow: bool,
    seconds: float,
    as_json: bool,
) -> int:
    """
    Show the journals of the ranks of REPLICA as one, by time. Secrets stay on their nodes.

    \b
    gpufleet logs inventories/prod.py llama-0
    gpufleet logs inventories/prod.py llama-0 --since 10m --lines 2000
    gpufleet logs inventories/prod.py llama-0 --follow

    Exit status: 0 complete, 1 lines of a node are missing, 2 could not run.
    """
    cooperate()
    import gevent

    from gpufleet.fleet import run as fleet
    from gpufleet.inventory.loader import read
    from gpufleet.serving import logs as journals

    wanted = limited(read(inventory_file), limit)
    reading = journals.Journals(replica, lines, journals.since(since))
    with fleet.asking(inventory_file, wanted) as ask:
        while True:
            found = reading.take(ask(reading.program, seconds, "the look at the journal"))
            _print_lines(reading, found, as_json=as_json)
            if not follow:
                return int(not reading.whole)
            gevent.sleep(FOLLOW_SECONDS)


@gpufleet.command()
@click.argument("name", required=False)
@json_option
def presets(name: str | None, as_json: bool) -> None:
    """Show the presets that `presets` of a model may name, or every value of one with reasons."""
    from gpufleet.catalog import presets
    from gpufleet.cli import tables

    wanted = {each: presets.load(each) for each in ((name,) if name else presets.names())}
    if as_json:
        _print_json({each: preset.model_dump(mode="json") for each, preset in wanted.items()})
    elif name:
        click.echo(wanted[name].situation + "\n")
        tables.display(tables.preset_table(wanted[name]))
    else:
        tables.display(tables.presets_table(wanted))


@gpufleet.command()
@click.argument("source")
@click.argument("node", required=False)
@click.option("--svg", "svg_file", metavar="FILE", help="Draw it into this file, too.")
@json_option
def topology(source: str, node: str | None, svg_file: str | None, as_json: bool) -> None:
    """
    Show what joins the GPUs of a node, and how far tensor parallelism may go on it.

    \b
    nvidia-smi topo -m | gpufleet topology -
    gpufleet topology topo.txt --svg node.svg
    gpufleet topology probes.json gpu-01
    gpufleet topology inventories/prod.py gpu-01

    SOURCE is an inventory, what `gpufleet probe --json` or `nvidia-smi topo -m` prints, or - for
    standard input. NODE is needed where SOURCE has several.
    """
    from gpufleet.cli import topology_command

    if topology_command.inventory_of(source):
        cooperate()
    found = topology_command.look(source, node)
    if svg_file:
        from gpufleet.node.topology_svg import svg

        try:
            Path(svg_file).write_text(svg(found), encoding="utf-8")
        except OSError as error:
            raise FleetError(f"{svg_file}: cannot be written: {error.strerror}") from None
    if as_json:
        _print_json(found.as_json())
        return
    from gpufleet.cli import tables
    from gpufleet.node import topology_text

    tables.display(topology_text.picture(found))


def main() -> int:
    """Run the command line; return the exit status."""
    # What is imported stays: looking through it again and again took a fifth of a plan's time.
    gc.set_threshold(100_000, 20, 50)
    atexit.register(gc.freeze)
    try:
        status = gpufleet.main(prog_name="gpufleet", standalone_mode=False)
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except FleetError as error:
        from gpufleet.sanitize import printable

        for problem in error.problems:
            for line in problem.splitlines():
                click.echo(f"error: {printable(line)}", err=True)
        return 2
    except (click.Abort, KeyboardInterrupt):
        click.echo("Interrupted.", err=True)
        return INTERRUPTED
    return status if isinstance(status, int) else 0


# -- where nodes and settings come from ------------------------------------------------------------


def live(
    inventory_file: str, limit: tuple[str, ...] = (), seconds: float = 60
) -> tuple[Mapping[str, Answer], Mapping[str, NodeVars]]:
    """Return what the nodes of an inventory answer, and what it declares of them."""
    cooperate()
    from gpufleet.fleet import run as fleet
    from gpufleet.fleet.model_configs import directories
    from gpufleet.inventory.loader import read

    declared = read(inventory_file)
    wanted = limited(declared, limit)
    models = directories(declared.gpu_nodes)
    return fleet.probe(inventory_file, wanted, seconds, models), declared.gpu_nodes


def limited(declared: Fleet, limit: tuple[str, ...]) -> tuple[str, ...]:
    """Return the nodes and groups that --limit names, none if it is not given."""
    known = [*declared.nodes, *declared.groups.members]
    return tuple(_selected(known, limit, declared.inventory)) if limit else ()


def write_down(inventory_file: str, name: str, samples: Mapping[str, Samples]) -> None:
    """
    Write on each node what was found there, and say on stderr where that could not be.

    The exit status stays that of what was found: a node that cannot be written to has stale
    metrics, for which there is an alert of its own.
    """
    from gpufleet.fleet import node_records
    from gpufleet.fleet import run as fleet
    from gpufleet.remote import payload

    if not samples:
        return
    programs = {
        node: payload.program("monitoring/record", files={name: found})
        for node, found in samples.items()
    }
    with fleet.asking(inventory_file, tuple(samples)) as ask:
        answers = ask(programs.get, RECORD_SECONDS, "the record")
    for problem in node_records.unrecorded(answers, "what was found is"):
        click.echo(printable(f"note: {problem}"), err=True)


def documents(files: tuple[str, ...]) -> Mapping[str, Answer]:
    """Return {node: its probe, or a sentence why there is none} out of files."""
    from gpufleet.node.probe_document import recorded

    documents: dict[str, Any] = {}
    for file in files:
        try:
            text = Path(file).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise FleetError(f"{file}: cannot be read: {error}") from None
        documents |= recorded(text, file, Path(file).stem)
    return documents


def _declared(vars_file: str, nodes: Iterable[str]) -> dict[str, NodeVars]:
    """Return what one file of variables declares for all nodes."""
    from gpufleet.settings import node_variables, variables

    names = list(nodes)
    given = variables.load_file(Path(vars_file))
    return node_variables.check(dict.fromkeys(names, given), dict.fromkeys(names, ()))


def _selected(known: list[str], wanted: tuple[str, ...], where: str) -> list[str]:
    from gpufleet.formatting import suggestion

    if missing := [name for name in wanted if name not in known]:
        raise FleetError(*(f"{where} has no {name!r}{suggestion(name, known)}" for name in missing))
    return list(wanted) or known


def _bundle() -> click.Command:
    from gpufleet.cli.bundle_command import bundle

    return bundle


def _cordoning(name: str) -> click.Command:
    from gpufleet.cli import drain_command

    found: click.Command = getattr(drain_command, name)
    return found


def _drift() -> click.Command:
    from gpufleet.cli.drift_command import drift

    return drift


def _flags() -> click.Command:
    from gpufleet.cli.flags_command import flags

    return flags


def _size() -> click.Command:
    from gpufleet.cli.size_command import size

    return size


def _rollback() -> click.Command:
    from gpufleet.cli.upgrade_command import rollback

    return rollback


def _upgrade() -> click.Command:
    from gpufleet.cli.upgrade_command import upgrade

    return upgrade


def _import() -> click.Command:
    from gpufleet.cli.import_command import import_

    return import_


def _lock() -> click.Command:
    from gpufleet.cli.lock_command import lock

    return lock


def _monitoring() -> click.Command:
    from gpufleet.cli.monitoring_command import monitoring

    return monitoring


def _lab() -> click.Command:
    if not (CHECKOUT / "lab" / "cli.py").is_file():
        raise FleetError(
            "`gpufleet lab` runs from a checkout of the project, whose directory lab/ is not part "
            "of the installed package: clone it and run `make lab` there"
        )
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    from lab.cli import lab

    return lab


def cooperate() -> None:
    """Let gevent, which pyinfra connects with, take over sockets; before anything imports them."""
    from gevent import monkey

    monkey.patch_all()
    # gevent prints a KeyboardInterrupt that meets one of its greenlets, SystemExit it passes on.
    signal.signal(signal.SIGINT, _interrupted)


def _interrupted(_signal: int, _frame: FrameType | None) -> NoReturn:
    click.echo("Interrupted.", err=True)
    sys.exit(INTERRUPTED)


# -- printing --------------------------------------------------------------------------------------


def _print_lines(reading: Journals, found: list[Line], *, as_json: bool) -> None:
    """Print lines as they came, and on stderr what is worth knowing beside them."""
    from gpufleet.serving.logs import shown

    if as_json:
        for line in found:
            click.echo(json.dumps(line.as_json()))
    else:
        for text in shown(found, reading.nodes):
            click.echo(text)
    for note in reading.notes:
        click.echo(f"note: {printable(note)}", err=True)
    reading.notes.clear()


def _print_json(value: Any) -> None:
    click.echo(json.dumps(value, indent=2, default=str))
