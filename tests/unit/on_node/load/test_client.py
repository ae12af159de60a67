"""The load client: it reads answers however they come in pieces, and ends with its controller."""

from __future__ import annotations

import asyncio
import errno
import json
import os
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from gpufleet.on_node.load import http_stream
from gpufleet.on_node.load.client import outcome_line, percentile_99
from gpufleet.on_node.load.connection_pool import Pool
from gpufleet.on_node.load.controller_pipe import LineWriter
from gpufleet.on_node.load.failure_reasons import reason_of
from gpufleet.on_node.load.http_stream import Connection, Exchange
from gpufleet.on_node.load.request_draws import Prepared
from gpufleet.remote import payload
from gpufleet.remote.session import LOADER
from tests.support.queue_server import QueueServer
from tests.support.rows import each_row

NODE_PYTHON = os.environ.get("GPUFLEET_NODE_PYTHON", sys.executable)
KEY = "sk-load-4f3e2d1c0b"
SSE = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"


class Reader:
    """A connection without a socket: bytes fed to it at given times, and its result."""

    def __init__(self, *, chat: bool = False) -> None:
        self.now = 1.0
        self.aborted = False
        self.over: list[tuple[Exchange, bool]] = []
        self.connection = Connection(lambda: self.now, self)
        self.connection.transport = self
        self.exchange = Exchange(0.5, 0.6, chat=chat)
        self.connection.send(self.exchange, b"")

    def write(self, data: bytes) -> None:
        """Take a request."""

    def abort(self) -> None:
        self.aborted = True

    def released(self, _: Connection, exchange: Exchange, reusable: bool) -> None:
        self.over.append((exchange, reusable))

    def lost(self, _: Connection) -> None:
        """The connection is gone."""

    def feed(self, data: bytes) -> None:
        if self.connection.exchange is not None:
            self.connection.data_received(data)

    def end(self, problem: Exception | None = None) -> None:
        self.connection.connection_lost(problem)

    @property
    def error(self) -> str:
        ((exchange, _),) = self.over
        return exchange.error


def token(text: str = "a", **more: Any) -> dict[str, Any]:
    return {"id": "c", "choices": [{"index": 0, "text": text, "finish_reason": None, **more}]}


def usage(tokens: int) -> dict[str, Any]:
    return {"choices": [], "usage": {"prompt_tokens": 11, "completion_tokens": tokens}}


def data(*events: Any) -> bytes:
    texts = [e if isinstance(e, str) else json.dumps(e, separators=(",", ":")) for e in events]
    return b"".join(b"data: %b\n\n" % text.encode() for text in texts)


def chunked(*events: Any, size: int = 0) -> bytes:
    """Return events as an answer, one in a chunk, or cut into chunks of a size."""
    whole = [data(event) for event in events]
    if size:
        text = b"".join(whole)
        whole = [text[at : at + size] for at in range(0, len(text), size)]
    body = b"".join(b"%x\r\n%b\r\n" % (len(each), each) for each in whole)
    return f"{SSE}transfer-encoding: chunked\r\n\r\n".encode() + body + b"0\r\n\r\n"


HOSTILE = token('"usage":{"x":1} "error": \n\ndata: [DONE]\r\n0\r\n\r\n', finish_reason=None)
LAST = token("z", finish_reason="length")
EVENTS = (token(), HOSTILE, token(""), LAST, usage(4), "[DONE]")
ANSWERS = {
    "a chunk an event": chunked(*EVENTS),
    "chunks of 7 bytes": chunked(*EVENTS, size=7),
    "one chunk": chunked(*EVENTS, size=1 << 20),
    "a length": f"{SSE}content-length: {len(data(*EVENTS))}\r\n\r\n".encode() + data(*EVENTS),
    "spaces in JSON": chunked(*(json.dumps(e) if isinstance(e, dict) else e for e in EVENTS)),
    "comments and CR LF": f"{SSE}Transfer-Encoding: Chunked\r\n\r\n".encode()
    + b"a\r\n: ping\r\n\r\n\r\n"
    + chunked(*EVENTS).partition(b"\r\n\r\n")[2],
    "an interim answer": b"HTTP/1.1 100 Continue\r\n\r\n" + chunked(*EVENTS),
}


