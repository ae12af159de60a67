"""Report on the settings, the plan, and the capacity during an upgrade. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence

from gpufleet.errors import FleetError
from gpufleet.fleet.inventory_check import Validation
from gpufleet.formatting import count_of, join_names, node_ranges
from gpufleet.planning.replica_allocation import UnsizedModel
from gpufleet.planning.stage import Running, Stage
from gpufleet.preflight.line import Line, Status, Verdict, unknown
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.upgrade_settings import Upgrade
from gpufleet.upgrade.plan.replica_load import ReplicaLoad
from gpufleet.upgrade.plan.required_replicas import required_replicas
from gpufleet.upgrade.plan.wave import Group
from gpufleet.upgrade.plan.wave_plan import plan_waves


def settings_lines(found: Validation, inventory: str, nodes: int) -> Iterator[Line]:
    """Yield the findings of `gpufleet validate`. A mistake is FAIL, and a note is WARN."""
    see = f"gpufleet validate {inventory}"
    for problem in found.problems:
        yield Line("settings", inventory, Verdict(Status.FAIL, "has a mistake", problem, see))
    for remark in found.remarks:
        yield Line("settings", inventory, Verdict(Status.WARN, "has a note", remark, see))
    if not (found.problems or found.remarks):
        proof = (
            f"{count_of(nodes, 'node')} and every file that their settings name were "
            f"checked, without a mistake or a note"
        )
        yield Line("settings", inventory, Verdict(Status.OK, "are valid", proof))


def declared_replicas(settings: Mapping[str, NodeSettings]) -> dict[str, int]:
    """Return the number of replicas that each model must have. For `fit`, the number is 1."""
    return {
        model: 1 if served.replicas == "fit" else served.replicas
        for node in settings.values()
        if node.servers is not None
        for model, served in node.serving.items()
    }


def plan_lines(
    stages: Sequence[Stage] | Sequence[str],
    settings: Mapping[str, NodeSettings],
    why_unknown: str,
    inventory: str,
    keep: int = 1,
) -> Iterator[Line]:
    """
    Yield lines on whether every model has a plan, and whether it keeps a replica if a node is lost.

    `stages` are the stages of the plan, or sentences that explain why there is no plan.
    `why_unknown` is "", or the reason why gpufleet cannot know whether there is a plan. `keep` is
    `upgrade.keep`.
    """
    see = f"gpufleet plan {inventory}"
    planned = [each for each in stages if isinstance(each, Stage)]
    problems = [each for each in stages if isinstance(each, str)]
    if why_unknown:
        yield unknown("plan", why_unknown, see)
        yield unknown("one-lost-node", "there is no plan", see)
        return
    if problems:
        for problem in problems:
            yield Line("plan", "fleet", _no_plan(problem, see))
        yield unknown("one-lost-node", "there is no plan", see)
        return
    wanted = declared_replicas(settings)
    if not wanted:
        remedy = "write `serving` in group_vars (docs/configure/serving.md)"
        verdict = Verdict(Status.FAIL, "no model is declared", "no node has `serving`", remedy)
        yield Line("plan", "fleet", verdict)
        yield Line("one-lost-node", "fleet", verdict)
        return
    homes = replica_nodes(planned)
    for model, count in sorted(wanted.items()):
        replicas = {name: nodes for (of, name), nodes in homes.items() if of == model}
        proof = f"{count_of(len(replicas), 'replica')} planned, {count} declared"
        if len(replicas) < count:
            yield Line("plan", model, Verdict(Status.FAIL, "has too few replicas", proof, see))
        else:
            nodes = node_ranges({node for each in replicas.values() for node in each})
            yield Line("plan", model, Verdict(Status.OK, "has a plan", f"{proof}; on {nodes}"))
        if replicas:
            yield Line("one-lost-node", model, lost_node(model, replicas, keep))


def _no_plan(problem: str, see: str) -> Verdict:
    """
    Return a verdict with FAIL, or with UNKNOWN if the model's size can only be read from the Hub.
    """
    if isinstance(problem, UnsizedModel):
        remedy = (
            f"give this machine access to the Hub or to a mirror (HF_ENDPOINT), or write the "
            f"number of GPUs as `serving.{problem.model}.tensor_parallel`. gpufleet does not check "
            f"whether the model fits on this number of GPUs"
        )
        return Verdict(Status.UNKNOWN, "could not be planned", problem, remedy)
    return Verdict(Status.FAIL, "there is no plan", problem, see)


def replica_nodes(stages: Iterable[Stage] | Iterable[Running]) -> dict[tuple[str, str], set[str]]:
    """Return the nodes of each replica. The keys are pairs of a model and the replica's id."""
    found: dict[tuple[str, str], set[str]] = defaultdict(set)
    for each in stages:
        found[each.model, each.id].add(each.node)
    return found


