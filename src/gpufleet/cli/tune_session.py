"""Run `gpufleet measure --tune` once: try settings on one drained replica, then restore it.

Border. The module runs the commands that an operator would run: drain, deploy with `--data`,
measure, deploy, undrain.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from gpufleet.cli.common_options import operator_name
from gpufleet.cli.drain_session import NodeDrains
from gpufleet.cli.measure_output import say, write_result
from gpufleet.cli.measure_session import Session
from gpufleet.cli.measure_wanted import MeasureOptions
from gpufleet.errors import FleetError
from gpufleet.fleet.trial_plans import TrialPlans
from gpufleet.formatting import count_of, join_names
from gpufleet.load_test import load_target, tuning
from gpufleet.load_test.result import Measurement
from gpufleet.load_test.subjects import measurements_folder
from gpufleet.load_test.tuning import TENSOR, WHY, TrialRun, Tuning
from gpufleet.upgrade.run.deploy_process import Deploy

LOGS = ".gpufleet/tuning"
"""The folder in a project for the output of deploys."""
DEPLOY_SECONDS = 900
"""
Time limit in seconds for a deploy, in addition to the time for stopping and starting the model.
"""


class TuneSession:
    """Tries settings on one replica."""

    def __init__(self, session: Session, wanted: MeasureOptions) -> None:
        self.session, self.project = session, session.project
        self.folder = wanted.output or measurements_folder(session.inventory)
        self.drains = NodeDrains(self.project, session.nodes)
        self.typed = tuning.parse_values(wanted.tries)
        found = session.look()
        model = load_target.choose_model(found.declared, wanted.model)
        load_target.contract_of(model, found.declared, wanted.share)
        marks = {name: m for each in found.looks.values() for name, m in each.drained.items()}
        self.running, self.left = tuning.choose_replica(
            model, wanted.replica, found.declared, marks
        )
        self.replica, self.node = self.running.id, self.running.node
        # The author and reason of the marks. An undrain removes only a cordon with the same two.
        self.by = self.left.by if self.left else operator_name()
        self.why = self.left.why if self.left else f"{WHY}: settings are tried on {self.replica}"
        session.wanted = replace(wanted, model=model, replica=self.replica)
        self.plans = TrialPlans(
            found.documents, self.project.gpu_nodes, self.running, session.inventory
        )
        self.served = self.plans.served
        self._check_node()
        self.tuning = Tuning(self._values())
        self._divided = self.left is not None
        """Whether the replica may run with a tensor parallel size other than the declared one."""

    def _check_node(self) -> None:
        """
        Raise `FleetError` for a node that cannot be used for trials.

        These are nodes with a cordon, nodes with the last replica of a different model, and nodes
        whose replica does not run as declared.
        """
        problems = []
        drain, looks = self.drains.find(self.node)
        if others := [each for each in drain.last if each != self.running.model]:
            problems.append(
                f"{self.node}: no other node serves {join_names(others)}, but this node is "
                "drained while settings are tried: choose a replica of a different node "
                "with --replica"
            )
        mark = looks[self.node].cordon
        if mark and not mark.why.startswith(WHY):
            problems.append(
                f"{self.node} is cordoned by {mark}: remove the cordon with `gpufleet uncordon` "
                "first"
            )
        if self.left is None and (why := self.plans.problem()):
            problems.append(
                f"{self.replica} does not run with the declared settings ({why}): run "
                "`gpufleet upgrade` first"
            )
        if problems:
            raise FleetError(*problems)

    def _values(self) -> dict[str, tuple[int, ...]]:
        """Return the values to try, by setting. Values that the planner refuses are left out."""
        # If an earlier run was killed, the unit may still have a value that was tried.
        arguments = [f"--{name} {value}" for name, value in self.served.flags.items()]
        values = self.typed or tuning.usual_values(
            arguments if self.left else self.running.arguments,
            self.plans.divisions(),
            self.served.tensor_parallel or len(self.running.gpu_uuids),
        )
        found: dict[str, tuple[int, ...]] = {}
        for name, every in values.items():
            refused = {each: self.plans.refusal({name: each}) for each in every}
            for each, why in refused.items():
                if why:
                    say(f"not tried: {name} {each}: {why}")
            found[name] = tuple(each for each in every if not refused[each])
        if not any(found.values()):
            raise FleetError(f"{self.replica}: there is no value to try: give values with --try")
        return found

    def tune(self) -> Tuning:
        """Try all values. Afterwards, the replica runs as declared and receives requests again."""
        planned = self.tuning.planned
        say(
            f"{self.replica} on {self.node}: {count_of(len(planned), 'measurement')}, with "
            "a restart before each measurement except the first: "
            f"{'; '.join(map(tuning.describe, planned))}"
        )
        if self.left:
            say(
                f"note: {self.replica}: `measure --tune` by {self.left.by} was interrupted, "
                "so gpufleet first deploys the declared settings"
            )
        TrialRun(self.tuning, self, say, is_as_declared=self.left is None).run()
        return self.tuning

    # -- what is done

    def drain(self) -> None:
        """Drain the node, as `TrialActions` requires."""
        found = self.drains.drain(self.node, self.why, None, force=True)
        if not found["quiet"]:
            raise FleetError(
                f"{self.node}: {found['left']} requests are still running after "
                f"{found['seconds']} s: try again when these requests have ended"
            )

    def deploy(self, settings: Mapping[str, int]) -> None:
        """Deploy the node with these settings, as `TrialActions` requires."""
        seconds = self.served.start_seconds + self.served.drain_seconds + DEPLOY_SECONDS
        deploy = Deploy(self.session.inventory, self.project.root / LOGS)
        data = tuning.deploy_data(self.running.model, settings)
        # A replica with a different tensor parallel size cannot be placed on a cordoned node.
        self._divided = self._divided or TENSOR in settings
        if self._divided:
            self.drains.uncordon(self.node)
        try:
            deploy.run("deploys/vllm.py", seconds, (self.node,), self.replica, data)
        except FleetError as error:
            raise FleetError(*error.problems, *(() if settings else self._what_is_left())) from None
        finally:
            if self._divided:
                self.drains.cordon(self.node, self.by, self.why)
        self._divided = TENSOR in settings

    def measure(self) -> tuple[Measurement, Path]:
        """Measure the replica, as `TrialActions` requires."""
        found = self.session.measure()
        file = write_result(found, self.folder)[0]
        say(f"written: {file}")
        return found, file

    def undrain(self) -> None:
        """Undrain the node, as `TrialActions` requires."""
        try:
            found = self.drains.undrain(self.node, force=False)
        except FleetError as error:
            raise FleetError(*error.problems, *self._what_is_left()) from None
        for each in found["problems"]:
            say(f"note: {each}")

    def _what_is_left(self) -> tuple[str]:
        inventory = self.session.inventory
        return (
            f"{self.replica} is still drained, and may run with a setting that was tried: "
            f"run `gpufleet deploy vllm {inventory} --limit {self.node}`, then `gpufleet "
            f"undrain {inventory} {self.node}`. The next `measure --tune` also does both",
        )
