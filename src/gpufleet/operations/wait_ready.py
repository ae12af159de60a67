"""Query a node's endpoints as a pyinfra fact, and wait until they answer.

Border: the module queries the node through pyinfra. `readiness.py` judges the answers.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Mapping, Sequence
from typing import Any

import gevent
from pyinfra import host, logger
from pyinfra.api import FunctionCommand, Host, State, operation

from gpufleet.formatting import join_names
from gpufleet.monitoring.exporters import Metrics
from gpufleet.progress import SELDOM_SECONDS
from gpufleet.remote import payload, query
from gpufleet.remote.channel import is_lost
from gpufleet.remote.facts import Serving
from gpufleet.serving import readiness
from gpufleet.serving.readiness import Endpoint

# Seconds between two queries of a server that starts. Each query runs one short Python process on
# the node.
POLL_SECONDS = 3
# The time limit of one query. It covers the time limits in on_node/serving/endpoints.py (20 + 20 +
# 5 + 5 + 5 + 60 + 60 s). All endpoints are queried at once, and only an engine that hangs uses the
# whole limit.
LOOK_SECONDS = 240
# If the start of a tensor-parallel engine fails, the journal has about 200 lines of stack frames
# after the root cause.
JOURNAL_LINES = 600


def ask_endpoints(
    endpoints: Sequence[Endpoint], metrics: Sequence[Metrics] = ()
) -> Mapping[str, Any]:
    """Return the document of on_node/serving/endpoints.py, or {} if the node did not answer."""
    program = payload.program(
        "serving/endpoints",
        stages=[endpoint.parameters() for endpoint in endpoints],
        metrics=[each.parameters() for each in metrics],
        journal=JOURNAL_LINES,
    )
    return query.read(Serving, program, LOOK_SECONDS, _ignore_errors=True) or {}


def verdicts(
    endpoints: Sequence[Endpoint], seen: Mapping[str, Any], restarts: Mapping[str, int]
) -> dict[str, readiness.Verdict]:
    """Return one verdict for each endpoint."""
    stages = seen.get("stages", {})
    return {
        endpoint.id: readiness.verdict(
            stages.get(endpoint.id, {"error": "the node did not answer"}),
            served_name=endpoint.served_name,
            unit=endpoint.unit,
            fingerprint=endpoint.fingerprint,
            keyed=endpoint.key_file is not None,
            restarts=restarts.get(endpoint.id, 0),
            adapters=endpoint.adapters,
        )
        for endpoint in endpoints
    }


def restarts(seen: Mapping[str, Any]) -> dict[str, int]:
    """Return how many times each stage's unit has restarted automatically so far."""
    return {
        name: int(stage.get("unit", {}).get("NRestarts") or 0)
        for name, stage in seen.get("stages", {}).items()
    }


def allowed_restarts(seen: Mapping[str, Any]) -> dict[str, int]:
    """
    Return how many automatic restarts each unit may have at the end of the wait.

    A unit that has died again and again before this run gets one more start. Only then, the repairs
    of this run (a package, a file) take effect.
    """
    return {name: count + 1 if count else 0 for name, count in restarts(seen).items()}


@operation()
def wait_ready(endpoints: Sequence[Endpoint]) -> Generator[FunctionCommand]:
    """
    Wait until every endpoint of this node completes a prompt. If all do so already, do nothing.

    The journal of the unit is shown as progress. The operation fails when a unit dies, or when its
    `start_seconds` have passed. The error has the last relevant lines of the journal and the likely
    cause. The operation also fails if the connection to this node is lost, or if a different node
    of the replica has failed in this run. In the latter case, the rank of that node will not start.
    """
    seen = ask_endpoints(endpoints)
    first = verdicts(endpoints, seen, restarts(seen))
    if all(verdict.state is readiness.State.READY for verdict in first.values()):
        host.noop(f"{len(endpoints)} endpoints answer")
        return
    yield FunctionCommand(_wait, (tuple(endpoints),), {})


def _wait(state: State, host: Host, endpoints: tuple[Endpoint, ...]) -> bool:
    """Return whether all endpoints became ready, and log the problems."""
    began = time.monotonic()
    seen = ask_endpoints(endpoints)
    allowed = allowed_restarts(seen)
    waiting = {endpoint.id: endpoint for endpoint in endpoints}
    told: dict[str, tuple[str, float]] = {}
    failed = False
    while waiting:
        if not seen and is_lost(host.connector):
            text = (
                "%sthe connection to the node is lost, so the deploy no longer waits for %s: check "
                "at the node's console whether the node runs, then deploy again"
            )
            logger.error(text, host.print_prefix, join_names(waiting))
            return False
        for name, verdict in verdicts(tuple(waiting.values()), seen, allowed).items():
            endpoint = waiting[name]
            spent = time.monotonic() - began
            late = spent > endpoint.start_seconds
            lost = sorted(each.name for each in state.failed_hosts if each.name in endpoint.peers)
            if verdict.state is readiness.State.READY:
                logger.info("%s%s answers after %.0f s", host.print_prefix, name, spent)
            elif verdict.state in {readiness.State.DEAD, readiness.State.WRONG} or (
                late and verdict.state in {readiness.State.UNKNOWN, readiness.State.BUSY}
            ):
                logger.error("%s%s", host.print_prefix, verdict.text)
                failed = True
            elif lost:
                text = (
                    "%s%s waits for its rank on %s, which failed in this run: see the errors above"
                )
                logger.error(text, host.print_prefix, name, ", ".join(lost))
                failed = True
            elif late:
                lines = seen.get("stages", {}).get(name, {}).get("journal", [])
                error = readiness.not_ready_error(endpoint.start_seconds, endpoint.unit, lines)
                logger.error("%s%s", host.print_prefix, error)
                failed = True
            else:
                # An unchanged state is logged again from time to time, so that a log shows the
                # wait.
                before, at = told.get(name, ("", 0.0))
                if before != verdict.text or spent - at >= SELDOM_SECONDS:
                    logger.info("%s%s %3.0f s: %s", host.print_prefix, name, spent, verdict.text)
                    told[name] = verdict.text, spent
                continue
            del waiting[name]
        if waiting:
            gevent.sleep(POLL_SECONDS)
            seen = ask_endpoints(tuple(waiting.values()))
    return not failed
