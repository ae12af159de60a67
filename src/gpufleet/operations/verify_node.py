"""
Verify a node's endpoints, exporters and firewall, and fail the node with every problem.

These operations change nothing.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from typing import Any

from pyinfra import host, logger
from pyinfra.api import FunctionCommand, Host, State, operation

from gpufleet.monitoring.exporters import Metrics
from gpufleet.operations import wait_ready
from gpufleet.operations.apply_firewall import firewall_problems
from gpufleet.serving import readiness
from gpufleet.serving.readiness import Endpoint


@operation()
def verify_endpoints(
    endpoints: Sequence[Endpoint], metrics: Sequence[Metrics]
) -> Generator[FunctionCommand]:
    """
    Verify endpoints and exporters.

    If all of them answer correctly, nothing happens. Otherwise, the node fails with the problems.
    """
    seen = wait_ready.ask_endpoints(endpoints, metrics)
    found = endpoint_problems(endpoints, metrics, seen)
    if not found:
        host.noop(f"{len(endpoints)} endpoints and {len(metrics)} exporters answer")
        return
    yield FunctionCommand(_report, (tuple(found),), {})


@operation()
def verify_firewall(text: str) -> Generator[FunctionCommand]:
    """Verify that the declared firewall rules are loaded now, and will be loaded after a reboot."""
    found = firewall_problems(text)
    if not found:
        host.noop("the firewall's rules are loaded")
        return
    yield FunctionCommand(_report, (tuple(found),), {})


def endpoint_problems(
    endpoints: Sequence[Endpoint], metrics: Sequence[Metrics], seen: Mapping[str, Any]
) -> list[str]:
    """Return the problems as sentences. An endpoint that could not be queried is also a problem."""
    found = [
        verdict.text
        if verdict.state is not readiness.State.WAITING
        else f"{name}: the server is not ready: {verdict.text}"
        for name, verdict in wait_ready.verdicts(endpoints, seen, wait_ready.restarts(seen)).items()
        if verdict.state is not readiness.State.READY
    ]
    for exporter in metrics:
        answer = seen.get("metrics", {}).get(exporter.id)
        if answer is None:
            found.append(f"{exporter.id}: the exporter could not be queried")
        elif (state := (answer.get("unit") or {}).get("ActiveState")) != "active":
            found.append(f"{exporter.unit} is {state or 'unknown'}")
        else:
            found += _exporter_problems(exporter, answer)
    return found


def _exporter_problems(exporter: Metrics, answer: Mapping[str, Any]) -> Iterator[str]:
    if answer.get("status") is None:
        yield f"{exporter.unit}: {exporter.url} does not answer: {answer.get('error')}"
    elif answer["status"] != 200:
        said = " ".join(str(answer.get("error") or "").split())
        yield (
            f"{exporter.unit}: {exporter.url} answers with status {answer['status']} {said}"
        ).rstrip()
    elif missing := answer.get("missing"):
        yield f"{exporter.unit}: the exporter does not export the metrics {', '.join(missing)}"
    if exporter.access.password and answer.get("without_password") not in {None, 401}:
        yield (
            f"{exporter.unit}: {exporter.url} answers with status {answer['without_password']} "
            "to a request without the password"
        )
    if exporter.loopback_port and answer.get("exposed") != []:
        at = answer.get("exposed")
        yield (
            f"gpufleet could not read on which addresses DCGM's host engine (port "
            f"{exporter.loopback_port}) listens"
            if at is None
            else f"DCGM's host engine (port {exporter.loopback_port}) listens on more than the "
            "loopback address, and any client that reaches it can configure GPUs: check "
            "`systemctl cat nvidia-dcgm`"
        )


def _report(state: State, host: Host, found: tuple[str, ...]) -> bool:  # noqa: ARG001
    for problem in found:
        logger.error("%s%s", host.print_prefix, problem)
    return False
