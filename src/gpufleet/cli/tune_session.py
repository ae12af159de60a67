"""One run of `gpufleet measure --tune`: settings tried on one drained replica, then taken back.

Border. It types what an operator would: drain, deploy with `--data`, measure, deploy, undrain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from gpufleet.cli.common_options import operator_name
from gpufleet.cli.drain_session import NodeDrains
from gpufleet.cli.measure_output import say, write_result
from gpufleet.cli.measure_session import Session
from gpufleet.cli.measure_wanted import Wanted
from gpufleet.cli.served_fleet import NodeAnswers
from gpufleet.errors import FleetError
from gpufleet.fleet.assessment import plan_fleet
from gpufleet.fleet.fleet_plan import Assessment
from gpufleet.formatting import count_of, join_names
from gpufleet.load_test import load_target, tuning
from gpufleet.load_test.subjects import measurements_folder
from gpufleet.load_test.tuning import TENSOR, WHY, Trial, Tuning
from gpufleet.planning.candidates import Verdict
from gpufleet.planning.explanation import Action
from gpufleet.settings.serving_settings import Served
from gpufleet.upgrade.run.deploy_process import Deploy

LOGS = ".gpufleet/tuning"
"""Of a project: what the deploys print."""
DEPLOY_SECONDS = 900
"""Of a deploy, beside the time that the model may take to stop and to start."""


class TuneSession:
    """The replica whose settings are tried."""

    def __init__(self, session: Session, wanted: Wanted) -> None:
        self.session, self.project = session, session.project
        self.folder = wanted.output or measurements_folder(session.inventory)
        self.drains = NodeDrains(self.project, session.nodes)
        self.typed = tuning.parse_values(wanted.tries)
        found = session.look()
        self.model = load_target.choose_model(found.declared, wanted.model)
        load_target.contract_of(self.model, found.declared, wanted.share)
        load_target.require_text(self.model, found.declared)
        marks = {name: m for each in found.looks.values() for name, m in each.drained.items()}
        self.running, self.left = tuning.choose_replica(
            self.model, wanted.replica, found.declared, marks
        )
        self.replica, self.node = self.running.id, self.running.node
        # Those of its marks: an undrain lifts the cordon of the same words only.
        self.by = self.left.by if self.left else operator_name()
        self.why = self.left.why if self.left else f"{WHY}: tries settings on {self.replica}"
        session.wanted = replace(wanted, model=self.model, replica=self.replica)
        self.served = load_target.served_as(self.model, found.declared)
        self.deployed: Mapping[str, int] | None = {}
        """What the replica runs with; None: a deploy of it failed."""
        self._check_node(found)
        self.tuning = Tuning(self._values(found))

    # -- what is tried

    def _check_node(self, found: NodeAnswers) -> None:
        """Refuse a node that is in use for something else, or does not run what is declared."""
        drain, looks = self.drains.find(self.node)
        if others := [each for each in drain.last if each != self.model]:
            raise FleetError(
                f"{self.node}: nothing else serves {join_names(others)}, and the node is drained "
                "while settings are tried: choose a replica of another node, --replica"
            )
        mark = looks[self.node].cordon
        if mark and not mark.why.startswith(WHY):
            raise FleetError(f"{self.node} is cordoned by {mark}: `gpufleet uncordon` it first")
        plan = self._plan(found, {})
        change = next((each for each in plan.changes if each.replica == self.replica), None)
        if self.left is None and (change is None or change.action is not Action.STAY):
            what = change.why if change else "the plan has no such replica"
            raise FleetError(
                f"{self.replica} does not run as it is declared ({what}): `gpufleet upgrade` first"
            )

    def _values(self, found: NodeAnswers) -> dict[str, tuple[int, ...]]:
        """Return the values to try, by setting, without those that no plan takes."""
        values = self.typed or tuning.usual_values(
            self.running.arguments
            if self.left is None
            else [f"--{name} {value}" for name, value in self.served.flags.items()],
            self._divisions(found),
            self.served.tensor_parallel or len(self.running.gpu_uuids),
        )
        left: dict[str, tuple[int, ...]] = {}
        for name, every in values.items():
            refused = {each: self._refusal(found, {name: each}) for each in every}
            for each, why in refused.items():
                if why:
                    say(f"not tried: {name} {each}: {why}")
            left[name] = tuple(each for each in every if not refused[each])
        if not any(left.values()):
            raise FleetError(f"{self.replica}: there is no value to try: name some with --try")
        return left

    def _divisions(self, found: NodeAnswers) -> list[int]:
        """Return the sizes of tensor-parallel groups in which the model fits on the node."""
        try:
            plan = self._plan(found, {TENSOR: None}).plan
        except FleetError:
            return []
        return [
            each.division.tensor_parallel
            for every in plan.candidates
            if every.model == self.model and self.node in every.names
            for each in every.candidates
            if each.verdict is Verdict.FITS and each.division.gpus == each.division.tensor_parallel
        ]

    def _refusal(self, found: NodeAnswers, settings: Mapping[str, int]) -> str:
        """Return why a plan with these settings is not to be deployed; "": it is."""
        before = {each.id for each in found.declared.running if each.node == self.node}
        try:
            plan = self._plan(found, tuning.fields_of(self.served, settings)).plan
        except FleetError as error:
            return error.problems[0]
        after = {f"{each.model}-{each.replica}" for each in plan.stages_on(self.node)}
        if after != before:
            return f"{self.node} would run {join_names(sorted(after)) or 'nothing'}"
        return ""

    def _plan(self, found: NodeAnswers, fields: Mapping[str, object]) -> Assessment:
        """Return the plan of all nodes with fields of the model in place of the declared ones."""

        def change(model: str, served: Served) -> Served:
            return served.model_copy(update=dict(fields)) if model == self.model else served

        answers = {
            name: found.documents.get(name, "it does not answer") for name in self.project.gpu_nodes
        }
        # A killed run has left a cordon, which is lifted where it would be in the way.
        here = {**found.documents[self.node], "cordon": None}
        return plan_fleet(
            {**answers, self.node: here},
            {
                name: replace(each, settings=each.settings.with_serving(change))
                for name, each in self.project.gpu_nodes.items()
            },
            inventory=self.session.inventory,
        )

    # -- what is done

    def tune(self) -> Tuning:
        """Try all values; the replica then runs as it is declared, and gets requests."""
        planned = self.tuning.planned
        say(
            f"{self.replica} on {self.node}: {count_of(len(planned), 'measurement')}, with a "
            f"restart before each but the first: {'; '.join(map(tuning.describe, planned))}"
        )
        if self.left:
            say(
                f"note: {self.replica}: `measure --tune` of {self.left.by} was interrupted: its "
                "declared settings are deployed first"
            )
            self.deployed = None
        try:
            drained = self.drains.drain(self.node, self.why, None, force=True)
            if not drained["quiet"]:
                raise FleetError(
                    f"{self.node}: {drained['left']} requests are left after {drained['seconds']} "
                    "s: run it again when they have ended"
                )
            while (settings := self.tuning.next()) is not None:
                self.tuning.add(self._try(settings))
        finally:
            self._put_back()
        return self.tuning

    def _try(self, settings: Mapping[str, int]) -> Trial:
        say(f"--- {self.replica}, {tuning.describe(settings)}")
        try:
            self._deploy(settings)
            found = self.session.measure()
        except FleetError as error:
            if not settings:
                raise
            say(f"not measured: {error}")
            return Trial(settings, why=error.problems[0])
        file = write_result(found, self.folder)[0]
        say(f"written: {file}")
        return Trial(settings, found, found.found.why, file)

    def _deploy(self, settings: Mapping[str, int]) -> None:
        if self.deployed == settings:
            return
        divided = self.deployed is None or TENSOR in {*settings, *self.deployed}
        self.deployed = None
        seconds = self.served.start_seconds + self.served.drain_seconds + DEPLOY_SECONDS
        deploy = Deploy(self.session.inventory, self.project.root / LOGS)
        data = tuning.data_of(self.model, settings)
        if divided:  # a cordoned node gets no replica of another division
            self.drains.uncordon(self.node)
        try:
            deploy.run("deploys/vllm.py", seconds, (self.node,), self.replica, data)
        finally:
            if divided:
                self.drains.cordon(self.node, self.by, self.why)
        self.deployed = dict(settings)

    def _put_back(self) -> None:
        """Have the replica run as it is declared, and get requests."""
        inventory = self.session.inventory
        say(f"--- {self.replica}, back to what is declared")
        try:
            self._deploy({})
            found = self.drains.undrain(self.node, force=False)
        except FleetError as error:
            raise FleetError(
                *error.problems,
                f"{self.replica} is still drained, and may run with a setting that was tried: "
                f"`gpufleet deploy vllm {inventory} --limit {self.node}`, then `gpufleet undrain "
                f"{inventory} {self.node}`; or the next `measure --tune` does both",
            ) from None
        for each in found["problems"]:
            say(f"note: {each}")
