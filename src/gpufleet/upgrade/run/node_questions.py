"""Build the requests to nodes during an upgrade; `node_answers` parses the replies. Pure.

Each function returns a `NodeQuestion`: the program for the node's python3, and the deadline and
name for `fleet.live.connect`. The class that the docstring names parses the answer:

    asked = node_questions.switch("2026-11-22-1", ["vllm-tiny-0.service"], stop_seconds=150)
    answers = ask(lambda node: asked.program, asked.seconds, asked.what)
    switched = {node: SwitchAnswer.read(node, answer) for node, answer in answers.items()}

`read` raises `FleetError` with the node's name if there was no answer: the result is then unknown,
and `look` shows it. A failed action is not an exception: the answer's `problem` has a sentence.
Every request may be sent again: finished actions are not repeated. `on_node/change/change.py` is
the program; it documents the files on nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gpufleet.engines.engine import Measure, engines
from gpufleet.remote import payload
from gpufleet.remote.payload import Payload

# Added to the wait itself: connecting (ten seconds for a probe), starting Python on a busy node,
# and waiting for another process that sets marks (on_node/common/change_files.py: 30 s).
WAY_SECONDS = 60
# For files and marks: only the disk takes time.
SHORT_SECONDS = 60
# Added to the stop itself: daemon-reload (120 s in converge/diff.py), enabling, starting. The stop
# of another replica on the node, or of a lost controller, may run first.
SWITCH_SECONDS = 240
# One query of `on_node/serving/endpoints.py` to a stage that answers late.
LOOK_SECONDS = 100
# Removing a release of 10 GB in 30,000 files took 4 s on the lab's disk; there may be several.
COLLECT_SECONDS = 540
LINES = 300
"""Lines to read of a failed unit's journal: the first error may be some hundred lines back."""


@dataclass(frozen=True)
class NodeQuestion:
    """A request to a node: its program, its deadline in seconds, and its name in messages."""

    program: Payload
    seconds: float
    what: str


def look() -> NodeQuestion:
    """
    Query the state of a node that matters for an upgrade; the answer is `NodeLook`. Read-only.
    """
    return _question("look", SHORT_SECONDS, "the query of changes")


def lock(
    upgrade: str, owner: str, origin: str, what: str, *, steal: bool = False, look: bool = False
) -> NodeQuestion:
    """
    Lock the node for an upgrade, unless another upgrade or a deploy holds it.

    The answer is `LockAnswer`. `owner` is the person (`ann@laptop`), `origin` the source (a
    directory, a host), `what` the purpose in words. A second lock by the same upgrade changes
    nothing. `steal` takes the lock over from another upgrade, which the answer names. With `look`
    the lock's owner is only queried.
    """
    return _question(
        "lock",
        SHORT_SECONDS,
        "the lock",
        id=upgrade,
        owner=owner,
        origin=origin,
        what=what,
        steal=steal,
        look=look,
    )


def unlock(upgrade: str) -> NodeQuestion:
    """
    Unlock the node if this upgrade holds the lock; the answer is `LockAnswer`. Other locks stay.
    """
    return _question("unlock", SHORT_SECONDS, "the lock", id=upgrade)


def cordon(by: str, why: str, *, upgrade: str | None = None) -> NodeQuestion:
    """
    Cordon the node, so that no new replica is placed there; the answer is `Marks`.

    `by` is `user@host`. `upgrade` is None if a person cordons. An existing mark stays unchanged,
    with one exception: a person's mark replaces an upgrade's mark, and the upgrade then cannot
    remove the person's mark.
    """
    return _question("cordon", SHORT_SECONDS, "the cordon", by=by, why=why, upgrade=upgrade)


def uncordon(*, upgrade: str | None = None, force: bool = False) -> NodeQuestion:
    """
    Remove the cordon; the answer is `Marks`, with a `problem` if another owner set the cordon.

    An upgrade removes only its own mark. A person (`upgrade` None) removes people's marks, and with
    `force` also an upgrade's mark.
    """
    return _question("uncordon", SHORT_SECONDS, "the cordon", upgrade=upgrade, force=force)


def drain(
    replicas: Iterable[str], by: str, why: str, *, upgrade: str | None = None
) -> NodeQuestion:
    """
    Mark replicas (`tiny-0`) as drained; the answer is `Marks`.

    The request only sets marks; the rules of `cordon` apply.
    """
    return _question(
        "drain",
        SHORT_SECONDS,
        "the drain mark",
        replicas=sorted(replicas),
        by=by,
        why=why,
        upgrade=upgrade,
    )


