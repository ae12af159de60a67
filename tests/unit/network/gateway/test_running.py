"""What clients and operators get of a gateway that runs: the real HAProxy, real connections."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpufleet.network.haproxy import BUFFER_MIB
from gpufleet.settings.gateway_settings import Client
from tests.unit.network.gateway.running import Running, Vllm, backend, running, until

pytestmark = pytest.mark.slow

FIRST, SECOND = "tiny/gpu-01.tiny-0", "tiny/gpu-02.tiny-1"


@pytest.fixture
def servers() -> Iterator[tuple[Vllm, Vllm]]:
    found = Vllm(), Vllm()
    yield found
    for each in found:
        each.go_on.set()
        each.stop()


def client(name: str, key: str, **settings: Any) -> Client:
    return Client(name=name, key_sha256=hashlib.sha256(key.encode()).hexdigest(), **settings)


def streams_on_both(gateway: Running, servers: tuple[Vllm, Vllm]) -> dict[str, Any]:
    """Begin streams until each server has one; return one of each by the server's name."""
    found: dict[str, Any] = {}
    for _ in range(4):
        before = [len(each.asked) for each in servers]
        stream = gateway.stream()
        number = next(n for n, each in enumerate(servers) if len(each.asked) > before[n])
        found.setdefault((FIRST, SECOND)[number], stream)
    assert len(found) == 2
    return found


def test_a_drained_servers_streams_end_and_new_requests_go_elsewhere(
    tmp_path: Path, servers: tuple[Vllm, Vllm]
) -> None:
    first, second = servers
    with running(tmp_path, backend("tiny", first, second)) as gateway:
        streams = streams_on_both(gateway, servers)

        state = gateway.state("drain", FIRST)

        assert state.drained == (FIRST,)
        assert {each.name: each.drained for each in state.servers} == {FIRST: True, SECOND: False}
        assert next(each.sessions for each in state.servers if each.name == FIRST) == 2
        asked = len(first.asked)
        assert {gateway.ask()[1]["port"] for _ in range(6)} == {second.port}
        assert len(first.asked) == asked
        first.go_on.set()
        assert streams[FIRST].read().endswith(b"data: last\n\n")

        until(
            lambda: next(s.sessions for s in gateway.state().servers if s.name == FIRST) == 0,
            "the drained server has no request",
        )
        assert gateway.state("ready", FIRST).drained == ()
        second.go_on.set()
        for each in streams.values():
            each.close()
        assert {gateway.ask()[1]["port"] for _ in range(6)} == {first.port, second.port}


def test_what_is_drained_stays_so_over_reload_and_kill(
    tmp_path: Path, servers: tuple[Vllm, Vllm]
) -> None:
    """And where it lies may change meanwhile: not the place of before comes back."""
    first, second = servers
    with running(tmp_path, backend("tiny", first, second)) as gateway:
        gateway.state("drain", FIRST)

        def only_the_second(how: str) -> None:
            assert {gateway.ask()[1]["port"] for _ in range(4)} == {second.port}, how
            assert gateway.status(FIRST) == "DRAIN", how

        gateway.reload()
        only_the_second("a reload")
        gateway.kill()
        gateway.start()
        only_the_second("kill -9")
        first.stop()
        first.port = 0
        first.start()
        gateway.configure([backend("tiny", first, second)])
        gateway.reload()
        only_the_second("another port")

        gateway.state("ready", FIRST)
        until(lambda: gateway.ask()[1]["port"] == first.port, "its new place is asked")
        gateway.kill()
        gateway.start()
        assert gateway.status(FIRST).startswith("UP")


def test_a_server_is_drained_while_the_gateway_is_dead(
    tmp_path: Path, servers: tuple[Vllm, Vllm]
) -> None:
    first, second = servers
    with running(tmp_path, backend("tiny", first, second)) as gateway:
        gateway.kill()

        state = gateway.state("drain", FIRST)

        assert (state.runs, state.drained) == (False, (FIRST,))
        assert "does not answer" in state.error
        gateway.start()
        assert {gateway.ask()[1]["port"] for _ in range(4)} == {second.port}


