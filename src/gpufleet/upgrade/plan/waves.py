"""Order groups into a canary and waves of the requested sizes. Pure.

A wave always has the requested size. If it would drain more replicas of a model than the load
allows, it is refused (`capacity.refusals`), and never silently made smaller. But a wave can mix
models: if possible, its groups are chosen so that no model loses more replicas than it can spare.
The order:

- Canary: the group that shows most at the least cost. Its replicas serve now and stay in the plan,
  so that they can be compared before and after the change. Of such groups the canary has the fewest
  replicas, then the model with the most replicas, then the fewest nodes, then the first name. The
  choice does not depend on the present load, so that the confirmed plan is carried out.
- Other waves: the models that need the most waves come first, so that the last waves can still mix
  models.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from gpufleet.settings.upgrade_settings import Upgrade
from gpufleet.upgrade.plan.change_groups import natural_key
from gpufleet.upgrade.plan.replica_load import ReplicaLoad
from gpufleet.upgrade.plan.required_replicas import (
    Need,
    required_replicas,
    serving,
    serving_after,
    stopped_replicas,
)
from gpufleet.upgrade.plan.wave import Group, Wave, model_of


def waves(
    groups: Iterable[Group],
    settings: Upgrade,
    loads: Sequence[ReplicaLoad] = (),
    accepted: Collection[str] = (),
) -> tuple[Wave, ...]:
    """
    Return the waves in order; every group is in exactly one wave.

    `loads` determine how many replicas each model can spare; without loads there is no limit.
    Models in `accepted` (`--accept-outage`) change one group at a time, whatever their load.
    """
    every = tuple(groups)
    queue = _Queue(
        every, required_replicas(loads, settings.headroom, settings.keep), loads, accepted
    )
    found: list[Wave] = []
    for number, (size, canary) in enumerate(_sizes(settings, len(every)), start=1):
        if not queue:
            break
        found.append(Wave(number, tuple(queue.wave(size, canary=canary)), canary))
    return tuple(found)


def size_of(size: int | str, groups: int) -> int:
    """
    Return a wave size as a number of groups: a percentage is rounded down, but not to 0.

    >>> size_of(2, 10), size_of("25%", 10), size_of("5%", 10)
    (2, 2, 1)
    """
    if isinstance(size, int):
        return size
    return max(1, groups * int(size.removesuffix("%")) // 100)


def spare(need: Need, serve: int, most: int, *, accepted: bool) -> int:
    """
    Return how many of a model's replicas a wave may take while `serve` of them serve.

    `most` is the number of replicas in the model's largest group. A wave may take that many if the
    outage is accepted.
    """
    room = max(0, serve - need.needed)
    return max(room, most) if accepted else room


def _sizes(settings: Upgrade, groups: int) -> Iterator[tuple[int, bool]]:
    """Yield wave sizes endlessly, with whether it is the canary's."""
    if settings.canary:
        yield settings.canary, True
    for size in settings.waves:
        yield size_of(size, groups), False
    while True:
        yield size_of(settings.waves[-1], groups), False


class _Queue:
    """
    Groups that wait for their wave; groups that stop the same replicas per model count as equal.
    """

    def __init__(
        self,
        groups: Sequence[Group],
        needs: Mapping[str, Need],
        loads: Sequence[ReplicaLoad],
        accepted: Collection[str],
    ) -> None:
        self.needs, self.accepted = needs, accepted
        self.serve = serving(loads)
        self.most: Counter[str] = Counter()
        count = Counter(model for group in groups for model in group.models)

        def first(group: Group) -> tuple[object, ...]:
            takes = stopped_replicas([group], self.serve)
            judged = takes.total() == len(group.replicas) > 0 and not group.goes
            models = min((count[model] for model in group.models), default=0)
            ordinary = not loads or judged
            return (
                not ordinary,
                len(group.replicas),
                -models,
                len(group.nodes),
                natural_key(group.id),
            )

        self.count = Counter(map(model_of, self.serve))
        self.kinds: dict[tuple[object, ...], _Kind] = {}
        for order, group in enumerate(sorted(groups, key=first)):
            takes = stopped_replicas([group], self.serve)
            self.most |= takes
            kind = (tuple(sorted(takes.items())), group.models)
            alike = self.kinds.setdefault(kind, _Kind(takes, group.models))
            alike.waiting.append((order, group))

    def __bool__(self) -> bool:
        return any(kind.waiting for kind in self.kinds.values())

    def wave(self, size: int, *, canary: bool) -> list[Group]:
        """Remove and return the groups of the next wave."""
        chosen: list[Group] = []
        spared = self._room()
        room = spared.copy()
        while len(chosen) < size and self:
            waiting = [kind for kind in self.kinds.values() if kind.waiting]
            fits = [
                kind
                for kind in waiting
                if all(room[model] >= count for model, count in kind.takes.items())
            ]
            rounds = self._rounds(spared)

            def priority(kind: _Kind, rounds: Mapping[str, int] = rounds) -> tuple[int, int]:
                behind = max((rounds[model] for model in kind.models), default=0)
                return 0 if canary else -behind, kind.waiting[0][0]

            # If no group fits, keep the requested size; `capacity.refusals` refuses it with its
            # numbers.
            kind = min(fits or waiting, key=priority)
            room.subtract(kind.takes)
            chosen.append(kind.waiting.popleft()[1])
        if (then := serving_after(chosen, self.serve)) is not self.serve:
            self.serve, self.count = then, Counter(map(model_of, then))
        return chosen

    def _room(self) -> Counter[str]:
        """Return how many replicas of each model a wave may take now."""
        return Counter(
            {
                model: spare(
                    need, self.count[model], self.most[model], accepted=model in self.accepted
                )
                for model, need in self.needs.items()
            }
        )

    def _rounds(self, room: Mapping[str, int]) -> Counter[str]:
        """
        Return the minimum number of waves that each model still needs, with this room per wave.
        """
        waiting: Counter[str] = Counter()
        for kind in self.kinds.values():
            for model in kind.models:
                waiting[model] += len(kind.waiting)
        return Counter({model: -(-left // max(1, room[model])) for model, left in waiting.items()})


@dataclass(frozen=True)
class _Kind:
    """
    Groups that stop the same number of replicas of each model, each with its position in the order.
    """

    takes: Counter[str]
    models: tuple[str, ...]
    waiting: deque[tuple[int, Group]] = field(default_factory=deque)
