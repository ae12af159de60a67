"""An upgrade ends new or as it was, wherever it was cut off: on a simulated fleet."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpufleet.errors import FleetError
from gpufleet.upgrade.plan.wave import Group, Wave, model_of
from gpufleet.upgrade.run import state_machine
from gpufleet.upgrade.run.node_answers import _unit_ready
from gpufleet.upgrade.run.state_machine import Driver, LostError, Step
from gpufleet.upgrade.run.upgrade_journal import Journal, read
from gpufleet.upgrade.run.upgrade_state import State
from tests.unit.upgrade.simulated import ME, NEW, OLD, Fleet, Killed, Node, SimulatedActions, Unit

# A journal's fsync costs nothing in memory.
MEMORY = Path("/dev/shm")
HUMAN = "ann@laptop"


class Case:
    """A fleet, waves over it, and an operator who resumes until nothing is left to do."""

    def __init__(self, fleet: Fleet, waves: Sequence[Wave], rules: dict[str, Any]) -> None:
        self.fleet = fleet
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY if MEMORY.is_dir() else None))
        with Journal.create(self.folder, ME) as journal:
            self.path = journal.path
            journal.append("started", id=ME)
            journal.append(
                "planned",
                settings=rules,
                waves=[
                    {
                        "number": each.number,
                        "canary": each.canary,
                        "groups": [group.as_json() for group in each.groups],
                    }
                    for each in waves
                ],
            )
            journal.append("prepared")

    def run(self, draw: Any = None, kill_at: int | None = None, tear: int = 0) -> str:
        """Run until it ends or is killed at its so-manieth action; return where it ended."""
        left = [kill_at]

        def tick(*_: object) -> None:
            if left[0] is not None:
                left[0] -= 1
                if left[0] < 0:
                    raise Killed

        self.fleet.tick = tick
        writing = False

        def heard(_: object) -> None:
            nonlocal writing
            writing = True
            tick()
            writing = False

        try:
            with Journal.reopen(self.path) as journal:
                journal.on_entry = heard
                if journal.state.last and len(journal.entries) > 3:
                    journal.append("resumed", by="me")
                drive = Driver(
                    journal, SimulatedActions(self.fleet), self.together(draw), lambda _: "me"
                )
                end = drive.run()
                if end.next in {"finish", "stop"}:
                    why = {"why": end.why} if end.next == "stop" else {}
                    journal.append("finished" if end.next == "finish" else "stopped", **why)
                return end.next
        except Killed:
            if writing and tear:  # it died while that line was being written
                lines = self.path.read_bytes().splitlines(keepends=True)
                os.truncate(self.path, self.path.stat().st_size - min(tear, len(lines[-1])))
            return "killed"
        except LostError:
            return "lost"
        finally:
            self.fleet.tick = lambda: None

    @staticmethod
    def together(draw: Any) -> state_machine.RunParallel:
        """Take the groups' steps in any order."""

        def mixed(walks: Sequence[Iterator[Step]]) -> None:
            left = list(walks)
            while left:
                index = draw(st.integers(0, len(left) - 1)) if draw else 0
                try:
                    next(left[index])
                except StopIteration:
                    left.pop(index)

        return mixed

    @property
    def state(self) -> State:
        from gpufleet.upgrade.run.upgrade_state import fold

        return fold(read(self.path))

    def close(self) -> None:
        for each in self.folder.iterdir():
            each.unlink()
        self.folder.rmdir()


def fleet_of(count: int, least: int, spanning: bool = False) -> Fleet:
    """Return nodes with one replica each; with `spanning` one replica more, over the first two."""
    nodes = {f"gpu-{n}": Node({f"tiny-{n}": Unit()}) for n in range(count)}
    replicas: dict[str, tuple[str, ...]] = {f"tiny-{n}": (f"gpu-{n}",) for n in range(count)}
    if spanning:
        for name in ("gpu-0", "gpu-1"):
            nodes[name].units["wide-0"] = Unit()
        replicas["wide-0"] = ("gpu-0", "gpu-1")
    return Fleet(nodes, replicas, {"tiny": least})


def waves_of(fleet: Fleet, sizes: Sequence[int], kind: str = "stages") -> tuple[Wave, ...]:
    groups = [
        Group(name if kind == "stages" else nodes[0], kind, nodes, (name,))  # type: ignore[arg-type]
        for name, nodes in fleet.replicas.items()
    ]
    waves = []
    for size in sizes:
        taken, groups = groups[:size], groups[size:]
        if taken:
            waves.append(Wave(len(waves) + 1, tuple(taken), canary=not waves))
    return tuple(waves)


