"""Alerts about a wave's nodes are quiet while it is changed, once, and not longer than that."""

from __future__ import annotations

import datetime as dt
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, ClassVar

import pytest

from gpufleet.settings.node_settings import NodeSettings
from gpufleet.upgrade.run import wave_silences

NOW = dt.datetime(2026, 11, 22, 14, tzinfo=dt.UTC)
ID = "20261122T140000Z-ab12"


class Alertmanager(BaseHTTPRequestHandler):
    """Keeps silences as Alertmanager's API (version 2) does."""

    silences: ClassVar[list[dict[str, Any]]] = []

    def do_GET(self) -> None:
        self.say(self.silences)

    def do_POST(self) -> None:
        silence = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        known = {**silence, "id": str(len(self.silences)), "status": {"state": "active"}}
        self.silences.append(known)
        self.say({"silenceID": known["id"]})

    def do_DELETE(self) -> None:
        gone = self.path.rpartition("/")[2]
        next(each for each in self.silences if each["id"] == gone)["status"]["state"] = "expired"
        self.say(None)

    def say(self, document: Any) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"" if document is None else json.dumps(document).encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def where(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, str]]:
    monkeypatch.setattr(Alertmanager, "silences", [])
    with ThreadingHTTPServer(("127.0.0.1", 0), Alertmanager) as server:
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        yield {"monitor-01": f"http://127.0.0.1:{server.server_address[1]}"}
        server.shutdown()


def ask(program: Callable[[str], str | None], seconds: float, _: str) -> dict[str, Any]:
    """Run what a node is sent, here."""
    assert program("gpu-01") is None  # a node without an Alertmanager is not asked
    source = program("monitor-01")
    if source is None:
        return {}
    done = subprocess.run(
        [sys.executable, "-I", "-"], input=source.encode(), capture_output=True, timeout=seconds,
        check=True,
    )  # fmt: skip
    return {"monitor-01": json.loads(done.stdout)}


def active() -> list[tuple[str, str]]:
    return [
        (each["matchers"][0]["value"], each["endsAt"])
        for each in Alertmanager.silences
        if each["status"]["state"] == "active"
    ]


def quiet(where: dict[str, str], *nodes: str, at: dt.datetime = NOW) -> wave_silences.OpenSilences:
    return wave_silences.open_silences(
        ask, where, nodes, upgrade=ID, by="ann@desk", seconds=3600, now=at
    )


def test_each_node_of_a_wave_is_silent_for_a_time_once(where: dict[str, str]) -> None:
    end = (NOW + dt.timedelta(hours=1)).isoformat()
    first, second = quiet(where, "gpu-01", "gpu-02"), quiet(where, "gpu-01", "gpu-02")

    assert active() == [("gpu-01", end), ("gpu-02", end)]
    assert first.ids == second.ids == ("0", "1")
    assert first.problems == ()


def test_a_resumed_upgrade_prolongs_what_would_end_too_soon(where: dict[str, str]) -> None:
    quiet(where, "gpu-01")
    later = NOW + dt.timedelta(minutes=50)

    assert quiet(where, "gpu-01", at=later).ids == ("0", "1")
    assert active()[-1] == ("gpu-01", (later + dt.timedelta(hours=1)).isoformat())


def test_nothing_is_silent_for_more_than_a_day(where: dict[str, str]) -> None:
    wave_silences.open_silences(ask, where, ["gpu-01"], upgrade=ID, by="ann", seconds=1e6, now=NOW)

    assert active() == [("gpu-01", (NOW + dt.timedelta(days=1)).isoformat())]


def test_an_upgrade_ends_its_own_silences_and_no_others(where: dict[str, str]) -> None:
    quiet(where, "gpu-01", "gpu-02")
    wave_silences.open_silences(
        ask, where, ["gpu-03"], upgrade="another", by="bob", seconds=60, now=NOW
    )
    person = {"id": "9", "createdBy": "carol", "status": {"state": "active"}}
    Alertmanager.silences.append({**Alertmanager.silences[0], **person})

    assert wave_silences.find_open(ask, where, ID).ids == ("0", "1")
    assert wave_silences.close_silences(ask, where, ID, ["gpu-01"]).ids == ("1",)
    assert wave_silences.close_silences(ask, where, ID).ids == ()
    assert [
        each["id"] for each in Alertmanager.silences if each["status"]["state"] == "active"
    ] == [
        "2",
        "9",
    ]


def test_an_alertmanager_that_does_not_answer_is_said_and_stops_nothing() -> None:
    quieted = quiet({"monitor-01": "http://127.0.0.1:9"}, "gpu-01")

    assert quieted.ids == ()
    assert "monitor-01" in quieted.problems[0]


@pytest.mark.parametrize("said", ["no answer", {}, {"error": None, "silences": [{"id": 1}]}, []])
def test_an_answer_that_makes_no_sense_raises_nothing(said: Any) -> None:
    quieted = wave_silences.open_silences(
        lambda *_: {"monitor-01": said},
        {"monitor-01": "http://127.0.0.1:9"},
        ["gpu-01"],
        upgrade=ID,
        by="ann",
        seconds=60,
        now=NOW,
    )

    assert len(quieted.problems) == 1


def test_where_nobody_watches_nobody_is_asked() -> None:
    def never(*_: Any) -> dict[str, Any]:
        raise AssertionError

    assert (
        wave_silences.open_silences(
            never, {}, ["gpu-01"], upgrade=ID, by="a", seconds=1, now=NOW
        ).ids
        == ()
    )
    assert wave_silences.close_silences(never, {}, ID).problems == ()


def test_alertmanagers_are_those_that_are_declared() -> None:
    class Node:
        def __init__(self, **settings: Any) -> None:
            self.name = self.address = "x"
            self.settings = NodeSettings(**settings)

    found = wave_silences.alertmanagers(
        {"gpu-01": Node(), "m-01": Node(monitoring={"alertmanager": {"listen": "0.0.0.0"}})}
    )

    assert found == {"m-01": "http://127.0.0.1:9093"}
