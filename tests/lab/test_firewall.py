"""The firewall on real nodes, looked at with plain sockets: who gets in, who does not, and that
nobody locks himself out.

gpu-01 and gpu-02 hold a replica together, gpu-03 is a stranger. No vLLM: programs of its user
listen where it would.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
import yaml

from gpufleet.network.firewall import RULES, SERVICE
from gpufleet.remote import payload
from lab.nodes import Lab
from tests.lab.conftest import ROOT, Fleet, Run
from tests.support.checkout import own_lab

LAB_ID = own_lab("gfw")
PEERS = ("gpu-01", "gpu-02")
STRANGER = "gpu-03"
# The replica's network is eth1, eth2 another that all have; by eth0 this machine reaches each.
CABLES = {
    name: {"eth1": f"10.61.0.1{name[-1]}/24", "eth2": f"10.62.0.1{name[-1]}/24"}
    for name in (*PEERS, STRANGER)
}

# What listens on gpu-01, as which user: the rank's own port, one of its incarnations', NIXL's, one
# that vLLM chose itself; its endpoint; an exporter, a service of others, and one of others above.
LISTENERS = {
    29500: "vllm",
    29509: "vllm",
    5600: "vllm",
    41000: "vllm",
    8000: "vllm",
    9100: "root",
    2049: "root",
    41001: "root",
}
INSIDE = {29500, 29509, 5600, 41000}

LISTEN = """
import signal, socket, sys
kept = []
for port in map(int, sys.argv[1:]):
    kept.append(socket.create_server(("", port), backlog=8))
    kept.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
    kept[-1].bind(("", port))
sys.stdout.write("ready\\n")
while True:
    for each in kept[1::2]:
        each.setblocking(False)
        try:
            said, whom = each.recvfrom(64)
            each.sendto(said, whom)
        except BlockingIOError:
            pass
    signal.setitimer(signal.ITIMER_REAL, 0)
    __import__("time").sleep(0.05)
"""
REACH = """
import json, socket, sys
host, found = sys.argv[1], {"tcp": [], "udp": [], "refused": []}
asked = []
for port in map(int, sys.argv[2:]):
    tcp, udp = socket.socket(), socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    tcp.setblocking(False)
    tcp.connect_ex((host, port))
    udp.settimeout(0.2)
    udp.sendto(b"hello", (host, port))
    asked.append((port, tcp, udp))
__import__("time").sleep(1.5)
for port, tcp, udp in asked:
    error = tcp.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    try:
        tcp.getpeername()
        found["tcp"].append(port)
    except OSError:
        if error:
            found["refused"].append(port)
    try:
        udp.recv(64)
        found["udp"].append(port)
    except OSError:
        pass
