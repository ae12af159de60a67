"""Models that do not complete text behind a gateway: their paths, and forms with audio."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from gpufleet.network.haproxy import BUFFER_MIB, PATHS
from gpufleet.settings.gateway_settings import Client
from tests.unit.network.gateway.running import Running, Vllm, backend, running
from tests.unit.network.gateway.test_running import client

pytestmark = pytest.mark.slow

SPEECH = "/v1/audio/transcriptions"
NARROW, WIDE = "of-narrow", "of-wide"


@dataclass(frozen=True)
class Fleet:
    """A gateway with two models."""

    gateway: Running
    tiny: Vllm
    big: Vllm

    def ask(self, path: str, body: bytes, key: str = WIDE, kind: str = "") -> tuple[str | int, str]:
        """Return the model that answered and the path that it was asked at, or why none was."""
        asked = [len(each.asked) for each in (self.tiny, self.big)]
        headers = {"Content_Type": kind} if kind else {}
        status, said = self.gateway.ask(path, body, Authorization=f"Bearer {key}", **headers)
        if status != 200:
            assert [len(each.asked) for each in (self.tiny, self.big)] == asked
            return status, said["error"]["code"]
        name, server = next(
            (name, each)
            for name, each in (("tiny", self.tiny), ("big", self.big))
            if each.port == said["port"]
        )
        assert said["length"] == len(body)
        return name, server.asked[-1]["path"]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    tiny, big = Vllm(), Vllm(model="org/big")
    backends = backend("tiny", tiny), backend("big", big, served_name="org/big")
    clients: tuple[Client, ...] = client("narrow", NARROW, models=("tiny",)), client("wide", WIDE)
    folder = tmp_path_factory.mktemp("kinds")
    with running(folder, *backends, clients=clients) as gateway:
        yield Fleet(gateway, tiny, big)
    for each in (tiny, big):
        each.stop()


@pytest.mark.parametrize("path", [*PATHS, "/v1/embeddings", "/v1/rerank", "/v1/score", SPEECH])
def test_a_model_is_asked_at_every_path_of_its_kind_by_body_and_by_path(
    fleet: Fleet, path: str
) -> None:
    by_name = b'{"model": "org/big", "input": ["a"]}'

    assert fleet.ask(path, by_name) == ("big", path)
    assert fleet.ask(f"{path}?a=/tiny/score", by_name) == ("big", f"{path}?a=/tiny/score")
    assert fleet.ask(f"/tiny{path}", by_name) == ("tiny", path)
    assert fleet.ask(path, b'{"input": ["a"]}') == (400, "model_not_named")
    assert fleet.ask(path, by_name, key=NARROW) == (403, "model_not_allowed")
    assert fleet.ask(f"/big{path}", by_name, key=NARROW) == (403, "model_not_allowed")
    assert fleet.ask(path, by_name, key="unknown") == (401, "invalid_api_key")
    assert fleet.ask(f"/other{path}", by_name) == (404, "model_not_found")


@pytest.mark.parametrize(
    "path",
    [
        "/tokenize",
        "/invocations",
        "/tiny/tokenize",
        "/tiny/collective_rpc",
        "/v2",
        "/v2/",
        "/v2/chat",
        "/v2/embed/",
        "/v2/embed/../../metrics",
        "/v2/../metrics",
        "/v2/%2e%2e/metrics",
        "/tiny/v2/../metrics",
        "/rerank/",
        "/rerank/../metrics",
        "/rerank%2f..%2fmetrics",
        "/rerank;a",
        "/%72erank",
        "/RERANK",
        "//rerank",
        "/tiny//rerank",
        "/tiny/rerank/",
        "/tiny/x/rerank",
        "/tiny/rerank/../metrics",
        "/tiny/%2e%2e/rerank",
    ],
)
def test_nothing_else_of_a_server_is_there(fleet: Fleet, path: str) -> None:
    assert fleet.ask(path, b'{"model": "tiny"}') == (404, "not_found")


BOUNDARY = "----form.boundary=x"
FORM = f"multipart/form-data; boundary={BOUNDARY}"
# Zero bytes, lines, the begin of a boundary, and text that only looks like a field.
AUDIO = (
    b"RIFF\0\0\0\0WAVE\r\n\r\n--\r\n------form\r\n--other\r\n"
    b'Content-Disposition: form-data; name="model"\r\n\r\ntiny\r\n--other--'
) * 50
LARGER = b"\0" * ((BUFFER_MIB + 1) << 20)


def field(name: str, value: bytes, *heads: str, more: str = "") -> bytes:
    """Return a field of a form as browsers, curl and httpx write it."""
    lines = [f"--{BOUNDARY}", f'Content-Disposition: form-data; name="{name}"{more}', *heads]
    return "\r\n".join([*lines, "", ""]).encode() + value + b"\r\n"


def audio(content: bytes = AUDIO, name: str = "a.wav") -> bytes:
    return field("file", content, "Content-Type: audio/wav", more=f'; filename="{name}"')


END = f"--{BOUNDARY}--\r\n".encode()
BIG = field("model", b"org/big")
# HttpClient of .NET: other headers first, and no quotes.
DOTNET = (
    f"--{BOUNDARY}\r\nContent-Type: text/plain; charset=utf-8\r\n"
    "Content-Disposition: form-data; name=model\r\n\r\norg/big\r\n"
).encode()


@pytest.mark.parametrize(
    ("body", "found"),
    [
        pytest.param(BIG + audio() + END, "big", id="first"),
        pytest.param(audio() + BIG + END, "big", id="after-zero-bytes"),
        pytest.param(audio(b"\0" * (7 << 20)) + BIG + END, "big", id="after-7-MiB"),
        pytest.param(field("language", b"de") + BIG + audio() + END, "big", id="between"),
        pytest.param(audio(name="model") + BIG + END, "big", id="a-file-named-model"),
        pytest.param(audio() + DOTNET + END, "big", id="unquoted"),
        pytest.param(b"preamble\r\n" + BIG + audio() + END, "big", id="preamble"),
        pytest.param(field("model", b"tiny") + BIG + audio() + END, "tiny", id="twice"),
        pytest.param(BIG + audio(LARGER) + END, "big", id="larger"),
        pytest.param(audio(LARGER) + BIG + END, (413, "model_not_seen"), id="larger-and-last"),
        pytest.param(audio() + END, (400, "model_not_named"), id="none"),
        pytest.param(field("models", b"tiny") + END, (400, "model_not_named"), id="other-name"),
        pytest.param(field("model", b"") + END, (400, "model_not_named"), id="empty-name"),
        pytest.param(field("model", b"x" * 257) + END, (400, "model_not_named"), id="long-name"),
        pytest.param(field("model", b"tiny\0") + END, (400, "model_not_named"), id="zero-byte"),
        pytest.param(field("model", b"ti\nny") + END, (400, "model_not_named"), id="two-lines"),
        pytest.param(field("a", b"") * 64 + BIG + END, (400, "model_not_named"), id="many-fields"),
        pytest.param(
            field("a", b"", f"X: {'x' * 4000}") + BIG + END,
            (400, "model_not_named"),
            id="long-head",
        ),
        pytest.param(BIG.removesuffix(b"\r\n"), (400, "model_not_named"), id="cut"),
        pytest.param(END, (400, "model_not_named"), id="no-field"),
        pytest.param(b"", (400, "model_not_named"), id="empty"),
        pytest.param(b'{"model": "tiny"}', (400, "model_not_named"), id="json"),
        pytest.param(field("model", b"other") + END, (404, "model_not_found"), id="unknown"),
        pytest.param(field("model", b"!") + END, (404, "model_not_found"), id="no-entry"),
    ],
)
def test_a_form_says_which_model_wherever_the_field_stands(
    fleet: Fleet, body: bytes, found: str | tuple[int, str]
) -> None:
    expected = (found, SPEECH) if isinstance(found, str) else found

    assert fleet.ask(SPEECH, body, kind=FORM) == expected


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (f'Multipart/Form-Data; charset=utf-8; Boundary="{BOUNDARY}"', ("big", SPEECH)),
        ("multipart/form-data", (400, "model_not_named")),
        ("multipart/form-data; boundary=", (400, "model_not_named")),
        ("multipart/form-data; boundary=another", (400, "model_not_named")),
        (f"multipart/form-data; boundary={'-' * 71}", (400, "model_not_named")),
        # It is a form only if the client says so.
        ("application/json", (400, "model_not_named")),
    ],
)
def test_the_header_says_where_fields_begin(
    fleet: Fleet, kind: str, found: tuple[str | int, str]
) -> None:
    assert fleet.ask(SPEECH, BIG + audio() + END, kind=kind) == found


def test_a_form_gives_a_client_no_more_models_than_json_does(fleet: Fleet) -> None:
    assert fleet.ask(SPEECH, BIG + END, key=NARROW, kind=FORM) == (403, "model_not_allowed")
    assert fleet.ask(SPEECH, field("model", b"tiny") + END, key=NARROW, kind=FORM)[0] == "tiny"


def test_a_form_without_a_model_is_told_what_to_send(fleet: Fleet) -> None:
    _, said = fleet.gateway.ask(
        SPEECH, audio() + END, Content_Type=FORM, Authorization=f"Bearer {WIDE}"
    )

    assert "send the field `model` too (curl -F model=NAME)" in said["error"]["message"]


def test_by_its_path_a_model_takes_any_form(fleet: Fleet) -> None:
    assert fleet.ask(f"/big{SPEECH}", audio(LARGER) + END, kind=FORM) == ("big", SPEECH)
