"""Execute the steps of an upgrade on real nodes: `state_machine.Actions`.  Border.

No slow step lies between a replica's drain and its start: everything was prepared before the first
wave, connections are open, and a switch is one program on the node. Every query has a deadline. A
node that does not answer is queried again for a while, because it may be rebooting.
"""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import gevent

from gpufleet.errors import FleetError
from gpufleet.fleet import assessment, fleet_plan
from gpufleet.fleet.fleet_plan import Assessment
from gpufleet.inventory.loader import Fleet
from gpufleet.monitoring.rules import files
from gpufleet.on_node.common.stage_units import stage_of
from gpufleet.planning.gpu_shares import start_seconds
from gpufleet.serving.unit import stop_seconds
from gpufleet.settings.serving_settings import Served
from gpufleet.settings.upgrade_settings import Golden, Upgrade
from gpufleet.upgrade.gates import baseline, gates
from gpufleet.upgrade.gates.baseline import Alerts, Findings, Traffic
from gpufleet.upgrade.gates.gates import Verdict
from gpufleet.upgrade.plan import capacity
from gpufleet.upgrade.plan.wave import Group, Wave, model_of
from gpufleet.upgrade.run import (
    group_units,
    node_questions,
    observe,
    traffic,
    wave_silences,
)
from gpufleet.upgrade.run.connections import Nodes
from gpufleet.upgrade.run.deploy_process import (
    GATEWAY,
    GATEWAY_SECONDS,
    NODE_SECONDS,
    Deploy,
    SharedDeploy,
)
from gpufleet.upgrade.run.node_answers import (
    Marks,
    NodeLook,
    ReadyAnswer,
    RequestsLeft,
    SwitchAnswer,
)
from gpufleet.upgrade.run.node_questions import NodeQuestion
from gpufleet.upgrade.run.state_machine import LostError, must_roll_back
from gpufleet.upgrade.run.traffic import Frontends
from gpufleet.upgrade.run.upgrade_journal import Journal

# How long to wait for a node without an answer before its group fails: a server with eight GPUs
# takes some minutes from power-on to SSH. A shorter time for an unchanged node: nothing is lost by
# not beginning.
GONE_SECONDS = 600
UNTOUCHED_SECONDS = 60
# How long a wave waits for a lower load if the present one does not allow it.
QUIET_SECONDS = 900
AGAIN_SECONDS = 15
# The silences of a killed upgrade end after this time.
SILENT_SECONDS = 4 * 3600
# Added to `start_seconds`, for the test that it answers, on a busy node.
READY_SECONDS = 60
# Limit for a replica that has passed its gates to complete a prompt. A replica that died and loads
# again takes longer.
FALLEN_SECONDS = 60


