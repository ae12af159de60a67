"""RUNS ON THE NODE: send requests over HTTP/1.1 connections, and time the tokens of answers.

The module uses asyncio's protocols instead of streams. So times are taken in the callback that gets
the bytes, and no task is woken for each token. An answer is a stream of events
(`text/event-stream`), as vLLM's OpenAI server sends them for /v1/completions and
/v1/chat/completions. The answer's end is marked by chunks, by a length, or by the connection's end.
If a model generates no text, its answer is one JSON document. The text of an answer is not stored
and never appears in an error.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Callable, List, Optional

from gpufleet.on_node.load.failure_reasons import (
    CLOSED,
    CUT_OFF,
    EMPTY,
    IN_STREAM,
    NOT_A_STREAM,
    NOT_HTTP,
    TOO_LARGE,
    WRONG,
    reason_of,
)
from gpufleet.on_node.serving.questions import Judged

HEAD_BYTES = 64 << 10
LINE_BYTES = 1 << 20
"""Maximum bytes of a line, which is an event or a chunk's length."""
ANSWER_BYTES = 64 << 20
"""Maximum bytes of an answer. That is about 250,000 events of vLLM with 250 bytes each."""

_HEAD, _CHUNK, _LENGTH, _UNTIL_CLOSED = range(4)


class Exchange:
    """One request and its answer. Times are those of the event loop's clock."""

    __slots__ = (
        "asked",
        "chat",
        "done",
        "due",
        "ended",
        "error",
        "events",
        "first",
        "gaps",
        "header",
        "holder",
        "judge",
        "last",
        "parts",
        "prompt_tokens",
        "resume",
        "sent",
        "tokens",
    )

    def __init__(
        self,
        due: float,
        sent: float,
        *,
        chat: bool = False,
        judge: Optional[Callable[[Any], Judged]] = None,
    ) -> None:
        self.due, self.sent, self.chat = due, sent, chat
        self.judge = judge
        """
        Function that gets an answer which is one document, or None if the answer is a stream.
        """
        self.parts: List[bytes] = []
        """Received parts of an answer that is one document."""
        self.first: Optional[float] = None
        self.last = 0.0
        self.done: Optional[float] = None
        self.gaps: List[int] = []
        """Times between two events with tokens, in microseconds."""
        self.events = 0
        self.tokens = 0
        """Number of tokens that the server has counted."""
        self.prompt_tokens = 0
        self.asked = 0
        self.error = ""
        self.ended = False
        """Whether the end mark was received."""
        self.header = b""
        self.resume: Optional[Callable[[], None]] = None
        self.holder: Any = None
        """The request's connection, or the task that opens a connection."""

    def take(self, event: bytes, now: float) -> None:
        """Process one event of the answer."""
        # vLLM writes compact JSON. These bytes cannot be part of a text in it, because quotes in
        # texts have a backslash. Parsing each event would double the time that an event costs.
        if (
            not self.chat
            and b'"choices":[{' in event
            and b'"finish_reason":null' in event
            and b'"usage":{' not in event
            and b'"error":' not in event
        ):
            self._token(now)
        elif event == b"[DONE]":
            self.ended = True
        else:
            self._take_document(event, now)

    def take_whole(self, now: float) -> None:
        """
        Process an answer that is one document. It has no first token and no times between tokens.
        """
        assert self.judge is not None
        text, self.parts = b"".join(self.parts), []
        try:
            document = json.loads(text)
            usage = document.get("usage") or {}
            # For a reranker, older releases report only the total number.
            counted = usage.get("prompt_tokens") or usage.get("total_tokens")
            self.prompt_tokens = int(counted or self.prompt_tokens)
            if self.judge(document).problem:
                self.error = WRONG
        except (ValueError, TypeError, AttributeError, RecursionError):
            self.error = IN_STREAM
        if not self.error:
            self.done = now

    def _take_document(self, event: bytes, now: float) -> None:
        try:
            document = json.loads(event)
            if document.get("error"):
                self.error = self.error or IN_STREAM
                return
            usage = document.get("usage")
            if usage:
                self.tokens = int(usage.get("completion_tokens") or 0)
                self.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            if any(_has_token(choice) for choice in document.get("choices") or ()):
                self._token(now)
        except (ValueError, TypeError, AttributeError, RecursionError):
            self.error = self.error or IN_STREAM

    def _token(self, now: float) -> None:
        if self.first is None:
            self.first = now
        else:
            self.gaps.append(round((now - self.last) * 1e6))
        self.last = now
        self.events += 1


