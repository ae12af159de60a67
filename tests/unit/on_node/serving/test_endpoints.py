"""A server is asked for a token by the name of each adapter, and one that hangs costs one wait."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from gpufleet.on_node.serving import endpoints

KEY = "k"


@pytest.fixture
def server() -> Iterator[str]:
    """Complete for `sql`, with a key; fail for `bad`; say nothing that counts for `odd`."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            assert (self.path, asked["max_tokens"]) == ("/v1/completions", 1)
            allowed = self.headers["authorization"] == f"Bearer {KEY}"
            match asked["model"]:
                case "hangs":
                    over.wait(30)
                case "sql" if allowed:
                    self.say(200, {"choices": [{"text": "a"}]})
                case "odd":
                    self.say(200, {"choices": []})
                case _:
                    self.say(500, {"error": "no such file"})

        def say(self, status: int, document: Any) -> None:
            body = json.dumps(document).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        threading.Thread(target=found.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{found.server_port}"
        over.set()
        found.shutdown()


def ask(url: str, *names: str, listed: tuple[str, ...] | None = None) -> dict[str, Any]:
    asked = {"url": url, "adapters": names}
    return dict(endpoints.adapters(asked, KEY, names if listed is None else listed))


def test_each_listed_adapter_is_asked_for_a_completion(server: str) -> None:
    found = ask(server, "sql", "bad", "odd", "absent", listed=("tiny", "sql", "bad", "odd"))

    assert found["sql"] == {"status": 200}
    assert (found["bad"]["status"], found["odd"]["status"]) == (500, 0)
    assert "no such file" in found["bad"]["body"]
    assert "absent" not in found


def test_all_adapters_together_take_the_time_of_one(
    server: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoints, "COMPLETION_SECONDS", 1)
    began = time.monotonic()

    found = ask(server, "hangs", "sql", "bad")

    assert time.monotonic() - began < 10
    assert {name: "timed out" in each.get("error", "") for name, each in found.items()} == {
        "hangs": True,
        "sql": True,
        "bad": True,
    }


def test_a_server_is_well_if_all_its_adapters_are() -> None:
    asked = {"served_name": "tiny", "completion": True, "adapters": ["sql"]}
    seen = {"unit": {}, "models": ["tiny", "sql"], "completion": "a"}

    assert endpoints.is_healthy(asked, {**seen, "adapters": {"sql": {"status": 200}}})
    assert not endpoints.is_healthy(asked, {**seen, "adapters": {"sql": {"status": 500}}})
    assert not endpoints.is_healthy(asked, {**seen, "models": ["tiny"]})
