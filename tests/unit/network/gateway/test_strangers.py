"""What a gateway gives to those who have no key: little memory, few places, ten seconds."""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import resource
import select
import socket
import ssl
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpufleet.network import haproxy
from gpufleet.network.haproxy import HEAD_BYTES, HEAD_SECONDS
from gpufleet.settings.gateway_settings import Client
from tests.unit.network.gateway.running import Running, Vllm, backend, certificate, running, until

pytestmark = pytest.mark.slow

KEY = "a key"
CLIENT = Client(name="team", key_sha256=hashlib.sha256(KEY.encode()).hexdigest())
# All of 127.0.0.0/8 is this machine's: strangers of several addresses.
SOURCES = ("127.0.0.2", "127.0.0.3", "127.0.0.4")
SILENT, DRIPPING = 2000, 200
DRIP = b"X-Drip: " + b"a" * 16384 + b"\r\n"
MIB = 1 << 20


@pytest.fixture(autouse=True)
def _sockets() -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (before[1], before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.fixture
def vllm() -> Iterator[Vllm]:
    found = Vllm()
    yield found
    found.go_on.set()
    found.stop()


class Strangers:
    """Connections without a key, each from one of some addresses."""

    def __init__(self, gateway: Running, number: int, first: bytes = b"", port: int = 0) -> None:
        self.open: list[socket.socket] = []
        self.refused = 0
        for each in range(number):
            try:
                there = socket.create_connection(
                    ("127.0.0.1", port or gateway.settings.port),
                    5,
                    (SOURCES[each % len(SOURCES)], 0),
                )
                there.sendall(first)
            except OSError:
                self.refused += 1
            else:
                there.setblocking(False)
                self.open.append(there)

    def drip(self, content: bytes) -> None:
        """Have each send a little more."""
        for each in self.open:
            with contextlib.suppress(OSError):
                each.send(content)

    @property
    def left(self) -> int:
        """The number of connections that the gateway has not ended."""
        poll = select.poll()
        for each in self.open:
            poll.register(each, select.POLLIN | select.POLLRDHUP)
        return len(self.open) - len(poll.poll(0))

    def close(self) -> None:
        for each in self.open:
            each.close()


def memory(gateway: Running) -> int:
    """Return what the process that takes connections has in memory, in bytes."""
    status = Path(f"/proc/{gateway.info['Pid']}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) << 10


def test_strangers_take_neither_memory_nor_places_from_clients(tmp_path: Path, vllm: Vllm) -> None:
    """2,000 say nothing and 200 drip headers for ever; who has a key notices nothing."""
    with running(tmp_path, backend("tiny", vllm), clients=(CLIENT,)) as gateway:
        assert gateway.ask(Authorization=f"Bearer {KEY}")[0] == 200
        before = memory(gateway)
        began = time.monotonic()
        silent = Strangers(gateway, SILENT)
        dripping = Strangers(gateway, DRIPPING, b"GET /v1/models HTTP/1.1\r\nHost: x\r\n")
        most, answers = 0, []
        for _ in range(100):
            dripping.drip(DRIP)
            answers.append(gateway.ask(Authorization=f"Bearer {KEY}")[0])
            most = max(most, memory(gateway))
        asked = time.monotonic() - began
        until(lambda: not silent.left and not dripping.left, "all strangers' connections ended")
        ended = time.monotonic() - began
        for each in (silent, dripping):
            each.close()

    grown = most - before
    print(f"{grown / MIB:.0f} MiB more, 100 asked after {asked:.1f} s, gone after {ended:.1f} s")
    assert answers == [200] * 100
    # Measured: 50 MiB, of which some 10 KiB a connection by itself.
    assert grown < 96 * MIB
    assert ended < asked + 2 * HEAD_SECONDS


def test_nothing_that_is_not_a_head_is_kept(tmp_path: Path, vllm: Vllm) -> None:
    """At the port of metrics neither, which answers others all the same."""
    with running(tmp_path, backend("tiny", vllm), clients=(CLIENT,)) as gateway:
        before = memory(gateway)
        for port in (gateway.settings.port, gateway.settings.metrics_port):
            for first in (b"\r\n\r\nGET / HTTP/1.1\r\n", b"\n\nGET ", b"GET / ", b"\x16\x03\x01"):
                strangers = Strangers(gateway, 30, first, port=port)
                for _ in range(40):
                    strangers.drip(DRIP)
                until(lambda them=strangers: not them.left, f"ended: {first!r}")
                strangers.close()
            status = http.client.HTTPConnection("127.0.0.1", gateway.settings.metrics_port)
            status.request("GET", "/healthy")
            assert status.getresponse().read() == b"ok"
        assert memory(gateway) - before < 96 * MIB
        assert gateway.ask(Authorization=f"Bearer {KEY}")[0] == 200


def test_a_head_is_bounded_and_a_body_is_not(tmp_path: Path, vllm: Vllm) -> None:
    """Also where both come in one packet, over TLS, and with a second head on a connection."""
    settings = {
        "clients": (CLIENT,),
        "tls": {"certificate_file": "c", "key_file": "k"},
    }
    pem = certificate(tmp_path)
    with running(tmp_path, backend("tiny", vllm), pem=pem, **settings) as gateway:

        def ask(head: int, body: int) -> int:
            context = ssl.create_default_context()
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            there = http.client.HTTPSConnection(
                "127.0.0.1", gateway.settings.port, timeout=20, context=context
            )
            headers = {"Authorization": f"Bearer {KEY}", "X-Long": "a" * head}
            try:
                for _ in range(3):
                    there.request("POST", "/v1/completions", b"x" * body, headers)
                    answer = there.getresponse()
                    answer.read()
            except (OSError, http.client.HTTPException):
                return 0
            else:
                return answer.status
            finally:
                there.close()

        assert ask(100, 20 * MIB) == 200
        assert ask(HEAD_BYTES - 1000, 100) == 200
        assert ask(HEAD_BYTES + 1000, 100) == 0


def test_a_server_may_be_silent_for_longer_than_a_client(
    tmp_path: Path, vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long prompt is computed for minutes, and nobody has anything to send meanwhile."""
    monkeypatch.setattr(haproxy, "CLIENT_SECONDS", 1)
    with running(tmp_path, backend("tiny", vllm), clients=(CLIENT,)) as gateway:
        vllm.thinks = 3
        assert gateway.ask(Authorization=f"Bearer {KEY}")[0] == 200
        stream = gateway.stream(Authorization=f"Bearer {KEY}")
        time.sleep(3)
        vllm.go_on.set()
        assert stream.read().endswith(b"data: last\n\n")
        half = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9\r\n"
        with socket.create_connection(("127.0.0.1", gateway.settings.port), 20) as there:
            there.sendall(half + b"Authorization: Bearer %s\r\n\r\n1234" % KEY.encode())
            began = time.monotonic()
            there.recv(100)
            assert time.monotonic() - began < 3, "its upload stands still"


@pytest.mark.parametrize(
    ("path", "status"), [("/", 404), ("/v1/completions", 401), ("/v1/../x", 404)]
)
def test_who_has_shown_no_key_has_one_request_a_connection(
    tmp_path: Path, vllm: Vllm, path: str, status: int
) -> None:
    """The second head on a connection is bounded by a buffer alone, which is large."""
    with running(tmp_path, backend("tiny", vllm), clients=(CLIENT,)) as gateway:
        there = gateway.connection()
        there.request("GET", path)
        answer = there.getresponse()
        answer.read()
        assert (answer.status, answer.getheader("connection")) == (status, "close")
        assert there.sock is None


def test_a_source_has_its_places_and_no_more(tmp_path: Path, vllm: Vllm) -> None:
    backends = backend("tiny", vllm)
    with running(tmp_path, backends, clients=(CLIENT,), source_connections=20) as gateway:
        strangers = Strangers(gateway, 3 * 25)
        until(lambda: strangers.left <= 60, "those over the limit are refused")
        time.sleep(0.5)
        assert strangers.left == 60
        assert gateway.ask(Authorization=f"Bearer {KEY}")[0] == 200
        strangers.close()
        until(lambda: gateway.info["CurrConns"] in {"0", "1"}, "their places are free")
        again = Strangers(gateway, 3 * 20)
        time.sleep(0.5)
        assert again.left == 60
        again.close()


def test_http_2_is_not_spoken(tmp_path: Path, vllm: Vllm) -> None:
    """Its heads are bounded by a buffer alone."""
    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes.fromhex("000000040000000000")
    with (
        running(tmp_path, backend("tiny", vllm), clients=(CLIENT,)) as gateway,
        socket.create_connection(("127.0.0.1", gateway.settings.port), 20) as there,
    ):
        there.sendall(preface)
        assert there.recv(100).startswith(b"HTTP/1.1 400 ")
