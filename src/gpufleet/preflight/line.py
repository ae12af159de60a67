"""Define a line of a preflight: its status, its subject, and the proof. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gpufleet.formatting import node_ranges

SCHEMA = 1
"""Version of `Preflight.as_json()`. It increases when a key is removed or its meaning changes."""

CHECKS: Mapping[str, str] = {
    "settings": "settings and the files that they name are valid",
    "plan": "every model has a plan",
    "one-lost-node": "every model keeps a replica when a node is lost",
    "driver": "the loaded driver has the version of the lock",
    "release": "replicas run the declared release",
    "node-checks": "the checks of every node pass",
    "model-files": "models' files are complete and match the models' lock",
    "sources": "nodes reach the Hub or the mirror that they download from",
    "disk": "there is room for the next release and the models' next revisions",
    "services": "declared services answer, and only to clients that are allowed",
    "adapters": "every server loads exactly the declared LoRA adapters",
    "names": "names resolve on the nodes as the inventory expects",
    "clocks": "clocks agree with this machine's clock and with each other",
    "tls": "certificates are trusted, and do not expire soon",
    "refusal": "the gateway refuses requests without a key",
    "key": "a client's key is accepted by the gateway",
    "limits": "the gateway limits its clients and its servers",
    "objectives": "models have objectives",
    "measured": "models were measured in the configuration that runs now",
    "alerts": "alerts reach a person",
    "rehearsal": "a drain and a rollback were rehearsed",
    "backup": "settings are committed to git and pushed to a remote",
    "spare-capacity": "an upgrade is possible without removing capacity that users need",
}
"""The checks in the order of display. Each check has at least one line in every preflight."""


class Status(StrEnum):
    """The status of a line, ordered from the best to the worst."""

    OK = "OK"
    WARN = "WARN"
    UNKNOWN = "UNKNOWN"
    FAIL = "FAIL"

    @property
    def badness(self) -> int:
        """Return the rank of the status. A larger number is worse."""
        return list(Status).index(self)


@dataclass(frozen=True)
class Verdict:
    """What was found, its proof, and the remedy."""

    status: Status
    what: str
    proof: str
    remedy: str = ""
    """The command or setting that helps. Empty if nothing has to be done."""


@dataclass(frozen=True)
class Line:
    """
    One line. `check` is a key of `CHECKS`, and `subject` has the nodes or the model that the line
    describes.
    """

    check: str
    subject: str
    verdict: Verdict

    @property
    def status(self) -> Status:
        """Return the status of the verdict."""
        return self.verdict.status

    def as_json(self) -> dict[str, Any]:
        """Return the line as plain values for `json.dumps`."""
        of = self.verdict
        return {
            "check": self.check,
            "status": str(of.status),
            "subject": self.subject,
            "what": of.what,
            "proof": of.proof,
            "remedy": of.remedy,
        }


@dataclass(frozen=True)
class Preflight:
    """
    All lines about a fleet, in the order of `CHECKS`. The lines of each check begin with the worst.
    """

    inventory: str
    when: dt.datetime
    version: str
    """The version of gpufleet."""
    lines: tuple[Line, ...]

    @property
    def counts(self) -> dict[Status, int]:
        """Return the number of lines with each status."""
        return {each: sum(line.status is each for line in self.lines) for each in Status}

    @property
    def exit_status(self) -> int:
        """Return 1 if any line is FAIL, otherwise 2 if any line is UNKNOWN, otherwise 0."""
        counts = self.counts
        if counts[Status.FAIL]:
            return 1
        return 2 if counts[Status.UNKNOWN] else 0

    def as_json(self) -> dict[str, Any]:
        """
        Return the preflight as plain values for `json.dumps`
        (docs/reference/preflight.schema.json).

            {"schema": 1, "inventory": ..., "when": ..., "counts": {"OK": 20, ...},
             "lines": [{"check": "driver", "status": "OK", "subject": "gpu-[01-14]", ...}]}
        """
        return {
            "schema": SCHEMA,
            "inventory": self.inventory,
            "when": self.when.isoformat(),
            "version": self.version,
            "counts": {str(status): count for status, count in self.counts.items()},
            "lines": [line.as_json() for line in self.lines],
        }


def order_lines(lines: Iterable[Line]) -> tuple[Line, ...]:
    """
    Return the lines in the order of `CHECKS`. For a check without a line, add a line with status
    UNKNOWN.
    """
    found = list(lines)
    there = {line.check for line in found}
    found += [
        Line(
            check,
            "fleet",
            Verdict(Status.UNKNOWN, "was not checked", "the preflight has no line for this check"),
        )
        for check in CHECKS
        if check not in there
    ]
    order = list(CHECKS)
    return tuple(sorted(found, key=lambda e: (order.index(e.check), -e.status.badness, e.subject)))


def by_node(check: str, verdicts: Mapping[str, Verdict]) -> tuple[Line, ...]:
    """Return one line for each different verdict, with all nodes that have this verdict."""
    nodes: dict[Verdict, list[str]] = {}
    for node, verdict in verdicts.items():
        nodes.setdefault(verdict, []).append(node)
    return tuple(Line(check, node_ranges(names), verdict) for verdict, names in nodes.items())


def unknown(check: str, why: str, remedy: str, subject: str = "fleet") -> Line:
    """Return a line with status UNKNOWN. It has the reason, and the command that helps."""
    return Line(check, subject, Verdict(Status.UNKNOWN, "could not be checked", why, remedy))


def reason(missing: Mapping[str, Any]) -> str:
    """Return why a value is missing in a node's answer."""
    words = str(missing.get("missing"))
    return f"{words}: {missing['detail']}" if missing.get("detail") else words
