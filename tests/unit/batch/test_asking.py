"""What a batch sends to a fleet, as the other end of its connection receives it."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor

from gpufleet.batch.asking import Asker
from tests.support.rows import each_row

TLS_HANDSHAKE = b"\x16"


@each_row(("scheme", "first"), [("http", b"P"), ("https", TLS_HANDSHAKE)])
def test_a_key_for_an_https_address_is_never_sent_in_the_clear(scheme: str, first: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, ThreadPoolExecutor() as other:
        url = f"{scheme}://127.0.0.1:{server.getsockname()[1]}"
        asker = Asker(url, "", "sk-secret", ca_file=None, seconds=5)
        reply = other.submit(asker.ask, "/v1/completions", b"{}")
        connection, _ = server.accept()
        received = connection.recv(4096)
        connection.close()

    assert received.startswith(first)
    assert (b"sk-secret" in received) is (scheme == "http")
    assert reply.result().problem in {"refused", "connection lost"}
