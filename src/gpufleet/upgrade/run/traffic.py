"""Drain and restore replicas at the load balancer: gpufleet's gateways, or your own.

Border: it queries gateways over SSH, and runs an operator's own commands on this machine.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import gevent
from gevent.subprocess import DEVNULL, PIPE, STDOUT, Popen, TimeoutExpired

from gpufleet.errors import FleetError
from gpufleet.inventory.loader import Fleet
from gpufleet.network import haproxy
from gpufleet.remote import payload
from gpufleet.sanitize import printable
from gpufleet.settings.gateway_settings import Balancer
from gpufleet.upgrade.run.connections import Nodes
from gpufleet.upgrade.run.node_questions import NodeQuestion

# A word to HAProxy over its socket; the rest is the way there.
SECONDS = 60

Servers = Sequence[Mapping[str, Any]]
"""Servers as in `observe.FleetView.servers`: name, node, port, model, replica."""


@dataclass(frozen=True)
class Frontends:
    """All load balancers. If there are none, clients reach replicas directly."""

    nodes: Nodes
    declared: Fleet

    @property
    def gateways(self) -> tuple[str, ...]:
        """Return the nodes with a gpufleet gateway."""
        return tuple(n for n, each in self.declared.nodes.items() if each.settings.gateway)

    def balancer(self, node: str) -> Balancer | None:
        """
        Return the operator's own load balancer, from the node's variables; None: not declared.
        """
        there = self.declared.nodes.get(node)
        return there.settings.balancer if there else None

    def is_declared(self) -> bool:
        """
        Return whether a gateway or a balancer is declared that can drain a replica under change.
        """
        return bool(self.gateways) or any(
            each.settings.balancer for each in self.declared.gpu_nodes.values()
        )

    def set_servers(self, do: Literal["drain", "ready"], servers: Servers, seconds: float) -> None:
        """
        Drain servers at the load balancers, or make them ready again.

        Gateways are retried for at most `seconds`. Raises `FleetError` if a gateway or a balancer
        command failed.
        """
        if not servers:
            return
        self._send(do, servers, seconds)
        problems = [
            said
            for each in servers
            if (said := self._run_command(do, each, self.balancer(each["node"])))
        ]
        if problems:
            raise FleetError(*problems)

    def undrain_by_name(self, servers: Servers) -> None:
        """Make gpufleet's gateways send requests again to servers that are known only by name."""
        if servers:
            self._send("ready", servers, SECONDS)

    def sessions(self, servers: Servers) -> int:
        """
        Return the number of requests that gpufleet's gateways have running and queued on these
        servers.
        """
        names = {each["name"] for each in servers}
        states = self._send("show", servers, SECONDS)
        return sum(
            server.sessions + server.queued
            for state in states.values()
            for server in state.servers
            if server.name in names
        )

    def wait(self, servers: Servers, seconds: float) -> int:
        """
        Wait at most `seconds` until gpufleet's gateways have no request on these servers.

        Returns the number of requests left.
        """
        if not self.gateways or not servers:
            return 0
        end = time.monotonic() + seconds
        while (left := self.sessions(servers)) and time.monotonic() < end:
            gevent.sleep(1)
        return left

    def states(self) -> dict[str, haproxy.GatewayState]:
        """Return the state of each gateway, by its node."""
        return self._send("show", (), SECONDS)

    def state(self, gateway: str) -> haproxy.GatewayState:
        """Return the state of one gateway. Raises `FleetError` if it gives none."""
        return self._send("show", (), SECONDS, (gateway,))[gateway]

    def drained_servers(self) -> dict[str, frozenset[str]]:
        """Return the drained servers of each gateway, by its node."""
        if not self.gateways:
            return {}
        return {n: frozenset(s.drained) for n, s in self._send("show", (), SECONDS).items()}

    def _send(
        self,
        do: Literal["drain", "ready", "show"],
        servers: Servers,
        seconds: float,
        gateways: Sequence[str] | None = None,
    ) -> dict[str, haproxy.GatewayState]:
        """Send a command to gateways, by default to all; return their states."""
        if not (to := self.gateways if gateways is None else gateways):
            return {}
        names = sorted({str(each["name"]) for each in servers})
        program = payload.program("network/gateway_drains", do=do, servers=names)
        asked = dict.fromkeys(to, NodeQuestion(program, SECONDS, "the gateway's state"))
        end = time.monotonic() + seconds
        while True:
            left = end - time.monotonic()
            found = self.nodes.ask_until(
                asked, lambda _, said: haproxy.parse_gateway_state(said), max(left, 0)
            )
            if not (problems := [f"{n}: {s.error}" for n, s in found.items() if s.error]):
                return found
            if time.monotonic() > end:
                raise FleetError(*problems)
            gevent.sleep(3)

    def _run_command(
        self, do: Literal["drain", "ready"], server: Mapping[str, Any], balancer: Balancer | None
    ) -> str:
        """Run an operator's command for a server; return why it failed, "": it succeeded."""
        if balancer is None:
            return ""
        words = balancer.drain_command if do == "drain" else balancer.undrain_command
        values = {
            "node": server["node"],
            "address": self.declared.nodes[server["node"]].address,
            "port": str(server["port"]),
            "model": server["model"],
            "replica": server["replica"],
        }
        command = [_fill(word, values) for word in words]
        name = "drain_command" if do == "drain" else "undrain_command"
        try:
            process = Popen(command, stdin=DEVNULL, stdout=PIPE, stderr=STDOUT)
        except OSError as error:
            return f"balancer.{name}: {command[0]}: {error.strerror}"
        try:
            out, _ = process.communicate(timeout=balancer.seconds)
        except TimeoutExpired:
            process.kill()
            return (
                f"balancer.{name}: the command for {server['name']} did not end within "
                f"{balancer.seconds} s"
            )
        if process.returncode:
            said = (
                printable(out.decode("utf-8", "replace").strip()[-500:])
                or "the command printed nothing"
            )
            return (
                f"balancer.{name}: the command for {server['name']} ended with status "
                f"{process.returncode}: {said}"
            )
        return ""


def _fill(word: str, values: Mapping[str, str]) -> str:
    """Replace a server's placeholders in a word; other braces stay."""
    for key, value in values.items():
        word = word.replace(f"{{{key}}}", value)
    return word


def servers_of(servers: Mapping[str, Servers], replicas: Iterable[str]) -> list[Mapping[str, Any]]:
    """Return the servers of these replicas."""
    return [each for replica in replicas for each in servers.get(replica, ())]
