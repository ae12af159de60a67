"""LiteLLM as it runs: the real proxy, of the lock that we ship, before a small model server."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from uv import find_uv_bin

from gpufleet.network import litellm
from gpufleet.settings.litellm_settings import Litellm
from lab import run_command
from lab.state import CACHE, exclusive, forget
from tests.support.checkout import ROOT
from tests.unit.network.gateway.running import free_ports

VERSION = "1.106.2"
LOCK = ROOT / f"locks/litellm-{VERSION}.txt"
# A start takes 7 s of one core, and a machine with other tests has less than one.
START_SECONDS = 240.0
SECONDS = 30.0
KEY = "a-clients-key"
UPSTREAM_KEY = "the-upstreams-own-key"


@cache
def python() -> Path:
    """
    Return the Python of an environment that holds the lock and nothing else.

    The first call on a machine makes it in the lab's cache: 100 MB and half a minute.
    """
    name = f"litellm-{hashlib.sha256(LOCK.read_bytes()).hexdigest()[:12]}"
    folder = CACHE / "programs" / f"{name}-{sys.version_info.major}.{sys.version_info.minor}"
    if not folder.is_dir():
        with exclusive("programs", CACHE, limit=900):
            if not folder.is_dir():
                folder.parent.mkdir(parents=True, exist_ok=True)
                draft = folder.with_name(f".{folder.name}.new")
                if draft.exists():
                    forget(draft)
                uv = find_uv_bin()
                own = str(Path(sys.executable).resolve())
                run_command.run(uv, "venv", "--quiet", "--python", own, draft, limit=60)
                run_command.run(
                    *(uv, "pip", "sync", "--quiet", "--require-hashes", "--no-build"),
                    *("--python", draft / "bin/python", LOCK),
                    limit=600,
                )
                draft.rename(folder)
    return folder / "bin/python"


def certificate(folder: Path) -> Path:
    """Make a certificate for 127.0.0.1, with its key in the same file."""
    made = folder / "certificate.pem"
    subprocess.run(
        [
            *("openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"),
            *("-nodes", "-subj", "/CN=gateway", "-addext", "subjectAltName=IP:127.0.0.1"),
            *("-days", "2", "-keyout", folder / "key.pem", "-out", made),
        ],
        check=True,
        capture_output=True,
    )
    made.write_bytes(made.read_bytes() + (folder / "key.pem").read_bytes())
    return made


@dataclass
class Server:
    """A gateway with models behind it, as LiteLLM sees them: what it was asked, how it answers."""

    certificate: Path
    """With its key; it signs itself."""
    asked: list[dict[str, Any]] = field(default_factory=list)
    go_on: threading.Event = field(default_factory=threading.Event)
    """Streams wait for it after their first piece."""
    refuses: dict[str, int] = field(default_factory=dict)
    """By entry: the status with which it answers."""
    breaks: set[str] = field(default_factory=set)
    """Entries whose streams end without an end."""

    def __post_init__(self) -> None:
        about = self

        class Handler(_Handler):
            server_of = about

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        shown = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        shown.load_cert_chain(self.certificate)
        self.server.socket = shown.wrap_socket(self.server.socket, server_side=True)
        self.server.daemon_threads = True
        self.port = self.server.server_port
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    def stop(self) -> None:
        self.go_on.set()
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    server_of: Server
    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        pass

    def do_POST(self) -> None:
        about = self.server_of
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        entry = self.path.split("/")[1]
        headers = {name.lower(): value for name, value in self.headers.items()}
        about.asked.append({"path": self.path, "headers": headers, "body": body})
        if entry in about.refuses:
            # What some server might say of what it was sent.
            said = {"message": f"not with {headers.get('authorization')}", "type": "x", "code": 1}
            self._answer(about.refuses[entry], {"error": said})
        elif body.get("stream"):
            self._stream(entry)
        elif self.path.endswith("/embeddings"):
            data = [{"object": "embedding", "index": 0, "embedding": [0.5]}]
            self._answer(200, {"object": "list", "data": data, "model": "m", "usage": USAGE})
        elif self.path.endswith("/rerank"):
            found = [
                {"index": number, "document": {"text": text}, "relevance_score": number / 8}
                for number, text in enumerate(body["documents"])
            ]
            self._answer(200, {"id": "1", "model": "m", "usage": USAGE, "results": found})
        else:
            chat = self.path.endswith("/chat/completions")
            choice = {"message": {"role": "assistant", "content": entry}} if chat else {"text": "x"}
            self._answer(
                200,
                {
                    "id": "1",
                    "object": "chat.completion" if chat else "text_completion",
                    "created": 1,
                    "model": body["model"],
                    "choices": [{"index": 0, "finish_reason": "stop", **choice}],
                    "usage": USAGE,
                },
            )

    def _stream(self, entry: str) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._piece(_word("first"))
        self.server_of.go_on.wait(SECONDS)
        if entry in self.server_of.breaks:
            self.connection.shutdown(socket.SHUT_RDWR)
            self.close_connection = True
            return
        self._piece(_word("last"))
        self._piece(b"data: [DONE]\n\n")
        self.wfile.write(b"0\r\n\r\n")

    def _piece(self, content: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))
        self.wfile.flush()

    def _answer(self, status: int, said: Any) -> None:
        body = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


def _word(content: str) -> bytes:
    choice = {"index": 0, "delta": {"role": "assistant", "content": content}}
    said = {"id": "1", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    return b"data: " + json.dumps({**said, "choices": [choice]}).encode() + b"\n\n"


@dataclass
class Running:
    """LiteLLM's process, and what asks it."""

    folder: Path
    port: int
    believed: ssl.SSLContext
    process: subprocess.Popen[bytes]
    outside: Outside
    told: list[bytes]
    """What it has told systemd."""
    seen: list[bytes] = field(default_factory=list)
    """All that clients got of it, headers too."""

    def connection(self) -> http.client.HTTPConnection:
        return http.client.HTTPSConnection(
            "127.0.0.1", self.port, timeout=SECONDS, context=self.believed
        )

    def ask(
        self,
        body: Mapping[str, Any] | None = None,
        path: str = "/v1/chat/completions",
        *,
        key: str | None = KEY,
        method: str = "POST",
        **headers: str,
    ) -> tuple[int, dict[str, Any]]:
        """Ask once; return the status and what was said."""
        there = self.connection()
        answer = self.begin(there, body, path, key=key, method=method, **headers)
        said = answer.read()
        self.seen.append(said)
        there.close()
        return answer.status, json.loads(said or b"{}")

    def begin(
        self,
        there: http.client.HTTPConnection,
        body: Mapping[str, Any] | None = None,
        path: str = "/v1/chat/completions",
        *,
        key: str | None = KEY,
        method: str = "POST",
        **headers: str,
    ) -> http.client.HTTPResponse:
        """Ask over this connection; return the answer, of which only the head was read."""
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if key is not None:
            named["Authorization"] = f"Bearer {key}"
        text = json.dumps(body) if body is not None else None
        there.request(method, path, text, named)
        answer = there.getresponse()
        self.seen.append(repr(answer.getheaders()).encode())
        return answer

    def log(self) -> str:
        return (self.folder / "log").read_text()