print(json.dumps(found))
"""


class Walls(Fleet):
    """The lab with a project whose group_vars hold nothing but what a firewall needs."""

    converged: tuple[Any, ...] = ()
    listens = False

    def wants(self, firewall: Mapping[str, Any] | None) -> None:
        data: dict[str, Any] = {
            "vllm": {
                "version": "0.32.0",
                "lock": "locks/vllm-0.32.0.txt",
                "allow_unauthenticated": True,
            },
            "serving": {"tiny": {"model": "/srv/tiny"}},
        }
        if firewall is not None:
            data["firewall"] = dict(firewall)
        (self.project / "group_vars/lab.yml").write_text(yaml.safe_dump(data))

    def deploy(self, *arguments: str, stages: str = "planned", **variables: str) -> Run:
        """Deploy the firewall alone."""
        done = subprocess.run(
            [
                *(sys.executable, "-m", "pyinfra", *arguments),
                *(self.inventory, "tests/lab/firewall_alone.py"),
            ],
            cwd=ROOT,
            env={**self.env(), "FIREWALL_STAGES": stages, **variables},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        return Run(done.returncode, done.stdout, done.stderr)

    def converge(self, firewall: Mapping[str, Any] | None, stages: str = "planned") -> Run:
        """Deploy settings."""
        self.wants(firewall)
        self.converged = ()
        run = self.deploy("-y", stages=stages)
        assert run.status == 0, run.output
        self.converged = (firewall, stages)
        return run

    def has(self, firewall: Mapping[str, Any]) -> None:
        """Deploy settings, unless these were the last."""
        self.wants(firewall)
        if self.converged != (firewall, "planned"):
            self.converge(firewall)
        if not self.listens:
            self.listen()
            self.listens = True

    def rests(self) -> None:
        """See that one more deploy changes nothing."""
        again = self.deploy("-y", "--json")
        assert again.status == 0, again.output
        assert again.changed == {}

    def verified(self) -> Run:
        return self.deploy("-y", FIREWALL_VERIFY="1")

    def listen(self) -> None:
        """Have programs of the users listen on gpu-01, and a table of others be there."""
        self.ssh("gpu-01", "nft add table inet others; nft add chain inet others kept")
        for user in sorted(set(LISTENERS.values())):
            ports = " ".join(str(port) for port, whose in LISTENERS.items() if whose == user)
            self.ssh(
                "gpu-01",
                f"cat > /tmp/listen.py && systemctl stop listen-{user} 2>/dev/null; systemctl "
                f"reset-failed listen-{user} 2>/dev/null; systemd-run -q --unit=listen-{user} "
                f"--uid={user} python3 /tmp/listen.py {ports}",
                stdin=LISTEN,
            )
        wait = "until [ $(ss -Hltn | grep -c :41001) = 1 ]; do sleep 0.1; done"
        self.ssh("gpu-01", wait, seconds=20)

    def reached(self, node: str, interface: str = "eth1") -> dict[str, set[int]]:
        """Return the ports of gpu-01 that a node reaches, by TCP and UDP, and those that refuse."""
        ports = " ".join(map(str, LISTENERS))
        address = CABLES["gpu-01"][interface].partition("/")[0]
        said = self.ssh(node, f"python3 - {address} {ports}", stdin=REACH)
        return {kind: set(ports) for kind, ports in json.loads(said).items()}

    def enters(self, port: int) -> bool:
        """Say whether this machine, which is no node, gets into gpu-01."""
        try:
            socket.create_connection((self.address("gpu-01"), port), timeout=2).close()
        except OSError:
            return False
        return True

    def table(self, node: str) -> str:
        return self.ssh(node, "nft -s list table inet gpufleet 2>&1 || :")

    def asked(self, node: str, action: str, wanted: str, seconds: int = 0) -> dict[str, Any]:
        """Run the node's program over plain ssh."""
        program = payload.program(
            "network/firewall",
            action=action,
            wanted=wanted,
            seconds=seconds,
            rules=RULES,
            service=SERVICE,
        )
        found: dict[str, Any] = json.loads(
            self.ssh(node, "python3 -I -", stdin=program.encode().decode())
        )
        return found


@pytest.fixture(scope="module")
def walls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Walls]:
    lab = Lab.open(LAB_ID, print)
    keep = bool(os.environ.get("GPUFLEET_KEEP_LAB"))
    if not keep:
        lab.purge()  # what a killed run left
    lab.up(dict.fromkeys((*PEERS, STRANGER), "h100x8"), CABLES)
    project = tmp_path_factory.mktemp("walls")
    shutil.copytree(ROOT / "inventories", project / "inventories")
    (project / "group_vars").mkdir()
    yield Walls(Lab.open(LAB_ID, print), project)
    if not keep:
        lab.purge()