def test_ready_means_that_requests_come(tmp_path: Path, servers: tuple[Vllm, Vllm]) -> None:
    """A replica that was replaced is up again before the next one may be drained."""
    first, second = servers
    with running(tmp_path, backend("tiny", first, second)) as gateway:
        gateway.state("drain", FIRST)
        first.stop()
        until(lambda: gateway.status(FIRST) == "DOWN", "its check fails")
        first.start()

        gateway.state("ready", FIRST)

        assert gateway.status(FIRST).startswith("UP")
        gateway.state("drain", SECOND)
        assert {gateway.ask()[1].get("port") for _ in range(4)} == {first.port}


def test_a_server_that_comes_later_is_drained_from_its_first_moment(
    tmp_path: Path, servers: tuple[Vllm, Vllm]
) -> None:
    first, second = servers
    with running(tmp_path, backend("tiny", first)) as gateway:
        assert gateway.state("drain", SECOND).unknown == (SECOND,)
        gateway.configure([backend("tiny", first, second)])
        gateway.reload()

        assert {gateway.ask()[1]["port"] for _ in range(4)} == {first.port}


def test_a_reload_cuts_nothing_and_is_seen(tmp_path: Path, servers: tuple[Vllm, Vllm]) -> None:
    """Streams go on in the old process and are counted; idle connections get one more answer."""
    first, second = servers
    with running(tmp_path, backend("tiny", first)) as gateway:
        idle = gateway.connection()
        idle.request("POST", "/v1/completions", b"{}")
        idle.getresponse().read()
        stream = gateway.stream()
        gateway.configure([backend("tiny", first, second)])

        gateway.reload()

        assert next(s.sessions for s in gateway.state().servers if s.name == FIRST) == 1
        idle.request("POST", "/v1/completions", b"{}")
        assert idle.getresponse().status == 200
        assert {gateway.ask()[1]["port"] for _ in range(6)} == {first.port, second.port}
        first.go_on.set()
        assert stream.read().endswith(b"data: last\n\n")


def test_over_a_reload_a_server_that_is_down_stays_down(
    tmp_path: Path, servers: tuple[Vllm, Vllm]
) -> None:
    first, second = servers
    with running(tmp_path, backend("tiny", first, second)) as gateway:
        first.model = "another"  # it answers, and is not the model
        until(lambda: gateway.status(FIRST) == "DOWN", "seen to be another model")
        gateway.reload()

        assert gateway.status(FIRST).startswith("DOWN")
        assert {gateway.ask()[1]["port"] for _ in range(4)} == {second.port}


def test_requests_of_a_dead_server_go_to_another(
    tmp_path: Path, servers: tuple[Vllm, Vllm]
) -> None:
    """It refuses connections; or it ends them without an answer; or it says 503 itself."""
    first, second = servers
    with running(tmp_path, backend("tiny", first, second)) as gateway:
        first.drops = True
        assert [gateway.ask()[1].get("port") for _ in range(8)] == [second.port] * 8
        first.drops, first.refuses = False, 503
        assert [gateway.ask()[1].get("port") for _ in range(8)] == [second.port] * 8
        assert len(first.asked) >= 4, "it was hardly tried: nothing is proven"
        first.stop()
        assert [gateway.ask()[1].get("port") for _ in range(8)] == [second.port] * 8
        first.start()
        second.stop()
        until(lambda: gateway.status(SECOND) == "DOWN", "seen to be down")


def test_a_stream_that_has_begun_is_not_begun_again(
    tmp_path: Path, servers: tuple[Vllm, Vllm]
) -> None:
    first, second = servers
    with running(tmp_path, backend("tiny", first, second)) as gateway:
        stream = gateway.stream()
        asked = sum(len(each.asked) for each in servers)
        for each in servers:
            each.drops = True
        gateway.kill()
        with pytest.raises((http.client.IncompleteRead, ConnectionError)):
            stream.read()
        assert sum(len(each.asked) for each in servers) == asked


