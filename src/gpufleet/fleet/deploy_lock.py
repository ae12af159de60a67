"""Lock the nodes that a deploy changes, before anything is read on them.

A node stays locked while the run's connection to it exists, so there is no unlock
(`on_node/common/deploy_mark.py`). An upgrade's own deploys may lock the nodes that the upgrade has
locked.
"""

from __future__ import annotations

import getpass
import os
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

from pyinfra import logger
from pyinfra.api import Host, State
from pyinfra.connectors.local import LocalConnector

from gpufleet.errors import FleetError
from gpufleet.fleet.upgrade_lock import VARIABLE, lock_problems
from gpufleet.node.marks import Deploy, deploy_problems
from gpufleet.remote import payload
from gpufleet.remote.answer_forms import refuse_malformed
from gpufleet.remote.query import Answer, query
from gpufleet.sanitize import printable

# Time to read one or two files, after waiting for other processes on the node (change_files.py: up
# to 30 s).
SECONDS = 40

_QUESTIONS: WeakKeyDictionary[State, dict[str, Any]] = WeakKeyDictionary()
"""The lock request of each run that locks nodes."""
_SILENT: WeakKeyDictionary[State, dict[str, str]] = WeakKeyDictionary()
"""Why the lock's owner is unknown, by node, for each run."""

Ask = Callable[[Iterable[str], bool], Mapping[str, Answer]]
"""
A function that requests the lock of nodes. If the second argument is True, it only queries the
owner.
"""


def hold(state: State, hosts: Iterable[Host], what: str, *, dry: bool) -> None:
    """
    Lock nodes for a run. If `dry` is true, only report the owners of existing locks.

    Raises `FleetError` with all nodes that a different deploy or upgrade has locked. Nodes that do
    not answer are no error here. The plan handles GPU nodes without an answer, and `unknown`
    reports the nodes that answer only the plan's probe.
    """
    by_name = {each.name: each for each in hosts}
    asked = _QUESTIONS.setdefault(state, _question(what))

    def ask(names: Iterable[str], look: bool) -> Mapping[str, Answer]:
        return _ask(state, [by_name[name] for name in names], {**asked, "look": look or dry})

    problems, silent, remarks = take(ask, by_name, asked["upgrade"])
    for remark in remarks:
        logger.warning("    %s", remark)
    if dry:
        for problem in problems:
            logger.warning("    gpufleet would refuse a deploy: %s", problem)
        return
    if problems:
        raise FleetError(*problems)
    _SILENT.setdefault(state, {}).update(silent)


def take(
    ask: Ask, names: Iterable[str], upgrade: str | None
) -> tuple[tuple[str, ...], dict[str, str], tuple[str, ...]]:
    """
    Lock nodes. Return the reasons for a refusal, the nodes without an answer, and remarks.

    The first node is locked alone, so that one of two concurrent deploys gets all nodes. If a
    different deploy has locked the first node, gpufleet only queries the other nodes for the owner
    of their lock.
    """
    first, *others = sorted(names)
    found = dict(ask([first], False))
    mine = not _refusals(found, upgrade)
    if others:
        found |= ask(others, not mine)
    silent = {name: said for name, said in found.items() if isinstance(said, str)}
    remarks = tuple(
        f"{name}: the node could not be locked against other deploys: {printable(str(said['why']))}"
        for name, said in sorted(found.items())
        if not isinstance(said, str) and said["why"]
    )
    return _refusals(found, upgrade), silent, remarks


def hold_again(state: State, host: Host) -> str:
    """
    Lock a node again over its new connection after a reboot.

    Returns why the node could not be locked, or "" if it is locked. If the run has locked no nodes,
    this function does nothing.
    """
    if state not in _QUESTIONS:
        return ""
    asked = _QUESTIONS[state]
    answers = _ask(state, [host], asked)
    said = answers[host.name]
    if isinstance(said, str):
        return f"it is not known whether another deploy has locked the node: {said}"
    return "; ".join(_refusals(answers, asked["upgrade"]))


def unknown(state: State, answers: Mapping[str, Answer]) -> tuple[str, ...]:
    """Return a sentence for each node that answered the probe but did not report its lock."""
    return tuple(
        _not_known(name, why)
        for name, why in sorted(_SILENT.get(state, {}).items())
        if not isinstance(answers.get(name, ""), str)
    )


def refuse_silent(state: State, names: Iterable[str]) -> None:
    """Raise `FleetError` if any of these nodes did not report its lock."""
    silent = _SILENT.get(state, {})
    if problems := [_not_known(name, silent[name]) for name in sorted(names) if name in silent]:
        raise FleetError(*problems)


def _not_known(name: str, why: str) -> str:
    return f"{name}: it is not known whether a deploy is changing the node: {why}"


def _refusals(found: Mapping[str, Answer], upgrade: str | None) -> tuple[str, ...]:
    deploys: dict[str, Deploy] = {}
    problems: list[str] = []
    for name, said in sorted(found.items()):
        if isinstance(said, str):
            continue
        try:
            with refuse_malformed(name):
                if said["problem"]:
                    problems.append(_not_known(name, printable(str(said["problem"]))))
                if deploy := Deploy.from_file(said["deploy"]):
                    deploys[name] = deploy
        except FleetError as error:
            problems += error.problems
    locks = {
        name: {"upgrade": said["lock"]} for name, said in found.items() if not isinstance(said, str)
    }
    return (*lock_problems(locks, upgrade), *deploy_problems(deploys), *problems)


def _question(what: str) -> dict[str, Any]:
    stamp = time.strftime("%Y%m%dT%H%M%SZ", time.gmtime())
    return {
        "id": f"{stamp}-{secrets.token_hex(4)}",
        "owner": f"{getpass.getuser()}@{socket.gethostname()}",
        "origin": str(Path.cwd()),
        "what": what,
        "process": os.getpid(),
        "upgrade": os.environ.get(VARIABLE),
        "look": False,
    }


def _ask(state: State, hosts: Iterable[Host], asked: Mapping[str, Any]) -> dict[str, Answer]:
    hosts = list(hosts)
    # By SSH, the connection's process on the node has the lock. The program finds this process.
    here = {each.name for each in hosts if isinstance(each.connector, LocalConnector)}
    own, theirs = (payload.program("change/hold", **asked, pid=pid) for pid in (os.getpid(), None))
    return query(
        state,
        hosts,
        lambda name: own if name in here else theirs,
        SECONDS,
        "the query of the lock's owner",
        short=True,
    )
