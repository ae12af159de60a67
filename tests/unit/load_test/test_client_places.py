"""Clients on a node: the same numbers as here, no clock in common, and nothing that stays there."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median

import gevent
import gevent.event
import pytest

from gpufleet.errors import FleetError
from gpufleet.load_test import client_places
from gpufleet.load_test.arrivals import Poisson
from gpufleet.load_test.client_ceiling import measure_ceiling
from gpufleet.load_test.client_places import ClientPlace, NodeClients, this_machine
from gpufleet.load_test.client_process import run_level
from gpufleet.load_test.client_transport import Link
from gpufleet.load_test.outcomes import Outcome
from gpufleet.load_test.workloads import text_work
from gpufleet.on_node.load.client_group import GREETING
from gpufleet.remote import payload
from gpufleet.remote.channel import Streams, local_command
from gpufleet.remote.payload import Payload
from gpufleet.remote.session import COMMAND, LOADER
from tests.support.checkout import ROOT
from tests.support.queue_server import QueueServer
from tests.support.rows import each_row
from tests.unit.load_test.test_client_process import KEY, is_over, spec

READY = f'\n{GREETING}\nready 0 11\n{{"cores":2}}'.encode()


@contextmanager
def node_clients(before: str = "") -> Iterator[NodeClients]:
    """Start clients as on a node, where they run behind a login shell."""
    with local_command(before + COMMAND) as streams:
        clients = NodeClients("load-01", streams)
        try:
            yield clients
        finally:
            clients.close()


def processes_of(text: str) -> list[int]:
    """Return the processes that began with a text in their environment."""
    found = []
    for about in Path("/proc").glob("[0-9]*"):
        try:
            if text.encode() in about.joinpath("environ").read_bytes():
                found.append(int(about.name))
        except OSError:
            continue
    return sorted(found)


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """A variable that all processes of this test's node have, and no other."""
    text = f"OF_TEST={time.monotonic_ns()}"
    monkeypatch.setenv(*text.split("="))
    return text


def children(mark: str) -> list[int]:
    """Return the processes on the node: not this one, which began before."""
    return [pid for pid in processes_of(mark) if pid != os.getpid()]


def test_clients_on_a_node_see_what_the_server_did() -> None:
    outcomes: list[Outcome] = []
    with (
        QueueServer(slots=64, first_seconds=0.05, token_seconds=0.02, key=KEY) as server,
        node_clients() as clients,
    ):
        load = spec(server.url, Poisson(50.0))
        run = run_level(
            load, 2, outcomes.append, lambda now, _: now >= 1.5, transport=clients.start
        )
        assert run.ended == "decided"
        assert run.sent == len(server.record) == len(outcomes)
    assert {each.error for each in outcomes} == {""}
    assert median(each.ttft or 9.0 for each in outcomes) == pytest.approx(0.05, abs=0.03)
    gaps = [gap for each in outcomes for gap in each.gaps]
    assert median(gaps) == pytest.approx(0.02, abs=0.01)


def test_latencies_need_no_clock_in_common() -> None:
    """The node's clocks are 11 days ahead: all times are differences of its own monotonic clock."""
    shift = "import time; m = time.monotonic; time.monotonic = lambda: m() + 950400\n"
    shift += "w = time.time; time.time = lambda: w() - 950400\n"
    outcomes: list[Outcome] = []
    with QueueServer(slots=64, first_seconds=0.05, key=KEY) as server, node_clients() as clients:

        def start(program: Payload) -> Link:
            return clients.start(Payload(shift + program.encode().decode()))

        load = spec(server.url, Poisson(50.0))
        began = time.monotonic()
        run = run_level(load, 1, outcomes.append, lambda now, _: now >= 1.5, transport=start)
        assert 1.4 < run.seconds < time.monotonic() - began
    assert len(outcomes) > 30
    assert max(each.done or 0.0 for each in outcomes) < 10
    assert median(each.ttft or 9.0 for each in outcomes) == pytest.approx(0.05, abs=0.03)


def test_the_ceiling_is_that_of_the_clients_there() -> None:
    with node_clients() as clients:
        place = clients.place(serves=False)
        assert (place.name, place.cores) == ("load-01", len(os.sched_getaffinity(0)))
        found = measure_ceiling(1, text_work(64, 16), seconds=2.0, cores=64,
                        transport=place.transport)  # fmt: skip
    assert found.cores == 64
    assert found.requests_per_second > 5
    assert 0 < found.cpu_seconds < 0.05


