"""
Define facts about a node that distinguish several possible causes of one log line. Pure.

If only log files are available, every fact is None, and all possible causes of a rule are listed.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

CONDITIONS = ("check", "not check", "seen", "gpu", "signal")
"""
The conditions that a rule may have:

- `check NAME`: the check found a problem.
- `not check NAME`: the check passed.
- `seen RULE`: the logs have a line of this rule.
- `gpu NAME`: the name of a GPU contains this text.
- `signal NAME`: this signal ended the process.
"""


@dataclass(frozen=True)
class Evidence:
    """Facts that are not from the logs. None means unknown."""

    checks: dict[str, bool] | None = None
    """Whether each check passed, by the check's name. Checks without a result are not in it."""
    gpus: tuple[str, ...] | None = None
    """The names of the node's GPUs."""
    signal: str | None = None
    """The signal that ended the unit's main process, such as SIGKILL. "" if the process exited."""


NONE = Evidence()


def is_met(condition: str, evidence: Evidence, seen: Collection[str]) -> bool | None:
    """
    Return whether a rule's condition is met, or None if that is not known.

    >>> is_met("check fabric-state", Evidence(checks={"fabric-state": False}), ())
    True
    >>> is_met("check fabric-state", Evidence(), ()) is None
    True
    """
    kind, _, name = condition.rpartition(" ")
    if kind == "seen":
        # If the line is not in these logs, it may be in a log that was not read.
        return True if name in seen else None
    if kind in {"check", "not check"}:
        passed = (evidence.checks or {}).get(name)
        return None if passed is None else passed == (kind == "not check")
    if kind == "gpu":
        return None if evidence.gpus is None else any(name in each for each in evidence.gpus)
    if kind == "signal":
        return None if evidence.signal is None else evidence.signal == name
    raise ValueError(f"{condition!r} is not a condition: {', '.join(CONDITIONS)}")
