"""A server is asked by the name of each adapter, and about a picture if its model sees."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpufleet.on_node.change import wait
from gpufleet.on_node.common import linux_facts
from gpufleet.on_node.serving import endpoints, status

KEY = "k"


@pytest.fixture
def server() -> Iterator[str]:
    """Complete for `sql`, with a key; fail for `bad`; say nothing that counts for `odd`."""
    over = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            chats = self.path == "/v1/chat/completions"
            assert chats or self.path == "/v1/completions"
            assert asked["max_tokens"] == 1
            allowed = self.headers["authorization"] == f"Bearer {KEY}"
            match asked["model"]:
                case "tiny" if chats:
                    self.say(400, {"error": "At most 0 image(s) may be provided"})
                case "tiny":
                    self.say(200, {"choices": [{"text": "a"}]})
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
    asked = {"unit": "vllm-none-0.service", "url": url, "adapters": names}
    return dict(endpoints.adapters(asked, KEY, names if listed is None else listed))


def test_each_listed_adapter_is_asked_for_a_completion(server: str) -> None:
    found = ask(server, "sql", "bad", "odd", "absent", listed=("tiny", "sql", "bad", "odd"))

    assert found["sql"] == {"status": 200}
    assert found["bad"]["status"] == 500
    assert "another form" in found["odd"]["error"]
    assert "no such file" in found["bad"]["body"]
    assert "absent" not in found


@pytest.mark.parametrize("sees", [True, False])
def test_a_server_that_takes_no_picture_is_wrong_only_if_its_model_sees(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sees: bool
) -> None:
    monkeypatch.setattr(linux_facts, "ROOT", str(tmp_path))
    files = {
        "etc/systemd/system/vllm-tiny-0.service": (
            "\nExecStart=/opt/vllm/releases/1/bin/vllm serve /srv/m\n"
        ),
        "srv/m/chat_template.jinja": "{{ messages }}",
        "srv/m/config.json": json.dumps(
            {
                "architectures": ["LlavaForConditionalGeneration"],
                "vision_config": {} if sees else None,
            }
        ),
    }
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    asked = {"unit": "vllm-tiny-0.service", "url": server, "served_name": "tiny"}

    found = endpoints.answer_as(asked, "tiny", KEY, 10)

    if sees:
        assert found["kind"] == "picture"
        assert found["completion_error"]["status"] == 400
    else:
        assert found == {"kind": "generate", "completion": "a"}


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


@pytest.mark.parametrize(
    ("words", "names"),
    [
        ("--port 8000 --lora-modules chat=/a sql=/b --seed 1 x=/y", ["chat", "sql"]),
        ("--lora-modules a:b.c=/a", ["a:b.c"]),
        ('--lora-modules {"name":"a=b"}', []),
        ("--lora-modules", []),
        ("--port 8000", []),
    ],
)
def test_a_servers_adapters_are_those_of_its_command_line(words: str, names: list[str]) -> None:
    assert status.adapters(words.split()) == names


def test_an_upgrade_waits_for_every_adapter_of_the_unit() -> None:
    server = SimpleNamespace(
        url="http://127.0.0.1:1", fingerprint="f", served_name="tiny", adapters=["sql"]
    )
    seen: dict[str, Any] = {
        "unit": {"ActiveState": "active"},
        "started": "f",
        "models": ["tiny", "sql"],
        "completion": "a",
        "adapters": {"sql": {"status": 200}},
    }

    assert wait.is_ready(server, seen)  # type: ignore[arg-type]
    for wrong in (
        {"models": ["tiny"]},
        {"adapters": {}},
        {"adapters": {"sql": {"status": 500}}},
        {"adapters": {"sql": {"error": "timed out"}}},
    ):
        assert not wait.is_ready(server, seen | wrong)  # type: ignore[arg-type]


def test_a_server_is_well_if_all_its_adapters_are() -> None:
    asked = {"served_name": "tiny", "completion": True, "adapters": ["sql"]}
    seen = {"unit": {}, "models": ["tiny", "sql"], "completion": "a"}

    assert endpoints.is_healthy(asked, {**seen, "adapters": {"sql": {"status": 200}}})
    assert not endpoints.is_healthy(asked, {**seen, "adapters": {"sql": {"status": 500}}})
    assert not endpoints.is_healthy(asked, {**seen, "models": ["tiny"]})
