"""Query the fleet to which a command sends requests: its nodes, target and load.

Border: the module queries nodes over SSH.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.fleet import fleet_plan
from gpufleet.fleet.upgrade_lock import lock_problems
from gpufleet.inventory.loader import Fleet
from gpufleet.load_test import guest, load_target
from gpufleet.load_test.load_target import Target, TargetDeclaration
from gpufleet.node.marks import deploy_problems
from gpufleet.node.topology import Node, node_from_probe
from gpufleet.upgrade.plan import replica_load
from gpufleet.upgrade.run import observe
from gpufleet.upgrade.run.connections import Nodes
from gpufleet.upgrade.run.node_answers import NodeLook
from gpufleet.upgrade.run.rotation import Rotation, model_rotation
from gpufleet.upgrade.run.traffic import Frontends


@dataclass(frozen=True)
class NodeAnswers:
    """The answers of the nodes, and the declaration, which includes the running replicas."""

    declared: TargetDeclaration
    nodes: Mapping[str, Node]
    documents: Mapping[str, Mapping[str, Any]]
    looks: Mapping[str, NodeLook]

    def changes(self) -> tuple[str, ...]:
        """Return a sentence for each upgrade or deploy that is running now."""
        deploys = {name: each.deploy for name, each in self.looks.items() if each.deploy}
        return (*lock_problems(self.documents, None), *deploy_problems(deploys))


class ServedFleet:
    """The nodes of an inventory, and the servers that can receive requests."""

    def __init__(self, project: Fleet, nodes: Nodes) -> None:
        self.project, self.nodes = project, nodes

    def ask_nodes(self) -> NodeAnswers:
        """Query the state of all nodes. Raises `FleetError` if they cannot be queried."""
        answers = observe.survey(self.nodes, self.project)
        documents = {n: each for n, each in answers.items() if not isinstance(each, str)}
        looks = observe.look(self.nodes, documents)
        running = tuple(fleet_plan.running_stages(documents))
        declared = replace(
            declared_fleet(self.project),
            running=running,
            out=observe.without_requests(running, looks),
        )
        nodes = {name: node_from_probe(name, each) for name, each in documents.items()}
        return NodeAnswers(declared, nodes, documents, looks)

    def target(
        self,
        model: str,
        declared: TargetDeclaration,
        *,
        replica: str | None,
        gateway: str | None,
        key_file: str | None,
        ca_file: str | None,
        place: str | None = None,
    ) -> tuple[Target, tuple[str, ...]]:
        """
        Return the target of a model's requests, and remarks for the operator.

        The target is a gateway, unless a replica is named or there is no gateway. `place` is the
        node that sends the requests (None: this machine).
        """
        if replica is not None or (gateway is None and not declared.gateways):
            return load_target.replica_target(model, replica, declared, place), ()
        chosen = load_target.choose_gateway(gateway, declared)
        rotation = self.rotation(model, chosen, declared)
        target = load_target.gateway_target(
            model, chosen, key_file, ca_file, replace(declared, out=rotation.out), place=place
        )
        target = replace(target, unknown=rotation.unknown)
        affinity = load_target.affinity_remarks(chosen, declared)
        return target, (*rotation.lines(), *rotation.remarks, *affinity)

    def rotation(self, model: str, gateway: str, declared: TargetDeclaration) -> Rotation:
        """Query a gateway for the replicas of a model to which it sends requests."""
        state = Frontends(self.nodes, self.project).state(gateway)
        if not state.runs:
            raise FleetError(
                f"{gateway}: the gateway of this node is not running: `gpufleet status` shows why"
            )
        return model_rotation(model, gateway, state, declared.running, declared.out)

    def loads(
        self, target: Target, found: NodeAnswers, *, drained: str | None = None
    ) -> list[guest.ServerLoad | str]:
        """
        Return the current load of the replicas of a target.

        The load of a drained replica is unknown. The exception is `drained`, a replica that only
        the load test uses.
        """
        return self.look(target, found, drained=drained)[0]

    def look(
        self,
        target: Target,
        found: NodeAnswers,
        *,
        drained: str | None = None,
        families: Sequence[str] = (),
    ) -> tuple[list[guest.ServerLoad | str], dict[str, str]]:
        """
        Return the current load of a target's replicas, and the texts of their servers' pages
        /metrics.

        The keys of the pages are `NODE:PORT`. If a server has no page, the load of its replica is
        unknown. Of each page, the lines for the load are read, and lines that begin with one of
        `families`.
        """
        running = [each for each in found.declared.running if each.id in target.replicas]
        looks = {name: observe.without_drain(each, drained) for name, each in found.looks.items()}
        pages, _ = observe.read_metrics(self.nodes, running, samples=1, families=families)
        loads = replica_load.loads(
            running,
            pages,
            found.nodes,
            found.declared.settings,
            out=observe.without_requests(running, looks),
        )
        unknown: list[guest.ServerLoad | str] = [
            f"{each}: {target.name} sends requests to this replica, but the replica's node "
            "does not answer"
            for each in target.unknown
        ]
        servers = Counter({each.id: 0 for each in running})
        for each in running:
            servers[each.id] += len(each.servers)
        known: list[guest.ServerLoad | str] = [
            f"{each.replica}: {each.unknown}"
            if each.running is None or each.waiting is None or each.kv_usage is None
            else guest.ServerLoad(
                each.replica,
                each.running,
                each.waiting,
                each.kv_usage,
                each.most_running,
                target.per_server and target.per_server * servers[each.replica],
            )
            for each in loads
        ]
        texts = {
            f"{node}:{port}": page[0]
            for (node, port), page in pages.items()
            if not isinstance(page, str)
        }
        return unknown + known, texts


def declared_fleet(project: Fleet) -> TargetDeclaration:
    """Return the declaration of an inventory, without running replicas. No node is queried."""
    return TargetDeclaration(
        {name: each.address for name, each in project.nodes.items()},
        {name: each.settings for name, each in project.gpu_nodes.items()},
        {name: each.settings for name, each in project.nodes.items() if each.settings.gateway},
        (),
        {},
    )
