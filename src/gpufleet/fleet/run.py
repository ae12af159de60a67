"""The bridge from live nodes to the pure modules: probe everyone once, check, plan, then converge.

The plan is for the whole inventory and is made before anything changes, so that a mistake stops
the run while the fleet still serves. `--limit` narrows what changes, never what is planned.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import gevent
from gevent.event import AsyncResult
from pyinfra import host, logger
from pyinfra.api import Host, State
from pyinfra.api.exceptions import PyinfraError
from pyinfra.context import ctx_state

from gpufleet.artifacts.operator_files import release_of
from gpufleet.checks.finding import Report
from gpufleet.errors import FleetError
from gpufleet.fleet import assessment
from gpufleet.fleet.assessment import Assessment
from gpufleet.fleet.model_configs import directories
from gpufleet.fleet.upgrade_lock import VARIABLE, held
from gpufleet.gpu_software import lock_check
from gpufleet.gpu_software.provisioning import Bare, provisioning
from gpufleet.inventory import loader
from gpufleet.inventory.refusal import Refusal
from gpufleet.monitoring.targets import Watching
from gpufleet.node.cluster_network import addresses
from gpufleet.node.cordon import cordon_of, sentence
from gpufleet.node.machine import Machine, System, from_probe
from gpufleet.node.topology import Node, known
from gpufleet.planning.planner import FleetPlan
from gpufleet.planning.stage import Running, Stage
from gpufleet.remote.query import SECONDS, Answer, ask, survey
from gpufleet.serving import servers
from gpufleet.serving.restarts import partial_restarts
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.variables import Origin


@dataclass(frozen=True)
class Here:
    """One node's part in the fleet: what it is, what it was told, what it must run."""

    node: Node
    settings: NodeSettings
    stages: tuple[Stage, ...]
    origins: Mapping[str, Origin] = field(default_factory=dict, repr=False)
    """Where each of its variables was set."""
    running: tuple[Running, ...] = ()
    """The stages that have units on it."""
    everyone: tuple[Stage, ...] = field(default=(), repr=False)
    """The stages of the whole plan."""
    fellows: tuple[str, ...] = ()
    """Addresses of the fleet's other GPU nodes, where the node has a firewall of ours."""


T = TypeVar("T")
Answers: TypeAlias = dict[str, Answer]
Watched: TypeAlias = tuple[tuple[servers.Server, ...], frozenset[str]]
Asking: TypeAlias = Callable[[Callable[[str], str | None], float, str], Answers]
"""(program of a node or None, seconds, what it is) -> {node: document or sentence}."""

_flights: dict[tuple[int, object], AsyncResult] = {}
_LOOKING: WeakKeyDictionary[State, list[str]] = WeakKeyDictionary()


@contextmanager
def refusals() -> Generator[None]:
    """
    Turn a `FleetError` into a `Refusal`: every problem for the operator, no traceback.

    It ends the run for every node, before any of them is touched: deploy files run wholly before
    the first operation does.
    """
    try:
        yield
    except FleetError as error:
        raise Refusal(*error.problems) from error


def here(*, unfit_stops: bool = True) -> Here | None:
    """
    Return the current node's part of the fleet plan; None on a node without GPUs.

    pyinfra executes a deploy file once per node, concurrently: the first caller probes every node
    of the inventory, all others wait for its answer. Raises `Refusal`, which ends the whole run,
    with every problem that was found: nodes and GPUs that checks find unfit, and what does not fit.
    With `unfit_stops=False` unfit ones are only named: for looking at what runs there already.
    """
    plan = _planned if unfit_stops else _planned_anyway
    if ctx_state.get() in _LOOKING:
        plan = _planned_to_look
    declared = loader.current().nodes[host.name]
    if not declared.settings.gpu_node:
        return None
    fleet = _single_flight(ctx_state.get(), plan)
    return Here(
        node=fleet.nodes[host.name],
        settings=declared.settings,
        stages=fleet.plan.on(host.name),
        origins=declared.origins,
        running=tuple(each for each in fleet.running if each.node == host.name),
        everyone=fleet.plan.stages,
        fellows=_fellows(host.name) if declared.settings.firewall else (),
    )


def _fellows(node: str) -> tuple[str, ...]:
    """Return the addresses of all GPU nodes but one, as their probes have them."""
    found = _single_flight(ctx_state.get(), _addresses)
    others = (each for name, own in found.items() if name != node for each in own)
    return tuple(sorted(set(others) - set(found.get(node, ()))))