@st.composite
def cases(draw: Any) -> Case:
    count = draw(st.integers(2, 5))
    size = draw(st.integers(1, max(1, count - 1)))
    fleet = fleet_of(count, count - size, spanning=draw(st.booleans()))
    for name in fleet.replicas:
        if draw(st.integers(0, 4)) == 0:
            fleet.behaviour[name] = draw(
                st.sampled_from(["dead", "wrong", "slow", "unknown", "dies"])
            )
    sizes = [1, *[size] * 6]
    rules = {
        "failures": draw(st.integers(0, 2)),
        "confirm": draw(st.sampled_from(["start", "canary", "wave"])),
    }
    return Case(fleet, waves_of(fleet, sizes), rules)


def ended_well(case: Case) -> None:
    """Hold what must be true of a fleet whose upgrade is over."""
    fleet, state = case.fleet, case.state
    for name in fleet.replicas:
        files = {unit.file for unit in fleet.units(name)}
        assert fleet.serves(name), f"{name} does not serve"
        assert len(files) == 1
        wanted = NEW if state.groups[name].phase == "done" else OLD
        assert files == {wanted} == {unit.started for unit in fleet.units(name)}
        assert fleet.behaviour.get(name) is None or wanted == OLD
    for node in fleet.nodes.values():
        assert node.cordon != ME
        assert ME not in node.drained.values()
    for entry in read(case.path):
        if entry.what == "failed" and fleet.behaviour.get(str(entry.group)) in {"slow", "unknown"}:
            (why,) = entry.said["why"]
            found = fleet.behaviour[str(entry.group)]
            assert why.startswith("it is unknown") is (found == "unknown"), why
    if state.finished:
        assert all(each.phase == "done" for each in state.groups.values())
        assert not fleet.behaviour
    else:
        # Of the last wave that was begun, more than was allowed failed: it went back as a whole.
        last = [each for each in state.groups.values() if each.wave == state.wave]
        failed = sum(each.alone for each in state.groups.values())
        assert failed
        if failed > state.settings["failures"]:
            assert {each.phase for each in last} <= {"returned", "waiting"}


def to_its_end(case: Case, draw: Any = None) -> str:
    """Resume until it is over. What waits for capacity waits for a person."""
    for _ in range(12):
        if (end := case.run(draw)) not in {"lost", "killed"}:
            return end
    raise AssertionError("it does not end")


QUICK = settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow, *HealthCheck]
)


@QUICK
@given(cases(), st.data())
def test_it_ends_new_or_as_it_was_wherever_it_was_killed(case: Case, data: Any) -> None:
    """Killed after any entry, before any action, in the middle of a line; again and again."""
    try:
        for kill in data.draw(st.lists(st.integers(0, 60), max_size=4)):
            if case.run(data.draw, kill, data.draw(st.integers(0, 40))) != "killed":
                break
        to_its_end(case, data.draw)
        ended_well(case)
    finally:
        case.close()


@QUICK
@given(cases(), st.data())
def test_what_a_person_marked_is_never_lifted(case: Case, data: Any) -> None:
    """A cordon keeps a node from being touched; a drain stays when the replica is changed."""
    fleet = case.fleet
    fleet.needed = {}
    node = data.draw(st.sampled_from(sorted(fleet.nodes)))
    drained = data.draw(st.booleans())
    name = min(fleet.nodes[node].units)
    if drained:
        fleet.nodes[node].drained[name] = HUMAN
        fleet.gateway[name] = False
    else:
        fleet.nodes[node].cordon = HUMAN
    try:
        case.run(data.draw, data.draw(st.integers(0, 60)))
        to_its_end(case, data.draw)

        if drained:
            assert fleet.nodes[node].drained == {name: HUMAN}
            assert not fleet.gateway[name]
        else:
            assert fleet.nodes[node].cordon == HUMAN
            assert {unit.file for unit in fleet.nodes[node].units.values()} == {OLD}
        for each in fleet.nodes.values():
            assert ME not in (each.cordon, *each.drained.values())
    finally:
        case.close()


