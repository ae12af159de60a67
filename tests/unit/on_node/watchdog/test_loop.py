"""The watchdog's loop against servers over real sockets, and a process that it may kill.

The servers answer what a vLLM 0.32 was recorded to answer, with the numbers that a test wants.
systemctl is a script below the root that the program looks at; what it kills is a real process.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpufleet.engines import vllm
from gpufleet.on_node.common import linux_facts
from gpufleet.on_node.common.http import Answer, Exchange
from gpufleet.on_node.watchdog import (
    stage_watch,
    verdict,
)
from gpufleet.on_node.watchdog.dump import make_room
from gpufleet.on_node.watchdog.watchdog import Watchdog
from tests.support.checkout import ROOT

pytestmark = pytest.mark.slow

RECORDED = (ROOT / "tests/data/vllm-0.32.0.metrics").read_text()
UNIT = "vllm-tiny-0.service"
KEY = "a-key-that-nobody-may-see"
SECONDS = 1.5  # a busy machine keeps processes waiting for less


class Server(ThreadingHTTPServer):
    """A vLLM as far as the watchdog sees one."""

    daemon_threads = True

    def __init__(self, engines: int = 1) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.running = [0] * engines
        self.tokens = [0] * engines
        self.frozen: set[int] = set()
        self.asked: list[dict[str, str]] = []
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()
        threading.Thread(target=self.work, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def work(self) -> None:
        while True:
            time.sleep(0.02)
            for engine, running in enumerate(self.running):
                self.tokens[engine] += bool(running) and engine not in self.frozen

    def metrics(self) -> str:
        found = []
        for engine, (running, tokens) in enumerate(zip(self.running, self.tokens, strict=True)):
            text = RECORDED.replace('engine="0"', f'engine="{engine}"')
            text = re.sub(r"(?m)^(vllm:num_requests_running\S+) .*", rf"\1 {running}", text)
            found.append(re.sub(r"(?m)^(vllm:generation_tok\S+total\S+) .*", rf"\1 {tokens}", text))
        return "".join(found)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        self.say(self.server.metrics() if self.path == "/metrics" else "")

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked.append({**self.headers, "path": self.path})
        engine = int(self.headers.get("X-data-parallel-rank", 0))
        while engine in self.server.frozen:
            time.sleep(0.02)
        self.server.tokens[engine] += 1
        self.say("{}")

    def say(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        pass


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as found:
        yield found
        found.shutdown()


SYSTEMCTL = """#!/bin/sh
case "$1" in
    show) cat {root}/unit ;;
    kill) echo "$@" >> {root}/killed; kill -9 $(cat {group}/cgroup.procs) ;;
esac
"""


class Machine:
    """A node with one unit, whose process sleeps."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.group = root / "sys/fs/cgroup/system.slice" / UNIT
        for folder in ("var/lib/gpufleet/textfile", "var/lib/gpufleet/watchdog", "usr/bin", "etc"):
            (root / folder).mkdir(parents=True)
        for path in (self.group, root / "run/systemd/units", root / "run/vllm/tiny-0"):
            path.mkdir(parents=True)
        (root / "etc/key").write_text(KEY)
        unit = root / "etc/systemd/system" / UNIT
        unit.parent.mkdir(parents=True)
        unit.write_text("[Service]\nLoadCredential=api-key:/etc/key\n")
        systemctl = root / "usr/bin/systemctl"
        systemctl.write_text(SYSTEMCTL.format(root=root, group=self.group))
        systemctl.chmod(0o755)
        for command, does in (
            ("journalctl", f"echo served with {KEY}"),
            ("nvidia-smi", "echo none"),
        ):
            (root / "usr/bin" / command).write_text(f"#!/bin/sh\n{does}\n")
            (root / "usr/bin" / command).chmod(0o755)
        self.process = subprocess.Popen(
            ["/bin/sh", "-c", "sleep 600; :", "serve", "--api-key", KEY], start_new_session=True
        )
        (self.group / "cgroup.procs").write_text(f"{self.process.pid}\n")
        self.live("a1")

    def live(self, life: str) -> None:
        link = self.root / "run/systemd/units" / f"invocation:{UNIT}"
        link.unlink(missing_ok=True)
        link.symlink_to(life)
        self.says(InvocationID=life)

    def says(self, **properties: str) -> None:
        said = {"ActiveState": "active", "SubState": "running", "InvocationID": "a1"}
        said |= {"ControlGroup": f"/system.slice/{UNIT}", **properties}
        new = self.root / "unit.new"
        new.write_text("".join(f"{name}={said[name]}\n" for name in said))
        new.rename(self.root / "unit")  # systemctl may just be asked

    def metric(self, name: str) -> float:
        text = (self.root / "var/lib/gpufleet/textfile/watchdog.prom").read_text()
        (sample,) = (
            sample
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == f"gpufleet_watchdog_{name}"
        )
        return float(sample.value)

    def dumps(self) -> list[Path]:
        return sorted(self.root.glob("var/lib/gpufleet/dumps/tiny-0/*"))

    def killed(self) -> bool:
        return (self.root / "killed").exists()


