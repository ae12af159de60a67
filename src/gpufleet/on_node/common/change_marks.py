"""RUNS ON THE NODE: set and remove the node's lock during changes, and cordon and drain marks.

An upgrade removes only its own marks. An operator removes the marks of operators. An operator
removes the marks of an upgrade only with `force`.
"""

from __future__ import annotations

import time
from typing import Any, Dict, List, Optional

from gpufleet.on_node.common import change_files, deploy_mark


def lock(asked: Dict[str, Any]) -> Dict[str, Any]:
    """
    Take the lock, unless another upgrade or a deploy holds the node.

    With `look`, only return the current holder and do not take the lock.
    """
    deploy_mark.await_end()
    if asked.get("look"):
        return blocking_holder(asked)
    with change_files.exclusive_lock(change_files.MARKS_TURN):
        found = blocking_holder(asked)
        if not found["ours"]:
            return found
        before = found["before"]
        mine = before is not None and before.get("id") == asked["id"]
        if mine and not asked.get("steal"):
            return found
        now = {
            "id": asked["id"],
            "owner": asked["owner"],
            "from": asked["origin"],
            "since": round(time.time(), 3),
            "what": asked["what"],
        }
        change_files.write_document(change_files.LOCK, now)
        return {"lock": now, "before": before, "ours": True}


def blocking_holder(asked: Dict[str, Any]) -> Dict[str, Any]:
    """
    Return what holds the node. `ours` is true if the requesting upgrade may take the lock.
    """
    lock, living = change_files.document(change_files.LOCK), deploy_mark.living_deploy()
    steal = bool(asked.get("steal"))
    way = deploy_mark.upgrade_obstacle(asked["id"], lock, living, steal=steal)
    return {
        "lock": lock,
        "before": lock,
        "ours": not way,
        "deploy": living if way == "deploy" else None,
    }


def unlock(asked: Dict[str, Any]) -> Dict[str, Any]:
    """Release the lock if this upgrade holds it."""
    with change_files.exclusive_lock(change_files.MARKS_TURN):
        before = change_files.document(change_files.LOCK)
        if before is None:
            return {"lock": None, "before": None, "ours": True}
        if before.get("id") != asked["id"]:
            return {"lock": before, "before": before, "ours": False}
        change_files.remove(change_files.LOCK)
        return {"lock": None, "before": before, "ours": True}


def cordon(asked: Dict[str, Any]) -> Dict[str, Any]:
    """Cordon the node."""
    with change_files.exclusive_lock(change_files.MARKS_TURN):
        changed = ["cordon"] if mark(change_files.CORDON, asked) else []
        return {**marks(), "changed": changed}


def uncordon(asked: Dict[str, Any]) -> Dict[str, Any]:
    """Remove the node's cordon mark."""
    with change_files.exclusive_lock(change_files.MARKS_TURN):
        said = remove_mark(change_files.CORDON, "the cordon", asked)
        changed = ["cordon"] if said is None else []
        return {**marks(), "changed": changed, "problem": said or None}


def drain(asked: Dict[str, Any]) -> Dict[str, Any]:
    """
    Mark replicas as drained. While a deploy holds the node, only an upgrade can mark replicas.
    """
    person = asked.get("upgrade") is None
    if person:
        deploy_mark.await_end()
    with change_files.exclusive_lock(change_files.MARKS_TURN):
        living = deploy_mark.living_deploy() if person else None
        if living is not None:
            raise change_files.RefusedError(
                "the node is being deployed by %s (%s)" % (living.get("owner"), living.get("what"))
            )
        change_files.make_directory(change_files.DRAINED)
        changed = [replica for replica in asked["replicas"] if mark(path_of(replica), asked)]
        return {**marks(), "changed": changed}


def undrain(asked: Dict[str, Any]) -> Dict[str, Any]:
    """Remove the drain marks of replicas."""
    with change_files.exclusive_lock(change_files.MARKS_TURN):
        said = {
            each: remove_mark(path_of(each), "the drain of " + each, asked)
            for each in asked["replicas"]
        }
        refused = [each for each in said.values() if each]
        return {
            **marks(),
            "changed": [replica for replica, each in said.items() if each is None],
            "problem": "; ".join(refused) or None,
        }


def path_of(replica: str) -> str:
    """Return the path of a replica's drain mark."""
    return "%s/%s.json" % (change_files.DRAINED, change_files.must_be_name(replica))


def marks() -> Dict[str, Any]:
    """Return all marks of this node."""
    return {"cordon": change_files.document(change_files.CORDON), "drained": drain_marks()}


def drain_marks() -> Dict[str, Any]:
    """Return {replica: its drain mark}."""
    found: List[str] = [
        each
        for each in change_files.directory_names(change_files.DRAINED)
        if each.endswith(".json")
    ]
    return {
        name[: -len(".json")]: change_files.document(change_files.DRAINED + "/" + name)
        for name in found
    }


def mark(path: str, asked: Dict[str, Any]) -> bool:
    """
    Create a mark unless it exists already; return whether a mark was created.

    An operator's mark replaces an upgrade's mark.
    """
    found = change_files.document(path)
    upgrade = asked.get("upgrade")
    # An operator's mark has priority, and an upgrade cannot remove it.
    if found is not None and (upgrade is not None or found.get("upgrade") is None):
        return False
    content = {
        "by": asked["by"],
        "why": asked["why"],
        "since": round(time.time(), 3),
        "upgrade": upgrade,
    }
    change_files.write_document(path, content)
    return True


def remove_mark(path: str, what: str, asked: Dict[str, Any]) -> Optional[str]:
    """
    Remove a mark; return None if the mark was removed, or "" if it did not exist.

    If the mark must stay, the result is the reason.
    """
    found = change_files.document(path)
    if found is None:
        return ""
    whose, upgrade = found.get("upgrade"), asked.get("upgrade")
    if whose == upgrade or (upgrade is None and asked.get("force")):
        change_files.remove(path)
        return None
    if upgrade is not None:
        return "%s stays, because %s set it (%s), not this upgrade" % (
            what,
            found["by"],
            found["why"],
        )
    return (
        "%s stays: upgrade %s of %s set it (%s) and removes it at its end. `gpufleet upgrade "
        "--resume` finishes that upgrade; --force removes the mark anyway"
        % (what, whose, found["by"], found["why"])
    )
