"""A machine between nodes and the mirror that does something to the weights of models."""

from __future__ import annotations

import http.client
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from urllib.parse import urlsplit

DRIP_SECONDS = 0.5
"""Between two bytes."""
WEIGHTS = ".safetensors"


@dataclass
class Relay:
    """Where it listens, and what it does: "" (passes all), "changes", "drips" or "is silent"."""

    upstream: str
    url: str = ""
    does: str = ""
    over: bool = False
    """At the end of all: what it still drips comes at once."""
    asked: list[str] = field(default_factory=list)
    """The paths of weights that were asked for while it did something."""

    def sent(self, body: bytes) -> Iterator[bytes]:
        """
        Return what goes to the node of a file of weights, piece by piece.

        What it does to an answer is settled as that begins: another node's may come whole beside.
        """
        does = self.does
        if does == "changes":
            middle = len(body) // 2
            body = body[:middle] + bytes([body[middle] ^ 1]) + body[middle + 1 :]
        while body and does in ("drips", "is silent") and not self.over:
            time.sleep(DRIP_SECONDS)
            if does == "drips":
                yield body[:1]
                body = body[1:]
        yield body


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def __init__(self, *connection: object, relay: Relay) -> None:
        self.relay = relay
        super().__init__(*connection)  # type: ignore[arg-type]  # socketserver's own three

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        """Ask the mirror the same, and hand its answer on."""
        mirror = urlsplit(self.relay.upstream)
        connection = http.client.HTTPConnection(mirror.hostname or "", mirror.port, timeout=60)
        headers = {name: text for name, text in self.headers.items() if name.lower() != "host"}
        connection.request(self.command, self.path, headers=headers)
        answer = connection.getresponse()
        body = answer.read()
        self.send_response(answer.status)
        for name, text in answer.getheaders():
            if name.lower() not in ("date", "server", "connection"):
                self.send_header(name, text)
        self.end_headers()
        if self.command == "HEAD":
            return
        if self.path.endswith(WEIGHTS) and self.relay.does:
            self.relay.asked.append(self.path)
            with suppress(OSError):  # who asked may have been ended
                for piece in self.relay.sent(body):
                    self.wfile.write(piece)
                    self.wfile.flush()
        else:
            self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # http.server's name
        """Say nothing."""


@contextmanager
def relay(address: str, upstream: str) -> Iterator[Relay]:
    """Listen at `address`, on a port of its own, until the end."""
    made = Relay(upstream)
    with ThreadingHTTPServer((address, 0), partial(_Handler, relay=made)) as bound:
        made.url = f"http://{address}:{bound.server_address[1]}"
        Thread(target=bound.serve_forever, daemon=True).start()
        try:
            yield made
        finally:
            made.does, made.over = "", True
            bound.shutdown()
