"""A node is one deploy's at a time, and free when its connection has ended: real processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from gpufleet.on_node.common import deploy_mark
from gpufleet.remote import payload

CHANGE = "var/lib/gpufleet/change"
ANN = {"id": "run-ann", "owner": "ann@laptop", "origin": "/srv/fleet", "process": 4711}
BOB = {"id": "run-bob", "owner": "bob@desk", "origin": "/home/bob", "process": 99}
UPGRADE = {"id": "u1", "owner": "cat@desk", "origin": "/", "what": "vLLM 0.33.0"}

# What sshd's process does, as far as it counts here: it is called so, runs what comes over its
# connection, and ends with it.
CONNECTION = """\
import subprocess, sys
open("/proc/self/comm", "w").write(sys.argv[1])
text = sys.stdin.buffer.read(int(sys.stdin.buffer.readline()))
sys.stdout.buffer.write(subprocess.run([sys.executable, "-I", "-"], input=text,
                                       stdout=subprocess.PIPE).stdout)
sys.stdout.flush()
sys.stdin.read()
"""

Connect = Callable[..., tuple[subprocess.Popen[bytes], dict[str, Any]]]


def text(program: str, **parameters: Any) -> bytes:
    return payload.program(program, **parameters).encode()


def asked(root: Path, who: dict[str, Any], **more: Any) -> bytes:
    fields = {"what": "deploys/vllm.py", "upgrade": None, "pid": None, "look": False, **who, **more}
    return text("change/hold", sysroot=str(root), **fields)


def run(program: bytes) -> dict[str, Any]:
    """Run a program in a process of its own, below no sshd."""
    done = subprocess.run(
        [sys.executable, "-I", "-"], input=program, capture_output=True, check=True, timeout=60
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


@pytest.fixture
def node(tmp_path: Path) -> Path:
    (tmp_path / "var/lib/gpufleet").mkdir(parents=True)
    return tmp_path


@pytest.fixture
def connect() -> Iterator[Connect]:
    """`connect(program)`: what serves a connection, and the program's answer over it."""
    running: list[subprocess.Popen[bytes]] = []

    def begin(program: bytes, name: str = "sshd-session") -> Any:
        process = subprocess.Popen(
            [sys.executable, "-c", CONNECTION, name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        running.append(process)
        assert process.stdin
        assert process.stdout
        process.stdin.write(b"%d\n%b" % (len(program), program))
        process.stdin.flush()
        return process, json.loads(process.stdout.readline())

    yield begin
    for each in running:
        with each:
            each.kill()


def written(node: Path) -> dict[str, Any] | None:
    path = node / CHANGE / "deploy.json"
    return json.loads(path.read_text()) if path.exists() else None


LOCKS = {"none": None, "own": {"id": "u1"}, "other": {"id": "u2"}, "nameless": {}}
DEPLOYS = {"none": None, "own": {"id": "r1"}, "other": {"id": "r2"}}


@pytest.mark.parametrize(("lock", "living"), [*product(LOCKS, DEPLOYS)])
def test_who_may_have_a_node_in_every_state_of_it(lock: str, living: str) -> None:
    there, deploy = LOCKS[lock], DEPLOYS[living]
    other_deploy = "deploy" if living == "other" else ""
    any_deploy = "deploy" if living != "none" else ""

    plain = deploy_mark.deploy_obstacle("r1", None, there, deploy)
    assert plain == ("lock" if lock != "none" else other_deploy)

    inner = deploy_mark.deploy_obstacle("r1", "u1", there, deploy)
    assert inner == ("lock" if lock in {"other", "nameless"} else other_deploy)

    for steal in (False, True):
        upgrade = deploy_mark.upgrade_obstacle("u1", there, deploy, steal=steal)
        if lock == "own":
            assert upgrade == ""
        elif lock in {"other", "nameless"} and not steal:
            assert upgrade == "lock"
        else:
            assert upgrade == any_deploy, "a deploy that works on a node keeps it"


@pytest.mark.parametrize("name", ["sshd", "sshd-session", "dropbear"])
def test_a_second_deploy_is_told_who_has_the_node(node: Path, connect: Connect, name: str) -> None:
    first, said = connect(asked(node, ANN), name)
    assert (said["held"], said["problem"], said["why"]) == (True, None, None)

    _, refused = connect(asked(node, BOB))

    assert not refused["held"]
    other = refused["deploy"]
    assert {key: other[key] for key in ("owner", "from", "what", "process", "pid")} == {
        "owner": "ann@laptop",
        "from": "/srv/fleet",
        "what": "deploys/vllm.py",
        "process": 4711,
        "pid": first.pid,
    }
    assert abs(other["since"] - time.time()) < 60
    record = written(node)
    assert record
    assert record["id"] == "run-ann"


def test_the_same_run_has_it_again_and_over_another_connection(
    node: Path, connect: Connect
) -> None:
    """As after a reboot; since when it has it stays."""
    _, first = connect(asked(node, ANN))
    before = written(node)
    again, second = connect(asked(node, ANN))
    after = written(node)

    assert first["held"]
    assert second["held"]
    assert before
    assert after
    assert after["pid"] == again.pid != before["pid"]
    assert after["since"] == before["since"]


def test_a_killed_deploy_leaves_nothing_that_a_person_has_to_remove(
    node: Path, connect: Connect
) -> None:
    """Its connection's process is not even waited for by its parent here: a zombie has no node."""
    first, _ = connect(asked(node, ANN))
    first.kill()

    _, said = connect(asked(node, BOB))

    assert said["held"]
    record = written(node)
    assert record
    assert record["owner"] == "bob@desk"


def test_a_connection_that_ends_gives_the_node_back(node: Path, connect: Connect) -> None:
    first, _ = connect(asked(node, ANN))
    assert first.stdin
    first.stdin.close()

    assert connect(asked(node, BOB))[1]["held"]


def test_a_deploy_on_this_very_machine_has_it_as_long_as_it_runs(node: Path) -> None:
    with subprocess.Popen(["sleep", "600"]) as deploy:
        assert run(asked(node, ANN, pid=deploy.pid))["held"]
        assert run(asked(node, BOB, pid=os.getpid()))["deploy"]["owner"] == "ann@laptop"
        deploy.kill()
    assert run(asked(node, BOB, pid=os.getpid()))["held"]


def test_of_many_that_come_at_once_one_has_the_node(node: Path) -> None:
    programs = [asked(node, {**BOB, "id": f"run-{n}"}, pid=os.getpid()) for n in range(6)]
    with ThreadPoolExecutor(len(programs)) as pool:
        answers = [*pool.map(run, programs)]

    assert [each["problem"] for each in answers] == [None] * len(programs)
    assert sum(each["held"] for each in answers) == 1
    record = written(node)
    assert record
    assert {each["deploy"]["id"] for each in answers if not each["held"]} == {record["id"]}


@pytest.mark.parametrize(
    "changed", [{"start": 1}, {"boot": "another"}, {"pid": 1 << 22}, {"pid": "x"}, {"pid": None}]
)
def test_a_record_of_no_process_that_is_there_is_none(node: Path, changed: dict[str, Any]) -> None:
    """A number that is used again, an earlier boot, a record that no deploy wrote."""
    assert run(asked(node, ANN, pid=os.getpid()))["held"]
    record = written(node)
    assert record
    (node / CHANGE / "deploy.json").write_text(json.dumps({**record, **changed}))

    assert run(asked(node, BOB, pid=os.getpid()))["held"]


def test_a_file_that_is_no_record_is_none(node: Path) -> None:
    (node / CHANGE).mkdir()
    (node / CHANGE / "deploy.json").write_text("[[[")

    assert run(asked(node, ANN, pid=os.getpid()))["held"]


def test_where_no_sshd_serves_the_connection_it_says_so_and_holds_nothing(node: Path) -> None:
    said = run(asked(node, ANN))

    assert not said["held"]
    assert said["why"] == "the process that serves this connection is not sshd"
    assert written(node) is None


def test_a_look_says_who_has_it_and_writes_nothing(node: Path) -> None:
    assert not run(asked(node, ANN, pid=os.getpid(), look=True))["held"]
    assert not (node / CHANGE).exists()

    assert run(asked(node, ANN, pid=os.getpid()))["held"]
    assert run(asked(node, BOB, look=True))["deploy"]["id"] == "run-ann"


def lock(node: Path, **more: Any) -> dict[str, Any]:
    return run(text("change/change", do="lock", sysroot=str(node), **UPGRADE, **more))


@pytest.mark.parametrize("steal", [False, True])
def test_an_upgrade_takes_no_node_from_a_living_deploy(node: Path, *, steal: bool) -> None:
    with subprocess.Popen(["sleep", "600"]) as deploy:
        assert run(asked(node, ANN, pid=deploy.pid))["held"]
        refused = lock(node, steal=steal)
        deploy.kill()
    assert (refused["ours"], refused["lock"]) == (False, None)
    assert refused["deploy"]["owner"] == "ann@laptop"

    assert lock(node)["ours"]


def test_what_an_upgrade_has_its_own_deploys_have_and_no_other(node: Path) -> None:
    assert lock(node)["ours"]

    refused = run(asked(node, ANN, pid=os.getpid()))
    assert (refused["held"], refused["lock"]["owner"]) == (False, "cat@desk")
    # Two at once, on nodes of two groups or on one: they are one owner's.
    for who in (ANN, BOB):
        assert run(asked(node, who, pid=os.getpid(), upgrade="u1"))["held"]
    assert written(node) is None


def test_a_person_drains_no_node_that_is_being_deployed(node: Path) -> None:
    def drain(**more: Any) -> dict[str, Any]:
        about = {"replicas": ["tiny-0"], "by": "bob", "why": "a fan", "upgrade": None}
        return run(text("change/change", do="drain", sysroot=str(node), **{**about, **more}))

    with subprocess.Popen(["sleep", "600"]) as deploy:
        assert run(asked(node, ANN, pid=deploy.pid))["held"]
        assert drain()["problem"] == "the node is being deployed by ann@laptop (deploys/vllm.py)"
        assert not (node / CHANGE / "drained").exists()
        deploy.kill()
    assert drain()["changed"] == ["tiny-0"]


def test_a_connections_other_end_is_asked_every_few_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """
    The socket is another process', and this one's only to look at.

    A descriptor that was closed since the listing does not hide the socket behind it.
    """
    listed = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: ["99999", *listed(path)])
    with socket.create_server(("127.0.0.1", 0)) as server:
        own = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    with own, other:
        sleep = subprocess.Popen(["sleep", "600"], pass_fds=[own.fileno()])
        with sleep:
            deploy_mark.watch_connection(sleep.pid)
            sleep.kill()
        options = [
            (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
            (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 15),
            (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5),
            (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
            (socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, 30000),
        ]
        assert [own.getsockopt(*each[:2]) for each in options] == [each[2] for each in options]
        assert other.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 0