def test_the_key_is_in_no_argument_environment_or_file_and_ends_leave_no_process(mark: str) -> None:
    with QueueServer(first_seconds=30.0, key=KEY) as server:
        seen: list[int] = []
        environments: set[bytes] = set()

        def look(_now: float, _due: object) -> bool:
            for pid in children(mark):
                seen.append(pid)
                about = Path(f"/proc/{pid}")
                words = (about / "cmdline").read_text().split("\0")
                assert words[1:] == ["-IS", "-c", LOADER, ""]
                # The same as of the process that starts them, which began before there was a key.
                environments.add((about / "environ").read_bytes())
                opened = [str(each.readlink()) for each in (about / "fd").iterdir()]
                assert not [e for e in opened if e[0] == "/" and not e.startswith("/dev/")]
            return True

        with node_clients() as clients:
            run_level(
                spec(server.url, Poisson(40.0), drain_seconds=0.0), 2, lambda _: None, look,
                transport=clients.start,
            )  # fmt: skip
        assert len(set(seen)) >= 3, "two clients, and what started them"
        assert len(environments) == 1
        assert all(is_over(pid, 3.0) for pid in set(seen))


CONTROLLER = """
import sys
sys.path.insert(0, {source!r})
from gevent import monkey
monkey.patch_all()
from gpufleet.load_test.arrivals import Poisson
from gpufleet.load_test.client_places import NodeClients
from gpufleet.load_test.client_process import LoadSpec, run_level
from gpufleet.load_test.workloads import TokenRange, Workload, fixed_length
from gpufleet.remote.channel import local_command
from gpufleet.remote.session import COMMAND

def decide(now, in_flight):
    print("look", len(in_flight), flush=True)
    return False

work = Workload("small", fixed_length(20), fixed_length(3), "")
requests = work.requests("stand-in", TokenRange(1000, 9000), "salt")
load = LoadSpec({url!r}, work.path, Poisson(40.0), requests, 1, 60.0, 5.0)
with local_command("export OF_TEST={mark}; " + COMMAND) as streams:
    clients = NodeClients("load-01", streams)
    run_level(load, 2, lambda outcome: None, decide, transport=clients.start)
"""


