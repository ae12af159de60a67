"""Take a node out of service and back: set marks, inform gateways, and wait for requests to end.

Border. `fleet/draining.py` determines the replicas that a drain affects. `on_node/change/change.py`
sets the marks. `upgrade/run/traffic.py` informs the gateways, as in an upgrade.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from gpufleet.cli.common_options import operator_name
from gpufleet.errors import FleetError
from gpufleet.fleet import draining, fleet_plan
from gpufleet.fleet.draining import Drain
from gpufleet.inventory.loader import Fleet
from gpufleet.node.marks import Mark, deploy_problems
from gpufleet.on_node.common.stage_units import unit_of
from gpufleet.upgrade.run import node_questions, observe
from gpufleet.upgrade.run.connections import Nodes
from gpufleet.upgrade.run.node_answers import Marks, NodeLook, RequestsLeft
from gpufleet.upgrade.run.traffic import Frontends

TELL_SECONDS = 60
"""Time limit in seconds within which gateways that do not answer are queried again."""


class NodeDrains:
    """Takes an inventory's nodes out of service, and returns them to service."""

    def __init__(self, declared: Fleet, nodes: Nodes) -> None:
        self.declared, self.nodes = declared, nodes
        self.front = Frontends(nodes, declared)

    def drain(self, name: str, why: str, seconds: int | None, *, force: bool) -> dict[str, Any]:
        """Drain a node, and return the outcome."""
        found, looks = self.find(name)
        deploys = {node: each for node in found.every_node if (each := looks[node].deploy)}
        if problems := deploy_problems(deploys):
            raise FleetError(*problems)
        if not force and (refused := draining.refusal(found)):
            raise FleetError(refused)
        by = operator_name()
        marks = self._set_marks({name: node_questions.cordon(by, why)})
        # First marks, then gateways: if the command is killed in between, the marks show the aim.
        marks |= self._set_marks(
            {
                node: node_questions.drain(found.replicas_on(node), by, why)
                for node in found.every_node
                if found.replicas_on(node)
            }
        )
        # A deploy may have begun since the nodes were queried.
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
            "cordon": mark_json(marks[name].cordon),
            "told": self.front.is_declared(),
            "left": left,
            "unknown": unknown,
            "seconds": round(time.monotonic() - began, 1),
            "quiet": not left and not unknown,
            "problems": [] if self.front.is_declared() else [_NOBODY],
        }

    def undrain(self, name: str, *, force: bool) -> dict[str, Any]:
        """Undo a drain, and return the outcome."""
        found, looks = self.find(name)
        # A drained replica that has no unit here, because it was stopped, is undrained as well.
        here = {**dict.fromkeys(looks[name].drained, (name,)), **found.nodes}
        stays = {
            replica: mark
            for replica, mark in looks[name].drained.items()
            if mark.upgrade is not None and not force
        }
        problems = [f"{replica} stays drained: {mark}" for replica, mark in sorted(stays.items())]
        free = sorted(set(here) - set(stays))
        # First gateways, then marks: if the command is killed in between, an undrain repeats both.
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
            "cordon": mark_json(kept),
            "told": self.front.is_declared(),
            "problems": problems,
        }

    def cordon(self, name: str, by: str, why: str) -> None:
        """Cordon a node. If the node is already cordoned, its cordon does not change."""
        self._set_marks({name: node_questions.cordon(by, why)})

    def uncordon(self, name: str) -> None:
        """Remove the cordon that a person has set. The marks of drained replicas stay."""
        self._set_marks({name: node_questions.uncordon()})

    def find(self, name: str) -> tuple[Drain, Mapping[str, NodeLook]]:
        """Return the replicas that a node's drain affects, and the marks of all nodes."""
        answers = observe.survey(self.nodes, self.declared)
        if isinstance(said := answers[name], str):
            raise FleetError(f"{name}: {said}")
        documents = {node: each for node, each in answers.items() if not isinstance(each, str)}
        looks = observe.look(self.nodes, documents)
        out = {(node, replica) for node, each in looks.items() for replica in each.drained}
        found = draining.find_drain(name, fleet_plan.running_stages(documents), out)
        return found, looks

    def _set_marks(self, wanted: Mapping[str, Any]) -> dict[str, Marks]:
        return self.nodes.ask_until(wanted, Marks.read, 0)

    def _drain_seconds(self, name: str, looks: Mapping[str, NodeLook]) -> int:
        """
        Return the longest `drain_seconds` of the models that run on a node.

        If none of its models runs, return the longest of all models that the node declares.
        """
        serving = self.declared.gpu_nodes[name].settings.serving
        here = {
            model
            for model in serving
            for unit in looks[name].units.values()
            if unit.replica.rpartition("-")[0] == model
        }
        return max((serving[model].drain_seconds for model in here or serving), default=0)

    def _wait_until_quiet(self, found: Drain, seconds: int) -> tuple[int, list[str]]:
        """
        Wait until no requests are left, but at most `seconds`.

        Returns the number of remaining requests, and the servers that did not report their number.
        """
        end = time.monotonic() + seconds
        queued = self.front.wait(found.servers, seconds)
        asked = {
            node: node_questions.wait_quiet(
                [*map(unit_of, found.replicas_on(node))],
                max(0.0, end - time.monotonic()),
            )
            for node in found.every_node
            if found.replicas_on(node)
        }
        answers = self.nodes.ask_until(asked, RequestsLeft.read, 0)
        left = max(queued, sum(each.total for each in answers.values()))
        return left, sorted(url for each in answers.values() for url in each.unknown)


_NOBODY = "neither a gateway nor a `balancer` is set, so clients keep sending requests to this node"


def _is_of_drain(cordon: Mark, drained: Any) -> bool:
    """
    Return whether a drain has set a cordon: its author and reason are those of a drained replica.
    """
    return any((each.by, each.why) == (cordon.by, cordon.why) for each in drained)


def mark_json(mark: Mark | None) -> dict[str, Any] | None:
    """Return a mark as plain values for `json.dumps`."""
    if mark is None:
        return None
    return {"by": mark.by, "why": mark.why, "since": mark_time(mark), "upgrade": mark.upgrade}


def mark_time(mark: Mark) -> str:
    """Return the time of a mark, in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(mark.since))
