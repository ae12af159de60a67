"""Load on real sockets: what clients see is what the server did, and none of them stays behind."""

from __future__ import annotations

import itertools
import json
import math
import os
import re
import signal
import socket
import ssl
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean, median, pvariance
from typing import Any

import pytest

from gpufleet.errors import FleetError
from gpufleet.load_test.arrivals import (
    Arrivals,
    ClosedLoop,
    Poisson,
    Trace,
    TraceEntry,
    poisson_times,
)
from gpufleet.load_test.client_ceiling import measure_ceiling
from gpufleet.load_test.client_lines import Client, ClientError
from gpufleet.load_test.client_process import LevelRun, LoadSpec, run_level
from gpufleet.load_test.client_transport import LocalLink, local_client
from gpufleet.load_test.outcomes import Outcome
from gpufleet.load_test.workloads import (
    TokenRange,
    Workload,
    fixed_length,
    text_work,
    uniform_lengths,
)
from gpufleet.load_test.written_prompts import from_jsonl
from gpufleet.remote.payload import Payload
from tests.support.checkout import ROOT
from tests.support.queue_server import SECRET_TEXT, Fault, QueueServer
from tests.support.rows import each_row

SEED = 3
KEY = "sk-measure-0a1b2c3d4e"
SMALL = Workload("small", uniform_lengths(10, 40), fixed_length(3), "")
BURST = Trace(tuple(TraceEntry(n * 0.02, 20, 4) for n in range(9)))


@dataclass
class Level:
    """What a level of load showed, and how it was asked about."""

    run: LevelRun
    outcomes: list[Outcome] = field(default_factory=list)
    looks: list[tuple[float, tuple[float, ...], int]] = field(default_factory=list)
    """Of each look: now, what was in flight, how many outcomes had come."""
    pids: tuple[int, ...] = ()

    @property
    def errors(self) -> Counter[str]:
        return Counter(each.error for each in self.outcomes)


def spec(url: str, arrivals: Arrivals, work: Workload = SMALL, **more: Any) -> LoadSpec:
    given: dict[str, Any] = {
        "url": url,
        "path": work.path,
        "arrivals": arrivals,
        "requests": work.requests("stand-in", TokenRange(1000, 9000), "salt"),
        "seed": SEED,
        "seconds": 20.0,
        "give_up_seconds": 5.0,
        "headers": {"Authorization": f"Bearer {KEY}"},
        **more,
    }
    return LoadSpec(**given)


def measure(
    load: LoadSpec,
    processes: int = 1,
    until: float = float("inf"),
    look: Callable[[float], None] = lambda _: None,
) -> Level:
    """Run a level until `until`; `look` is called once a second."""
    level = Level.__new__(Level)
    level.outcomes, level.looks = [], []
    links: list[LocalLink] = []

    def start(program: Payload) -> LocalLink:
        links.append(local_client(program))
        return links[-1]

    def decide(now: float, in_flight: Sequence[float]) -> bool:
        level.looks.append((now, tuple(in_flight), len(level.outcomes)))
        look(now)
        return now >= until

    try:
        level.run = run_level(load, processes, level.outcomes.append, decide, transport=start)
    finally:
        level.pids = tuple(link.pid for link in links)
        assert all(is_over(pid) for pid in level.pids)
    return level


def is_over(pid: int, seconds: float = 0.0) -> bool:
    """Return whether a process has ended, or does so within some seconds."""
    until = time.monotonic() + seconds
    while True:
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except OSError:
            return True
        if time.monotonic() > until:
            return False
        time.sleep(0.02)


def clock_zero(server: QueueServer, level: Level) -> float:
    """
    Return when a load began, by the server's clock.

    Most requests are there at once; those that a busy machine held up would make it later.
    """
    sent = sorted(each.sent for each in level.outcomes)
    arrived = sorted(seen.arrived for seen in server.record)
    return min(at - due for at, due in zip(arrived, sent, strict=True))


@dataclass
class Steady:
    """A level of two clients at 200 requests a second, and the server that it was put on."""

    level: Level
    server: QueueServer
    zero: float
    """When the load began, by the server's clock."""


