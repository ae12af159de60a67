"""How long and how much is waited for: deadlines of nodes, of dead connections, open files."""

from __future__ import annotations

import socket
import subprocess
import sys
import time
from contextlib import closing

import gevent
import pytest

from gpufleet.errors import FleetError
from gpufleet.remote import payload, query, ssh
from gpufleet.remote.session import Session
from tests.unit.remote.test_session import Pipes


def test_a_connection_whose_other_end_has_lost_power_is_known_to_be_dead_within_30_seconds() -> (
    None
):
    with socket.create_server(("127.0.0.1", 0)) as server:
        near = socket.create_connection(server.getsockname(), timeout=10)
    with near, closing(ssh.nodelay_transport(near)):
        idle, interval, probes, unacked = (
            near.getsockopt(socket.IPPROTO_TCP, option)
            for option in (
                socket.TCP_KEEPIDLE,
                socket.TCP_KEEPINTVL,
                socket.TCP_KEEPCNT,
                socket.TCP_USER_TIMEOUT,
            )
        )
    assert idle + interval * probes == 30 == unacked / 1000


@pytest.mark.parametrize(
    ("soft", "hard", "after"),
    [(256, 8192, 4096), (256, 1024, 1024), (4096, 8192, 4096), (5000, 8192, 5000)],
)
def test_open_files_are_as_many_as_a_fleet_needs_and_the_hard_limit_allows(
    soft: int, hard: int, after: int
) -> None:
    """And never fewer than the operator has given. In a process of its own: limits stay."""
    program = (
        "import resource; from gpufleet.remote.ssh import raise_open_files_limit; "
        f"resource.setrlimit(resource.RLIMIT_NOFILE, ({soft}, {hard})); raise_open_files_limit(); "
        "print(*resource.getrlimit(resource.RLIMIT_NOFILE))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    assert done.stdout.split() == [str(after), str(hard)]


@pytest.mark.parametrize("seconds", [0.1, 0.15])
def test_a_node_is_waited_for_until_the_deadline_and_no_longer(seconds: float) -> None:
    jobs = {"a": gevent.spawn(gevent.sleep, 60), "b": gevent.spawn(int)}
    began = time.monotonic()

    with gevent.Timeout(20):
        query.await_jobs(jobs, seconds, "the probe", None)

    assert time.monotonic() - began >= seconds
    assert [jobs[name].ready() for name in "ab"] == [False, True]
    gevent.killall(list(jobs.values()))


def test_a_session_is_of_the_connection_that_it_was_opened_on() -> None:
    """A node that was rebooted meanwhile has another one."""
    pipes = Pipes()
    first, second = object(), object()
    known = query._Open(Session(pipes, pipes.close), "command", first)

    assert query._gone(known, second)
    assert not query._gone(known, first)
    assert not query._gone(None, first)
    pipes.close()
    pipes.process.wait(10)


def test_a_binding_that_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    assert payload.binding().name == "pynvml.py"

    monkeypatch.setitem(sys.modules, "pynvml", None)
    with pytest.raises(FleetError, match="nvidia-ml-py is not installed"):
        payload.binding()