@QUICK
@given(cases(), st.data())
def test_a_network_that_was_lost_fails_no_group(case: Case, data: Any) -> None:
    """Nobody answers: that says nothing of a release. Resumed, it ends as if nothing had been."""
    fleet = case.fleet
    broken = set(fleet.behaviour)
    lost = False

    def lose() -> None:
        nonlocal lost
        if not lost and data.draw(st.integers(0, 20)) == 0:
            lost = True
            for node in fleet.nodes.values():
                node.silent = 1

    check = fleet.check
    fleet.check = lambda: (check(), lose())  # type: ignore[method-assign,assignment,return-value]
    try:
        case.run(data.draw)
        for node in fleet.nodes.values():
            node.silent = 0
        lost = True
        to_its_end(case, data.draw)
        failed = {name for name, each in case.state.groups.items() if each.alone}
        assert failed <= broken
        ended_well(case)
    finally:
        case.close()


def test_a_pause_finishes_what_is_in_hand_and_begins_nothing() -> None:
    """Ctrl-C once: the groups in hand come to their end, and --resume goes on with the others."""
    fleet = fleet_of(4, 2)
    case = Case(fleet, waves_of(fleet, [1, 2, 1]), {"failures": 0})
    with Journal.reopen(case.path) as journal:

        def heard(entry: Any) -> None:
            if entry.what == "switching":
                journal.on_entry = None
                journal.append("paused", why=["somebody pressed Ctrl-C"])

        journal.on_entry = heard
        end = Driver(journal, SimulatedActions(fleet), Case.together(None), lambda _: "me").run()

    assert end.next == "pause"
    assert [each.phase for each in case.state.groups.values()] == ["done", *["waiting"] * 3]
    assert all(fleet.serves(name) for name in fleet.replicas)
    assert to_its_end(case) == "finish"
    ended_well(case)
    case.close()


def test_abort_brings_back_the_wave_in_hand_and_no_wave_before() -> None:
    """What was done stays done: `gpufleet rollback` is for the whole."""
    fleet = fleet_of(3, 1)
    case = Case(fleet, waves_of(fleet, [1, 2]), {"failures": 0})
    assert case.run(kill_at=45) == "killed"
    assert case.state.wave == 2
    with Journal.reopen(case.path) as journal:
        journal.append("aborting", why="asked")
        end = Driver(journal, SimulatedActions(fleet), Case.together(None), lambda _: "me").run()

    assert end == state_machine.Decision("stop", why=("the upgrade was undone, as requested",))
    assert [each.phase for each in case.state.groups.values()] == ["done", "returned", "waiting"]
    assert [fleet.units(name)[0].started for name in fleet.replicas] == [NEW, OLD, OLD]
    case.close()


def test_nobody_who_says_yes_is_a_pause_before_that_wave() -> None:
    """confirm: canary. The canary is done, the next wave is not begun."""
    fleet = fleet_of(3, 1)
    case = Case(fleet, waves_of(fleet, [1, 1, 1]), {"confirm": "canary"})
    with Journal.reopen(case.path) as journal:
        end = Driver(journal, SimulatedActions(fleet), Case.together(None), lambda _: None).run()

    assert end.next == "pause"
    assert case.state.wave == 1
    assert [each.phase for each in case.state.groups.values()] == ["done", "waiting", "waiting"]
    case.close()


def test_a_wave_that_the_load_does_not_allow_is_not_begun() -> None:
    """The load has grown since the plan: it waits, with the numbers, and everything serves."""
    fleet = fleet_of(3, 1)
    case = Case(fleet, waves_of(fleet, [1, 1, 1]), {})
    with Journal.reopen(case.path) as journal:

        def heard(entry: Any) -> None:
            if entry.what == "done":
                fleet.needed = {"tiny": 3}

        journal.on_entry = heard
        end = Driver(journal, SimulatedActions(fleet), Case.together(None), lambda _: "me").run()

    assert end == state_machine.Decision("pause", why=("tiny: 2 left",))
    assert all(fleet.serves(name) for name in fleet.replicas)
    case.close()


