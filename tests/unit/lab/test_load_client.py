"""What a load on a changing fleet is summed up to, and that every failure is seen as one.

The client is held against servers that cut, refuse and stay silent: over real sockets.
"""

from __future__ import annotations

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.lab import upgrade_load
from tests.lab.upgrade_load import Request, bench_failures, percentile, read, summary


def done(number: int, asked: float, ended: float, **more: object) -> Request:
    return Request(number, asked, ended, first=asked + 0.5, finish="length", text="aaaa", **more)


def test_nothing_asked_is_nothing_served() -> None:
    assert summary([]).requests == 0


def test_failures_are_counted_by_what_clients_saw() -> None:
    found = summary(
        [
            done(1, 0, 1),
            Request(2, 1, 2, error="HTTP 503"),
            Request(3, 1, 2, error="HTTP 503"),
            Request(4, 2, 3, first=2.5, text="aa"),
            Request(5, 2, 3, finish="length"),
        ]
    )
    assert (found.requests, found.failed) == (5, 4)
    assert found.failures == {"HTTP 503": 2, "cut short": 1, "no token": 1}


def test_the_longest_pause_is_between_requests_that_ended_well() -> None:
    """One that failed in between does not shorten it; the end of the load ends it."""
    found = summary([done(1, 0, 1), Request(2, 3, 4, error="refused"), done(3, 1, 9)])
    assert found.pause == 8
    assert summary([done(1, 0, 1), Request(2, 1, 7, error="refused")]).pause == 6


def test_latencies_are_of_requests_that_were_served() -> None:
    found = summary([done(1, 0, 9, gaps=(0.1, 0.3)), Request(2, 0, 5, first=4, error="closed")])
    assert (found.ttft_p50, found.itl_p99, found.longest) == (0.5, 0.3, 9)


@pytest.mark.parametrize(("percent", "value"), [(50, 2.0), (75, 3.0), (99, 4.0), (100, 4.0)])
def test_a_percentile_is_one_of_the_values(percent: float, value: float) -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], percent) == value


def test_answers_of_another_text_are_told_apart() -> None:
    other = Request(2, 0, 1, first=0.5, finish="length", text="bbbb")
    assert summary([done(1, 0, 1), done(3, 0, 1), other]).texts == {"aaaa": 2, "bbbb": 1}


def test_a_torn_last_line_is_no_request(tmp_path: Path) -> None:
    path = tmp_path / "requests.jsonl"
    line = json.dumps({"number": 1, "asked": 5.0, "ended": 6.0, "gaps": [0.5]})
    path.write_text(f"{line}\n{line[:20]}")
    assert read(path) == [Request(1, 5.0, 6.0, gaps=(0.5,))]
    assert read(path, since=6.0) == read(tmp_path / "none") == []


def test_a_bench_that_completed_nothing_failed_whatever_it_exits_with() -> None:
    assert bench_failures({"completed": 0, "failed": 4}, 4) == 4
    assert bench_failures({}, 4) == 4
    assert bench_failures({"completed": 4}, 4) == 0


class Server(BaseHTTPRequestHandler):
    """Answers as its class variable `does` says."""

    does = ""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        if self.does == "refuse":
            self.send_error(503)
            return
        if self.does == "close":
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        ends = {"well": "length"}.get(self.does)
        for text, finish in (("ab", None), ("cd", ends)):
            choice = {"index": 0, "text": text, "finish_reason": finish}
            told = {"id": "1", "object": "text_completion", "model": "m", "choices": [choice]}
            self.wfile.write(f"data: {json.dumps(told)}\n\n".encode())
        if self.does == "well":
            self.wfile.write(b"data: [DONE]\n\n")

    def log_message(self, *_: object) -> None:
        pass


@contextmanager
def serving(does: str) -> Iterator[str]:
    handler = type("Handler", (Server,), {"does": does})
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()


@pytest.mark.parametrize(
    ("does", "failure"),
    [("well", ""), ("refuse", "HTTP 503"), ("cut", "cut short"), ("close", "RemoteProtocolError")],
)
def test_the_client_says_what_it_met_and_tries_nothing_twice(does: str, failure: str) -> None:
    async def once(url: str) -> Request:
        async with openai.AsyncOpenAI(base_url=url, api_key="k", max_retries=0) as client:
            return await upgrade_load.ask(client, "m", 1, 4)

    with serving(does) as url:
        found = asyncio.run(once(url))
    assert found.failure.startswith(failure)
    assert bool(found.failure) == bool(failure)
    if does == "well":
        assert (found.text, found.finish, found.tokens) == ("abcd", "length", 4)
        assert found.first is not None
        assert found.asked <= found.first <= found.ended


@pytest.mark.parametrize("how", [{"rate": 20.0}, {"together": 3}])
def test_the_clients_are_a_process_that_ends_when_it_is_told_to(
    tmp_path: Path, how: dict[str, Any]
) -> None:
    with serving("well") as url:
        began = time.time()
        with upgrade_load.clients(url, "k", tmp_path / "r.jsonl", **how) as running:
            while len(running.requests()) < 10:
                assert time.time() < began + 60
                time.sleep(0.1)
            running.stop()
        assert running.process.returncode == 0
    assert summary(running.requests()).failed == 0
