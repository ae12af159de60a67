"""Build the requests to nodes during an upgrade; `node_answers` parses the replies. Pure.

Each function returns a `NodeQuestion`: the text for the node's python3, and the deadline and the
name that `fleet.live.connect` takes. What it answers is read by the class that its docstring names:

    asked = node_questions.switch("2026-11-22-1", ["vllm-tiny-0.service"], stop_seconds=150)
    answers = ask(lambda node: asked.program, asked.seconds, asked.what)
    switched = {node: SwitchAnswer.read(node, answer) for node, answer in answers.items()}

`read` raises `FleetError`, which names the node, where there was no answer: what happened there is
not known then, and `look` says it. A failed action is not an exception: the answer's `problem` has
a sentence. Every question may be repeated: finished actions are not repeated.
`on_node/change/change.py` is the program, and says what lies where.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from gpufleet.engines.engine import Measure, engines
from gpufleet.remote import payload
from gpufleet.remote.payload import Payload

# Beside what is waited for: to connect (a probe is given ten seconds), to start Python on a busy
# node, and to wait until another one there has made its marks (on_node/common/change_files.py: 30
# s).
WAY_SECONDS = 60
# Files and marks: the disk's own time.
SHORT_SECONDS = 60
# Beside the stop itself: daemon-reload (converge/diff.py gives it 120 s), enabling, starting.
# Another replica's stop on the same node, or one whose controller was lost, may go before it.
SWITCH_SECONDS = 240
# One look of `on_node/serving/endpoints.py` at a stage that answers late.
LOOK_SECONDS = 100
# Removing a release of 10 GB in 30,000 files took 4 s on the lab's disk; there may be several.
COLLECT_SECONDS = 540
LINES = 300
"""Lines to read of a failed unit's journal: the first error may be some hundred lines back."""


@dataclass(frozen=True)
class NodeQuestion:
    """A question to a node: its program, its deadline, and what it is called in sentences."""

    program: Payload
    seconds: float
    what: str


def look() -> NodeQuestion:
    """Ask for everything that concerns a change: `NodeLook`. Changes nothing."""
    return _question("look", SHORT_SECONDS, "the query of changes")


def lock(
    upgrade: str, owner: str, origin: str, what: str, *, steal: bool = False, look: bool = False
) -> NodeQuestion:
    """
    Lock the node for an upgrade, unless another upgrade or a deploy holds it: `LockAnswer`.

    `owner` is who (`ann@laptop`), `origin` from where (a directory, a host), `what` what for, in
    words. Locking again by the same upgrade changes nothing. `steal` takes it over from another
    upgrade, and the answer names that one. `look` only asks who has it.
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
    """Unlock the node if this upgrade holds the lock: `LockAnswer`. Other locks stay."""
    return _question("unlock", SHORT_SECONDS, "the lock", id=upgrade)


def cordon(by: str, why: str, *, upgrade: str | None = None) -> NodeQuestion:
    """
    Mark the node: nothing new is placed there. `Marks`.

    `by` is `user@host`. `upgrade` None: a person does. An existing mark stays unchanged, whatever
    its owner; only a person's mark replaces an upgrade's, which the upgrade then cannot remove.
    """
    return _question("cordon", SHORT_SECONDS, "the cordon", by=by, why=why, upgrade=upgrade)


def uncordon(*, upgrade: str | None = None, force: bool = False) -> NodeQuestion:
    """
    Remove the cordon: `Marks`, with a `problem` if another owner set it.

    An upgrade removes only its own. A person (None) removes people's marks, and an upgrade's with
    `force`.
    """
    return _question("uncordon", SHORT_SECONDS, "the cordon", upgrade=upgrade, force=force)


def drain(
    replicas: Iterable[str], by: str, why: str, *, upgrade: str | None = None
) -> NodeQuestion:
    """Mark replicas (`tiny-0`) as drained: `Marks`. Only marks; as `cordon` in all else."""
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
    """Remove drain marks: `Marks`; as `uncordon`."""
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
    Wait until the servers of these units have no request, at most `seconds`: `RequestsLeft`.

    Where they answer is in the units' files. Quiet means that no request runs or waits in two
    looks, a second apart: a balancer may still be sending one. A unit that does not run has none.
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
    """Stop units at once: `SwitchAnswer`. `stop_seconds`: the longest TimeoutStopSec of them."""
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
    Switch units to what `deploys/prepare.py` has put into `next/`: `SwitchAnswer`.

    The first switch keeps their previous state for `upgrade`; later switches, also after a kill, do
    not overwrite it. `units` None: all of `next/`, and those that it lists for removal. One that
    already runs with its fingerprint of `next/` is left alone. `stop_seconds`: the longest
    TimeoutStopSec= of what runs now, `units.stop_seconds`.
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
    Switch units back to what they ran before `switch`: `SwitchAnswer`. Needs no network.

    `units` None: all that are kept as `upgrade`'s. Units that were not kept because their switch
    never began are `unchanged`.
    """
    return _question(
        "restore",
        2 * stop_seconds + SWITCH_SECONDS,
        "the way back",
        id=upgrade,
        units=None if units is None else sorted(units),
        seconds=stop_seconds,
        metrics=_request_gauges(),
    )


def wait_ready(units: Iterable[str], seconds: float) -> NodeQuestion:
    """
    Wait until each unit's server completes a prompt, at most `seconds`: `ReadyAnswer`.

    Returns at once when a unit has died. A rank without a server is ready when it runs with its
    file's configuration.
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
    Remove releases and kept units that nothing needs: `CollectAnswer`.

    Releases named by a unit, a kept set or `next/` are never removed. Of the others, the `keep`
    newest and those younger than `days` stay.
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
