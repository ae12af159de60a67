"""Compute how many replicas of each model the present load needs.  Pure.

Load is counted in replicas: a replica with half of its request slots or half of its KV cache in use
has a load of 0.5. With the needed replicas, each is loaded at most to `upgrade.headroom`; at least
`upgrade.keep` replicas are needed. All replicas of a model count the same, whatever their GPUs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from gpufleet.formatting import join_names
from gpufleet.upgrade.plan.replica_load import ReplicaLoad
from gpufleet.upgrade.plan.wave import Group, model_of

# Tolerance for sums of shares: 1.7 / 0.85 must not require a third replica.
_ROUNDING = 1e-9


@dataclass(frozen=True)
class Need:
    """The replicas that a model's load requires."""

    model: str
    serving: int
    """Replicas that get requests now."""
    load: float
    """The load in replicas; a replica with unknown load counts as full."""
    needed: int
    """The minimum of serving replicas at any time."""
    unknown: tuple[str, ...] = ()
    """A sentence for each replica whose load is unknown."""
    measured: str = ""
    """The measurement on which the load rests; "": only slots and KV caches were counted."""

    @property
    def spare(self) -> int:
        """Return how many replicas may be stopped."""
        return max(0, self.serving - self.needed)

    def as_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return asdict(self)


def required_replicas(
    loads: Iterable[ReplicaLoad], headroom: float, keep: int = 1
) -> dict[str, Need]:
    """Return the need of each model, by name. `headroom` and `keep` are the `upgrade` settings."""
    by_model: dict[str, list[ReplicaLoad]] = {}
    for each in loads:
        by_model.setdefault(each.model, []).append(each)
    found = {}
    for model, replicas in sorted(by_model.items()):
        serving = [each for each in replicas if each.serves]
        load = sum(1.0 if each.share is None else each.share for each in serving)
        found[model] = Need(
            model=model,
            serving=len(serving),
            load=load,
            needed=max(keep, math.ceil(load / headroom - _ROUNDING)),
            unknown=tuple(
                f"{each.replica} on {each.node}: {each.unknown}"
                for each in serving
                if each.share is None
            ),
            measured=join_names({e.measured for e in serving if e.rests_on_measurement}),
        )
    return found


def serving(loads: Iterable[ReplicaLoad]) -> frozenset[str]:
    """Return the ids of the replicas that get requests now."""
    return frozenset(each.replica for each in loads if each.serves)


def stopped_replicas(groups: Iterable[Group], serve: frozenset[str]) -> Counter[str]:
    """Return how many replicas of each model stop serving while these groups are changed."""
    return Counter(
        model_of(replica) for group in groups for replica in group.replicas if replica in serve
    )


def serving_after(groups: Iterable[Group], serve: frozenset[str]) -> frozenset[str]:
    """Return the ids of the replicas that serve after these groups are changed."""
    for group in (each for each in groups if each.goes or each.comes):
        serve = (serve - {*group.goes}) | {*group.comes}
    return serve
