"""The bridge from live nodes to the pure modules: probe everyone once, plan once, then converge.

The plan is for the whole inventory and is made before anything changes, so that a mistake stops
the run while the fleet still serves. `--limit` narrows what changes, never what is planned.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gevent
from gevent.event import AsyncResult
from pyinfra import host, logger
from pyinfra.api import Host, State
from pyinfra.api.exceptions import PyinfraError
from pyinfra.context import ctx_host, ctx_state

from gpufleet import inventory, payload, planner
from gpufleet.errors import FleetError
from gpufleet.facts import GpuProbe
from gpufleet.planner import FleetPlan, Stage
from gpufleet.refusal import Refusal
from gpufleet.settings import NodeSettings
from gpufleet.topology import Node, node_from_probe

# A probe's own deadlines end it after 50 s (on_node/probe.py); the rest is for connecting.
PROBE_SECONDS = 60
ANSWER_SECONDS = 120


@dataclass(frozen=True)
class Here:
    """One node's part in the fleet: what it is, what it was told, what it must run."""

    node: Node
    settings: NodeSettings
    stages: tuple[Stage, ...]


@dataclass(frozen=True)
class _Fleet:
    nodes: Mapping[str, Node]
    settings: Mapping[str, NodeSettings]
    plan: FleetPlan


_flights: dict[int, AsyncResult] = {}


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


def here() -> Here:
    """
    Return the current node's part of the fleet plan.

    pyinfra executes a deploy file once per node, concurrently: the first caller probes every node
    of the inventory, all others wait for its answer. Raises `Refusal`, which ends the whole run,
    with every problem that was found.
    """
    fleet = _single_flight(ctx_state.get())
    name = host.name
    return Here(
        node=fleet.nodes[name],
        settings=fleet.settings[name],
        stages=fleet.plan.on(name),
    )


def _single_flight(state: State) -> _Fleet:
    # No yield between looking and storing: under gevent this is atomic.
    flight = _flights.get(id(state))
    if flight is None:
        flight = _flights[id(state)] = AsyncResult()
        try:
            flight.set(_look(state))
        except FleetError as error:
            flight.set_exception(Refusal(*error.problems))
        except BaseException as error:
            flight.set_exception(error)
            raise
    fleet: _Fleet = flight.get()
    return fleet


def _look(state: State) -> _Fleet:
    hosts = list(state.inventory)
    settings = {name: node.settings for name, node in inventory.current().nodes.items()}
    nodes = {
        name: node_from_probe(name, document) for name, document in _probe(state, hosts).items()
    }
    plan = planner.plan(nodes.values(), settings)
    logger.info(
        "--> Plan: %d stages on %d nodes", len(plan.stages), len({s.node for s in plan.stages})
    )
    for reason in plan.reasons:
        logger.info("    %s", reason)
    return _Fleet(nodes, settings, plan)


def _probe(state: State, hosts: Iterable[Host]) -> dict[str, dict[str, Any]]:
    """
    Probe `hosts` at once and return {name: document}, in the order of names.

    Raises FleetError naming every node that gave none: a plan without them would move their
    replicas to other nodes.
    """

    def one(each: Host) -> Any:
        with ctx_state.use(state), ctx_host.use(each):
            return each.get_fact(
                GpuProbe, _stdin=payload.program("probe", nvml=True), _timeout=PROBE_SECONDS
            )

    # Plain greenlets: the deploy passes that wait for us fill pyinfra's own pool, and what is
    # spawned there would never run.
    jobs = {each.name: gevent.spawn(one, each) for each in sorted(hosts, key=lambda h: h.name)}
    gevent.joinall(list(jobs.values()), timeout=ANSWER_SECONDS)
    documents: dict[str, dict[str, Any]] = {}
    problems = []
    for name, job in jobs.items():
        if job.successful() and job.value:
            documents[name] = job.value
        elif not job.ready():
            job.kill(block=False)
            problems.append(f"{name}: the probe gave no answer within {ANSWER_SECONDS} s")
        else:
            reason = job.exception or "see the messages above"
            problems.append(f"{name}: no probe: {reason}")
    if problems:
        raise FleetError(
            *problems,
            "every node of the inventory is needed to plan: bring them back, or take them out "
            "of the inventory (their replicas then move to the others)",
        )
    return documents


def probe(path: str, limit: tuple[str, ...] = ()) -> dict[str, dict[str, Any]]:
    """
    Probe the nodes of an inventory file, outside a deploy; return {name: document}.

    The process must have gevent's monkey patches in place, as the pyinfra command has. Raises
    FleetError for what the operator can put right.
    """
    from pyinfra.api import Config
    from pyinfra.api.connect import connect_all, disconnect_all
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
            connect_all(state)
            try:
                return _probe(state, wanted)
            finally:
                disconnect_all(state)
    except PyinfraError as error:
        raise FleetError(str(error)) from error
