"""A gateway and a node's watchdog: who is frozen gets no request, whatever /health says of it.

The real HAProxy, the real watchdog (in a thread, as its own tests have it), and servers whose
engines stop while they go on to answer.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from gpufleet.engines import vllm
from gpufleet.network import haproxy
from gpufleet.on_node.common import linux_facts
from gpufleet.on_node.watchdog import stage_watch
from gpufleet.on_node.watchdog.watchdog import Watchdog
from tests.unit.network.gateway.running import Running, Vllm, backend, free_ports, running, until
from tests.unit.on_node.watchdog.test_loop import Machine

FIRST, SECOND = "tiny/gpu-01.tiny-0", "tiny/gpu-02.tiny-1"
SECONDS = 2.0
"""Until a server counts as stalled."""


class Node:
    """A node with the units of two servers, and its watchdog."""

    def __init__(self, root: Path, servers: tuple[Vllm, Vllm]) -> None:
        self.servers = servers
        (self.port,) = free_ports(1)
        self.asked: list[str] = []
        """Stages that gateways asked about."""
        self.machine = Machine(root)
        link = root / "run/systemd/units/invocation:vllm-tiny-1.service"
        link.symlink_to("a1")
        self._over = threading.Event()
        self._thread = threading.Thread(target=lambda: None)

    def watch(self) -> None:
        """Start the watchdog."""
        watchdog = Watchdog(
            {
                "schema": 1,
                "listen": {"address": "127.0.0.1", "port": self.port},
                "stages": [self._told(number) for number in (0, 1)],
            }
        )
        word = watchdog.word
        assert watchdog.agent
        watchdog.agent._word = lambda name: (self.asked.append(name), word(name))[1]
        over = self._over = threading.Event()

        def loop() -> None:
            while not over.is_set():
                watchdog.step()
            assert watchdog.agent
            watchdog.agent.close()

        self._thread = threading.Thread(target=loop, daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the watchdog, as a `kill -9` does."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join(60)

    def asks_again(self, stage: str = "tiny-0") -> Callable[[], bool]:
        """Return whether a gateway has asked twice more, so that it has acted on an answer."""
        wanted = self.asked.count(stage) + 2
        return lambda: self.asked.count(stage) >= wanted

    def _told(self, number: int) -> dict[str, Any]:
        return {
            "stage": f"tiny-{number}",
            "unit": f"vllm-tiny-{number}.service",
            "mode": "warn",
            "seconds": SECONDS,
            "idle_seconds": 0,
            "servers": [f"http://127.0.0.1:{self.servers[number].port}"],
            "served_name": "tiny",
            "key_file": None,
            "group": False,
            "rank": 0,
            "pins": True,
            "progress": [asdict(vllm.ENGINE.progress)],
            "py_spy": [],
        }


@pytest.fixture
def servers() -> Iterator[tuple[Vllm, Vllm]]:
    found = Vllm(), Vllm()
    yield found
    for each in found:
        each.stop()


@pytest.fixture
def node(
    tmp_path: Path, servers: tuple[Vllm, Vllm], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Node]:
    root = tmp_path / "node"
    root.mkdir()
    monkeypatch.setattr(linux_facts, "ROOT", str(root))
    monkeypatch.setattr("gpufleet.on_node.watchdog.watchdog.TURN_SECONDS", 0.05)
    monkeypatch.setattr(stage_watch, "CHECK_AGAIN_SECONDS", 0.1)
    monkeypatch.setattr(haproxy, "AGENT_MILLISECONDS", 200)
    found = Node(root, servers)
    yield found
    found.stop()
    found.machine.process.kill()
    found.machine.process.wait()


@contextlib.contextmanager
def fronted(folder: Path, node: Node, *, mute: int = 0) -> Iterator[Running]:
    """Run a gateway that asks the node's watchdog, of the second server who listens at `mute`."""
    home = folder / "gateway"
    home.mkdir()
    wanted = backend("tiny", *node.servers, watchdog_port=node.port)
    if mute:
        first, second = wanted.targets
        wanted = replace(wanted, targets=(first, replace(second, watchdog_port=mute)))
    with running(home, wanted) as gateway:
        yield gateway


