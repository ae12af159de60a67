"""What clients get of LiteLLM: the real proxy, real connections, one start for all tests."""

from __future__ import annotations

import hashlib
import json
import signal
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from gpufleet.network.litellm import RERANK_KEYS
from gpufleet.settings.litellm_settings import Litellm
from tests.unit.network.gateway.running import until
from tests.unit.network.litellm.running import (
    KEY,
    SECONDS,
    UPSTREAM_KEY,
    VERSION,
    Running,
    Server,
    certificate,
    running,
)

# Each test starts programs of its own.
pytestmark = pytest.mark.slow

SERVED = {"small": "org/small", "large": "large", "spare": "spare", "vectors": "vectors"}
CHAT = {"messages": [{"role": "user", "content": "a-secret-prompt"}]}
NARROW = "another-clients-key"


def digest(key: str) -> str:
    return hashlib.sha256(key.encode()).hexdigest()


WANTED = Litellm.model_validate(
    {
        "version": VERSION,
        "lock": "x",
        "upstream_key_file": "x",
        "clients": [
            {"name": "a", "key_sha256": digest(KEY)},
            {"name": "b", "key_sha256": digest(NARROW), "models": ["large"]},
        ],
        "models": {
            "org/small": {
                "parameters": {
                    "temperature": 0.25,
                    "top_p": 0.5,
                    "top_k": 7,
                    "min_p": 0.125,
                    "max_tokens": 64,
                    "presence_penalty": 0.5,
                    "frequency_penalty": -0.5,
                    "repetition_penalty": 1.25,
                    "seed": 3,
                    "stop": ["END"],
                    "reasoning_effort": "low",
                    "chat_template_kwargs": {"enable_thinking": False},
                }
            },
            "steady": {"entries": ["small"], "parameters": {"temperature": 0}},
            "both": {"entries": ["small", "large"]},
            "careful": {"entries": ["large"], "fallbacks": ["spare"]},
        },
        "aliases": {"gpt-4o": "org/small"},
    }
)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Server]]:
    server = Server(certificate(tmp_path_factory.mktemp("certificate")))
    with running(tmp_path_factory.mktemp("litellm"), WANTED, SERVED, server) as proxy:
        yield proxy, server
    server.stop()


@pytest.fixture
def proxy(started: tuple[Running, Server], server: Server) -> Running:
    return started[0]


@pytest.fixture
def server(started: tuple[Running, Server]) -> Server:
    found = started[1]
    found.asked.clear()
    found.refuses.clear()
    found.breaks.clear()
    found.go_on.clear()
    return found


def test_an_alias_is_the_model_with_its_defaults_under_the_name_that_its_servers_know(
    proxy: Running, server: Server
) -> None:
    status, said = proxy.ask({"model": "gpt-4o", **CHAT}, x_session_id="s1")

    assert (status, said["choices"][0]["message"]["content"]) == (200, "small")
    assert said["model"] == "gpt-4o"
    (asked,) = server.asked
    assert asked["path"] == "/small/v1/chat/completions"
    assert asked["body"]["model"] == "org/small"
    assert asked["headers"]["x-session-id"] == "s1"


def test_every_default_arrives_and_a_clients_own_value_wins(proxy: Running, server: Server) -> None:
    defaults = WANTED.models["org/small"].parameters.set_values

    proxy.ask({"model": "org/small", **CHAT})
    own = {"temperature": 0.0, "stop": ["."], "max_tokens": 5, "top_k": 1, "min_p": 0.0}
    proxy.ask({"model": "org/small", **CHAT, **own})
    proxy.ask({"model": "large", **CHAT})

    first, second, other = (each["body"] for each in server.asked)
    assert {name: first.get(name) for name in defaults} == defaults
    assert {name: second.get(name) for name in defaults} == defaults | own
    assert set(other) & set(defaults) == set()


