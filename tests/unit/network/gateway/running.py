"""A gateway as it runs: the real HAProxy in front of small HTTP servers that stream."""

from __future__ import annotations

import contextlib
import csv
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from gpufleet.network.haproxy import Backend, GatewayState, Target, config, parse_gateway_state
from gpufleet.remote import payload
from gpufleet.settings.gateway_settings import Gateway
from tests.support.checkout import ROOT
from tests.unit.monitoring.programs import program

# Debian's HAProxy is linked with these, which this machine need not have.
LIBRARIES = ("libopentracing-c-wrapper0", "libopentracing1", "liblua5.3-0")
SECONDS = 20.0
RECORDED = ROOT / "tests/data/vllm-0.32.0.metrics"


def haproxy() -> Path:
    """Return Debian's HAProxy."""
    return program("haproxy", "usr/sbin/haproxy", *LIBRARIES)


def until(met: Callable[[], object], what: str) -> None:
    """Wait until something holds."""
    end = time.monotonic() + SECONDS
    while not met():
        assert time.monotonic() < end, f"after {SECONDS:g} s not: {what}"
        time.sleep(0.02)


@dataclass
class Vllm:
    """A server that answers as vLLM does: its name, what it was asked, and streams that wait."""

    model: str = "tiny"
    key: str = ""
    port: int = 0
    asked: list[dict[str, Any]] = field(default_factory=list)
    go_on: threading.Event = field(default_factory=threading.Event)
    """Streams wait for it after their first chunk."""
    drops: bool = False
    """Whether it ends connections without an answer."""
    refuses: int = 0
    """The status with which it answers prompts; 0: it completes them."""
    frozen: bool = False
    """Whether its engine, which has work all the time, does nothing any more; /health says 200."""
    tokens: int = 0
    thinks: float = 0.0
    """Seconds before the first byte of an answer."""

    def __post_init__(self) -> None:
        self.start()

    def start(self) -> None:
        """Listen, on the same port if there was one."""
        vllm = self

        class Handler(_Handler):
            about = vllm

        self.server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.server.daemon_threads = True
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        """Refuse connections, as a process that has died does."""
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    about: Vllm
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_GET(self) -> None:
        if self.path == "/v1/models":
            if self.about.key and self.headers["Authorization"] != f"Bearer {self.about.key}":
                self._answer(401, {})
                return
            self._answer(200, {"data": [{"id": self.about.model}]})
            return
        if self.path == "/metrics":
            self.about.tokens += not self.about.frozen
            self._say(200, _metrics(self.about.tokens))
            return
        self._note(b"")
        self._answer(200, {})

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        if self.headers["Transfer-Encoding"]:
            body = self._chunks()
        self._note(body)
        if self.about.drops:
            self.close_connection = True
            self.connection.shutdown(socket.SHUT_RDWR)
            return
        time.sleep(self.about.thinks)
        if self.about.refuses:
            self._answer(self.about.refuses, {})
            return
        if b'"stream"' not in body:
            self._answer(200, {"port": self.about.port, "length": len(body)})
            return
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._chunk(b"data: first\n\n")
        self.about.go_on.wait(SECONDS)
        self._chunk(b"data: last\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _note(self, body: bytes) -> None:
        if self.path != "/health":
            self.about.asked.append(
                {"path": self.path, "headers": dict(self.headers), "length": len(body)}
            )

    def _chunks(self) -> bytes:
        found = b""
        while size := int(self.rfile.readline(), 16):
            found += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return found

    def _chunk(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
        self.wfile.flush()

    def _answer(self, status: int, said: Any) -> None:
        # At once: a check that has seen the status does not wait for more.
        self._say(status, json.dumps(said).encode())

    def _say(self, status: int, body: bytes) -> None:
        self.wfile.write(
            b"HTTP/1.1 %d x\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body)
        )


def _metrics(tokens: int) -> bytes:
    """Return what vLLM was recorded to say, of an engine with one request and so many tokens."""
    found = RECORDED.read_bytes()
    for name, value in (("num_requests_running", 1), ("generation_tokens_total", tokens)):
        found = re.sub(rb"(?m)^(vllm:%s\S*) .*" % name.encode(), rb"\1 %d" % value, found)
    return found


@dataclass
class Running:
    """A gateway's process, and what asks it."""

    folder: Path
    settings: Gateway
    backends: tuple[Backend, ...]
    pem: bytes = b""
    process: subprocess.Popen[bytes] | None = None
    fingerprint: str = ""

    def __post_init__(self) -> None:
        for each in ("home", "run", "state"):
            (self.folder / each).mkdir(mode=0o700)
        self.configure(self.backends)

    def configure(self, backends: Sequence[Backend]) -> None:
        """Write the configuration, as a deploy does."""
        self.backends = tuple(backends)
        found = config(
            self.settings,
            self.backends,
            metrics_address="127.0.0.1",
            certificate=self.pem,
            run=f"{self.folder}/run",
            state=f"{self.folder}/state",
            account="",
        )
        for path, content in {**found.files, **found.secrets}.items():
            (self.folder / "home" / path).write_bytes(content)
        self.fingerprint = found.fingerprint

    def start(self) -> None:
        """Start it, as its unit does."""
        self._hook("start")
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen(
                [
                    *(haproxy(), "-W", "-C", self.folder / "home", "-f", "haproxy.cfg"),
                    *("-S", f"{self.folder}/run/master.sock,mode,600"),
                ],
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        until(lambda: self.has_loaded, "started")

    def reload(self) -> None:
        """Reload it, as its unit does."""
        assert self.process
        self._hook("reload")
        before = self.info["Pid"]
        self.process.send_signal(signal.SIGUSR2)
        until(lambda: self.has_loaded and self.info["Pid"] != before, "reloaded")

    def told(self, command: str) -> str:
        """Return what HAProxy answers at its socket; "": it does not."""
        with contextlib.suppress(OSError), contextlib.closing(socket.socket(socket.AF_UNIX)) as at:
            at.settimeout(2)  # in a reload a connection may be nobody's
            at.connect(f"{self.folder}/run/admin.sock")
            at.sendall(command.encode() + b"\n")
            return at.makefile().read()
        return ""

    @property
    def info(self) -> dict[str, str]:
        """Return what HAProxy says of the process that takes new connections."""
        lines = (line.partition(": ") for line in self.told("show info").splitlines())
        return {name: value for name, _, value in lines}

    @property
    def has_loaded(self) -> bool:
        """Say whether it runs with what lies there."""
        return self.info.get("description", "").endswith(self.fingerprint)

    def kill(self) -> None:
        """End all of its processes at once."""
        if self.process and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(SECONDS)

    def _hook(self, when: str) -> None:
        archive = self.folder / "gateway-state"
        archive.write_bytes(payload.archive("network/gateway_drains"))
        subprocess.run(
            [sys.executable, "-IB", archive, when, *(self.folder / at for at in _PLACES)],
            check=True,
        )

    def state(self, do: str = "show", *servers: str) -> GatewayState:
        """Return what on_node/network/gateway_drains.py says."""
        text = payload.program(
            "network/gateway_drains",
            do=do,
            servers=list(servers),
            **{each: f"{self.folder}/{each}" for each in _PLACES},
        )
        done = subprocess.run(
            [sys.executable, "-I", "-"],
            input=text.encode(),
            capture_output=True,
            check=True,
        )
        return parse_gateway_state(json.loads(done.stdout))

    def status(self, server: str) -> str:
        """Return what HAProxy says of a server: UP, DOWN, DRAIN."""
        return self.statistics(server)["status"]

    def statistics(self, server: str) -> dict[str, str]:
        """Return all that HAProxy counts of a server, by its name for it."""
        rows = csv.DictReader(self.told("show stat").removeprefix("# ").splitlines())
        return next(each for each in rows if f"{each['pxname']}/{each['svname']}" == server)

    def connection(self) -> http.client.HTTPConnection:
        """Return a connection that is not made yet."""
        return http.client.HTTPConnection("127.0.0.1", self.settings.port, timeout=SECONDS)

    def ask(
        self,
        path: str = "/v1/completions",
        body: bytes | None = b'{"model": "tiny"}',
        *,
        method: str = "POST",
        **headers: str,
    ) -> tuple[int, dict[str, Any]]:
        """Ask once; return the status and what was said."""
        there = self.connection()
        names = {name.replace("_", "-"): value for name, value in headers.items()}
        # What is refused may be so before all of it is sent.
        with contextlib.suppress(BrokenPipeError):
            there.request(method, path, body if method == "POST" else None, names)
        answer = there.getresponse()
        said = answer.read()
        there.close()
        return answer.status, json.loads(said) if said.startswith(b"{") else {"text": said.decode()}

    def stream(self, **headers: str) -> http.client.HTTPResponse:
        """Begin a stream; return it after its first chunk."""
        there = self.connection()
        body = b'{"model": "tiny", "stream": true}'
        there.request("POST", "/v1/completions", body, headers)
        answer = there.getresponse()
        assert answer.readline() == b"data: first\n"
        return answer


_PLACES = ("home", "run", "state")


def certificate(folder: Path) -> bytes:
    """Return a new certificate with its key."""
    files = folder / "key.pem", folder / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-subj", "/CN=gateway.example.net", "-days", "2"),
            *("-keyout", files[0], "-out", files[1]),
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return b"\n".join(each.read_bytes() for each in files)


def free_ports(number: int) -> list[int]:
    """Return ports that nobody has now."""
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(number)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def backend(
    name: str, *servers: Vllm, served_name: str = "", key: str = "", watchdog_port: int = 0
) -> Backend:
    """Return the backend of these servers; the first one is on gpu-01."""
    return Backend(
        name,
        served_name or name,
        tuple(
            Target(
                f"gpu-{number:02}.{name}-{number - 1}",
                "127.0.0.1",
                each.port,
                f"{name}-{number - 1}",
                watchdog_port,
            )
            for number, each in enumerate(servers, start=1)
        ),
        key,
    )


@contextlib.contextmanager
def running(
    folder: Path, *backends: Backend, pem: bytes = b"", **settings: Any
) -> Iterator[Running]:
    """Run a gateway in front of backends."""
    port, metrics_port = free_ports(2)
    if not settings.get("clients"):
        settings["allow_unauthenticated"] = True
    wanted = Gateway(listen="127.0.0.1", port=port, metrics_port=metrics_port, **settings)
    found = Running(folder, wanted, backends, pem)
    try:
        found.start()
        yield found
    finally:
        found.kill()