@pytest.fixture(scope="module")
def steady() -> Steady:
    with QueueServer(slots=64, first_seconds=0.02, token_seconds=0.01, key=KEY) as server:
        level = measure(spec(server.url, Poisson(200.0)), 2, until=1.9)
    return Steady(level, server, clock_zero(server, level))


def test_requests_arrive_when_the_poisson_process_has_them(steady: Steady) -> None:
    """Each is at the server when it was drawn to arrive, but for the lag of clients and server."""
    arrived = sorted(seen.arrived - steady.zero for seen in steady.server.record)
    sent = sorted(each.sent for each in steady.level.outcomes)
    drawn = list(itertools.islice(poisson_times(200.0, 1e9, SEED, 2), len(arrived)))
    lag = max(0.02, steady.level.run.lag_p99)
    for seen, most in ((sent, lag), (arrived, lag + steady.server.lag_p99)):
        late = [at - due for at, due in zip(seen, drawn, strict=True)]
        assert median(late) == pytest.approx(0.0, abs=most)
    counts = Counter(int(at / 0.05) for at in sent if at < 1.9)
    each = [counts[window] for window in range(38)]
    assert fmean(each) == pytest.approx(10.0, rel=0.2)
    # For 38 windows it is 1 with a standard deviation of 0.23, and near 0 for evenly spaced
    # requests. A machine that has other work sends some of them in bunches, which adds to it.
    assert pvariance(each) / fmean(each) > 0.6
    due = Counter(int(each.due / 0.05) for each in steady.level.outcomes if each.due < 1.9)
    assert 0.6 < pvariance([due[window] for window in range(38)]) / fmean(each) < 1.6


def test_a_client_sees_what_the_server_did(steady: Steady) -> None:
    level, record = steady.level, steady.server.record
    assert level.run.ended == "decided"
    assert level.errors == {"": len(record)}
    assert level.run.sent == len(record)
    assert level.run.unfinished == ()
    assert Counter(each.prompt_tokens for each in level.outcomes) == Counter(
        len(seen.prompt) for seen in record
    )
    assert {each.tokens for each in level.outcomes} == {3}
    assert {len(each.gaps) for each in level.outcomes} == {2}
    # By the server's own clock, which a busy machine holds up as well: first token, then two.
    took = median((seen.ended or 9.0) - (seen.began or 0.0) for seen in record)
    gap = median(gap for each in level.outcomes for gap in each.gaps)
    late = steady.server.lag_p99
    assert gap == pytest.approx((took - 0.02) / 2, abs=max(0.004, late))
    waited = median((seen.began or 9.0) - seen.arrived for seen in record)
    lag = max(0.015, level.run.lag_p99) + late
    assert median(each.ttft or 9.0 for each in level.outcomes) == pytest.approx(
        waited + took - 2 * gap, abs=lag
    )
    assert all(each.due <= each.sent for each in level.outcomes)


def test_a_look_knows_every_request_that_was_due_until_then(steady: Steady) -> None:
    """Else fast requests come in before slow ones, and a level looks better than it is."""
    drawn = list(itertools.islice(poisson_times(200.0, 1e9, SEED, 2), 2000))
    outcomes = steady.level.outcomes
    assert len(steady.level.looks) >= 2
    for now, in_flight, count in steady.level.looks:
        known = sorted([each.due for each in outcomes[:count]] + list(in_flight))
        assert known == pytest.approx([due for due in drawn if due <= now], abs=2e-6)


def test_connections_are_used_again(steady: Steady) -> None:
    """Each client has as many as it ever had requests under way, however slow the machine is."""
    clients = steady.level.run.clients
    spans = [(each.sent, each.done or math.inf) for each in steady.level.outcomes]
    most = max(sum(sent <= at <= done for sent, done in spans) for at, _ in spans)
    connects = sum(each.connects for each in clients)
    assert connects == steady.server.connections <= len(clients) * most
    assert connects < len(steady.server.record)


