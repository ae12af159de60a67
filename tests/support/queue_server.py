"""
A stand-in for vLLM's OpenAI server: slots, one FIFO queue, service times that are known.

    with QueueServer(slots=4, first_seconds=0.02, token_seconds=0.005) as server:
        ... server.url, server.capacity(tokens=10), server.record

`async with` serves in the loop that runs, by that loop's clock.

A request waits for a slot, holds it for `first_seconds` + (tokens - 1) * `token_seconds`, and gets
its tokens at those times as vLLM streams them; without `stream`, all of them at the end. Slots are
busy by the clock of the plan: a request begins when its slot was to be free, not when the event
loop came to it, so the capacity is exact. What a client leaves gives its slot back, as vLLM aborts
it. Its record is the other route by which tests verify a client.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import email
import heapq
import json
import random
import ssl
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Self

Fault = Literal[
    "", "500", "503", "429", "reset", "cut off", "hang", "stop", "error in stream", "closed",
    "not a stream", "not a number",
]  # fmt: skip
"""What happens to a request: "reset", "cut off" (its connection ends), "hang" and "error in stream"
after its first token; "stop": it has no end mark, but ends well otherwise; "": nothing. Where no
stream is asked for, "cut off" and "reset" end the connection before the answer; "not a number":
vectors and scores have one."""

HEAD = (
    b"HTTP/1.1 200 OK\r\ndate: Sun, 06 Nov 2033 08:49:37 GMT\r\nserver: uvicorn\r\n"
    b"content-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
SECRET_TEXT = "text-of-an-answer"
"""In every answer, failures too: no client may print it."""


@dataclass
class Seen:
    """One request, as the server saw it; times are those of its event loop's clock."""

    arrived: float
    path: str
    headers: dict[str, str]
    body: dict[str, Any] = field(repr=False)
    began: float | None = None
    ended: float | None = None
    connection: int = 0
    fault: Fault = ""

    @property
    def prompt(self) -> Any:
        """Return its token ids, or its text."""
        return self.body.get("prompt")

    @property
    def tokens(self) -> int:
        """Return the tokens that it asked for; 1 of a model that answers with a document."""
        whole = {"input", "query", "file"}
        return int(self.body.get("max_tokens", 1 if self.body.keys() & whole else 16))


