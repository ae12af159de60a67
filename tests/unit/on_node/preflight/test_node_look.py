"""What a node says of names, servers, models and folders: read here, by the programs it is sent."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import ssl
import subprocess
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from gpufleet.preflight.alert_lines import Counts, read_counts
from gpufleet.remote import payload
from gpufleet.remote.answer_forms import form_problem


def run(program: str, **parameters: Any) -> dict[str, Any]:
    """Return what a program prints here, as a node would run it."""
    text = payload.program(program, **parameters)
    done = subprocess.run(
        ["python3", "-I", "-"], input=text.encode(), capture_output=True, check=True, timeout=60
    )
    found: dict[str, Any] = json.loads(done.stdout)
    assert form_problem(program, found) is None
    return found


def look(**parameters: Any) -> dict[str, Any]:
    nothing = {"names": [], "pages": {}, "tls": {}, "models": {}, "folders": []}
    return run("preflight/node_look", **{**nothing, **parameters})


class Server(BaseHTTPRequestHandler):
    """An Alertmanager that counts a notification for each alert; /closed wants a key."""

    delivered = 0
    alerts: list[Any]

    def do_GET(self) -> None:
        status = 401 if self.path == "/closed" else 302 if self.path == "/moved" else 200
        line = f'alertmanager_notifications_total{{integration="webhook"}} {Server.delivered}\n'
        self._answer(status, line)

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        Server.alerts = json.loads(body)
        Server.delivered += 1
        self._answer(200, "{}")

    def _answer(self, status: int, text: str) -> None:
        self.send_response(status)
        if status == 302:
            self.send_header("Location", "http://127.0.0.1:1/")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: Any) -> None:
        """Print nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_page_is_its_status_and_its_body_only_where_it_is_wanted(url: str) -> None:
    found = look(
        pages={
            "open": {"url": f"{url}/metrics", "body": True},
            "plain": {"url": f"{url}/metrics", "body": False},
            "closed": {"url": f"{url}/closed", "body": True},
            "moved": {"url": f"{url}/moved", "body": False},
            "dead": {"url": "http://127.0.0.1:1/", "body": False},
        }
    )["pages"]
    assert found["open"]["status"] == 200
    assert "alertmanager_notifications_total" in found["open"]["body"]
    assert found["plain"] == {"status": 200}
    assert found["closed"] == {"status": 401}
    assert found["moved"] == {"status": 302}, "it was reached: nothing is followed"
    assert "refused" in found["dead"]["error"]


def test_a_test_alert_is_sent_once_and_its_notification_seen(url: str) -> None:
    alert = {"labels": {"alertname": "GpufleetPreflight"}}
    found = run("preflight/alert_receipt", url=url, alert=alert, seconds=5)
    assert found["error"] is None
    assert Server.alerts == [alert]
    before, after = (read_counts(found[each]).get("webhook", Counts()) for each in
                     ("before", "after"))  # fmt: skip
    assert after.sent - before.sent == 1
    dead = run("preflight/alert_receipt", url="http://127.0.0.1:1", alert=alert, seconds=1)
    assert "refused" in dead["error"]


def certified(folder: Path) -> tuple[Path, Path]:
    """Return the files of a certificate for 127.0.0.1, its own authority, and of its key."""
    certificate, key = folder / "c.pem", folder / "k.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 9 -subj /CN=x "
        f"-addext subjectAltName=IP:127.0.0.1 -keyout {key} -out {certificate}"
    )
    subprocess.run(command.split(), check=True, capture_output=True, timeout=30)
    return certificate, key


def test_a_certificate_is_shown_also_where_it_is_not_believed(tmp_path: Path) -> None:
    certificate, key = certified(tmp_path)
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    here = {"host": "127.0.0.1", "port": server.server_port}
    pem = certificate.read_text()
    try:
        found = look(
            tls={
                "believed": {**here, "authorities": pem, "name": True},
                "other name": {**here, "host": "localhost", "authorities": pem, "name": True},
                "not trusted": {**here, "authorities": None, "name": True},
                "dead": {"host": "127.0.0.1", "port": 1, "authorities": None, "name": True},
            }
        )["tls"]
    finally:
        server.shutdown()
    shown = base64.b64encode(ssl.PEM_cert_to_DER_cert(pem)).decode()
    assert found["believed"] == {"verified": True, "why": "", "certificate": shown}
    for name in ("other name", "not trusted"):
        assert not found[name]["verified"]
        assert found[name]["why"]
        assert found[name]["certificate"] == shown
    assert found["dead"]["certificate"] == ""


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model that was whole a minute ago."""
    for name in ("config.json", "model.safetensors", ".complete"):
        file = tmp_path / name
        file.write_text(f"content of {name}")
        os.utime(file, (file.stat().st_atime, file.stat().st_mtime - 60))
    return tmp_path


def locked(folder: Path) -> dict[str, list[str]]:
    files = [each for each in folder.iterdir() if each.name != ".complete"]
    return {e.name: ["sha256", hashlib.sha256(e.read_bytes()).hexdigest()] for e in files}


def test_a_model_is_whole_while_its_files_are_those_of_the_lock(model: Path) -> None:
    lock = locked(model)

    def said() -> dict[str, Any]:
        found: dict[str, Any] = look(models={str(model): lock})["models"][str(model)]
        return {key: value for key, value in found.items() if value}

    size = sum(file.stat().st_size for file in model.iterdir())
    assert said() == {"complete": True, "hashed": 2, "bytes": size}
    (model / "config.json").write_text("another")
    assert said()["wrong"] == said()["changed"] == ["config.json"]
    (model / "config.json").unlink()
    assert said()["missing"] == ["config.json"]
    (model / "new.bin").write_text("x")
    assert said()["extra"] == ["new.bin"]
    (model / ".complete").unlink()
    assert "complete" not in said()


def test_a_model_without_a_lock_has_what_its_index_names(model: Path) -> None:
    index = {"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    found = look(models={str(model): None, "/no/such": None})["models"]
    assert found[str(model)]["missing"] == ["model-2.safetensors"]
    assert found[str(model)]["extra"] == []
    assert found["/no/such"] == {"missing": "absent"}


def test_names_folders_and_clocks_are_the_nodes(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"x" * 8192)
    found = look(names=["localhost"], folders=[str(tmp_path), "/no/such"])
    assert "127.0.0.1" in found["names"]["localhost"] or "::1" in found["names"]["localhost"]
    assert found["folders"] == {str(tmp_path): 8192, "/no/such": {"missing": "absent"}}
    assert found["began"] <= found["clock"]