def _addresses(state: State) -> dict[str, tuple[str, ...]]:
    return {
        name: addresses(said)
        for name, said in documents(state).items()
        if not isinstance(said, str)
    }


def bare() -> Bare | None:
    """
    Return the current node as it is, for deploys that make a GPU node of it; None without a lock.

    As with `here`, the first caller probes every node. Raises `Refusal`, which ends the whole run
    before a node is touched, with every problem: nodes that give no answer, locks that their
    machines cannot run, and a run in which no node has a lock.
    """
    return _single_flight(ctx_state.get(), _bared).get(host.name)


def built() -> tuple[System, Machine] | None:
    """Return what the current node is built of, for deploys that ask `here`; None: not to tell."""
    found = documents(ctx_state.get())[host.name]
    try:
        return None if isinstance(found, str) else from_probe(found)
    except FleetError:
        return None


def check() -> Report:
    """Return what the checks find on the nodes that this run is about; they are probed once."""
    return _single_flight(ctx_state.get(), _checked)


def watching(*, planned: bool = False) -> Watching | None:
    """
    Return what the current node watches; None if it watches nobody.

    Of vLLM that is what nodes are found to run; with `planned` what the plan says, for deploys
    that are about to carry it out. A node that gives no answer costs itself only: its servers stay
    as they were. Raises `Refusal` when none of the nodes that this run is about has `monitoring`.
    """
    declared = loader.current().nodes
    if declared[host.name].settings.monitoring is None:
        if not planned:
            _single_flight(ctx_state.get(), _some_watch)
        return None
    watched, silent = _single_flight(ctx_state.get(), _to_come if planned else _found)
    return Watching(host.name, declared, watched, silent)


def fronting(*, planned: bool = False, and_running: bool = False) -> Watching | None:
    """
    Return what the current node is a gateway of; None if it is none.

    Of vLLM that is what nodes are found to run; with `planned` what the plan says, and with
    `and_running`, until it is carried out, what runs besides. A node that gives no answer costs
    itself only: its servers stay as they were. Raises `Refusal` when none of the nodes that this
    run is about has `gateway`.
    """
    declared = loader.current().nodes
    if declared[host.name].settings.gateway is None:
        if not planned:
            _single_flight(ctx_state.get(), _some_front)
        return None
    fronted, silent = _single_flight(ctx_state.get(), _to_come if planned else _found)
    if and_running:
        fleet = _single_flight(ctx_state.get(), _plan_of_run)
        named = {(each.node, each.stage, each.number, each.model) for each in fronted}
        fronted += tuple(
            each
            for each in servers.running(fleet.running)
            if (each.node, each.stage, each.number, each.model) not in named
        )
    return Watching(host.name, declared, fronted, silent)


def has_gateways() -> bool:
    """Say whether a node of the inventory is a gateway."""
    return any(each.settings.gateway for each in loader.current().nodes.values())


def _some_have(setting: str, otherwise: str) -> Callable[[State], None]:
    """Return what raises `FleetError` when none of the nodes that a run is about has a setting."""

    def look(state: State) -> None:
        declared = loader.current().nodes
        asked = [each.name for each in state.inventory if state.is_host_in_limit(each)]
        if not any(getattr(declared[name].settings, setting) for name in asked):
            raise FleetError(otherwise)

    return look


_some_front = _some_have(
    "gateway",
    "no node of this run is a gateway: write `gateway` into the variables of a node that is to be "
    "one, and, if it has no GPUs, `gpu_node: false`: docs/traffic/gateway.md",
)
_some_watch = _some_have(
    "monitoring",
    "no node of this run watches the fleet: write `monitoring: {}` and, if it has no GPUs, "
    "`gpu_node: false` into the group_vars of a node that is to: docs/monitor/monitoring.md",
)


def _found(state: State) -> Watched:
    """Return the vLLM servers that run, and the nodes that did not say."""
    if not loader.current().gpu_nodes:
        return (), frozenset()
    answers = documents(state)
    silent = {name: said for name, said in answers.items() if isinstance(said, str)}
    for name, said in silent.items():
        logger.warning("    %s: %s; what is known of its vLLM servers stays", name, said)
    there = {name: said for name, said in answers.items() if not isinstance(said, str)}
    return servers.running(assessment.running(there)), frozenset(silent)


