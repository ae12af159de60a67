"""Decide an upgrade's next step from its journal.  Pure: only `Actions` change the fleet.

The same state machine serves a first run and a run that is resumed after `kill -9`, because its
only memory is the journal, and each step may be repeated. A group passes these steps:

    waiting - drain - switch - ready - golden answers - undrain - soak - judged - done

If one of them fails, the group is rolled back:

    failed - drain - restore - ready - undrain - returned

Software below vLLM is changed between drain and switch (`change`), and cannot be rolled back. A
group that fails after this change stays drained, with the reason (stuck). A group whose rollback
fails also stays drained.

If more groups fail than allowed, the whole wave is rolled back, and the upgrade stops. A group has
also failed if it passed its gates and no longer serves before the next wave or the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeAlias

from gpufleet.errors import FleetError
from gpufleet.formatting import join_names
from gpufleet.upgrade.plan.wave import Group, Wave
from gpufleet.upgrade.run.upgrade_journal import Journal
from gpufleet.upgrade.run.upgrade_state import GroupState, State

Do: TypeAlias = Literal[
    "drain",
    "change",
    "switch",
    "ready",
    "golden",
    "undrain",
    "soak",
    "judge",
    "restore",
    "done",
    "returned",
    "fail",
    "stick",
]


class LostError(FleetError):
    """
    No node answers, or this upgrade lost a lock; the run ends and can be resumed. No group failed.
    """


class GateVerdict(Protocol):
    """A gate's verdict, as `gates.Verdict`."""

    @property
    def passed(self) -> bool | None: ...

    @property
    def reasons(self) -> tuple[str, ...]: ...


class Actions(Protocol):
    """
    The interface that changes the fleet. Each call may be repeated, also after an interruption.

    The methods return the data for the journal. They raise `FleetError` with the reason for a
    failure, `LostError` if no node answers.
    """

    def check_load(self, wave: Wave) -> tuple[tuple[str, ...], Mapping[str, Any]]:
        """Return why this wave would leave too little capacity, and the present load."""

    def find_fallen(self, groups: Sequence[Group]) -> Mapping[str, Sequence[str]]:
        """Return why groups that passed their gates no longer serve, by the group's id."""

    def drain(self, group: Group) -> Mapping[str, Any]: ...
    def change(self, group: Group) -> Mapping[str, Any]: ...
    def switch(self, group: Group) -> Mapping[str, Any]: ...
    def restore(self, group: Group) -> Mapping[str, Any]: ...
    def ready(self, group: Group, *, back: bool) -> Mapping[str, Any]: ...
    def golden(self, group: Group) -> GateVerdict: ...
    def undrain(self, group: Group) -> Mapping[str, Any]: ...
    def soak(self, group: Group) -> Mapping[str, Any]: ...
    def judge(self, group: Group) -> GateVerdict: ...


@dataclass(frozen=True)
class Step:
    """The next action on a group."""

    do: Do
    group: Group
    wave: int
    back: bool = False
    """Whether it is being rolled back."""
    why: tuple[str, ...] = ()


Next: TypeAlias = Literal["work", "ask", "begin", "finish", "stop", "pause", "over"]


@dataclass(frozen=True)
class Decision:
    """The next action of the upgrade."""

    next: Next
    groups: tuple[str, ...] = ()
    """For `work`: the groups with steps left, which run in parallel."""
    wave: Wave | None = None
    """For `ask` and `begin`: the wave."""
    why: tuple[str, ...] = ()
    """For `stop` and `pause`: the reasons."""


# -- decisions -------------------------------------------------------------------------------------


def decide(state: State) -> Decision:
    """Return the next action of an upgrade whose fleet is prepared."""
    if state.finished or state.stopped:
        return Decision("over")
    going_back = must_roll_back(state)
    working = tuple(
        name
        for name, each in state.groups.items()
        if _has_begun(each, state) and next_step(state, name)
    )
    if working:
        return Decision("work", working)
    if going_back:
        return Decision("stop", why=_stop_reasons(state))
    if state.paused:
        return Decision("pause", why=state.paused)
    left = [wave for wave in state.waves if wave.number > state.wave]
    if not left:
        if any(each.phase != "done" for each in state.groups.values()):
            return Decision("stop", why=_stop_reasons(state))
        return Decision("finish")
    following = left[0]
    if _needs_confirmation(state, following) and following.number not in state.confirmed:
        return Decision("ask", wave=following)
    return Decision("begin", wave=following)


