"""
The ranks of a replica live and die together: real processes, each rank on a loopback address.

Where a test measures time it asserts the promise and not the usual figure: machines are busy.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from gpufleet.on_node.rank.mesh import Mesh
from gpufleet.on_node.rank.state import KILLED, State
from gpufleet.on_node.rank.wire import Link, LostError
from gpufleet.remote import payload

pytestmark = pytest.mark.slow

NODE_PYTHON = os.environ.get("GPUFLEET_NODE_PYTHON", sys.executable)
KEY = b"k" * 32
PORTS = itertools.count()

# What ranks run here: it says when it starts and ends, and does what vLLM's processes may do.
PROGRAM = """
import os, signal, socket, sys, time
log, name, *words = sys.argv[1:]
def say(what):
    with open(log, "a") as file:
        file.write("%s %s %d %.3f\\n" % (name, what, os.getpid(), time.time()))
def ended(*_):
    if "drains" in words:
        time.sleep(1)
    say("ended")
    os._exit(0)
signal.signal(signal.SIGTERM, signal.SIG_IGN if "deaf" in words else ended)
if "leaves" in words and not os.fork():
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    name += "-left"
    words = []
for word in words:
    if word.startswith("listen="):
        time.sleep(0.5)
        listener = socket.create_server(("", int(word[7:])))
    if word.startswith("exit="):
        sys.exit(int(word[5:]))
say("runs")
while True:
    time.sleep(100)
"""


class Fleet:
    """Ranks of one replica, started and killed as a test says; nothing survives the test."""

    silence = 2.0
    grace = 0.5

    count = itertools.count()

    def __init__(self, folder: Path, ranks: int = 2) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.port = free_ports()
        # Kept apart from what else a machine may have on its loopback.
        first = f"127.{29 + next(Fleet.count)}.{os.getpid() % 250}"
        self.addresses = [f"{first}.{rank + 1}" for rank in range(ranks)]
        self.ranks: dict[int, subprocess.Popen[bytes]] = {}
        self.processes: list[subprocess.Popen[bytes]] = []
        self.program = folder / "vllm-rank"
        self.program.write_bytes(payload.archive("rank/rank"))
        (folder / "program.py").write_text(PROGRAM)
        (folder / "cluster-key").write_bytes(KEY)
        (folder / "log").write_text("")

    def runs(self, name: str, *words: str) -> list[str]:
        """Return the words for a rank that runs the program above."""
        program, log = (str(self.folder / file) for file in ("program.py", "log"))
        return ["--", sys.executable, "-SE", program, log, name, *words]

    def start(
        self, rank: int, *words: str, stderr: int | None = None, **options: str
    ) -> subprocess.Popen[bytes]:
        """Start a rank's program, as systemd would; without words it runs `rank<N>`."""
        given = {
            "replica": "m-0",
            "rank": str(rank),
            "port": str(self.port),
            "state": str(self.folder / f"rank{rank}.json"),
            "silence-seconds": str(self.silence),
            "grace-seconds": str(self.grace),
            "key-file": str(self.folder / "cluster-key"),
            "same": "release=0.33.0",
            **{name.replace("_", "-"): value for name, value in options.items()},
        }
        argv = [NODE_PYTHON, "-IB", str(self.program)]
        argv += [word for name, value in given.items() for word in (f"--{name}", value)]
        for number, address in enumerate(self.addresses):
            argv += ["--node", f"gpu-0{number + 1}={address}"]
        with (self.folder / f"journal{rank}").open("ab") as journal:
            started = subprocess.Popen(
                [*argv, *(words or self.runs(f"rank{rank}"))],
                stderr=journal if stderr is None else stderr,
                stdout=journal,
            )
        self.ranks[rank] = started
        self.processes.append(started)
        return started

    def start_all(self, *, seconds: float = 30) -> None:
        """Start every rank and wait until all run."""
        for rank in range(len(self.addresses)):
            self.start(rank)
        self.wait_for_phase("running", seconds=seconds)

    def state(self, rank: int) -> dict:
        """Return a rank's state file; {} before there is one."""
        with contextlib.suppress(FileNotFoundError):
            return json.loads((self.folder / f"rank{rank}.json").read_text())
        return {}

    def journal(self, rank: int) -> str:
        return (self.folder / f"journal{rank}").read_text()

    def wait_for_phase(self, phase: str, *ranks: int, seconds: float = 30) -> None:
        for rank in ranks or range(len(self.addresses)):
            wait(lambda rank=rank: self.state(rank).get("phase") == phase, seconds, self.told)

    def told(self) -> str:
        return "\n".join(self.journal(rank) for rank in self.ranks)

    def events(self) -> list[tuple[str, str, int, float]]:
        """Return what programs said: name, `runs` or `ended`, process, when."""
        words = [line.split() for line in (self.folder / "log").read_text().splitlines()]
        return [(name, what, int(pid), float(at)) for name, what, pid, at in words]

    def pid(self, name: str) -> int:
        """Return the process of the newest program of that name."""
        wait(lambda: any(each[:2] == (name, "runs") for each in self.events()), 30, self.told)
        return [pid for each, what, pid, _ in self.events() if (each, what) == (name, "runs")][-1]

    def exit_status(self, rank: int, seconds: float = 30) -> int:
        try:
            return self.ranks[rank].wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(self.told())

    def close(self) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGKILL)
                process.wait()
        for _, what, pid, _ in self.events():
            if what == "runs" and alive(pid):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def fleet(tmp_path):
    fleet = Fleet(tmp_path)
    yield fleet
    fleet.close()