def test_completions_and_embeddings_take_the_same_way(proxy: Running, server: Server) -> None:
    assert proxy.ask({"model": "steady", "prompt": "x", "top_k": 2}, "/v1/completions")[0] == 200
    assert proxy.ask({"model": "vectors", "input": "x"}, "/v1/embeddings")[0] == 200

    text, vectors = server.asked
    assert text["path"] == "/small/v1/completions"
    assert {"model": "org/small", "temperature": 0.0, "top_k": 2}.items() <= text["body"].items()
    assert (vectors["path"], vectors["body"]["model"]) == ("/vectors/v1/embeddings", "vectors")


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
def test_rerank_takes_the_same_way_whatever_the_version(
    proxy: Running, server: Server, path: str
) -> None:
    asked = {
        "model": "vectors",
        "query": "a-secret-query",
        "documents": ["one", "two"],
        "top_n": 2,
        "return_documents": True,
        "instruction": "rank",
        "max_tokens_per_doc": 7,
        "max_tokens_per_query": 6,
        "truncate_prompt_tokens": 5,
        "truncation_side": "left",
    }
    assert set(asked) == RERANK_KEYS

    status, said = proxy.ask(asked, path)

    assert status == 200
    assert [each["relevance_score"] for each in said["results"]] == [0.0, 0.125]
    (upstream,) = server.asked
    assert upstream["path"] == "/vectors/v1/rerank"
    assert upstream["body"] == asked
    assert upstream["headers"]["authorization"] == f"Bearer {UPSTREAM_KEY}"
    assert "a-secret-query" not in proxy.log()


def test_a_rerank_that_the_server_refuses_is_refused(proxy: Running, server: Server) -> None:
    server.refuses["vectors"] = 400
    wanted = {"model": "vectors", "query": "a", "documents": ["b"]}

    assert proxy.ask(wanted, "/rerank")[0] == 400
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    "key", ["api_base", "messages", "fallbacks", "rank_fields", "mock_response"]
)
def test_rerank_takes_no_other_keys(proxy: Running, server: Server, key: str) -> None:
    wanted = {"model": "vectors", "query": "a", "documents": ["b"], key: "x"}

    assert proxy.ask(wanted, "/rerank")[1]["error"]["code"] == "unknown_parameter"
    assert server.asked == []


def test_what_is_only_for_chats_is_refused_elsewhere(proxy: Running, server: Server) -> None:
    """LiteLLM would fail with it, and not say why."""
    prompt = {"model": "large", "prompt": "x", "response_format": {"type": "text"}}
    assert proxy.ask(prompt, "/v1/completions")[1]["error"]["code"] == "unknown_parameter"
    prompt = {"model": "org/small", "prompt": "x"}
    assert proxy.ask(prompt, "/v1/completions")[1]["error"]["code"] == "chat_only"
    assert server.asked == []


def test_a_name_over_several_entries_asks_each_of_them(proxy: Running, server: Server) -> None:
    """Each request goes to one by chance: of 60 one of them gets none once in 1e17 runs."""
    seen: set[str] = set()
    while seen != {"small", "large"}:
        assert proxy.ask({"model": "both", **CHAT})[0] == 200
        seen = {each["path"].split("/")[1] for each in server.asked}
        assert len(server.asked) < 60


def test_a_stream_passes_piece_by_piece(proxy: Running, server: Server) -> None:
    """The first piece is there while the model's server waits for us to have seen it."""
    there = proxy.connection()
    answer = proxy.begin(there, {"model": "gpt-4o", "stream": True, **CHAT})

    first = answer.readline()
    assert json.loads(first.removeprefix(b"data: "))["choices"][0]["delta"]["content"] == "first"
    server.go_on.set()
    rest = answer.read()
    assert b"last" in rest
    assert rest.endswith(b"data: [DONE]\n\n")
    there.close()