def test_clients_state_their_lag_and_their_processor_time(steady: Steady) -> None:
    run = steady.level.run
    lags = sorted(each.sent - each.due for each in steady.level.outcomes)
    assert lags[len(lags) // 2] <= run.lag_p99 < 0.5
    assert len(run.clients) == 2
    assert 0.0 < run.cpu_seconds < 0.01
    assert run.peak_cpu_share >= max(each.cpu_share for each in run.clients) > 0.0


def stalling(server: QueueServer) -> Callable[[float], None]:
    """Return what stalls a server at the first look, however late that is."""
    looks: list[float] = []

    def look(now: float) -> None:
        looks.append(now)
        if len(looks) == 1:
            server.stall(0.5)

    return look


def stalled(arrivals: Arrivals) -> tuple[list[Outcome], list[Outcome], float, float]:
    """Stall a server for 0.5 s; return all outcomes, those that saw it, and when it was."""
    with QueueServer(slots=200, first_seconds=0.015, token_seconds=0.001) as server:
        level = measure(
            spec(server.url, arrivals),
            until=1.9,
            look=stalling(server),
        )
        zero = clock_zero(server, level)
        ((begin, end),) = server.stalls
    begin, end = begin - zero, end - zero
    done = [(each, each.done or 0.0) for each in level.outcomes]
    slow = [each for each, at in done if each.due < end < at and at - each.due > 0.15]
    assert level.errors == {"": len(level.outcomes)}
    return level.outcomes, slow, begin, end


@pytest.fixture(scope="module")
def stalls() -> list[Any]:
    """Both at once, on a server each: they wait most of the time."""
    with ThreadPoolExecutor() as both:
        return list(both.map(stalled, (Poisson(100.0), ClosedLoop(4))))


def test_a_stall_shows_in_all_requests_that_were_due_meanwhile(stalls: list[Any]) -> None:
    outcomes, slow, begin, end = stalls[0]
    due = [each for each in outcomes if begin < each.due < end - 0.15]
    assert len(due) > 20
    assert {each.due for each in due} <= {each.due for each in slow}
    for each in due:
        assert each.e2e is not None
        assert each.e2e >= end - each.due - 0.05
    # They wait 0.33 s in the mean, and the first of them all of it.
    assert fmean(each.e2e or 0.0 for each in due) > 0.25
    assert max(each.ttft or 0.0 for each in due) > 0.4


def test_a_closed_loop_hides_a_stall_but_for_its_places(stalls: list[Any]) -> None:
    """Four requests saw it: a far smaller share than of those that came when they were due."""
    (open_outcomes, open_slow, *_), (outcomes, slow, *_) = stalls
    assert len(slow) <= 4
    assert len(slow) / len(outcomes) < len(open_slow) / len(open_outcomes) / 3


def test_what_a_limit_holds_back_counts_from_when_it_was_due() -> None:
    """One place for 20 requests a second of 0.1 s each: the queue is the client's, and shows."""
    work = replace(SMALL, output=fixed_length(1))
    with QueueServer(slots=50, first_seconds=0.1) as server:
        level = measure(spec(server.url, Poisson(20.0, 1), work), until=0.9)
    held = [each for each in level.outcomes if each.done is not None]
    assert level.run.ended == "decided"
    assert max(each.e2e or 0.0 for each in held) > 0.3
    assert median((each.done or 9.0) - each.sent for each in held) < 0.2
    assert max(Counter(int(seen.arrived * 10) for seen in server.record).values()) <= 2
    # What still waited was never sent: nothing is known of it but when it was due.
    known = sorted([*level.run.unfinished, *(each.due for each in level.outcomes)])
    drawn = list(poisson_times(20.0, 9.0, SEED))
    assert known == pytest.approx(drawn[: len(known)], abs=2e-6)
    assert len(level.run.unfinished) > 5
    assert drawn[len(known)] > level.run.seconds


def test_a_server_of_known_capacity_is_seen_to_have_it() -> None:
    work = replace(SMALL, output=fixed_length(5))
    with QueueServer(slots=3, first_seconds=0.03, token_seconds=0.005) as server:
        level = measure(spec(server.url, ClosedLoop(8, 0.2), work, seconds=1.8), 2)
    assert level.run.ended == "seconds"
    zero = clock_zero(server, level)
    done = [each.done for each in level.outcomes if each.done is not None]
    ended = [(seen.ended or 0.0) - zero for seen in server.record]
    assert server.capacity(5) == pytest.approx(60.0)
    assert sum(0.8 < at <= 1.8 for at in ended) <= 60.0 * 1.05
    # A busy machine holds both up: compared is what was done, but for answers under way at the end.
    assert abs(sum(at <= level.run.seconds for at in ended) - len(done)) <= 8


FAULTS: dict[Fault, tuple[str, int]] = {
    "": ("", 4),
    "500": ("500", 0),
    "429": ("429", 0),
    "closed": ("closed", 0),
    "not a stream": ("not a stream", 0),
    "reset": ("reset", 1),
    "cut off": ("cut off", 1),
    "stop": ("cut off", 4),
    "error in stream": ("error in the answer", 1),
    "hang": ("timeout", 1),
}
"""What each is called, and how many tokens came before it."""


def test_a_failure_is_named_and_has_no_last_token() -> None:
    burst = Trace(tuple(TraceEntry(n * 0.03, 20 + n, 4) for n in range(3 * len(FAULTS))))
    with QueueServer(slots=50, first_seconds=0.01, faults=tuple(FAULTS)) as server:
        level = measure(spec(server.url, burst, give_up_seconds=0.7))
    assert level.run.ended == "schedule"
    # By their length: on a busy machine one may overtake another.
    faults = {len(seen.prompt): seen.fault for seen in server.record}
    assert Counter(faults.values()) == dict.fromkeys(FAULTS, 3)
    assert {each.prompt_tokens for each in level.outcomes} == set(faults)
    for each in level.outcomes:
        fault = faults[each.prompt_tokens]
        assert (each.error, each.tokens) == FAULTS[fault], fault
        assert (each.done is None) == bool(each.error)
        assert (each.first is None) == (each.tokens == 0)
        assert SECRET_TEXT not in repr(each)


@each_row("more, error", [({}, "refused"), ({"headers": {"Authorization": "Bearer x"}}, "401")])
def test_a_server_that_lets_no_client_in_is_named(more: dict[str, Any], error: str) -> None:
    with QueueServer(key=KEY) as server:
        url = server.url
        if error == "refused":
            with socket.socket() as taken:
                taken.bind(("127.0.0.1", 0))
                url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        level = measure(spec(url, BURST, **more))
    assert level.errors == {error: 9}
    assert server.record == []


def test_requests_beyond_the_clients_own_limit_are_no_failures_of_the_server() -> None:
    with QueueServer(slots=20, first_seconds=0.5) as server:
        level = measure(spec(server.url, BURST, connections=2))
    assert level.errors == {"client limit": 7, "": 2}
    assert len(server.record) == 2


CERTIFICATE = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
CERTIFICATE += ["-nodes", "-days", "2", "-subj", "/CN=load"]
CERTIFICATE += ["-addext", "subjectAltName=IP:127.0.0.1"]


def test_https_is_verified_against_the_given_authority(tmp_path: Path) -> None:
    pems = []
    for name in ("server", "other"):
        files = ["-keyout", f"{tmp_path}/{name}.key", "-out", f"{tmp_path}/{name}.pem"]
        subprocess.run(
            [*CERTIFICATE, *files],
            check=True,
            capture_output=True,
        )
        pems.append((tmp_path / f"{name}.pem").read_text())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "server.pem", tmp_path / "server.key")
    with QueueServer(tls=context, first_seconds=0.01) as server:
        right = measure(spec(server.url, BURST, certificate=pems[0]))
        wrong = measure(spec(server.url, BURST, certificate=pems[1]))
    assert right.errors == {"": 9}
    assert wrong.errors == {"certificate": 9}


