"""Clients of a fleet that is being changed: OpenAI's own client, which tries nothing twice.

    OPENAI_API_KEY=... python -m tests.lab.upgrade_load --url http://192.0.2.5:8443/v1 \
        --model tiny --rate 4 --out requests.jsonl

A process of its own, so that nothing of a test slows it. Requests begin at a steady rate whatever
becomes of those before (an open loop: a fleet that answers slowly gets no fewer). All stream; one
of `LONG_EVERY` is so long that it is under way whenever a replica is drained. Each is one line of
`--out`, written when it ends. SIGTERM ends it: what has begun is waited for.

A request failed if it raised, was cut short, or ended without a reason. What of all that clients
saw is `Summary`, made by pure functions.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import openai

from tests.support.checkout import ROOT

SHORT_TOKENS = 16
LONG_TOKENS = 240
LONG_EVERY = 20
PROMPT = "0123456789"
# A client that has no word by then calls it lost. Longer than a gateway lets requests wait.
PATIENCE = 180.0


@dataclass(frozen=True)
class Request:
    """One request, and what became of it. Times are in seconds since the epoch."""

    number: int
    asked: float
    ended: float
    first: float | None = None
    """When its first token came."""
    gaps: tuple[float, ...] = ()
    """Seconds between one piece of the answer and the next."""
    tokens: int = 0
    finish: str | None = None
    text: str = ""
    error: str = ""
    """The exception, in short; empty if there was none."""

    @property
    def failure(self) -> str:
        """In what way it failed, in a few words; empty if it did not."""
        if self.error:
            return self.error
        if self.first is None:
            return "no token"
        return "" if self.finish else "cut short"


@dataclass(frozen=True)
class Summary:
    """What clients saw. Times are in seconds; None where nothing was measured."""

    requests: int
    failed: int
    failures: dict[str, int] = field(default_factory=dict)
    texts: dict[str, int] = field(default_factory=dict)
    """Answers to the same prompt, by the beginning of their text."""
    tokens: int = 0
    seconds: float = 0.0
    """From the first request to the end of the last one."""
    ttft_p50: float | None = None
    ttft_p99: float | None = None
    itl_p50: float | None = None
    itl_p99: float | None = None
    longest: float | None = None
    """The longest request."""
    pause: float = 0.0
    """The longest time in which no request ended well."""

    def as_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return asdict(self)


def summary(requests: Iterable[Request], *, of: int = 4) -> Summary:
    """Sum requests up; texts are told apart by their first `of` characters."""
    found = sorted(requests, key=lambda request: request.ended)
    if not found:
        return Summary(0, 0)
    well = [request for request in found if not request.failure]
    firsts = [request.first - request.asked for request in well if request.first is not None]
    gaps = [gap for request in well for gap in request.gaps]
    began, ended = min(request.asked for request in found), found[-1].ended
    marks = [began, *(request.ended for request in well), ended]
    failures = Counter(request.failure for request in found if request.failure)
    return Summary(
        requests=len(found),
        failed=len(found) - len(well),
        failures=dict(failures.most_common()),
        texts=dict(Counter(request.text[:of] for request in well).most_common()),
        tokens=sum(request.tokens for request in well),
        seconds=ended - began,
        ttft_p50=percentile(firsts, 50),
        ttft_p99=percentile(firsts, 99),
        itl_p50=percentile(gaps, 50),
        itl_p99=percentile(gaps, 99),
        longest=max((request.ended - request.asked for request in well), default=None),
        pause=max(later - earlier for earlier, later in pairwise(marks)),
    )


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the value that so many percent do not exceed (nearest rank); None of no values."""
    if not values:
        return None
    ordered = sorted(values)
    return ordered[max(0, math.ceil(len(ordered) * percent / 100) - 1)]


def read(path: Path, since: float = 0.0, until: float = math.inf) -> list[Request]:
    """Return what a file has of requests that were asked in a time; a torn last line is none."""
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    told = (json.loads(line) for line in lines)
    return [
        Request(**{**each, "gaps": tuple(each["gaps"])})
        for each in told
        if since <= each["asked"] < until
    ]


# Of `vllm bench serve`, the other client: its own JSON


def bench_failures(result: dict[str, Any], wanted: int) -> int:
    """Return how many of the `wanted` requests it did not complete: it exits 0 whatever happens."""
    return wanted - int(result.get("completed", 0))


# A process of its own


