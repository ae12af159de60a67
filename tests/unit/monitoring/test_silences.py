"""Silences: what opens them, which of them are ours to end."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest

from gpufleet.errors import FleetError
from gpufleet.monitoring import silences
from tests.support.rows import each_row

NOW = dt.datetime(2026, 11, 22, 10, tzinfo=dt.UTC)
UNTIL = NOW + dt.timedelta(minutes=30)


def listed(opened: dict[str, Any], **also: Any) -> dict[str, Any]:
    """Return a silence as Alertmanager lists one that was opened so."""
    return {**opened, "id": "1", "status": {"state": "active"}, "updatedAt": "", **also}


def test_a_silence_names_its_node_who_opened_it_why_and_when_it_ends() -> None:
    opened = silences.new_silence("gpu-01", "ada@desk", "new driver", UNTIL, NOW)
    (found,) = silences.read([listed(opened)])
    assert (found.nodes, found.by, found.why) == (("gpu-01",), "gpufleet: ada@desk", "new driver")
    assert found.until == UNTIL
    assert found.ours


def test_only_our_own_about_just_these_nodes_are_ended() -> None:
    ours = listed(silences.new_silence("gpu-01", "ada", "x", UNTIL, NOW))
    by_hand = listed({**ours, "createdBy": "ada"}, id="2")
    other = listed(silences.new_silence("gpu-02", "ada", "x", UNTIL, NOW), id="3")
    by_pattern = listed(ours, id="4")
    by_pattern["matchers"] = [{**ours["matchers"][0], "isRegex": True, "value": "gpu-.*"}]
    over = listed(ours, id="5", status={"state": "expired"})
    found = silences.read([ours, by_hand, other, by_pattern, over])
    assert [each.id for each in silences.silences_to_close(found, ["gpu-01"])] == ["1"]


@each_row("length", ["", "30", "0m", "25h", "2d", "m30", "-5m", "1.5h"])
def test_a_silence_without_a_sensible_end_is_refused(length: str) -> None:
    with pytest.raises(FleetError, match="at most one day"):
        silences.duration(length)


def test_a_day_is_the_longest() -> None:
    assert silences.duration("24h") == dt.timedelta(days=1) == silences.duration("1d")
