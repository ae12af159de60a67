"""The lab of the walk: two bare nodes with two GPUs each, and a node in front of them.

tests/lab/test_walkthrough.py takes its fleet from bare nodes to a bundle; the files of
tests/lab/roles/ then read what the deploys have left on the nodes.
"""

from __future__ import annotations

import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import openai

from tests.lab.bare_node import DCGM
from tests.lab.conftest import Run
from tests.lab.gateway_pair import until
from tests.lab.upgrade_fleet import (
    FLAGS,
    GATES,
    GATEWAY,
    NEW,
    PORT,
    SCRAPE_SECONDS,
    UpgradeFleet,
    upgrade_fleet,
)
from tests.support.checkout import own_lab

LAB_ID = own_lab("gfwt")
NODES = ("gpu-01", "gpu-02")
DRIVER = "580.95.05"
# Run the worker in the engine's process, as vLLM does on one GPU. Its CPU build needs both.
UNI = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
UNI_FLAGS = {**FLAGS, "distributed-executor-backend": "uni"}
# Who is root on one of the nodes by sudo.
ADMIN = "admin"
# Requests a second. More of them take the processors that the loading of a model needs.
RATE = 2.0
# What brings the fleet up, in this order: each deploy with its arguments.
DEPLOYS = {
    "deploys/node.py": ("--limit", "gpu"),
    "deploys/vllm.py": (),
    "deploys/gateway.py": (),
    "deploys/monitoring.py": (),
}

# In Grafana's place, which Debian does not have: what the role asks of one that is there already.
GRAFANA = "grafana-server.service"
GRAFANA_UNIT = """\
[Service]
ExecStart=/usr/bin/sleep infinity
[Install]
WantedBy=multi-user.target
"""


