"""The bridge from live nodes to the pure modules: probe everyone once, check, plan, then converge.

The plan is for the whole inventory and is made before anything changes, so that a mistake stops
the run while the fleet still serves. `--limit` narrows what changes, never what is planned.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import gevent
from gevent.event import AsyncResult
from pyinfra import host, logger
from pyinfra.api import Host, State
from pyinfra.api.exceptions import PyinfraError
from pyinfra.context import ctx_state

from gpufleet import inventory, planner, release, show, stage_flags
from gpufleet.checks.admission import admitted, sentence
from gpufleet.checks.finding import Report
from gpufleet.checks.judge import judge
from gpufleet.checks.reading import Needs
from gpufleet.errors import FleetError
from gpufleet.inventory import Fleet
from gpufleet.planner import FleetPlan, Stage
from gpufleet.refusal import Refusal
from gpufleet.settings import NodeSettings
from gpufleet.survey import SECONDS, Answer, survey
from gpufleet.topology import Node, node_from_probe
from gpufleet.variables import Origin


@dataclass(frozen=True)
class Here:
    """One node's part in the fleet: what it is, what it was told, what it must run."""

    node: Node
    settings: NodeSettings
    stages: tuple[Stage, ...]
    origins: Mapping[str, Origin] = field(default_factory=dict, repr=False)
    """Where each of its variables was set."""


@dataclass(frozen=True)
class _Planned:
    nodes: Mapping[str, Node]
    settings: Mapping[str, NodeSettings]
    plan: FleetPlan


T = TypeVar("T")

_flights: dict[tuple[int, object], AsyncResult] = {}


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


def here(*, unfit_stops: bool = True) -> Here:
    """
    Return the current node's part of the fleet plan.

    pyinfra executes a deploy file once per node, concurrently: the first caller probes every node
    of the inventory, all others wait for its answer. Raises `Refusal`, which ends the whole run,
    with every problem that was found: nodes and GPUs that checks find unfit, and what does not fit.
    With `unfit_stops=False` unfit ones are only named: for looking at what runs there already.
    """
    plan = _planned if unfit_stops else _planned_anyway
    fleet = _single_flight(ctx_state.get(), plan)
    name = host.name
    return Here(
        node=fleet.nodes[name],
        settings=fleet.settings[name],
        stages=fleet.plan.on(name),
        origins=inventory.current().nodes[name].origins,
    )


def check() -> None:
    """
    Print what the checks find on the nodes that this run is about, once for all of them.

    Raises `Refusal` if one is blocked or could not be checked, so that the run ends with status 1.
    """
    _single_flight(ctx_state.get(), _checked)


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


def _checked(state: State) -> None:
    declared = inventory.current()
    wanted = [each for each in state.inventory if state.is_host_in_limit(each)]
    report = judged(survey(state, wanted), declared)
    show.display(show.report(report))
    if report.verdict().stops:
        raise FleetError("not every node is fit: see the findings above, and docs/checks/ for each")


def _planned(state: State) -> _Planned:
    declared = inventory.current()
    documents = _all(survey(state, state.inventory))
    settings = {name: node.settings for name, node in declared.nodes.items()}
    nodes = admitted(judged(documents, declared), _nodes(documents), settings)
    planned = _with_plan(nodes, settings)
    for remark in stage_flags.judge_plan(planned.plan.stages, settings, declared.origins):
        logger.warning("    %s", remark)
    return planned


def _planned_anyway(state: State) -> _Planned:
    declared = inventory.current()
    documents = _all(survey(state, state.inventory))
    for finding in judged(documents, declared).findings:
        if finding.stops and finding.cause is None:
            logger.warning("%s", sentence(finding))
    settings = {name: node.settings for name, node in declared.nodes.items()}
    return _with_plan({node.name: node for node in _nodes(documents)}, settings)


def _with_plan(nodes: Mapping[str, Node], settings: Mapping[str, NodeSettings]) -> _Planned:
    plan = planner.plan(nodes.values(), settings)
    logger.info(
        "--> Plan: %d stages on %d nodes", len(plan.stages), len({s.node for s in plan.stages})
    )
    for reason in plan.reasons:
        logger.info("    %s", reason)
    return _Planned(nodes, settings, plan)


def _nodes(documents: Mapping[str, Mapping[str, Any]]) -> Iterable[Node]:
    return [node_from_probe(name, document) for name, document in documents.items()]


def _all(answers: Mapping[str, Answer]) -> dict[str, dict[str, Any]]:
    """
    Return the documents of every node.

    Raises FleetError naming every node that gave none: a plan without them would move their
    replicas to other nodes.
    """
    missing = [f"{name}: {said}" for name, said in answers.items() if isinstance(said, str)]
    if missing:
        raise FleetError(
            *missing,
            "every node of the inventory is needed to plan: bring them back, or take them out "
            "of the inventory (their replicas then move to the others)",
        )
    return {name: document for name, document in answers.items() if isinstance(document, dict)}


def judged(answers: Mapping[str, Answer], declared: Fleet) -> Report:
    """
    Return what the checks find, with what the inventory declares and who is whose sibling.

    Siblings are nodes in the same groups.
    """
    settings = {name: node.settings for name, node in declared.nodes.items() if name in answers}
    groups = {name: declared.nodes[name].groups for name in settings}
    return judge(
        answers,
        settings,
        dt.datetime.now(dt.UTC).date(),
        {name: needs(each) for name, each in settings.items()},
        {
            name: tuple(other for other in groups if groups[other] == groups[name])
            for name in groups
        },
    )


def needs(settings: NodeSettings) -> Needs:
    """Return what the vLLM release that the settings name asks of a node."""
    vllm = settings.vllm
    if vllm is None or vllm.device != "cuda":
        return Needs()
    try:
        lock = Path(vllm.lock).read_bytes()
    except OSError:
        return Needs()  # the role that installs the release says what is wrong with its lock
    return Needs(release.cuda_of(lock), f"the CUDA runtime in {vllm.lock}")


def probe(path: str, limit: tuple[str, ...] = (), seconds: float = SECONDS) -> dict[str, Answer]:
    """
    Probe the nodes of an inventory file, outside a deploy; return what each of them answers.

    Takes at most `seconds` and a few more to close connections. The process must have gevent's
    monkey patches in place, as the pyinfra command has. Raises FleetError for what the operator can
    put right.
    """
    from pyinfra.api import Config
    from pyinfra_cli.inventory import make_inventory

    state = State()
    state.cwd = str(Path.cwd())
    try:
        with ctx_state.use(state):
            nodes = make_inventory(path)
            wanted = [each for each in nodes if not limit or {each.name, *each.groups} & set(limit)]
            if not wanted:
                raise FleetError(f"--limit {', '.join(limit)} matches no node or group of {path}")
            state.init(nodes, Config(), initial_limit=wanted)
            try:
                return survey(state, wanted, seconds)
            finally:
                _disconnect(wanted)
    except PyinfraError as error:
        raise FleetError(str(error)) from error


def documents(path: str, limit: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """Probe like `probe`; raises FleetError naming every node that gave no document."""
    return _all(probe(path, limit))


def _disconnect(hosts: Iterable[Host]) -> None:
    """Close what is open, without waiting long for ends that may be dead."""
    jobs = [gevent.spawn(each.disconnect) for each in hosts if each.connected]
    gevent.joinall(jobs, timeout=2)