def test_a_controller_that_is_killed_leaves_nothing_on_the_node() -> None:
    """With SIGKILL, so that no handler of its own runs: its connection's end is all there is."""
    mark = str(time.monotonic_ns())
    with QueueServer(first_seconds=30.0) as server:
        text = CONTROLLER.format(source=str(ROOT / "src"), url=server.url, mark=mark)
        process = subprocess.Popen([sys.executable, "-c", text], stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert next(process.stdout).startswith("look ")
        there = processes_of(f"OF_TEST={mark}")
        assert len(there) >= 2, "they have it from the shell that the node runs"
        process.kill()
        process.communicate()
        assert all(is_over(pid, 5.0) for pid in there)
        assert processes_of(f"OF_TEST={mark}") == []


def test_what_starts_the_clients_is_killed_and_they_end_with_it(mark: str) -> None:
    victims: list[int] = []

    def kill(_now: float, _due: object) -> bool:
        if not victims:
            victims.extend(children(mark))
            (program,) = [pid for pid in victims if parent(pid) == os.getpid()]
            os.kill(program, signal.SIGKILL)
        return False

    with (
        QueueServer(first_seconds=30.0) as server,
        node_clients() as clients,
        pytest.raises(FleetError, match=r"ended early \(load-01: the connection ended"),
    ):
        run_level(spec(server.url, Poisson(20.0)), 2, lambda _: None, kill, transport=clients.start)
    assert len(victims) >= 3
    assert all(is_over(pid, 5.0) for pid in victims)


def parent(pid: int) -> int:
    """Return the process that started one."""
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_client_that_dies_there_is_named_with_why(mark: str) -> None:
    def kill(_now: float, _due: object) -> bool:
        os.kill(max(children(mark)), signal.SIGKILL)
        return False

    with (
        QueueServer() as server,
        node_clients() as clients,
        pytest.raises(FleetError, match=r"ended early \(signal 9\)"),
    ):
        run_level(spec(server.url, Poisson(5.0)), 2, lambda _: None, kill, transport=clients.start)


def test_clients_whose_controller_says_nothing_more_end() -> None:
    """Its machine lost power: the connection stays open, and no word comes."""
    own = payload.program("load/client_group", loader=LOADER, silent_seconds=1.0).encode()
    client = payload.program("load/ceiling_server", tokens=3, answer=None).encode()
    pipe = subprocess.PIPE
    group = subprocess.Popen(["sh", "-c", COMMAND], stdin=pipe, stdout=pipe)
    assert group.stdin is not None
    assert group.stdout is not None
    group.stdin.write(b"%d\n%bopen 7 %d\n%b" % (len(own), own, len(client), client))
    group.stdin.flush()
    said = b""
    while b'"port"' not in said:
        said += (more := os.read(group.stdout.fileno(), 1000))
        assert more, said
    (pid,) = [int(each) for each in Path(f"/proc/{group.pid}/task/{group.pid}/children")
              .read_text().split()]  # fmt: skip
    assert group.wait(10) == 0
    assert is_over(pid, 3.0)
    group.communicate()


# -- a node that says something else


class Lines:
    """A node's end of a connection: it greets, and prints the rest once a client is to start."""

    def __init__(self, *printed: bytes, errors: bytes = b"") -> None:
        self.printed, self.errors = [*printed], [errors]
        self.taken = 0
        self.greets = printed[0] == READY
        self.opened = gevent.event.Event()

    def streams(self) -> Streams:
        return Streams(self.write, lambda: None, self.read, self.read_error, lambda: 0)

    def write(self, data: bytes) -> None:
        if data.startswith(b"open "):
            self.opened.set()

    def read(self, size: int) -> bytes:
        if not self.printed:
            return b""
        if self.greets and self.taken >= len(READY):
            self.opened.wait(10)
        found, self.printed[0] = self.printed[0][:size], self.printed[0][size:]
        if not self.printed[0]:
            del self.printed[0]
        self.taken += len(found)
        return found

    def read_error(self, _size: int) -> bytes:
        return self.errors.pop() if self.errors else b""


@each_row(
    "before, errors, why",
    [
        (b"", b"", "the connection ended: the node closed it"),
        (b"", b"bash: python3: command \x1b[31mnot found\n", "not found"),
        (b"This is a banner.\n" * 20_000, b"", "a message that a load client does not print"),
        (b"x" * 1_000_000, b"", "a message that a load client does not print"),
        (
            f'\n{GREETING}\nready 0 11\n{{"cores":0}}'.encode(),
            b"",
            "a message that a load client does not print",
        ),
        (
            f"\n{GREETING}\nready 0 99999999\n".encode(),
            b"",
            "a message that a load client does not print",
        ),
        (f"\n{GREETING}\nroot 0 0\n".encode(), b"", "a message that a load client does not print"),
        (
            f"\n{GREETING}\n{'9' * 5000}".encode(),
            b"",
            "a message that a load client does not print",
        ),
    ],
)
def test_a_node_that_starts_no_clients_is_a_sentence(
    before: bytes, errors: bytes, why: str
) -> None:
    with pytest.raises(
        FleetError, match=f"load-01: gpufleet cannot start load clients .*{why}"
    ) as one:
        NodeClients("load-01", Lines(before, errors=errors).streams())
    assert str(one.value).isprintable()


def over(about: str) -> bytes:
    return f"over 1 {len(about)}\n{about}".encode()


@each_row(
    "printed, why",
    [
        (over('{"status":1,"said":"a\x1b"}'), "a message that a load client does not print"),
        (over('{"status":1,"said":"MemoryError\\t"}'), "status 1: MemoryError"),
        (over('{"status":999,"said":""}'), "a message that a load client does not print"),
        (over('{"status":1}'), "a message that a load client does not print"),
        (over("[" * 60_000), "a message that a load client does not print"),
        (b"out one 1\nx", "a message that a load client does not print"),
        (b"out 1 -1\nx", "a message that a load client does not print"),
        (b"out 1 70000\n" + b"x" * 70000, "a message that a load client does not print"),
    ],
)
def test_what_is_no_message_ends_all_clients(printed: bytes, why: str) -> None:
    clients = NodeClients("load-01", Lines(READY, printed).streams())
    link = clients.start(payload.program("load/ceiling_server", tokens=1, answer=None))
    while link.receive() != b"":
        gevent.sleep(0.01)
    assert why in link.close()
    clients.close()


def test_of_a_node_that_prints_without_end_a_bounded_part_is_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(client_places, "MOST_UNREAD_BYTES", 1 << 20)
    monkeypatch.setattr(client_places, "MOST_LEVEL_BYTES", 3 << 20)
    piece = b"out 1 65536\n" + b"x" * 65536
    lines = Lines(READY, *[piece] * 200)
    clients = NodeClients("load-01", lines.streams())
    link = clients.start(payload.program("load/ceiling_server", tokens=1, answer=None))
    while lines.taken < 1 << 20:
        gevent.sleep(0.01)
    gevent.sleep(0.2)
    assert lines.taken < (1 << 20) + (2 << 16) + len(READY), "nobody reads it here: it waits there"
    while link.receive() != b"":
        gevent.sleep(0)
    assert "more than 0 GiB for one level" in link.close()
    assert lines.taken <= (3 << 20) + (1 << 16)
    clients.close()


def test_processes_follow_the_cores_of_the_machine_that_runs_them() -> None:
    here = this_machine()
    assert (here.name, here.is_node) == ("controller", False)
    assert here.processes == max(1, min(16, len(os.sched_getaffinity(0)) - 1))
    node = ClientPlace("gpu-01", 48, here.transport, serves=True)
    assert (node.processes, node.is_node) == (12, True)


def test_the_program_names_each_message_that_it_takes_and_sends() -> None:
    """The two ends are two files: what one does not know, the other must not send."""
    source = payload.source("load/client_group")
    words = set(re.findall(r"^  (\w+) [0N] ", source, re.MULTILINE))
    assert words == {"open", "say", "end", "alive", "ready", "out", "over"}
    assert json.loads(READY.rpartition(b"\n")[2]) == {"cores": 2}
