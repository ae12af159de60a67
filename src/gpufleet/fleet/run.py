"""State of one pyinfra run: every node is probed, checked and planned once.

The plan is for the whole inventory and is made before anything changes, so that a mistake stops the
run while the fleet still serves. `--limit` limits the changes, never the plan.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import TypeAlias, TypeVar
from weakref import WeakKeyDictionary

from gevent.event import AsyncResult
from pyinfra import host, logger
from pyinfra.api import State
from pyinfra.context import ctx_state

from gpufleet.artifacts.operator_files import release_of
from gpufleet.checks.finding import Report
from gpufleet.errors import FleetError
from gpufleet.fleet import assessment, deploy_lock, fleet_plan, inventory_check
from gpufleet.fleet.fleet_plan import Assessment
from gpufleet.fleet.live import gpu_hosts
from gpufleet.fleet.measured_rates import rates_for_rules
from gpufleet.fleet.model_configs import probe_paths
from gpufleet.fleet.undeclared import removal_problem
from gpufleet.fleet.upgrade_lock import VARIABLE, lock_problems
from gpufleet.gpu_software import lock_check
from gpufleet.gpu_software.provisioning import BareNode, read_provisioning
from gpufleet.inventory import loader
from gpufleet.inventory.refusal import Refusal
from gpufleet.monitoring.rules.capacity_rules import MeasuredReplica
from gpufleet.monitoring.targets import MonitoringTargets
from gpufleet.node.cluster_network import addresses
from gpufleet.node.cordon import cordon_of, describe_cordon
from gpufleet.node.machine import Machine, System
from gpufleet.node.topology import Node, value_or
from gpufleet.planning.planner import FleetPlan
from gpufleet.planning.stage import Running, Stage
from gpufleet.remote.answer_forms import refuse_malformed
from gpufleet.remote.query import Answer, probe_all, query
from gpufleet.serving import servers
from gpufleet.serving.restarts import partial_restarts
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.variables import Origin


@dataclass(frozen=True)
class NodePlan:
    """One node's part of the plan: its probe, settings and stages."""

    node: Node
    settings: NodeSettings
    stages: tuple[Stage, ...]
    origins: Mapping[str, Origin] = field(default_factory=dict, repr=False)
    """The origin of each of its variables."""
    running: tuple[Running, ...] = ()
    """The stages with units on the node."""
    everyone: tuple[Stage, ...] = field(default=(), repr=False)
    """The stages of the whole plan."""
    fellows: tuple[str, ...] = ()
    """Addresses of the fleet's other GPU nodes; empty if `firewall` is not set for the node."""


T = TypeVar("T")
ServersAndSilentNodes: TypeAlias = tuple[tuple[servers.Server, ...], frozenset[str]]
_FLIGHTS: WeakKeyDictionary[State, dict[object, AsyncResult]] = WeakKeyDictionary()
"""Results of work that is done once for all nodes, by run."""
LOOK_SECONDS = 60
"""Time limit in seconds for listing the files of a few patterns on a busy node."""
_DRY_RUNS: WeakKeyDictionary[State, list[str]] = WeakKeyDictionary()


@contextmanager
def refusals() -> Generator[None]:
    """
    Turn a `FleetError` into a `Refusal`, which prints every problem and no traceback.

    A `Refusal` ends the run for all nodes before any node is changed, because pyinfra executes
    deploy files completely before the first operation.
    """
    try:
        yield
    except FleetError as error:
        raise Refusal(*error.problems) from error


def hold_nodes(*settings: str) -> None:
    """
    Lock this run's nodes that have one of these settings, until the run ends.

    Deploys that change nodes call this function first. Before anything is changed, it raises
    `Refusal` with the problems that `gpufleet validate` finds, and if a different deploy or an
    upgrade has locked one of the nodes. With --dry, no node is locked, but the owners of existing
    locks are reported.
    """
    if ctx_state.get() not in _DRY_RUNS:
        _single_flight(ctx_state.get(), _validated)
        _single_flight(ctx_state.get(), _lock_nodes(settings))


