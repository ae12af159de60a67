"""
Define what is read from a node for a diagnosis: logs before a failure, and earlier changes. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpufleet.remote.answer_forms import refuse_malformed
from gpufleet.serving.rank_status import reason


@dataclass(frozen=True)
class JournalLine:
    """One line of a journal."""

    at: float
    """Seconds since 1970, by the node's clock."""
    text: str
    priority: int | None = None
    """The priority in syslog's numbers: 3 is an error."""
    by_systemd: bool = False
    """Whether systemd wrote this line about the unit. If not, the unit itself wrote it."""


@dataclass(frozen=True)
class UnitDifference:
    """Parts of a stage's unit that gpufleet did not write, and how its main process last ended."""

    drop_ins: tuple[str, ...] = ()
    """The paths of the unit's drop-ins that gpufleet did not write."""
    reload: bool = False
    """Whether the unit's file was changed and systemd has not reloaded it since then."""
    signal: str | None = None
    """
    The signal that ended the main process, such as SIGKILL. "" if the process exited. None if it is
    unknown.
    """


@dataclass(frozen=True)
class PlacedModel:
    """The files of a model that a deploy placed on a node."""

    directory: str
    complete: bool
    """Whether the model is marked as complete."""
    missing: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    """The files that were written after the model was complete."""


@dataclass(frozen=True)
class Certificate:
    """A certificate that gpufleet placed on a node."""

    path: str
    use: str
    """What the certificate is used for: gateway, exporter or litellm."""
    ends: float
    """When the certificate expires, in seconds since 1970."""


@dataclass(frozen=True)
class Connection:
    """The result of an attempt to connect from a node to a port of a different node."""

    address: str
    port: int
    error: str | None = None
    """Why the attempt failed, or None if it succeeded."""

    @property
    def is_refused(self) -> bool:
        """Return whether the other node answered that no program listens on the port."""
        return "refused" in (self.error or "")

    @property
    def is_lost(self) -> bool:
        """
        Return whether there was no answer, or the network between the nodes rejected the attempt.
        """
        return self.error is not None and not self.is_refused

    def __str__(self) -> str:
        """Return the result as text for a sentence: `10.1.0.1 port 29500: no answer within 2 s`."""
        return f"{self.address} port {self.port}: {self.error or 'connected'}"


@dataclass(frozen=True)
class NodeEvidence:
    """The evidence that was read from one node."""

    node: str
    boot: float | None = None
    """When the node was booted, in seconds since 1970. None if it is unknown."""
    stages: Mapping[str, tuple[JournalLine, ...]] = field(default_factory=dict)
    """The journals of stages, by the stage's id."""
    units: Mapping[str, UnitDifference] = field(default_factory=dict)
    """The units of these stages that could be read, by the stage's id."""
    models: Mapping[str, PlacedModel] = field(default_factory=dict)
    """The models of these stages that could be read, by the stage's id."""
    kernel: tuple[JournalLine, ...] = ()
    changes: tuple[tuple[float, str], ...] = ()
    """The changes on the node as (time in seconds since 1970, description), oldest first."""
    certificates: tuple[Certificate, ...] = ()
    connections: Mapping[str, Connection] = field(default_factory=dict)
    """
    Attempts to connect. Those from a rank to rank 0 have the replica's id as their key. Those from
    a gateway to a server have the server's name.
    """
    unread: tuple[str, ...] = ()
    """A sentence for each part that could not be read."""

    def last_change(self, before: float, within: float) -> tuple[float, str] | None:
        """
        Return the last change within the `within` seconds before a time. A boot also counts as a
        change.
        """
        found = [each for each in self.changes if before - within <= each[0] <= before]
        if self.boot is not None and before - within <= self.boot <= before:
            found.append((self.boot, "the node was booted"))
        return max(found, default=None)


def node_evidence(node: str, answer: Mapping[str, Any] | str) -> NodeEvidence:
    """
    Parse the answer of a node (`on_node/doctor/failure_evidence.py`).

    If the node did not answer, `answer` is a sentence with the reason, which is returned in
    `unread`. Raises `FleetError` with the node's name if the answer is invalid.
    """
    if isinstance(answer, str):
        return NodeEvidence(node, unread=(f"{node}: {answer}",))
    with refuse_malformed(node):
        boot = answer["boot"]
        return NodeEvidence(
            node,
            float(boot) if isinstance(boot, int | float) else None,
            {str(name): _lines(lines) for name, lines in answer["stages"].items()},
            {
                str(name): _unit(said)
                for name, said in answer["units"].items()
                if "missing" not in said
            },
            {
                str(name): PlacedModel(
                    str(said["directory"]),
                    bool(said["complete"]),
                    tuple(map(str, said["missing"])),
                    tuple(map(str, said["changed"])),
                )
                for name, said in answer["models"].items()
                if "directory" in said
            },
            _lines(answer["kernel"]),
            ()
            if isinstance(answer["changes"], Mapping)
            else tuple((float(at), str(what)) for at, what in answer["changes"]),
            ()
            if isinstance(answer["certificates"], Mapping)
            else tuple(
                Certificate(str(path), str(use), float(end))
                for path, use, end in answer["certificates"]
            ),
            {
                str(name): Connection(str(said["address"]), int(said["port"]), said["error"])
                for name, said in answer["connections"].items()
            },
            tuple(_unread(node, answer)),
        )


def _lines(said: Any) -> tuple[JournalLine, ...]:
    if isinstance(said, Mapping):
        return ()
    return tuple(
        JournalLine(at / 1e6, str(text), priority, pid == 1) for at, pid, priority, text in said
    )


def _unit(said: Mapping[str, Any]) -> UnitDifference:
    signal = said["signal"]
    return UnitDifference(
        tuple(map(str, said["drop_ins"])),
        bool(said["reload"]),
        f"SIG{signal}" if signal else signal,
    )


def _unread(node: str, answer: Mapping[str, Any]) -> Iterator[str]:
    parts = {
        "the kernel's log": answer["kernel"],
        "the log of package changes": answer["changes"],
        "the expiry dates of its certificates": answer["certificates"],
        **{f"the journal of {name}": lines for name, lines in answer["stages"].items()},
        **{
            f"the unit of {name}": said
            for name, said in answer["units"].items()
            if "missing" in said
        },
        **{
            f"the model of {name}": said
            for name, said in answer["models"].items()
            if "directory" not in said
        },
    }
    for part, said in parts.items():
        # A container has no kernel log of its own, and a new node has no changes. Then nothing is
        # missing from the evidence.
        if isinstance(said, Mapping) and said["missing"] != "absent":
            yield f"{node}: {part} cannot be read: {reason(said)}"