def test_without_a_server_clients_read_an_error_of_openais_form(tmp_path: Path) -> None:
    with running(tmp_path, backend("tiny")) as gateway:
        status, said = gateway.ask()

        assert (status, said["error"]["code"]) == (503, "no_server")
        assert set(said["error"]) == {"message", "type", "param", "code"}


def test_only_known_keys_are_answered_and_servers_get_their_own(tmp_path: Path) -> None:
    vllm = Vllm(key="of-vllm")
    known = client("team-a", "key, with a comma")
    with running(tmp_path, backend("tiny", vllm, key="of-vllm"), clients=(known,)) as gateway:
        for headers in (
            {},
            {"Authorization": "Bearer wrong"},
            {"Authorization": "Bearer "},
            {"Authorization": f"Bearer {known.key_sha256}"},
            {"Authorization": "Bearer of-vllm"},
        ):
            status, said = gateway.ask(**headers)
            assert (status, said["error"]["code"]) == (401, "invalid_api_key"), headers
        assert vllm.asked == []

        assert gateway.ask(Authorization="Bearer key, with a comma")[0] == 200
        assert gateway.ask(X_Api_Key="key, with a comma")[0] == 200
        for each in vllm.asked:
            assert each["headers"]["authorization"] == "Bearer of-vllm"
            assert "key, with" not in json.dumps(each["headers"])
        until(lambda: gateway.status(FIRST) == "UP", "its check has the key, too")
    vllm.stop()


def test_a_client_has_its_rate_and_its_models(tmp_path: Path, servers: tuple[Vllm, Vllm]) -> None:
    first, second = servers
    second.model = "org/big"
    clients = (
        client("slow", "s", requests_per_minute=3),
        client("narrow", "n", models=("tiny",)),
        client("wide", "w"),
    )
    both = backend("tiny", first), backend("big", second, served_name="org/big")
    with running(tmp_path, *both, clients=clients) as gateway:

        def ask(key: str, model: str = "tiny", **more: Any) -> int:
            body = json.dumps({"model": model}).encode()
            return gateway.ask(body=body, Authorization=f"Bearer {key}", **more)[0]

        assert [ask("s") for _ in range(5)] == [200, 200, 200, 429, 429]
        assert [ask("w") for _ in range(5)] == [200] * 5
        assert [ask("n"), ask("n", "org/big"), ask("w", "org/big")] == [200, 403, 200]
        assert [ask("n", path="/big/v1/completions"), ask("n", path="/tiny/v1/x")] == [403, 200]
        lists = {
            key: [
                each["id"]
                for each in gateway.ask("/v1/models", method="GET", Authorization=f"Bearer {key}")[
                    1
                ]["data"]
            ]
            for key in ("n", "w")
        }
        assert lists == {"n": ["tiny"], "w": ["org/big", "tiny"]}


def test_an_adapter_goes_to_its_model_and_belongs_to_those_who_may_use_it(
    tmp_path: Path, servers: tuple[Vllm, Vllm]
) -> None:
    first, second = servers
    second.model = "org/big"
    clients = client("narrow", "n", models=("tiny",)), client("wide", "w")
    tiny = replace(backend("tiny", first), adapters=("sql",))
    big = replace(backend("big", second, served_name="org/big"), adapters=("chat",))
    with running(tmp_path, tiny, big, clients=clients) as gateway:

        def ask(key: str, model: str) -> int:
            body = json.dumps({"model": model}).encode()
            status, said = gateway.ask(body=body, Authorization=f"Bearer {key}")
            return int(said["port"]) if status == 200 else status

        assert [ask("w", "sql"), ask("w", "chat")] == [first.port, second.port]
        assert [ask("n", "sql"), ask("n", "chat")] == [first.port, 403]
        assert ask("w", "other") == 404
        headers = {"Authorization": "Bearer n"}
        _, listed = gateway.ask("/v1/models", method="GET", **headers)
        assert [(each["id"], each.get("parent")) for each in listed["data"]] == [
            ("sql", "tiny"),
            ("tiny", None),
        ]


