"""Which addresses the look says that a port is open on, against sockets that are."""

from __future__ import annotations

import socket

import pytest

from gpufleet.on_node.serving import endpoints

LOOPBACK = [("127.0.0.1", socket.AF_INET), ("127.0.0.9", socket.AF_INET), ("::1", socket.AF_INET6)]
BEYOND = [("0.0.0.0", socket.AF_INET), ("::", socket.AF_INET6)]


def listening(address: str, family: socket.AddressFamily) -> socket.socket:
    try:
        found = socket.socket(family)
        found.bind((address, 0))
    except OSError as error:
        pytest.skip(f"this machine has no {address}: {error}")
    return found


@pytest.mark.parametrize(("address", "family"), LOOPBACK)
def test_a_port_on_loopback_is_not_exposed(address: str, family: socket.AddressFamily):
    with listening(address, family) as server:
        server.listen()

        assert endpoints.exposed_addresses(server.getsockname()[1]) == []


@pytest.mark.parametrize(("address", "family"), BEYOND)
def test_a_port_on_all_addresses_is(address: str, family: socket.AddressFamily):
    with listening(address, family) as server:
        server.listen()

        assert len(endpoints.exposed_addresses(server.getsockname()[1]) or []) == 1


def test_a_port_that_nobody_listens_on_is_not():
    """Bound, and not listening: nobody can reach it."""
    with listening(*BEYOND[0]) as server:
        assert endpoints.exposed_addresses(server.getsockname()[1]) == []


def test_an_ipv4_address_in_ipv6_s_clothes_is_known():
    """As tcp6 writes 127.0.0.1 and 192.0.2.1 that a socket of both families is bound to."""

    def written(text: str) -> str:
        raw = socket.inet_pton(socket.AF_INET6, text)
        words = [raw[at : at + 4] for at in range(0, 16, 4)]
        return "".join(f"{int.from_bytes(word, endpoints.sys.byteorder):08X}" for word in words)

    assert endpoints.is_loopback(written("::ffff:127.0.0.1"))
    assert endpoints.is_loopback(written("::1"))
    assert not endpoints.is_loopback(written("::ffff:192.0.2.1"))
    assert not endpoints.is_loopback(written("2001:db8::1"))