def answering(gateway: Running) -> set[int]:
    """Return the ports of the servers that answer the next requests."""
    return {gateway.ask()[1]["port"] for _ in range(6)}


def ports(*servers: Vllm) -> set[int]:
    return {each.port for each in servers}


def test_a_frozen_server_gets_no_request_and_comes_back_with_its_progress(
    tmp_path: Path, node: Node
) -> None:
    """And one whose watchdog hangs, so that it takes the question and never answers, stays up."""
    first, second = node.servers
    node.watch()
    with (
        socket.create_server(("127.0.0.1", 0)) as mute,
        fronted(tmp_path, node, mute=mute.getsockname()[1]) as gateway,
    ):
        until(node.asks_again(), "the watchdog is asked")
        assert answering(gateway) == ports(first, second)

        first.frozen = True
        until(lambda: gateway.status(FIRST).startswith("DOWN"), "the frozen server is out")

        with urllib.request.urlopen(f"http://127.0.0.1:{first.port}/health", timeout=20) as health:
            assert health.status == 200
        until(lambda: "stalled" in gateway.statistics(FIRST)["last_agt"], "the watchdog said why")
        assert answering(gateway) == ports(second)

        first.frozen = False
        until(lambda: gateway.status(FIRST).startswith("UP"), "it moves, and is back")
        assert answering(gateway) == ports(first, second)
        until(lambda: gateway.statistics(SECOND)["agent_status"] == "L7TOUT", "nobody answered")
        assert gateway.status(SECOND).startswith("UP")


def test_what_the_watchdog_says_lifts_no_drain(tmp_path: Path, node: Node) -> None:
    """Neither while it says up, nor when a drained server was stalled and moves again."""
    first, second = node.servers
    node.watch()
    with fronted(tmp_path, node) as gateway:
        gateway.state("drain", FIRST)
        gateway.told("set server tiny/gpu-02.tiny-1 state maint")
        until(node.asks_again(), "it is said to be up")
        assert (gateway.status(FIRST), gateway.status(SECOND)) == ("DRAIN (agent)", "MAINT")
        gateway.told("set server tiny/gpu-02.tiny-1 state ready")
        until(lambda: gateway.status(SECOND).startswith("UP"), "it serves")

        first.frozen = True
        until(lambda: gateway.status(FIRST).startswith("DOWN"), "the drained server is stalled")
        gateway.reload()
        until(node.asks_again(), "the reloaded gateway asks")
        assert gateway.status(FIRST).startswith("DOWN")
        first.frozen = False
        until(lambda: gateway.status(FIRST).startswith("DRAIN"), "it moves, and is still drained")
        until(node.asks_again(), "it is said to be up")
        assert gateway.status(FIRST).startswith("DRAIN")
        assert answering(gateway) == ports(second)

        assert gateway.state("ready", FIRST).drained == ()
        until(lambda: answering(gateway) == ports(first, second), "it serves again")


def test_a_watchdog_that_is_not_there_changes_nothing(tmp_path: Path, node: Node) -> None:
    """Not known is neither down nor up; what is watched no more is not held to what was said."""
    first, second = node.servers
    with fronted(tmp_path, node) as gateway:
        until(lambda: gateway.statistics(FIRST)["agent_status"] == "L4CON", "nobody listens")
        assert answering(gateway) == ports(first, second)

        node.watch()
        until(node.asks_again(), "the watchdog is asked")
        first.frozen = True
        until(lambda: gateway.status(FIRST).startswith("DOWN"), "the frozen server is out")
        node.stop()
        until(lambda: gateway.statistics(FIRST)["agent_status"] == "L4CON", "it is gone")
        assert gateway.status(FIRST).startswith("DOWN")

        # One that was started again has seen nothing yet, and does not acquit.
        node.watch()
        until(node.asks_again(), "it is asked again")
        assert gateway.status(FIRST).startswith("DOWN")
        node.stop()

        # A deploy with `mode: off` has the gateway not ask.
        gateway.configure([backend("tiny", first, second)])
        gateway.reload()
        until(lambda: gateway.status(FIRST).startswith("UP"), "its own check alone counts")