def _validated(state: State) -> None:
    limited = {each.name for each in state.inventory if state.is_host_in_limit(each)}
    inventory_check.require_valid(loader.current(), limited)


@cache
def _lock_nodes(settings: tuple[str, ...]) -> Callable[[State], None]:
    """Return the function that locks a run's nodes that have one of these settings."""

    def take(state: State) -> None:
        fleet = loader.current()
        wanted = [
            each
            for each in state.inventory
            if state.is_host_in_limit(each)
            # Unreachable nodes have failed already.
            and each not in state.failed_hosts
            and any(getattr(fleet.nodes[each.name].settings, name) for name in settings)
        ]
        if wanted:
            typed = fleet.typed
            what = ", ".join(typed.operations) if typed else "a deploy"
            deploy_lock.hold(state, wanted, what, dry=bool(typed and typed.dry))
            deploy_lock.refuse_silent(
                state, {each.name for each in wanted} - fleet.gpu_nodes.keys()
            )

    return take


def node_plan(*, unfit_stops: bool = True) -> NodePlan | None:
    """
    Return the current node's part of the fleet plan, or None if the node has no GPUs.

    pyinfra executes a deploy file once for each node, concurrently. The first caller probes every
    node of the inventory, and all other callers wait for the result. Raises `Refusal`, which ends
    the whole run, with every problem found: unfit nodes and GPUs, and models that do not fit.
    `unfit_stops=False` is for showing the running stages: unfit nodes and GPUs are then only
    reported.
    """
    plan = _plan if unfit_stops else _plan_anyway
    if ctx_state.get() in _DRY_RUNS:
        plan = _plan_dry_run
    declared = loader.current().nodes[host.name]
    if not declared.settings.gpu_node:
        return None
    fleet = _single_flight(ctx_state.get(), plan)
    return NodePlan(
        node=fleet.nodes[host.name],
        settings=declared.settings,
        stages=fleet.plan.stages_on(host.name),
        origins=declared.origins,
        running=tuple(each for each in fleet.running if each.node == host.name),
        everyone=fleet.plan.stages,
        fellows=_fellow_addresses(host.name) if declared.settings.firewall else (),
    )


def _fellow_addresses(node: str) -> tuple[str, ...]:
    """Return the addresses of all GPU nodes except one, from their probes."""
    found = _single_flight(ctx_state.get(), _node_addresses)
    others = (each for name, own in found.items() if name != node for each in own)
    return tuple(sorted(set(others) - set(found.get(node, ()))))


def _node_addresses(state: State) -> dict[str, tuple[str, ...]]:
    found = {}
    for name, said in documents(state).items():
        if not isinstance(said, str):
            with refuse_malformed(name):
                found[name] = addresses(said)
    return found


def bare_node() -> BareNode | None:
    """
    Return the current node's state before its deploy, or None if the node has no `gpu_lock`.

    The node may have no driver.

    As with `node_plan`, the first caller probes every node. Raises `Refusal`, which ends the whole
    run before a node is changed, with every problem: nodes that give no answer, locks that their
    machines cannot run, and a run in which no node has a lock.
    """
    return _single_flight(ctx_state.get(), _bare_nodes).get(host.name)


def node_machine() -> tuple[System, Machine] | None:
    """Return the current node's system and machine, after `node_plan`, or None if unknown."""
    return assessment.machine_of(host.name, documents(ctx_state.get())[host.name])


def check() -> Report:
    """Return the checks' findings on this run's nodes, which are probed only once."""
    return _single_flight(ctx_state.get(), _check_report)


