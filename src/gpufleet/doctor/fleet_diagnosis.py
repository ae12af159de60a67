"""The values of a fleet's diagnosis: problems, worst first, each with its evidence."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from gpufleet.serving.rank_status import iso

SCHEMA = 1
"""Version of `Diagnosis.as_json()`; increased when a key changes its meaning or is removed."""


class Impact(IntEnum):
    """The effect of a problem on clients; a larger number is worse."""

    NOTICE = 0  # no effect now
    RISK = 1  # no effect yet: a part is worn, a spare is missing, or the state is unknown
    DEGRADED = 2  # fewer or slower replicas
    OUTAGE = 3  # a model, or all of them, is not served

    @property
    def word(self) -> str:
        """Return the impact's name in tables and JSON."""
        return self.name.lower()


@dataclass(frozen=True)
class Problem:
    """One problem of a fleet, with its impact, evidence and cause."""

    subject: str
    """The affected part: `llama-0`, `gpu-07`, `gateway lb-01`."""
    what: str
    impact: Impact
    evidence: tuple[str, ...] = ()
    """Sentences, each with its source (a node, a file or a unit) and its time if known."""
    cause: str = ""
    """The cause; "": unknown."""
    do: str = ""
    """The next steps; commands in backquotes."""
    page: str = ""
    """The page of the documentation."""
    at: float | None = None
    """Time at which it began, in seconds since 1970; None: unknown."""
    names: tuple[str, ...] = ()
    """The affected nodes, replicas and models."""
    because: str = ""
    """The subject of the problem that causes this one, which is listed first."""

    def as_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
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
    """All problems, worst first, and the parts that could not be read."""

    problems: tuple[Problem, ...]
    serving: tuple[str, ...] = ()
    """A sentence for each model, with its number of serving replicas."""
    unseen: tuple[str, ...] = ()
    """A sentence for each part that could not be read."""

    @property
    def status(self) -> int:
        """Return the exit status: 0 notices only, 1 problems, 2 something could not be read."""
        if any(each.impact > Impact.NOTICE for each in self.problems):
            return 1
        return 2 if self.unseen else 0

    def as_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {
            "schema": SCHEMA,
            "problems": [each.as_json() for each in self.problems],
            "serving": list(self.serving),
            "unseen": list(self.unseen),
        }


def worst_first(problems: Iterable[Problem]) -> tuple[Problem, ...]:
    """
    Return problems in their reading order, worst first.

    A problem that causes others comes before the worst of them. Of equally bad problems the earlier
    one comes first.
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
