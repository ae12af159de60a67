"""A tree goes from process to process, as on nodes: real programs, sockets and files.

Every node is a process with its own address of 127.0.0.0/8, its own directory, and one port as all
others. What arrived is compared by reading it, never by what the programs say.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import random
import secrets
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpufleet.artifacts import distribution
from gpufleet.on_node.transfer.manifest import (
    PIECE_BYTES,
    RefusedError,
    describe_tree,
    parse_manifest,
)
from gpufleet.remote import payload

pytestmark = pytest.mark.slow

MIB = 1 << 20
LEFT_OUT = (".complete", ".accepts")


@dataclass
class Ground:
    """Nodes by name, each with a home below one folder and an address of its own."""

    folder: Path
    port: int
    token: str = field(default_factory=lambda: secrets.token_hex(32))
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def tree(self, name: str) -> Path:
        (self.folder / name).mkdir(exist_ok=True)
        return self.folder / name / "release"

    def address(self, name: str) -> str:
        return f"127.0.41.{ord(name[-1]) - 96}"

    def given(self, name: str, action: str, **more: Any) -> dict[str, Any]:
        return {
            "action": action,
            "directory": str(self.tree(name)),
            "mark": str(self.tree(name) / ".complete"),
            "manifests": str(self.folder / name / "manifests"),
            "leave_out": LEFT_OUT,
            "lock": "",
            "own": name,
            "token": self.token,
            "address": self.address(name),
            "port": self.port,
            "rate_mbit": None,
            "expected": (),
            "halves": (),
            "remove": (),
            "python": "",
            "files": None,
            "seconds": 60,
            **more,
        }

    def start(self, name: str, action: str, **more: Any) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-I", "-"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=(self.folder / f"{name}.{action}.log").open("wb"),
        )
        assert process.stdin
        process.stdin.write(
            payload.program("transfer/transfer", **self.given(name, action, **more)).encode()
        )
        process.stdin.close()
        process.stdin = None
        self.started.append(process)
        return process

    def ask(self, name: str, action: str, **more: Any) -> dict[str, Any]:
        return answer(self.start(name, action, **more))

    def ways(
        self, source: str, others: Sequence[str]
    ) -> Mapping[str, list[list[tuple[str, str, int]]]]:
        return {
            node: [[(each, self.address(each), self.port) for each in half] for half in halves]
            for node, halves in distribution.sources(source, others).items()
        }

    def copy(
        self, others: str, source: str = "a", **more: Any
    ) -> tuple[subprocess.Popen[bytes], dict[str, subprocess.Popen[bytes]]]:
        """Start a copy from a node that has described its tree to others, named by letters."""
        digest = self.ask(source, "describe")["digest"]
        expected = distribution.expected_halves(distribution.sources(source, others))
        ways = self.ways(source, others)
        serving = self.start(
            source, "serve", digest=digest, expected=expected.get(source, ()), **more
        )
        return serving, {
            node: self.start(
                node,
                "fetch",
                digest=digest,
                halves=ways[node],
                expected=expected.get(node, ()),
                **more,
            )
            for node in others
        }


def answer(process: subprocess.Popen[bytes], seconds: float = 60) -> dict[str, Any]:
    out, _ = process.communicate(timeout=seconds)
    found: dict[str, Any] = json.loads(out)
    return found


@pytest.fixture
def ground(tmp_path: Path) -> Iterator[Ground]:
    with socket.create_server(("127.0.41.1", 0)) as free:
        port = free.getsockname()[1]
    made = Ground(tmp_path, port)
    yield made
    for each in made.started:
        each.kill()
        each.communicate()


def grow(root: Path, mib: int = 20) -> None:
    """Make a tree that has everything: sizes on both sides of a piece, links, modes, odd names."""
    chance = random.Random(7)
    (root / "bin").mkdir(parents=True)
    (root / "lib/deep/er").mkdir(parents=True)
    (root / "empty").mkdir()
    (root / "bin/run").write_bytes(b"#!/bin/sh\n")
    (root / "bin/run").chmod(0o755)
    (root / "bin/python").symlink_to("/usr/bin/python3")
    (root / "lib64").symlink_to("lib")
    (root / "lib/large").write_bytes(chance.randbytes(mib * MIB + 12345))
    (root / "lib/empty").touch()
    for number in range(200):
        (root / f"lib/deep/er/{number:03}.py").write_bytes(chance.randbytes(number * 37))
    (root / "lib/näme with\nline").write_text("odd")
    (root / "lib/deep").chmod(0o750)
    (root / ".accepts").mkdir()
    (root / ".accepts/tiny.json").write_text("of this node alone")
    (root / ".complete").touch()


def seen(root: Path) -> dict[str, tuple[object, ...]]:
    """Return everything of a tree that has to be equal, by path."""
    found: dict[str, tuple[object, ...]] = {}
    for path in root.rglob("*"):
        name = str(path.relative_to(root))
        if name.partition("/")[0] in LEFT_OUT:
            continue
        status = path.lstat()
        if path.is_symlink():
            found[name] = ("link", str(path.readlink()))
        elif path.is_dir():
            found[name] = ("directory", status.st_mode)
        else:
            digest = hashlib.sha256(path.read_bytes()).hexdigest()
            found[name] = (digest, status.st_mode)
    return found


def whole(ground: Ground, name: str) -> bool:
    root = ground.tree(name)
    if not root.exists():
        return False
    return (
        (root / ".complete").is_file()
        and not (root / ".accepts").exists()
        and seen(root) == seen(ground.tree("a"))
        and not list(root.parent.glob(".gpufleet-*"))
    )


def test_a_tree_of_four_is_copied_and_no_node_sends_more_than_one_copy(ground: Ground) -> None:
    """Content, modes and links are the source's; what is its own alone stays there."""
    grow(ground.tree("a"))
    serving, copies = ground.copy("bcde")

    answers = {name: answer(each) for name, each in copies.items()}

    assert {name: each["error"] for name, each in answers.items()} == dict.fromkeys("bcde", "")
    assert [name for name in "bcde" if not whole(ground, name)] == []
    size = answers["b"]["bytes"]
    assert size > 20 * MIB
    sent = [each["sent"] for each in (answer(serving), *answers.values())]
    assert sum(sent) == 4 * size
    # A piece more is one that somebody asked for again.
    assert max(sent) <= size + PIECE_BYTES
    again = ground.start("b", "fetch", digest="", halves=[[], []])
    assert answer(again)["bytes"] == 0, "what is whole is not brought again"


