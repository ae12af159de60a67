"""A fleet that is changed, as values: nodes with units, marks and kept sets, and a gateway.

It does what `on_node/change/change.py` and the gateway document, one small action at a time, and
it can be cut short at each of them. What must never happen is asserted where it would happen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.upgrade.plan.wave import Group, Wave, model_of
from gpufleet.upgrade.run.state_machine import LostError

OLD, NEW = "old", "new"
ME = "20261122T134708Z-ab12"


class Killed(BaseException):  # as KeyboardInterrupt
    """The controller has gone."""


@dataclass
class Unit:
    """A unit of vLLM on a node."""

    file: str = OLD
    started: str | None = OLD
    """None: it is down."""


@dataclass
class Node:
    """What lies on a node."""

    units: dict[str, Unit] = field(default_factory=dict)
    kept: dict[str, str] = field(default_factory=dict)
    cordon: str | None = None
    """Whose."""
    drained: dict[str, str] = field(default_factory=dict)
    silent: int = 0
    """So many questions are not answered."""
    driver: str = OLD


@dataclass(frozen=True)
class Verdict:
    """What a gate says."""

    passed: bool | None
    reasons: tuple[str, ...] = ()


@dataclass
class Fleet:
    """All of it, with how many replicas of each model have to serve."""

    nodes: dict[str, Node]
    replicas: dict[str, tuple[str, ...]]
    needed: dict[str, int]
    behaviour: dict[str, str] = field(default_factory=dict)
    """
    Of a replica's new release: dead, wrong, slow, unknown, dies (once it was judged); of a node:
    driver.
    """
    died: set[str] = field(default_factory=set)
    gateway: dict[str, bool] = field(default_factory=dict)
    """Whether a replica gets requests."""
    tick: Callable[[], None] = lambda: None

    def __post_init__(self) -> None:
        self.gateway = dict.fromkeys(self.replicas, True)

    def units(self, replica: str) -> list[Unit]:
        return [self.nodes[node].units[replica] for node in self.replicas[replica]]

    def up(self, replica: str) -> bool:
        """Whether it would answer: all its ranks run, with the same."""
        started = {each.started for each in self.units(replica)}
        dead = NEW in started and (self.behaviour.get(replica) == "dead" or replica in self.died)
        return len(started) == 1 and None not in started and not dead

    def serves(self, replica: str) -> bool:
        return self.up(replica) and self.gateway[replica]

    def check(self) -> None:
        """What must hold at any moment."""
        for model, least in self.needed.items():
            there = [each for each in self.replicas if model_of(each) == model]
            serving = [each for each in there if self.serves(each)]
            assert len(serving) >= least, f"{model}: {serving} of {there}"
        for replica, gets in self.gateway.items():
            known = self.up(replica) or replica in self.died
            assert known or not gets, f"{replica} gets requests and is down"

    def now(self) -> None:
        """One action is made: everything must hold, and the controller may go."""
        self.check()
        self.tick()

    def ask(self, name: str) -> Node:
        """Return a node that answers."""
        node = self.nodes[name]
        if node.silent:
            lost = all(each.silent for each in self.nodes.values())
            node.silent -= 1
            if lost:
                raise LostError("no node answers")
            raise FleetError(f"{name}: no answer")
        return node


@dataclass
class SimulatedActions:
    """Touches the simulated fleet as `acting` touches a real one."""

    fleet: Fleet
    made: list[str] = field(default_factory=list)

    def check_load(self, wave: Wave) -> tuple[tuple[str, ...], Mapping[str, Any]]:
        going = set(wave.replicas)
        left = {
            model: sum(
                self.fleet.serves(each) and each not in going
                for each in self.fleet.replicas
                if model_of(each) == model
            )
            for model in self.fleet.needed
        }
        why = [f"{m}: {n} left" for m, n in left.items() if n < self.fleet.needed[m]]
        return tuple(why), {}

    def find_fallen(self, groups: Sequence[Group]) -> Mapping[str, Sequence[str]]:
        return {
            group.id: [f"{each} died" for each in group.replicas if not self.fleet.up(each)]
            for group in groups
            if not all(map(self.fleet.up, group.replicas))
        }

    def drain(self, group: Group) -> Mapping[str, Any]:
        for name in group.nodes:
            node = self.fleet.ask(name)
            if node.cordon not in (None, ME):
                raise FleetError(f"{name} was cordoned by {node.cordon}")
        for name in group.nodes:
            node = self.fleet.ask(name)
            node.cordon = node.cordon or ME
            self.fleet.now()
            for replica in self._on(name, group):
                node.drained.setdefault(replica, ME)
                self.fleet.now()
        for replica in group.replicas:
            self.fleet.gateway[replica] = False
            self.fleet.now()
        return {"left": 0}

    def change(self, group: Group) -> Mapping[str, Any]:
        for name in group.nodes:
            node = self.fleet.ask(name)
            for unit in node.units.values():
                unit.started = None
                self.fleet.now()
            if self.fleet.behaviour.get(name) == "driver":
                raise FleetError(f"{name}: the driver does not load")
            node.driver = NEW
            self.fleet.now()
        return {}

    def switch(self, group: Group) -> Mapping[str, Any]:
        for name in group.nodes:
            node = self.fleet.ask(name)
            for replica in self._on(name, group):
                unit = node.units[replica]
                if unit.file == unit.started == NEW:
                    continue
                assert not self.fleet.gateway[replica], f"{replica} is stopped under requests"
                node.kept.setdefault(replica, unit.file)
                self.fleet.now()
                unit.started = None
                self.fleet.now()
                unit.file = NEW
                self.fleet.now()
                unit.started = NEW
                self.fleet.now()
        return {}

    def restore(self, group: Group) -> Mapping[str, Any]:
        for name in group.nodes:
            node = self.fleet.ask(name)
            for replica in self._on(name, group):
                unit = node.units[replica]
                before = node.kept.get(replica)
                if before is None or unit.file == unit.started == before:
                    continue
                assert not self.fleet.gateway[replica], f"{replica} is stopped under requests"
                unit.started = None
                self.fleet.now()
                unit.file = before
                self.fleet.now()
                unit.started = before
                self.fleet.now()
        return {}

    def ready(self, group: Group, *, back: bool) -> Mapping[str, Any]:  # noqa: ARG002
        for name in group.nodes:
            self.fleet.ask(name)
        if down := [each for each in group.replicas if not self.fleet.up(each)]:
            raise FleetError(f"{down} do not start")
        return {}

    def golden(self, group: Group) -> Verdict:
        wrong = [each for each in group.replicas if self.fleet.behaviour.get(each) == "wrong"]
        return Verdict(not wrong, tuple(wrong))

    def undrain(self, group: Group) -> Mapping[str, Any]:
        for name in group.nodes:
            node = self.fleet.ask(name)
            for replica in self._on(name, group):
                if node.drained.get(replica) == ME:
                    del node.drained[replica]
                    self.fleet.now()
            # As long as another group of ours is on the node, it may stay cordoned for that.
            if node.cordon == ME and ME not in node.drained.values():
                node.cordon = None
                self.fleet.now()
        for replica in group.replicas:
            marks = [self.fleet.nodes[name].drained.get(replica) for name in group.nodes]
            if not any(marks):
                self.fleet.gateway[replica] = True
                self.fleet.now()
        return {}

    def soak(self, group: Group) -> Mapping[str, Any]:  # noqa: ARG002
        self.fleet.now()
        return {}

    def judge(self, group: Group) -> Verdict:
        found = {self.fleet.behaviour.get(each) for each in group.replicas}
        self.fleet.died |= {e for e in group.replicas if self.fleet.behaviour.get(e) == "dies"}
        if "slow" in found:
            return Verdict(False, ("slow",))
        return Verdict(None, ("too few requests",)) if "unknown" in found else Verdict(True)

    def _on(self, name: str, group: Group) -> list[str]:
        return [each for each in group.replicas if name in self.fleet.replicas[each]]
