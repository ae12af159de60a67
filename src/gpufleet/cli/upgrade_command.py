"""`gpufleet upgrade` and `gpufleet rollback`: change a serving fleet, and undo the change."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from gpufleet.cli import completers
from gpufleet.cli.common_options import (
    INTERRUPTED,
    fleet_command,
    inventory_argument,
    json_option,
    limit_option,
    operator_name,
    print_error,
)
from gpufleet.cli.fleet_inputs import select_limit, use_gevent
from gpufleet.errors import FleetError
from gpufleet.sanitize import printable
from gpufleet.settings import engine_flags
from gpufleet.settings.engine_flags import EngineName

if TYPE_CHECKING:
    from gpufleet.cli.interrupt_keys import InterruptKeys
    from gpufleet.inventory.loader import Fleet
    from gpufleet.settings.upgrade_settings import Upgrade
    from gpufleet.upgrade.plan.wave_plan import WavePlan
    from gpufleet.upgrade.run.connections import Nodes
    from gpufleet.upgrade.run.upgrade_journal import Journal
    from gpufleet.upgrade.run.upgrade_plan import UpgradeRequest

_yes = click.option(
    "--yes", is_flag=True, help="Do not ask, and let the gates of the waves decide."
)
_dry = click.option("--dry", is_flag=True, help="Show the waves, and change nothing.")
_journal = click.option(
    "--journal",
    "folder",
    type=click.Path(file_okay=False, path_type=Path),
    help="Directory of the journals.  [default: .gpufleet/upgrades beside the inventory's project]",
)
_resume = click.option(
    "--resume", is_flag=True, help="Continue the unfinished upgrade or rollback."
)
_abort = click.option(
    "--abort", is_flag=True, help="Undo the current wave of the unfinished upgrade."
)
_steal = click.option(
    "--steal",
    metavar="WHY",
    help="Take over an upgrade that its operator has abandoned, and record this reason.",
)
_outage = click.option(
    "--accept-outage",
    metavar="MODEL",
    multiple=True,
    shell_complete=completers.models,
    help="Accept that this model is not served for a time.",
)
_unknown = click.option(
    "--accept-unknown-load",
    metavar="MODEL",
    multiple=True,
    shell_complete=completers.models,
    help="Assume that this model's replicas are fully loaded.",
)

Command = TypeVar("Command", bound=Callable[..., Any])


def _versions(command: Command) -> Command:
    """Add an option for the version of each engine, such as `--vllm`."""
    for name in reversed(engine_flags.NAMES):
        title = engine_flags.of(name).title
        command = click.option(
            f"--{name}",
            metavar="VERSION",
            help=f"First write this version of {title} to group_vars.",
        )(command)
    return command


@fleet_command()
@inventory_argument
@_versions
@limit_option
@_dry
@_yes
@_resume
@_abort
@_steal
@_outage
@_unknown
@_journal
@click.option(
    "--report",
    "shown",
    metavar="ID",
    help="Show the report of the upgrade with this ID. `last`: the newest upgrade.",
)
@click.option(
    "--html",
    type=click.Path(dir_okay=False, path_type=Path),
    help="Also write the report as an HTML page to this file.",
)
@json_option
def upgrade(
    inventory_file: str,
    *,
    limit: tuple[str, ...],
    dry: bool,
    yes: bool,
    resume: bool,
    abort: bool,
    steal: str | None,
    accept_outage: tuple[str, ...],
    accept_unknown_load: tuple[str, ...],
    folder: Path | None,
    shown: str | None,
    html: Path | None,
    as_json: bool,
    **engines: str | None,
) -> int:
    """
    Apply changed settings to a serving fleet, in waves.

    \b
    gpufleet upgrade inventories/prod.py --dry
    gpufleet upgrade inventories/prod.py --vllm 0.32.0
    gpufleet upgrade inventories/prod.py --resume
    gpufleet upgrade inventories/prod.py --report last

    The command first copies everything to the nodes. Then it drains, switches and tests one wave
    after the other. If a wave does not pass its gates, it is rolled back. If you press Ctrl-C once,
    the command finishes the current groups and stops. If you press it twice, the command stops at
    once. After both, and if the command was killed, --resume continues.

    Exit status: 0: done. 1: stopped, rolled back or paused. 2: error. 130: interrupted.
    """
    versions = {name: each for name in engine_flags.NAMES if (each := engines[name])}
    if sum((resume, abort, dry, bool(shown))) > 1 or (versions and (resume or abort or shown)):
        options = " and ".join(f"--{name}" for name in engine_flags.NAMES)
        raise click.UsageError(
            f"Give only one of --resume, --abort, --dry and --report. {options} start an "
            "upgrade: of these four options, combine them only with --dry."
        )
    if shown:
        return _show_report(inventory_file, folder, shown, html, as_json=as_json)
    use_gevent()
    from gpufleet.inventory.loader import read

    declared = read(inventory_file)
    if not (resume or abort):
        from gpufleet.fleet.inventory_check import require_valid

        require_valid(declared)
    names = _limited_nodes(declared, select_limit(declared, limit))
    wanted = _build_request(
        inventory_file, declared, names, steal, accept_outage, accept_unknown_load
    )
    if versions:
        wanted = _with_versions(wanted, versions)
    command = _UpgradeCommand(
        wanted, _journal_folder(declared, folder), yes=yes, as_json=as_json, versions=versions
    )
    if dry:
        return command.show_plan()
    if resume or abort:
        return command.resume(abort=abort)
    titles = [f"{engine_flags.of(name).title} {each}" for name, each in versions.items()]
    return command.begin("upgrade", " and ".join(titles) or "what is declared")


@fleet_command()
@inventory_argument
@_dry
@_yes
@_steal
@_outage
@_unknown
@_journal
@json_option
def rollback(
    inventory_file: str,
    *,
    dry: bool,
    yes: bool,
    steal: str | None,
    accept_outage: tuple[str, ...],
    accept_unknown_load: tuple[str, ...],
    folder: Path | None,
    as_json: bool,
) -> int:
    """
    Restore what the last upgrade replaced.

    Afterwards every replica runs as before the upgrade. The command downloads nothing.

    \b
    gpufleet rollback inventories/prod.py --dry
    gpufleet rollback inventories/prod.py

    Like `gpufleet upgrade`, the command works in waves with drain and gates. It uses the units that
    each node has kept. It does not change drivers or other software below vLLM. `gpufleet upgrade
    --resume` continues an interrupted rollback.

    Exit status: 0: done. 1: stopped or paused. 2: error. 130: interrupted.
    """
    use_gevent()
    from gpufleet.inventory.loader import read

    declared = read(inventory_file)
    wanted = _build_request(inventory_file, declared, (), steal, accept_outage, accept_unknown_load)
    command = _UpgradeCommand(wanted, _journal_folder(declared, folder), yes=yes, as_json=as_json)
    return command.roll_back(dry=dry)


# -- what both do ----------------------------------------------------------------------------------


class _UpgradeCommand:
    """One run of `gpufleet upgrade` or `gpufleet rollback` on a fleet."""

    def __init__(
        self,
        wanted: UpgradeRequest,
        folder: Path,
        *,
        yes: bool,
        as_json: bool,
        versions: Mapping[EngineName, str] | None = None,
    ) -> None:
        self.wanted, self.folder, self.yes, self.as_json = wanted, folder, yes, as_json
        self.versions = versions or {}
        self.keys: InterruptKeys | None = None

    def show_plan(self) -> int:
        """Show the waves, without locking nodes or writing a journal."""
        from gpufleet.upgrade.run import upgrade_plan
        from gpufleet.upgrade.run.connections import open_nodes

        with open_nodes(self.wanted.inventory) as nodes:
            _, plan = upgrade_plan.plan_now(nodes, self.wanted, self._earlier_journals())
        for edit in self.wanted.edits:
            click.echo(f"would write {edit}", err=self.as_json)
        self._show(plan)
        return 0

    def begin(self, kind: str, what: str) -> int:
        """Begin a new upgrade."""
        self._refuse_unfinished()
        from gpufleet.upgrade.run.connections import open_nodes
        from gpufleet.upgrade.run.upgrade_journal import Journal, new_id

        self._require_confirmation()
        with (
            open_nodes(self.wanted.inventory) as nodes,
            Journal.create(self.folder, new_id()) as journal,
        ):
            return self._start(nodes, journal, kind, what)

    def resume(self, *, abort: bool) -> int:
        """Continue the unfinished upgrade, or undo its current wave."""
        from gpufleet.upgrade.run import upgrade_journal
        from gpufleet.upgrade.run.connections import open_nodes

        path = self._find_unfinished()
        if path is None:
            raise FleetError(*self._why_nothing_to_resume())
        with (
            open_nodes(self.wanted.inventory) as nodes,
            upgrade_journal.Journal.reopen(path) as found,
        ):
            state = found.state
            if Path(state.inventory).resolve() != Path(self.wanted.inventory).resolve():
                raise FleetError(
                    f"{path}: is the journal of an upgrade of {state.inventory}, not of "
                    f"{self.wanted.inventory}"
                )
            self.wanted = replace(self.wanted, of=state.of, limit=state.limit)
            said = found.entries[0].said
            # Journals of releases up to 0.2 have only the version of vLLM.
            if said.get("versions") or said.get("version"):
                versions = said.get("versions") or {engine_flags.DEFAULT: said["version"]}
                self._restore_declaration(found, versions)
            found.append("resumed", by=self.wanted.by)
            if abort:
                found.append("aborting", why=f"{self.wanted.by} asked for it")
            return self._execute(nodes, found)

    def _restore_declaration(self, journal: Journal, versions: Mapping[EngineName, str]) -> None:
        """
        Finish the declaration of versions, if the upgrade was interrupted before its first wave.
        """
        from gpufleet.inventory.loader import read
        from gpufleet.upgrade.plan import declare_version

        state = journal.state
        if state.wave:
            return
        if state.declared:
            edits = [declare_version.Edit.from_json(each) for each in state.declared]
            declare_version.write_down(self.wanted.declared.root, edits)
            self.wanted = replace(self.wanted, declared=read(self.wanted.inventory))
            return
        self.wanted = _with_versions(self.wanted, versions)

    def roll_back(self, *, dry: bool) -> int:
        """Restore the units that the last upgrade replaced."""
        self._refuse_unfinished()
        from gpufleet.upgrade.run import observe, upgrade_plan
        from gpufleet.upgrade.run.connections import open_nodes
        from gpufleet.upgrade.run.upgrade_journal import Journal, new_id

        if not dry:
            self._require_confirmation()
        with open_nodes(self.wanted.inventory) as nodes:
            found = observe.view_fleet(nodes, self.wanted.declared, unfit_stops=False)
            of = upgrade_plan.last_kept(found)
            if of is None:
                click.echo(
                    "no node has kept the units from before an upgrade, so there is "
                    "nothing to restore",
                    err=True,
                )
                return 0
            self.wanted = replace(self.wanted, of=of)
            if dry:
                self._show(
                    upgrade_plan.rollback_waves(
                        nodes, self.wanted, found, of, self._earlier_journals()
                    )
                )
                return 0
            with Journal.create(self.folder, new_id()) as journal:
                status = self._start(nodes, journal, "rollback", f"back to the state before {of}")
        if status == 0:
            self._put_back_declaration(of)
        return status

    def _start(self, nodes: Nodes, journal: Journal, kind: str, what: str) -> int:
        journal.append(
            "started",
            id=journal.path.stem,
            schema=1,
            kind=kind,
            inventory=str(Path(self.wanted.inventory).resolve()),
            what=what,
            of=self.wanted.of,
            limit=self.wanted.limit,
            versions=self.versions,
        )
        return self._execute(nodes, journal)

    def _execute(self, nodes: Nodes, journal: Journal) -> int:
        from gpufleet.cli.interrupt_keys import InterruptKeys
        from gpufleet.upgrade.report.live_progress import Progress
        from gpufleet.upgrade.run.controller import DeclinedError, UpgradeRun
        from gpufleet.upgrade.run.state_machine import LostError

        progress = Progress(journal.entries[:-1])

        def heard(entry: Any) -> None:
            if line := progress.on_entry(entry):
                click.echo(printable(line), err=True)

        journal.append("owner", by=self.wanted.by)
        journal.on_entry = heard
        course = UpgradeRun(
            self.wanted, journal, nodes, self._show, self._confirm, self._earlier_journals()
        )
        try:
            with InterruptKeys(journal) as self.keys:
                status = course.run()
        except DeclinedError as error:
            click.echo(str(error), err=True)
            return 1
        except LostError as error:
            # The journal has everything that is known. A lost connection proves nothing.
            if journal.state.wave:
                journal.append("paused", why=error.problems)
            for problem in error.problems:
                click.echo(f"error: {printable(problem)}", err=True)
            status = 1
        except FleetError as error:
            print_error(error)
            status = 2 if not journal.state.wave else 1
        except (SystemExit, KeyboardInterrupt, click.Abort):
            _print_how_to_resume(journal)
            return INTERRUPTED
        self._print_report(journal)
        if journal.state.paused and any("Ctrl-C" in each for each in journal.state.paused):
            return INTERRUPTED
        return status

    # -- talking to a person

    def _confirm(self, question: str) -> str | None:
        if self.yes:
            return f"{self.wanted.by}, --yes"
        if not _is_interactive():
            return None
        if self.keys:
            self.keys.restore_handler()
        said = click.confirm(question, err=True)
        if self.keys:
            self.keys.install_handler()
        return self.wanted.by if said else None

    def _require_confirmation(self) -> None:
        if not self.yes and not _is_interactive():
            raise FleetError(
                "there is no terminal on which you can confirm: add --yes, or add --dry to "
                "see what would be done"
            )

    def _show(self, plan: WavePlan) -> None:
        if self.as_json:
            click.echo(json.dumps(plan.as_json(), indent=2))
            return
        from gpufleet.console import display
        from gpufleet.upgrade.report import plan_table

        display(plan_table.waves(plan))

    def _print_report(self, journal: Journal) -> None:
        """Print the report. If the upgrade is not over, print how to resume it."""
        from gpufleet.upgrade.report.report import report

        found = report(journal.entries)
        if self.as_json:
            click.echo(json.dumps({**found.as_json(), "journal": str(journal.path)}, indent=2))
        elif journal.state.planned and journal.state.wave:
            from gpufleet.console import display
            from gpufleet.upgrade.report import text

            click.echo()
            display(text.report_text(found))
        if not journal.state.is_over:
            _print_how_to_resume(journal)

    def _put_back_declaration(self, of: str) -> None:
        """
        Print the lines that declare the restored release.

        If the upgrade had changed these lines, offer to write them to the files.
        """
        from gpufleet.upgrade.plan import declare_version
        from gpufleet.upgrade.run import upgrade_journal, upgrade_state

        path = self.folder / f"{of}{upgrade_journal.SUFFIX}"
        state = (
            upgrade_state.fold(upgrade_journal.read(path))
            if path.is_file()
            else upgrade_state.State()
        )
        edits = [declare_version.Edit.from_json(each).inverse for each in state.declared]
        if not edits:
            click.echo(
                "note: group_vars still contain the change that was rolled back. `gpufleet "
                "upgrade --dry` shows the difference. Revert the change in group_vars; "
                "otherwise the next deploy applies it again",
                err=True,
            )
            return
        for edit in edits:
            click.echo(f"to restore: {edit}", err=True)
        if self._confirm("Write these lines to the files?"):
            declare_version.write_down(self.wanted.declared.root, edits)

    # -- journals

    def _earlier_journals(self) -> list[Sequence[Any]]:
        """
        Return the entries of earlier journals. Journals that cannot be read are left out, with a
        note.
        """
        from gpufleet.upgrade.run import upgrade_journal

        found: list[Sequence[Any]] = []
        for path in upgrade_journal.list_journals(self.folder)[-20:]:
            try:
                found.append(upgrade_journal.read(path))
            except FleetError as error:
                click.echo(f"note: {printable(str(error))}", err=True)
        return found

    def _find_unfinished(self) -> Path | None:
        """
        Return this inventory's newest journal of an upgrade that is unfinished or stuck, or None.
        """
        from gpufleet.upgrade.run import upgrade_journal, upgrade_state

        mine = Path(self.wanted.inventory).resolve()
        for path in reversed(upgrade_journal.list_journals(self.folder)):
            try:
                state = upgrade_state.fold(upgrade_journal.read(path))
            except FleetError as error:
                click.echo(f"note: {printable(str(error))}", err=True)
                continue
            if Path(state.inventory).resolve() == mine and (not state.is_over or _is_stuck(state)):
                return path
        return None

    def _refuse_unfinished(self) -> None:
        from gpufleet.upgrade.run import upgrade_journal, upgrade_state

        path = self._find_unfinished()
        if path is None or self.wanted.steal:
            return
        state = upgrade_state.fold(upgrade_journal.read(path))
        if upgrade_journal.is_written(path):
            raise FleetError(f"upgrade {state.id} of {state.by} is running: {path}")
        if state.is_over or (not state.wave and not state.locked):
            return
        raise FleetError(
            f"upgrade {state.id} of {state.by} has not finished ({path}): continue it with "
            "`gpufleet upgrade --resume`, or undo its current wave with --abort"
        )

    def _why_nothing_to_resume(self) -> list[str]:
        """
        Return sentences that explain why no upgrade can be resumed, from the locks on the nodes.
        """
        from gpufleet.upgrade.run import observe
        from gpufleet.upgrade.run.connections import open_nodes

        with open_nodes(self.wanted.inventory) as nodes:
            looks = observe.look(nodes, nodes.names)
        locks = {str(each.lock): each.lock for each in looks.values() if each.lock}
        if not locks:
            return [f"{self.folder}: contains no upgrade of this inventory that can be resumed"]
        return [
            f"{self.folder} has no journal of the upgrade, but the nodes are locked by "
            f"{each}: resume the upgrade on that machine, or take it over with `gpufleet "
            "upgrade --steal WHY`"
            for each in locks
        ]


def _print_how_to_resume(journal: Journal) -> None:
    """Print which groups are unfinished, and how to resume the upgrade."""
    state = journal.state
    if state.is_over:
        return
    marked = ", ".join(state.marked)
    left = f" {marked} stay out of service until then." if marked else ""
    click.echo(
        f"upgrade {state.id} has not finished: `gpufleet upgrade {state.inventory} "
        f"--resume` continues the upgrade, and --abort undoes its current wave.{left}",
        err=True,
    )


def _show_report(
    inventory_file: str, folder: Path | None, wanted: str, html: Path | None, *, as_json: bool
) -> int:
    from gpufleet.console import display
    from gpufleet.inventory.loader import read
    from gpufleet.upgrade.report import text
    from gpufleet.upgrade.report.html import report_html
    from gpufleet.upgrade.report.report import report
    from gpufleet.upgrade.run import upgrade_journal

    there = _journal_folder(read(inventory_file), folder)
    path = (
        _last_journal(there, inventory_file)
        if wanted == "last"
        else upgrade_journal.find(there, wanted)
    )
    found = report(upgrade_journal.read(path))
    if html:
        try:
            html.write_text(report_html(found), encoding="utf-8")
        except OSError as error:
            raise FleetError(f"{html}: cannot be written: {error.strerror}") from None
    if as_json:
        click.echo(json.dumps(found.as_json(), indent=2))
    elif not html:
        display(text.report_text(found))
    return 0


def _last_journal(folder: Path, inventory_file: str) -> Path:
    """Return the newest journal of an inventory. Raises `FleetError` if there is none."""
    from gpufleet.formatting import join_names
    from gpufleet.upgrade.run import upgrade_journal, upgrade_state

    every = upgrade_journal.list_journals(folder)
    if not every:
        raise FleetError(f"{folder}: contains no record of an upgrade")
    mine = Path(inventory_file).resolve()
    problems: list[str] = []
    for path in reversed(every):
        try:
            state = upgrade_state.fold(upgrade_journal.read(path))
        except FleetError as error:
            problems += error.problems
            continue
        if Path(state.inventory).resolve() == mine:
            if problems:  # a journal that cannot be read may be newer
                click.echo(f"note: {printable('; '.join(problems))}", err=True)
            return path
    raise FleetError(
        *problems,
        f"{folder}: contains no record of an upgrade of {inventory_file}. There are records "
        "for other inventories, or for this inventory under a different path: "
        f"{join_names([each.stem for each in every[-4:]])}: choose one with --report ID",
    )


def _build_request(  # noqa: PLR0917  # each is an option of both commands
    inventory_file: str,
    declared: Fleet,
    names: tuple[str, ...],
    steal: str | None,
    accept_outage: tuple[str, ...],
    accept_unknown_load: tuple[str, ...],
) -> UpgradeRequest:
    from gpufleet.upgrade.run.upgrade_plan import UpgradeRequest

    if steal is not None and not steal.strip():
        raise click.UsageError("--steal needs a reason, which gpufleet records.")
    return UpgradeRequest(
        inventory=inventory_file,
        declared=declared,
        rules=_policy(declared, names),
        by=operator_name(),
        origin=str(Path.cwd()),
        limit=names,
        steal=steal,
        accept_outage=accept_outage,
        accept_unknown_load=accept_unknown_load,
    )


def _with_versions(wanted: UpgradeRequest, versions: Mapping[EngineName, str]) -> UpgradeRequest:
    """Return the request after these versions are declared, and the edits that declare them."""
    from gpufleet.upgrade.plan import declare_version

    given = (wanted.declared, versions, wanted.limit)
    return replace(
        wanted,
        edits=declare_version.version_edits(*given),
        declared=declare_version.apply_edits(*given),
    )


def _policy(declared: Fleet, names: Collection[str]) -> Upgrade:
    from gpufleet.upgrade.plan.policy import fleet_policy

    return fleet_policy(
        {n: each for n, each in declared.gpu_nodes.items() if not names or n in names}
    )


def _limited_nodes(declared: Fleet, limit: tuple[str, ...]) -> tuple[str, ...]:
    """Return the nodes that --limit names, either directly or by their group."""
    groups = declared.groups.members
    found = {n for each in limit for n in groups.get(each, (each,))}
    return tuple(n for n in declared.nodes if n in found)


def _journal_folder(declared: Fleet, folder: Path | None) -> Path:
    from gpufleet.upgrade.run.upgrade_journal import FOLDER

    return folder or declared.root / FOLDER


def _is_stuck(state: Any) -> bool:
    return bool(state.stopped) and any(e.phase == "stuck" for e in state.groups.values())


def _is_interactive() -> bool:
    return sys.stdin.isatty() and sys.stderr.isatty()
