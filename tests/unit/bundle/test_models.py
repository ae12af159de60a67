"""A Hub that cannot be asked is a sentence, and no traceback."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Thread

import pytest

from gpufleet.bundle.models import Model, find
from gpufleet.errors import FleetError
from tests.support.rows import each_row

PORTAL = b"<html>log in first</html>"
PAGE = b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%b" % (
    len(PORTAL),
    PORTAL,
)
MISSING = b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


@contextmanager
def hub(answer: bytes | None) -> Iterator[str]:
    """A server that gives this to each request; None: there is none."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"http://127.0.0.1:{server.getsockname()[1]}"
        if answer is None:
            server.close()
            yield address
            return

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.recv(65536)
                    connection.sendall(answer)

        Thread(target=serve, daemon=True).start()
        try:
            yield address
        finally:
            server.shutdown(socket.SHUT_RDWR)


@each_row(
    ("answer", "said"),
    [
        pytest.param(None, "Connection refused", id="no server"),
        pytest.param(b"", "without sending a response", id="hangs up"),
        pytest.param(PAGE, "Expecting value", id="a page to log in"),
        pytest.param(MISSING, "404", id="no such model"),
    ],
)
def test_a_hub_that_does_not_name_a_models_files_is_a_sentence(
    answer: bytes | None, said: str
) -> None:
    with hub(answer) as address, pytest.raises(FleetError) as refused:
        find(Model("lab/tiny", "0" * 40, address, None), None)

    (sentence,) = refused.value.problems
    assert sentence.startswith(
        f"lab/tiny at {'0' * 40}: the Hub does not list the files of this model: "
    )
    assert said in sentence