@pytest.fixture
def node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setattr(linux_facts, "ROOT", str(tmp_path))
    monkeypatch.setattr("gpufleet.on_node.watchdog.watchdog.TURN_SECONDS", 0.05)
    monkeypatch.setattr(stage_watch, "CHECK_AGAIN_SECONDS", 0.1)
    found = Machine(tmp_path)
    yield found
    found.process.kill()
    found.process.wait()


def watched(*servers: str, **other: Any) -> Watchdog:
    stage = {
        "stage": "tiny-0",
        "unit": UNIT,
        "mode": "act",
        "seconds": SECONDS,
        "idle_seconds": 0,
        "servers": servers,
        "served_name": "tiny",
        "key_file": "/etc/key",
        "group": False,
        "rank": 0,
        "pins": True,
        "progress": [asdict(vllm.ENGINE.progress)],
        "py_spy": ["/no/py-spy"],
    }
    return Watchdog({"schema": 1, "stages": [stage | other]})


def until(watchdog: Watchdog, condition: Callable[[], bool], seconds: float = 30) -> float:
    """Turn the loop until something is so; return after how long."""
    begun = time.monotonic()
    while not condition():
        assert time.monotonic() < begun + seconds, "it never came"
        watchdog.step()
    return time.monotonic() - begun


def turns(watchdog: Watchdog, seconds: float) -> float:
    """Turn the loop for some time; return how long its longest step took."""
    longest, end = 0.0, time.monotonic() + seconds
    while (now := time.monotonic()) < end:
        watchdog.step()
        longest = max(longest, time.monotonic() - now)
    return longest


def ready(watchdog: Watchdog, life: str) -> bool:
    """Say whether the server of this life of the unit was ready, as far as the watchdog knows."""
    state = watchdog.stages[0].servers[0].state
    return state.ready and state.life == life


def freeze(watchdog: Watchdog, server: Server, engine: int = 0, work: int = 1) -> None:
    """Have it seen at work, then stop an engine."""
    server.running[engine] = work
    until(watchdog, lambda: watchdog.stages[0].servers[0].state.ready)
    turns(watchdog, 0.3)
    server.frozen.add(engine)


def test_warned_of_and_left_alone(node: Machine, server: Server) -> None:
    watchdog = watched(server.url, mode="warn")
    freeze(watchdog, server)
    assert SECONDS / 2 < until(watchdog, lambda: watchdog.stages[0].stalled) < SECONDS + 2
    turns(watchdog, 0.5)
    assert (node.metric("stalled"), node.metric("stalls_total")) == (1, 1)
    assert node.metric("restarts_total") == 0
    assert node.metric("idle_seconds") >= SECONDS
    assert not node.killed()
    assert node.dumps() == []
    server.frozen.clear()
    until(watchdog, lambda: not watchdog.stages[0].stalled)
    turns(watchdog, 0.2)
    assert (node.metric("stalled"), node.metric("stalls_total")) == (0, 1)


