"""A lab of the tests' own, with the fleet deployed on it once; nothing here is simulated but GPUs.

The lab has its own id, so that it stands beside an operator's. It is taken down at the end, and a
run that was killed is cleaned up by the next one, or by `make clean`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml

from lab import supplies
from lab.nodes import Lab
from lab.state import LabState

ROOT = Path(__file__).parents[2]
LAB_ID = "gft"
NODES = {"gpu-01": "h100x8", "gpu-02": "a100x4-pcie"}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Every test here needs root and nodes: none is skipped, `make test-unit` leaves them out."""
    for item in items:
        if Path(item.fspath).is_relative_to(Path(__file__).parent):
            item.add_marker("lab")


@dataclass
class Run:
    """What one command did: its exit status and everything that it printed."""

    status: int
    output: str

    @property
    def changed(self) -> dict[str, list[str]]:
        """Operation -> nodes that it changed (or would change), from `--json`."""
        document = json.loads(self.output[self.output.index("{") :])
        if "results" in document:
            return {
                each["name"]: [
                    node for node, result in each["hosts"].items() if result.get("changed")
                ]
                for each in document["results"]["operations"]
            }
        return {each["name"]: each["hosts_with_change"] for each in document["plan"]}


@dataclass
class Fleet:
    """A project directory of the tests' own on the lab: its group_vars may be changed freely."""

    lab: Lab
    project: Path
    state: LabState = field(init=False)

    def __post_init__(self) -> None:
        self.state = LabState.load(self.lab.facts.id)

    @property
    def inventory(self) -> str:
        return str(self.project / "inventories/lab.py")

    @property
    def key(self) -> str:
        return (self.state.dir / supplies.API_KEY).read_text().strip()

    @property
    def hf_token(self) -> str:
        return (self.state.dir / supplies.HF_TOKEN).read_text().strip()

    def env(self) -> dict[str, str]:
        return {**os.environ, "GPUFLEET_LAB": self.state.id}

    def pyinfra(self, *arguments: str, deploy: str = "deploys/vllm.py", seconds: int = 900) -> Run:
        """Run the pyinfra command that an operator types, with this project's inventory."""
        command = [sys.executable, "-m", "pyinfra", *arguments, self.inventory, deploy]
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self.env(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
        )
        return Run(done.returncode, done.stdout)

    def popen(self, *arguments: str) -> subprocess.Popen[bytes]:
        """Start the main deploy and return at once: to be killed."""
        return subprocess.Popen(
            [sys.executable, "-m", "pyinfra", "-y", *arguments, self.inventory, "deploys/vllm.py"],
            cwd=ROOT,
            env=self.env(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def ssh(self, node: str, command: str, seconds: int = 60) -> str:
        """Run a shell command on a node over plain ssh: another route than the code under test."""
        done = subprocess.run(
            ["ssh", "-F", str(self.state.ssh_config), node, command],
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, f"{node}: {command}: {done.stderr}{done.stdout}"
        return done.stdout

    def address(self, node: str) -> str:
        return str(self.state.node(node).address)

    def pids(self) -> dict[str, str]:
        """Return "node unit" -> main PID of every vLLM unit that is active."""
        found = {}
        for node in self.state.nodes:
            listed = self.ssh(
                node.name,
                "for u in $(systemctl list-units --plain --no-legend 'vllm-*.service' "
                "--state=active | cut -d' ' -f1); do "
                "echo $u $(systemctl show -P MainPID $u); done",
            )
            for line in listed.splitlines():
                unit, pid = line.split()
                found[f"{node.name} {unit}"] = pid
        return found

    def set(self, changes: Mapping[str, Any]) -> None:
        """Change models in group_vars/lab.yml: {model: {key: value}}; None removes the model."""
        path = self.project / "group_vars/lab.yml"
        data = yaml.safe_load(path.read_text())
        for model, keys in changes.items():
            if keys is None:
                data["models"].pop(model, None)
            else:
                data["models"].setdefault(model, {}).update(keys)
        path.write_text(yaml.safe_dump(data))

    def reset(self) -> None:
        """Put group_vars/lab.yml back as the repository has it."""
        shutil.copy(ROOT / "group_vars/lab.yml", self.project / "group_vars/lab.yml")


@pytest.fixture(scope="session")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two bare nodes with simulated GPUs, with everything to download at hand; nothing deployed."""
    if os.geteuid() != 0:
        pytest.fail("these tests boot nodes, which needs root; `make test-unit` does not")
    lab = Lab.open(LAB_ID, print)
    lab.purge()  # what a killed run left
    lab.up(NODES)
    supplies.provide(LabState.load(LAB_ID), print)
    project = tmp_path_factory.mktemp("project")
    for folder in ("inventories", "group_vars", "host_vars"):
        shutil.copytree(ROOT / folder, project / folder)
    yield Fleet(Lab.open(LAB_ID, print), project)
    if not os.environ.get("GPUFLEET_KEEP_LAB"):
        lab.purge()


@pytest.fixture(scope="session")
def deployed(nodes: Fleet) -> Fleet:
    """The fleet after the main deploy."""
    run = nodes.pyinfra("-y", seconds=1800)
    assert run.status == 0, run.output
    return nodes


@pytest.fixture
def fleet(deployed: Fleet) -> Iterator[Fleet]:
    """The deployed fleet, for a test that changes settings: put back and converged afterwards."""
    yield deployed
    deployed.reset()
    run = deployed.pyinfra("-y", seconds=1200)
    assert run.status == 0, run.output