@pytest.mark.parametrize("name", ANSWERS)
def test_an_answer_is_the_same_in_whatever_pieces_it_comes(name: str) -> None:
    answer = ANSWERS[name]
    pieces = [[answer[:cut], answer[cut:]] for cut in range(1, len(answer))]
    pieces.append([answer[at : at + 1] for at in range(len(answer))])
    pieces.append([answer])
    for each in pieces:
        reader = Reader()
        for piece in each:
            reader.feed(piece)
        ((exchange, reusable),) = reader.over
        assert (exchange.error, exchange.tokens, exchange.events) == ("", 4, 4), each
        assert exchange.prompt_tokens == 11
        assert len(exchange.gaps) == 3
        assert exchange.done == 1.0
        # Where the end of the last chunk came by itself it is not waited for.
        assert reusable or each[-1] in (b"\r\n", b"\n")


def test_an_answer_without_a_length_ends_with_its_connection() -> None:
    reader = Reader()
    reader.feed(f"{SSE}\r\n".encode() + data(*EVENTS)[:-2])
    assert reader.over == []
    reader.end()
    ((exchange, reusable),) = reader.over
    assert (exchange.error, exchange.tokens, reusable) == ("", 4, False)


def test_times_are_those_of_the_pieces_with_tokens() -> None:
    reader = Reader()
    whole = chunked(*EVENTS)
    head, body = whole[: whole.index(b"\r\n\r\n") + 4], whole[whole.index(b"\r\n\r\n") + 4 :]
    for at, piece in [(1.0, head), (2.0, body[:30]), (3.0, body[30:120]), (4.5, body[120:])]:
        reader.now = at
        reader.feed(piece)
    ((exchange, _),) = reader.over
    line = json.loads(outcome_line(exchange))
    first = len(chunked(token())) - len(head) - 5
    assert 30 < first < 120, "the first event ends in the second piece"
    assert line == [0.5, 0.6, 3.0, 4.5, 11, 4, [1_500_000, 0, 0], ""]


def test_a_chat_begins_with_its_first_text_and_not_with_its_role() -> None:
    reader = Reader(chat=True)
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"content": "a"},
        {"reasoning_content": "b"},
    ]
    deltas += [{"tool_calls": [{}]}, {}]
    whole = chunked(*({"choices": [{"index": 0, "delta": d}]} for d in deltas), usage(3), "[DONE]")
    for at, piece in enumerate(whole.split(b"\n\n")[:-1]):
        reader.now = float(at)
        reader.feed(piece + b"\n\n")
    reader.feed(whole.rpartition(b"\n\n")[2])
    ((exchange, _),) = reader.over
    assert (exchange.first, exchange.done, exchange.events) == (1.0, 3.0, 3)


@each_row(
    "answer, why",
    [
        (b"HTTP/1.1 429 Too Many\r\ncontent-length: 9\r\n\r\ntry later", "429"),
        (b"HTTP/1.1 500 x\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n", "500"),
        (b"HTTP/1.1 204 x\r\ncontent-length: 0\r\n\r\n", "204"),
        (b"HTTP/1.1 503 x\r\n\r\nwithout a length", "503"),
        (b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}", "not a stream"),
        (b"SSH-2.0-OpenSSH_9.6\r\n\r\n", "not HTTP"),
        (b"HTTP/1.1 OK\r\n\r\n", "not HTTP"),
        (b"HTTP/2 200\r\n\r\n", "not HTTP"),
        (b"x" * (http_stream.HEAD_BYTES + 1), "not HTTP"),
        (f"{SSE}transfer-encoding: chunked\r\n\r\nzz\r\n".encode(), "not HTTP"),
        (chunked(token(), usage(1)), "cut off"),
        (chunked(usage(0), "[DONE]"), "empty answer"),
        (chunked(token(), {"error": {"message": "secret", "code": 500}}, "[DONE]"), "error in"),
        (chunked(token(), "{broken"), "error in the answer"),
        (chunked(token(), "[1]"), "error in the answer"),
        (chunked(token(), '{"choices": [7]}'), "error in the answer"),
        (chunked("[" * 100_000), "error in the answer"),
        (chunked("x" * (http_stream.LINE_BYTES + 1)), "error in the answer"),
        (f"{SSE}\r\n".encode() + b"y" * (http_stream.LINE_BYTES + 1), "too large"),
    ],
)
def test_a_failure_is_a_word_and_no_text_of_the_answer(answer: bytes, why: str) -> None:
    reader = Reader()
    reader.feed(answer)
    assert reader.error.startswith(why)
    line = outcome_line(reader.exchange)
    assert json.loads(line)[3] is None
    assert b"secret" not in line