def test_with_one_model_a_name_that_not_all_servers_know_reaches_none(
    tmp_path: Path, servers: tuple[Vllm, Vllm]
) -> None:
    with running(tmp_path, replace(backend("tiny", *servers), adapters=("sql",))) as gateway:

        def ask(body: bytes) -> int:
            return int(gateway.ask(body=body)[0])

        assert ask(b'{"model": "sql"}') == ask(b'{"model": "tiny"}') == 200
        assert ask(b'{"model": "new"}') == ask(b'{"model": "../../etc"}') == 404
        # Who names none means the one that there is.
        assert ask(b'{"prompt": "a"}') == ask(b"no JSON") == 200


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/health",
        "/metrics",
        "/v1",
        "/tokenize",
        "/invocations",
        "/v2/v1",
        "/v1/../metrics",
        "/v1/%2e%2e/metrics",
        "//v1/completions",
        "/tiny/v1/../../metrics",
        "/other/v1/completions",
        "/tiny/metrics",
        "/tiny/x/v1/completions",
        "/v1/load_lora_adapter",
        "/tiny/v1/unload_lora_adapter",
    ],
)
def test_only_the_api_is_there(one_gateway: tuple[Running, Vllm], path: str) -> None:
    gateway, vllm = one_gateway
    before = len(vllm.asked)

    status, said = gateway.ask(path)

    assert (status, set(said["error"])) == (404, {"message", "type", "param", "code"})
    assert len(vllm.asked) == before


@pytest.fixture(scope="module")
def one_gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Running, Vllm]]:
    vllm = Vllm()
    with running(tmp_path_factory.mktemp("gateway"), backend("tiny", vllm)) as gateway:
        yield gateway, vllm
    vllm.stop()


def test_with_one_model_everything_of_the_api_goes_to_it(
    one_gateway: tuple[Running, Vllm],
) -> None:
    gateway, vllm = one_gateway
    for path, arrives in (
        ("/v1/completions", "/v1/completions"),
        ("/tiny/v1/chat/completions?a=b", "/v1/chat/completions?a=b"),
        ("/v1/audio/transcriptions", "/v1/audio/transcriptions"),
    ):
        assert gateway.ask(path, b"no JSON")[0] == 200
        assert vllm.asked[-1]["path"] == arrives


def test_a_gateway_says_that_it_answers_and_what_it_does(
    one_gateway: tuple[Running, Vllm],
) -> None:
    """keepalived asks the one, Prometheus the other, at a port that is not the clients'."""
    gateway, _ = one_gateway
    there = http.client.HTTPConnection("127.0.0.1", gateway.settings.metrics_port, timeout=20)
    there.request("GET", "/healthy")
    answer = there.getresponse()
    assert (answer.status, answer.read()) == (200, b"ok")
    there.request("GET", "/metrics")
    text = there.getresponse().read().decode()
    assert 'haproxy_server_status{proxy="tiny",server="gpu-01.tiny-0",state="UP"} 1' in text


@pytest.fixture(scope="module")
def two_models(
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Running, Vllm, Vllm]]:
    first, second = Vllm(), Vllm(model="org/big")
    backends = backend("tiny", first), backend("big", second, served_name="org/big")
    with running(tmp_path_factory.mktemp("models"), *backends) as gateway:
        yield gateway, first, second
    for each in (first, second):
        each.stop()


LARGE = b"x" * (1 << 20)
LARGER = b"x" * ((BUFFER_MIB + 1) << 20)


