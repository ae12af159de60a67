"""What a watchdog says to gateways, and to whoever else comes to its port."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from gpufleet.engines import vllm
from gpufleet.on_node.common import linux_facts
from gpufleet.on_node.watchdog import (
    stage_watch,
    verdict,
)
from gpufleet.on_node.watchdog.agent import CALLER_SECONDS
from gpufleet.on_node.watchdog.watchdog import Watchdog
from tests.unit.network.gateway.running import free_ports

LIFE = "a1"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node's files: one unit runs, and no program is there to be asked."""
    monkeypatch.setattr(linux_facts, "ROOT", str(tmp_path))
    monkeypatch.setattr("gpufleet.on_node.watchdog.watchdog.TURN_SECONDS", 0.05)
    for folder in ("var/lib/gpufleet/textfile", "var/lib/gpufleet/watchdog", "run/systemd/units"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "run/systemd/units/invocation:vllm-tiny-0.service").symlink_to(LIFE)
    return tmp_path


def stage(name: str, **other: Any) -> dict[str, Any]:
    told = {
        "stage": name,
        "unit": f"vllm-{name}.service",
        "mode": "warn",
        "seconds": 1,
        "idle_seconds": 0,
        "servers": [],
        "served_name": "tiny",
        "key_file": None,
        "group": False,
        "rank": 0,
        "pins": True,
        "progress": [asdict(vllm.ENGINE.progress)],
        "py_spy": [],
    }
    return told | other


def watchdog(*stages: dict[str, Any], address: str = "127.0.0.1") -> Watchdog:
    (port,) = free_ports(1)
    told = {"schema": 1, "listen": {"address": address, "port": port}, "stages": stages}
    found = Watchdog(told)
    found.step()
    found.step()
    return found


@contextlib.contextmanager
def caller(of: Watchdog, said: bytes = b"") -> Iterator[socket.socket]:
    assert of.agent
    address = "::1" if of.agent.place[0] == "::" else "127.0.0.1"
    with socket.create_connection((address, of.agent.place[1]), timeout=10) as connection:
        connection.sendall(said)
        yield connection


def answer(of: Watchdog, connection: socket.socket, seconds: float = 10) -> bytes | None:
    """Turn the loop until the connection has ended; return what it said, None: it has not ended."""
    connection.setblocking(False)
    got, end = b"", time.monotonic() + seconds
    while time.monotonic() < end:
        of.step()
        with contextlib.suppress(BlockingIOError):
            piece = connection.recv(1000)
            if not piece:
                return got
            got += piece
    return None


def told(of: Watchdog, name: str) -> str:
    with caller(of, name.encode() + b"\n") as connection:
        said = answer(of, connection)
    assert said is not None
    assert said.endswith(b"\n")
    assert said.count(b"\n") == 1
    return said.decode().strip()


def test_it_answers_for_the_stage_that_is_named_and_for_no_other(root: Path) -> None:
    """Of one that is not watched, not known or does not run, nothing is said."""
    found = watchdog(stage("tiny-0"), stage("tiny-1"), stage("off-0", mode="off"))
    assert told(found, "tiny-0") == "up"
    assert told(found, "tiny-1") == ""  # its unit does not run
    assert told(found, "off-0") == ""
    assert told(found, "other-0") == ""
    found.stages[0].stalled = True
    assert told(found, "tiny-0") == "down #stalled"
    assert told(found, "tiny-1") == ""


def test_it_never_says_what_would_lift_a_drain() -> None:
    """HAProxy takes `ready`, `drain`, `maint` and numbers for an administrator's wish."""
    found = stage_watch.Stage(stage("tiny-0"), lambda *_: None)
    words = set()
    for found.stalled in (False, True):
        for found.life in ("", LIFE):
            words |= set(found.word(0.0).partition("#")[0].split())
    assert words == {"up", "down"}


