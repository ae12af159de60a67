"""Lock every node of a fleet, so that only one change runs at a time.  Pure.

Nodes are locked in the order of their names, so that only one of two concurrent upgrades gets the
first node. If another upgrade has locked a node, the locks taken so far are released.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

from gpufleet.errors import FleetError
from gpufleet.node.marks import Deploy, Lock, deploy_problems
from gpufleet.upgrade.run import node_questions
from gpufleet.upgrade.run.node_answers import Answer, LockAnswer
from gpufleet.upgrade.run.node_questions import NodeQuestion

Ask = Callable[[Mapping[str, NodeQuestion]], Mapping[str, Answer]]
"""Sends each node its request, and returns the answers."""


def take(
    ask: Ask,
    nodes: Sequence[str],
    *,
    upgrade: str,
    owner: str,
    origin: str,
    what: str,
    steal: bool = False,
) -> dict[str, Lock]:
    """
    Lock all nodes; return {node: previous owner} for locks that `steal` took over.

    Raises `FleetError` if another upgrade or a deploy has a node, with its owner, start and
    purpose, or if a node does not answer.
    """
    asked = node_questions.lock(upgrade, owner, origin, what, steal=steal)
    first, *others = sorted(nodes)
    stolen: dict[str, Lock] = {}
    problems: list[str] = []
    deploys: dict[str, Deploy] = {}
    taken: list[str] = []
    # The first node alone: of two concurrent upgrades one then gets all nodes. If it is refused,
    # the other nodes are only queried.
    for names in ([first], others):
        if problems or deploys:
            asked = node_questions.lock(upgrade, owner, origin, what, steal=steal, look=True)
        for name, said in ask(dict.fromkeys(names, asked)).items():
            try:
                found = LockAnswer.read(name, said)
            except FleetError as error:
                problems += error.problems
                continue
            if found.deploy:
                deploys[name] = found.deploy
            elif found.ours:
                taken.append(name)
                if found.before and found.before.id != upgrade:
                    stolen[name] = found.before
            else:
                problems.append(_refusal(name, found))
    if problems or deploys:
        release(ask, taken, upgrade)
        raise FleetError(*dict.fromkeys((*problems, *deploy_problems(deploys))))
    return stolen


def release(ask: Ask, nodes: Sequence[str], upgrade: str) -> tuple[str, ...]:
    """Unlock the nodes; return a sentence for each node that may still be locked."""
    if not nodes:
        return ()
    problems: list[str] = []
    for name, said in ask(dict.fromkeys(nodes, node_questions.unlock(upgrade))).items():
        try:
            found = LockAnswer.read(name, said)
        except FleetError as error:
            problems += error.problems
            continue
        if found.lock and found.lock.id == upgrade:
            problems.append(f"{name}: {found.problem or 'the node is still locked'}")
    return tuple(problems)


def _refusal(name: str, found: LockAnswer) -> str:
    if found.lock is None:
        return f"{name}: the lock was refused: {found.problem or 'unknown reason'}"
    since = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(found.lock.since))
    return (
        f"{name} has been locked by {found.lock} since {since}. Wait until that change ends, or "
        "continue that change from its journal with `--resume`. If that change was "
        "abandoned, take over the lock with `--steal WHY`"
    )
