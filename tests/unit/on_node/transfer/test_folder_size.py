"""What has come into a folder is counted on the node, and what will come is asked of the Hub."""

from __future__ import annotations

import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from gpufleet.artifacts import model_files
from gpufleet.remote import payload
from gpufleet.settings.serving_settings import Vllm

MIB = 1 << 20


def looked(folder: Path, tree: str | None = None, token_file: Path | None = None) -> dict[str, Any]:
    program = payload.program(
        "transfer/folder_size",
        folder=str(folder),
        tree=tree,
        token_file=str(token_file) if token_file else None,
    )
    done = subprocess.run(
        [sys.executable, "-I", "-"],
        input=program.encode(),
        capture_output=True,
        check=True,
    )
    document: dict[str, Any] = json.loads(done.stdout)
    return document


class Listing(http.server.BaseHTTPRequestHandler):
    """A Hub that lists two files and a folder to whoever has the token."""

    files: ClassVar[Any] = [
        {"type": "file", "path": "a.safetensors", "size": 5 * MIB},
        {"type": "file", "path": "b/config.json", "size": 7},
        {"type": "directory", "path": "b", "size": 0},
    ]

    def do_GET(self) -> None:
        if self.headers.get("Authorization") not in {None, "Bearer canary"}:
            self.send_error(401)
            return
        if self.path == "/gated" and self.headers.get("Authorization") is None:
            self.send_error(401)
            return
        self.send_response(200)
        if self.path == "/paged":
            self.send_header("Link", '</paged?cursor=1>; rel="next"')
        self.end_headers()
        self.wfile.write(b"<html>" if self.path == "/page" else json.dumps(self.files).encode())

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Listing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


def test_files_at_any_depth_count(tmp_path: Path) -> None:
    (tmp_path / ".cache/download").mkdir(parents=True)
    (tmp_path / ".cache/download/x.incomplete").write_bytes(b"x" * MIB)
    (tmp_path / "config.json").write_bytes(b"x" * 4096)

    assert looked(tmp_path) == {"schema": 1, "bytes": MIB + 4096, "total": None}


def test_what_is_only_set_aside_has_not_come(tmp_path: Path) -> None:
    with (tmp_path / "sparse").open("wb") as file:
        file.truncate(100 * MIB)

    assert looked(tmp_path)["bytes"] == 0


def test_a_folder_that_is_not_there_yet_is_empty(tmp_path: Path) -> None:
    assert looked(tmp_path / "none")["bytes"] == 0


def test_the_total_is_what_the_hub_lists(tmp_path: Path, hub: str) -> None:
    token = tmp_path / "token"
    token.write_text("canary\n")

    assert looked(tmp_path, f"{hub}/open")["total"] == 5 * MIB + 7
    assert looked(tmp_path, f"{hub}/gated", token)["total"] == 5 * MIB + 7


@pytest.mark.parametrize("path", ["gated", "paged", "page"])
def test_a_hub_that_does_not_say_all_leaves_it_unknown(tmp_path: Path, hub: str, path: str) -> None:
    assert looked(tmp_path, f"{hub}/{path}") == {"schema": 1, "bytes": 0, "total": None}


@pytest.mark.parametrize("endpoint", [None, "http://mirror:8080/hub/"])
def test_the_hub_is_asked_where_the_download_comes_from(endpoint: str | None) -> None:
    wanted = model_files.Checkpoint("lab/tiny", "0" * 40, "/var/lib/vllm/models/x")
    vllm = Vllm(version="0.32.0", lock="x", listen="127.0.0.1", hf_endpoint=endpoint)

    hub = "http://mirror:8080/hub" if endpoint else "https://huggingface.co"
    said = f"{hub}/api/models/lab/tiny/tree/{'0' * 40}?recursive=true"
    assert model_files.listing_url(wanted, vllm) == said


def test_a_hub_that_is_not_there_leaves_it_unknown(tmp_path: Path) -> None:
    assert looked(tmp_path, "http://127.0.0.1:9/")["total"] is None