def test_a_failure_that_is_read_whole_leaves_its_connection_usable() -> None:
    for answer, usable in [
        (b"HTTP/1.1 429 x\r\ncontent-length: 3\r\n\r\nabc", True),
        (b"HTTP/1.1 429 x\r\ncontent-length: 3\r\nconnection: close\r\n\r\nabc", False),
        (b"HTTP/1.0 429 x\r\ncontent-length: 3\r\n\r\nabc", False),
        (b"HTTP/1.1 429 x\r\ncontent-length: 3\r\n\r\nabcd", False),
        (b"HTTP/1.1 429 x\r\n\r\nabc", False),
    ]:
        reader = Reader()
        reader.feed(answer)
        assert reader.over == [(reader.exchange, usable)], answer
        assert reader.aborted is not usable


@each_row(
    "before, problem, why",
    [
        (b"", None, "closed"),
        (b"HTTP/1.1 200", None, "closed"),
        (b"", ConnectionResetError(), "reset"),
        (chunked(*EVENTS)[:300], None, "cut off"),
        (chunked(*EVENTS)[:300], ConnectionResetError(), "reset"),
        (chunked(*EVENTS)[:300], OSError(errno.ETIMEDOUT, "x"), "timeout"),
        (chunked(*EVENTS)[:-5], None, ""),
    ],
)
def test_a_connection_that_ends_early_is_named(
    before: bytes, problem: Exception | None, why: str
) -> None:
    reader = Reader()
    if before:
        reader.feed(before)
    reader.end(problem)
    assert reader.error == why


def test_an_answer_without_end_is_not_kept() -> None:
    reader = Reader()
    reader.feed(f"{SSE}\r\n".encode())
    piece = data(token("x" * 1000)) * 1000
    for _ in range(http_stream.ANSWER_BYTES // len(piece) + 1):
        reader.feed(piece)
    assert reader.error == "too large"
    assert reader.aborted


@each_row(
    "problem, why",
    [
        (ConnectionRefusedError(errno.ECONNREFUSED, "x"), "refused"),
        (OSError(errno.EHOSTUNREACH, "x"), "unreachable"),
        (OSError(errno.EMFILE, "x"), "client limit"),
        (OSError(errno.EADDRNOTAVAIL, "x"), "client limit"),
        (socket.gaierror(-2, "x"), "no address"),
        (ssl.SSLCertVerificationError("x"), "certificate"),
        (ssl.SSLError("x"), "TLS"),
        (TimeoutError(), "timeout"),
        (BrokenPipeError(errno.EPIPE, "x"), "reset"),
    ],
)
def test_what_keeps_a_connection_from_being_made_is_named(problem: Exception, why: str) -> None:
    assert reason_of(problem) == why


def test_the_99th_percentile_is_a_value_that_was_seen() -> None:
    assert percentile_99([]) == 0.0
    assert percentile_99([0.5]) == 0.5
    assert percentile_99([n / 100 for n in range(1, 101)]) == 0.99
    assert percentile_99([0.0] * 98 + [1.0, 2.0]) == 1.0


class Nowhere:
    """An address to which no connection is made."""

    chat = False

    def __init__(self) -> None:
        self.made: list[Connection] = []

    def request(self, prepared: Prepared) -> bytes:
        return prepared.body

    async def connect(self, factory: Any) -> Connection:
        connection: Connection = factory()
        reader = Reader()
        connection.connection_made(reader)
        self.made.append(connection)
        return connection


def test_connections_are_used_again_until_they_are_old_and_never_beyond_the_limit() -> None:
    async def use() -> None:
        over: list[Exchange] = []
        address: Any = Nowhere()
        pool = Pool(address, 2, lambda: 0.0, over.append)

        async def send(count: int) -> list[Exchange]:
            made = [Exchange(0.0, 0.0) for _ in range(count)]
            for each in made:
                pool.send(each, Prepared(b"x", 1, 1))
            await asyncio.sleep(0)
            return made

        one, two, three = await send(3)
        assert [(each.error, each is three) for each in over] == [("client limit", True)]
        assert (pool.open, pool.connects) == (2, 2)
        for each in (one, two):
            each.holder.data_received(chunked(*EVENTS))
        (again,) = await send(1)
        assert again.holder is two.holder
        again.holder.data_received(chunked(*EVENTS))
        for connection in address.made:
            connection.idle_since -= 4.1
        await send(1)
        assert pool.connects == 3
        assert all(connection.transport.aborted for connection in address.made[:2])

    asyncio.run(use())


def test_a_controller_that_is_slow_to_read_holds_nothing_up() -> None:
    reading, writing = os.pipe()

    async def write() -> float:
        writer = LineWriter(asyncio.get_running_loop(), writing)
        began = time.monotonic()
        for number in range(300):
            writer.write(b"%09d" % number + b"x" * 20_000 + b"\n")
        took = time.monotonic() - began
        assert not writer.drained.is_set()
        reader = asyncio.to_thread(lambda: [file.readline() for _ in range(300)])
        with os.fdopen(reading, "rb", closefd=False) as file:
            lines = await reader
        assert [int(line[:9]) for line in lines] == list(range(300))
        await writer.drained.wait()
        return took

    assert asyncio.run(write()) < 2.0
    os.close(reading)
    os.close(writing)


@contextmanager
def client(url: str, **more: Any) -> Iterator[subprocess.Popen[bytes]]:
    """Run the program as a node does; it has printed that it is ready."""
    given = {
        "url": url,
        "path": "/v1/completions",
        "headers": {"Authorization": f"Bearer {KEY}"},
        "certificate": None,
        "arrivals": {"rate": 40.0},
        "seed": "1/0",
        "requests": {
            "kind": "tokens",
            "model": "m",
            "vocabulary": [1000, 9000],
            "salt": "s",
            "input": {"kind": "fixed", "tokens": 20},
            "output": {"kind": "fixed", "tokens": 3},
        },
        "process": 0,
        "processes": 1,
        "seconds": 30.0,
        "give_up_seconds": 20.0,
        "connections": 100,
        **more,
    }
    program = payload.program("load/client", **given).encode()
    process = subprocess.Popen(
        [NODE_PYTHON, "-IS", "-c", LOADER],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        bufsize=0,
    )
    try:
        say(process, b"%d\n%b" % (len(program), program))
        assert json.loads(line(process)) == {"ready": 1, "connections": 100}
        yield process
    finally:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout, process.stderr):
            assert pipe is not None
            pipe.close()