def lost_node(model: str, replicas: Mapping[str, set[str]], keep: int = 1) -> Verdict:
    """
    Return whether a model keeps a replica if any one node is lost.

    `replicas` maps each replica to its nodes. If `keep` (`upgrade.keep`) is more than 1, the model
    must keep that number of replicas.
    """
    left = {
        node: sum(node not in nodes for nodes in replicas.values())
        for node in sorted(set.union(*replicas.values()))
    }
    worst = min(left, key=lambda node: left[node])
    if keep > 1 and left[worst] < keep:
        return Verdict(
            Status.FAIL,
            f"keeps fewer replicas than `upgrade.keep` if {worst} is lost",
            f"{left[worst]} of {len(replicas)} replicas would be left, but `upgrade.keep` is "
            f"{keep}",
            f"increase `serving.{model}.replicas`, so that other nodes also have replicas, or "
            f"lower `upgrade.keep`",
        )
    fatal = set.intersection(*replicas.values())
    if not fatal:
        proof = f"{count_of(len(replicas), 'replica')}; no node has a part of every replica"
        return Verdict(Status.OK, "keeps a replica when any one node is lost", proof)
    names = join_names(fatal)
    many = len(replicas)
    proof = f"its {count_of(many, 'replica')} {'run' if many > 1 else 'runs'} on {names}"
    return Verdict(
        Status.WARN,
        f"loses all replicas if {names.replace(' and ', ' or ')} is lost",
        proof,
        f"`serving.{model}.replicas: {many + 1}`, with enough free GPUs on another node",
    )


def spare_capacity_lines(
    running: Sequence[Running],
    loads: Sequence[ReplicaLoad] | str,
    rules: Upgrade,
    inventory: str,
) -> Iterator[Line]:
    """
    Yield a line for each model: whether its replicas can be replaced one after the other under the
    present load.

    `loads` is a sentence with the reason if the loads are unknown.
    """
    see = f"gpufleet upgrade {inventory} --dry"
    if isinstance(loads, str):
        yield unknown("spare-capacity", loads, see)
        return
    homes = replica_nodes(running)
    if not homes:
        yield unknown("spare-capacity", "no replica runs", f"gpufleet deploy vllm {inventory}")
        return
    needs = required_replicas(loads, rules.headroom, rules.keep)
    for model in sorted({of for of, _ in homes}):
        groups = [
            Group(name, "stages", tuple(sorted(nodes)), (name,))
            for (of, name), nodes in sorted(homes.items())
            if of == model
        ]
        need = needs.get(model)
        if need is not None and need.unknown:
            yield unknown("spare-capacity", "; ".join(need.unknown), see, model)
            continue
        if need is not None and need.serving and need.load >= need.serving:
            proof = (
                f"{need.serving} replicas serve, and the present load fills {need.load:.2g} of them"
            )
            remedy = f"increase `serving.{model}.replicas`, because users' requests already wait"
            verdict = Verdict(Status.FAIL, "cannot serve more than its present load", proof, remedy)
            yield Line("spare-capacity", model, verdict)
            continue
        if len(groups) < rules.keep:
            proof = f"{count_of(len(groups), 'replica')}, but `upgrade.keep` is {rules.keep}"
            remedy = f"increase `serving.{model}.replicas`, or lower `upgrade.keep`"
            verdict = Verdict(Status.FAIL, "cannot be upgraded with these settings", proof, remedy)
            yield Line("spare-capacity", model, verdict)
            continue
        proof = (
            f"{need.serving} replicas serve, and the current load needs {need.needed} of them "
            f"(`upgrade.headroom` "
            f"{rules.headroom:g}, `upgrade.keep` {rules.keep})"
            if need
            else "no replica gets requests"
        )
        try:
            plan = plan_waves(groups, loads, rules)
        except FleetError as error:
            said = "; ".join(error.problems)
            verdict = Verdict(
                Status.WARN, "cannot be upgraded without an outage", f"{proof}: {said}",
                f"add one to `serving.{model}.replicas`, or accept the outage at the next "
                f"upgrade: {see}",
            )  # fmt: skip
            yield Line("spare-capacity", model, verdict)
            continue
        what = f"can be upgraded in {count_of(len(plan.waves), 'wave')}"
        yield Line("spare-capacity", model, Verdict(Status.OK, what, proof))
