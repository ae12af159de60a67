"""Servers of one GPU start one after the other: real processes, real locks, servers that are small.

A server here writes `begins NAME` to a file, answers /health once a file `NAME.go` is there, and
then writes `answers NAME`: so a test decides how long a start takes.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpufleet.remote import payload

pytestmark = pytest.mark.timeout(240)

SERVER = """
import http.server, os, sys, time
name, port, folder = sys.argv[1], int(sys.argv[2]), sys.argv[3]
def note(text):
    file = os.open(folder + "/events", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.write(file, (text + "\\n").encode())
note("begins %s %d" % (name, os.getpid()))
while not os.path.exists(folder + "/" + name + ".go"):
    time.sleep(0.02)
while name.startswith("dripping"):  # a server that answers for ever, a byte at a time
    import socket
    listening = socket.create_server(("127.0.0.1", port))
    taken, _ = listening.accept()
    while True:
        taken.send(b"H")
        time.sleep(0.5)
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        note("answers " + name)
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", port), Health).serve_forever()
"""
PATIENCE = 60


class Gpu:
    """A GPU's folder, and what its servers wrote."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.program = folder / "vllm-gpu-turn"
        self.program.write_bytes(payload.archive("serving/gpu_turn"))
        self.server = folder / "server.py"
        self.server.write_text(SERVER)
        self.running: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, seconds: int = PATIENCE) -> subprocess.Popen[str]:
        """Start a server as its unit does."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        turn = [str(self.folder / "gpu"), name, f"http://127.0.0.1:{port}", str(seconds)]
        serve = [sys.executable, str(self.server), name, str(port), str(self.folder)]
        with (self.folder / f"{name}.log").open("a") as log:
            self.running[name] = subprocess.Popen(
                [sys.executable, "-I", str(self.program), *turn, *serve],
                stderr=log,
                text=True,
                start_new_session=True,
            )
        return self.running[name]

    def go(self, name: str) -> None:
        """Let a server become ready."""
        (self.folder / f"{name}.go").touch()

    def events(self, *kinds: str) -> list[str]:
        """Return what servers wrote, without pids, each once."""
        path = self.folder / "events"
        lines = path.read_text().splitlines() if path.exists() else []
        found = [" ".join(line.split()[:2]) for line in lines]
        return [each for each in dict.fromkeys(found) if not kinds or each.split()[0] in kinds]

    def said(self, name: str) -> str:
        return (self.folder / f"{name}.log").read_text()

    def until(self, holds: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE
        while not holds():
            assert time.monotonic() < deadline, f"not {what}: {self.events()}"
            time.sleep(0.05)

    def begun(self, name: str) -> None:
        self.until(lambda: f"begins {name}" in self.events(), f"{name} begins")

    def waits(self, name: str) -> None:
        self.until(lambda: "waits until" in self.said(name), f"{name} waits")

    def released(self, name: str) -> None:
        self.until(lambda: "the next server" in self.said(name), f"{name} has released")


@contextmanager
def _gpu(folder: Path) -> Iterator[Gpu]:
    found = Gpu(folder)
    try:
        yield found
    finally:
        for process in found.running.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


@pytest.fixture
def gpu(tmp_path: Path) -> Iterator[Gpu]:
    with _gpu(tmp_path) as found:
        yield found


def test_servers_that_start_at_once_begin_one_after_the_other(gpu: Gpu) -> None:
    names = ("chat-0", "embed-0", "rerank-0")
    for name in names:
        gpu.start(name)
        gpu.go(name)
    gpu.until(lambda: len(gpu.events("answers")) == len(names), "all answer")

    order = gpu.events()
    assert [each.split()[0] for each in order] == ["begins", "answers"] * len(names)
    assert all(
        one.split()[1] == other.split()[1]
        for one, other in zip(order[::2], order[1::2], strict=True)
    )


def test_the_server_is_the_process_that_the_unit_started(gpu: Gpu) -> None:
    process = gpu.start("chat-0")
    gpu.begun("chat-0")
    assert f"begins chat-0 {process.pid}\n" in (gpu.folder / "events").read_text()
    gpu.go("chat-0")
    gpu.released("chat-0")
    # The process that watched it leaves nothing behind that the server would have to wait for.
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    gpu.until(lambda: not children.read_text(), "without children")


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_server_that_ends_before_it_answers_makes_way(gpu: Gpu, how: signal.Signals) -> None:
    first = gpu.start("chat-0")
    gpu.begun("chat-0")
    gpu.start("embed-0")
    gpu.waits("embed-0")
    assert "waits until chat-0 has started" in gpu.said("embed-0")
    os.kill(first.pid, how)

    gpu.begun("embed-0")


def test_one_that_waits_for_its_turn_ends_at_once_if_it_is_stopped(gpu: Gpu) -> None:
    gpu.start("chat-0")
    gpu.begun("chat-0")
    second = gpu.start("embed-0")
    gpu.waits("embed-0")
    second.terminate()

    assert second.wait(PATIENCE) == -signal.SIGTERM
    assert "begins embed-0" not in gpu.events()


def test_a_server_that_never_answers_holds_the_others_up_for_its_deadline_only(gpu: Gpu) -> None:
    first = gpu.start("chat-0", seconds=1)
    gpu.begun("chat-0")
    gpu.start("embed-0")
    gpu.begun("embed-0")

    assert "does not answer after 1 s" in gpu.said("chat-0")
    assert first.poll() is None


def test_a_server_whose_answer_never_ends_holds_the_others_up_for_its_deadline_only(
    gpu: Gpu,
) -> None:
    gpu.start("dripping-0", seconds=1)
    gpu.go("dripping-0")
    gpu.begun("dripping-0")
    gpu.start("embed-0")
    gpu.waits("embed-0")

    gpu.begun("embed-0")


def test_a_server_that_measured_while_a_neighbour_ended_is_ended(gpu: Gpu) -> None:
    """What the neighbour freed it took for free memory of its own."""
    neighbour = gpu.start("chat-0")
    gpu.go("chat-0")
    gpu.released("chat-0")
    process = gpu.start("embed-0")
    gpu.begun("embed-0")
    neighbour.kill()
    neighbour.wait()
    gpu.go("embed-0")

    assert process.wait(PATIENCE) == -signal.SIGTERM
    assert "chat-0 ended while this server measured" in gpu.said("embed-0")
    # Alone, its next start is sound.
    again = gpu.start("embed-0")
    gpu.released("embed-0")
    assert again.poll() is None


def test_a_neighbour_that_ends_later_ends_no_other(gpu: Gpu) -> None:
    gpu.start("chat-0")
    gpu.go("chat-0")
    gpu.released("chat-0")
    process = gpu.start("embed-0")
    gpu.go("embed-0")
    gpu.released("embed-0")
    gpu.running["chat-0"].kill()
    gpu.running["chat-0"].wait()
    gpu.start("chat-0")
    gpu.until(lambda: gpu.said("chat-0").count("the next server") == 2, "chat-0 started again")

    assert process.poll() is None


def test_a_program_that_is_not_there_is_named(gpu: Gpu) -> None:
    done = subprocess.run(
        [sys.executable, "-I", str(gpu.program), str(gpu.folder / "gpu"), "a-0",
         "http://127.0.0.1:1", "5", "/nonexistent/vllm", "serve"],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip

    assert done.returncode == 1
    assert "cannot start /nonexistent/vllm" in done.stderr
    assert "Traceback" not in done.stderr