def test_one_that_was_stalled_is_not_acquitted_by_a_restart_of_the_watchdog(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until it would have been found again; in another life nothing is held against it."""
    before = watchdog(stage("tiny-0"))
    before.stages[0].stalled = True
    before.stages[0].life = LIFE
    before._write(time.monotonic())
    assert before.agent
    before.agent.close()

    after = watchdog(stage("tiny-0"))
    assert told(after, "tiny-0") == ""
    patience = 1 + stage_watch.RECALL_SECONDS
    assert after.stages[0].word(time.monotonic() + patience) == "up"
    unit = root / "run/systemd/units/invocation:vllm-tiny-0.service"
    unit.unlink()
    unit.symlink_to("b2")
    after._next_turn = 0.0
    after.step()
    assert told(after, "tiny-0") == "up"


def test_nor_by_a_pause_of_the_watchdog_after_which_it_counts_anew(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = stage_watch.Stage(stage("tiny-0"), lambda *_: None)
    found.turn(100.0)
    found.stalled = True
    found.turn(100.0 + verdict.PAUSE_SECONDS + 1)
    assert not found.stalled
    assert found.word(112.0) == ""
    assert found.word(112.0 + 1 + stage_watch.RECALL_SECONDS) == "up"

    without = stage_watch.Stage(stage("tiny-0"), lambda *_: None)
    without.turn(100.0)
    without.stalled = True
    without.turn(101.0)
    assert without.word(101.0) == "up"


@pytest.mark.parametrize(
    "said", [b"", b"tiny-0", b"x" * 10_000, b"\xff\xfe\n", b"GET / HTTP/1.1\r\n"]
)
def test_whatever_comes_there_has_its_time_and_gets_nothing(
    root: Path, said: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpufleet.on_node.watchdog.agent.CALLER_SECONDS", 0.3)
    found = watchdog(stage("tiny-0"))
    with caller(found) as connection:
        connection.sendall(said)
        with contextlib.suppress(ConnectionResetError):
            assert (answer(found, connection) or b"").strip() == b""
    assert found.agent
    assert found.agent.callers == {}


def test_many_who_say_nothing_delay_no_turn_and_are_sent_away(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And then the next one has its answer."""
    monkeypatch.setattr("gpufleet.on_node.watchdog.agent.CALLERS", 8)
    found = watchdog(stage("tiny-0"))
    agent = found.agent
    assert agent
    with contextlib.ExitStack() as stack:
        for _ in range(15):
            stack.enter_context(caller(found))
        # Not even if a poll says of each that it has sent something: a turn that waits never ends.
        for now in (0.0, CALLER_SECONDS / 2):
            agent.turn(now)
            agent.advance(set(agent.descriptors()), now)
            assert len(agent.callers) == 8
        first = [*agent.callers.values()]
        agent.turn(CALLER_SECONDS)
        agent.advance(set(), CALLER_SECONDS)
        assert not {*map(id, first)} & {*map(id, agent.callers.values())}
        assert told(found, "tiny-0") == "up"


def test_more_than_it_takes_in_a_second_wait_for_the_next(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpufleet.on_node.watchdog.agent.TAKEN", 2)
    found = watchdog(stage("tiny-0"))
    agent = found.agent
    assert agent
    with contextlib.ExitStack() as stack:
        asking = [stack.enter_context(caller(found, b"tiny-0\n")) for _ in range(3)]
        agent.turn(0.0)
        for _ in range(2):  # taken, then answered
            agent.advance(set(agent.descriptors()), 0.0)
        assert [each.recv(100) for each in asking[:2]] == [b"up\n", b"up\n"]
        assert agent.descriptors() == []
        agent.turn(1.0)
        for _ in range(2):
            agent.advance(set(agent.descriptors()), 1.0)
        assert asking[2].recv(100) == b"up\n"


def test_a_port_that_somebody_else_has_is_said_once_and_tried_again(
    root: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The stages are watched all the same."""
    monkeypatch.setattr("gpufleet.on_node.watchdog.agent.LISTEN_AGAIN_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        told_of = {"address": "127.0.0.1", "port": port}
        found = Watchdog({"schema": 1, "listen": told_of, "stages": [stage("tiny-0")]})
        end = time.monotonic() + 0.5
        while time.monotonic() < end:
            found.step()
    assert found.stages[0].life == LIFE
    said = capfd.readouterr().err
    assert said.count(f"cannot listen for gateways at 127.0.0.1, port {port}: ") == 1
    end = time.monotonic() + 10
    while "tells gateways" not in said and time.monotonic() < end:
        found.step()
        said += capfd.readouterr().err
    assert told(found, "tiny-0") == "up"


def test_on_all_addresses_it_answers_on_both_families(root: Path) -> None:
    found = watchdog(stage("tiny-0"), address="::")
    assert told(found, "tiny-0") == "up"
    assert found.agent
    with socket.create_connection(("127.0.0.1", found.agent.place[1]), timeout=10) as connection:
        connection.sendall(b"tiny-0\n")
        assert answer(found, connection) == b"up\n"


def test_without_a_place_nobody_listens(root: Path) -> None:
    """As a configuration of before has it."""
    assert Watchdog({"schema": 1, "stages": [stage("tiny-0")]}).agent is None
    assert Watchdog({"schema": 1, "listen": None, "stages": []}).agent is None