def monitoring_targets(*, planned: bool = False, required: bool = True) -> MonitoringTargets | None:
    """
    Return the current node's monitoring targets, or None if it is not a monitoring node.

    vLLM's targets are the running servers. If `planned` is true, they are the servers of the plan,
    for deploys that apply the plan. If a node does not answer, its own targets stay unchanged, and
    other nodes' targets are not affected. Raises `Refusal` if no node of this run has `monitoring`,
    unless `required=False`.
    """
    declared = loader.current().nodes
    if declared[host.name].settings.monitoring is None:
        if required and not planned:
            _single_flight(ctx_state.get(), _require_monitoring)
        return None
    watched, silent = _single_flight(
        ctx_state.get(), _planned_servers if planned else _running_servers
    )
    measured = () if planned else _single_flight(ctx_state.get(), _measured_replicas)
    return MonitoringTargets(host.name, declared, watched, silent, measured)


def gateway_targets(
    *, planned: bool = False, and_running: bool = False, required: bool = True
) -> MonitoringTargets | None:
    """
    Return the targets of the current node's gateway, or None if the node is not a gateway.

    vLLM's targets are the running servers. If `planned` is true, they are the servers of the plan.
    `and_running` adds the servers that run until the plan is applied. If a node does not answer,
    its own targets stay unchanged, and other nodes' targets are not affected. Raises `Refusal` if
    no node of this run has `gateway`, unless `required=False`.
    """
    declared = loader.current().nodes
    if declared[host.name].settings.gateway is None:
        if required and not planned:
            _single_flight(ctx_state.get(), _require_gateway)
        return None
    fronted, silent = _single_flight(
        ctx_state.get(), _planned_servers if planned else _running_servers
    )
    if and_running:
        fleet = _single_flight(ctx_state.get(), _plan_of_run)
        fronted = servers.planned_and_running(fronted, servers.running_servers(fleet.running))
    return MonitoringTargets(host.name, declared, fronted, silent)


def undeclared_nodes(setting: str, look: str) -> frozenset[str]:
    """
    Return the nodes of this run that no longer declare a setting but still have its parts.

    `look` is the program that detects these parts on a node (`operations/remove_parts.py`). All
    nodes are queried at the same time. Raises `Refusal` if the parts must not be removed
    (`fleet/undeclared.py`).
    """
    return _single_flight(ctx_state.get(), _undeclared(setting, look))


@cache
def _undeclared(setting: str, look: str) -> Callable[[State], frozenset[str]]:
    def found(state: State) -> frozenset[str]:
        declared = loader.current().nodes
        asked = [
            each
            for each in state.inventory
            if state.is_host_in_limit(each)
            and each not in state.failed_hosts
            and not getattr(declared[each.name].settings, setting)
        ]
        answers = query(
            state, asked, lambda _: look, LOOK_SECONDS, f"the query of {setting}", short=True
        )
        for name, said in sorted(answers.items()):
            if isinstance(said, str):
                logger.warning(
                    "    %s: %s; if this node still has %s, it stays there: repeat this run",
                    *(name, said, setting),
                )
        nodes = frozenset(
            name
            for name, said in answers.items()
            if not isinstance(said, str) and any(said["found"].values())
        )
        if problem := removal_problem(setting, nodes, declared):
            raise FleetError(problem)
        return nodes

    return found


def has_gateways() -> bool:
    """Return whether a node of the inventory is a gateway."""
    return any(each.settings.gateway for each in loader.current().nodes.values())


def _require_setting(setting: str, otherwise: str) -> Callable[[State], None]:
    """Return a check that raises `FleetError` unless a node of the run has or removes a setting."""

    def look(state: State) -> None:
        declared = loader.current().nodes
        asked = [
            declared[each.name].settings for each in state.inventory if state.is_host_in_limit(each)
        ]
        # If `absent.parts` names the setting, its parts are removed, also in later runs.
        if not any(getattr(each, setting) or setting in each.absent.parts for each in asked):
            raise FleetError(otherwise)

    return look