def test_a_stream_that_breaks_is_not_begun_again(proxy: Running, server: Server) -> None:
    """Also where a fallback is declared: a client has seen the first half of another answer."""
    server.breaks.add("large")
    there = proxy.connection()
    answer = proxy.begin(there, {"model": "careful", "stream": True, **CHAT})
    assert b"first" in answer.readline()
    server.go_on.set()

    rest = answer.read()

    assert b"last" not in rest
    assert b"error" in rest
    assert [each["path"].split("/")[1] for each in server.asked] == ["large"]
    there.close()


def test_nothing_is_tried_twice_but_what_a_fallback_is_declared_for(
    proxy: Running, server: Server
) -> None:
    server.refuses |= {"large": 503, "small": 503}

    assert proxy.ask({"model": "large", **CHAT})[0] == 503
    assert proxy.ask({"model": "both", **CHAT})[0] == 503
    assert len(server.asked) == 2
    status, said = proxy.ask({"model": "careful", **CHAT})

    assert (status, said["choices"][0]["message"]["content"]) == (200, "spare")
    assert [each["path"].split("/")[1] for each in server.asked[2:]] == ["large", "spare"]
    # And nobody is put aside for it: the gateway knows who lives.
    server.refuses.clear()
    assert proxy.ask({"model": "large", **CHAT})[0] == 200


@pytest.mark.parametrize("key", [None, "", "sk-1234", UPSTREAM_KEY, digest(KEY)])
def test_a_key_that_is_not_known_is_refused_before_anything_is_asked(
    proxy: Running, server: Server, key: str | None
) -> None:
    status, said = proxy.ask({"model": "large", **CHAT}, key=key)

    assert (status, said["error"]["code"]) == (401, "invalid_api_key")
    assert server.asked == []


def test_a_client_sees_and_gets_its_own_models_alone(proxy: Running, server: Server) -> None:
    every = proxy.ask(path="/v1/models", method="GET")[1]["data"]
    assert {each["id"] for each in every} == {
        *("gpt-4o", "both", "careful", "large", "org/small", "spare", "steady", "vectors")
    }
    narrow = proxy.ask(path="/v1/models", method="GET", key=NARROW)[1]["data"]
    assert [each["id"] for each in narrow] == ["large"]
    assert proxy.ask({"model": "large", **CHAT}, key=NARROW)[0] == 200
    assert proxy.ask({"model": "gpt-4o", **CHAT}, key=NARROW)[0] == 403
    assert proxy.ask({"model": "nobody", **CHAT})[0] == 404
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    "order",
    [
        {"api_base": "http://192.0.2.1/v1"},
        {"base_url": "http://192.0.2.1/v1"},
        {"api_key": "x"},
        {"fallbacks": ["large"]},
        {"mock_response": "x"},
        {"num_retries": 3},
        {"user_config": {}},
        {"extra_body": {"x": 1}},
        {"litellm_metadata": {}},
    ],
    ids=lambda order: next(iter(order)),
)
def test_a_request_gives_litellm_no_orders(
    proxy: Running, server: Server, order: dict[str, Any]
) -> None:
    """Most of all not where to send the upstream's key."""
    status, said = proxy.ask({"model": "large", **CHAT, **order})

    assert (status, said["error"]["code"]) == (400, "unknown_parameter")
    assert next(iter(order)) in said["error"]["message"]
    assert server.asked == []


def test_what_only_openai_reads_is_taken_out(proxy: Running, server: Server) -> None:
    assert proxy.ask({"model": "large", "metadata": {"a": "b"}, "store": False, **CHAT})[0] == 200
    assert {"metadata", "store"} & set(server.asked[0]["body"]) == set()


