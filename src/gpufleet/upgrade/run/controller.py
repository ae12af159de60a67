"""Run an upgrade from its lock to its end: `gpufleet upgrade` and `rollback`.

Border. Before the first wave an interruption leaves only the journal. Later, `state_machine`
determines the remaining steps from the journal, in any process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gevent

from gpufleet.errors import FleetError
from gpufleet.fleet import assessment, fleet_plan
from gpufleet.fleet.fleet_plan import Assessment
from gpufleet.formatting import join_names
from gpufleet.node.topology import node_from_probe
from gpufleet.planning.planner import FleetPlan
from gpufleet.settings.upgrade_settings import Upgrade
from gpufleet.upgrade.plan.declare_version import Edit, write_down
from gpufleet.upgrade.plan.wave import Wave
from gpufleet.upgrade.plan.wave_plan import WavePlan
from gpufleet.upgrade.run import (
    node_answers,
    node_locks,
    node_questions,
    observe,
    state_machine,
    upgrade_journal,
    wave_silences,
)
from gpufleet.upgrade.run.actions import FleetActions
from gpufleet.upgrade.run.connections import Nodes
from gpufleet.upgrade.run.deploy_process import FINISH_SECONDS, PREPARE_SECONDS, Deploy
from gpufleet.upgrade.run.journal_entry import Entry
from gpufleet.upgrade.run.node_answers import CollectAnswer
from gpufleet.upgrade.run.observe import FleetView
from gpufleet.upgrade.run.state_machine import Decision, Driver, Step
from gpufleet.upgrade.run.traffic import Frontends
from gpufleet.upgrade.run.upgrade_journal import Journal
from gpufleet.upgrade.run.upgrade_plan import UpgradeRequest, plan_now, rollback_waves

PREPARE, SERVE = "deploys/prepare.py", "deploys/vllm.py"
DONE, STOPPED = 0, 1
# How long to wait for a node that is not being changed: it answered a moment ago.
PATIENCE_SECONDS = 60


class DeclinedError(FleetError):
    """The operator did not confirm the upgrade; nothing was changed."""


@dataclass
class UpgradeRun:
    """One run of an upgrade, with callbacks that show the plan and ask the operator."""

    wanted: UpgradeRequest
    journal: Journal
    nodes: Nodes
    show: Callable[[WavePlan], None]
    confirm: Callable[[str], str | None]
    """Asks the operator a question; returns who confirmed it, None: not confirmed."""
    before: Sequence[Sequence[Entry]] = ()
    """Journals of earlier upgrades, the oldest first."""
    _main: Any = field(default=None, repr=False)

    def run(self) -> int:
        """Run from the journal's state to the end; return the exit status."""
        self.nodes.connect()
        self._lock()
        state = self.journal.state
        if not state.wave:
            if state.aborting:
                return self._end(Decision("stop", why=("gpufleet had changed nothing",)))
            try:
                actions = self._begin()
            except BaseException as error:
                self._break_off(error)
                raise
            if actions is None:
                return DONE
        else:
            actions = self._resume()
        driver = Driver(self.journal, actions, run_parallel, self._confirm_wave)
        return self._end(driver.run())

    # -- begin

    def _lock(self) -> None:
        names = self.nodes.names
        steal = self.wanted.steal
        if set(self.journal.state.locked) != set(names) or steal:
            self.journal.append("locking", nodes=names, steal=steal)
        try:
            stolen = node_locks.take(
                self.nodes.ask,
                names,
                upgrade=self.journal.state.id,
                owner=self.wanted.by,
                origin=self.wanted.origin,
                what=self.journal.state.what,
                steal=bool(steal),
            )
        except FleetError as error:
            if not self.journal.state.wave:
                self.journal.append("unlocked", nodes=names)
                self.journal.append("stopped", why=error.problems)
            raise
        self.journal.append("locked", nodes=names)
        for other in sorted({each.id for each in stolen.values()}):
            whose = next(each for each in stolen.values() if each.id == other)
            self.journal.append("noted", text=f"taken over from {whose}: {steal}")
            self._adopt(other)
            self._close(other)

    def _adopt(self, other: str) -> None:
        """Remove the marks of an upgrade whose locks this run took over."""
        looks = observe.look(self.nodes, self.nodes.names)
        front = Frontends(self.nodes, self.wanted.declared)
        replicas = {
            r for each in looks.values() for r, m in each.drained.items() if m.upgrade == other
        }
        undrain = {
            name: node_questions.undrain(
                [r for r, m in each.drained.items() if m.upgrade == other], upgrade=other
            )
            for name, each in looks.items()
            if any(m.upgrade == other for m in each.drained.values())
        }
        self.nodes.ask_until(undrain, node_answers.Marks.read, PATIENCE_SECONDS)
        cordoned = [n for n, each in looks.items() if each.cordon and each.cordon.upgrade == other]
        uncordon = node_questions.uncordon(upgrade=other)
        self.nodes.ask_until(
            dict.fromkeys(cordoned, uncordon), node_answers.Marks.read, PATIENCE_SECONDS
        )
        drained = {name for names in front.drained_servers().values() for name in names}
        servers = [
            {"name": name, "node": "", "port": 0, "model": "", "replica": ""}
            for name in sorted(drained)
            if name.rpartition(".")[2] in replicas or any(f".{r}" in name for r in replicas)
        ]
        front.undrain_by_name(servers)

    def _close(self, other: str) -> None:
        """
        Record in the other upgrade's journal, if it is on this machine, that it was taken over.
        """
        path = self.journal.path.with_name(f"{other}{upgrade_journal.SUFFIX}")
        if not path.is_file():
            return
        try:
            with Journal.reopen(path) as found:
                why = f"taken over by {self.wanted.by}: {self.wanted.steal}"
                found.append("stopped", why=[why], by=self.journal.state.id)
                found.append("unlocked", nodes=found.state.locked)
        except FleetError as error:
            self.journal.append("noted", text="; ".join(error.problems))

    def _begin(self) -> FleetActions | None:
        """Plan, confirm, prepare and record the baseline; None: nothing differs."""
        found, plan = (self._view_fleet(), None) if self.wanted.of else self._plan()
        if plan is None:
            plan = self._rollback_waves(found)
        self.show(plan)
        if not plan.waves:
            self._unlock()
            self.journal.append("finished", text="nothing differs")
            return None
        self._write_plan(found, plan)
        by = self.confirm("Begin?")
        if by is None:
            raise DeclinedError("not confirmed, so gpufleet changed nothing")
        self.journal.append("confirmed", by=by)
        if self.wanted.edits:
            self.journal.append("declared", files=[each.as_json() for each in self.wanted.edits])
            write_down(self.wanted.declared.root, self.wanted.edits)
        actions = self._actions(found.found)
        names = sorted(
            {n for w in plan.waves for n in w.nodes if n in self.wanted.declared.gpu_nodes}
        )
        if not self.wanted.of:
            self.journal.append("preparing")
            log = actions.deploy.run(PREPARE, PREPARE_SECONDS, names)
            self.journal.append("prepared", log=str(log))
        else:
            self.journal.append("prepared")
        # Connections that were idle in the meantime may be closed.
        self.nodes.connect()
        actions.record_baseline()
        return actions

    def _plan(self) -> tuple[FleetView, WavePlan]:
        return plan_now(self.nodes, self.wanted, self.before)

    def _view_fleet(self) -> FleetView:
        return observe.view_fleet(self.nodes, self.wanted.declared, unfit_stops=False)

    def _rollback_waves(self, found: FleetView) -> WavePlan:
        """Return the waves in which kept units are restored."""
        of = str(self.wanted.of)
        return rollback_waves(self.nodes, self.wanted, found, of, self.before)

    def _write_plan(self, found: FleetView, plan: WavePlan) -> None:
        said = plan.as_json()
        self.journal.append(
            "planned",
            waves=[
                {
                    "number": each.number,
                    "canary": each.canary,
                    "groups": [group.as_json() for group in each.groups],
                }
                for each in plan.waves
            ],
            settings=self.wanted.rules.model_dump(mode="json"),
            needs=said["needs"],
            seconds={str(e.wave): e.seconds for e in plan.estimates if e.seconds is not None},
            remarks=list(plan.remarks),
            left_out=said["left_out"],
            servers=found.servers(),
            accept_outage=self.wanted.accept_outage,
            accept_unknown_load=self.wanted.accept_unknown_load,
        )

    def _break_off(self, error: BaseException) -> None:
        """Clean up after an upgrade that did not reach its first wave."""
        why = error.problems if isinstance(error, FleetError) else (type(error).__name__,)
        self._put_back()
        self._unlock()
        self.journal.append("stopped", why=why)

    def _put_back(self) -> None:
        """Restore the lines of group_vars, unless a group is done and runs their new version."""
        state = self.journal.state
        if not state.declared or any(each.phase == "done" for each in state.groups.values()):
            return
        wanted = [Edit.from_json(each).inverse for each in reversed(state.declared)]
        try:
            write_down(self.wanted.declared.root, wanted)
        except FleetError as error:
            self.journal.append("noted", text="; ".join(error.problems))
            return
        for each in wanted:
            self.journal.append("noted", text=f"put back: {each}")

    # -- resume

    def _resume(self) -> FleetActions:
        """Return actions for an upgrade whose waves have begun."""
        documents = observe.survey(self.nodes, self.wanted.declared)
        there = {n: said for n, said in documents.items() if not isinstance(said, str)}
        declared = {n: each for n, each in self.wanted.declared.gpu_nodes.items() if n in there}
        if not there:
            raise state_machine.LostError(
                *(f"{name}: {said}" for name, said in documents.items()), "no node answers"
            )
        try:
            found = assessment.plan_fleet(there, declared, unfit_stops=False)
        except FleetError as error:
            self.journal.append("noted", text="; ".join(error.problems))
            runs = tuple(fleet_plan.running_stages(there))
            nodes = {n: node_from_probe(n, each) for n, each in there.items()}
            found = Assessment(nodes, FleetPlan((), ()), (), runs)
        actions = self._actions(found)
        quiet = wave_silences.find_open(
            self.nodes.ask_each, wave_silences.alertmanagers(self.wanted.declared.nodes), actions.id
        )
        actions.silent = frozenset(quiet.ids)
        return actions

    def _actions(self, found: Assessment) -> FleetActions:
        said = self._plan_entry()
        folder = self.journal.path.with_suffix("")
        declared = self.wanted.declared
        return FleetActions(
            journal=self.journal,
            nodes=self.nodes,
            declared=declared,
            rules=Upgrade.model_validate(said["settings"]),
            by=self.wanted.by,
            deploy=Deploy(self.wanted.inventory, folder, self.journal.state.id),
            front=Frontends(self.nodes, declared),
            servers=said["servers"],
            found=found,
            accept_outage=tuple(said.get("accept_outage") or ()),
            accept_unknown_load=tuple(said.get("accept_unknown_load") or ()),
        )

    def _plan_entry(self) -> Mapping[str, Any]:
        return next(e.said for e in reversed(self.journal.entries) if e.what == "planned")

    def _confirm_wave(self, wave: Wave) -> str | None:
        return self.confirm(f"Continue with wave {wave.number} ({join_names(wave.nodes)})?")

    # -- end

    def _end(self, end: Decision) -> int:
        """Finish, stop or pause the upgrade as decided; return the exit status."""
        match end.next:
            case "finish":
                self._finish()
                return DONE
            case "stop":
                self._put_back()
                self._close_silences()
                stuck = self.journal.state.marked
                names = join_names(stuck)
                how = (
                    f". {names} stays drained: repair {names}, then continue with --resume"
                    if stuck
                    else ""
                )
                self.journal.append("stopped", why=end.why, how=how)
                self._unlock()
                return STOPPED
            case "pause":
                self._close_silences()
                return STOPPED
            case _:
                self._unlock()
                return DONE if self.journal.state.finished else STOPPED

    def _finish(self) -> None:
        state = self.journal.state
        if state.kind == "upgrade":
            self.journal.append("finishing")
            logs = self.journal.path.with_suffix("")
            deploy = Deploy(self.wanted.inventory, logs, state.id)
            before = self._start_times()
            # Replicas that were left out for a person would be restarted without a drain.
            out = {n for each in self._plan_entry().get("left_out") or () for n in each["nodes"]}
            every = self.wanted.limit or tuple(self.wanted.declared.nodes)
            if limit := [name for name in every if name not in out]:
                deploy.run(SERVE, FINISH_SECONDS, limit, "finish")
            again = sorted(
                unit
                for unit, since in self._start_times().items()
                if before.get(unit, since) != since
            )
            if again:
                text = f"{SERVE} restarted {join_names(again)}, although no wave had changed it"
                self.journal.append("noted", text=text)
            self._collect()
        self._close_silences()
        self.journal.append("finished")
        self._unlock()

    def _start_times(self) -> dict[str, float | None]:
        looks = observe.look(self.nodes, self.wanted.declared.gpu_nodes, PATIENCE_SECONDS)
        return {
            f"{unit.unit} on {name}": unit.since
            for name, each in looks.items()
            for unit in each.units.values()
        }

    def _collect(self) -> None:
        """Remove unused releases. Failures are only recorded, because they cost only disk space."""
        asked = {
            name: node_questions.collect(servers.keep_releases, servers.keep_days)
            for name, each in self.wanted.declared.gpu_nodes.items()
            if (servers := each.settings.servers)
        }
        for name, said in self.nodes.ask(asked).items():
            try:
                found = CollectAnswer.read(name, said)
            except FleetError as error:
                self.journal.append("noted", text="; ".join(error.problems))
                continue
            if found.problem:
                self.journal.append("noted", text=f"{name}: {found.problem}")
            if found.removed:
                gib = found.freed_bytes / (1 << 30)
                text = f"{name}: removed {join_names(found.removed)}, {gib:.1f} GiB"
                self.journal.append("noted", text=text)

    def _close_silences(self) -> None:
        where = wave_silences.alertmanagers(self.wanted.declared.nodes)
        for problem in wave_silences.close_silences(
            self.nodes.ask_each, where, self.journal.state.id
        ).problems:
            self.journal.append("noted", text=problem)

    def _unlock(self) -> None:
        names = self.journal.state.locked
        if not names:
            return
        self.journal.append("unlocking", nodes=names)
        problems = node_locks.release(self.nodes.ask, names, self.journal.state.id)
        for problem in problems:
            self.journal.append("noted", text=problem)
        if not problems:
            self.journal.append("unlocked", nodes=names)


def run_parallel(walks: Sequence[Iterator[Step]]) -> None:
    """Run several groups' steps in parallel; an exception in one ends all of them."""
    problems: list[BaseException] = []

    def walk(steps: Iterator[Step]) -> None:
        try:
            for _ in steps:
                pass
        except gevent.GreenletExit:
            raise
        # gevent would print an exception of a greenlet.
        except BaseException as error:  # noqa: BLE001
            problems.append(error)

    jobs = [gevent.spawn(walk, each) for each in walks]
    try:
        while not problems and not all(job.ready() for job in jobs):
            gevent.joinall(jobs, timeout=0.5)
    finally:
        gevent.killall(jobs, timeout=2)
    if problems:
        raise problems[0]
