"""Who is let in by the guard that every server with a key loads, and by what paths."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpufleet.engines.vllm import launch_arguments
from gpufleet.network import haproxy
from gpufleet.on_node.serving import status
from gpufleet.on_node.serving.guard import BODY, Guard
from gpufleet.serving import unit
from tests.support.checkout import ROOT

KEY = "k3y-of-the-fleet"
GOOD = [(b"host", b"node"), (b"authorization", b"Bearer " + KEY.encode())]


async def application(scope: Any, receive: Any, send: Any) -> None:
    """Answer whatever is asked: it is behind the guard."""
    await send({"type": "reached"})


def ask(path: str, headers: Any = (), *, kind: str = "http", **scope: Any) -> list[dict[str, Any]]:
    """Return what is sent back to whoever asks for a path."""
    sent: list[dict[str, Any]] = []

    async def send(message: Any) -> None:
        sent.append(dict(message))

    async def receive() -> Any:
        raise AssertionError("what nobody let in is not read")

    asked = {
        "type": kind,
        "method": "GET",
        "path": path,
        "raw_path": path.encode(),
        "headers": list(headers),
        **scope,
    }
    coming: Any = Guard(application, KEY.encode())(asked, receive, send)
    asyncio.run(_awaited(coming))
    return sent


async def _awaited(coming: Any) -> None:
    await coming


def is_let_in(path: str, headers: Any = (), **scope: Any) -> bool:
    sent = ask(path, headers, **scope)
    if sent == [{"type": "reached"}]:
        return True
    start, body = sent
    assert (start["type"], start["status"]) == ("http.response.start", 401)
    assert (body["type"], body["body"]) == ("http.response.body", BODY)
    assert (b"content-length", str(len(BODY)).encode()) in start["headers"]
    return False


@pytest.mark.parametrize("path", ["/health", "/metrics"])
def test_whether_it_lives_and_its_numbers_are_for_everybody(path: str) -> None:
    assert is_let_in(path)
    assert is_let_in(path, method="HEAD")


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/v1/models",
        "/invocations",
        "/tokenize",
        "/ping",
        "/scale_elastic_ep",
        "/health/",
        "/Health",
        "/health/../invocations",
        "//health",
        "/health;x",
        "/health%00",
        "/metricsx",
        "/metrics/",
        "/metrics/../v1/models",
        "",
    ],
)
def test_everything_else_wants_the_key(path: str) -> None:
    assert not is_let_in(path)
    assert is_let_in(path, GOOD)


def test_every_route_of_a_server_wants_the_key_also_those_of_pooling_and_speech_models() -> None:
    """Of the routes that real releases list (tests/lab/test_server_routes.py holds the page)."""
    page = (ROOT / "docs/reference/server-routes.md").read_text()
    routes = re.findall(r"^\| `([A-Z]+) (/\S*)` \|", page, re.MULTILINE)
    paths = {path for _, path in routes}
    assert {*haproxy.PATHS, "/v1/embeddings", "/v1/audio/transcriptions"} <= paths

    let_in = {
        (method, path)
        for method, path in routes
        if method != "WEBSOCKET" and is_let_in(path, method=method)
    }

    assert let_in == {("GET", "/health"), ("GET", "/metrics")}
    for path in (path for method, path in routes if method == "WEBSOCKET"):
        assert ask(path, kind="websocket") == [{"type": "websocket.close", "code": 1008}]


@given(st.text())
def test_no_other_path_is_open(path: str) -> None:
    assert is_let_in(path) is (path in {"/health", "/metrics"})


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "TRACE", "get"])
def test_open_paths_are_read_and_nothing_else(method: str) -> None:
    assert not is_let_in("/health", method=method)
    assert not is_let_in("/v1/models", method=method)
    assert is_let_in("/v1/models", GOOD, method=method)


@pytest.mark.parametrize("raw", [b"/%68ealth", b"/health%3F", b"/x/..%2fhealth"])
def test_what_is_percent_encoded_wants_the_key(raw: bytes) -> None:
    """Whatever the server makes of it before it looks for a route."""
    assert not is_let_in("/health", raw_path=raw)


def test_paths_are_taken_as_the_server_takes_them_below_a_root() -> None:
    assert is_let_in("/llm/health", root_path="/llm")
    assert is_let_in("/health", root_path="/llm")
    assert not is_let_in("/llmhealth", root_path="/llm")
    assert not is_let_in("/llm", root_path="/llm")
    assert not is_let_in("/llm/health")
    assert not is_let_in("/llm/invocations", root_path="/llm")


@pytest.mark.parametrize(
    "value",
    [
        "",
        "Bearer",
        "Bearer ",
        f"Bearer {KEY}x",
        f"Bearer {KEY[:-1]}",
        f"Bearer  {KEY}",
        KEY,
        f"Basic {KEY}",
        f"Bearer {KEY} ",
        f"Bearer\t{KEY}",
        f"Bearer {KEY.upper()}",
    ],
)
def test_another_key_is_none(value: str) -> None:
    assert not is_let_in("/v1/models", [(b"authorization", value.encode())])


def test_the_scheme_is_read_in_either_case_and_the_first_header_counts() -> None:
    """As vLLM's own check does: what passes here and not there would be another answer."""
    right = (b"authorization", b"bearer " + KEY.encode())
    wrong = (b"authorization", b"Bearer other")
    assert is_let_in("/v1/models", [right])
    assert is_let_in("/v1/models", [right, wrong])
    assert not is_let_in("/v1/models", [wrong, right])
    assert not is_let_in("/v1/models", [(b"x-api-key", KEY.encode())])


def test_a_websocket_wants_the_key() -> None:
    assert ask("/v1/realtime", GOOD, kind="websocket") == [{"type": "reached"}]
    assert ask("/health", kind="websocket") == [{"type": "websocket.close", "code": 1008}]
    start, body = ask("/v1/realtime", kind="websocket", extensions={"websocket.http.response": {}})
    assert (start["type"], start["status"]) == ("websocket.http.response.start", 401)
    assert body["type"] == "websocket.http.response.body"


def test_the_servers_own_start_passes_and_an_unknown_kind_does_not() -> None:
    assert ask("", kind="lifespan") == [{"type": "reached"}]
    with pytest.raises(RuntimeError, match="webtransport"):
        ask("/health", GOOD, kind="webtransport")


def test_without_a_key_there_is_no_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_API_KEY", raising=False)
    with pytest.raises(RuntimeError, match="VLLM_API_KEY is not set"):
        Guard(application)
    monkeypatch.setenv("VLLM_API_KEY", KEY)
    assert Guard(application).has_key(GOOD)


def test_units_name_it_as_looks_at_nodes_do() -> None:
    module, _, name = launch_arguments.MIDDLEWARE.rpartition(".")
    assert status.GUARD == launch_arguments.MIDDLEWARE
    assert unit.GUARD.endswith(f"/{module}.py")
    assert name == Guard.__name__
