"""Refuse waves that the present load does not allow, with the setting to change.  Pure.

While a wave is changed, its replicas do not serve. At least `Need.needed` replicas of each model
must always serve: as many as the model's load needs (`upgrade.headroom`), and not fewer than
`upgrade.keep`. Waves that leave too few replicas are refused. An operator can accept two things for
a model: an outage (`--accept-outage`), and an unknown load (`--accept-unknown-load`). Replicas of
unknown load then count as full.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from gpufleet.formatting import count_of
from gpufleet.settings.upgrade_settings import Upgrade
from gpufleet.upgrade.plan.replica_load import ReplicaLoad
from gpufleet.upgrade.plan.required_replicas import (
    Need,
    required_replicas,
    serving,
    serving_after,
    stopped_replicas,
)
from gpufleet.upgrade.plan.wave import Wave, model_of
from gpufleet.upgrade.plan.waves import spare, waves

__all__ = [
    "ACCEPT_OUTAGE",
    "ACCEPT_UNKNOWN_LOAD",
    "Need",
    "Recheck",
    "RemainingCapacity",
    "recheck",
    "refusals",
    "remaining_capacity",
    "required_replicas",
]

ACCEPT_OUTAGE = "--accept-outage"
ACCEPT_UNKNOWN_LOAD = "--accept-unknown-load"


@dataclass(frozen=True)
class RemainingCapacity:
    """The capacity of a model that remains during a wave."""

    wave: int
    model: str
    serving: int
    """Replicas that serve before the wave."""
    takes: int
    needed: int
    accepted: bool = False
    """Whether its outage is accepted."""

    @property
    def left(self) -> int:
        """Replicas that serve during the wave."""
        return self.serving - self.takes

    @property
    def enough(self) -> bool:
        """Return whether the remaining replicas carry the load."""
        return not self.takes or self.left >= self.needed

    def as_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {**asdict(self), "left": self.left, "enough": self.enough}


@dataclass(frozen=True)
class Recheck:
    """The decision whether a wave may begin now."""

    verdict: Literal["proceed", "wait"]
    why: str
    """The reason, with the numbers."""

    @property
    def proceeds(self) -> bool:
        """Return whether the wave may begin."""
        return self.verdict == "proceed"


def remaining_capacity(
    found: Iterable[Wave],
    loads: Sequence[ReplicaLoad],
    settings: Upgrade,
    accepted: Collection[str] = (),
) -> tuple[RemainingCapacity, ...]:
    """Return the remaining replicas of each affected model, for each wave."""
    needs = required_replicas(loads, settings.headroom, settings.keep)
    serve = serving(loads)
    count = Counter(map(model_of, serve))
    said = []
    for wave in found:
        said += [
            RemainingCapacity(
                wave.number, model, count[model], takes, needs[model].needed, model in accepted
            )
            for model, takes in sorted(stopped_replicas(wave.groups, serve).items())
        ]
        if (then := serving_after(wave.groups, serve)) is not serve:
            serve, count = then, Counter(map(model_of, then))
    return tuple(said)


def refusals(
    found: Sequence[Wave],
    loads: Sequence[ReplicaLoad],
    settings: Upgrade,
    *,
    accept_outage: Collection[str] = (),
    accept_unknown_load: Collection[str] = (),
    load_seconds: Mapping[str, float] | None = None,
) -> tuple[str, ...]:
    """
    Return why these waves are refused, a sentence for each model; empty: they are allowed.

    `accept_outage` and `accept_unknown_load` are the models that the operator named in these
    options. `load_seconds` has the last known load time of a replica, by model.
    """
    needs = required_replicas(loads, settings.headroom, settings.keep)
    touched = {model for wave in found for group in wave.groups for model in group.models}
    unknown = [
        _unknown(need)
        for model, need in needs.items()
        if need.unknown and model in touched and model not in accept_unknown_load
    ]
    most = _most(found, loads)
    short: dict[str, list[RemainingCapacity]] = {}
    for each in remaining_capacity(found, loads, settings, accept_outage):
        if each.takes > spare(
            needs[each.model], each.serving, most[each.model], accepted=each.accepted
        ):
            short.setdefault(each.model, []).append(each)
    # An unknown load leaves no number to report.
    blind = {model for model, need in needs.items() if need.unknown} - {*accept_unknown_load}
    asked = _Request(found, loads, settings, accept_outage, load_seconds or {})
    return (
        *unknown,
        *(
            asked.refusal(needs[model], lacks, most[model])
            for model, lacks in sorted(short.items())
            if model not in blind
        ),
    )


def recheck(
    wave: Wave,
    loads: Sequence[ReplicaLoad],
    settings: Upgrade,
    *,
    accept_outage: Collection[str] = (),
    accept_unknown_load: Collection[str] = (),
) -> Recheck:
    """
    Return whether a wave may begin under the current load.

    `loads` are the current loads of all replicas of the wave's models. The wave waits while the
    load is too high or unknown, because both are temporary.
    """
    needs = required_replicas(loads, settings.headroom, settings.keep)
    most = _most([wave], loads)
    waits, goes = [], []
    for each in remaining_capacity([wave], loads, settings, accept_outage):
        need = needs[each.model]
        numbers = f"{each.model}: {each.left} of {each.serving} replicas are left, {_needs(need)}"
        if need.unknown and each.model not in accept_unknown_load:
            waits.append(f"the load of {each.model} is unknown: {'; '.join(need.unknown)}")
        elif each.takes > spare(need, each.serving, most[each.model], accepted=each.accepted):
            waits.append(numbers)
        else:
            goes.append(numbers)
    if waits:
        return Recheck("wait", f"wave {wave.number} waits: {'; '.join(waits)}")
    return Recheck(
        "proceed", f"wave {wave.number}: {'; '.join(goes) or 'drains no serving replica'}"
    )


def _most(found: Iterable[Wave], loads: Sequence[ReplicaLoad]) -> Counter[str]:
    """Return, for each model, the maximum number of replicas that one group stops."""
    serve, most = serving(loads), Counter[str]()
    for wave in found:
        for group in wave.groups:
            most |= stopped_replicas([group], serve)
    return most


def _needs(need: Need) -> str:
    measured = f", as measured {need.measured}" if need.measured else ""
    return f"{need.needed} replicas are needed for a load of {need.load:.2f} replicas{measured}"


def _unknown(need: Need) -> str:
    return (
        f"{need.model}: the load of {count_of(len(need.unknown), 'replica')} of {need.serving} is "
        "unknown, so gpufleet does not know how many replicas it may drain: "
        f"{'; '.join(need.unknown)}. Repair this, or continue with `{ACCEPT_UNKNOWN_LOAD} "
        f"{need.model}`, which counts a replica of unknown load as full"
    )


def _part(lack: RemainingCapacity) -> str:
    """Return, in words, the share of a model's replicas that a wave drains."""
    if lack.serving == 1:
        return "the only replica"
    return f"{lack.takes} of the {count_of(lack.serving, 'replica')}"