_require_gateway = _require_setting(
    "gateway",
    "no node of this run is a gateway: set `gateway` in the variables of the node that "
    "should be a gateway, and set `gpu_node: false` as well if that node has no GPUs: "
    "docs/traffic/gateway.md",
)
_require_monitoring = _require_setting(
    "monitoring",
    "no node of this run monitors the fleet: write `monitoring: {}` in the group_vars of "
    "the node that should monitor it, and `gpu_node: false` as well if that node has no "
    "GPUs: docs/monitor/monitoring.md",
)


def _running_servers(state: State) -> ServersAndSilentNodes:
    """Return the running vLLM servers, and the nodes without an answer."""
    if not loader.current().gpu_nodes:
        return (), frozenset()
    answers = documents(state)
    silent = {name: said for name, said in answers.items() if isinstance(said, str)}
    for name, said in silent.items():
        logger.warning("    %s: %s; the last known vLLM servers of this node are kept", name, said)
    there = {name: said for name, said in answers.items() if not isinstance(said, str)}
    return servers.running_servers(fleet_plan.running_stages(there)), frozenset(silent)


def _measured_replicas(state: State) -> tuple[MeasuredReplica, ...]:
    fleet = loader.current()
    if not fleet.gpu_nodes:
        return ()
    found, problems = rates_for_rules(fleet, documents(state))
    for problem in problems:
        logger.warning("    %s", problem)
    return found


def _planned_servers(state: State) -> ServersAndSilentNodes:
    return servers.planned_servers(_single_flight(state, _plan_of_run).plan.stages), frozenset()


def _plan_of_run(state: State) -> Assessment:
    return _single_flight(state, _plan_dry_run if state in _DRY_RUNS else _plan)


def mark_dry_run(state: State) -> list[str]:
    """
    Mark a run as dry. Such a run plans even if nodes are unfit, executes nothing, and reports
    changes.

    Returns the list to which `node_plan` adds the reasons for refusing a deploy.
    """
    return _DRY_RUNS.setdefault(state, [])


def documents(state: State) -> dict[str, Answer]:
    """Return each GPU node's answer to the probe, which is sent once per run."""
    return _single_flight(state, _probe_all)


def _single_flight(state: State, work: Callable[[State], T]) -> T:
    """
    Run `work` once, in the first node's deploy. The deploys of the other nodes get its result.
    """
    # No other greenlet runs between the query and the assignment: under gevent both are atomic.
    flights = _FLIGHTS.setdefault(state, {})
    flight = flights.get(work)
    if flight is None:
        flight = flights[work] = AsyncResult()
        try:
            flight.set(work(state))
        except FleetError as error:
            flight.set_exception(Refusal(*error.problems))
        except BaseException as error:
            flight.set_exception(error)
            raise
    result: T = flight.get()
    return result


def _bare_nodes(state: State) -> Mapping[str, BareNode]:
    asked = {each.name for each in state.inventory if state.is_host_in_limit(each)}
    # Nodes without a connection have failed already, and do not delay the others.
    asked -= {each.name for each in state.failed_hosts}
    answers = {name: said for name, said in documents(state).items() if name in asked}
    declared = loader.current().gpu_nodes
    found = read_provisioning(answers, declared)
    suited = [
        lock_check.check_node_lock(
            declared[each.name], each.system, each.machine, value_or(each.document["python"])
        )
        for each in found.nodes.values()
    ]
    problems = (*found.refused, *(problem for each in suited for problem in each.problems))
    if state in _DRY_RUNS:
        _DRY_RUNS[state].extend(problems)
        return found.nodes
    problems = (
        *lock_problems(answers, os.environ.get(VARIABLE)),
        *deploy_lock.unknown(state, answers),
        *problems,
    )
    for remark in (remark for each in suited for remark in each.remarks):
        logger.warning("    %s", remark)
    # An unfit node is not left out: a deploy repairs it.
    for name, node in sorted(found.nodes.items()):
        if mark := cordon_of(node.document):
            logger.warning("    %s", describe_cordon(name, mark))
    if problems:
        raise FleetError(*problems)
    return found.nodes


