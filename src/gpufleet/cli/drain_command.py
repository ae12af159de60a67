"""`gpufleet cordon`, `uncordon`, `drain` and `undrain`: a person takes a node out of service.

Thin: `draining.py` says what a drain is about, `on_node/change/change.py` makes the marks, and
`upgrade/run/traffic.py` tells gateways, as an upgrade does.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import click

from gpufleet.cli import completers
from gpufleet.cli.common_options import (
    fleet_command,
    inventory_argument,
    json_option,
    nodes_argument,
    operator_name,
)
from gpufleet.cli.fleet_inputs import use_gevent
from gpufleet.errors import FleetError
from gpufleet.sanitize import printable

if TYPE_CHECKING:
    from gpufleet.fleet.draining import Drain
    from gpufleet.inventory.loader import Fleet
    from gpufleet.node.marks import Mark
    from gpufleet.upgrade.run.connections import Nodes
    from gpufleet.upgrade.run.node_answers import Marks, NodeLook
    from gpufleet.upgrade.run.traffic import Frontends

# How long gateways are tried, where one does not answer at once.
TELL_SECONDS = 60

_why = click.option("--why", metavar="TEXT", required=True, help="Reason; shown to others.")
_force_mark = click.option(
    "--force", is_flag=True, help="Also lift the mark of an unfinished upgrade."
)


@fleet_command()
@inventory_argument
@nodes_argument
@_why
@json_option
def cordon(inventory_file: str, names: tuple[str, ...], why: str, *, as_json: bool) -> int:
    """
    Stop placing replicas on a node; running ones stay.

    \b
    gpufleet cordon inventories/prod.py gpu-07 --why "disk makes noises"

    Upgrades do not lift it. A node that is already cordoned keeps its reason.

    Exit status: 0 all are cordoned, 2 one is not, or is unknown.
    """
    from gpufleet.upgrade.run import node_questions

    asked = node_questions.cordon(operator_name(), why)
    return _change_marks(inventory_file, names, lambda _: asked, as_json=as_json)


@fleet_command()
@inventory_argument
@nodes_argument
@_force_mark
@json_option
def uncordon(inventory_file: str, names: tuple[str, ...], *, force: bool, as_json: bool) -> int:
    """
    Allow replicas to be placed on a node again.

    Nodes that are drained stay drained.

    \b
    gpufleet uncordon inventories/prod.py gpu-07

    Exit status: 0 uncordoned, 1 a mark stays (an upgrade's: see --force), 2 error.
    """
    from gpufleet.upgrade.run import node_questions

    asked = node_questions.uncordon(force=force)
    return _change_marks(inventory_file, names, lambda _: asked, as_json=as_json)


@fleet_command()
@inventory_argument
@click.argument("name", metavar="NODE", shell_complete=completers.nodes)
@_why
@click.option(
    "--seconds",
    type=click.IntRange(min=0, max=86400),
    help="Seconds to wait for requests.  [default: the longest `drain_seconds` of its models]",
)
@click.option("--force", is_flag=True, help="Drain even if no other replica serves a model.")
@json_option
def drain(
    inventory_file: str, name: str, why: str, *, seconds: int | None, force: bool, as_json: bool
) -> int:
    """
    Cordon a node and wait for its requests to finish.

    Gateways stop sending requests to the replicas of NODE.

    \b
    gpufleet drain inventories/prod.py gpu-07 --why "new power supply"

    No process is stopped. A replica that spans nodes is drained on all of them. Requests that do
    not finish in time are counted and continue.

    Exit status: 0 no request is left, 1 some are, or it is unknown, 2 error.
    """
    with _Session(inventory_file, (name,)) as session:
        found = session.drain(name, why, seconds, force=force)
    _print_result(found, as_json=as_json)
    return int(not found["quiet"])


@fleet_command()
@inventory_argument
@click.argument("name", metavar="NODE", shell_complete=completers.nodes)
@_force_mark
@json_option
def undrain(inventory_file: str, name: str, *, force: bool, as_json: bool) -> int:
    """
    Send requests to a node's replicas again.

    Gateways use them again, and the drain's cordon is lifted.

    \b
    gpufleet undrain inventories/prod.py gpu-07

    A cordon from before the drain stays: lift it with `gpufleet uncordon`.

    Exit status: 0 all receive requests, 1 a mark stays (an upgrade's: see --force), 2 error.
    """
    with _Session(inventory_file, (name,)) as session:
        found = session.undrain(name, force=force)
    _print_result(found, as_json=as_json)
    return int(bool(found["problems"]))


class _Session:
    """The nodes of an inventory while one of them is drained, with connections that stay open."""

    def __init__(self, inventory_file: str, names: tuple[str, ...]) -> None:
        self.declared = _load_inventory(inventory_file, names)
        from gpufleet.upgrade.run.connections import open_nodes

        self._opened = open_nodes(inventory_file)

    def __enter__(self) -> _Session:
        from gpufleet.upgrade.run.traffic import Frontends

        self.nodes: Nodes = self._opened.__enter__()
        self.front: Frontends = Frontends(self.nodes, self.declared)
        return self

    def __exit__(self, *about: Any) -> None:
        self._opened.__exit__(*about)

    def drain(self, name: str, why: str, seconds: int | None, *, force: bool) -> dict[str, Any]:
        """Drain a node; return the outcome."""
        from gpufleet.fleet import draining
        from gpufleet.node.marks import deploy_problems
        from gpufleet.upgrade.run import node_questions

        found, looks = self._find_drain(name)
        deploys = {node: each for node in found.every_node if (each := looks[node].deploy)}
        if problems := deploy_problems(deploys):
            raise FleetError(*problems)
        if not force and (refused := draining.refusal(found)):
            raise FleetError(refused)
        by = operator_name()
        marks = self._set_marks({name: node_questions.cordon(by, why)})
        # Marks before gateways: killed in between, the fleet says what was about to happen.
        marks |= self._set_marks(
            {
                node: node_questions.drain(found.replicas_on(node), by, why)
                for node in found.every_node
                if found.replicas_on(node)
            }
        )
        # A deploy has begun since they were looked at.
        if problems := tuple(f"{n}: {m.problem}" for n, m in marks.items() if m.problem):
            raise FleetError(*problems)
        began = time.monotonic()
        self.front.set_servers("drain", found.servers, TELL_SECONDS)
        limit = self._drain_seconds(name, looks) if seconds is None else seconds
        left, unknown = self._wait_until_quiet(found, limit)
        return {
            "node": name,
            "did": "drained",
            "replicas": list(found.replicas),
            "cordon": _mark_json(marks[name].cordon),
            "told": self.front.is_declared(),
            "left": left,
            "unknown": unknown,
            "seconds": round(time.monotonic() - began, 1),
            "quiet": not left and not unknown,
            "problems": [] if self.front.is_declared() else [_NOBODY],
        }

    def undrain(self, name: str, *, force: bool) -> dict[str, Any]:
        """Undo a drain; return the outcome."""
        from gpufleet.upgrade.run import node_questions

        found, looks = self._find_drain(name)
        # A replica that is drained without a unit here (it was stopped) is undrained as well.
        here = {**dict.fromkeys(looks[name].drained, (name,)), **found.nodes}
        stays = {
            replica: mark
            for replica, mark in looks[name].drained.items()
            if mark.upgrade is not None and not force
        }
        problems = [f"{replica} stays drained: {mark}" for replica, mark in sorted(stays.items())]
        free = sorted(set(here) - set(stays))
        # Gateways before marks: killed in between, it is done again.
        self.front.set_servers(
            "ready", [each for each in found.servers if each["replica"] in free], TELL_SECONDS
        )
        wanted: dict[str, list[str]] = {}
        for replica in free:
            for node in here[replica]:
                wanted.setdefault(node, []).append(replica)
        marks = self._set_marks(
            {node: node_questions.undrain(each, force=force) for node, each in wanted.items()}
        )
        problems += [each.problem for each in marks.values() if each.problem]
        kept = looks[name].cordon
        if kept and _is_of_drain(kept, looks[name].drained.values()):
            kept = self._set_marks({name: node_questions.uncordon(force=force)})[name].cordon
        return {
            "node": name,
            "did": "undrained",
            "replicas": free,
            "cordon": _mark_json(kept),
            "told": self.front.is_declared(),
            "problems": problems,
        }

    def _find_drain(self, name: str) -> tuple[Drain, Mapping[str, NodeLook]]:
        """Return the replicas that a drain of a node affects, and the marks of its nodes."""
        from gpufleet.fleet import draining, fleet_plan
        from gpufleet.upgrade.run import observe

        answers = observe.survey(self.nodes, self.declared)
        if isinstance(said := answers[name], str):
            raise FleetError(f"{name}: {said}")
        documents = {node: each for node, each in answers.items() if not isinstance(each, str)}
        looks = observe.look(self.nodes, documents)
        out = {(node, replica) for node, each in looks.items() for replica in each.drained}
        found = draining.find_drain(name, fleet_plan.running_stages(documents), out)
        return found, looks

    def _set_marks(self, wanted: Mapping[str, Any]) -> dict[str, Marks]:
        from gpufleet.upgrade.run.node_answers import Marks

        return self.nodes.ask_until(wanted, Marks.read, 0)

    def _drain_seconds(self, name: str, looks: Mapping[str, NodeLook]) -> int:
        """Return the longest `drain_seconds` of what runs on a node, or of all that it declares."""
        serving = self.declared.gpu_nodes[name].settings.serving
        here = {
            model
            for model in serving
            for unit in looks[name].units.values()
            if unit.replica.rpartition("-")[0] == model
        }
        return max((serving[model].drain_seconds for model in here or serving), default=0)

    def _wait_until_quiet(self, found: Drain, seconds: int) -> tuple[int, list[str]]:
        """Wait for requests to end; return how many are left, and the servers that do not say."""
        from gpufleet.upgrade.run import node_questions
        from gpufleet.upgrade.run.node_answers import RequestsLeft

        end = time.monotonic() + seconds
        queued = self.front.wait(found.servers, seconds)
        asked = {
            node: node_questions.wait_quiet(
                [f"vllm-{each}.service" for each in found.replicas_on(node)],
                max(0.0, end - time.monotonic()),
            )
            for node in found.every_node
            if found.replicas_on(node)
        }
        answers = self.nodes.ask_until(asked, RequestsLeft.read, 0)
        left = max(queued, sum(each.total for each in answers.values()))
        return left, sorted(url for each in answers.values() for url in each.unknown)


_NOBODY = "no gateway and no `balancer` is declared: clients keep sending requests to this node"


def _is_of_drain(cordon: Mark, drained: Any) -> bool:
    """Return whether a cordon is the one that a drain made."""
    return any((each.by, each.why) == (cordon.by, cordon.why) for each in drained)


def _change_marks(
    inventory_file: str,
    names: tuple[str, ...],
    question: Callable[[str], Any],
    *,
    as_json: bool,
) -> int:
    """Ask nodes for a mark, and say what they have now."""
    _load_inventory(inventory_file, names)
    from gpufleet.fleet import live
    from gpufleet.upgrade.run.node_answers import Marks

    asked = question(names[0])
    problems: list[str] = []
    found: dict[str, Marks] = {}
    with live.connect(inventory_file, names) as ask:
        answers = ask(lambda _: asked.program, asked.seconds, asked.what)
    for name in dict.fromkeys(names):
        try:
            found[name] = Marks.read(name, answers.get(name, "it was not queried"))
        except FleetError as error:
            problems += error.problems
    if as_json:
        shown = {
            name: {"cordon": _mark_json(each.cordon), "changed": bool(each.changed)}
            | ({"problem": each.problem} if each.problem else {})
            for name, each in found.items()
        }
        click.echo(json.dumps(shown, indent=2))
    else:
        for name, each in found.items():
            click.echo(_marks_line(name, each))
    if problems:
        raise FleetError(*problems)
    return int(any(each.problem for each in found.values()))


def _marks_line(name: str, marks: Marks) -> str:
    if marks.problem:
        return printable(f"{name}: {marks.problem}")
    if marks.cordon is None:
        return f"{name}: is not cordoned{'' if marks.changed else ', and was not'}"
    drained = f"; drained: {', '.join(sorted(marks.drained))}" if marks.drained else ""
    already = "" if marks.changed else " already"
    since = _timestamp(marks.cordon)
    return f"{name}: is cordoned{already} by {marks.cordon} (since {since}){drained}"


def _print_result(found: Mapping[str, Any], *, as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps(found, indent=2))
        return
    name, replicas = found["node"], ", ".join(found["replicas"]) or "no replica"
    if found["did"] == "undrained":
        click.echo(
            f"{name}: {replicas} {'gets' if len(found['replicas']) == 1 else 'get'} requests"
        )
        if mark := found["cordon"]:
            click.echo(printable(f"{name}: stays cordoned by {mark['by']}: {mark['why']}"))
    elif found["quiet"]:
        click.echo(f"{name}: {replicas} drained, no request left after {found['seconds']} s")
    else:
        silent = f"; {', '.join(found['unknown'])} did not say" if found["unknown"] else ""
        click.echo(
            f"{name}: {replicas} drained, {found['left']} requests left after "
            f"{found['seconds']} s{silent}: they go on; `gpufleet drain` again waits on"
        )
    for problem in found["problems"]:
        click.echo(printable(f"note: {problem}"), err=True)


def _mark_json(mark: Mark | None) -> dict[str, Any] | None:
    if mark is None:
        return None
    return {"by": mark.by, "why": mark.why, "since": _timestamp(mark), "upgrade": mark.upgrade}


def _timestamp(mark: Mark) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(mark.since))


def _load_inventory(inventory_file: str, names: tuple[str, ...]) -> Fleet:
    """Return what an inventory declares. Raises `FleetError` for a name that is not a GPU node."""
    use_gevent()
    from gpufleet.formatting import suggestion
    from gpufleet.inventory.loader import read

    declared = read(inventory_file)
    known = list(declared.gpu_nodes)
    if strange := [name for name in names if name not in known]:
        raise FleetError(
            *(
                f"{inventory_file} has no GPU node {name!r}{suggestion(name, known)}"
                for name in strange
            )
        )
    return declared