def undrain(
    replicas: Iterable[str], *, upgrade: str | None = None, force: bool = False
) -> NodeQuestion:
    """Remove drain marks; the answer is `Marks`. The rules of `uncordon` apply."""
    return _question(
        "undrain",
        SHORT_SECONDS,
        "the drain mark",
        replicas=sorted(replicas),
        upgrade=upgrade,
        force=force,
    )


def wait_quiet(units: Iterable[str], seconds: float) -> NodeQuestion:
    """
    Wait at most `seconds` until these units' servers have no request; the answer is `RequestsLeft`.

    The servers' addresses are read from the units' files. A server is quiet if two queries, a
    second apart, find no running or waiting request. One query is not enough, because a balancer
    may still be sending a request. A stopped unit has no requests.
    """
    return _question(
        "quiet",
        seconds,
        "the wait for requests",
        units=sorted(units),
        seconds=seconds,
        metrics=_request_gauges(),
    )


def stop(units: Iterable[str], *, stop_seconds: float) -> NodeQuestion:
    """
    Stop units in parallel; the answer is `SwitchAnswer`.

    `stop_seconds` is the units' longest TimeoutStopSec.
    """
    return _question(
        "stop",
        2 * stop_seconds + 2 * SHORT_SECONDS,
        "the stop",
        units=sorted(units),
        seconds=stop_seconds,
    )


def switch(
    upgrade: str, units: Iterable[str] | None = None, *, stop_seconds: float
) -> NodeQuestion:
    """
    Switch units to the files of `deploys/prepare.py` in `next/`; the answer is `SwitchAnswer`.

    The first switch keeps the units' previous state for `upgrade`; later switches, also after a
    kill, do not overwrite it. `units` None selects all units of `next/`, and those that it lists
    for removal. A unit that already runs with the fingerprint in `next/` is left unchanged.
    `stop_seconds` is the longest TimeoutStopSec= of the running units (`units.stop_seconds`).
    """
    return _question(
        "switch",
        2 * stop_seconds + SWITCH_SECONDS,
        "the switch",
        id=upgrade,
        units=None if units is None else sorted(units),
        seconds=stop_seconds,
        metrics=_request_gauges(),
    )


def restore(
    upgrade: str, units: Iterable[str] | None = None, *, stop_seconds: float
) -> NodeQuestion:
    """
    Switch units back to their state before `switch`; the answer is `SwitchAnswer`.

    The node needs no network for it. `units` None selects all units that are kept for `upgrade`.
    Units that were not kept because their switch never began are `unchanged`.
    """
    return _question(
        "restore",
        2 * stop_seconds + SWITCH_SECONDS,
        "the rollback",
        id=upgrade,
        units=None if units is None else sorted(units),
        seconds=stop_seconds,
        metrics=_request_gauges(),
    )


def wait_ready(units: Iterable[str], seconds: float) -> NodeQuestion:
    """
    Wait at most `seconds` until each unit's server completes a prompt; the answer is `ReadyAnswer`.

    The wait ends early if a unit has died. A rank without a server is ready when it runs with the
    configuration in its unit file.
    """
    return _question(
        "ready",
        seconds + LOOK_SECONDS,
        "the wait for answers",
        units=sorted(units),
        seconds=seconds,
        journal=LINES,
    )


def collect(keep: int, days: float) -> NodeQuestion:
    """
    Remove unused releases and kept units; the answer is `CollectAnswer`.

    Releases that a unit, a kept set of units or `next/` uses are never removed. Of the other
    releases, the `keep` newest ones and those younger than `days` stay.
    """
    return _question(
        "collect", COLLECT_SECONDS, "the removal of old releases", keep=keep, days=days
    )


def _request_gauges() -> list[str]:
    """Return the names of the gauges that count a server's requests, of every engine."""
    wanted = (Measure.RUNNING, Measure.WAITING)
    return [name for each in engines() for measure in wanted for name in each.series(measure)]


def _question(do: str, limit: float, what: str, /, **parameters: Any) -> NodeQuestion:
    program = payload.program("change/change", do=do, **parameters)
    return NodeQuestion(program, limit + WAY_SECONDS, what)
