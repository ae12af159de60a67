"""RUNS ON THE NODE: judge from observations whether a server makes progress. Pure.

A frozen server still answers `/health` with 200, and an overloaded server may not answer it in
time. The difference is progress of any kind: tokens, iterations, blocks of KV cache, requests.
`observe` is called every second with new observations, and returns the state.

A stall is one of these three conditions, if the engine made no progress for `seconds`:
  work       an engine has requests that run, or that wait for capacity
  canary     an engine has not answered a request for one token. This detects an engine that froze
             while it was idle, because its old metrics show no work
  silence    /metrics of a server that was ready does not answer, so its API server is frozen
An engine that makes progress is not stalled, even if its queue is long. After a gap (the watchdog
was stopped, or the machine was suspended) nothing is known about the time of the gap, so counting
restarts.
"""

from __future__ import annotations

import re
from typing import Any, Iterable, Mapping, NamedTuple, Optional, Sequence, Tuple

_SAMPLE = r"^(%s)(?:\{((?:[^\"}]|\"(?:[^\"\\]|\\.)*\")*)\})? (\S+)"
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

# The loop runs every second. If the watchdog itself paused for longer than this, nothing is known
# about the time of the pause.
PAUSE_SECONDS = 10.0


class Engine(NamedTuple):
    """One engine's values in /metrics."""

    work: float = 0.0
    """Number of requests that run, or that wait for capacity."""
    marks: Tuple[Tuple[str, float], ...] = ()
    awake: bool = True


class Sample(NamedTuple):
    """The observations since the last turn."""

    life: str
    """systemd's invocation id of the unit's run, or "" if it does not run."""
    engines: Optional[Mapping[str, Engine]] = None
    """Engines by their label, or None if /metrics has not answered since the last turn."""
    asked: Tuple[str, ...] = ()
    """Engines that were sent a request for one token."""
    answered: Tuple[str, ...] = ()
    """Engines that answered with a token."""
    withdrawn: Tuple[str, ...] = ()
    """
    Engines whose canary does not count, because the request or the connection was refused.
    """


class Progress(NamedTuple):
    """The progress of an engine."""

    engine: Engine
    moved: float
    """Time of the last progress, or of the last restart of counting."""
    asked: Optional[float] = None
    """Time when the unanswered canary was sent, or None if there is none."""


class State(NamedTuple):
    """The state of a server. Its times are those of a monotonic clock."""

    life: str = ""
    seen: float = 0.0
    """Time of the last observation."""
    ready: bool = False
    """Whether /metrics has answered in this run."""
    answered: float = 0.0
    """Time of the last answer of /metrics, or of the last restart of counting."""
    engines: Mapping[str, Progress] = {}


class Verdict(NamedTuple):
    """A server's state, with the evidence of a stall."""

    kind: str
    """One of down, starting, blind, idle, works and stalled."""
    idle: float = 0.0
    """Longest time that any engine has had work without progress, in seconds."""
    why: str = ""
    """The evidence of a stall, as text."""


def observe(
    previous: State, sample: Sample, now: float, seconds: float, *, pinned: bool = True
) -> Tuple[State, Verdict]:
    """
    Return the new state and its verdict.

    `pinned` is true if a canary always reaches the engine that it is meant for. If the release
    chooses the engine itself, an unanswered canary counts only if no engine makes progress.
    """
    if not sample.life:
        return State(seen=now), Verdict("down")
    known = previous
    if sample.life != previous.life:
        known = State(life=sample.life, answered=now)
    elif not 0 <= now - previous.seen <= PAUSE_SECONDS:
        known = restart_counting(previous, now)
    known = known._replace(seen=now)
    if sample.engines is not None:
        known = known._replace(
            ready=True,
            answered=now,
            engines={
                name: engine_progress(known.engines.get(name), engine, now)
                for name, engine in sample.engines.items()
            },
        )
    known = known._replace(engines=dict(canaries(known.engines, sample, now)))
    return known, judge(known, now, seconds, pinned=pinned)


def restart_counting(state: State, now: float) -> State:
    """
    Return the state with all times of progress set to `now`, and without unanswered canaries.
    """
    return state._replace(
        answered=now,
        engines={
            name: each._replace(moved=now, asked=None) for name, each in state.engines.items()
        },
    )