def test_the_ports_of_a_replica_are_for_its_nodes_alone(walls: Walls) -> None:
    """
    Also those that vLLM chose itself; what belongs to nobody of ours stays as it is. nftables comes
    with the role, and a table of others is not touched.
    """
    assert "not found" in walls.ssh("gpu-01", "nft --version 2>&1 || :")
    walls.wants({})
    dry = walls.deploy("--dry")
    assert dry.status == 0, dry.output
    assert "would load" in dry.output
    assert "tcp dport { 5600, 29500-29515 } counter reject" in dry.output

    run = walls.converge({})
    walls.rests()
    walls.has({})

    assert "+ tcp dport { 5600, 29500-29515 } counter reject with tcp reset" in run.output
    peer = walls.reached("gpu-02")
    assert peer["tcp"] == set(LISTENERS)
    assert {29500, 29509} <= peer["udp"]
    # A peer by another interface is a stranger, and so is a neighbour in the replica's network.
    for node, interface in ((STRANGER, "eth2"), (STRANGER, "eth1"), ("gpu-02", "eth2")):
        stranger = walls.reached(node, interface)
        assert stranger["tcp"] == set(LISTENERS) - INSIDE
        assert stranger["refused"] == {29500, 29509, 5600}
        assert not stranger["udp"] & {29500, 29509, 5600}
    assert walls.verified().status == 0


@pytest.mark.long
def test_a_flood_opens_nothing(walls: Walls) -> None:
    """SYN cookies belong to no program; a queue that is full must not let strangers in."""
    walls.has({})
    before = cookies(walls)
    said = walls.ssh(STRANGER, "python3 - 10.61.0.11 41000", stdin=FLOOD)
    assert cookies(walls) > before
    assert said.strip() == "0"


FLOOD = """
import select, socket, sys, time
kept = []
for _ in range(60):
    each = socket.socket()
    each.setblocking(False)
    each.connect_ex((sys.argv[1], int(sys.argv[2])))
    kept.append(each)
time.sleep(3)
_, ready, _ = select.select([], kept, [], 0)
print(sum(each.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) == 0 for each in ready))
"""


def cookies(walls: Walls) -> int:
    lines = walls.ssh("gpu-01", "grep ^TcpExt: /proc/net/netstat").splitlines()
    names, numbers = (line.split() for line in lines)
    return int(numbers[names.index("SyncookiesSent")])


@pytest.mark.long
def test_what_runs_stays_open_until_it_is_replaced(walls: Walls) -> None:
    walls.has({})
    walls.converge({}, stages="running")
    assert walls.reached("gpu-02")["tcp"] == set(LISTENERS)
    assert walls.reached(STRANGER)["tcp"] == set(LISTENERS) - INSIDE
    walls.converge({}, stages="none")
    assert walls.reached("gpu-02")["tcp"] == set(LISTENERS) - INSIDE - {8000}


@pytest.mark.long
def test_rules_hold_after_a_reboot(walls: Walls) -> None:
    """They are loaded before the network is up, and so before anything listens."""
    walls.has({})
    walls.lab.power("gpu-01", "cycle")
    assert walls.verified().status == 0
    after = "systemctl show -P After network-pre.target; systemctl show -P Before " + SERVICE
    assert SERVICE in walls.ssh("gpu-01", after)
    order = walls.ssh(
        "gpu-01",
        f"systemctl show -P ExecMainExitTimestampMonotonic {SERVICE}; "
        "systemctl show -P ActiveEnterTimestampMonotonic ssh.service",
    )
    loaded, listened = (int(line) for line in order.split())
    assert 0 < loaded < listened
    walls.listen()
    assert walls.reached(STRANGER)["tcp"] == set(LISTENERS) - INSIDE


def test_rules_that_lock_the_operator_out_are_taken_back(walls: Walls) -> None:
    """
    The node's port 22 leads to 2200, which nobody has said. Under `drop` no new connection comes
    about, so the deploy fails, and what was loaded before is loaded again.
    """
    walls.has({})
    before = walls.table("gpu-01")
    walls.ssh("gpu-01", REDIRECT)
    try:
        walls.wants({"policy": "drop", "confirm_seconds": 20})
        run = walls.deploy("-y", "--limit", "gpu-01")
        assert run.status != 0
        assert "no new SSH connection succeeded" in run.output
        assert "the rules were rolled back" in run.output
        assert walls.table("gpu-01") == before
        assert walls.ssh("gpu-01", f"grep -c 'policy drop' {RULES} || :").strip() == "0"
    finally:
        # Apart from this connection, which ends with the redirection.
        walls.ssh("gpu-01", f"setsid sh -c 'sleep 1; {NO_REDIRECT}' >/dev/null 2>&1 &")
        time.sleep(3)