@pytest.mark.parametrize(
    ("body", "found"),
    [
        pytest.param(b'{"model": "tiny"}', "tiny", id="plain"),
        pytest.param(b'{"model":"org/big","messages":[]}', "big", id="first"),
        pytest.param(b'{"messages": [{"model": "tiny"}], "model": "org/big"}', "big", id="last"),
        pytest.param(b'{"model": "org\\/big"}', "big", id="escaped"),
        pytest.param(b'{"prompt": "%s", "model": "org/big"}' % LARGE, "big", id="large"),
        pytest.param(b'{"model": "org/big", "prompt": "%s"}' % LARGER, "big", id="larger"),
        pytest.param(b'{"prompt": "%s", "model": "tiny"}' % LARGER, 413, id="larger-and-last"),
        pytest.param(b'{"model": "unknown"}', 404, id="unknown"),
        pytest.param(b'{"prompt": "x"}', 400, id="none"),
        pytest.param(b'{"model": 5}', 404, id="number"),
        pytest.param(b'["model", "tiny"]', 400, id="list"),
        pytest.param(b"", 400, id="empty"),
    ],
)
def test_the_body_says_which_model(
    two_models: tuple[Running, Vllm, Vllm], body: bytes, found: str | int
) -> None:
    gateway, first, second = two_models
    status, said = gateway.ask(body=body)

    if isinstance(found, int):
        assert status == found
        assert said["error"]["message"]
    else:
        expected = {"tiny": first, "big": second}[found]
        assert (status, said.get("port"), said.get("length")) == (200, expected.port, len(body))


def test_by_its_path_a_model_is_asked_whatever_the_body(
    two_models: tuple[Running, Vllm, Vllm],
) -> None:
    gateway, _, second = two_models
    body = b'{"prompt": "%s", "model": "org/big"}' % LARGER
    status, said = gateway.ask("/big/v1/completions", body)

    assert (status, said["port"], said["length"]) == (200, second.port, len(body))


def test_a_body_without_a_length_is_taken_as_far_as_it_can_be_seen(
    two_models: tuple[Running, Vllm, Vllm],
) -> None:
    gateway, first, _ = two_models

    def ask(*parts: bytes) -> int:
        there = gateway.connection()
        with contextlib.suppress(BrokenPipeError):  # refused before all of it is sent
            there.request("POST", "/v1/completions", iter(parts), encode_chunked=True)
        status = there.getresponse().status
        there.close()
        return status

    assert ask(b'{"prompt": "', LARGE, b'", "model": "tiny"}') == 200
    assert first.asked[-1]["length"] > len(LARGE)
    assert ask(b'{"model": "tiny", "prompt": "', LARGER, b'"}') == 411


def test_what_is_larger_than_the_gateway_takes_is_refused(
    tmp_path: Path, servers: tuple[Vllm, Vllm]
) -> None:
    with running(tmp_path, backend("tiny", servers[0]), max_body_mib=1) as gateway:
        assert gateway.ask(body=b"x" * (1 << 20))[0] == 200
        status, said = gateway.ask(body=b"x" * ((1 << 20) + 1))
        assert (status, said["error"]["code"]) == (413, "request_too_large")


def test_a_session_stays_with_its_server(tmp_path: Path, servers: tuple[Vllm, Vllm]) -> None:
    """And moves when that is drained, to come back to it afterwards."""
    with running(
        tmp_path, backend("tiny", *servers), affinity={"by": "session", "most_percent": 1000}
    ) as gateway:

        def served_by(session: int) -> set[Any]:
            return {gateway.ask(X_Session_Id=f"s{session}")[1]["port"] for _ in range(4)}

        found = [served_by(session) for session in range(8)]
        assert [len(each) for each in found] == [1] * 8
        assert len(set.union(*found)) == 2, "all sessions on one server: nothing is proven"
        gateway.state("drain", FIRST)
        assert set.union(*(served_by(each) for each in range(8))) == {servers[1].port}
        gateway.state("ready", FIRST)
        assert [served_by(session) for session in range(8)] == found


def test_it_says_which_key_it_sends_without_saying_it(tmp_path: Path) -> None:
    vllm, open_one = Vllm(key="of-vllm"), Vllm(model="open")
    backends = backend("tiny", vllm, key="of-vllm"), backend("open", open_one)
    with running(tmp_path, *backends) as gateway:
        until(lambda: gateway.status("tiny/gpu-01.tiny-0") == "UP", "its key is taken")
        state = gateway.state()
    for each in (vllm, open_one):
        each.stop()

    assert sorted(state.models) == ["open", "tiny"]
    assert state.keys == {"tiny": hashlib.sha256(b"of-vllm").hexdigest()}
    assert "of-vllm" not in repr(state)
