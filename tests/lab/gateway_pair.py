"""Two gateways that share an address, two servers behind them, and what clients see of them.

The servers are programs in vLLM's place (`stand_in.py`), under units as a deploy writes them. What
is said here of the gateways is read on their nodes: which of them has the address, and since when.
"""

from __future__ import annotations

import http.client
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

from lab import node_power, run_command
from lab.nodes import Lab
from lab.state import LabState, write
from tests.lab.conftest import Fleet, Run
from tests.support.checkout import ROOT

GPU_NODES = ("gpu-01", "gpu-02")
GATEWAYS = ("mon-03", "mon-04")
PROFILES = {**dict.fromkeys(GPU_NODES, "t4x1"), **dict.fromkeys(GATEWAYS, "none")}
PORT = 8443
SHARED = 200
"""The last byte of the address: no node of the lab has it."""
PASSWORD = "vrrp-pw1"
# A request that is answered at all is answered in milliseconds.
PATIENCE = 1.0

INVENTORY = '''\
"""The lab's nodes, and those without GPUs as gateways in front of them."""

from gpufleet import inventory
from lab.inventory import MONITORING, groups

_groups = groups()
_groups["gateway"] = _groups.pop(MONITORING)

globals().update(
    inventory.load(
        __file__, groups=_groups, children={"gpu": [each for each in _groups if each != "gateway"]}
    )
)
'''

UNIT = """\
[Service]
ExecStart=/usr/bin/env \\
    /opt/vllm/releases/0.32.0-x/bin/vllm serve \\
    /srv/tiny \\
    --served-model-name tiny \\
    --host 0.0.0.0 \\
    --port 8000

[X-Gpufleet]
Model=tiny
Replica={replica}
Rank=0
Port=8000
Gpus=GPU-{replica}
"""


@dataclass
class Pair(Fleet):
    """The lab and its project."""

    @property
    def inventory(self) -> str:
        return str(self.project / "inventories/pair.py")

    @property
    def shared(self) -> str:
        """The address that one of the gateways has."""
        net = LabState.load(self.lab.facts.id).subnet
        return str(net[SHARED])

    def lay_out(self, **virtual: Any) -> None:
        """Write the project."""
        for folder in ("inventories", "group_vars"):
            (self.project / folder).mkdir(exist_ok=True)
        write(self.project / "inventories/pair.py", INVENTORY)
        write(self.project / "vrrp", f"{PASSWORD}\n", 0o600)
        address = {
            "address": f"{self.shared}/24",
            "interface": "eth0",
            "router_id": 51,
            "password_file": str(self.project / "vrrp"),
            **virtual,
        }
        gateway = {
            "port": PORT,
            "allow_plain_http": True,
            "allow_unauthenticated": True,
            "virtual_address": address,
        }
        self._declare("gateway", {"gpu_node": False, "gateway": gateway})
        model = {"model": "/srv/tiny", "tensor_parallel": 1, "replicas": 2, "drain_seconds": 5}
        vllm = {
            "version": "0.32.0",
            "lock": str(ROOT / "locks/vllm-0.32.0.txt"),
            "allow_unauthenticated": True,
        }
        self._declare("gpu", {"vllm": vllm, "serving": {"tiny": model}})

    def _declare(self, group: str, values: dict[str, Any]) -> None:
        path = self.project / "group_vars" / f"{group}.yml"
        path.write_text(yaml.safe_dump(values, sort_keys=False))

    def serve(self) -> None:
        """Start the servers."""
        program = Path(__file__).with_name("stand_in.py").read_text()
        place = "/opt/vllm/releases/0.32.0-x/bin"
        for replica, node in enumerate(GPU_NODES):
            self.ssh(
                node,
                f"mkdir -p {place} && cat > {place}/vllm && chmod 755 {place}/vllm",
                stdin=program,
            )
            unit = f"vllm-tiny-{replica}.service"
            self.ssh(
                node,
                f"cat > /etc/systemd/system/{unit} && systemctl daemon-reload && "
                f"systemctl restart {unit}",
                stdin=UNIT.format(replica=replica),
            )

    def deploy(self, *arguments: str) -> Run:
        return self.pyinfra(*arguments, deploy="deploys/gateway.py", seconds=600)

    def holders(self) -> list[str]:
        """
        Return the gateways that have the address now, those that are off left out.

        Read from this machine, all of them within milliseconds: a node that is asked one after
        the other may be asked before and after a move.
        """
        state = self.lab.facts
        found = []
        for node in GATEWAYS:
            said = run_command.run("ip", "-n", state.netns(node), "-4", "-o", "addr", check=False)
            if f" {self.shared}/" in said and node_power.is_on(state, node):
                found.append(node)
        return found

    def holder(self) -> str:
        """Return the one that has it."""
        (found,) = self.holders()
        return found

    def other(self, than: str) -> str:
        return next(each for each in GATEWAYS if each != than)

    @contextmanager
    def asking(self) -> Iterator[Asked]:
        """Have a client ask the shared address while this lasts, and see who has it."""
        found = Asked(self.shared, self.holders)
        threads = [
            threading.Thread(target=each, daemon=True) for each in (found.ask_on, found.look_on)
        ]
        for each in threads:
            each.start()
        try:
            yield found
        finally:
            found.over.set()
            for each in threads:
                each.join(10)

    def stream(self, pieces: int) -> Stream:
        """Begin a stream through the shared address."""
        return Stream(self.shared, pieces)


