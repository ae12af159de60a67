"""Record the /metrics of a vLLM release after it has received every kind of request.

    python -m lab.metrics_recording ENVIRONMENT/bin/vllm \\
        tests/unit/monitoring/recorded/vllm-0.32.0.txt

ENVIRONMENT contains the CPU build of a release. To create it, install `vllm==VERSION` by uv with
the wheels of `lab.wheelhouse.write_shims` as --find-links. A recording takes a minute on idle
cores, and 2 GB of memory.

The file has exactly the received text. A class of HTTP status has no series before the first answer
of this class, so the server must give answers of every class. It answers with 500 during its drain
(SIGTERM), to late clients.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lab import tiny_model

ARGUMENTS = (
    "--served-model-name=tiny",
    "--host=127.0.0.1",
    "--enforce-eager",
    "--max-model-len=2048",
    "--max-num-seqs=4",
    "--max-num-batched-tokens=256",
    "--kv-cache-memory-bytes=3M",
    "--shutdown-timeout=60",
)
# One thread per process without a fixed core, so the server runs on any machine with two cores.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
}
START_SECONDS = 600
ANSWER_SECONDS = 120
COMPLETIONS = "/v1/completions"


def record(vllm: Path, out: Path) -> None:
    """Run that release's server, use it, and write its /metrics."""
    with running_server(vllm) as (server, port):
        out.write_text(_used(server, port))


@contextlib.contextmanager
def running_server(
    vllm: Path, *arguments: str, **environment: str
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Yield a release's ready server of a small model, and the server's port on 127.0.0.1."""
    with tempfile.TemporaryDirectory(prefix="gpufleet-server-") as folder:
        port = _free_port()
        checkpoint = tiny_model.write(Path(folder) / "tiny")
        command = [str(vllm), "serve", str(checkpoint), *ARGUMENTS, f"--port={port}", *arguments]
        path = f"{vllm.parent}:{os.environ['PATH']}"
        own = {"PATH": path, "VLLM_CACHE_ROOT": f"{folder}/cache", **ENVIRONMENT, **environment}
        with (Path(folder) / "log").open("w") as log:
            server = subprocess.Popen(
                command, env={**os.environ, **own}, stdout=log, stderr=log, start_new_session=True
            )
            try:
                _wait(server, port)
                yield server, port
            finally:
                with contextlib.suppress(ProcessLookupError):  # the server has ended by itself
                    os.killpg(server.pid, signal.SIGKILL)
                server.wait()


def _used(server: subprocess.Popen[bytes], port: int) -> str:
    """Send requests of every kind; return /metrics while some run and some were refused."""
    for tokens in range(16, 22):
        _post(port, COMPLETIONS, prompt=f"Once upon a time, {tokens}", max_tokens=tokens)
    for words in range(1, 5):
        message = {"role": "user", "content": "Tell me more. " * words}
        _post(port, "/v1/chat/completions", messages=[message], max_tokens=8)
    _post(port, COMPLETIONS, prompt="x", model="absent")  # 404
    _post(port, COMPLETIONS, prompt="x", max_tokens=100_000)  # 400
    _go_away(port)
    load = {"prompt": "y" * 300, "max_tokens": 1500, "ignore_eos": True}
    clients = [
        threading.Thread(target=_cut_off, args=(port, COMPLETIONS), kwargs=load, daemon=True)
        for _ in range(10)
    ]
    for client in clients:
        client.start()
    time.sleep(5)  # until most of them wait for the four that run
    server.send_signal(signal.SIGTERM)
    time.sleep(1)
    for _ in range(3):
        _post(port, COMPLETIONS, prompt="x", max_tokens=4)  # 500
    return _get(port, "/metrics")


def _go_away(port: int) -> None:
    """Send a request as a client that closes the connection in the middle of the answer."""
    line = _connection(port)
    asked = {"model": "tiny", "prompt": "x", "max_tokens": 1900, "stream": True, "ignore_eos": True}
    line.request("POST", COMPLETIONS, json.dumps(asked), {"Content-Type": "application/json"})
    line.getresponse().close()
    line.close()


def _cut_off(port: int, path: str, **asked: Any) -> None:
    """Send a request that gets no answer, because the server is killed before."""
    with contextlib.suppress(OSError, http.client.HTTPException):
        _post(port, path, **asked)


def _post(port: int, path: str, **asked: Any) -> int:
    body = {"model": "tiny", **asked}
    return _ask(port, "POST", path, body)[0]


def _get(port: int, path: str) -> str:
    return _ask(port, "GET", path)[1]


def _ask(
    port: int, method: str, path: str, body: Mapping[str, Any] | None = None
) -> tuple[int, str]:
    line = _connection(port)
    try:
        text = json.dumps(body) if body else None
        line.request(method, path, text, {"Content-Type": "application/json"})
        answer = line.getresponse()
        return answer.status, answer.read().decode()
    finally:
        line.close()


def _connection(port: int) -> http.client.HTTPConnection:
    return http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_SECONDS)


def _wait(server: subprocess.Popen[bytes], port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if server.poll() is not None:
            sys.exit(f"vLLM ended with {server.returncode} before it was ready")
        try:
            if _ask(port, "GET", "/health")[0] == http.client.OK:
                return
        except OSError:
            time.sleep(0.5)
    sys.exit(f"vLLM was not ready within {START_SECONDS} s")


def _free_port() -> int:
    with socket.socket() as any_port:
        any_port.bind(("127.0.0.1", 0))
        return int(any_port.getsockname()[1])


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    record(Path(sys.argv[1]).absolute(), Path(sys.argv[2]))