def test_nodes_below_one_that_is_killed_go_on_from_those_above_it(ground: Ground) -> None:
    grow(ground.tree("a"), mib=64)
    _, copies = ground.copy("bcde", rate_mbit=200)
    # The first in the first tree: all others have it above them there.
    until(lambda: written(ground, "b") > 8 * MIB)
    copies["b"].send_signal(signal.SIGKILL)

    until(lambda: all(whole(ground, name) for name in "cde"))
    assert not ground.tree("b").exists(), "what is not whole is not in its place"


def test_a_stopped_node_is_passed_over(ground: Ground) -> None:
    """It neither answers nor refuses: only a deadline tells."""
    grow(ground.tree("a"), mib=40)
    _, copies = ground.copy("bc", rate_mbit=200)
    until(lambda: written(ground, "b") > 8 * MIB)
    copies["b"].send_signal(signal.SIGSTOP)

    until(lambda: whole(ground, "c"))


def test_what_a_killed_copy_left_is_used_and_held_to_its_hash_again(ground: Ground) -> None:
    grow(ground.tree("a"), mib=64)
    serving, copies = ground.copy("b", rate_mbit=200)
    until(lambda: written(ground, "b") > 40 * MIB)
    copies["b"].kill()
    serving.kill()
    coming = ground.folder / "b/.gpufleet-coming-release"
    # Of one piece that counted, the disk has something else now.
    with (coming / "tree/lib/large").open("r+b") as file:
        file.seek(5)
        file.write(b"broken")

    _, copies = ground.copy("b")
    found = answer(copies["b"])

    assert found["error"] == ""
    assert 24 * MIB <= found["found"] < 64 * MIB
    assert sum(found["from"].values()) + found["found"] == found["bytes"]
    assert whole(ground, "b")


def test_a_piece_that_is_not_the_manifest_s_is_not_taken(ground: Ground) -> None:
    """A node whose disk lies gives nothing; with another that has it, the copy is whole."""
    grow(ground.tree("a"))
    shutil.copytree(ground.tree("a"), ground.tree("c"), symlinks=True)
    digest = ground.ask("a", "describe")["digest"]
    assert ground.ask("c", "describe")["digest"] == digest, "the same tree has the same name"
    with (ground.tree("c") / "lib/large").open("r+b") as file:
        file.write(b"broken")
    for name in "ac":
        ground.start(name, "serve", digest=digest, expected=["b/0"])
    bad, good = [(name, ground.address(name), ground.port) for name in "ca"]

    found = ground.ask("b", "fetch", digest=digest, halves=[[bad, good], [bad, good]])

    assert found["error"] == ""
    assert any("piece 0 differs from the manifest" in each for each in found["remarks"])
    assert whole(ground, "b")


def test_a_stranger_is_not_answered(ground: Ground) -> None:
    grow(ground.tree("a"), mib=1)
    digest = ground.ask("a", "describe")["digest"]
    ground.start("a", "serve", digest=digest, expected=["b/0"])
    until(lambda: listens(ground, "a"))

    with socket.create_connection((ground.address("a"), ground.port), 5) as stranger:
        assert len(stranger.recv(100)) == 33
        stranger.sendall(b"b " + b"0" * 64 + b"\nM\n")
        stranger.settimeout(5)
        # An end, or a reset where our last line was not read.
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""