def free_ports() -> int:
    """Return the first of 16 ports that nobody listens on, below those that clients are given."""
    for port in range(20000 + (os.getpid() * 7 + next(PORTS)) * 64 % 9000, 30000, 64):
        with contextlib.suppress(OSError), socket.create_server(("", port)):
            return port
    raise AssertionError("no free port")


def wait(happened, seconds, told=lambda: ""):
    """Wait for something; return how long that took."""
    began = time.monotonic()
    while not happened():
        if time.monotonic() - began > seconds:
            pytest.fail(f"did not happen within {seconds} s:\n{told()}")
        time.sleep(0.02)
    return time.monotonic() - began


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state not in "ZX"
    return False


def begin(pid: int) -> int:
    """Return when a process was started, in ticks of the kernel."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


class Proxy:
    """Stands between a worker and the head; `cut` and `room` say what no longer passes."""

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        self.cut: set[str] = set()
        """Directions that lose everything: "to head", "to worker"."""
        self.room: dict[str, int] = {}
        """How many more bytes pass in a direction."""
        self.delay = 0.0
        self.port = fleet.port + 20
        self.listener = socket.create_server((fleet.addresses[0], self.port))
        self.open: list[socket.socket] = [self.listener]
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                worker, (address, _) = self.listener.accept()
                head = socket.socket()
                self.open += [worker, head]
                head.bind((address, 0))
                try:
                    head.connect((self.fleet.addresses[0], self.fleet.port))
                except OSError:
                    worker.close()
                    continue
                for name, one, other in (
                    ("to head", worker, head),
                    ("to worker", head, worker),
                ):
                    threading.Thread(
                        target=self.pass_on, args=(name, one, other), daemon=True
                    ).start()

    def pass_on(self, direction: str, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                data = data[: self.room.get(direction, len(data))]
                if direction in self.room:
                    self.room[direction] -= len(data)
                if data and direction not in self.cut:
                    time.sleep(self.delay)
                    other.sendall(data)
            if direction not in self.cut:
                other.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        for each in self.open:
            with contextlib.suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)  # `close` would leave it to whoever waits on it
            each.close()


@pytest.fixture
def proxy(fleet):
    proxy = Proxy(fleet)
    yield proxy
    proxy.close()


@pytest.fixture
def both(tmp_path, request):
    """A fleet for each direction between its two ranks, behind a proxy: fleet, proxy, direction."""
    room = getattr(request, "param", None)
    found = []
    for direction in ("to head", "to worker"):
        fleet = Fleet(tmp_path / direction.replace(" ", "-"))
        proxy = Proxy(fleet)
        if room is not None:
            proxy.room[direction] = room
        fleet.start(0)
        fleet.start(1, port=str(proxy.port))
        found.append((fleet, proxy, direction))
    yield found
    for fleet, proxy, _ in found:
        fleet.close()
        proxy.close()


# Together


def test_ranks_start_in_order_and_a_stop_drains_before_it_reaches_workers(fleet):
    """Workers start when the head listens; they end when the head's server has finished."""
    fleet.start(1, *fleet.runs("worker", "{master_port}", "{incarnation}"))
    wait(lambda: "waits for gpu-01" in str(fleet.state(1).get("why")), 20, fleet.told)
    head = fleet.runs("head", "listen={master_port}", "drains", '{"json": {}}')
    fleet.start(0, *head, ready_port="{master_port}")
    fleet.wait_for_phase("running")
    fleet.pid("worker")
    began = [name for name, *_ in fleet.events()]
    incarnation = fleet.state(0)["incarnation"]
    peer = fleet.state(0)["peers"]["gpu-02"]

    assert began == ["head", "worker"]
    assert fleet.state(1)["incarnation"]["id"] == incarnation["id"]
    assert peer["connected"]
    assert abs(peer["clock_offset_ms"]) < 1000
    argv = Path(f"/proc/{fleet.pid('worker')}/cmdline").read_text().split("\0")
    assert argv[-3:-1] == [str(incarnation["master_port"]), incarnation["id"]]

    fleet.ranks[0].send_signal(signal.SIGTERM)

    assert [fleet.exit_status(rank) for rank in (0, 1)] == [0, 0]
    assert [name for name, what, *_ in fleet.events() if what == "ended"] == ["head", "worker"]
    assert fleet.state(1)["last_end"]["why"] == "rank 0 on gpu-01 was stopped"
    assert fleet.state(1)["short_lives"] == 0