@pytest.mark.parametrize("behaviour", ["driver", "dead", "slow"])
def test_a_node_whose_driver_was_touched_and_that_fails_stays_drained(behaviour: str) -> None:
    """There is no way back below vLLM: it is left with its reason, and tried again when resumed."""
    fleet = fleet_of(2, 1)
    case = Case(fleet, waves_of(fleet, [1, 1], kind="node"), {"failures": 0})
    fleet.behaviour["gpu-0" if behaviour == "driver" else "tiny-0"] = behaviour

    assert case.run() == "stop"
    assert case.state.groups["gpu-0"].phase == "stuck"
    assert fleet.nodes["gpu-0"].cordon == ME
    assert not fleet.gateway["tiny-0"]
    assert fleet.serves("tiny-1")

    fleet.behaviour.clear()
    assert to_its_end(case) == "finish"
    assert [node.driver for node in fleet.nodes.values()] == [NEW, NEW]
    assert all(fleet.serves(name) for name in fleet.replicas)
    case.close()


@pytest.mark.parametrize("dies", ["tiny-0", "tiny-2"])
def test_one_that_dies_after_its_gates_goes_back_and_nothing_more_is_begun(dies: str) -> None:
    """Not only before the next wave: the last one of all is looked at before the end."""
    fleet = fleet_of(3, 1)
    case = Case(fleet, waves_of(fleet, [1, 1, 1]), {"failures": 0})
    fleet.behaviour[dies] = "dies"

    assert case.run() == "stop"
    phases = [each.phase for each in case.state.groups.values()]
    last = dies == "tiny-2"
    assert phases == (["done", "done", "returned"] if last else ["returned", *["waiting"] * 2])
    assert case.state.stopped == (f"{dies}: {dies} died",)
    assert all(fleet.serves(name) for name in fleet.replicas)
    assert fleet.units(dies)[0].started == OLD
    assert not any(node.cordon or node.drained for node in fleet.nodes.values())
    case.close()


def test_an_adapter_that_one_replica_does_not_load_reaches_no_other() -> None:
    """The first wave goes back with the adapter's name, and the second replica is not touched."""
    fleet = fleet_of(2, 1)
    case = Case(fleet, waves_of(fleet, [1, 1]), {"failures": 0})
    seen = {
        "unit": {"ActiveState": "active", "NRestarts": "0"},
        "health": {"status": 200},
        "models": ["tiny", "sql"],
        "completion": "9",
        "without_key": {"GET /v1/models": 401},
    }
    said = {"unit": "vllm-tiny-0.service", "ready": False, "seconds": 60, "served_name": "tiny",
            "keyed": True, "adapters": ["chat", "sql"], "seen": seen}  # fmt: skip

    class Listing(SimulatedActions):
        def ready(self, group: Group, *, back: bool) -> dict[str, Any]:
            if not back:
                raise FleetError(_unit_ready(said).why)
            return dict(super().ready(group, back=back))

    with Journal.reopen(case.path) as journal:
        end = Driver(journal, Listing(fleet), Case.together(None), lambda _: "me").run()

    assert end.next == "stop"
    assert [each.phase for each in case.state.groups.values()] == ["returned", "waiting"]
    assert "does not serve the adapter chat of the plan" in " ".join(end.why)
    assert fleet.units("tiny-1") == [Unit()]
    assert fleet.nodes["gpu-1"] == Node({"tiny-1": Unit()})
    assert all(fleet.serves(name) for name in fleet.replicas)
    case.close()


def test_one_that_cannot_be_brought_back_is_stuck_and_drained_until_resumed() -> None:
    """A node without power cannot be asked: nothing is sent to it, and a person is told."""
    fleet = fleet_of(2, 1)
    case = Case(fleet, waves_of(fleet, [1, 1]), {"failures": 0})
    fleet.behaviour["tiny-0"] = "dead"

    class Cut(SimulatedActions):
        def ready(self, group: Group, *, back: bool) -> dict[str, Any]:
            with suppress(IndexError):
                fleet.nodes["gpu-0"].silent = 99 if group.id == "tiny-0" else 0
            return dict(super().ready(group, back=back))

    with Journal.reopen(case.path) as journal:
        end = Driver(journal, Cut(fleet), Case.together(None), lambda _: "me").run()
        journal.append("stopped", why=end.why)

    assert end.next == "stop"
    assert case.state.groups["tiny-0"].phase == "stuck"
    assert not fleet.gateway["tiny-0"]

    fleet.nodes["gpu-0"].silent = 0
    assert to_its_end(case) == "stop"
    ended_well(case)
    case.close()


def test_groups_name_models_as_the_simulation_does() -> None:
    """Its capacity counts by model."""
    assert model_of("tiny-12") == "tiny"