def _check_report(state: State) -> Report:
    wanted = [each for each in gpu_hosts(state.inventory) if state.is_host_in_limit(each)]
    return assessment.check_nodes(probe_all(state, wanted), loader.current().gpu_nodes)


def _plan(state: State) -> Assessment:
    fleet = loader.current()
    declared = fleet.gpu_nodes
    settings = {name: each.settings for name, each in declared.items()}
    problems: list[str] = []
    if state not in _DRY_RUNS:
        problems += lock_problems(documents(state), os.environ.get(VARIABLE))
        problems += deploy_lock.unknown(state, documents(state))
    try:
        found = assessment.plan_fleet(documents(state), declared, inventory=fleet.inventory)
        refuse_unstartable(found.plan, settings)
    except FleetError as error:
        raise FleetError(*dict.fromkeys((*problems, *error.problems))) from None
    if problems:
        raise FleetError(*problems)
    return _log_plan(found)


def refuse_partial_restarts() -> None:
    """
    Raise `Refusal` if this run would change a multi-node replica on some of its nodes only.

    Deploys that start stages call this function while they prepare, before the first operation of
    any node.
    """
    if ctx_state.get() not in _DRY_RUNS:
        _single_flight(ctx_state.get(), _refuse_partial_restarts)


def _refuse_partial_restarts(state: State) -> None:
    found = _single_flight(state, _plan)
    typed = loader.current().typed
    settings = {name: each.settings for name, each in loader.current().gpu_nodes.items()}
    spanning = {stage.node for stage in found.plan.stages if stage.group}
    problems = partial_restarts(
        found.plan.stages,
        found.running,
        settings,
        {
            (name, each.engine): release_of(each).id
            for name in spanning
            for each in settings[name].used_engines
        },
        {each.name for each in state.inventory if state.is_host_in_limit(each)},
        serial=bool(typed and typed.serial),
    )
    if sentences := tuple(problems):
        raise FleetError(*sentences)


def _plan_anyway(state: State) -> Assessment:
    declared = loader.current().gpu_nodes
    return _log_plan(assessment.plan_fleet(documents(state), declared, unfit_stops=False))


def _plan_dry_run(state: State) -> Assessment:
    """Plan as a deploy does. If a deploy would be refused, record the reasons, and plan anyway."""
    try:
        return _plan(state)
    except FleetError as error:
        found = _plan_anyway(state)
        _DRY_RUNS[state].extend(error.problems)
        return found


def _probe_all(state: State) -> dict[str, Answer]:
    paths = probe_paths(loader.current().gpu_nodes)
    return probe_all(state, gpu_hosts(state.inventory), paths=paths)


def refuse_unstartable(plan: FleetPlan, settings: Mapping[str, NodeSettings]) -> None:
    """Raise `FleetError` for planned stages that cannot be started."""
    without = {
        stage.model: stage.nodes
        for stage in plan.stages
        if stage.group and not _has_key(settings[stage.node])
    }
    if without:
        raise FleetError(
            *(
                f"serving.{model}: a replica spans {' and '.join(nodes)}, and these nodes "
                "need a key to authenticate each other: run `openssl rand -hex 32 > "
                "secrets/cluster-key`, and set `vllm.cluster_key_file` to that file"
                for model, nodes in without.items()
            )
        )


def _has_key(settings: NodeSettings) -> bool:
    return settings.servers is not None and settings.servers.cluster_key_file is not None


def _log_plan(found: Assessment) -> Assessment:
    stages = found.plan.stages
    logger.info("--> Plan: %d stages on %d nodes", len(stages), len({s.node for s in stages}))
    for reason in found.plan.reasons:
        logger.info("    %s", reason)
    for remark in found.remarks:
        logger.warning("    %s", remark)
    return found