@dataclass
class FleetActions:
    """The actions of one upgrade on one fleet."""

    journal: Journal
    nodes: Nodes
    declared: Fleet
    rules: Upgrade
    by: str
    """user@host"""
    deploy: Deploy
    front: Frontends
    servers: Mapping[str, Sequence[Mapping[str, Any]]]
    """Servers by replica, before and after the change."""
    found: Assessment
    """The plan, and the replicas that ran at the time of planning."""
    accept_outage: Sequence[str] = ()
    accept_unknown_load: Sequence[str] = ()
    silent: frozenset[str] = frozenset()
    """Ids of the silences that this upgrade has created."""
    looks: dict[str, NodeLook] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._tell_gateways = SharedDeploy(
            lambda: self.deploy.run(GATEWAY, GATEWAY_SECONDS, self.front.gateways, "gateways")
        )

    @property
    def id(self) -> str:
        """Return the upgrade's id."""
        return self.journal.state.id

    @property
    def back_to(self) -> str | None:
        """Return the id of the upgrade that a rollback undoes; None: this is no rollback."""
        return self.journal.state.of

    @property
    def kept_upgrade(self) -> str:
        """
        Return the id under which the former units are kept: this upgrade's, or the undone one's.
        """
        return self.back_to or self.id

    # -- before the waves

    def record_baseline(self) -> None:
        """Record every replica's baseline before anything is changed."""
        state = self.journal.state
        replicas = {
            replica: self._nodes_of(replica, each.group)
            for each in state.groups.values()
            for replica in each.group.replicas
            if replica not in each.group.comes
        }
        settings = {name: each.settings for name, each in self.declared.gpu_nodes.items()}
        asked = observe.questions(replicas, settings, 2)
        first = self._observe(asked)
        gevent.sleep(self.rules.gates.baseline_seconds)
        last = self._observe(observe.questions(replicas, settings, 0))
        documents = observe.survey(self.nodes, self.declared)
        report = assessment.check_nodes(documents, self.declared.gpu_nodes)
        self.journal.append(
            "baseline",
            answers={
                name: baseline.answers_as_json(first.answers.get(name, {})) for name in replicas
            },
            traffic={
                name: baseline.traffic_between(first.readings.get(name), reading).as_json()
                for name, reading in last.readings.items()
            },
            findings=Findings.unaccepted(report).as_json(),
            alerts=last.alerts.as_json(),
        )
        if self.back_to:
            return
        if lost := gates.never_passed(last.alerts, self.rules.gates):
            raise FleetError(*lost)
        self._warn_of_gates()

    def _warn_of_gates(self) -> None:
        """
        Write a note for each group that cannot pass its gates, before the first group is drained.
        """
        for group in (each.group for each in self.journal.state.groups.values()):
            reasons = [
                f"{replica}: {why}"
                for replica in group.replicas
                if replica not in {*group.comes, *group.goes}
                for why in self._cannot_pass(replica)
            ]
            checked = set(self.journal.state.baseline["findings"]["nodes"])
            if self.rules.gates.findings and not checked & set(group.nodes):
                names = ", ".join(group.nodes)
                reasons.append(f"{names}: no check ran, so it is unknown which findings are old")
            if reasons:
                text = f"warning: {'; '.join(reasons)}, {gates.WITHOUT_BASELINE}"
                self.journal.append("noted", text=text)

    def _cannot_pass(self, replica: str) -> tuple[str, ...]:
        state, golden = self.journal.state.baseline, self._golden(replica)
        answers, did = state["answers"].get(replica), state["traffic"].get(replica)
        return gates.cannot_pass(
            baseline.answers_from_json(answers) if answers else {},
            Traffic.from_json(did) if did else Traffic(0.0, finished={}, answered={}),
            self.rules.gates,
            same=golden.same,
            cosine=golden.cosine,
        )

    def check_load(self, wave: Wave) -> tuple[tuple[str, ...], Mapping[str, Any]]:
        """
        Wait until the load allows this wave, then silence its alerts.

        Returns why the wave may not begin, and the load for the journal.
        """
        end = time.monotonic() + QUIET_SECONDS
        while True:
            documents = observe.survey(self.nodes, self.declared)
            there = {n: said for n, said in documents.items() if not isinstance(said, str)}
            running = tuple(fleet_plan.running_stages(there))
            looks = observe.look(self.nodes, self.declared.gpu_nodes, GONE_SECONDS)
            settings = {name: each.settings for name, each in self.declared.gpu_nodes.items()}
            loads = observe.loads(
                self.nodes,
                running,
                self.found.nodes,
                settings,
                looks,
                inventory=self.declared.inventory,
            )
            said = capacity.recheck(
                wave,
                loads,
                self.rules,
                accept_outage=self.accept_outage,
                accept_unknown_load=self.accept_unknown_load,
            )
            if said.proceeds:
                break
            # Waiting is useless while replicas that this upgrade has changed do not serve.
            if time.monotonic() > end or self.find_fallen(self._done_groups()):
                return (said.why,), {}
            self.journal.append("noted", wave=wave.number, text=said.why)
            gevent.sleep(AGAIN_SECONDS)
        self._silence_alerts(wave)
        return (), {"loads": [each.as_json() for each in loads], "why": said.why}

    def _done_groups(self) -> list[Group]:
        return [e.group for e in self.journal.state.groups.values() if e.phase == "done"]

    def find_fallen(self, groups: Sequence[Group]) -> Mapping[str, Sequence[str]]:
        """
        Return the groups that passed their gates and no longer answer, with the reasons.

        Replicas that a person has taken out of service, and nodes without an answer, are not
        judged: the capacity check covers them.
        """
        nodes = {name for each in groups for name in each.nodes}
        looks = {
            name: NodeLook.read(name, said)
            for name, said in self.nodes.ask(dict.fromkeys(nodes, node_questions.look())).items()
            if not isinstance(said, str)
        }
        owners: dict[tuple[str, str], str] = {}
        for group in groups:
            here = {name: looks[name] for name in group.nodes if name in looks}
            for name, units_ in group_units.expected_units(
                group, here, self.kept_upgrade, old=bool(self.back_to)
            ).items():
                for unit in units_:
                    if not group_units.is_out_of_service(here[name], unit):
                        owners[name, unit] = group.id
        asked = {
            name: node_questions.wait_ready([u for n, u in owners if n == name], FALLEN_SECONDS)
            for name in sorted({name for name, _ in owners})
        }
        found: dict[str, list[str]] = {}
        for name, answer in self.nodes.ask(asked).items():
            if isinstance(answer, str):
                continue
            for seen in ReadyAnswer.read(name, answer).units.values():
                if not seen.ready:
                    why = f"{name}: {seen.unit} was ready earlier, but no longer serves: {seen.why}"
                    found.setdefault(owners[name, seen.unit], []).append(why)
        return found

    def _silence_alerts(self, wave: Wave) -> None:
        where = wave_silences.alertmanagers(self.declared.nodes)
        over = [name for name in self.declared.nodes if name not in wave.nodes]
        wave_silences.close_silences(self.nodes.ask_each, where, self.id, over)
        quieted = wave_silences.open_silences(
            self.nodes.ask_each,
            where,
            wave.nodes,
            upgrade=self.id,
            by=self.by,
            seconds=SILENT_SECONDS,
            now=dt.datetime.now(dt.UTC),
        )
        self.silent = frozenset(quieted.ids)
        for problem in quieted.problems:
            self.journal.append("noted", wave=wave.number, text=problem)

    # -- steps

    def drain(self, group: Group) -> Mapping[str, Any]:
        """Mark the group's nodes, stop new requests to them, and wait for running ones."""
        began = time.monotonic()
        state = self.journal.state.groups[group.id]
        patience = GONE_SECONDS if state.undoing else UNTOUCHED_SECONDS
        looks = self._look(group, patience)
        if not state.undoing and (kept := group_units.cordoned_by_people(looks)):
            raise FleetError(*kept)
        self._take_over(looks, patience)
        before, after = self._adapters(group)
        if before - after and not state.undoing and self.front.gateways:
            # Remove a name from gateways before a server drops it.
            self._tell_gateways()
        why = f"upgrade {self.id}: {self.journal.state.what}"
        cordon = node_questions.cordon(self.by, why, upgrade=self.id)
        self._marks(dict.fromkeys(group.nodes, cordon), patience)
        drain = {
            name: node_questions.drain(replicas, self.by, why, upgrade=self.id)
            for name, replicas in group_units.replicas_on(group, looks).items()
            if replicas
        }
        self._marks(drain, patience)
        servers = traffic.servers_of(self.servers, group.replicas)
        self.front.set_servers("drain", servers, patience)
        seconds = max((self._settings_of(r).drain_seconds for r in group.replicas), default=0)
        asked = {
            name: node_questions.wait_quiet(units_, seconds)
            for name, units_ in group_units.units_on(group, looks).items()
            if units_
        }
        quiet = self.nodes.ask_until(asked, RequestsLeft.read, patience)
        left = sum(each.total for each in quiet.values())
        # vLLM counts the requests that gateways have passed on; gateways count those that they
        # still hold.
        spent = time.monotonic() - began
        left = max(left, self.front.wait(servers, max(seconds - spent, 2)))
        unknown = sorted(url for each in quiet.values() for url in each.unknown)
        return {
            "left": left,
            "seconds": round(time.monotonic() - began, 1),
            **({"unknown": unknown} if unknown else {}),
        }

    def _take_over(self, looks: Mapping[str, NodeLook], patience: float) -> None:
        """Remove marks that an earlier upgrade left and could not lift."""
        left: dict[str, list[tuple[str, str]]] = {}
        for name, look in looks.items():
            marks = {**look.drained, **({"": look.cordon} if look.cordon else {})}
            for replica, mark in marks.items():
                if mark.upgrade not in {None, self.id}:
                    left.setdefault(str(mark.upgrade), []).append((name, replica))
        for other, marked in left.items():
            drained = {name: [r for n, r in marked if n == name and r] for name, _ in marked}
            undrain = {n: node_questions.undrain(r, upgrade=other) for n, r in drained.items() if r}
            self._marks(undrain, patience)
            uncordon = node_questions.uncordon(upgrade=other)
            self._marks({name: uncordon for name, replica in marked if not replica}, patience)

    def change(self, group: Group) -> Mapping[str, Any]:
        """Stop all units on the nodes, and converge the software below vLLM."""
        looks = self._look(group, GONE_SECONDS)
        asked = {
            name: node_questions.stop(look.units, stop_seconds=self._stop_seconds(group))
            for name, look in looks.items()
            if look.units
        }
        self._change_units(group, asked, GONE_SECONDS, None)
        name = f"node-{'+'.join(group.nodes)}"
        log = self.deploy.run("deploys/node.py", NODE_SECONDS, group.nodes, name)
        self._look(group, GONE_SECONDS)
        return {"log": str(log)}

    def switch(self, group: Group) -> Mapping[str, Any]:
        """Switch the units to the prepared state; in a rollback, to the kept one."""
        looks = self._known_looks(group)
        if self.back_to:
            return self._restore(group, self.back_to, looks)
        return self._switch(group, looks)

    def restore(self, group: Group) -> Mapping[str, Any]:
        """Switch the units back to their previous state; in a rollback, to the prepared one."""
        looks = self._look(group, GONE_SECONDS)
        if self.back_to:
            return self._switch(group, looks)
        return self._restore(group, self.id, looks)

    def _switch(self, group: Group, looks: Mapping[str, NodeLook]) -> Mapping[str, Any]:
        seconds = self._stop_seconds(group)
        asked = {
            name: node_questions.switch(self.id, units_, stop_seconds=seconds)
            for name, units_ in group_units.units_on(group, looks).items()
            if units_
        }
        return self._change_units(group, asked, GONE_SECONDS, "switched")

    def _restore(self, group: Group, kept: str, looks: Mapping[str, NodeLook]) -> Mapping[str, Any]:
        seconds = self._stop_seconds(group)
        asked = {
            name: node_questions.restore(
                kept,
                sorted(group_units.unit_names(group) & {*look.kept[kept].units})
                if kept in look.kept
                else (),
                stop_seconds=seconds,
            )
            for name, look in looks.items()
        }
        return self._change_units(group, asked, GONE_SECONDS, "restored")

    def _change_units(
        self, group: Group, asked: Mapping[str, NodeQuestion], patience: float, word: str | None
    ) -> Mapping[str, Any]:
        found = self.nodes.ask_until(asked, SwitchAnswer.read, patience)
        if word:
            for name, each in sorted(found.items()):
                self.journal.append(
                    word,
                    wave=self.journal.state.groups[group.id].wave,
                    group=group.id,
                    node=name,
                    stopped_at=each.stopped_at,
                    down_at=each.down_at,
                    started_at=each.started_at,
                    clock=each.clock,
                    cut=each.cut,
                    changed=each.changed,
                    removed=each.removed,
                )
        if problems := [
            "\n".join([f"{name}: {each.problem}", *each.journal[-20:]])
            for name, each in sorted(found.items())
            if each.problem
        ]:
            raise FleetError(*problems)
        gaps = {name: round(each.gap, 2) for name, each in found.items() if each.gap is not None}
        cut = sorted(unit for each in found.values() for unit in each.cut)
        return {"seconds": gaps, **({"cut": cut} if cut else {})}

    def ready(self, group: Group, *, back: bool) -> Mapping[str, Any]:
        """Wait until every server completes a prompt."""
        began = time.monotonic()
        looks = self._look(group, GONE_SECONDS)
        old = back != bool(self.back_to)
        wanted = group_units.expected_units(group, looks, self.kept_upgrade, old=old)
        seconds = start_seconds(map(self._settings_of, group.replicas))
        asked = {
            name: node_questions.wait_ready(each, seconds) for name, each in wanted.items() if each
        }
        found = self.nodes.ask_until(asked, ReadyAnswer.read, seconds + READY_SECONDS)
        if problems := [
            f"{name}: {why}" for name, each in sorted(found.items()) for why in each.why
        ]:
            raise FleetError(*problems)
        every = [unit for each in found.values() for unit in each.units.values()]
        return {
            "seconds": round(time.monotonic() - began, 1),
            "load_seconds": {
                stage_of(unit.unit): round(unit.at - unit.since, 1)
                for unit in every
                if unit.at is not None and unit.since is not None
            },
            "nodes": {
                name: {unit.unit: unit.at for unit in each.units.values()}
                for name, each in found.items()
            },
        }

    def golden(self, group: Group) -> Verdict:
        """
        Judge the replicas' answers to golden prompts.

        The answers are compared with those of the baseline: the replica's own, or another replica's
        of the model.
        """
        replicas = self._replicas_after(group)
        settings = {name: each.settings for name, each in self.declared.gpu_nodes.items()}
        seen = self._observe(observe.questions(replicas, settings, 1))
        verdicts = []
        for replica in replicas:
            golden = self._golden(replica)
            before = self._baseline_of("answers", replica)
            was = baseline.answers_from_json(before) if before else {}
            if golden.prompts and not was:
                # No replica of its model answered before, so any answer passes.
                verdicts.append(gates.golden({}, seen.answers.get(replica, {}), 0, 0))
                continue
            now = seen.answers.get(replica, {})
            verdicts.append(gates.golden(was, now, golden.same, golden.cosine))
        return (
            gates.combine(verdicts)
            if verdicts
            else Verdict(True, ("the group has no replica left to test",))
        )

    def undrain(self, group: Group) -> Mapping[str, Any]:
        """Remove this upgrade's marks, and send requests again to replicas without other marks."""
        state = self.journal.state
        looks = self._look(group, GONE_SECONDS)
        undrain = {
            name: node_questions.undrain(replicas, upgrade=self.id)
            for name, replicas in group_units.marked_on(group, looks, self.id).items()
            if replicas
        }
        marks = self._marks(undrain, GONE_SECONDS)
        mine = set(group.replicas)
        free = [n for n in group.nodes if not set(state.marks_on(n)) - mine]
        uncordon = node_questions.uncordon(upgrade=self.id)
        ours = [n for n in free if looks[n].cordon and looks[n].cordon.upgrade == self.id]  # type: ignore[union-attr]
        marks |= self._marks(dict.fromkeys(ours, uncordon), GONE_SECONDS)
        drained = {
            replica: mark for each in marks.values() for replica, mark in each.drained.items()
        }
        drained = {replica: mark for replica, mark in drained.items() if replica in mine}
        cordons = {n: look.cordon for n, look in looks.items() if look.cordon}
        theirs = {n: mark for n, mark in cordons.items() if mark.upgrade is None}
        for replica, mark in drained.items():
            text = f"{replica} stays drained, because {mark} has also marked the replica"
            self.journal.append("noted", wave=state.wave, group=group.id, text=text)
        for name, mark in theirs.items():
            text = f"{name} stays cordoned, because {mark} has also marked the node"
            self.journal.append("noted", wave=state.wave, group=group.id, text=text)
        served = [each for each in group.replicas if each not in drained]
        self._update_gateways(group)
        self.front.set_servers("ready", traffic.servers_of(self.servers, served), GONE_SECONDS)
        return {"kept": sorted(drained)} if drained else {}

    def _update_gateways(self, group: Group) -> None:
        """
        Update the gateways if replicas or adapters are added or removed.

        Gateways use only listed replicas, and list an adapter once all servers of its model load
        it.
        """
        before, after = self._adapters(group)
        if (group.comes or group.goes or before != after) and self.front.gateways:
            self._tell_gateways()

    def _adapters(self, group: Group) -> tuple[set[str], set[str]]:
        """
        Return the names of the adapters that the group's replicas load before and after the change.
        """
        runs, planned = (
            {name for each in stages if each.id in group.replicas for name in each.adapters}
            for stages in (self.found.running, self.found.plan.stages)
        )
        return runs, planned

    def soak(self, group: Group) -> Mapping[str, Any]:
        """Observe the replicas under requests for `soak_seconds`."""
        settings = {name: each.settings for name, each in self.declared.gpu_nodes.items()}
        asked = observe.questions(self._replicas_after(group), settings, 0)
        first = self._observe(asked)
        end = time.monotonic() + self.rules.gates.soak_seconds
        while time.monotonic() < end and not must_roll_back(self.journal.state):
            gevent.sleep(min(1.0, max(end - time.monotonic(), 0)))
        last = self._observe(asked)
        return {
            "seconds": self.rules.gates.soak_seconds,
            "traffic": {
                name: baseline.traffic_between(first.readings.get(name), reading).as_json()
                for name, reading in last.readings.items()
            },
            "alerts": last.alerts.as_json(),
        }

    def judge(self, group: Group) -> Verdict:
        """Judge the replicas' traffic, and the findings and alerts about their nodes."""
        soaked = next(
            entry.said
            for entry in reversed(self.journal.entries)
            if entry.what == "soaked" and entry.group == group.id
        )
        before = self.journal.state.baseline
        verdicts = []
        for replica, said in (soaked.get("traffic") or {}).items():
            was = self._baseline_of("traffic", replica)
            was = Traffic.from_json(was) if was else Traffic(0.0, finished={}, answered={})
            verdicts.append(gates.traffic(was, Traffic.from_json(said), self.rules.gates))
        if self.rules.gates.alerts:
            alerts = Alerts.from_json(before["alerts"])
            now = Alerts.from_json(soaked["alerts"])
            watching = [each.settings.monitoring for each in self.declared.nodes.values()]
            holds = files.hold_seconds([each.alerts for each in watching if each])
            verdicts.append(gates.alerts(alerts, now, group.nodes, holds))
        if self.rules.gates.findings:
            verdicts.append(self._findings(group, Findings.from_json(before["findings"])))
        return gates.combine(verdicts)

    def _findings(self, group: Group, before: Findings) -> Verdict:
        documents = observe.survey(self.nodes, self.declared)
        report = assessment.check_nodes(documents, self.declared.gpu_nodes)
        found = Findings.unaccepted(report)
        here = set(group.nodes)
        return gates.findings(
            Findings(
                tuple(n for n in before.nodes if n in here),
                tuple(each for each in before.stops if each.node in here),
            ),
            Findings(
                tuple(n for n in found.nodes if n in here),
                tuple(each for each in found.stops if each.node in here),
            ),
        )

    # -- look-ups

    def _observe(self, asked: list[baseline.Question]) -> baseline.Observation:
        homes = wave_silences.alertmanagers(self.declared.nodes)
        return observe.observe_replicas(self.nodes, asked, homes, time.time(), self.silent)

    def _look(self, group: Group, patience: float) -> dict[str, NodeLook]:
        """
        Query the state of a group's nodes. Raises `LostError` if this upgrade lost the lock of a
        node.
        """
        found = observe.look(self.nodes, group.nodes, patience)
        for name, each in found.items():
            if each.lock is None or each.lock.id != self.id:
                owner = each.lock or "nobody"
                raise LostError(
                    f"{name}: this upgrade stops, because it lost the node's lock to {owner}"
                )
        self.looks |= found
        return found

    def _known_looks(self, group: Group) -> dict[str, NodeLook]:
        """Return the node states of the preceding drain; after a resume, query them again."""
        if set(group.nodes) <= set(self.looks):
            return {name: self.looks[name] for name in group.nodes}
        return self._look(group, GONE_SECONDS)

    def _marks(self, asked: Mapping[str, NodeQuestion], patience: float) -> dict[str, Marks]:
        return self.nodes.ask_until(asked, Marks.read, patience)

    def _nodes_of(self, replica: str, group: Group) -> tuple[str, ...]:
        """Return the nodes on which a replica runs before the change."""
        found = {each.node for each in self.found.running if each.id == replica}
        return tuple(sorted(found)) or group.nodes

    def _replicas_after(self, group: Group) -> dict[str, tuple[str, ...]]:
        """Return the replicas after the change, with their nodes."""
        planned: dict[str, set[str]] = {}
        for stage in self.found.plan.stages:
            planned.setdefault(stage.id, set()).add(stage.node)
        if self.back_to:
            return {r: self._nodes_of(r, group) for r in group.replicas if r not in group.comes}
        return {
            replica: tuple(sorted(planned.get(replica, set(group.nodes))))
            for replica in group.replicas
            if replica not in group.goes
        }

    def _baseline_of(self, what: str, replica: str) -> Any:
        """Return the baseline of a replica, or else of another replica of the model."""
        found = self.journal.state.baseline.get(what) or {}
        if replica in found:
            return found[replica]
        return next((found[r] for r in sorted(found) if model_of(r) == model_of(replica)), None)

    def _settings_of(self, replica: str) -> Served:
        """Return the settings of a replica's model; for a removed model, the defaults."""
        model = model_of(replica)
        for node in self.declared.gpu_nodes.values():
            if found := node.settings.serving.get(model):
                return found
        return Served(model=f"/{model}")

    def _golden(self, replica: str) -> Golden:
        return self._settings_of(replica).golden

    def _stop_seconds(self, group: Group) -> int:
        return max((stop_seconds(self._settings_of(r)) for r in group.replicas), default=60)
