"""Create and parse silences of alerts. Pure.

The format is that of Alertmanager's API, version 2 (api/v2/openapi.yaml of 0.25). A silence is
created with an end, so it needs no closing, and a killed upgrade leaves no lasting silence.
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
"""The prefix of gpufleet's `createdBy`. Silences without it are never closed."""
LONGEST = dt.timedelta(hours=24)
_DURATION = re.compile(r"(\d+)([smhd])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}


@dataclass(frozen=True)
class Silence:
    """One of Alertmanager's silences."""

    id: str
    state: str
    """The state: active, pending or expired."""
    nodes: tuple[str, ...]
    """The silenced nodes; empty if the silence is not about nodes."""
    by: str
    why: str
    until: dt.datetime

    @property
    def ours(self) -> bool:
        """Return whether gpufleet created the silence."""
        return self.by.startswith(MARK)

    def as_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
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

    Raises `FleetError` for an invalid duration, and for more than a day.

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
    """Return the request for a silence of all alerts on a node."""
    return {
        "matchers": [{"name": "instance", "value": node, "isRegex": False, "isEqual": True}],
        "startsAt": now.isoformat(),
        "endsAt": until.isoformat(),
        "createdBy": f"{MARK}{by}",
        "comment": why,
    }


def read(document: Iterable[Mapping[str, Any]]) -> tuple[Silence, ...]:
    """
    Return the unexpired silences in a server's list, sorted by end.

    Raises `ValueError`, `TypeError`, `KeyError` or `AttributeError` for any other document.
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
    Return a node's silences from `on_node/monitoring/silences.py`'s answer.

    Raises `FleetError` naming the node if it did not execute the request.
    """
    if isinstance(answer, str):
        raise FleetError(f"{node}: {answer}")
    with refuse_malformed(node):
        if answer["error"]:
            raise FleetError(f"{node}: {answer['error']}")
        return read(answer["silences"])


def _moment(text: str) -> dt.datetime:
    """Parse a time with its zone. Raises `ValueError` for a time without a zone."""
    found = dt.datetime.fromisoformat(text)
    if found.tzinfo is None:
        raise ValueError(f"{text!r} has no time zone")
    return found


def silences_to_close(found: Iterable[Silence], nodes: Collection[str]) -> tuple[Silence, ...]:
    """Return gpufleet's silences that are only about these nodes."""
    return tuple(
        each for each in found if each.ours and each.nodes and set(each.nodes) <= set(nodes)
    )
