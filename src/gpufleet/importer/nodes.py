"""Detect whether a command line runs one replica over several nodes. Pure."""

from __future__ import annotations

from typing import Any

from gpufleet.flags import values
from gpufleet.flags.command_line import CommandLine
from gpufleet.flags.schema import Schema
from gpufleet.importer.findings import Findings
from gpufleet.importer.placed import LAST

_LOOPBACK = {"localhost", "127.0.0.1", "::1"}


class Topology:
    """
    Finds out from the flags of a replica whether the replica runs on several nodes.

    It reads the flags before those that the plan sets are removed.
    """

    def __init__(self, line: CommandLine, schema: Schema) -> None:
        """Store the original command line."""
        self._line = line
        self._schema = schema

    def tell(self, found: Findings) -> None:
        """Set `span_nodes` if the command line runs a replica on several nodes, and add a note."""
        if by := self._spans():
            found.served["span_nodes"] = True
            found.say(
                f"`{by}` runs one replica on several nodes: `span_nodes: true` allows this "
                "in the plan, and the ports between the nodes require `firewall` (or "
                f"`{found.section}.allow_unguarded_ports: true`)",
                at=LAST,
            )
        elif found.served.get("distributed_executor_backend") == "ray":
            found.say(
                "Ray can use several nodes, but the command line does not show whether it "
                "does: if it does, set `span_nodes: true`",
                decide=True,
                at=LAST,
            )
        if by := self._further():
            found.say(
                f"`{by}` is the process of a further node of a replica: it needs no entry, "
                "because the entry of the first node covers all nodes of the replica",
                decide=True,
                at=LAST,
            )

    def _spans(self) -> str | None:
        """Return the flag that proves that the replica runs on several nodes, or None."""
        if self._number("--nnodes", 1) > 1:
            return self._written("--nnodes")
        if by := self._further():
            return by
        local = self._number("--data-parallel-size-local", -1)
        if 0 <= local < self._number("--data-parallel-size", 1):
            return self._written("--data-parallel-size-local")
        address = self._value("--data-parallel-address")
        if address is not None and address not in _LOOPBACK:
            return self._written("--data-parallel-address")
        return None

    def _further(self) -> str | None:
        """Return the flag that proves that this is not the replica's first node, or None."""
        if self._value("--headless"):
            return self._written("--headless")
        for name in ("--node-rank", "--data-parallel-start-rank"):
            if self._number(name, 0) > 0:
                return self._written(name)
        return None

    def _value(self, name: str) -> Any:
        given = self._line.last(name)
        return None if given is None else values.read(self._schema, given)[0]

    def _number(self, name: str, otherwise: int) -> int:
        value = self._value(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else otherwise

    def _written(self, name: str) -> str:
        given = self._line.last(name)
        return name if given is None else " ".join((given.option, *given.values))