@pytest.mark.parametrize(
    "path",
    [
        *("/", "/ui", "/docs", "/openapi.json", "/routes", "/health", "/health/readiness"),
        *("/sso/key/generate", "/key/generate", "/model/info", "/v1/model/info", "/get_image"),
        *("/config/yaml", "/v1/files", "/metrics", "/public/model_hub", "/v1/../ui"),
    ],
)
def test_nothing_but_the_api_is_open(proxy: Running, path: str) -> None:
    """No page and no door of LiteLLM's own, with a client's key or without, to read or to write."""
    for key in (None, KEY):
        for method in ("GET", "POST"):
            assert proxy.ask({}, path, key=key, method=method)[0] == 404


def test_bodies_that_are_not_json_or_too_large_are_refused(proxy: Running, server: Server) -> None:
    for body, status in ((b"{", 400), (b"[1]", 400), (b" " * 33 * 2**20, 413)):
        there = proxy.connection()
        # What is too large is refused by its length, before it has come.
        there.putrequest("POST", "/v1/chat/completions")
        there.putheader("Authorization", f"Bearer {KEY}")
        there.putheader("Content-Length", str(len(body)))
        there.endheaders(body if status == 400 else None)
        assert there.getresponse().status == status
        there.close()
    assert server.asked == []


def test_a_client_that_is_not_ours_gets_what_it_expects(proxy: Running, server: Server) -> None:
    client = openai.OpenAI(
        base_url=f"https://127.0.0.1:{proxy.port}/v1",
        api_key=KEY,
        max_retries=0,
        timeout=SECONDS,
        http_client=openai.DefaultHttpxClient(verify=proxy.believed),
    )
    server.go_on.set()
    messages: Any = CHAT["messages"]

    words = [
        piece.choices[0].delta.content
        for piece in client.chat.completions.create(model="gpt-4o", messages=messages, stream=True)
        if piece.choices
    ]

    assert [word for word in words if word] == ["first", "last"]
    with pytest.raises(openai.NotFoundError, match="There is no such model"):
        client.chat.completions.create(model="nobody", messages=messages)
    assert "gpt-4o" in [each.id for each in client.models.list()]
    # With TLS a stop waits half a minute for an idle connection that nobody reads.
    client.close()


def test_no_secret_is_seen_and_nobody_outside_is_called(proxy: Running, server: Server) -> None:
    """Of all that clients of these tests got, of the log, and of every call of the process."""
    server.refuses["large"] = 401  # whose answer says the key that it got
    asked = {
        "/v1/completions": {"prompt": "a"},
        "/v1/embeddings": {"input": "a"},
        "/rerank": {"query": "a", "documents": ["b"]},
        "/v1/chat/completions": CHAT,
    }
    for path, body in asked.items():
        status, said = proxy.ask({"model": "large", **body}, path)
        assert status == 401
        assert server.asked[-1]["headers"]["authorization"] == f"Bearer {UPSTREAM_KEY}"

    # The line is written once the answer is out: waited for, then everything is looked through.
    until(lambda: "a large 401" in proxy.log(), "the refused requests are in the log")
    seen = b"".join(proxy.seen).decode() + proxy.log()

    assert "authentication" in said["error"]["message"].lower()
    for secret in (UPSTREAM_KEY, KEY, NARROW, f"127.0.0.1:{server.port}"):
        assert secret not in seen
    assert "a-secret-prompt" not in proxy.log()
    assert proxy.outside.calls == []


def test_a_stop_lets_what_runs_end_and_takes_nothing_new(proxy: Running, server: Server) -> None:
    """The last test: the process is gone after it."""
    there = proxy.connection()
    answer = proxy.begin(there, {"model": "large", "stream": True, **CHAT})
    assert b"first" in answer.readline()

    proxy.process.send_signal(signal.SIGTERM)

    with pytest.raises(ConnectionError):
        until(lambda: not proxy.ask(path="/healthy", method="GET"), "it takes nothing new")
    server.go_on.set()
    assert answer.read().endswith(b"data: [DONE]\n\n")
    there.close()
    assert proxy.process.wait(SECONDS) in {0, -signal.SIGTERM}
