"""RUNS ON THE NODE: read the node's cordon, and the upgrade that holds it.

`on_node/common/change_marks.py` writes the mark. `cordon.py` describes what the mark means for a
plan.
"""

from __future__ import annotations

import json
from typing import Any, Dict, Optional

from gpufleet.on_node.common import linux_facts

HOME = "/var/lib/gpufleet/change"
BYTES = 1 << 16


def cordon() -> Optional[Dict[str, Any]]:
    """
    Return the cordon mark, or None. `passing` is true if the mark belongs to a running change.

    Only root may read the mark.
    """
    found = document("cordon.json")
    if found is None:
        return None
    lock = document("lock.json") or {}
    upgrade = found.get("upgrade")
    return {
        "by": str(found["by"]),
        "why": str(found["why"]),
        "since": float(found["since"]),
        "upgrade": upgrade,
        "passing": upgrade is not None and upgrade == lock.get("id"),
    }


def upgrade() -> Optional[Dict[str, Any]]:
    """Return the unfinished upgrade that holds the node, or None."""
    found = document("lock.json")
    if found is None:
        return None
    texts = {name: str(found[name]) for name in ("id", "owner", "from", "what")}
    return {**texts, "since": float(found["since"])}


def document(name: str) -> Optional[Dict[str, Any]]:
    """Return the JSON object in a file of the change directory, or None if it does not exist."""
    try:
        with open("%s%s/%s" % (linux_facts.ROOT, HOME, name), encoding="utf-8") as file:
            found: Dict[str, Any] = json.loads(file.read(BYTES))
    except (FileNotFoundError, NotADirectoryError):
        return None
    return found