def test_dumped_killed_and_counted(
    node: Machine, server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    watchdog = watched(server.url)
    freeze(watchdog, server)
    until(watchdog, node.killed)
    assert node.process.wait(5) == -9
    assert (node.root / "killed").read_text() == f"kill --signal=SIGKILL -- {UNIT}\n"
    (dump,) = node.dumps()
    said = json.loads((dump / "stall.json").read_text())
    assert re.fullmatch(r"1 requests and no progress for \d+ s", said["why"])
    about = (dump / f"processes/{node.process.pid}.txt").read_text()
    assert "sleep 600" in about
    assert "State:\tS (sleeping)" in about
    assert "descriptors:" in about
    assert "vllm:generation_tokens_total" in (dump / "metrics.txt").read_text()
    assert "served with" in (dump / "journal.txt").read_text()
    text = "".join(path.read_text() for path in dump.rglob("*") if path.is_file())
    assert KEY not in text
    for path in [dump, *dump.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600)

    node.live("b2")
    server.frozen.clear()
    until(watchdog, lambda: ready(watchdog, "b2"))
    until(watchdog, lambda: node.metric("stalled") == 0)
    turns(watchdog, 0.5)
    assert (node.metric("stalled"), node.metric("restarts_total")) == (0, 1)
    # Counted on by the next watchdog, which knows that the server was ready.
    after = watched(server.url)
    assert (after.stages[0].stalls, after.stages[0].restarts) == (1, 1)
    assert after.stages[0].servers[0].state.ready
    said_aloud = capfd.readouterr().err
    assert f"dumped to {dump}" in said_aloud
    assert "SIGKILL to the whole of" in said_aloud
    assert KEY not in said_aloud


def test_who_stops_or_starts_is_no_stall(
    node: Machine, server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    """An operator's stop, its drain, a start: whatever does not move then."""
    watchdog = watched(server.url)
    freeze(watchdog, server)
    for properties, why in (
        ({"ActiveState": "deactivating", "SubState": "stop-sigterm"}, "deactivating (stop-sigterm"),
        ({"ActiveState": "inactive", "SubState": "dead"}, "inactive (dead)"),
        ({"ActiveState": "activating", "SubState": "auto-restart"}, "activating (auto-restart)"),
        ({"Job": "77"}, "systemd has a job for the unit"),
        ({"InvocationID": "b2"}, "was restarted"),
    ):
        node.says(**properties)
        until(watchdog, lambda why=why: why in capfd.readouterr().err)  # type: ignore[misc]
        turns(watchdog, 0.3)
    assert not node.killed()
    assert node.metric("stalls_total") == 0


def test_a_group_that_ends_or_drains_is_no_stall(
    node: Machine, server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    watchdog = watched(server.url, group=True)
    freeze(watchdog, server)
    until(watchdog, lambda: "the state of its rank cannot be read" in capfd.readouterr().err)
    for phase in ("draining", "ending", "waiting"):
        (node.root / "run/vllm/tiny-0/rank.json").write_text(json.dumps({"phase": phase}))
        until(watchdog, lambda phase=phase: f"is {phase}" in capfd.readouterr().err)  # type: ignore[misc]
        turns(watchdog, 0.3)
    assert not node.killed()
    assert node.metric("stalls_total") == 0


def test_of_a_replica_over_nodes_another_rank_than_the_head_waits_for_its_end(
    node: Machine, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stage_watch, "HOLD_SECONDS", 0.8)
    rank = node.root / "run/vllm/tiny-0/rank.json"
    rank.write_text('{"phase": "running"}')
    watchdog = watched(server.url, group=True, rank=1)
    freeze(watchdog, server)
    until(watchdog, lambda: watchdog.stages[0].step == "hold")
    rank.write_text('{"phase": "ending"}')  # the head was killed
    turns(watchdog, 1.5)
    assert not node.killed()
    rank.write_text('{"phase": "running"}')  # or was not: then it is this one's turn
    until(watchdog, node.killed)


def test_three_times_an_hour_are_enough(
    node: Machine, server: Server, capfd: pytest.CaptureFixture[str]
) -> None:
    state = node.root / "var/lib/gpufleet/watchdog/state.json"
    killed = [time.time() - 3000, time.time() - 60, time.time() + 1e6]  # a clock that was set back
    state.write_text(json.dumps({"schema": 1, "stages": {"tiny-0": {"killed": killed}}}))
    watchdog = watched(server.url)
    freeze(watchdog, server)
    until(watchdog, lambda: watchdog.stages[0].stalled)
    turns(watchdog, 0.5)
    assert not node.killed()
    assert "it was killed 3 times within 60 minutes" in capfd.readouterr().err
    # The first of them is forgotten.
    watchdog.stages[0].killed[0] = time.time() - 3601
    until(watchdog, node.killed)
    assert node.metric("stalls_total") == 1


def test_who_moves_again_during_the_dump_is_not_killed(node: Machine, server: Server) -> None:
    slow = node.root / "usr/bin/nvidia-smi"
    slow.write_text("#!/bin/sh\nsleep 0.7\n")
    watchdog = watched(server.url)
    freeze(watchdog, server)
    until(watchdog, lambda: watchdog.stages[0].step == "dump")
    server.frozen.clear()
    turns(watchdog, 2)
    assert not node.killed()
    assert node.metric("stalls_total") == 1


def test_a_dump_that_hangs_ends_at_its_deadline(
    node: Machine, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpufleet.on_node.watchdog.dump.SECONDS", 1)
    (node.root / "usr/bin/nvidia-smi").write_text("#!/bin/sh\nsleep 60\n")
    watchdog = watched(server.url)
    freeze(watchdog, server)
    until(watchdog, lambda: watchdog.stages[0].step == "dump")
    assert until(watchdog, node.killed) < 3
    assert (node.dumps()[0] / "stall.json").exists()


def test_a_watchdog_that_was_stopped_itself_counts_anew(
    node: Machine, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process was stopped, or the machine suspended: it knows nothing of that time."""
    monkeypatch.setattr(verdict, "PAUSE_SECONDS", 1.0)
    watchdog = watched(server.url, seconds=2.0)
    freeze(watchdog, server)
    time.sleep(3)
    turns(watchdog, 1)
    assert not watchdog.stages[0].stalled
    assert watchdog.stages[0].step == ""
    assert until(watchdog, lambda: watchdog.stages[0].stalled) > 0.5


def test_the_oldest_dumps_go(node: Machine) -> None:
    place = node.root / "var/lib/gpufleet/dumps"
    for number in range(9):
        assert make_room(str(place), "tiny-0") == ""
        (place / f"tiny-0/{number}").mkdir()
    assert [path.name for path in node.dumps()] == ["4", "5", "6", "7", "8"]


def test_frozen_while_idle_it_is_found_by_a_token_that_never_comes(
    node: Machine, server: Server
) -> None:
    watchdog = watched(server.url, idle_seconds=1)
    until(watchdog, lambda: len(server.asked) >= 2)
    assert server.asked[0]["Authorization"] == f"Bearer {KEY}"
    assert not watchdog.stages[0].stalled
    server.frozen.add(0)
    took = until(watchdog, lambda: watchdog.stages[0].stalled)
    assert took < 1 + SECONDS + 10
    assert b"num_requests_running" in watchdog.stages[0].servers[0].text
    assert server.running == [0]


@pytest.mark.parametrize(
    ("kind", "path"), [("embed", "/v1/embeddings"), ("transcribe", "/v1/audio/transcriptions")]
)
def test_an_idle_model_that_completes_no_text_is_asked_by_its_kind(
    node: Machine, server: Server, kind: str, path: str
) -> None:
    watchdog = watched(server.url, idle_seconds=1, kind=kind)
    until(watchdog, lambda: len(server.asked) >= 2)
    assert {each["path"] for each in server.asked} == {path}
    assert server.asked[0]["Authorization"] == f"Bearer {KEY}"
    server.frozen.add(0)
    until(watchdog, lambda: watchdog.stages[0].stalled)


def test_of_several_engines_the_frozen_one_is_found_working_or_idle(node: Machine) -> None:
    for work in (1, 0):
        with Server(engines=3) as server:
            server.running = [5, 5, work]
            watchdog = watched(server.url, mode="warn", idle_seconds=1)
            freeze(watchdog, server, engine=2, work=work)
            until(watchdog, lambda watchdog=watchdog: watchdog.stages[0].stalled)  # type: ignore[misc]
            assert watchdog.stages[0].servers[0].verdict.why.startswith("engine 2: ")
            server.shutdown()


def test_a_server_that_accepts_and_never_answers_blinds_nobody(
    node: Machine, server: Server
) -> None:
    """Both are found, and no turn of the loop waits for either."""
    with socket.create_server(("127.0.0.1", 0), backlog=50) as silent:
        watchdog = watched(f"http://127.0.0.1:{silent.getsockname()[1]}", server.url, mode="warn")
        server.running = [1]
        assert turns(watchdog, 0.7) < 0.5
        server.frozen.add(0)
        until(watchdog, lambda: watchdog.stages[0].stalled)
        assert watchdog.stages[0].servers[0].verdict.kind == "starting"  # it never was ready


def test_a_front_that_answers_no_more_is_a_stall(node: Machine) -> None:
    with Server() as server:
        watchdog = watched(server.url, mode="warn")
        until(watchdog, lambda: watchdog.stages[0].servers[0].state.ready)
        server.shutdown()  # it accepts, as a frozen process' socket does
        until(watchdog, lambda: watchdog.stages[0].stalled)
        assert "/metrics has not answered" in watchdog.stages[0].servers[0].verdict.why


def test_off_means_that_nobody_looks(node: Machine, server: Server) -> None:
    watchdog = watched(server.url, mode="off")
    turns(watchdog, 0.5)
    assert watchdog.stages[0].exchanges() == []
    assert node.metric("mode_info") == 1


# One request


def exchanged(
    answer: Callable[[socket.socket], None], seconds: float = 0.5
) -> tuple[Answer, float]:
    """Return what came of a request to a server that behaves like this, and after how long."""

    def serve() -> None:
        connection, _ = listening.accept()
        with connection:
            connection.recv(4096)
            with contextlib.suppress(OSError):
                answer(connection)

    with socket.create_server(("127.0.0.1", 0)) as listening:
        threading.Thread(target=serve, daemon=True).start()
        begun = time.monotonic()
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"
        exchange = Exchange(url, "/metrics", begun + seconds)
        while exchange.answer is None:
            turn = time.monotonic()
            exchange.advance(turn)
            assert time.monotonic() - turn < 0.5
            time.sleep(0.005)
        return exchange.answer, time.monotonic() - begun


def test_an_answer_arrives_whole() -> None:
    body = os.urandom(3_000_000)
    head = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body)
    answer, _ = exchanged(lambda to: to.sendall(head + body), seconds=10)
    assert (answer.status, answer.body == body) == (200, True)


def trickle(to: socket.socket) -> None:
    while True:
        to.sendall(b"H")
        time.sleep(0.05)


@pytest.mark.parametrize("behaves", [lambda _: time.sleep(3), trickle], ids=["silent", "trickles"])
def test_the_deadline_holds(behaves: Callable[[socket.socket], None]) -> None:
    answer, took = exchanged(behaves)
    assert answer.silent
    assert 0.4 < took < 1


@pytest.mark.parametrize(
    ("said", "why"),
    [
        (b"", "no HTTP"),
        (b"SSH-2.0-x\r\n\r\n", "no HTTP"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhalf", "the answer was cut off"),
    ],
)
def test_what_is_no_answer_is_none_and_says_why(said: bytes, why: str) -> None:
    answer, _ = exchanged(lambda to: to.sendall(said))
    assert (answer.status, answer.why, answer.silent) == (0, why, False)


def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    exchange = Exchange(f"http://127.0.0.1:{port}", "/", time.monotonic() + 5)
    exchange.advance(time.monotonic())
    assert exchange.answer == Answer(0, b"", exchange.answer.why, silent=False)  # type: ignore[union-attr]