@dataclass
class TlsFleet(UpgradeFleet):
    """A fleet whose gateway shows a certificate."""

    first: str = NEW
    deployed: set[str] = field(default_factory=set)
    """The deploys that have succeeded on this lab."""

    @property
    def url(self) -> str:
        return f"https://{self.address(GATEWAY)}:{PORT}/v1"

    @cached_property
    def trusted(self) -> Path:
        """The gateway's certificate, which is its own authority."""
        made = self.project / "gateway.pem"
        command = (
            "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 "
            f"-subj /CN=gateway -addext subjectAltName=IP:{self.address(GATEWAY)}"
        )
        subprocess.run(
            [*command.split(), "-keyout", made.with_name("gateway-key.pem"), "-out", made],
            check=True,
            capture_output=True,
            timeout=30,
        )
        return made

    def transport(self) -> dict[str, Any]:
        key = self.trusted.with_name("gateway-key.pem")
        return {"tls": {"certificate_file": str(self.trusted), "key_file": str(key)}}

    def pyinfra(self, *arguments: str, deploy: str = "deploys/vllm.py", seconds: int = 900) -> Run:
        run = super().pyinfra(*arguments, deploy=deploy, seconds=seconds)
        if run.status == 0 and "--dry" not in arguments:
            self.deployed.add(deploy)
        return run

    def have_grafana(self) -> None:
        """Have a Grafana on the monitoring node, and the next deploy give it dashboards."""
        unit = f"/etc/systemd/system/{GRAFANA}"
        self.ssh(GATEWAY, f"mkdir -p /etc/grafana/provisioning && cat >{unit}", stdin=GRAFANA_UNIT)
        self.ssh(GATEWAY, "systemctl daemon-reload")
        watch = {"prometheus": {"scrape_seconds": SCRAPE_SECONDS}, "grafana": {}}
        self._write("monitoring.yml", {"gpu_node": False, "monitoring": watch})

    def reach_through_sudo(self, node: str) -> None:
        """Have the inventory reach a node as a user who is root by sudo alone."""
        self.ssh(
            node,
            f"id {ADMIN} || useradd -m -s /bin/bash {ADMIN}; "
            f"echo '{ADMIN} ALL=(ALL) NOPASSWD: ALL' >/etc/sudoers.d/{ADMIN}; "
            f"install -d -m 700 -o {ADMIN} ~{ADMIN}/.ssh; "
            f"install -m 600 -o {ADMIN} ~root/.ssh/authorized_keys ~{ADMIN}/.ssh/",
        )
        file = Path(self.inventory)
        groups, load, rest = file.read_text().partition("\nglobals().update(")
        by_sudo = (
            "\nfor _nodes in _groups.values():\n"
            "    for _name, _facts in _nodes:\n"
            f"        if _name == {node!r}:\n"
            f'            _facts.update(ssh_user="{ADMIN}", _sudo=True)\n'
        )
        file.write_text(groups + by_sudo + load + rest)

    def finish(self) -> None:
        """Run the deploys that have not succeeded yet: all of them, where only roles are tested."""
        for deploy, arguments in DEPLOYS.items():
            if deploy not in self.deployed:
                run = self.pyinfra("-y", *arguments, deploy=deploy, seconds=1800)
                assert run.status == 0, run.output

    def client(self, key: str) -> openai.OpenAI:
        """Return a client that is not ours and trusts the certificate alone."""
        trust = ssl.create_default_context(cafile=str(self.trusted))
        http = openai.DefaultHttpxClient(verify=trust)
        return openai.OpenAI(
            base_url=self.url, api_key=key, timeout=60, max_retries=0, http_client=http
        )

    def completion(self) -> str:
        with self.client(self.key_of_clients) as client:
            answer = client.completions.create(
                model="tiny", prompt="Hello", max_tokens=8, temperature=0
            )
        return answer.choices[0].text

    def changes_nothing_at_all(self, deploy: str) -> None:
        before = self.pids()
        run = self.pyinfra("-y", "--json", deploy=deploy)
        assert run.status == 0, run.output
        assert run.changed == {}, run.changed
        assert self.pids() == before

    def seqs(self) -> dict[str, str]:
        """Return {unit: its --max-num-seqs}, by the processes' arguments."""
        found = {}
        for name, pid in self.pids().items():
            argv = self.ssh(name.split()[0], f"tr '\\0' '\\n' </proc/{pid}/cmdline").split("\n")
            found[name] = argv[argv.index("--max-num-seqs") + 1]
        return found


@contextmanager
def gateway_fleet(lab_id: str, project: Path, **model: Any) -> Iterator[TlsFleet]:
    """Give two nodes with a replica each, which answer behind the gateway; `model` is declared."""
    with upgrade_fleet(lab_id, project, NODES, also=(), kind=TlsFleet) as found:
        # On two cores that do other things, too, no latency tells of a release.
        gates = {"baseline_seconds": 5, "soak_seconds": 5, "latency_ratio": 100.0, "alerts": False}
        found.declare(upgrade={"gates": gates, "canary": 1, "waves": [1]})
        found.declare_model(environment=UNI, **model)
        for deploy in ("deploys/vllm.py", "deploys/gateway.py"):
            run = found.pyinfra("-y", deploy=deploy, seconds=1800)
            assert run.status == 0, run.output
        until(lambda: bool(found.completion()), "the gateway sees servers", 120)
        yield found


@contextmanager
def walk_fleet(project: Path) -> Iterator[TlsFleet]:
    """Give the lab with its project; the nodes are bare, nothing is deployed."""
    with upgrade_fleet(LAB_ID, project, NODES, bare=True, also=(), kind=TlsFleet) as found:
        found.declare_driver(DRIVER, DCGM)
        # On two cores that do other things, too, no latency tells of a release.
        gates = {**GATES, "baseline_seconds": 5, "soak_seconds": 5, "latency_ratio": 100.0}
        found.declare(upgrade={"gates": gates, "canary": 1, "waves": [1]})
        found.declare(firewall={"policy": "own_ports"})
        found.have_grafana()
        found.declare_model(flags=UNI_FLAGS, environment=UNI)
        found.reach_through_sudo(NODES[1])
        yield found
