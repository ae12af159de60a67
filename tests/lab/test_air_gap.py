"""A bare node that reaches nothing but a mirror becomes a checked GPU node, by the same command.

The network is cut outside the node, in its namespace: what leaves it goes to the mirror's port, or
answers our own SSH. The tests are one story of one node, in this order.
"""

from __future__ import annotations

import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from tests.lab.bare_node import DCGM, NODE, BareNode, Triple, archives, bare_node
from tests.support.checkout import own_lab

pytestmark = pytest.mark.long

LAB_ID = own_lab("gfh")
DRIVER = "580.95.05"
PORT = 8091
# Time for a server of static files to listen: 0.2 s measured.
START_SECONDS = 20


@dataclass(frozen=True)
class AirGap:
    """The node, the bundle that was made for it, and what was said meanwhile."""

    node: BareNode
    bundle: Path
    said: str

    @property
    def url(self) -> str:
        return f"http://{self.node.state.machine}:{PORT}"

    def nft(self, text: str) -> None:
        """Change the rules in the node's network namespace."""
        inside = ["ip", "netns", "exec", self.node.state.netns(NODE), "nft", "-f", "-"]
        subprocess.run(inside, input=text, text=True, check=True, capture_output=True, timeout=20)

    def cut(self) -> None:
        rules = (
            'oifname "lo" accept',
            "tcp sport 22 accept",
            "icmp type echo-reply accept",
            f"ip daddr {self.node.state.machine} tcp dport {PORT} accept",
        )
        head = "type filter hook output priority 0; policy drop;"
        body = "\n".join((head, *rules))
        self.nft(f"table inet cut {{\nchain out {{\n{body}\n}}\n}}\n")


@pytest.fixture(scope="module")
def gap(tmp_path_factory: pytest.TempPathFactory) -> Iterator[AirGap]:
    """Bundle with the network as it is, then cut it."""
    with bare_node(LAB_ID, tmp_path_factory.mktemp("gap")) as node:
        made = declare(node)
        done = node.gpufleet("bundle", node.inventory, "-o", str(made.bundle), seconds=500)
        assert done.status == 0, done.output
        server = subprocess.Popen(
            [sys.executable, str(made.bundle / "serve.py"), f"{node.state.machine}:{PORT}"],
            stderr=(node.project / "serve.log").open("wb"),
        )
        try:
            answers(made.url)
            node.sh(
                "rm -f /etc/apt/sources.list /etc/apt/sources.list.d/* /etc/apt/apt.conf.d/90lab\n"
                f"cat > /etc/apt/sources.list.d/mirror.sources <<'END'\n{sources(made)}END"
            )
            made.cut()
            yield AirGap(node, made.bundle, done.output)
            made.nft("delete table inet cut\n")
        finally:
            server.kill()
            server.wait()


def declare(node: BareNode) -> AirGap:
    """Write the node's variables: the vendor's address, and the mirror that stands in for it."""
    gap = AirGap(node, node.project / "bundle", "")
    written = {
        "cuda": {"repository": node.repository},
        "gpu_lock": {"driver": DRIVER, "dcgm": DCGM},
        "gpu": {"reboot": "when_needed", "reboot_seconds": 120},
        "mirror": {"url": gap.url, "archives": archives(node)},
        "offline": True,
    }
    (node.project / "group_vars/bare.yml").write_text(yaml.safe_dump(written))
    return gap


def sources(gap: AirGap) -> str:
    """The file that the bundle has for the node's own apt; the kernels' key is the node's."""
    (written,) = gap.bundle.glob("apt/*.sources")
    text = written.read_text().replace("@MIRROR@", gap.url)
    key = "/usr/share/keyrings/gpufleet-lab.gpg"
    return text.replace(str(gap.node.project / "kernels.gpg"), key)


def answers(url: str) -> None:
    deadline = time.monotonic() + START_SECONDS
    while True:
        try:
            with urllib.request.urlopen(f"{url}/MANIFEST", timeout=5):
                return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def test_the_node_reaches_the_mirror_and_nothing_else(gap: AirGap):
    """Otherwise what follows would prove nothing."""
    ask = "curl -s -o /dev/null -w '%{http_code}' --noproxy '*' --max-time 4"

    assert gap.node.sh(f"{ask} {gap.url}/MANIFEST; true") == "200"
    assert gap.node.sh(f"{ask} {gap.node.state.mirror_url}/vendor/InRelease; true") == "000"
    assert gap.node.sh(f"{ask} {gap.node.state.proxy_url}; true") == "000"


def test_one_command_makes_it_a_checked_gpu_node(gap: AirGap):
    run = gap.node.deploy()

    assert run.status == 0, run.output
    assert gap.node.triple() == Triple(DRIVER, DRIVER, DRIVER)
    assert gap.node.broken_packages() == ""
    assert gap.node.is_marked() == ""


def test_a_second_run_changes_nothing(gap: AirGap):
    before = gap.node.written()

    run = gap.node.deploy("--json")

    assert run.status == 0, run.output
    assert run.changed == {}
    assert gap.node.written() == before


def test_what_a_node_asked_for_was_there(gap: AirGap):
    """No index, package or key was missing from the bundle."""
    asked = (gap.node.project / "serve.log").read_text().splitlines()

    assert len(asked) > 20
    assert [line for line in asked if '" 404 ' in line] == []


def test_an_address_outside_is_refused_before_the_node_is_asked(gap: AirGap):
    """Named with its file and line; the node's journal knows of no visit."""
    file = gap.node.project / "group_vars/bare.yml"
    kept = file.read_text()
    file.write_text(
        kept + "firewall: null\nvllm: {version: 0.32.0, lock: locks/vllm-0.32.0.txt, "
        "listen: 127.0.0.1, environment: {PIP_INDEX_URL: 'https://away.example'}}\n"
    )
    visits = "journalctl -u 'ssh*' --no-pager | grep -c Accepted"
    before = gap.node.sh(visits)
    try:
        run = gap.node.deploy()
    finally:
        file.write_text(kept)

    assert run.status != 0
    assert "bare.yml:" in run.output
    assert "https://away.example" in run.output
    # Our own look is one more.
    assert int(gap.node.sh(visits)) - int(before) <= 1