def must_roll_back(state: State) -> bool:
    """Return whether more groups failed than allowed, or a rollback was requested."""
    return state.aborting or state.failures > int(state.settings.get("failures") or 0)


def next_step(state: State, name: str) -> Step | None:
    """Return the next action on a group; None: there is none now."""
    each = state.groups[name]
    if each.phase == "waiting" and (must_roll_back(state) or state.paused):
        return None
    if each.phase in {"returned", "stuck"}:
        return None
    if not each.undoing:
        if must_roll_back(state) and each.wave == state.wave:
            others = [n for n, other in state.groups.items() if other.alone and n != name]
            why = (
                f"{join_names(others)} failed, so the whole wave is rolled back"
                if others
                else "the upgrade is undone, as requested"
            )
            return Step("fail", each.group, each.wave, back=True, why=(why,))
        found = _step_forward(each)
    else:
        found = _step_back(each)
    return found and Step(found, each.group, each.wave, each.undoing, each.why)


def _step_forward(each: GroupState) -> Do | None:
    match each.phase:
        case "waiting" | "draining":
            return "drain"
        case "drained" | "changing" if each.group.kind == "node":
            return "change"
        case "drained" | "changed" | "switching":
            return "switch"
        case "switched":
            return "ready"
        case "ready":
            return "golden"
        case "judged" if "traffic" not in each.passed:
            return "undrain" if each.passed["golden"] else "fail"
        case "judged":
            return "done" if each.passed["traffic"] else "fail"
        case "undraining":
            return "undrain"
        case "undrained":
            return "soak"
        case "soaked":
            return "judge"
        case _:
            return None


def _step_back(each: GroupState) -> Do | None:
    if each.below:
        # Still in front of clients, when the last gate failed: out of their way first.
        return "drain" if each.open else "stick"
    match each.phase:
        case "failed" | "draining" if each.replaced:
            return "drain" if each.open or each.phase == "draining" else "restore"
        case "failed" | "draining":  # nothing was switched
            return "undrain" if each.marked else "returned"
        case "drained" | "restoring":
            return "restore"
        case "restored":
            return "ready"
        case "ready" | "undraining":
            return "undrain"
        case "undrained":
            return "returned"
        case _:
            return None


def _has_begun(each: GroupState, state: State) -> bool:
    """
    Return whether a group's wave was begun; a group of an earlier wave may still be unfinished.
    """
    return each.wave <= state.wave


def _needs_confirmation(state: State, wave: Wave) -> bool:
    confirm = state.settings.get("confirm", "start")
    if confirm == "wave":
        return wave.number > 1
    after_canary = [each.number for each in state.waves if not each.canary]
    return confirm == "canary" and bool(after_canary) and wave.number == after_canary[0] > 1


def _stop_reasons(state: State) -> tuple[str, ...]:
    failed = [
        f"{name}: {'; '.join(each.why)}"
        for name, each in state.groups.items()
        if each.alone or each.phase == "stuck"
    ]
    if failed:
        return tuple(failed)
    return ("the upgrade was undone, as requested",)


# -- the steps, each written before it is made -----------------------------------------------------

# For each step: the word that is written before it, and the word that is written after it.
_BEFORE: Mapping[str, str] = {
    "drain": "draining",
    "change": "changing",
    "switch": "switching",
    "undrain": "undraining",
    "restore": "restoring",
}
_AFTER: Mapping[str, str] = {
    "drain": "drained",
    "change": "changed",
    "switch": "switched",
    "ready": "ready",
    "undrain": "undrained",
    "soak": "soaked",
    "restore": "restored",
}

RunParallel: TypeAlias = Callable[[Sequence[Iterator[Step]]], None]
"""Runs several groups' steps at the same time, each to its end."""