@dataclass
class Outside:
    """Everything that is not this machine: a proxy that counts who wants to go there."""

    calls: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.listening = socket.create_server(("127.0.0.1", 0))
        self.port = self.listening.getsockname()[1]
        threading.Thread(target=self._count, daemon=True).start()

    def _count(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                there, _ = self.listening.accept()
                with there:
                    there.settimeout(5)
                    with contextlib.suppress(OSError):
                        self.calls.append(there.recv(200))


@contextlib.contextmanager
def running(
    folder: Path, wanted: Litellm, served: Mapping[str, str], server: Server
) -> Iterator[Running]:
    """Run LiteLLM as its unit does, as far as that needs no systemd; with TLS on both sides."""
    (port,) = free_ports(1)
    wanted = wanted.model_copy(update={"port": port})
    at = litellm.Upstream(f"https://127.0.0.1:{server.port}", 20, "x-session-id")
    found = litellm.configuration(wanted, litellm.names(wanted, served), served, at)
    for path, content in found.files.items():
        (folder / path).write_bytes(content)
    (folder / "credentials").mkdir()
    (folder / "credentials/upstream-key").write_text(UPSTREAM_KEY + "\n")
    (folder / "credentials/tls-key").write_bytes(server.certificate.read_bytes())
    for name in ("tls.pem", "upstream-ca.pem"):
        (folder / name).write_bytes(server.certificate.read_bytes())
    believed = ssl.create_default_context(cafile=server.certificate)
    outside = Outside()
    told: list[bytes] = []
    notify = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    notify.bind(f"{folder}/notify")
    notify.settimeout(START_SECONDS)
    proxy = f"http://127.0.0.1:{outside.port}"
    with (folder / "log").open("ab") as log:
        process = subprocess.Popen(
            [python(), "-I", ROOT / "src/gpufleet/on_node/network/litellm_serve.py", folder],
            env={
                "PATH": os.environ["PATH"],
                "HOME": str(folder),
                "CREDENTIALS_DIRECTORY": f"{folder}/credentials",
                "NOTIFY_SOCKET": f"{folder}/notify",
                **dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), proxy),
                "NO_PROXY": "127.0.0.1",
            },
            cwd=folder,
            stdout=log,
            stderr=log,
        )
    try:
        threading.Thread(target=_released, args=(process, notify), daemon=True).start()
        told.append(notify.recv(100))
        assert told == [b"READY=1"], (folder / "log").read_text()
        yield Running(folder, port, believed, process, outside, told)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait(SECONDS)
        notify.close()
        outside.listening.close()


def _released(process: subprocess.Popen[bytes], notify: socket.socket) -> None:
    """Wake whoever waits for a process that ended before it was ready."""
    process.wait()
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as to:
        to.sendto(b"ended", notify.getsockname())
