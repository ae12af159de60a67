#!/usr/bin/python3 -I
"""RUNS ON LAB NODES in vLLM's place: what ranks, units, status and networks are tested around.

It listens where `vllm serve` of a rank listens, and connects where it connects: the first node on
--master-port and, with a server, on --port; the others to the first one's, to which they send
bytes. It completes every prompt with the number of bytes that the others have sent. A stream has a
piece every 0.1 s, as many as its max_tokens.
"""

import contextlib
import http.server
import json
import os
import signal
import socket
import socketserver
import sys
import threading
import time

HEARD = [0]
STREAMS = []


def value(name, otherwise=""):
    return sys.argv[sys.argv.index(name) + 1] if name in sys.argv else otherwise


class Peers(socketserver.BaseRequestHandler):
    """What the other ranks send."""

    def handle(self):
        while data := self.request.recv(1 << 16):
            HEARD[0] += len(data)


class Server(http.server.BaseHTTPRequestHandler):
    """As much of the API as readiness looks at."""

    def log_message(self, *_):
        pass

    def do_GET(self):
        if self.path == "/health":
            return self.answer(200, {})
        if self.path == "/metrics":
            return self.text(b"vllm:num_requests_running %d\n" % len(STREAMS))
        return self.guarded({"data": [{"id": value("--served-model-name")}]})

    def do_POST(self):
        print("asked:", self.path, flush=True)
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if asked.get("stream") and self.allowed():
            return self.stream(asked["max_tokens"])
        text = {"index": 0, "text": str(HEARD[0]), "finish_reason": "length", "logprobs": None}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        head = {
            "id": "cmpl-0",
            "object": "text_completion",
            "created": 0,
            "model": asked.get("model"),
        }
        return self.guarded({**head, "choices": [text], "usage": usage})

    def stream(self, pieces):
        STREAMS.append(self)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        with contextlib.suppress(OSError):
            for number in range(pieces):
                self.wfile.write(b"data: %d\n\n" % number)
                time.sleep(0.1)
            self.wfile.write(b"data: [DONE]\n\n")
        STREAMS.remove(self)

    def allowed(self):
        wanted = os.environ.get("VLLM_API_KEY")
        return not wanted or self.headers.get("Authorization") == "Bearer " + wanted

    def guarded(self, said):
        return self.answer(200, said) if self.allowed() else self.answer(401, {})

    def answer(self, status, said):
        self.text(json.dumps(said).encode(), status)

    def text(self, body, status=200):
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def lead():
    """Be the first rank, or the only one."""
    if "--master-port" in sys.argv:
        place = (value("--master-addr"), int(value("--master-port")))
        socketserver.ThreadingTCPServer.daemon_threads = True
        socketserver.ThreadingTCPServer.allow_reuse_address = True
        peers = socketserver.ThreadingTCPServer(place, Peers)
        threading.Thread(target=peers.serve_forever, daemon=True).start()
    http.server.ThreadingHTTPServer((value("--host"), int(value("--port"))), Server).serve_forever()


def follow():
    """Be another rank: it does not notice that the first one is gone, as vLLM's do not."""
    place = (value("--master-addr"), int(value("--master-port")))
    with contextlib.suppress(OSError), socket.create_connection(place) as first:
        while True:
            first.sendall(b"x" * 65536)
            time.sleep(0.2)
    while True:
        time.sleep(60)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    print("stand-in:", " ".join(sys.argv[1:]), flush=True)
    follow() if "--headless" in sys.argv else lead()
