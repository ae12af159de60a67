"""Connections do not wait for company: checked on real TCP connections, by asking the kernel."""

from __future__ import annotations

import socket
import subprocess
import sys
from contextlib import closing
from threading import Event

import paramiko
import pytest

from gpufleet.remote import ssh
from tests.support.checkout import ROOT


@pytest.fixture
def tcp():
    """Two ends of one TCP connection on loopback."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname(), timeout=10)
        far, _ = server.accept()
    with near, far:
        yield near, far


def options(sock: socket.socket) -> dict[str, int]:
    return {
        "nodelay": sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY),
        "keepalive": sock.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE),
        "idle": sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE),
        "user_timeout": sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT),
    }


TUNED = {"nodelay": 1, "keepalive": 1, "idle": 15, "user_timeout": 30_000}


def test_the_tcp_connection_below_is_tuned(tcp):
    near, _ = tcp
    assert options(near)["nodelay"] == 0  # paramiko and Python leave it so

    with closing(ssh.nodelay_transport(near)):
        assert options(near) == TUNED


def test_through_a_jump_host_the_outer_connection_is_tuned(tcp):
    """A channel of another connection has no socket options of its own."""

    class Jump(paramiko.ServerInterface):
        def get_allowed_auths(self, *_):
            return "none"

        def check_auth_none(self, *_):
            return paramiko.AUTH_SUCCESSFUL

        def check_channel_direct_tcpip_request(self, *_):
            return paramiko.OPEN_SUCCEEDED

    near, far = tcp
    with closing(paramiko.Transport(far)) as server, closing(paramiko.Transport(near)) as client:
        server.add_server_key(paramiko.RSAKey.generate(2048))
        server.start_server(Event(), Jump())  # an event: do not wait for the other end here
        client.start_client(timeout=20)
        client.auth_none("anyone")
        channel = client.open_channel("direct-tcpip", ("node", 22), ("here", 0), timeout=20)

        with closing(ssh.nodelay_transport(channel)):
            assert options(near) == TUNED


def test_what_has_no_tcp_below_is_left_alone():
    """A ProxyCommand speaks through pipes, which paramiko wraps itself."""
    ours, theirs = socket.socketpair()
    with ours, theirs, closing(ssh.nodelay_transport(ours)) as transport:
        assert isinstance(transport, paramiko.Transport)


# A soft and a hard limit, and the soft one after the inventory was loaded.
LOADS = """\
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
runpy.run_path("examples/explained/inventories/prod.py")
print(*resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("before", "after"),
    [((256, 8192), "4096 8192"), ((256, 300), "300 300"), ((5000, 8192), "5000 8192")],
)
def test_every_node_of_a_large_fleet_may_be_connected_at_once(before, after):
    """Whoever loads an inventory has room for its connections, as far as the hard limit goes."""
    command = [sys.executable, "-c", LOADS, *map(str, before)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == after
