"""SGLang's launcher, run as a unit runs it, before a program that prints all that it has."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from gpufleet.on_node.serving import sglang_serve

KEY = "a-key-of-clients"
# It does what SGLang does: prints its arguments, and starts a process by `spawn`, which prints too.
PROGRAM = """\
import json, logging, multiprocessing, os, sys
from child import child

def main():
    logging.basicConfig(level="INFO", format="%(message)s")
    logging.info("arguments %s", sys.argv)
    print("printed", sys.argv, flush=True)
    started = multiprocessing.get_context("spawn").Process(target=child)
    started.start()
    started.join()
    json.dump([sys.argv, os.environ.get("CUDA_VISIBLE_DEVICES")], open("seen.json", "w"))
    return 0
"""
CHILD = """\
import os, sys

def child():
    print("child", [value for name, value in os.environ.items() if "KEY" in name], flush=True)
    print("child", sys.argv, file=sys.stderr, flush=True)
"""


class Server:
    """A launcher and a program in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "sglang").write_text(PROGRAM)
        (folder / "child.py").write_text(CHILD)
        (folder / "sglang-serve").write_text(Path(sglang_serve.__file__).read_text())
        (folder / "api-key").write_text(f"{KEY}\n")
        self.environment = {
            "PATH": os.defpath,
            "PYTHONPATH": str(folder),
            "CREDENTIALS_DIRECTORY": str(folder),
        }

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "sglang-serve", "sglang", "serve", *arguments],
            cwd=self.folder,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    def seen(self) -> tuple[list[str], str | None]:
        arguments, gpus = json.loads((self.folder / "seen.json").read_text())
        return arguments, gpus


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


def test_the_program_has_the_key_and_nothing_that_is_printed_has_it(server: Server) -> None:
    run = server.run("--model-path", "/srv/m")

    assert run.returncode == 0, run.stderr
    arguments, _ = server.seen()
    assert arguments[:4] == ["sglang", "serve", "--model-path", "/srv/m"]
    assert arguments[arguments.index("--api-key") + 1] == KEY
    said = run.stdout + run.stderr
    for word in ("arguments [", "printed [", "child ["):
        assert word in said
    admin = arguments[arguments.index("--admin-api-key") + 1]
    assert len(admin) == 64
    assert KEY not in said
    assert admin not in said


def test_each_start_has_another_key_for_administrative_routes(server: Server) -> None:
    keys = set()
    for _ in range(2):
        server.run()
        arguments, _ = server.seen()
        keys.add(arguments[arguments.index("--admin-api-key") + 1])
    assert len(keys) == 2


def test_an_empty_key_is_no_key_and_ends_the_start_for_good(server: Server) -> None:
    (server.folder / "api-key").write_text("\n")
    run = server.run()
    assert run.returncode == sglang_serve.WRONG
    assert "the API key is empty" in run.stderr
    assert not (server.folder / "seen.json").exists()


def test_without_a_credential_clients_need_no_key(server: Server) -> None:
    (server.folder / "api-key").unlink()
    assert server.run().returncode == 0
    assert "--api-key" not in server.seen()[0]


def test_a_taken_port_ends_the_start_before_the_program_begins(server: Server) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        run = server.run("--host", "127.0.0.1", "--port", port)
    assert run.returncode == 1
    assert run.stderr == f"cannot listen on 127.0.0.1 port {port}: Address already in use\n"
    assert not (server.folder / "seen.json").exists()


def test_gpus_are_named_by_uuid_and_numbered_by_nvml(server: Server) -> None:
    (server.folder / "pynvml.py").write_text(
        "class NVMLError(Exception): pass\n"
        "def nvmlInit(): pass\n"
        "def nvmlDeviceGetHandleByUUID(name):\n"
        "    if name == 'GPU-gone': raise NVMLError('Not Found')\n"
        "    return {'GPU-b': 3, 'GPU-a': 1}[name]\n"
        "def nvmlDeviceGetIndex(handle): return handle\n"
    )
    server.environment["CUDA_VISIBLE_DEVICES"] = "GPU-b,GPU-a"
    assert server.run().returncode == 0
    assert server.seen()[1] == "3,1"

    server.environment["CUDA_VISIBLE_DEVICES"] = "GPU-a,GPU-gone"
    run = server.run()
    assert run.returncode == 1  # the unit starts it again
    assert run.stderr == "CUDA_VISIBLE_DEVICES=GPU-a,GPU-gone: Not Found\n"
