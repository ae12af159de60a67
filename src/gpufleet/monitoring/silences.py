"""
Create and parse silences of alerts. Pure.

The format is that of Alertmanager's API, version 2 (api/v2/openapi.yaml of 0.25). Every silence is
created with an end. So if an upgrade is killed, its silence still ends.
"""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.remote.answer_forms import refuse_malformed

MARK = "gpufleet: "
"""The prefix that gpufleet writes in `createdBy`. gpufleet never closes silences without it."""
LONGEST = dt.timedelta(hours=24)
_DURATION = re.compile(r"(\d+)([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


@dataclass(frozen=True)
class Silence:
    """One silence in Alertmanager."""

    id: str
    state: str
    """The state: active, pending or expired."""
    nodes: tuple[str, ...]
    """The silenced nodes. Empty if the silence does not select nodes."""
    by: str
    why: str
    until: dt.datetime

    @property
    def ours(self) -> bool:
        """Return whether gpufleet created the silence."""
        return self.by.startswith(MARK)

    def as_json(self) -> dict[str, Any]:
        """Return the silence as plain values for `json.dumps`."""
        return {
            "id": self.id,
            "state": self.state,
            "nodes": list(self.nodes),
            "by": self.by,
            "why": self.why,
            "until": self.until.isoformat(),
        }


def duration(text: str) -> dt.timedelta:
    """
    Parse a duration, such as `30m`, `2h` or `90s`.

    Raises `FleetError` if the duration is invalid or longer than a day.

    >>> duration("90s")
    datetime.timedelta(seconds=90)
    """
    found = _DURATION.fullmatch(text)
    length = dt.timedelta(**{_UNITS[found[2]]: int(found[1])}) if found else dt.timedelta()
    if not dt.timedelta() < length <= LONGEST:
        raise FleetError(
            f"--for {text}: write a duration of at most one day, such as 30m, 2h or 90s"
        )
    return length


def new_silence(
    node: str, by: str, why: str, until: dt.datetime, now: dt.datetime
) -> dict[str, Any]:
    """Return the request that creates a silence of all alerts of a node."""
    return {
        "matchers": [{"name": "instance", "value": node, "isRegex": False, "isEqual": True}],
        "startsAt": now.isoformat(),
        "endsAt": until.isoformat(),
        "createdBy": f"{MARK}{by}",
        "comment": why,
    }


def read(document: Iterable[Mapping[str, Any]]) -> tuple[Silence, ...]:
    """
    Return the silences in a server's list that have not expired, sorted by their end.

    Raises `ValueError`, `TypeError`, `KeyError` or `AttributeError` if the document is not such a
    list.
    """
    found = (
        Silence(
            id=str(each["id"]),
            state=str(each["status"]["state"]),
            nodes=tuple(
                str(matcher["value"])
                for matcher in each["matchers"]
                if matcher["name"] == "instance"
                and not matcher["isRegex"]
                and matcher.get("isEqual", True)
            ),
            by=str(each["createdBy"]),
            why=str(each["comment"]),
            until=_moment(str(each["endsAt"])),
        )
        for each in document
    )
    return tuple(
        sorted((each for each in found if each.state != "expired"), key=lambda each: each.until)
    )


def read_answer(node: str, answer: Mapping[str, Any] | str) -> tuple[Silence, ...]:
    """
    Return the silences in the answer of `on_node/monitoring/silences.py` from a node.

    Raises `FleetError` with the node's name if the node could not execute the request.
    """
    if isinstance(answer, str):
        raise FleetError(f"{node}: {answer}")
    with refuse_malformed(node):
        if answer["error"]:
            raise FleetError(f"{node}: {answer['error']}")
        return read(answer["silences"])


def _moment(text: str) -> dt.datetime:
    """Parse a time with a time zone. Raises `ValueError` if the time has no zone."""
    found = dt.datetime.fromisoformat(text)
    if found.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return found


def silences_to_close(found: Iterable[Silence], nodes: Collection[str]) -> tuple[Silence, ...]:
    """Return those of gpufleet's silences that select only these nodes."""
    return tuple(
        each for each in found if each.ours and each.nodes and set(each.nodes) <= set(nodes)
    )
