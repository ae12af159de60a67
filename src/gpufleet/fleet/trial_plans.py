"""Plan with changed settings of one model, to find the values that can be tried.

This module reads the same files as a plan. It queries no node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.fleet.assessment import plan_fleet
from gpufleet.fleet.fleet_plan import Assessment, running_stages
from gpufleet.formatting import join_names
from gpufleet.load_test.tuning import TENSOR, fields_of
from gpufleet.planning.candidates import Verdict
from gpufleet.planning.explanation import Action
from gpufleet.planning.stage import Running
from gpufleet.settings.node_variables import NodeVars
from gpufleet.settings.serving_settings import Served


@dataclass(frozen=True)
class TrialPlans:
    """The fleet, and the replica whose model is planned with different settings."""

    documents: Mapping[str, Mapping[str, Any]]
    """Probes of the nodes that answered."""
    declared: Mapping[str, NodeVars]
    """The GPU nodes."""
    running: Running
    inventory: str

    @property
    def served(self) -> Served:
        """
        Return the model's declared settings, which are equal on all nodes that declare the model.
        """
        every = (each.settings.serving for each in self.declared.values())
        return next(each[self.running.model] for each in every if self.running.model in each)

    def problem(self) -> str:
        """Return why the replica does not run as declared, or "" if it runs as declared."""
        changes = self._plan({}).changes
        change = next((each for each in changes if each.replica == self.running.id), None)
        if change is None:
            return "the plan has no such replica"
        return "" if change.action is Action.STAY else change.why

    def divisions(self) -> tuple[int, ...]:
        """Return the sizes of tensor-parallel groups in which the model fits on the node."""
        try:
            plan = self._plan({TENSOR: None}).plan
        except FleetError:
            return ()
        return tuple(
            each.division.tensor_parallel
            for every in plan.candidates
            if every.model == self.running.model and self.running.node in every.names
            for each in every.candidates
            if each.verdict is Verdict.FITS and each.division.gpus == each.division.tensor_parallel
        )

    def refusal(self, settings: Mapping[str, int]) -> str:
        """
        Return why a plan with these settings must not be deployed on the node, or "" if it may.
        """
        node = self.running.node
        before = {each.id for each in running_stages(self.documents) if each.node == node}
        try:
            plan = self._plan(fields_of(self.served, settings)).plan
        except FleetError as error:
            return error.problems[0]
        after = {f"{each.model}-{each.replica}" for each in plan.stages_on(node)}
        if after != before:
            return f"{node} would run {join_names(sorted(after)) or 'nothing'}"
        return ""

    def _plan(self, fields: Mapping[str, Any]) -> Assessment:
        """
        Return the plan of all nodes, with these fields of the model instead of the declared fields.
        """

        def change(model: str, served: Served) -> Served:
            return served.model_copy(update=fields) if model == self.running.model else served

        node = self.running.node
        answers = {
            name: self.documents.get(name, "the node does not answer") for name in self.declared
        }
        return plan_fleet(
            # Ignore the node's cordon: if a killed run left one, it is removed before the deploys.
            {**answers, node: {**self.documents[node], "cordon": None}},
            {
                name: replace(each, settings=each.settings.with_serving(change))
                for name, each in self.declared.items()
            },
            inventory=self.inventory,
        )
