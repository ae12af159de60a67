"""Refuse deploys on nodes that an upgrade has locked.  Pure.

An upgrade runs deploys itself. A deploy recognises its own upgrade by the id in the variable
`VARIABLE`.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from gpufleet.formatting import join_names
from gpufleet.remote.answer_shapes import UPGRADE_ID
from gpufleet.sanitize import printable

VARIABLE = "GPUFLEET_UPGRADE"


def lock_problems(documents: Mapping[str, Any], ours: str | None) -> tuple[str, ...]:
    """
    Return why a deploy is refused, as one sentence for each upgrade that has locked nodes.

    The result is empty if no upgrade other than `ours` has locked a node.

    `documents` are the nodes' probes, or sentences why there is none. `ours` is the id of the
    upgrade that runs this deploy. A node without an answer, or with an old probe, is treated as
    unlocked.
    """
    found: dict[str, tuple[Mapping[str, Any], list[str]]] = {}
    problems = []
    for name, document in sorted(documents.items()):
        lock = document.get("upgrade") if isinstance(document, Mapping) else None
        if not isinstance(lock, Mapping) or lock.get("id") == ours:
            continue
        why = lock.get("detail") or lock["missing"] if "missing" in lock else None
        # Only an id may go into a command that operators paste.
        if why is None and not re.fullmatch(UPGRADE_ID, str(lock.get("id"))):
            why = f"its id is {lock.get('id')!r}"
        if why is not None:
            problems.append(
                f"{name}: it is not known whether an upgrade is running "
                f"({printable(str(why))}): the lock file of upgrades is "
                "/var/lib/gpufleet/change/lock.json"
            )
            continue
        found.setdefault(str(lock.get("id")), (lock, []))[1].append(name)
    for upgrade, (lock, names) in found.items():
        at = time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(float(lock.get("since") or 0)))
        what = printable(f"{lock.get('what')}, by {lock.get('owner')}")
        problems.append(
            f"upgrade {printable(upgrade)} ({what}, since {at}) has locked "
            f"{join_names(names)}, because a deploy would restart replicas that are not "
            "drained. Wait until the upgrade has finished. If it was interrupted, run "
            "`gpufleet upgrade INVENTORY --resume` or `--abort`. To deploy anyway, write "
            f"{VARIABLE}={printable(upgrade)} in front of the command"
        )
    return tuple(problems)