class QueueServer:
    """A server in a thread of this process with a loop of its own, or in a loop that runs."""

    def __init__(
        self,
        *,
        slots: int = 4,
        first_seconds: float = 0.02,
        token_seconds: float = 0.005,
        key: str | None = None,
        faults: Sequence[Fault] = (),
        exponential: int | None = None,
        tls: ssl.SSLContext | None = None,
        model: str = "stand-in",
    ) -> None:
        """
        Describe a server; `with` or `async with` starts it.

        `faults` happen to requests in their order, from the first again after the last. With
        `exponential`, a seed, the first token takes a random time of the mean `first_seconds`.
        """
        self.slots, self.first_seconds, self.token_seconds = slots, first_seconds, token_seconds
        self.record: list[Seen] = []
        self.stalls: list[tuple[float, float]] = []
        self._key, self._faults, self._tls = key, tuple(faults), tls
        self._model = model
        self._random = random.Random(exponential) if exponential is not None else None
        self._free = [0.0] * slots
        self._waiting: collections.deque[asyncio.Future[float]] = collections.deque()
        self._busy = 0
        self._connections = 0
        self._late: list[float] = []
        self._loop: asyncio.AbstractEventLoop
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.port = 0

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(10)
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._end.set)
        self._thread.join(10)

    async def __aenter__(self) -> Self:
        await self._listen()
        return self

    async def __aexit__(self, *_: object) -> None:
        self._listening.close()

    @property
    def url(self) -> str:
        """Return where it listens."""
        return f"{'https' if self._tls else 'http'}://127.0.0.1:{self.port}"

    @property
    def connections(self) -> int:
        """Return how many connections were ever made."""
        return self._connections

    @property
    def lag_p99(self) -> float:
        """Return the 99th percentile of the delay with which tokens were sent, in seconds."""
        late = sorted(self._late)
        return late[int(len(late) * 0.99)] if late else 0.0

    def service_seconds(self, tokens: int) -> float:
        """Return how long a request holds a slot, in the mean."""
        return self.first_seconds + (tokens - 1) * self.token_seconds

    def capacity(self, tokens: int) -> float:
        """Return the requests per second that it serves with all slots busy."""
        return self.slots / self.service_seconds(tokens)

    def stall(self, seconds: float) -> None:
        """Stop all of it for so long, as a process that gets no processor."""

        def stop() -> None:
            began = time.monotonic()
            time.sleep(seconds)
            self.stalls.append((began, time.monotonic()))

        self._loop.call_soon_threadsafe(stop)

    def _run(self) -> None:
        asyncio.run(self._serve())

    async def _listen(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._listening = await asyncio.start_server(
            self._connection, "127.0.0.1", 0, ssl=self._tls, backlog=2048, limit=1 << 22
        )
        self.port = self._listening.sockets[0].getsockname()[1]

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        await self._listen()
        self._ready.set()
        await self._end.wait()
        self._listening.close()
        for task in asyncio.all_tasks() - {asyncio.current_task()}:
            task.cancel()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._connections += 1
        number = self._connections
        gone = (ConnectionError, asyncio.IncompleteReadError, ssl.SSLError)
        # Cancelled at the server's own end, which asyncio's streams would log.
        with contextlib.suppress(asyncio.CancelledError, *gone):
            while await self._exchange(reader, writer, number):
                pass
        writer.close()

    async def _exchange(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, connection: int
    ) -> bool:
        """Answer one request; return whether its connection goes on."""
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        method, path, _ = head[0].split(" ")
        headers = {
            name.lower(): value.strip()
            for name, _, value in (line.partition(":") for line in head[1:])
            if name
        }
        data = await reader.readexactly(int(headers.get("content-length", 0)))
        if method == "GET":
            await self._get(path, writer)
            return True
        if self._key is not None and headers.get("authorization") != f"Bearer {self._key}":
            await self._status(writer, "401 Unauthorized")
            return True
        form = headers.get("content-type", "").startswith("multipart/form-data")
        body = read_form(headers["content-type"], data) if form else json.loads(data)
        seen = Seen(self._loop.time(), path, headers, body, connection=connection)
        self.record.append(seen)
        if self._faults:
            seen.fault = self._faults[(len(self.record) - 1) % len(self._faults)]
        return await self._answer(seen, reader, writer)

    async def _get(self, path: str, writer: asyncio.StreamWriter) -> None:
        if path == "/metrics":
            await self._plain(
                writer,
                f"vllm:num_requests_running {self._busy}\n"
                f"vllm:num_requests_waiting {len(self._waiting)}\n"
                f"vllm:kv_cache_usage_perc {self._busy / self.slots}\n",
                "text/plain; version=0.0.4",
            )
        elif path == "/v1/models":
            models = {"object": "list", "data": [{"id": self._model, "object": "model"}]}
            await self._plain(writer, json.dumps(models), "application/json")
        else:
            await self._plain(writer, "", "text/plain")

    async def _plain(self, writer: asyncio.StreamWriter, text: str, kind: str) -> None:
        head = f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\ncontent-length: {len(text)}\r\n\r\n"
        writer.write((head + text).encode())
        await writer.drain()

    async def _status(self, writer: asyncio.StreamWriter, status: str) -> None:
        body = json.dumps({"error": {"message": SECRET_TEXT}})
        head = f"HTTP/1.1 {status}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        await writer.drain()

    async def _answer(
        self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        known = {"prompt", "messages", "input", "query", "file"}
        if not seen.body.keys() & known or seen.tokens < 1:
            await self._status(writer, "400 Bad Request")
            return True
        if seen.fault in ("500", "503", "429"):
            words = {
                "500": "Internal Server Error",
                "503": "Service Unavailable",
                "429": "Too Many Requests",
            }
            await self._status(writer, f"{seen.fault} {words[seen.fault]}")
            return True
        if seen.fault == "closed":
            return False
        if seen.fault == "not a stream":
            await self._plain(writer, json.dumps({"text": SECRET_TEXT}), "application/json")
            return True
        free = await self._slot(reader)
        if free is None:
            return False
        seen.began = max(seen.arrived, free)
        end = None
        try:
            send = self._stream if seen.body.get("stream") else self._whole
            end, goes_on = await send(seen, reader, writer)
        finally:
            seen.ended = self._loop.time() if end is None else end
            self._release(seen.ended)
        return goes_on

    async def _slot(self, reader: asyncio.StreamReader) -> float | None:
        """Wait for a slot; return when it was free. None: the client has gone."""
        if self._busy < self.slots:
            self._busy += 1
            return heapq.heappop(self._free)
        turn: asyncio.Future[float] = self._loop.create_future()
        self._waiting.append(turn)
        gone = asyncio.ensure_future(reader.read(1))
        either: list[asyncio.Future[Any]] = [turn, gone]
        try:
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        finally:
            gone.cancel()
            if not turn.done():
                self._waiting.remove(turn)
                turn.cancel()
        if turn.cancelled():
            return None
        return turn.result()

    def _release(self, end: float) -> None:
        if self._waiting:
            self._waiting.popleft().set_result(end)
        else:
            self._busy -= 1
            heapq.heappush(self._free, end)

    async def _stream(
        self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[float, bool]:
        """Send an answer; return when it was to end, and whether the connection goes on."""
        assert seen.began is not None
        first = self.first_seconds
        if self._random is not None:
            first = self._random.expovariate(1 / first)
        chat = seen.path.endswith("/chat/completions")
        writer.write(HEAD)
        at = seen.began + first
        for number in range(seen.tokens):
            at = seen.began + first + number * self.token_seconds
            await asyncio.sleep(at - self._loop.time())
            self._late.append(self._loop.time() - at)
            if reader.at_eof() or writer.transport.is_closing():
                return self._loop.time(), False
            if number == 0 and chat:
                writer.write(self._event(chat=True, role=True))
            if number == 1 and seen.fault in ("reset", "cut off", "hang", "error in stream"):
                return self._loop.time(), await self._break(seen.fault, reader, writer)
            writer.write(self._event(chat=chat, last=number == seen.tokens - 1))
        prompt = len(seen.prompt) if isinstance(seen.prompt, list) else 7
        usage = {
            "prompt_tokens": prompt,
            "total_tokens": prompt + seen.tokens,
            "completion_tokens": seen.tokens,
        }
        writer.write(chunk({"id": "x", "choices": [], "usage": usage}))
        if seen.fault != "stop":
            writer.write(chunk("[DONE]"))
        writer.write(b"0\r\n\r\n")
        await writer.drain()
        return at, True

    async def _whole(
        self, seen: Seen, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> tuple[float, bool]:
        """Send an answer that is no stream; return as `_stream`."""
        assert seen.began is not None
        end = seen.began + self.first_seconds + (seen.tokens - 1) * self.token_seconds
        await asyncio.sleep(end - self._loop.time())
        if reader.at_eof() or writer.transport.is_closing():
            return self._loop.time(), False
        if seen.fault in ("reset", "cut off"):
            return self._loop.time(), await self._break(seen.fault, reader, writer)
        usage = {"prompt_tokens": 7, "completion_tokens": seen.tokens}
        choice = {"index": 0, "text": SECRET_TEXT, "finish_reason": "length"}
        answer = pooled(seen) or {"id": "cmpl-1", "choices": [choice], "usage": usage}
        await self._plain(writer, json.dumps(answer), "application/json")
        return end, True

    def _event(self, *, chat: bool, role: bool = False, last: bool = False) -> bytes:
        about = {"id": "cmpl-1", "object": "text_completion", "created": 1, "model": self._model}
        end = "length" if last else None
        choice: dict[str, Any] = {"index": 0, "logprobs": None, "finish_reason": end}
        if role:
            choice["delta"] = {"role": "assistant", "content": ""}
        elif chat:
            choice["delta"] = {"content": SECRET_TEXT}
        else:
            # Quotes and braces as a hostile text has them.
            choice["text"] = SECRET_TEXT + ' "usage":{ "choices":[{ "error": \n\n data: [DONE]'
        return chunk({**about, "choices": [choice]})

    async def _break(
        self, fault: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> bool:
        """Break off an answer after its first token; return whether the connection goes on."""
        if fault == "error in stream":
            writer.write(chunk({"error": {"message": SECRET_TEXT, "code": 500}}))
            writer.write(chunk("[DONE]") + b"0\r\n\r\n")
            await writer.drain()
            return True
        if fault == "hang":
            await reader.read(1)
        elif fault == "reset":
            # Not delivered bytes are dropped, and the other side gets RST.
            await writer.drain()
            writer.get_extra_info("socket").setsockopt(1, 13, b"\1\0\0\0\0\0\0\0")  # SO_LINGER 0
            writer.transport.abort()
        return False


def pooled(seen: Seen) -> dict[str, Any] | None:
    """Return the answer of a model that makes no text; None: it is asked for one."""
    body, score = seen.body, None if seen.fault == "not a number" else 0.5
    if "query" in body:
        words = " ".join([body["query"], *body["documents"]]).split()
        rows = [{"index": at, "relevance_score": score} for at in range(len(body["documents"]))]
        return {"results": rows, "usage": {"total_tokens": len(words)}}
    if "file" in body:
        said = None if seen.fault == "not a number" else SECRET_TEXT
        return {"text": said, "usage": {"type": "duration", "seconds": 1}}
    if "input" not in body:
        return None
    row = {
        "index": 0,
        "label": "a",
        "probs": [score, 0.5],
        "embedding": [score, 0.5],
        "data": [0.5],
    }
    return {"data": [row], "usage": {"prompt_tokens": len(body["input"])}}


def read_form(kind: str, data: bytes) -> dict[str, Any]:
    """Return a form's fields: texts, and bytes of files."""
    read = email.message_from_bytes(b"Content-Type: " + kind.encode() + b"\r\n\r\n" + data)
    found: dict[str, Any] = {}
    for part in read.walk():
        if part.is_multipart():
            continue
        name = str(part.get_param("name", header="Content-Disposition"))
        content = part.get_payload(decode=True)
        assert isinstance(content, bytes)
        found[name] = content if part.get_filename() else content.decode()
    return found


def chunk(document: Any) -> bytes:
    """Return an event of an answer as one chunk."""
    data = document if isinstance(document, str) else json.dumps(document, separators=(",", ":"))
    text = b"data: %b\n\n" % data.encode()
    return b"%x\r\n%b\r\n" % (len(text), text)