def say(process: subprocess.Popen[bytes], text: bytes) -> None:
    assert process.stdin is not None
    process.stdin.write(text)


def line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None
    return process.stdout.readline()


def rest(process: subprocess.Popen[bytes]) -> tuple[bytes, bytes]:
    """Return what else it prints until it ends by itself: its input stays open."""
    assert process.stdout is not None
    out = process.stdout.read()
    assert process.stderr is not None
    return out, process.stderr.read()


def test_the_key_is_in_no_command_line_and_no_output() -> None:
    with QueueServer(key=KEY, faults=("", "500")) as server, client(server.url) as process:
        about = Path(f"/proc/{process.pid}")
        shown = about.joinpath("cmdline").read_bytes() + about.joinpath("environ").read_bytes()
        say(process, b"start 0\n")
        printed = [line(process) for _ in range(20)]
        say(process, b"stop 5\n")
        out, error = rest(process)
        assert process.wait(5) == 0
    assert {json.loads(each)[-1] for each in printed if each.startswith(b"[")} == {"", "500"}
    assert json.loads(out.splitlines()[-1])["end"] == "stopped"
    assert error == b""
    assert all(KEY.encode() not in each for each in (shown, out, error, *printed))
    assert b"text-of-an-answer" not in out + b"".join(printed)
    assert {seen.headers["authorization"] for seen in server.record} == {f"Bearer {KEY}"}


def test_it_ends_with_its_input_in_whatever_it_is() -> None:
    """Before the load, and with requests under way that would take 20 s."""
    with QueueServer(first_seconds=30.0) as server:
        for started in (False, True):
            with client(server.url) as process:
                if started:
                    say(process, b"start 0\n")
                    while b'"in_flight":[]' in (beat := line(process)):
                        pass
                    assert json.loads(beat)["in_flight"]
                assert process.stdin is not None
                process.stdin.close()
                began = time.monotonic()
                assert process.wait(5) == 0
                assert time.monotonic() - began < 1.5


def test_what_is_under_way_at_the_end_is_listed_and_not_judged() -> None:
    with QueueServer(first_seconds=30.0) as server, client(server.url) as process:
        say(process, b"start 0\n")
        assert json.loads(line(process))["now"] == pytest.approx(1.0, abs=0.9)
        say(process, b"stop 0.1\n")
        *beats, last = map(json.loads, rest(process)[0].splitlines())
    assert all("in_flight" in beat for beat in beats)
    assert last["end"] == "stopped"
    assert last["sent"] == len(last["unfinished"]) == len(server.record) > 10


def test_a_defect_of_the_program_is_a_place_and_no_traceback() -> None:
    with QueueServer() as server, client(server.url) as process:
        say(process, b"start not-a-number\n")
        out, error = rest(process)
        assert process.wait(5) == 1
    assert set(json.loads(out)) == {"fault"}
    assert "ValueError in load/client.py, line " in json.loads(out)["fault"]
    assert error == b""
