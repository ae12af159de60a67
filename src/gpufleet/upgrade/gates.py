"""Is a replica, or a node, after a change what it was before?  Pure.

Each gate compares two looks (`baseline.py`) and gives a `Verdict`. What is not known is no pass:
only a person may take it for one. What could not be judged for a reason that is nobody's fault
(too few requests) passes, and is said.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpufleet.gateway_settings import Gates
from gpufleet.upgrade.baseline import Alerts, Answers, Findings, Traffic

QUANTILE = 0.99
# Of a prompt and of a text, in sentences.
_SHOWN = 40


@dataclass(frozen=True)
class Verdict:
    """What a gate says."""

    passed: bool | None
    """None: not known, which is not a pass."""
    reasons: tuple[str, ...] = ()
    """Sentences: what is against it; of a pass, what was not judged and why."""
    seen: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Numbers that it rests on, for reports: `ttft_p99_before`, in seconds, and others."""

    def as_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {"passed": self.passed, "reasons": list(self.reasons), "seen": dict(self.seen)}

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Verdict:
        """Return what `as_json` has written."""
        return cls(said["passed"], tuple(said["reasons"]), dict(said.get("seen", {})))


def united(verdicts: Iterable[Verdict]) -> Verdict:
    """Return what several say together: the worst, a failure before what is not known."""
    found = tuple(verdicts)
    passed: bool | None = True
    if any(each.passed is None for each in found):
        passed = None
    if any(each.passed is False for each in found):
        passed = False
    seen: dict[str, float] = {}
    for each in found:
        seen.update(each.seen)
    return Verdict(passed, tuple(reason for each in found for reason in each.reasons), seen)


def golden(before: Answers, after: Answers, same: float) -> Verdict:
    """Say whether prompts are answered as before, in at least the share `same` of the tokens."""
    raise NotImplementedError


def traffic(before: Traffic, after: Traffic, gates: Gates) -> Verdict:
    """Say whether requests are answered as quickly, and as well, as before."""
    raise NotImplementedError


def findings(before: Findings, after: Findings) -> Verdict:
    """Say whether the node check has nothing against the nodes that it had not before."""
    raise NotImplementedError


def alerts(before: Alerts, after: Alerts, nodes: Collection[str]) -> Verdict:
    """Say whether nothing fires about `nodes` that did not fire before."""
    raise NotImplementedError