@pytest.mark.parametrize(
    ("victim", "why"),
    [
        pytest.param("head", "rank 0 on gpu-01 closed the connection", id="head"),
        pytest.param("worker", "rank 1 on gpu-02 closed the connection", id="worker"),
        pytest.param("rank0", r"rank 0 on gpu-01: \S+ ended by SIGKILL", id="program-of-head"),
        pytest.param("rank1", r"rank 1 on gpu-02: \S+ ended by SIGKILL", id="program-of-worker"),
    ],
)
def test_whatever_is_killed_the_others_are_gone_within_the_grace(fleet, victim, why):
    """Of the two ranks' programs, and of what they run, none outlives another."""
    fleet.start(0, *fleet.runs("rank0", "deaf"))
    fleet.start(1, *fleet.runs("rank1", "deaf"))
    fleet.wait_for_phase("running")
    programs = [fleet.pid("rank0"), fleet.pid("rank1")]
    tethers = {"head": fleet.ranks[0].pid, "worker": fleet.ranks[1].pid}
    os.kill(tethers.get(victim) or fleet.pid(victim), signal.SIGKILL)

    took = wait(lambda: not any(map(alive, programs)), 20, fleet.told)
    statuses = [fleet.exit_status(rank) for rank in (0, 1)]

    print(f"{victim} killed: all gone after {took:.2f} s")
    assert took < fleet.grace + 3
    assert statuses == [-9 if name == victim else 1 for name in ("head", "worker")]
    survivor = 1 if victim in ("head", "rank0") else 0
    assert re.search(why, fleet.state(survivor)["last_end"]["why"])


@pytest.mark.parametrize(
    ("silence", "grace"),
    [(2.0, 0.5), pytest.param(10.0, 5.0, id="as-installed", marks=pytest.mark.long)],
)
def test_a_frozen_rank_is_dead_within_the_bound_and_cannot_come_back(fleet, silence, grace):
    """
    Its node's successor forms a newer group, on other ports; thawed, it finds itself left behind
    and ends, and nobody is disturbed.
    """
    fleet.silence, fleet.grace = silence, grace
    fleet.start(0, *fleet.runs("rank0", "deaf"))
    fleet.start(1)
    fleet.wait_for_phase("running")
    first, frozen = fleet.state(0)["incarnation"], fleet.ranks[1]
    program, left = fleet.pid("rank0"), fleet.pid("rank1")
    frozen.send_signal(signal.SIGSTOP)

    took = wait(lambda: not alive(program), 30, fleet.told)

    print(f"frozen worker: head's program gone after {took:.2f} s")
    assert took < silence + grace + 1 + 2
    assert fleet.exit_status(0) == 1
    # Frozen before its first answer by UDP, on a busy machine, it is told that besides.
    why = fleet.state(0)["last_end"]["why"]
    assert why.startswith(f"rank 1 on gpu-02 has not answered for {silence:g} s")

    fleet.start(0)
    fleet.start(1, state=str(fleet.folder / "new.json"))
    fleet.wait_for_phase("running", 0)
    second = fleet.state(0)["incarnation"]
    frozen.send_signal(signal.SIGCONT)

    assert frozen.wait(20) == 1
    assert not alive(left)
    assert second["counter"] == first["counter"] + 1
    assert second["master_port"] != first["master_port"]
    assert second["rpc_port"] != first["rpc_port"]
    assert fleet.state(0)["incarnation"] == second
    assert fleet.state(0)["phase"] == "running"