def test_written_prompts_are_sent_as_chats(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    lines = [{"messages": [{"role": "user", "content": f"question {n}"}]} for n in range(3)]
    path.write_text("\n".join(map(json.dumps, lines)))
    prompts = from_jsonl(path, max_tokens=2)
    with QueueServer(first_seconds=0.01) as server:
        load = spec(server.url, BURST, path=prompts.path, requests=prompts.requests("stand-in"))
        level = measure(load)
    assert level.errors == {"": 9}
    assert {seen.path for seen in server.record} == {"/v1/chat/completions"}
    assert Counter(seen.body["messages"][0]["content"] for seen in server.record) == {
        f"question {n}": 3 for n in range(3)
    }
    assert {(each.prompt_tokens, each.tokens) for each in level.outcomes} == {(7, 2)}


@each_row(
    "more, why",
    [
        ({"url": "server:8000"}, "write http://HOST:PORT"),
        ({"url": f"http://user:{KEY}@h:1"}, "write http://HOST:PORT"),
        ({"headers": {"Authorization": f"Bearer {KEY}\r\nX-More: y"}}, "write the key as one line"),
        ({"headers": {"Authorization": f"Bearer {KEY}é"}}, "write the key as one line"),
        ({"certificate": "no PEM"}, "not in PEM format"),
    ],
)
def test_what_no_request_can_have_is_refused_without_the_key(
    more: dict[str, Any], why: str
) -> None:
    with pytest.raises(FleetError) as refusal:
        spec(**{"url": "http://h:1", "arrivals": ClosedLoop(1), **more})
    assert why in str(refusal.value)
    assert KEY not in str(refusal.value)


def test_no_repr_has_the_key() -> None:
    load = spec("http://h:1", ClosedLoop(1))
    assert KEY in str(load.parameters(0, 1))
    assert KEY not in repr(load)


def test_requests_that_are_due_together_all_come_in() -> None:
    """As traces have them; one of them is answered, the other not."""
    together = Trace((TraceEntry(0.0, 9, 2),) * 20 + (TraceEntry(0.1, 9, 2),))
    with QueueServer(slots=50, first_seconds=0.01, faults=("", "500")) as server:
        level = measure(spec(server.url, together), 2)
    assert len(level.outcomes) == len(server.record) == 21
    assert Counter(each.due for each in level.outcomes) == {0.0: 20, 0.1: 1}


def test_a_client_that_dies_ends_the_level_and_the_other_clients() -> None:
    pids: list[int] = []

    def start(program: Payload) -> LocalLink:
        link = local_client(program)
        pids.append(link.pid)
        return link

    def kill(_now: float, _due: Sequence[float]) -> bool:
        os.kill(pids[1], signal.SIGKILL)
        return False

    with QueueServer() as server, pytest.raises(FleetError, match=r"ended early \(signal 9\)"):
        run_level(spec(server.url, Poisson(5.0)), 2, lambda _: None, kill, transport=start)
    assert len(pids) == 2
    assert all(map(is_over, pids))


@each_row(
    "printed, why",
    [
        (b"[1,2]\n", "a line that gpufleet cannot interpret"),
        (b"{}x\n", "a line that gpufleet cannot interpret"),
        (b"\xff\n", "a line that gpufleet cannot interpret"),
        (b'{"fault":"KeyError in load/client.py, line 9"}\n', "KeyError in load/client.py"),
        (b'"port"\n', "a line that gpufleet cannot interpret"),
        (b'[NaN,0,0,0,1,1,[],""]\n', "a line that gpufleet cannot interpret"),
        (b'[0,0,0,1e999,1,1,[],""]\n', "a line that gpufleet cannot interpret"),
        (b'[0,0,0,-9,1,1,[],""]\n', "a line that gpufleet cannot interpret"),
        (b'[0,0,0,0,1,true,[],""]\n', "a line that gpufleet cannot interpret"),
        (b'[0,0,0,0,1,1,[-9000000],""]\n', "a line that gpufleet cannot interpret"),
        (b"[0,0,0,0,1,1,[1" + b"0" * 400 + b'],""]\n', "a line that gpufleet cannot interpret"),
        (b'[0,0,0,0,1,1,[],"\\u001b]52;c;aGk"]\n', "a line that gpufleet cannot interpret"),
        (b'[0,0,0,0,1,1,[],"' + b"a" * 41 + b'"]\n', "a line that gpufleet cannot interpret"),
        (b"[" * 100_000 + b"\n", "a line that gpufleet cannot interpret"),
        (
            b'{"now":1,"in_flight":["a"],"lag_p99":0,"cpu_share":0}\n',
            "a line that gpufleet cannot interpret",
        ),
        (b'{"port":70000}\n', "a line that gpufleet cannot interpret"),
        (b'{"fault":"\\u001b[2J"}\n', r"failed: [^\x1b]*$"),
        (b"", "has ended early"),
    ],
)
def test_what_no_client_prints_ends_the_level(printed: bytes, why: str) -> None:
    class Broken:
        def __init__(self) -> None:
            self.left = [printed, b""]

        def send(self, _: bytes) -> None:
            raise BrokenPipeError

        def receive(self) -> bytes | None:
            return self.left.pop(0)

        def close(self) -> str:
            return ""

    client = Client(Broken())
    with pytest.raises(ClientError, match=why):
        client.read()
    with pytest.raises(ClientError, match="has ended early"):
        client.say("stop 1")


def test_what_is_raised_while_a_level_runs_leaves_no_client() -> None:
    class EndedError(Exception):
        pass

    def interrupt(_: float) -> None:
        raise EndedError

    with QueueServer(first_seconds=30.0) as server:
        began = time.monotonic()
        with pytest.raises(EndedError):
            measure(spec(server.url, Poisson(50.0)), 2, look=interrupt)
        assert time.monotonic() - began < 20.0, "it did not wait for the server's 30 s"


CONTROLLER = """
import sys
sys.path.insert(0, {source!r})
{first}
from gpufleet.load_test.arrivals import Poisson
from gpufleet.load_test.client_process import LoadSpec, run_level
from gpufleet.load_test.client_transport import LocalLink
from gpufleet.load_test.workloads import TokenRange, Workload, fixed_length

class Shown(LocalLink):
    def __init__(self, program):
        super().__init__(program)
        print("client", self.pid, flush=True)

def decide(now, in_flight):
    print("look", len(in_flight), flush=True)
    return {until} < now

work = Workload("small", fixed_length(20), fixed_length(3), "")
requests = work.requests("stand-in", TokenRange(1000, 9000), "salt")
headers = {{"Authorization": "Bearer " + sys.stdin.readline().strip()}}
load = LoadSpec({url!r}, work.path, Poisson(40.0), requests, 1, 20.0, 5.0, headers)
run = run_level(load, 2, lambda outcome: None, decide, transport=Shown)
print("over", run.ended, flush=True)
"""


def controller(url: str, first: str = "", until: float = 99.0) -> subprocess.Popen[str]:
    text = CONTROLLER.format(source=str(ROOT / "src"), url=url, first=first, until=until)
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", text], stdin=pipe, stdout=pipe, text=True)
    assert process.stdin is not None
    process.stdin.write(f"{KEY}\n")
    process.stdin.flush()
    return process


def test_a_controller_that_is_killed_leaves_no_client() -> None:
    """Killed as it can: no handler of its own runs, and each client has requests under way."""
    with QueueServer(first_seconds=30.0) as server:
        process = controller(server.url)
        assert process.stdout is not None
        printed = [next(process.stdout) for _ in range(3)]
        pids = [int(pid) for pid in re.findall(r"client (\d+)", "".join(printed))]
        assert len(pids) == 2
        assert printed[2].startswith("look ")
        for pid in pids:
            about = Path(f"/proc/{pid}")
            shown = about.joinpath("cmdline").read_bytes() + about.joinpath("environ").read_bytes()
            assert KEY.encode() not in shown
            assert os.getpgid(pid) == pid != os.getpgid(process.pid)
        process.kill()
        process.wait()
        assert all(is_over(pid, 1.5) for pid in pids)
        process.communicate()


def test_it_runs_where_gevent_has_taken_over() -> None:
    """As in `gpufleet`, whose connections to nodes are gevent's: other tasks go on meanwhile."""
    first = (
        "from gevent import monkey, spawn, sleep\nmonkey.patch_all()\n"
        "def tick():\n    while True:\n        print('tick', flush=True)\n        sleep(0.1)\n"
        "spawn(tick)"
    )
    with QueueServer(first_seconds=0.01) as server:
        process = controller(server.url, first, until=0.9)
        out, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert out.splitlines()[-1] == "over decided"
    assert out.count("tick") > 5


def test_the_clients_own_ceiling_is_measured() -> None:
    found = measure_ceiling(1, text_work(64, 16), seconds=2.0)
    assert found.requests_per_second > 20
    assert 0 < found.cpu_seconds < 0.05
    assert found.rate_at(0.5) == pytest.approx(0.5 / found.cpu_seconds)