@dataclass
class Asked:
    """What became of requests that were begun one after another, and who had the address."""

    address: str
    holders: Callable[[], list[str]]
    answers: list[tuple[float, str]] = field(default_factory=list)
    """When each ended, and how: `ok`, or what was wrong."""
    had: list[tuple[float, list[str]]] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)

    def ask_on(self) -> None:
        while not self.over.wait(0.1):
            how = ask(self.address)
            self.answers.append((time.monotonic(), how))

    def look_on(self) -> None:
        while not self.over.wait(0.1):
            self.had.append((time.monotonic(), self.holders()))

    def gap(self, since: float) -> float:
        """Return the longest time since then in which nothing was answered, in seconds."""
        well = [since, *(at for at, how in self.answers if how == "ok" and at >= since)]
        return max((b - a for a, b in pairwise(well)), default=float("inf"))

    def failed(self, since: float = 0) -> list[str]:
        return [how for at, how in self.answers if how != "ok" and at >= since]

    @property
    def both(self) -> float:
        """The seconds for which both were seen to have the address, at most."""
        return sum(b - a for (a, who), (b, _) in pairwise(self.had) if len(who) > 1)


def ask(address: str) -> str:
    """Ask once; return `ok`, or what was wrong."""
    there = http.client.HTTPConnection(address, PORT, timeout=PATIENCE)
    try:
        there.request("POST", "/v1/completions", json.dumps({"model": "tiny", "prompt": "x"}))
        answer = there.getresponse()
        answer.read()
        return "ok" if answer.status == 200 else str(answer.status)
    except (OSError, http.client.HTTPException) as error:
        return type(error).__name__
    finally:
        there.close()


class Stream:
    """A stream that is read as it comes."""

    def __init__(self, address: str, pieces: int) -> None:
        there = http.client.HTTPConnection(address, PORT, timeout=20)
        body = {"model": "tiny", "prompt": "x", "stream": True, "max_tokens": pieces}
        there.request("POST", "/v1/completions", json.dumps(body))
        self.answer = there.getresponse()
        self.read = b""
        self.ended: float | None = None
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        with suppress(OSError, http.client.HTTPException):
            while piece := self.answer.read1(65536):
                self.read += piece
        self.ended = time.monotonic()

    def whole(self, seconds: float) -> bool:
        """Wait for its end; return whether all of it came."""
        self.thread.join(seconds)
        return b"[DONE]" in self.read


def until(met: Callable[[], object], what: str, seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not met():
        assert time.monotonic() < end, f"after {seconds:g} s not: {what}"
        time.sleep(0.1)


@contextmanager
def pair(lab_id: str, project: Path) -> Iterator[Pair]:
    """
    Give the lab with servers that answer; nothing is deployed on the gateways.

    It is gone afterwards; GPUFLEET_KEEP_LAB keeps it.
    """
    lab = Lab.open(lab_id, print)
    keep = bool(os.environ.get("GPUFLEET_KEEP_LAB"))
    if not keep:
        lab.purge()  # what a killed run left
    lab.up(PROFILES)
    found = Pair(Lab.open(lab_id, print), project)
    found.lay_out()
    found.serve()
    yield found
    if not keep:
        lab.purge()
