"""Let HAProxy reload its configuration without losing a connection."""

from __future__ import annotations

import datetime as dt
import time
from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeAlias

import gevent
from pyinfra import host, logger
from pyinfra.api import FunctionCommand, Host, State, StringCommand, operation
from pyinfra.context import ctx_host, ctx_state

from gpufleet.converge.desired import DesiredState, Unit
from gpufleet.errors import FleetError
from gpufleet.monitoring import prometheus
from gpufleet.monitoring.targets import MonitoringTargets
from gpufleet.network import haproxy
from gpufleet.network.gateway_node import (
    HAPROXY,
    STOP_SECONDS,
    certificate_remarks,
    configuration,
    gateway_files,
    gateway_problems,
    gateway_unit,
)
from gpufleet.network.haproxy import CONFIGURATION, HOME, RUN, STATE, UNIT, GatewayState
from gpufleet.operations.converge import Converge, announce, refuse
from gpufleet.operations.validated_config import ServerConfig
from gpufleet.remote import payload
from gpufleet.remote.query import query
from gpufleet.sanitize import printable
from gpufleet.settings.gateway_settings import Gateway

Commands: TypeAlias = Generator[StringCommand | FunctionCommand]

LOOK_SECONDS = 30

# A reload takes a second. On a busy node, it takes several seconds.
LOAD_SECONDS = 60
START_SECONDS = 15
"""
How long gpufleet waits until HAProxy runs again after it ended.

The unit waits a second before each start.
"""


@dataclass(frozen=True)
class GatewayParts:
    """The desired state of a gateway, divided into the parts that operations need."""

    gateway: Gateway
    files: Converge
    running: Converge
    configured: ServerConfig
    fingerprint: str


def gateway_parts(node: MonitoringTargets) -> GatewayParts | None:
    """
    Return the desired state of the gateway, or None if the node is not a gateway.

    Raises `FleetError` for files that cannot be read, for a certificate that clients would not
    accept, and for settings with which the node cannot be a gateway.
    """
    wanted = node.settings.gateway
    if wanted is None:
        return None
    if problems := gateway_problems(node):
        raise FleetError(*problems)
    for remark in certificate_remarks(wanted, node.name, dt.datetime.now(dt.UTC)):
        logger.warning("%s%s", host.print_prefix, remark)
    for remark in prometheus.unreachable_servers(node.nodes, node.servers, node.name):
        logger.warning("%s%s", host.print_prefix, remark.replace("watched", "reached by clients"))
    found = configuration(node, wanted, lambda: gateway_state("show"))
    unit = gateway_unit(wanted)
    return GatewayParts(
        wanted,
        Converge(gateway_files(found)),
        Converge(
            DesiredState(
                unit.file, Unit(UNIT, fingerprint=unit.fingerprint, stop_seconds=STOP_SECONDS + 30)
            )
        ),
        ServerConfig(
            unit=UNIT,
            url="",
            name="haproxy",
            directory=HOME,
            check=(HAPROXY, "-c", "-C", ".", "-f", CONFIGURATION),
            watched=(),
            files=found.files,
            secrets=found.secrets,
        ),
        found.fingerprint,
    )


@operation()
def reload_haproxy(running: Converge, fingerprint: str, *, if_it_runs: bool = False) -> Commands:
    """
    Reload HAProxy unless it runs with this configuration. If the reload fails, fail the node.

    With `if_it_runs`, a stopped HAProxy is only reported, because it will start with the present
    files.
    """
    executing = ctx_state.get().is_executing
    if not if_it_runs and not executing and running.difference().units.commands:
        host.noop(f"{UNIT} starts with the written configuration")
        return
    found = gateway_state("show")
    if not found.runs and (if_it_runs or not executing):
        if executing:
            logger.warning("%s%s does not run: %s", host.print_prefix, UNIT, found.error)
        host.noop(f"{UNIT} does not run")
        return
    if executing and not found.runs:
        found = _after_restart(found)
    if executing and found.error:
        yield from refuse((f"{UNIT}: {found.error}",))
        return
    if found.fingerprint == fingerprint:
        host.noop(f"{UNIT} runs with the written configuration")
        return
    announce(f"reload {UNIT}")
    yield FunctionCommand(_load, (fingerprint,), {})


def _after_restart(found: GatewayState) -> GatewayState:
    """
    Wait until systemd has restarted HAProxy, at most `START_SECONDS`, and return HAProxy's state.

    If HAProxy ended because of its old configuration, systemd starts it with the new configuration
    (`Restart=`).
    """
    until = time.monotonic() + START_SECONDS
    while not found.runs and time.monotonic() < until:
        gevent.sleep(1)
        found = gateway_state("show")
    return found


def _load(state: State, host: Host, fingerprint: str) -> bool:  # noqa: ARG001  # pyinfra's
    found = gateway_state("load", unit=UNIT, fingerprint=fingerprint, seconds=LOAD_SECONDS)
    for line in found.error.splitlines():
        logger.error("%s%s: %s", host.print_prefix, UNIT, printable(line))
    return not found.error


def gateway_state(do: str, **parameters: Any) -> GatewayState:
    program = payload.program(
        "network/gateway_drains", do=do, home=HOME, run=RUN, state=STATE, **parameters
    )
    node = ctx_host.get()
    seconds = LOOK_SECONDS + 2 * parameters.get("seconds", 0)
    return haproxy.parse_gateway_state(
        query(ctx_state.get(), [node], lambda _: program, seconds, "the query of the gateway")[
            node.name
        ]
    )


@operation()
def wait_for_nodes() -> Commands:
    """Make a gateway wait until every node has reached this operation."""
    host.noop("the next step waits for the other nodes")
    yield from ()


def nothing_failed() -> bool:
    """Return whether no node of this run has failed so far."""
    return not ctx_state.get().failed_hosts
