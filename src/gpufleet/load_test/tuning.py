"""Choose the settings to try on one replica, and find the settings with the highest rate.

Pure, except for the actions that `TrialRun` calls. The settings are tried one after another. Each
value is tried together with the best values so far. A trial counts as better only if its interval
of rates per GPU is entirely above that of the best trial so far, so that `compare_results` would
report a difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from gpufleet.errors import FleetError
from gpufleet.formatting import join_names, suggestion
from gpufleet.load_test.compare_results import carries_more
from gpufleet.load_test.load_target import TargetDeclaration
from gpufleet.load_test.result import Measurement
from gpufleet.node.marks import Mark
from gpufleet.planning.stage import Running
from gpufleet.settings.serving_settings import Served

WHY = "gpufleet measure --tune"
"""
The reason of every drain by this module begins with this text.

By it, the next run finds the drains that a killed run has left.
"""
SEQS, TOKENS, TENSOR = "max-num-seqs", "max-num-batched-tokens", "tensor_parallel"
COMMON: Mapping[str, tuple[int, ...]] = {SEQS: (128, 256, 512), TOKENS: (2048, 8192, 16384)}
"""
The values to try if a setting has no declared value. vLLM's default depends on release and GPU.
"""
MOST_VALUES = 8
"""The maximum number of values for one setting. Each value needs a restart and a measurement."""


@dataclass(frozen=True)
class Trial:
    """One combination of settings on the replica."""

    settings: Mapping[str, int]
    """The settings that replace declared settings. Empty: the declared settings are measured."""
    measured: Measurement | None = None
    why: str = ""
    """Why the trial was not measured. If it was measured, the reason for its result."""
    file: Path | None = None
    """The file of the result."""

    @property
    def gpus(self) -> int:
        """Return the number of the replica's GPUs."""
        return sum(self.measured.subject.gpus.values()) if self.measured else 0

    def __str__(self) -> str:
        return describe(self.settings)


class Tuning:
    """The completed trials, and the next one."""

    def __init__(self, values: Mapping[str, Sequence[int]]) -> None:
        """Set the values to try for each setting, in this order."""
        self.trials: list[Trial] = []
        self.best = Trial({})
        self._left: list[Mapping[str, int]] = [
            {}, *({name: each} for name, every in values.items() for each in every)
        ]  # fmt: skip
        self.planned = tuple(self._left)
        """All trials as planned at the begin, each with at most one changed setting."""

    def next(self) -> Mapping[str, int] | None:
        """
        Return the settings of the next trial, or None at the end.

        The first trial has the declared settings.
        """
        if not self._left:
            return None
        return {**self.best.settings, **self._left[0]}

    def add(self, trial: Trial) -> None:
        """Record the result of the trial that `next` returned."""
        del self._left[0]
        self.trials.append(trial)
        if trial.measured is None:
            return
        declared = self.best.measured
        if declared is None or carries_more(declared, trial.measured):
            self.best = trial

    @property
    def proposal(self) -> Trial | None:
        """Return the best trial, or None if no trial is better than the declared settings."""
        return self.best if self.best.settings else None

    def as_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {
            "trials": [_trial_json(each) for each in self.trials],
            "proposal": _trial_json(self.proposal) if self.proposal else None,
        }


class TrialActions(Protocol):
    """The actions of a tuning run on its replica. Each action raises `FleetError` if it fails."""

    def drain(self) -> None:
        """Drain the node, and return when no request is left."""

    def deploy(self, settings: Mapping[str, int]) -> None:
        """
        Deploy the node with these settings instead of the declared ones.

        Returns when the replica answers.
        """

    def measure(self) -> tuple[Measurement, Path]:
        """Measure the replica, and return the measurement with its file."""

    def undrain(self) -> None:
        """Undrain the node."""


class TrialRun:
    """One run of all trials. At its end, even after errors, it restores the declared settings."""

    def __init__(
        self,
        tuning: Tuning,
        actions: TrialActions,
        say: Callable[[str], None],
        *,
        is_as_declared: bool,
    ) -> None:
        """
        Set the trials.

        `is_as_declared` is False if a killed run may have left other settings on the replica.
        """
        self._tuning, self._actions, self._say = tuning, actions, say
        self._runs: Mapping[str, int] | None = {} if is_as_declared else None

    def run(self) -> None:
        """
        Run all trials.

        Raises `FleetError` if the declared settings cannot be measured, or the replica cannot be
        restored.
        """
        try:
            self._actions.drain()
            while (settings := self._tuning.next()) is not None:
                self._say(f"--- {describe(settings)}")
                self._tuning.add(self._try(settings))
        finally:
            self._say("--- restoring the declared settings")
            self._deploy({})
            self._actions.undrain()

    def _try(self, settings: Mapping[str, int]) -> Trial:
        try:
            self._deploy(settings)
            found, file = self._actions.measure()
        except FleetError as error:
            if not settings:
                raise
            self._say(f"not measured: {error}")
            return Trial(settings, why=error.problems[0])
        return Trial(settings, found, found.found.why, file)

    def _deploy(self, settings: Mapping[str, int]) -> None:
        if self._runs != settings:
            self._runs = None
            self._actions.deploy(settings)
            self._runs = settings


def _trial_json(trial: Trial) -> dict[str, Any]:
    found = trial.measured.found if trial.measured else None
    return {
        "settings": dict(trial.settings),
        "kept": found.kept if found else None,
        "missed": found.missed if found else None,
        "status": found.status if found else None,
        "gpus": trial.gpus or None,
        "file": str(trial.file) if trial.file else None,
        "why": trial.why,
    }