@dataclass(frozen=True)
class _Request:
    """The requested waves, with the loads, the settings and the accepted outages."""

    waves: Sequence[Wave]
    loads: Sequence[ReplicaLoad]
    settings: Upgrade
    accept_outage: Collection[str]
    load_seconds: Mapping[str, float]

    def refusal(self, need: Need, lacks: Sequence[RemainingCapacity], most: int) -> str:
        """
        Return the refusal of a model's waves: the missing capacity, and the settings to change.

        `lacks` are the waves that drain too many replicas, `most` is the number of replicas in the
        largest group.
        """
        settings, model = self.settings, need.model
        worst = min(lacks, key=lambda each: (each.left - each.needed, each.wave))
        more = count_of(len(lacks) - 1, "further wave")
        others = f" (and {more} with the same problem)" if len(lacks) > 1 else ""
        rule = (
            f"the load of {need.load:.2f} replicas needs {need.needed} replicas at a headroom of "
            f"{settings.headroom:g} (`upgrade.headroom`)"
        )
        if need.measured:
            rule += f", according to the capacity of the replicas that was measured {need.measured}"
        if need.needed == settings.keep and need.load <= settings.keep * settings.headroom:
            rule = f"`upgrade.keep` is {settings.keep}"
        serve = "serves" if worst.serving == 1 else "serve"
        said = (
            f"upgrade.waves: wave {worst.wave}{others} drains {_part(worst)} of {model} that "
            f"{serve}, so {worst.left} would be left, but {rule}"
        )
        add = f"(`serving.{model}.replicas`)"
        if worst.serving <= most:
            return (
                f"{said}. All serving replicas are in this wave, so {model} is down while the "
                f"replicas load ({self._cost(model)}). Add a replica first {add}, or accept "
                f"the outage with `{ACCEPT_OUTAGE} {model}`"
            )
        written = self._smaller(need)
        remain = worst.left if written else worst.serving - most
        ways = [f"write {written}"] if written else []
        if remain >= settings.keep:
            ways.append(f"wait for a load of at most {remain * settings.headroom:.2f} replicas")
        if need.load > worst.serving:  # a queue does not tell how many replicas are needed
            said += ". The load exceeds the capacity of all serving replicas, even before this wave"
            ways.append(f"find the cause of the load (`gpufleet doctor`), or add replicas {add}")
        else:
            ways.append(f"add {count_of(worst.needed - remain, 'more replica')} {add}")
        if not written:
            ways.append(
                "accept with `"
                f"{ACCEPT_OUTAGE} {model}` that the remaining replicas cannot serve the load: "
                "gpufleet then changes one group at a time"
            )
        return f"{said}: {', or '.join(ways)}"

    def _cost(self, model: str) -> str:
        seconds = self.load_seconds.get(model)
        return f"{seconds:.0f} s the last time" if seconds is not None else "for an unknown time"

    def _smaller(self, need: Need) -> str:
        """
        Return the setting that leaves the model enough replicas; "": no wave size does.

        Only this model's groups are tried, as if its waves had no other groups.
        """
        model = need.model
        groups = [each for wave in self.waves for each in wave.groups if model in each.models]
        for size in dict.fromkeys((max(1, need.spare), 1)):
            canary = min(self.settings.canary, size)
            tried = self.settings.model_copy(update={"waves": (size,), "canary": canary})
            made = waves(groups, tried, self.loads, self.accept_outage)
            found = remaining_capacity(made, self.loads, tried, self.accept_outage)
            if all(each.enough for each in found if each.model == model):
                changed = f"`waves: [{size}]`"
                if canary != self.settings.canary:
                    changed = f"`canary: {canary}` and {changed}"
                return changed
        return ""