def _to_come(state: State) -> Watched:
    """Return the vLLM servers of the plan."""
    return servers.planned(_single_flight(state, _plan_of_run).plan.stages), frozenset()


def _plan_of_run(state: State) -> Assessment:
    return _single_flight(state, _planned_to_look if state in _LOOKING else _planned)


def looks_only(state: State) -> list[str]:
    """
    Have a run plan although nodes are unfit: it will execute nothing, and is to say what differs.

    Returns the list that `here` fills with what a deploy would be refused for.
    """
    return _LOOKING.setdefault(state, [])


def documents(state: State) -> dict[str, Answer]:
    """Return what each GPU node of the inventory answers the probe, which is sent once a run."""
    return _single_flight(state, _surveyed)


def _single_flight(state: State, work: Callable[[State], T]) -> T:
    """Let the first node's deploy do what is needed once; the others get its result."""
    # No yield between looking and storing: under gevent this is atomic.
    flight = _flights.get((id(state), work))
    if flight is None:
        flight = _flights[id(state), work] = AsyncResult()
        try:
            flight.set(work(state))
        except FleetError as error:
            flight.set_exception(Refusal(*error.problems))
        except BaseException as error:
            flight.set_exception(error)
            raise
    result: T = flight.get()
    return result


def _bared(state: State) -> Mapping[str, Bare]:
    asked = {each.name for each in state.inventory if state.is_host_in_limit(each)}
    # Those that could not be connected to have failed already, and keep nobody else waiting.
    asked -= {each.name for each in state.failed_hosts}
    answers = {name: said for name, said in documents(state).items() if name in asked}
    declared = loader.current().gpu_nodes
    found = provisioning(answers, declared)
    suited = [
        lock_check.on_node(
            declared[each.name], each.system, each.machine, known(each.document["python"])
        )
        for each in found.nodes.values()
    ]
    problems = (*found.refused, *(problem for each in suited for problem in each.problems))
    if state in _LOOKING:
        _LOOKING[state].extend(problems)
        return found.nodes
    problems = (*held(answers, os.environ.get(VARIABLE)), *problems)
    for remark in (remark for each in suited for remark in each.remarks):
        logger.warning("    %s", remark)
    # No reason to leave it alone: this is how a node gets repaired.
    for name, node in sorted(found.nodes.items()):
        if mark := cordon_of(node.document):
            logger.warning("    %s", sentence(name, mark))
    if problems:
        raise FleetError(*problems)
    return found.nodes


def _checked(state: State) -> Report:
    wanted = [each for each in _with_gpus(state.inventory) if state.is_host_in_limit(each)]
    return assessment.judged(survey(state, wanted), loader.current().gpu_nodes)


def _planned(state: State) -> Assessment:
    declared = loader.current().gpu_nodes
    if state not in _LOOKING and (problems := held(documents(state), os.environ.get(VARIABLE))):
        raise FleetError(*problems)
    found = assessment.planned(documents(state), declared)
    startable(found.plan, {name: each.settings for name, each in declared.items()})
    return _with_words(found)


def together() -> None:
    """
    Raise `Refusal` if this run would change a replica over nodes on some of its nodes only.

    Deploys that start stages call it while they prepare, before the first operation of any node.
    """
    if ctx_state.get() not in _LOOKING:
        _single_flight(ctx_state.get(), _together)


def _together(state: State) -> None:
    found = _single_flight(state, _planned)
    typed = loader.current().typed
    settings = {name: each.settings for name, each in loader.current().gpu_nodes.items()}
    spanning = {stage.node for stage in found.plan.stages if stage.group}
    problems = partial_restarts(
        found.plan.stages,
        found.running,
        settings,
        {name: release_of(vllm).id for name in spanning if (vllm := settings[name].vllm)},
        {each.name for each in state.inventory if state.is_host_in_limit(each)},
        serial=bool(typed and typed.serial),
    )
    if sentences := tuple(problems):
        raise FleetError(*sentences)


def _planned_anyway(state: State) -> Assessment:
    declared = loader.current().gpu_nodes
    return _with_words(assessment.planned(documents(state), declared, unfit_stops=False))


def _planned_to_look(state: State) -> Assessment:
    """Plan as a deploy does; what it would be refused for is noted, and planned around."""
    try:
        return _planned(state)
    except FleetError as error:
        found = _planned_anyway(state)
        _LOOKING[state].extend(error.problems)
        return found


