"""RUNS ON THE NODE: answer requests without computing, to measure a load client's own limit.

Takes (`PARAMETERS`):
  tokens   number of tokens of each answer
  answer   a document that is the whole answer; null: answers are streams of tokens

Prints {"port": N}, where N is a port on loopback. The server ends when its input ends.

The server answers like a busy vLLM, in steps. Each step sends one event to every request. So a
token costs the client as much as with vLLM: one read for each request, and one wake-up for all
requests of a step. The program needs only Python 3.8 and the standard library.
"""

from __future__ import annotations

import asyncio
import json
from typing import Any, Dict

from gpufleet.on_node.load.controller_pipe import CommandReader, LineWriter

PARAMETERS: "dict[str, Any]" = globals().get("PARAMETERS") or {}

STEP_SECONDS = 0.001
"""Seconds between two steps. If the client is slower, the pipes fill and the server waits."""
UNSENT_BYTES = 1 << 14
"""
If a client has more unread bytes than this, its request gets no token in a step.
"""

HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n"
    b"transfer-encoding: chunked\r\n\r\n"
)


def event(document: Any) -> bytes:
    """Return a chunk with one event of an answer."""
    data = document if isinstance(document, str) else json.dumps(document, separators=(",", ":"))
    text = b"data: %b\n\n" % data.encode()
    return b"%x\r\n%b\r\n" % (len(text), text)


def events(tokens: int) -> "tuple[bytes, bytes]":
    """Return the event of one token, and all bytes that follow the last token."""
    about = {"id": "cmpl-0", "object": "text_completion", "created": 0, "model": "none"}
    choice = {"index": 0, "text": " token", "logprobs": None, "finish_reason": None}
    usage = {"prompt_tokens": 1, "total_tokens": 1 + tokens, "completion_tokens": tokens}
    last = event({**about, "choices": [], "usage": usage}) + event("[DONE]") + b"0\r\n\r\n"
    return event({**about, "choices": [choice]}), last


def document_answer(answer: Any) -> bytes:
    """Return an answer that is one document."""
    body = json.dumps(answer, separators=(",", ":")).encode()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return head % len(body) + body


class Server(asyncio.Protocol):
    """One connection. The end of a request is detected only by the request's length."""

    def __init__(self, streams: "dict[Server, int]", head: bytes, tokens: int) -> None:
        self._streams, self._head, self._tokens = streams, head, tokens
        self._data = bytearray()
        self.transport: Any = None

    def connection_made(self, transport: Any) -> None:
        """Store the transport."""
        self.transport = transport

    def data_received(self, data: bytes) -> None:
        """Begin to answer a complete request."""
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        if found:
            length = head.lower().partition(b"content-length:")[2].split(None, 1)[0]
            if len(body) >= int(length):
                self._data.clear()
                self.transport.write(self._head)
                self._streams[self] = self._tokens

    def connection_lost(self, _: Any) -> None:
        """Remove the connection's request."""
        self._streams.pop(self, None)


async def serve(tokens: int, answer: Any) -> None:
    """Answer requests until the input ends. The end of the input ends the process."""
    loop = asyncio.get_running_loop()
    streams: Dict[Server, int] = {}
    head, (token, last) = HEAD, events(tokens)
    if answer is not None:
        head, tokens, last = b"", 0, document_answer(answer)
    server = await loop.create_server(lambda: Server(streams, head, tokens), "127.0.0.1", 0)
    CommandReader(loop, lambda _: None)
    port = server.sockets[0].getsockname()[1]
    LineWriter(loop).write(b'{"port":%d}\n' % port)
    while True:
        for stream, left in list(streams.items()):
            if stream.transport.get_write_buffer_size() > UNSENT_BYTES:
                continue
            if left:
                stream.transport.write(token)
                streams[stream] = left - 1
            else:
                stream.transport.write(last)
                del streams[stream]
        await asyncio.sleep(STEP_SECONDS)


if __name__ == "__main__":
    asyncio.run(serve(PARAMETERS["tokens"], PARAMETERS["answer"]))