REDIRECT = """
printf 'Port 22\\nPort 2200\\n' > /etc/ssh/sshd_config.d/ports.conf
systemctl restart ssh
nft -f - <<E
table ip elsewhere {
    chain in {
        type nat hook prerouting priority -100
        tcp dport 22 redirect to :2200
    }
}
E
"""
NO_REDIRECT = (
    "nft delete table ip elsewhere; rm /etc/ssh/sshd_config.d/ports.conf; systemctl restart ssh"
)


def test_rules_of_a_killed_deploy_are_taken_back(walls: Walls) -> None:
    """A timer of the node does it: nobody need be there."""
    walls.has({})
    before = walls.table("gpu-01")
    wanted = "table inet gpufleet {}\ndelete table inet gpufleet\ntable inet gpufleet {\n}\n"

    assert walls.asked("gpu-01", "apply", wanted, seconds=6)["error"] == ""
    seen = walls.asked("gpu-01", "look", wanted)
    assert seen["pending"]
    assert seen["loaded"] == seen["canonical"] != before
    deadline = time.monotonic() + 40
    while walls.table("gpu-01") != before:
        assert time.monotonic() < deadline
        time.sleep(0.5)
    assert "rolled back" in walls.asked("gpu-01", "confirm", wanted)["error"]


def test_rules_that_somebody_changed_are_found_and_put_right(walls: Walls) -> None:
    walls.has({})
    walls.ssh("gpu-01", "nft insert rule inet gpufleet input tcp dport 29500 accept")
    found = walls.verified()
    assert found.status != 0
    assert "+ tcp dport 29500 accept" in found.output
    dry = walls.deploy("--dry", "--json")
    assert dry.changed == {"firewall | rules": ["gpu-01"]}
    assert "would change - tcp dport 29500 accept" in dry.output
    walls.converge({})
    assert "tcp dport 29500 accept" not in walls.table("gpu-01")


def test_dropping_the_rest_leaves_what_is_declared(walls: Walls) -> None:
    """With `drop`: ssh, endpoints for clients, exporters for monitoring, and what is opened."""
    stranger, machine = "10.62.0.13", str(walls.state.machine)
    walls.has(
        {
            "policy": "drop",
            "clients": ["192.0.2.0/24"],
            "monitoring": [machine],
            "open": [{"ports": 2049, "sources": [stranger]}],
        }
    )
    walls.rests()

    walls.ssh("gpu-01", f"ping -c1 -W2 {stranger}")
    walls.ssh(STRANGER, "ping -c1 -W2 10.62.0.11")
    assert walls.reached("gpu-02")["tcp"] == set(LISTENERS)
    assert walls.reached(STRANGER, "eth2") == {
        "tcp": {2049},
        "udp": set(),
        "refused": INSIDE - {41000},
    }
    assert [port for port in (2049, 8000, 9100) if walls.enters(port)] == [8000, 9100]
    assert "kept" in walls.ssh("gpu-01", "nft list table inet others")


def test_without_the_setting_nothing_is_left(walls: Walls) -> None:
    walls.converge(None)
    walls.rests()
    assert "No such file" in walls.table("gpu-01")
    files = f"ls {RULES} /etc/systemd/system/{SERVICE} 2>/dev/null || :"
    assert walls.ssh("gpu-01", files) == ""
    assert walls.ssh("gpu-01", f"systemctl is-active {SERVICE} || :").strip() == "inactive"
    assert "kept" in walls.ssh("gpu-01", "nft list table inet others")
    assert walls.reached(STRANGER)["tcp"] == set(LISTENERS)