def engine_progress(before: Optional[Progress], engine: Engine, now: float) -> Progress:
    """Return an engine's progress, updated by the values of /metrics."""
    if before is None or before.engine.marks != engine.marks:
        return Progress(engine, now)
    return before._replace(engine=engine)


def canaries(
    engines: Mapping[str, Progress], sample: Sample, now: float
) -> Iterable[Tuple[str, Progress]]:
    """Yield each engine, updated with the result of its canary."""
    for name, each in engines.items():
        found = each
        if name in sample.answered:
            found = found._replace(moved=now, asked=None)
        elif name in sample.withdrawn:
            found = found._replace(asked=None)
        elif name in sample.asked and found.asked is None:
            found = found._replace(asked=now)
        yield name, found


def judge(state: State, now: float, seconds: float, *, pinned: bool) -> Verdict:
    """Return the verdict on a server in this state."""
    if not state.ready:
        return Verdict("starting")
    silence = now - state.answered
    if silence >= seconds:
        return Verdict("stalled", silence, "/metrics has not answered for %d s" % silence)
    if not state.engines:
        return Verdict("blind")
    youngest = max(each.moved for each in state.engines.values())
    worst = Verdict("idle")
    for name, each in sorted(state.engines.items()):
        # The time counts only up to the last answer. The engine may have made progress after it.
        if each.engine.work > 0:
            age = state.answered - each.moved
            what = "%d requests and no progress for %d s" % (each.engine.work, age)
        elif each.asked is not None:
            age = state.answered - max(each.asked, each.moved if pinned else youngest)
            what = "no answer to a request for one token for %d s, and no progress" % age
        else:
            continue
        named = "engine %s: " % name if len(state.engines) > 1 else ""
        found = Verdict("works", max(0.0, age))
        if age >= seconds:
            found = Verdict("stalled", age, named + what)
        if worst.kind == "idle" or found.idle > worst.idle:
            worst = found
    return worst


def engines_to_ask(state: State, now: float, idle_seconds: float) -> Tuple[str, ...]:
    """
    Return the engines that must be sent a canary.

    They are the engines that are awake and have made no progress for `idle_seconds`.
    """
    if not idle_seconds or not state.ready:
        return ()
    return tuple(
        name
        for name, each in sorted(state.engines.items())
        if each.engine.awake and now - each.moved >= idle_seconds
    )


def engines(text: str, known: Sequence[Mapping[str, Any]]) -> Mapping[str, Engine]:
    """
    Return the values of each engine in the text of /metrics.

    The result is empty if the text has no engine's metrics. `known` has the fields of
    ProgressMetrics (engines/engine.py) for each serving program that may run. An engine without the
    label has the name "".
    """
    return next(filter(None, (_engines(text, names) for names in known)), {})


def _engines(text: str, names: Mapping[str, Any]) -> Mapping[str, Engine]:
    put_off, awake = names["deferred"] or ("", "", ""), names["awake"] or ("", "", "")
    wanted = filter(None, (*names["marks"], put_off[0], awake[0]))
    sample = re.compile(_SAMPLE % "|".join(map(re.escape, wanted)), re.MULTILINE)
    marks: dict[str, dict[str, float]] = {}
    deferred: dict[str, float] = {}
    asleep = set()
    for name, labels, value in sample.findall(text):
        try:
            number = float(value)
        except ValueError:
            continue
        label = dict(_LABEL.findall(labels))
        engine = label.get(names["engine_label"], "")
        if name == awake[0]:
            if label.get(awake[1]) == awake[2] and not number:
                asleep.add(engine)
        elif name == put_off[0]:
            if label.get(put_off[1]) == put_off[2]:
                deferred[engine] = deferred.get(engine, 0.0) + number
        else:
            of_engine = marks.setdefault(engine, {})
            of_engine[name] = of_engine.get(name, 0.0) + number
    return {
        engine: Engine(
            work=max(
                0.0, sum(each.get(name, 0.0) for name in names["work"]) - deferred.get(engine, 0.0)
            ),
            marks=tuple(sorted(each.items())),
            awake=engine not in asleep,
        )
        for engine, each in marks.items()
    }
