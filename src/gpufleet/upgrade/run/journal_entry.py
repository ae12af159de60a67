"""One entry of an upgrade's journal, and the known events.  Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from gpufleet.errors import FleetError

WORDS: Mapping[str, str] = MappingProxyType(
    {
        # Events of the whole upgrade. Those that end in -ing come before their step, the others
        # after it.
        "started": "id, schema, kind (upgrade|rollback), inventory, what, of (kind rollback: the "
        "upgrade that is undone), limit, versions (to declare, by engine)",
        "owner": "by (user@host), pid",
        "declared": "files: [{file, line, key, before, after, engine}], before it writes them",
        "locking": "nodes, steal (why, or null)",
        "locked": "nodes",
        "planned": "waves: [{number, canary, groups: [Group]}], settings (of Upgrade), needs, "
        "seconds (estimated, by wave), remarks",
        "confirmed": "by (a person, --yes); wave: which one, none for the start",
        "preparing": "log (file)",
        "prepared": "",
        "baseline": "replicas: {replica: what was seen}, findings, alerts",
        "wave": "the wave begins; loads, needs",
        "paused": "why; no further group starts until it is resumed",
        "aborting": "why; the groups in progress are undone",
        "resumed": "by",
        "finishing": "log (file)",
        "unlocking": "nodes",
        "unlocked": "nodes",
        "finished": "everything is as declared",
        "stopped": "why: [sentences], how (to continue)",
        "noted": "text: a remark that changes no state; with the group that it is about, if any",
        # Events of a group: each has wave and group; events of one node also have node.
        "draining": "nodes get their marks, gateways stop sending",
        "drained": "left (requests that had not finished), seconds",
        "changing": "log (file): the layers below vLLM are changed; only kind node",
        "changed": "",
        "switching": "from here on units may be the new ones, and are down",
        "switched": "seconds (by node: down to started)",
        "ready": "seconds (since it was started), load_seconds",
        "judged": "gate (golden|traffic), passed (true|false|null: not known), reasons",
        "undraining": "marks are lifted, gateways send again",
        "undrained": "",
        "soaked": "seconds, seen",
        "done": "the group is as declared, and serves",
        "failed": "why: [sentences], by (engine: it failed | wave: another group of its wave did)",
        "restoring": "from here on units may be the kept ones, and are down",
        "restored": "seconds (by node)",
        "returned": "the group is as before, and serves",
        "stuck": "why: [sentences]: the group does not serve and stays drained; repair it by hand",
    }
)
"""The names of the events, with the keys of each event's `said`."""

Phase: TypeAlias = Literal[
    "waiting",
    "draining",
    "drained",
    "changing",
    "changed",
    "switching",
    "switched",
    "ready",
    "judged",
    "undraining",
    "undrained",
    "soaked",
    "done",
    "failed",
    "restoring",
    "restored",
    "returned",
    "stuck",
]


@dataclass(frozen=True)
class Entry:
    """One event in a journal."""

    at: float
    """Seconds since the epoch, by the controller's clock."""
    what: str
    """The event's name, a key of `WORDS`."""
    wave: int | None = None
    group: str | None = None
    node: str | None = None
    said: Mapping[str, Any] = field(default_factory=dict)

    def as_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {
            "at": round(self.at, 3),
            "what": self.what,
            "wave": self.wave,
            "group": self.group,
            "node": self.node,
            "said": dict(self.said),
        }

    @classmethod
    def from_json(cls, found: Mapping[str, Any]) -> Entry:
        """
        Parse `as_json`'s output.

        Raises `FleetError` for an unknown event, and `ValueError`, `KeyError` or `TypeError` for
        malformed input.
        """
        if found["what"] not in WORDS:
            raise FleetError(f"unknown event {str(found['what'])[:40]!r}")
        return cls(
            float(found["at"]),
            found["what"],
            found.get("wave"),
            found.get("group"),
            found.get("node"),
            dict(found.get("said") or {}),
        )


def entries_of(entries: Iterable[Entry], group: str) -> Iterator[Entry]:
    """Return the journal entries of one group, in order."""
    return (each for each in entries if each.group == group)
