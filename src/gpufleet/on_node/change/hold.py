"""RUNS ON THE NODE, as root: lock the node for a deploy for as long as the deploy is connected.

Takes (`PARAMETERS`):
  id, owner, origin, what, process   the deploy's run, its operator, its directory, its files, and
            its process on the operator's machine
  upgrade   the id of the upgrade that runs this deploy, or null
  pid       the deploy's own process if the deploy runs on this machine; null if it came by SSH
  look      do not lock the node, but report what holds it
  sysroot   prefix of every path on the node; "" on the real machine
Prints one JSON document:
  schema    1
  problem   null or a sentence
  held      whether this deploy holds the node
  lock      the conflicting lock of an upgrade, or null
  deploy    the record of the deploy that holds the node, or null
  why       the reason why a free node could not be locked, or null

If the same run locks the node again, nothing changes. A node is not unlocked explicitly:
`common/deploy_mark.py` describes how the end of a deploy is detected. The program needs only Python
3.8 and the standard library.
"""

from __future__ import annotations

import json
import sys
import time
from typing import Any, Dict

from gpufleet.on_node.common import change_files, deploy_mark, linux_facts

PARAMETERS: "dict[str, Any]" = globals().get("PARAMETERS") or {}

NO_PROCESS = "the process that serves this connection is not sshd"


def hold(asked: Dict[str, Any]) -> Dict[str, Any]:
    """Lock the node for a deploy. If the node is not free, return what holds it."""
    deploy_mark.await_end(asked["id"])
    if asked.get("look"):
        return look(asked)
    # The upgrade's lock uses the same turn. So a node that is seen as free stays free until it is
    # locked here.
    with change_files.exclusive_lock(change_files.MARKS_TURN):
        found = look(asked)
        if found["lock"] or found["deploy"]:
            return found
        if change_files.document(change_files.LOCK) is not None:
            return {**found, "held": True}  # the upgrade that runs this deploy holds the node
        return {**found, **record(asked)}


def look(asked: Dict[str, Any]) -> Dict[str, Any]:
    """Return the upgrade's lock or the deploy that holds the node."""
    lock, living = change_files.document(change_files.LOCK), deploy_mark.living_deploy()
    way = deploy_mark.deploy_obstacle(asked["id"], asked.get("upgrade"), lock, living)
    return {
        "held": False,
        "lock": lock if way == "lock" else None,
        "deploy": living if way == "deploy" else None,
        "why": None,
    }


def record(asked: Dict[str, Any]) -> Dict[str, Any]:
    """Record the deploy as the node's holder."""
    own = asked.get("pid")
    pid = deploy_mark.connection_process() if own is None else own
    start = None if pid is None else deploy_mark.start_of(pid)
    if pid is None or start is None:
        return {"why": NO_PROCESS}
    if own is None:
        deploy_mark.watch_connection(pid)
    before = deploy_mark.living_deploy()
    now = {
        "id": asked["id"],
        "owner": asked["owner"],
        "from": asked["origin"],
        "since": before["since"] if before else round(time.time(), 3),
        "what": asked["what"],
        "process": asked["process"],
        "pid": pid,
        "start": start,
        "boot": deploy_mark.boot_id(),
    }
    if now != before:
        change_files.write_document(deploy_mark.DEPLOY, now)
    return {"held": True}


def answer(asked: Dict[str, Any]) -> Dict[str, Any]:
    """Run the requested action, and return the document to print."""
    linux_facts.ROOT = asked.get("sysroot", "")
    nothing: Dict[str, Any] = {"held": False, "lock": None, "deploy": None, "why": None}
    try:
        return {"schema": 1, "problem": None, **hold(asked)}
    except (change_files.RefusedError, OSError, KeyError) as error:
        return {"schema": 1, "problem": "%s" % (error or type(error).__name__), **nothing}


if __name__ == "__main__":
    json.dump(answer(PARAMETERS), sys.stdout, separators=(",", ":"))
    print()