def test_strangers_take_no_place_from_a_node_that_knows_the_token(ground: Ground) -> None:
    """They come from many addresses, say nothing or drip, and come again: the copy is as quick."""
    grow(ground.tree("a"), mib=1)
    digest = ground.ask("a", "describe")["digest"]
    ground.start("a", "serve", digest=digest, expected=["b/0", "b/1"])
    until(lambda: listens(ground, "a"))
    over = threading.Event()
    strangers: list[socket.socket] = []

    def connect(number: int) -> None:
        place = (ground.address("a"), ground.port)
        source = (f"127.0.42.{number % 8 + 1}", 0)
        with contextlib.suppress(OSError):
            strangers.append(socket.create_connection(place, 5, source))

    def drip() -> None:
        while not over.wait(0.2):
            for each in strangers:
                with contextlib.suppress(OSError):
                    each.send(b"x")
            connect(len(strangers))

    for number in range(200):
        connect(number)
    dripping = threading.Thread(target=drip)
    dripping.start()
    way = ("a", ground.address("a"), ground.port)
    try:
        found = ground.ask("b", "fetch", digest=digest, halves=[[way], [way]])
    finally:
        over.set()
        dripping.join()
    assert (found["error"], found["remarks"]) == ("", [])
    assert whole(ground, "b")

    def all_ended() -> bool:
        poll = select.poll()
        for each in strangers:
            poll.register(each, select.POLLRDHUP)
        return len(poll.poll(0)) == len(strangers)

    until(all_ended)
    for each in strangers:
        each.close()


def test_a_rate_limits_what_a_node_sends(ground: Ground) -> None:
    """A twentieth of the rate takes longer by far, and at least as long as the bytes need."""
    grow(ground.tree("a"), mib=6)
    spent = []
    for number, rate in enumerate((400, 20)):
        _, copies = ground.copy("bc"[number], rate_mbit=rate)
        spent.append(answer(copies["bc"[number]])["seconds"])

    assert spent[1] / spent[0] > 2
    assert spent[1] > 6 * MIB * 8 / 20e6


HOSTILE: dict[str, Callable[[dict[str, Any]], object]] = {
    "above": lambda m: m["entries"].insert(0, ["../out", "f", 0o644, 0, ""]),
    "absolute": lambda m: m["entries"].insert(0, ["/tmp/out", "f", 0o644, 0, ""]),
    "through a link": lambda m: m["entries"].append(["zz/out", "f", 0o644, 0, ""]),
    "mark": lambda m: m["entries"].insert(0, [".complete", "f", 0o644, 0, ""]),
    "twice": lambda m: m["entries"].append(m["entries"][-1]),
    "setuid": lambda m: m["entries"][0].__setitem__(2, 0o4755),
    "device": lambda m: m["entries"][0].__setitem__(1, "c"),
    "too few": lambda m: m["pieces"].pop(),
    "negative": lambda m: m["entries"][1].__setitem__(3, -1),
    "no list": lambda m: m.__setitem__("entries", {"a": 1}),
    "endless": lambda m: m.__setitem__("piece", 1 << 60),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_manifest_is_refused(name: str, tmp_path: Path) -> None:
    grow(tmp_path / "tree", mib=1)
    (tmp_path / "tree/zz").symlink_to("/tmp")
    honest = describe_tree(str(tmp_path / "tree"), LEFT_OUT).manifest()
    assert parse_manifest(honest, sha256(honest), LEFT_OUT).bytes > MIB
    manifest = json.loads(honest)
    HOSTILE[name](manifest)
    text = json.dumps(manifest).encode()

    with pytest.raises(RefusedError):
        parse_manifest(text, sha256(text), LEFT_OUT)
    with pytest.raises(RefusedError):
        parse_manifest(honest, sha256(text), LEFT_OUT)


def test_what_another_tree_left_is_removed_and_no_link_of_it_is_followed(ground: Ground) -> None:
    grow(ground.tree("a"), mib=1)
    outside = ground.folder / "outside"
    outside.mkdir()
    ground.tree("b")
    coming = ground.folder / "b/.gpufleet-coming-release"
    coming.mkdir(mode=0o700)
    (coming / "tree").mkdir()
    (coming / "tree/lib").symlink_to(outside)
    (coming / "tree/bin").mkdir()
    (coming / "tree/bin/run").symlink_to(outside / "written")
    (coming / "tree/stale/deep").mkdir(parents=True)

    _, copies = ground.copy("b")

    assert answer(copies["b"])["error"] == ""
    assert whole(ground, "b")
    assert list(outside.iterdir()) == []


def written(ground: Ground, name: str) -> int:
    """Return the bytes of the large file that have arrived, as the file system counts them."""
    path = ground.folder / name / ".gpufleet-coming-release/tree/lib/large"
    return path.stat().st_blocks * 512 if path.exists() else 0


def listens(ground: Ground, name: str) -> bool:
    with socket.socket() as tried:
        return tried.connect_ex((ground.address(name), ground.port)) == 0


def until(true: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
