"""Silence alerts about a wave's nodes while the wave changes them.  Pure.

A replica that loads as planned must not page a person. Silenced alerts still fire: they are
displayed, and the gates read them (`baseline.read_answers` gets the ids of this upgrade's
silences). Every silence has an end, so a killed upgrade leaves no lasting silence.

A failed silence never stops an upgrade. If an Alertmanager does not answer, the problem is
reported, and the alerts of that Alertmanager are sent to their receivers.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from gpufleet.errors import FleetError
from gpufleet.monitoring import prometheus, silences
from gpufleet.monitoring.silences import Silence
from gpufleet.remote import payload
from gpufleet.settings.node_variables import NodeVars

Ask: TypeAlias = Callable[
    [Callable[[str], str | None], float, str], Mapping[str, Mapping[str, Any] | str]
]
"""The query function of `fleet.live.connect`."""

SECONDS = 60
"""Deadline in seconds: 10 for the request of each silence, and the connection."""


@dataclass(frozen=True)
class OpenSilences:
    """The open silences of an upgrade, and the Alertmanagers that failed."""

    ids: tuple[str, ...] = ()
    """The silences of this upgrade that are open now."""
    problems: tuple[str, ...] = ()
    """A sentence for each Alertmanager that failed."""


def alertmanagers(nodes: Mapping[str, NodeVars]) -> dict[str, str]:
    """Return the address of each Alertmanager of an inventory, as reached on its own node."""
    return {
        name: f"http://{prometheus.host_port(prometheus.local_address(server.listen), server.port)}"
        for name, node in nodes.items()
        if (wanted := node.settings.monitoring) and (server := wanted.alertmanager)
    }


def open_silences(
    ask: Ask,
    where: Mapping[str, str],
    nodes: Collection[str],
    *,
    upgrade: str,
    by: str,
    seconds: float,
    now: dt.datetime,
) -> OpenSilences:
    """
    Silence alerts about `nodes` for `seconds` from `now` on, at most a day.

    Existing silences of the same upgrade are not repeated. `where` is the result of
    `alertmanagers`, `upgrade` the upgrade's id, `by` its operator (user@host).
    """
    if not where or not nodes:
        return OpenSilences()
    until = now + min(dt.timedelta(seconds=seconds), silences.LONGEST)
    known, problems = _ask(ask, where)
    wanted = {
        home: _unsilenced_nodes(found, nodes, upgrade, until) for home, found in known.items()
    }
    opening = {
        home: [
            silences.new_silence(node, _creator(upgrade, by), "changed by an upgrade", until, now)
            for node in lacking
        ]
        for home, lacking in wanted.items()
        if lacking
    }
    after, late = _ask(ask, {home: where[home] for home in opening}, opening=opening)
    return OpenSilences(_ids({**known, **after}, upgrade), (*problems, *late))


def close_silences(
    ask: Ask, where: Mapping[str, str], upgrade: str, nodes: Collection[str] | None = None
) -> OpenSilences:
    """Close the silences of an upgrade, for these nodes or for all; other silences stay."""
    if not where:
        return OpenSilences()
    known, problems = _ask(ask, where)
    closing = {
        home: [
            each.id
            for each in found
            if _is_of(each, upgrade) and (nodes is None or set(each.nodes) <= set(nodes))
        ]
        for home, found in known.items()
    }
    closing = {home: ids for home, ids in closing.items() if ids}
    after, late = _ask(ask, {home: where[home] for home in closing}, closing=closing)
    return OpenSilences(_ids({**known, **after}, upgrade), (*problems, *late))


def find_open(ask: Ask, where: Mapping[str, str], upgrade: str) -> OpenSilences:
    """Return the silences of an upgrade that are open now, for a resumed run."""
    if not where:
        return OpenSilences()
    known, problems = _ask(ask, where)
    return OpenSilences(_ids(known, upgrade), problems)


def _ask(
    ask: Ask,
    where: Mapping[str, str],
    *,
    opening: Mapping[str, list[dict[str, Any]]] | None = None,
    closing: Mapping[str, list[str]] | None = None,
) -> tuple[dict[str, tuple[Silence, ...]], tuple[str, ...]]:
    """
    Query Alertmanagers; return each one's silences afterwards, and a sentence for each failure.
    """
    if not where:
        return {}, ()

    def program(home: str) -> str | None:
        if home not in where:
            return None
        return payload.program(
            "monitoring/silences",
            url=where[home],
            open=(opening or {}).get(home, []),
            close=(closing or {}).get(home, []),
        )

    longest = max((len((opening or {}).get(home, ())) for home in where), default=0)
    said = ask(program, SECONDS + longest, "the query of silences")
    found, problems = {}, []
    for home in where:
        answer = said.get(home, "was not queried")
        try:
            found[home] = silences.read_answer(home, answer)
        except FleetError as error:
            problems.append(f"alerts could not be silenced: {error}")
    return found, tuple(problems)


def _unsilenced_nodes(
    found: Iterable[Silence], nodes: Collection[str], upgrade: str, until: dt.datetime
) -> list[str]:
    """Return the nodes that no silence of this upgrade covers until `until`."""
    # A minute less than wished is no reason for another one.
    enough = until - dt.timedelta(minutes=1)
    there = {
        node
        for each in found
        if _is_of(each, upgrade) and each.until >= enough
        for node in each.nodes
    }
    return sorted(set(nodes) - there)


def _creator(upgrade: str, by: str) -> str:
    return f"upgrade {upgrade}, {by}"


def _is_of(each: Silence, upgrade: str) -> bool:
    return each.by.startswith(f"{silences.MARK}upgrade {upgrade},") and bool(each.nodes)


def _ids(known: Mapping[str, Iterable[Silence]], upgrade: str) -> tuple[str, ...]:
    return tuple(
        sorted(each.id for found in known.values() for each in found if _is_of(each, upgrade))
    )