@dataclass
class Clients:
    """The clients that run; their requests so far."""

    out: Path
    process: subprocess.Popen[bytes]
    stopped: bool = False

    def requests(self, since: float = 0.0, until: float = math.inf) -> list[Request]:
        return read(self.out, since, until)

    def stop(self) -> None:
        """Ask nothing new; wait for what has begun."""
        if self.stopped:
            return
        self.stopped = True
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(timeout=PATIENCE + 30)


@contextmanager
def clients(
    url: str,
    key: str,
    out: Path,
    *,
    rate: float = 0.0,
    together: int = 0,
    model: str = "tiny",
    trusted: Path | None = None,
) -> Iterator[Clients]:
    """
    Have clients ask while this lasts; they end with it.

    `rate`: so many requests a second. `together`: so many clients, each of which makes a long
    request as soon as its last one has ended. `trusted`: the only certificate that they trust.
    """
    trust = {"SSL_CERT_FILE": str(trusted)} if trusted else {}
    command = [sys.executable, "-m", "tests.lab.upgrade_load", "--url", url, "--model", model]
    command += ["--rate", str(rate), "--together", str(together), "--out", str(out)]
    log = out.with_suffix(".log")
    with log.open("wb") as said:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env={**os.environ, **trust, "OPENAI_API_KEY": key},
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=said,
        )
    running = Clients(out, process)
    try:
        yield running
        if process.poll() is not None and not running.stopped:
            raise AssertionError(f"the clients ended early: {log.read_text()[-2000:]}")
    finally:
        if process.poll() is None:
            running.stop()


async def ask(client: openai.AsyncOpenAI, model: str, number: int, tokens: int) -> Request:
    """Make one request, whatever becomes of it."""
    asked = time.time()
    first, last, gaps, pieces, finish, error = None, asked, [], [], None, ""
    try:
        stream = await client.completions.create(
            model=model,
            prompt=PROMPT,
            max_tokens=tokens,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        async for piece in stream:
            now = time.time()
            for choice in piece.choices:
                if choice.text and first is None:
                    first = now
                elif choice.text:
                    gaps.append(round(now - last, 4))
                last = now
                pieces.append(choice.text)
                finish = choice.finish_reason or finish
    except openai.APIStatusError as raised:
        error = f"HTTP {raised.status_code}"
    except openai.APITimeoutError:
        error = "no answer"
    except Exception as raised:  # noqa: BLE001  # what a client gets is what is measured
        cause = raised.__cause__ or raised
        error = f"{type(cause).__name__}: {cause}"[:120]
    text = "".join(pieces)
    # The model's tokens are bytes: one of ASCII's each
    return Request(
        number, asked, time.time(), first, tuple(gaps), len(text), finish, text[:16], error
    )


async def ask_on(url: str, model: str, rate: float, together: int, out: Path) -> None:
    """Ask until told to end, `rate` times a second or `together` at once; write what was seen."""
    over = asyncio.Event()
    loop = asyncio.get_running_loop()
    for each in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(each, over.set)
    client = openai.AsyncOpenAI(base_url=url, max_retries=0, timeout=PATIENCE)
    under_way: set[asyncio.Task[None]] = set()
    with out.open("a", buffering=1) as file:

        async def one(number: int, tokens: int) -> None:
            file.write(json.dumps(asdict(await ask(client, model, number, tokens))) + "\n")

        async def again_and_again(number: int) -> None:
            while not over.is_set():
                await one(number, LONG_TOKENS)
                await asyncio.sleep(0.01)  # where every one fails at once

        def begin(what: Coroutine[Any, Any, None]) -> None:
            task = asyncio.create_task(what)
            under_way.add(task)
            task.add_done_callback(under_way.discard)

        for number in range(1, together + 1):
            begin(again_and_again(number))
        began, number = time.monotonic(), 0
        while rate and not over.is_set():
            number += 1
            begin(one(number, LONG_TOKENS if number % LONG_EVERY == 0 else SHORT_TOKENS))
            rest = began + number / rate - time.monotonic()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), max(rest, 0.001))
        await over.wait()
        if under_way:
            await asyncio.wait(under_way, timeout=PATIENCE)
    await client.close()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--url", required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--rate", type=float, default=0.0)
    parser.add_argument("--together", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    asyncio.run(ask_on(given.url, given.model, given.rate, given.together, given.out))


if __name__ == "__main__":
    main()