def _has_token(choice: Any) -> bool:
    """Return whether a choice has a token, and not only a role or the end mark."""
    delta = choice.get("delta")
    if delta is None:
        # The text is empty if the token is only a part of a character. The event that ends the
        # answer has no text either.
        return bool(choice.get("text")) or choice.get("finish_reason") is None
    return any(value for key, value in delta.items() if key not in ("role", "finish_reason"))


class Connection(asyncio.Protocol):
    """
    One connection, which has at most one exchange at a time.

    `owner` is called when the connection is made, when an exchange is over, and when the connection
    is lost.
    """

    def __init__(self, clock: Callable[[], float], owner: Any) -> None:
        self._clock, self._owner = clock, owner
        self.transport: Any = None
        self.exchange: Optional[Exchange] = None
        self.idle_since = 0.0
        self._rest = b""
        self._state = _HEAD
        self._left = 0
        self._in_chunk = False
        self._line = b""
        self._total = 0
        self._keep = True
        self._skip = False

    def connection_made(self, transport: Any) -> None:
        """Store the transport. asyncio has already set TCP_NODELAY."""
        self.transport = transport
        self._owner.made(self)

    def send(self, exchange: Exchange, data: bytes) -> None:
        """Send a request."""
        self.exchange = exchange
        exchange.holder = self
        self._rest, self._line = b"", b""
        self._state, self._left, self._total = _HEAD, 0, 0
        self._in_chunk, self._keep, self._skip = False, True, False
        self.transport.write(data)

    def data_received(self, data: bytes) -> None:
        """Process a part of an answer that was received."""
        exchange = self.exchange
        if exchange is None:
            self.drop()
            return
        now = self._clock()
        self._total += len(data)
        if self._total > ANSWER_BYTES:
            self._fail(TOO_LARGE)
            return
        if self._rest:
            data, self._rest = self._rest + data, b""
        if self._state == _HEAD:
            data = self._read_head(data)
        if self.exchange is not exchange or self._state == _HEAD:
            return
        if data or (self._state == _LENGTH and not self._left):
            self._read_body(data, now)

    def eof_received(self) -> bool:
        """Close this side of the connection too."""
        return False

    def connection_lost(self, problem: Optional[Exception]) -> None:
        """End the exchange in progress."""
        exchange = self.exchange
        if exchange is not None:
            # An answer without a length ends with its connection. Any other answer may end so too,
            # if it is complete.
            if problem is None and (self._state == _UNTIL_CLOSED or exchange.ended):
                self._finish(reusable=False)
            elif problem is not None:
                self._fail(reason_of(problem))
            else:
                self._fail(CLOSED if self._state == _HEAD else CUT_OFF)
        self._owner.lost(self)

    def drop(self) -> None:
        """Close the connection at once."""
        if self.transport is not None:
            self.transport.abort()

    def give_up(self, why: str) -> None:
        """
        Close the connection. Its exchange fails, unless the answer's end mark was received.
        """
        exchange = self.exchange
        if exchange is None:
            self.drop()
        elif exchange.ended and not exchange.error:
            self._finish(reusable=False)
        else:
            self._fail(why)

    def _fail(self, why: str) -> None:
        exchange = self.exchange
        if exchange is not None:
            exchange.error = exchange.error or why
            self._finish(reusable=False)

    def _finish(self, *, reusable: bool) -> None:
        exchange, self.exchange = self.exchange, None
        assert exchange is not None
        if self._line.startswith(b"data:") and not self._skip:  # the last line may have no end
            exchange.take(self._line[5:].strip(), self._clock())
        if exchange.error:
            pass
        elif exchange.judge is not None:
            exchange.take_whole(self._clock())
        elif not exchange.ended:
            exchange.error = CUT_OFF
        elif exchange.first is None:
            exchange.error = EMPTY
        else:
            exchange.done = exchange.last
        if not reusable:
            self.drop()
        self._owner.released(self, exchange, reusable)

    def _read_head(self, data: bytes) -> bytes:
        """Read the head of an answer, and return the bytes that follow the head."""
        head, found, body = data.partition(b"\r\n\r\n")
        if not found:
            if len(data) > HEAD_BYTES:
                self._fail(NOT_HTTP)
            self._rest = data
            return b""
        first, *lines = head.split(b"\r\n")
        words = first.split(None, 2)
        if len(words) < 2 or not words[0].startswith(b"HTTP/1.") or not words[1].isdigit():
            self._fail(NOT_HTTP)
            return b""
        status = int(words[1])
        if 100 <= status < 200:
            return self._read_head(body) if body else b""
        fields = {}
        for line in lines:
            name, _, value = line.partition(b":")
            fields[name.strip().lower()] = value.strip().lower()
        self._keep = words[0] == b"HTTP/1.1" and b"close" not in fields.get(b"connection", b"")
        if status != 200:
            self._skip_body("%d" % status)
        elif self.exchange is not None and self.exchange.judge is not None:
            pass
        elif b"text/event-stream" not in fields.get(b"content-type", b""):
            self._skip_body(NOT_A_STREAM)
        if b"chunked" in fields.get(b"transfer-encoding", b""):
            self._state = _CHUNK
        elif fields.get(b"content-length", b"").isdigit():
            self._state, self._left = _LENGTH, int(fields[b"content-length"])
        elif self._skip:
            self._finish(reusable=False)
        else:
            self._state = _UNTIL_CLOSED
        return body

    def _skip_body(self, why: str) -> None:
        """Discard the rest of a failed answer, so that its connection can be used again."""
        assert self.exchange is not None
        self.exchange.error = why
        self._skip = True

    def _read_body(self, data: bytes, now: float) -> None:
        if self._state == _CHUNK:
            self._read_chunks(data, now)
        elif self._state == _UNTIL_CLOSED:
            self._read_events(data, now)
        else:
            self._read_events(data[: self._left], now)
            self._left -= len(data)
            if self._left <= 0 and self.exchange is not None:
                self._finish(reusable=self._keep and self._left == 0)

    def _read_chunks(self, data: bytes, now: float) -> None:
        at, end = 0, len(data)
        while at < end:
            if self._left:
                taken = min(self._left, end - at)
                self._read_events(data[at : at + taken], now)
                if self.exchange is None:
                    return
                at, self._left = at + taken, self._left - taken
                continue
            stop = data.find(b"\r\n", at)
            if stop < 0:
                break
            line, at = data[at:stop], stop + 2
            if self._in_chunk:  # the line end after a chunk
                self._in_chunk = False
                continue
            try:
                self._left = int(line.partition(b";")[0], 16)
            except ValueError:
                self._fail(NOT_HTTP)
                return
            self._in_chunk = True
            if not self._left:
                # The servers send no trailers, so the empty line follows.
                self._finish(reusable=self._keep and data[at:] == b"\r\n")
                return
        self._rest = data[at:]
        if len(self._rest) > LINE_BYTES:
            self._fail(NOT_HTTP)

    def _read_events(self, data: bytes, now: float) -> None:
        exchange = self.exchange
        assert exchange is not None
        if self._skip:
            return
        if exchange.judge is not None:
            exchange.parts.append(data)
            return
        if self._line:
            data = self._line + data
        *lines, self._line = data.split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                exchange.take(line[5:].strip(), now)
        if len(self._line) > LINE_BYTES:
            self._fail(TOO_LARGE)
        elif exchange.error:
            self._fail(exchange.error)