def _surveyed(state: State) -> dict[str, Answer]:
    models = directories(loader.current().gpu_nodes)
    return survey(state, _with_gpus(state.inventory), models=models)


def _with_gpus(nodes: Iterable[Host]) -> list[Host]:
    """Return those that have GPUs; the others are not probed. Raises `FleetError` if none has."""
    known = loader.current().gpu_nodes
    if found := [each for each in nodes if each.name in known]:
        return found
    raise FleetError(
        "none of the nodes that this is about has GPUs: `gpu_node: false` is set for all of them"
    )


def startable(plan: FleetPlan, settings: Mapping[str, NodeSettings]) -> None:
    """Raise `FleetError` for what is planned and cannot be started."""
    without = {
        stage.model: stage.nodes
        for stage in plan.stages
        if stage.group and not _has_key(settings[stage.node])
    }
    if without:
        raise FleetError(
            *(
                f"serving.{model}: a replica spans {' and '.join(nodes)}, and its nodes know each "
                "other by a key: `openssl rand -hex 32 > secrets/cluster-key`, and name that file "
                "in `vllm.cluster_key_file`"
                for model, nodes in without.items()
            )
        )


def _has_key(settings: NodeSettings) -> bool:
    return settings.vllm is not None and settings.vllm.cluster_key_file is not None


def _with_words(found: Assessment) -> Assessment:
    """Log a plan with its reasons, and what is worth knowing beside it."""
    stages = found.plan.stages
    logger.info("--> Plan: %d stages on %d nodes", len(stages), len({s.node for s in stages}))
    for reason in found.plan.reasons:
        logger.info("    %s", reason)
    for remark in found.remarks:
        logger.warning("    %s", remark)
    return found


def probe(
    path: str,
    limit: tuple[str, ...] = (),
    seconds: float = SECONDS,
    models: Mapping[str, Collection[str]] | None = None,
) -> dict[str, Answer]:
    """
    Probe the GPU nodes of an inventory file, outside a deploy; return what each of them answers.

    `models` are the directories whose models' files each node has to read.

    Takes at most `seconds` and a few more to close connections. The process must have gevent's
    monkey patches in place, as the pyinfra command has. Raises FleetError for what the operator can
    put right.
    """
    state = State()
    with opened(state, path, limit) as wanted:
        return survey(state, _with_gpus(wanted), seconds, models)


@contextmanager
def asking(path: str, limit: tuple[str, ...] = ()) -> Generator[Asking]:
    """
    Give a function that asks the nodes of an inventory file, and keeps connections between calls.

        with asking("inventories/prod.py") as ask:
            answers = ask(lambda node: payload.program("serving/status"), 40, "the look")

    It takes a function from a node's name to its program (None: this node is not asked), a deadline
    in seconds, and what the programs are called in sentences; it returns {node: document or
    sentence}. For the process, and what is raised, see `probe`.
    """
    state = State()
    with opened(state, path, limit) as wanted:

        def asked(program: Callable[[str], str | None], seconds: float, what: str) -> Answers:
            answers = ask(state, wanted, program, seconds, what)
            # What is lost or stuck is not asked again over the same connection.
            _disconnect(each for each in wanted if isinstance(answers.get(each.name), str))
            return answers

        yield asked


@contextmanager
def opened(state: State, path: str, limit: tuple[str, ...]) -> Generator[list[Host]]:
    """
    Begin a run over an inventory file, and give its nodes to ask; close connections afterwards.

    For the process, and what is raised, see `probe`.
    """
    from pyinfra.api import Config
    from pyinfra_cli.inventory import make_inventory

    state.cwd = str(Path.cwd())
    try:
        with ctx_state.use(state):
            nodes = make_inventory(path)
            wanted = [each for each in nodes if not limit or {each.name, *each.groups} & set(limit)]
            if not wanted:
                raise FleetError(f"--limit {', '.join(limit)} matches no node or group of {path}")
            state.init(nodes, Config(), initial_limit=wanted)
            try:
                yield wanted
            finally:
                _disconnect(wanted)
    except PyinfraError as error:
        raise FleetError(str(error)) from error


def _disconnect(hosts: Iterable[Host]) -> None:
    """Close what is open, without waiting long for ends that may be dead."""
    jobs = [gevent.spawn(each.disconnect) for each in hosts if each.connected]
    gevent.joinall(jobs, timeout=2)