def describe(settings: Mapping[str, int]) -> str:
    """
    Return settings as text.

    >>> describe({"max-num-seqs": 256}), describe({})
    ('max-num-seqs 256', 'as declared')
    """
    return ", ".join(f"{name} {value}" for name, value in settings.items()) or "as declared"


def deploy_data(model: str, settings: Mapping[str, int]) -> dict[str, int]:
    """
    Return the settings by their dotted names for `gpufleet deploy --data`.

    >>> deploy_data("llama", {"max-num-seqs": 256, "tensor_parallel": 2})
    {'serving.llama.flags.max-num-seqs': 256, 'serving.llama.tensor_parallel': 2}
    """
    return {
        f"serving.{model}.{name if name == TENSOR else f'flags.{name}'}": value
        for name, value in settings.items()
    }


def fields_of(served: Served, settings: Mapping[str, int]) -> dict[str, Any]:
    """Return the fields of a model's settings, with `settings` replacing the declared ones."""
    flags = {name: value for name, value in settings.items() if name != TENSOR}
    found: dict[str, Any] = {"flags": {**served.flags, **flags}}
    return found | ({TENSOR: settings[TENSOR]} if TENSOR in settings else {})


def parse_values(typed: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """
    Parse values to try, written as `NAME=VALUE,VALUE`.

    Raises `FleetError` for a wrong syntax, for unknown settings and for too many values.
    """
    found: dict[str, tuple[int, ...]] = {}
    problems = []
    for each in typed:
        name, _, values = each.partition("=")
        numbers = tuple(
            dict.fromkeys(int(v) for v in values.split(",") if v.isascii() and v.isdigit())
        )
        if name not in (SEQS, TOKENS, TENSOR):
            problems.append(
                f"--try {each}: {name!r} is not a setting that gpufleet can "
                f"try{suggestion(name, [SEQS, TOKENS, TENSOR])}: write {SEQS}, {TOKENS} or "
                f"{TENSOR}"
            )
        elif len(numbers) != len(values.split(",")) or 0 in numbers:
            problems.append(
                f"--try {each}: write different whole numbers, for example --try {name}=128,256"
            )
        elif len(numbers) > MOST_VALUES:
            problems.append(
                f"--try {each}: gpufleet tries at most {MOST_VALUES} values of a setting"
            )
        else:
            found[name] = numbers
    if problems:
        raise FleetError(*problems)
    return found


def usual_values(
    arguments: Sequence[str], divisions: Sequence[int], running: int
) -> dict[str, tuple[int, ...]]:
    """
    Return the values to try by default.

    They are half and twice the running value, or `COMMON` values if the running value is unknown.
    `arguments` are the arguments of the replica's systemd unit. `divisions` are the sizes of
    tensor-parallel groups that fit, and `running` is the present size.
    """
    given = {name: value for name, _, value in (each.strip().partition(" ") for each in arguments)}
    found: dict[str, tuple[int, ...]] = {}
    for name, common in COMMON.items():
        now = given.get(f"--{name}", "")
        found[name] = (
            tuple(each for each in (int(now) // 2, int(now) * 2) if each)
            if now.isascii() and now.isdigit()
            else common
        )
    found[TENSOR] = tuple(each for each in sorted(set(divisions)) if each != running)
    return {name: values for name, values in found.items() if values}


# -- the replica


def choose_replica(
    model: str,
    wanted: str | None,
    declared: TargetDeclaration,
    marks: Mapping[str, Mark],
) -> tuple[Running, Mark | None]:
    """
    Return the replica on which settings are tried, and the drain that a killed run left on it.

    The replica is `wanted`, or else a replica that a killed run left drained, or else the last of
    several replicas. A replica that a killed run left may have other settings than declared.
    `marks` are the drains of drained replicas. Raises `FleetError` if the only replica is not named
    in `wanted`, if the replica spans several nodes, or if it gets no requests.
    """
    ranks = list(_ranks(model, declared))
    left = {name: mark for name, mark in marks.items() if mark.why.startswith(WHY)}
    able = {each.id for each in ranks if each.id in left or each.id not in declared.out}
    if wanted is not None and wanted not in {each.id for each in ranks}:
        known = sorted({each.id for each in ranks})
        raise FleetError(f"{model} has no replica {wanted!r}{suggestion(wanted, known)}")
    if wanted is not None and wanted not in able:
        raise FleetError(
            f"{wanted} receives no requests: {declared.out[wanted]}. Use a different replica, or "
            f"undrain {wanted} first"
        )
    if not able:
        raise FleetError(
            f"no replica of {model} serves: deploy the model first, or see the reason in "
            "`gpufleet status`"
        )
    if wanted is None and len(able) == 1 and not left.keys() & able:
        only = next(iter(able))
        raise FleetError(
            f"{only} is the only replica of {model} that serves, so requests would fail while "
            f"gpufleet tries settings. To do so anyway, write --replica {only}"
        )
    chosen = wanted or max(left.keys() & able or able, key=_number)
    found = [each for each in ranks if each.id == chosen]
    if len(found) > 1:
        raise FleetError(
            f"{chosen} runs on {join_names(each.node for each in found)} together, but gpufleet "
            "can try settings only on replicas of one node"
        )
    return found[0], left.get(chosen)


def _ranks(model: str, declared: TargetDeclaration) -> Iterator[Running]:
    return (each for each in declared.running if each.model == model)


def _number(replica: str) -> int:
    return int(replica.rpartition("-")[2])