def test_a_journal_that_takes_nothing_holds_nobody_up(fleet):
    """Its disk may stall while a peer dies: the end goes on without a word."""
    reader, writer = os.pipe()
    fleet.start(0, stderr=writer)
    fleet.start(1)
    fleet.wait_for_phase("running")
    program = fleet.pid("rank0")
    os.set_blocking(writer, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(writer, b"x")
    os.set_blocking(writer, True)
    fleet.ranks[1].send_signal(signal.SIGKILL)

    assert fleet.exit_status(0) == 1
    assert not alive(program)
    assert fleet.state(0)["last_end"]["why"] == "rank 1 on gpu-02 closed the connection"
    for end in (reader, writer):
        os.close(end)


def test_a_cut_of_either_direction_ends_both_sides(both):
    """Each side counts answers, not what it hears."""
    for fleet, _, _ in both:
        fleet.wait_for_phase("running")
        fleet.pid("rank0")
        fleet.pid("rank1")
    began = time.monotonic()
    for _, proxy, direction in both:
        proxy.cut.add(direction)

    for fleet, _, direction in both:
        programs = [fleet.pid("rank0"), fleet.pid("rank1")]
        wait(lambda programs=programs: not any(map(alive, programs)), 20, fleet.told)
        took = time.monotonic() - began
        print(f"cut {direction}: both gone after {took:.2f} s")
        assert took < fleet.silence + fleet.grace + 3
        assert [fleet.exit_status(rank) for rank in (0, 1)] == [1, 1]
        # Datagrams do not pass the proxy, and never did: without them a bad line is a dead one.
        ends = [fleet.state(rank)["last_end"]["why"] for rank in (0, 1)]
        assert any("and never by UDP port" in why for why in ends)


def test_forty_datagrams_are_sent_within_each_silence(fleet):
    """As many as it takes on a line that loses 30 %, also by a rank that has nothing else to do."""
    with socket.socket(type=socket.SOCK_DGRAM) as peer:
        peer.bind((fleet.addresses[1], fleet.port))
        peer.settimeout(20)
        fleet.start(0)
        peer.recv(2000)
        until = time.monotonic() + fleet.silence
        count = 0
        while time.monotonic() < until:
            peer.recv(2000)
            count += 1

    assert 16 < count <= 41


class Relay:
    """Carries the datagrams between ranks 1 and 2, of which rank 2 uses the proxy's port."""

    def __init__(self, fleet: Fleet, proxy: Proxy) -> None:
        one, two = fleet.addresses[1], fleet.addresses[2]
        self.cut = False
        self.sockets = [socket.socket(type=socket.SOCK_DGRAM) for _ in range(2)]
        self.sockets[0].bind((one, proxy.port))
        self.sockets[1].bind((two, fleet.port))
        self.to = [(two, proxy.port), (one, fleet.port)]
        threading.Thread(target=self.serve, daemon=True).start()

    def serve(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while True:
                for ready in select.select(self.sockets, [], [], 0.5)[0]:
                    data = ready.recv(2000)
                    # What came to one rank's address leaves from the other's.
                    side = 1 - self.sockets.index(ready)
                    if not self.cut:
                        self.sockets[side].sendto(data, self.to[side])

    def close(self) -> None:
        for each in self.sockets:
            each.close()


def test_workers_that_are_cut_apart_end_the_group_although_the_head_reaches_both(tmp_path):
    """Nor does one begin before all reach each other."""
    fleet = Fleet(tmp_path, ranks=3)
    proxy = Proxy(fleet)
    try:
        fleet.start(0)
        fleet.start(1)
        fleet.start(2, port=str(proxy.port))
        apart = f"waits for gpu-02 (does not reach gpu-03, UDP port {fleet.port}), gpu-03 (does"
        wait(lambda: apart in fleet.state(0).get("why", ""), 20, fleet.told)

        relay = Relay(fleet, proxy)
        fleet.wait_for_phase("running")
        programs = [fleet.pid(f"rank{rank}") for rank in range(3)]
        relay.cut = True
        took = wait(lambda: not any(map(alive, programs)), 20, fleet.told)
        relay.close()

        print(f"workers cut apart: all gone after {took:.2f} s")
        assert took < fleet.silence + 2 + fleet.grace + 3
        assert [fleet.exit_status(rank) for rank in range(3)] == [1, 1, 1]
        assert "do not reach each other" in fleet.state(0)["last_end"]["why"]
    finally:
        fleet.close()
        proxy.close()


def test_a_slow_line_is_no_dead_one(fleet, proxy):
    """200 ms each way, for longer than a peer may be silent."""
    fleet.start(0)
    fleet.start(1, port=str(proxy.port))
    fleet.wait_for_phase("running")
    proxy.delay = 0.2
    time.sleep(fleet.silence + 1)

    assert [fleet.state(rank)["phase"] for rank in (0, 1)] == ["running", "running"]


def test_a_worker_that_is_stopped_takes_the_group_along(fleet):
    """The head drains first; the reason is told everywhere; a stop is no failure."""
    fleet.start(0, *fleet.runs("rank0", "drains"))
    fleet.start(1)
    fleet.wait_for_phase("running")
    fleet.pid("rank0")
    fleet.pid("rank1")
    fleet.ranks[1].send_signal(signal.SIGTERM)

    assert [fleet.exit_status(rank) for rank in (0, 1)] == [0, 0]
    assert [name for name, what, *_ in fleet.events() if what == "ended"] == ["rank0", "rank1"]
    for rank in (0, 1):
        end = fleet.state(rank)["last_end"]
        assert (end["why"], end["rank"], end["node"]) == (
            "rank 1 on gpu-02 was stopped",
            1,
            "gpu-02",
        )


def test_workers_that_serve_finish_their_requests_too(fleet):
    """Every node has a server (hybrid and external balancing): the end waits for all of them."""
    fleet.start(0)
    # A drain takes a second, twice the grace: nobody cuts it short.
    fleet.start(1, "--serves", *fleet.runs("rank1", "drains"))
    fleet.wait_for_phase("running")
    fleet.pid("rank0")
    fleet.pid("rank1")
    fleet.ranks[0].send_signal(signal.SIGTERM)

    assert [fleet.exit_status(rank) for rank in (0, 1)] == [0, 0]
    assert [name for name, what, *_ in fleet.events() if what == "ended"] == ["rank0", "rank1"]


def test_a_drain_has_a_limit(fleet):
    fleet.start(0, *fleet.runs("rank0", "deaf"), drain_seconds="0.5")
    fleet.start(1)
    fleet.wait_for_phase("running")
    fleet.pid("rank0")
    fleet.ranks[0].send_signal(signal.SIGTERM)

    assert [fleet.exit_status(rank) for rank in (0, 1)] == [0, 0]
    assert "no more draining: it took longer than 0.5 s" in fleet.journal(0)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_drain_does_not_wait_for_what_was_killed(fleet, rank):
    """Its requests would hang for the whole of the time that a drain may take; Ray's head too."""
    fleet.start(0, *fleet.runs("rank0"), *fleet.runs("server", "deaf"), drain_seconds="60")
    fleet.start(1)
    fleet.wait_for_phase("running")
    fleet.pid("server")
    victim = fleet.pid(f"rank{rank}")
    fleet.ranks[0].send_signal(signal.SIGTERM)
    fleet.wait_for_phase("draining")
    os.kill(victim, signal.SIGKILL)
    began = time.monotonic()

    assert [fleet.exit_status(each) for each in (0, 1)] == [0, 0]
    assert time.monotonic() - began < 2 * fleet.grace + 3
    assert re.search(rf"no more draining: rank {rank} .* ended by SIGKILL", fleet.journal(0))


def test_systemd_hears_that_a_rank_lives(fleet, monkeypatch):
    """With WatchdogSec= it ends a frozen one; `systemctl status` shows whom a rank waits for."""
    path = str(fleet.folder / "notify")
    monkeypatch.setenv("NOTIFY_SOCKET", path)
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as systemd:
        systemd.bind(path)
        systemd.settimeout(20)
        fleet.start(0)
        said = [systemd.recv(1000).decode() for _ in range(2)]

    assert said[1] == "WATCHDOG=1\nSTATUS=waiting waits for gpu-02"


def test_nothing_that_a_program_started_is_left(fleet):
    """Also what left its process group and takes no SIGTERM, as Ray's processes may."""
    fleet.start(0)
    fleet.start(1, *fleet.runs("rank1", "leaves"))
    fleet.wait_for_phase("running")
    left = fleet.pid("rank1-left")
    os.kill(fleet.pid("rank0"), signal.SIGKILL)

    assert fleet.exit_status(1) == 1
    assert not alive(left)


def test_further_programs_of_the_head_start_when_the_workers_are_ready(fleet):
    """Ray's head, then Ray on the workers, then the server that counts the nodes it finds."""
    fleet.start(
        0, *fleet.runs("ray", "listen={rpc_port}"), *fleet.runs("server"), ready_port="{rpc_port}"
    )
    fleet.start(1, *fleet.runs("rank1", "listen={master_port}"), ready_port="{master_port}")
    fleet.wait_for_phase("running")
    fleet.pid("server")

    # A program says so behind its port's opening, which takes half a second here.
    assert [name for name, *_ in fleet.events()] == ["ray", "rank1", "server"]


def test_a_worker_that_never_becomes_ready_ends_the_group(fleet):
    fleet.start(0)
    fleet.start(1, ready_port="{rpc_port}", start_seconds="0.5")

    assert [fleet.exit_status(rank) for rank in (0, 1)] == [1, 1]
    assert "rank 1 on gpu-02: no program listened on port" in fleet.state(0)["last_end"]["why"]


def test_a_program_with_wrong_arguments_is_not_started_forever(fleet):
    """vLLM exits with 2 for a bad flag: so do we, and systemd leaves it; the others wait."""
    fleet.start(0)
    fleet.start(1, *fleet.runs("rank1", "exit=2"))

    assert [fleet.exit_status(rank) for rank in (0, 1)] == [1, 2]
    assert "ended with status 2" in fleet.state(0)["last_end"]["why"]


@pytest.mark.parametrize(
    ("missing", "status"), [(True, 2), pytest.param(False, 1, id="busy-for-a-moment")]
)
def test_what_cannot_be_started_is_given_up_only_if_that_is_for_good(fleet, missing, status):
    """A node that was short of processes or memory for a moment comes back by itself."""
    program = fleet.folder / "busy"
    if not missing:
        program.write_bytes(Path("/bin/sleep").read_bytes())
        program.chmod(0o755)
    fleet.start(0)
    # What is open for writing cannot be executed (ETXTBSY).
    with contextlib.nullcontext() if missing else program.open("ab"):
        fleet.start(1, "--", str(program), "100")

        assert fleet.exit_status(1) == status
    assert "cannot start" in fleet.state(1)["last_end"]["why"]


def test_only_who_is_missing_is_waited_for(tmp_path):
    """Of many ranks one is not there: those that miss it, too, are not named with it."""
    fleet = Fleet(tmp_path, ranks=3)
    try:
        fleet.start(0)
        fleet.start(1)
        wait(lambda: fleet.state(0).get("why") == "waits for gpu-03", 20, fleet.told)
        fleet.start(2)
        fleet.wait_for_phase("running")
    finally:
        fleet.close()


# Who may join


def test_ranks_that_differ_are_refused_until_they_are_alike(fleet):
    """The sentence names both sides; nobody has to restart the rank that was right."""
    fleet.start(0, same="release=0.33.0")
    old = fleet.start(1, same="release=0.32.0")
    fleet.wait_for_phase("refused", 1)

    assert fleet.state(1)["why"] == "release: gpu-01 has 0.33.0, gpu-02 has 0.32.0"
    wait(lambda: "0.32.0" in fleet.state(0)["why"], 10, fleet.told)
    assert fleet.events() == []

    old.send_signal(signal.SIGTERM)
    assert fleet.exit_status(1) == 0
    fleet.start(1)
    fleet.wait_for_phase("running")


def test_a_rank_with_another_key_does_not_get_in(fleet):
    """Both sides say what it looks like from theirs."""
    (fleet.folder / "other-key").write_bytes(b"o" * 32)
    fleet.start(0)
    fleet.start(1, key_file=str(fleet.folder / "other-key"))

    wait(lambda: "do both have the same cluster key?" in fleet.journal(1), 20, fleet.told)
    wait(lambda: "has another cluster key" in fleet.journal(0), 20, fleet.told)
    assert fleet.state(0)["phase"] == "waiting"
    assert fleet.events() == []


def test_strangers_cost_nothing(fleet):
    """Neither those from elsewhere nor the silent and the loud from a peer keep ranks out."""
    fleet.start(0)
    head = (fleet.addresses[0], fleet.port)
    wait(lambda: connects(head), 20, fleet.told)
    elsewhere = socket.create_connection(head)
    loud = socket.create_connection(head, source_address=(fleet.addresses[1], 0))
    loud.sendall(b"GET / HTTP/1.1\r\n\r\n")
    silent = [
        socket.create_connection(head, source_address=(fleet.addresses[1], 0)) for _ in range(40)
    ]

    assert closed(elsewhere)
    assert closed(loud)
    fleet.start(1)
    fleet.wait_for_phase("running")
    for each in silent:
        each.close()


def test_a_message_of_another_incarnation_ends_the_group(fleet):
    """Whoever has the key and speaks for an older group is no part of this one."""
    fleet.start(0)
    link = joined(fleet)
    link.incarnation = "an older one"
    link.send("formed")
    link.flush()

    assert fleet.exit_status(0) == 1
    assert "is of incarnation an older one" in fleet.journal(0)
    assert fleet.events() == []


def test_a_rank_that_was_started_anew_ends_the_group(fleet):
    """Its node came back before anybody missed it: the old connection still looks alive."""
    fleet.start(0)
    first = joined(fleet)
    first.bound = True
    first.send("formed")
    first.flush()
    fleet.pid("rank0")
    second = dial(fleet)
    pump(second, lambda messages: any(each["kind"] == "over" for each in messages))

    assert fleet.exit_status(0) == 1
    assert fleet.state(0)["last_end"]["why"] == "rank 1 on gpu-02: it was restarted"


@pytest.mark.parametrize("both", [20_000], indirect=True, ids=["bytes"])
def test_a_path_that_loses_large_messages_is_found_before_the_start(both):
    """Small ones pass where MTUs differ: the ranks would meet, and hang in the first collective."""
    for fleet, _, direction in both:
        wait(lambda fleet=fleet: "same MTU" in fleet.state(0).get("why", ""), 20, fleet.told)
        ends = [f"gpu-0{each + 1} ({fleet.addresses[each]})" for each in (0, 1)]
        one, other = ends if direction == "to worker" else ends[::-1]

        assert f"messages of 64 KiB from {one} to {other}" in fleet.state(0)["why"]
        assert fleet.events() == []


def connects(address) -> bool:
    with contextlib.suppress(OSError), socket.create_connection(address):
        return True
    return False


def closed(connection: socket.socket) -> bool:
    """Say whether the other side has closed within a few seconds."""
    connection.settimeout(10)
    with contextlib.suppress(ConnectionError):
        return connection.recv(1000) == b""
    return True


def dial(fleet: Fleet) -> Link:
    """Return rank 1's link to the head, with its hello sent, made by hand."""
    head = (fleet.addresses[0], fleet.port)
    wait(lambda: connects(head), 20, fleet.told)
    connection = socket.create_connection(head, source_address=(fleet.addresses[1], 0))
    link = Link(connection, KEY, head=False, beat=fleet.silence / 10)
    same = {
        "release": "0.33.0",
        "the nodes of the replica": ", ".join(
            f"gpu-0{rank + 1}={address}" for rank, address in enumerate(fleet.addresses)
        ),
        "silence": f"{fleet.silence:g} s",
    }
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    link.send("hello", replica="m-0", rank=1, same=same, counter=0, boot_id=boot_id)
    return link


def joined(fleet: Fleet) -> Link:
    """Return rank 1's link after it was told to form a group."""
    link = dial(fleet)

    def act(messages):
        for message in messages:
            if message["kind"] == "large":
                link.send("got")
                link.send("large")
                link.send("reach", missing=[])
            if message["kind"] == "form":
                link.incarnation = message["incarnation"]
        return link.incarnation is not None

    pump(link, act)
    return link


def pump(link: Link, done) -> None:
    """Keep a link alive until `done(messages)`."""
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            link.pulse(time.monotonic())
            link.flush()
            select.select([link], [], [], 0.05)
            if done(link.receive()):
                return
        except LostError:
            return
    pytest.fail("nothing came of it")


# Frames


@pytest.fixture
def links():
    """The two sides of one connection, past their greetings."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    head = Link(accepted, KEY, head=True, beat=1)
    worker = Link(connection, KEY, head=False, beat=1)
    for one, other in ((worker, head), (head, worker)):
        one.flush()
        time.sleep(0.05)
        assert list(other.receive()) == []
    yield head, worker
    head.socket.close()
    worker.socket.close()


def frame(link: Link, **content) -> bytes:
    """Return a frame that a link would send, without sending it."""
    link.send("word", **content)
    taken, link._unsent = bytes(link._unsent), bytearray()
    return taken


def taken(link: Link, data: bytes):
    link._received += data
    return [message["number"] for message in link._taken()]


def test_frames_are_taken_in_order_and_once(links):
    head, worker = links
    one, two = frame(worker, number=1), frame(worker, number=2)

    assert taken(head, one + two[:10]) == [1]
    assert taken(head, two[10:]) == [2]
    with pytest.raises(LostError, match="out of order, or altered"):
        taken(head, two)


def test_a_frame_is_not_taken_by_the_side_that_sent_it(links):
    _, worker = links

    with pytest.raises(LostError, match="another cluster key"):
        taken(worker, frame(worker, number=1))


def test_one_changed_bit_is_noticed(links):
    head, worker = links
    changed = bytearray(frame(worker, number=1))
    changed[-2] ^= 1

    with pytest.raises(LostError, match="another cluster key"):
        taken(head, bytes(changed))


def test_a_stranger_cannot_make_us_keep_much(links):
    """A length beyond what a hello needs is refused before any of it is waited for."""
    head, _ = links

    with pytest.raises(LostError, match="frame of 1000000 bytes"):
        taken(head, (1_000_000).to_bytes(4, "big") + bytes(32))


# Datagrams


class Two:
    """Two ranks' datagrams on the loopback; `beat` sends and takes as the ranks' loops do."""

    def __init__(self) -> None:
        self.port = free_ports()
        self.addresses = {rank: f"127.99.{os.getpid() % 250}.{rank + 1}" for rank in (0, 1)}
        self.now = 0.0
        self.meshes = [self.mesh(0), self.mesh(1)]

    def mesh(self, rank: int) -> Mesh:
        others = {1 - rank: self.addresses[1 - rank]}
        return Mesh(rank, self.addresses[rank], self.port, others, key=KEY, silence=1)

    def beat(self, times: int = 4) -> None:
        for _ in range(times):
            self.now += 1
            for mesh in self.meshes:
                mesh.pulse(self.now)

    def renew(self) -> None:
        """Start rank 1 anew."""
        self.meshes[1].close()
        self.meshes[1] = self.mesh(1)

    def recorded(self) -> bytes:
        """Return what rank 1 sends next, without sending it."""
        mesh = self.meshes[1]
        body = json.dumps([1, 0, mesh._session, mesh._number + 1, mesh._heard.get(0)]).encode()
        return mesh._mac(body) + body

    def replay(self, data: bytes) -> None:
        """Send rank 0 what was recorded, from another port of rank 1's node."""
        with socket.socket(type=socket.SOCK_DGRAM) as sender:
            sender.bind((self.addresses[1], 0))
            sender.sendto(data, (self.addresses[0], self.port))
        self.meshes[0].pulse(self.now)


@pytest.fixture
def two():
    two = Two()
    yield two
    for mesh in two.meshes:
        mesh.close()


def test_a_recording_of_an_older_process_is_not_taken_for_the_rank(two):
    """Neither for one that began anew, nor at the moment when a group forms."""
    two.beat()
    older = two.recorded()
    two.renew()
    two.beat()
    two.replay(older)
    two.meshes[0].pin()
    formed = two.now
    two.beat()

    assert two.meshes[0].answered[1] > formed


def test_a_process_that_began_anew_is_taken_for_the_rank_until_a_group_forms(two):
    two.beat()
    two.renew()
    began = two.now
    two.beat()

    assert two.meshes[0].answered[1] > began

    two.meshes[0].pin()
    two.renew()
    formed = two.now
    two.beat()

    assert two.meshes[0].answered[1] <= formed


def test_datagrams_of_another_protocol_are_not_read(two, monkeypatch):
    """A node that was not deployed yet sends others; its rank is refused in words, by TCP."""
    monkeypatch.setattr("gpufleet.on_node.rank.mesh.MAGIC", b"gpufleet rank 0\n")
    two.renew()
    monkeypatch.undo()
    two.beat()

    assert two.meshes[0].answered[1] == float("-inf")
    assert two.meshes[0]._heard == {}


# The state file


def test_the_pause_grows_with_lives_that_were_short(tmp_path):
    """The first failure costs nothing, ten in a row five minutes each; a long life forgives."""
    pauses = []
    for counter in range(1, 11):
        state = State(str(tmp_path / "rank.json"), "m-0", 0, "gpu-01")
        state.begin_incarnation({"id": "x", "counter": counter, "master_port": 1, "rpc_port": 2})
        state.end("it failed", 1, "gpu-02")
        state.write(0)
        pauses.append(state.pause_seconds())

    assert pauses == [0, 10, 20, 40, 80, 160, 300, 300, 300, 300]
    state.begin_incarnation({"id": "x", "counter": 11, "master_port": 1, "rpc_port": 2})
    state.document["incarnation"]["since"] -= 3600
    state.end("it failed", 1, "gpu-02")
    assert (state.pause_seconds(), state.pause_left()) == (0, 0)


def test_a_clock_that_was_set_back_does_not_lengthen_the_pause(tmp_path):
    state = State(str(tmp_path / "rank.json"), "m-0", 0, "gpu-01")
    state.document["short_lives"] = 2
    state.document["last_end"] = {"when": time.time() + 7200}

    assert state.pause_left() <= 10
    assert state.document["last_end"]["when"] <= time.time()


def test_a_program_that_was_killed_left_an_end_behind(tmp_path):
    """Nobody wrote it: the next program finds an incarnation in the file, and says so."""
    path = str(tmp_path / "rank.json")
    state = State(path, "m-0", 1, "gpu-02")
    state.begin_incarnation({"id": "x", "counter": 7, "master_port": 1, "rpc_port": 2})
    state.write(0)
    after = State(path, "m-0", 1, "gpu-02")

    assert after.document["last_end"]["why"] == KILLED
    assert after.document["incarnation"] is None
    assert after.counter == 7


@pytest.mark.parametrize("content", ["", "[]", "{", '{"counter": "x", "last_end": 3}'])
def test_a_broken_state_file_is_no_reason_not_to_start(tmp_path, content):
    path = tmp_path / "rank.json"
    path.write_text(content)
    state = State(str(path), "m-0", 0, "gpu-01")

    assert (state.counter, state.pause_left()) == (0, 0)


# The installed file


def test_the_installed_file_is_the_same_everywhere_and_needs_nothing(fleet):
    """Two builds are the same bytes; it runs in isolation, and says what is wrong with words."""
    payload.archive.cache_clear()
    assert payload.archive("rank/rank") == fleet.program.read_bytes()
    wrong = fleet.start(0, "--", "true", port="65530")

    assert wrong.wait(20) == 2
    assert "--port: all 16 ports from it on must be valid" in fleet.journal(0)


def test_a_key_that_is_none_is_refused(fleet):
    (fleet.folder / "cluster-key").write_text("short\n")
    fleet.start(0)

    assert fleet.exit_status(0) == 2
    assert "has 5 bytes, at least 32 are wanted" in fleet.journal(0)
