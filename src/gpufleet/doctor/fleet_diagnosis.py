"""Define the values of a diagnosis: problems, the worst first, each with its evidence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from gpufleet.serving.rank_status import iso

SCHEMA = 1
"""Version of `Diagnosis.as_json()`. It increases when a key is removed or its meaning changes."""


class Impact(IntEnum):
    """The effect of a problem on clients. A larger number is worse."""

    NOTICE = 0  # no effect now
    RISK = 1  # no effect yet, but a part is worn, a spare is missing, or the state is unknown
    DEGRADED = 2  # fewer or slower replicas
    OUTAGE = 3  # one model or all models are not served

    @property
    def word(self) -> str:
        """Return the name of the impact in tables and JSON."""
        return self.name.lower()


@dataclass(frozen=True)
class Problem:
    """One problem of a fleet, with its impact, its evidence and its cause."""

    subject: str
    """The part that is affected, for example `llama-0`, `gpu-07` or `gateway lb-01`."""
    what: str
    impact: Impact
    evidence: tuple[str, ...] = ()
    """
    Sentences. Each contains its source (a node, a file or a unit), and its time if that is known.
    """
    cause: str = ""
    """The cause, or "" if it is unknown."""
    do: str = ""
    """The next steps. Commands are in backquotes."""
    page: str = ""
    """The page of the documentation."""
    at: float | None = None
    """When the problem began, in seconds since 1970. None if it is unknown."""
    names: tuple[str, ...] = ()
    """The nodes, replicas and models that are affected."""
    because: str = ""
    """
    The subject of a different problem that causes this problem and is listed before it, or "".
    """

    def as_json(self) -> dict[str, Any]:
        """Return the problem as plain values for `json.dumps`."""
        return {
            "subject": self.subject,
            "what": self.what,
            "impact": self.impact.word,
            "evidence": list(self.evidence),
            "cause": self.cause or None,
            "do": self.do or None,
            "page": self.page or None,
            "at": iso(self.at),
            "names": list(self.names),
            "because": self.because or None,
        }


@dataclass(frozen=True)
class Diagnosis:
    """All problems, the worst first, and the parts of the fleet that could not be read."""

    problems: tuple[Problem, ...]
    serving: tuple[str, ...] = ()
    """A sentence for each model, with the number of its replicas that serve."""
    unseen: tuple[str, ...] = ()
    """A sentence for each part of the fleet that could not be read."""

    @property
    def status(self) -> int:
        """
        Return the exit status: 1 if there are problems other than notices, otherwise 2 if something
        could not be read, otherwise 0.
        """
        if any(each.impact > Impact.NOTICE for each in self.problems):
            return 1
        return 2 if self.unseen else 0

    def as_json(self) -> dict[str, Any]:
        """Return the diagnosis as plain values for `json.dumps`."""
        return {
            "schema": SCHEMA,
            "problems": [each.as_json() for each in self.problems],
            "serving": list(self.serving),
            "unseen": list(self.unseen),
        }


def worst_first(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """
    Return the problems in the order in which they are shown, the worst first.

    A problem that causes others comes before the worst of them. Of equally bad problems, the one
    that began earlier comes first.
    """
    known = list(problems)
    subjects = {each.subject for each in known}

    def weight(each: Problem, seen: frozenset[str] = frozenset()) -> Impact:
        effects = [
            other for other in known if other.because == each.subject and other.subject not in seen
        ]
        return max([each.impact, *(weight(o, seen | {each.subject}) for o in effects)])

    def depth(each: Problem, seen: frozenset[str] = frozenset()) -> int:
        if not each.because or each.because not in subjects or each.subject in seen:
            return 0
        above = (other for other in known if other.subject == each.because)
        return 1 + max(depth(other, seen | {each.subject}) for other in above)

    return tuple(
        sorted(
            known,
            key=lambda each: (
                -weight(each),
                depth(each),
                each.at if each.at is not None else float("inf"),
                each.subject,
            ),
        )
    )
