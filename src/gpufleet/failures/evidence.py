"""Facts about a node that distinguish the causes of one log line.  Pure.

Offline every fact is None, and a rule lists all its possible causes.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

CONDITIONS = ("check", "not check", "seen", "gpu", "signal")
"""
Conditions that a rule may have. `check NAME`: the check found a problem; `not check NAME`: the
check passed; `seen RULE`: the logs have that rule's line; `gpu NAME`: a GPU's name contains it;
`signal NAME`: the signal ended the process.
"""


@dataclass(frozen=True)
class Evidence:
    """Facts from outside the logs; None: unknown."""

    checks: dict[str, bool] | None = None
    """Whether each check passed, by name. Checks without a result are left out."""
    gpus: tuple[str, ...] | None = None
    """The names of the node's GPUs."""
    signal: str | None = None
    """The signal that ended the unit's main process, such as SIGKILL; "": it exited."""


NONE = Evidence()


def is_met(condition: str, evidence: Evidence, seen: Collection[str]) -> bool | None:
    """
    Return whether a condition of a rule is met; None: not known.

    >>> is_met("check fabric-state", Evidence(checks={"fabric-state": False}), ())
    True
    >>> is_met("check fabric-state", Evidence(), ()) is None
    True
    """
    kind, _, name = condition.rpartition(" ")
    if kind == "seen":
        # The line may be in a log that was not given.
        return True if name in seen else None
    if kind in {"check", "not check"}:
        passed = (evidence.checks or {}).get(name)
        return None if passed is None else passed == (kind == "not check")
    if kind == "gpu":
        return None if evidence.gpus is None else any(name in each for each in evidence.gpus)
    if kind == "signal":
        return None if evidence.signal is None else evidence.signal == name
    raise ValueError(f"{condition!r} is not a condition: {', '.join(CONDITIONS)}")