@dataclass
class Driver:
    """A running upgrade: `run` executes it until it has ended or waits for an operator."""

    journal: Journal
    actions: Actions
    run_parallel: RunParallel
    confirm: Callable[[Wave], str | None]
    """Returns who confirmed a wave; None: not confirmed."""

    def run(self) -> Decision:
        """
        Run until the upgrade ends or waits; return that decision: finish, stop, pause, or over.
        """
        while True:
            following = decide(self.journal.state)
            match following.next:
                case "work":
                    self.run_parallel([self.steps(name) for name in following.groups])
                case "ask" if following.wave:
                    self._ask(following.wave)
                case "begin" if following.wave:
                    self._begin(following.wave)
                case "finish":
                    if not self._record_fallen():
                        return following
                case _:
                    return following

    def steps(self, name: str) -> Iterator[Step]:
        """Execute a group's steps in order; yield each before it is executed."""
        while following := next_step(self.journal.state, name):
            yield following
            self.make(following)

    def make(self, wanted: Step) -> None:
        """Execute one step, with journal entries before and after."""
        if wanted.do == "stick":
            self._write(wanted, "stuck", why=wanted.why)
            return
        if wanted.do == "fail":
            self._fail(wanted)
            return
        if wanted.do in {"done", "returned"}:
            self._write(wanted, wanted.do)
            return
        if word := _BEFORE.get(wanted.do):
            self._write(wanted, word)
        try:
            if wanted.do in {"golden", "judge"}:
                gate, asked = (
                    ("golden", self.actions.golden)
                    if wanted.do == "golden"
                    else ("traffic", self.actions.judge)
                )
                found = asked(wanted.group)
                passed, reasons = found.passed, found.reasons
                self._write(wanted, "judged", gate=gate, passed=passed, reasons=reasons)
                return
            said = self._carry_out(wanted)
        except LostError:
            raise
        except FleetError as error:
            # One that cannot even be brought back needs a person.
            self._write(wanted, "stuck" if wanted.back else "failed", why=error.problems)
            return
        self._write(wanted, _AFTER[wanted.do], **said)

    def _carry_out(self, wanted: Step) -> Mapping[str, Any]:
        match wanted.do:
            case "drain":
                return self.actions.drain(wanted.group)
            case "change":
                return self.actions.change(wanted.group)
            case "switch":
                return self.actions.switch(wanted.group)
            case "restore":
                return self.actions.restore(wanted.group)
            case "ready":
                return self.actions.ready(wanted.group, back=wanted.back)
            case "undrain":
                return self.actions.undrain(wanted.group)
            case "soak":
                return self.actions.soak(wanted.group)
            case _:
                raise ValueError(wanted.do)

    def _fail(self, wanted: Step) -> None:
        """Write why a group is rolled back: a failed gate, or another failed group of its wave."""
        if wanted.back:
            self._write(wanted, "failed", why=wanted.why, by="wave")
            return
        state = self.journal.state.groups[wanted.group.id]
        gate = "traffic" if "traffic" in state.passed else "golden"
        judged = next(
            entry.said
            for entry in reversed(self.journal.entries)
            if entry.what == "judged" and entry.group == wanted.group.id
        )
        unknown = "it is unknown whether the gate passes: " if state.passed[gate] is None else ""
        reasons = [f"{unknown}{each}" for each in judged.get("reasons") or ("no reason is given",)]
        self._write(wanted, "failed", why=reasons, by="engine")

    def _ask(self, wave: Wave) -> None:
        if by := self.confirm(wave):
            self.journal.append("confirmed", wave=wave.number, by=by)
        else:
            self.journal.append("paused", why=[f"wave {wave.number} is not confirmed yet"])

    def _begin(self, wave: Wave) -> None:
        """Begin a wave, unless the load has become too high for the remaining replicas."""
        why, said = self.actions.check_load(wave)
        # Asked after the load, which takes a while, and may be too high for just this reason.
        if self._record_fallen():
            return
        if why:
            self.journal.append("paused", why=why)
        else:
            self.journal.append("wave", wave=wave.number, **said)

    def _record_fallen(self) -> bool:
        """Record finished groups that no longer serve; return whether there are any."""
        done = [each for each in self.journal.state.groups.values() if each.phase == "done"]
        fell = self.actions.find_fallen([each.group for each in done]) if done else {}
        for each in done:
            if why := fell.get(each.group.id):
                name = each.group.id
                self.journal.append("failed", wave=each.wave, group=name, why=why, by="engine")
        return bool(fell)

    def _write(self, wanted: Step, what: str, **said: Any) -> None:
        self.journal.append(what, wave=wanted.wave, group=wanted.group.id, **said)
