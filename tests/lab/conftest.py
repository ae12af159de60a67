"""A lab of the tests' own, with the fleet deployed on it once; nothing here is simulated but GPUs.

The lab has its own id, so that it stands beside an operator's. It is taken down after the last of
these tests, for its idle vLLM workers would slow the others down; a run that was killed is cleaned
up by the next one, or by `make clean`.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

from lab import provisioning_sources
from lab.nodes import Lab
from lab.state import LabState
from tests.conftest import SHARED, lab_of
from tests.support.checkout import ROOT, own_lab

if TYPE_CHECKING:
    from tests.lab.walk import TlsFleet

LAB_ID = own_lab("gft")
# The last one has no GPUs: it watches the others, once tests make it.
NODES = {"gpu-01": "h100x8", "gpu-02": "a100x4-pcie", "mon-03": "none"}


# Who uses a lab's fixture has to have its turn on that lab.
FIXTURES = {"nodes": "the fleet", "walk": "the walk"}


def _is_quick(path: str) -> bool:
    """Whether `make test` runs a file of tests here, by its path in the checkout."""
    return lab_of(path)[0] == "the walk"


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Do not import files of which the marks select nothing: it takes each worker seconds."""
    file = collection_path.relative_to(ROOT)
    marks = config.getoption("markexpr")
    tests = file.name.startswith("test_")
    unwanted = "not lab" in marks or (tests and "not slow" in marks and not _is_quick(str(file)))
    return unwanted or None  # None: what pytest itself decides


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """
    Every test here needs root and nodes: none is skipped, `make test-unit` leaves them out, and
    `make test` all but the walk and what its roles have left.

    Those of shared labs begin, for they take longest, in the order of tests/conftest.py.
    """
    here = [item for item in items if Path(item.fspath).is_relative_to(ROOT / "tests/lab")]
    for item in here:
        lab = lab_of(item.nodeid)[0]
        item.add_marker("lab")
        if not _is_quick(item.nodeid):
            item.add_marker("slow")
        if item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(1800))  # a first deploy on a slow machine
        for fixture in FIXTURES.keys() & {*getattr(item, "fixturenames", ())}:
            if lab != FIXTURES[fixture]:
                raise pytest.UsageError(
                    f"{item.path} uses {FIXTURES[fixture]}: name it in tests/conftest.py"
                )
    ordered = iter(sorted(here, key=_turn))
    items[:] = [next(ordered) if item.get_closest_marker("lab") else item for item in items]


def _turn(item: pytest.Item) -> tuple[int, int]:
    """Where a test stands among those here; equals keep their order."""
    lab, turn = lab_of(item.nodeid)
    return [*SHARED, ""].index(lab), turn


@dataclass
class Run:
    """What one command did: its exit status and everything that it printed."""

    status: int
    stdout: str
    stderr: str

    @property
    def changed(self) -> dict[str, list[str]]:
        """Operation -> nodes that it changed (or would change), from `--json`."""
        document = json.loads(self.stdout)
        if document.get("results"):
            found = {each["name"]: each["success"] for each in document["results"]["operations"]}
        else:
            found = {each["name"]: each["hosts_with_change"] for each in document["plan"]}
        return {name: nodes for name, nodes in found.items() if nodes}

    @property
    def output(self) -> str:
        """Everything that was printed."""
        return self.stdout + self.stderr


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
        return (self.state.dir / provisioning_sources.API_KEY).read_text().strip()

    @property
    def hf_token(self) -> str:
        return (self.state.dir / provisioning_sources.HF_TOKEN).read_text().strip()

    def env(self) -> dict[str, str]:
        return {**os.environ, "GPUFLEET_LAB": self.state.id}

    def pyinfra(self, *arguments: str, deploy: str = "deploys/vllm.py", seconds: int = 900) -> Run:
        """Run the pyinfra command that an operator types, with this project's inventory."""
        return self._run(
            sys.executable, "-m", "pyinfra", *arguments, self.inventory, deploy, seconds=seconds
        )

    def gpufleet(self, *arguments: str, seconds: int = 120) -> Run:
        """Run the gpufleet command that an operator types."""
        return self._run(
            str(Path(sys.executable).with_name("gpufleet")), *arguments, seconds=seconds
        )

    def _run(self, *command: str, seconds: int) -> Run:
        done = subprocess.run(
            command,
            cwd=ROOT,
            env=self.env(),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )
        return Run(done.returncode, done.stdout, done.stderr)

    @property
    def log(self) -> Path:
        """What the deploy in the background printed so far."""
        return self.project / "background.log"

    def popen(self, *arguments: str, deploy: str = "deploys/vllm.py") -> subprocess.Popen[bytes]:
        """Start a deploy and return at once: to be killed."""
        typed = ["-y", *arguments, self.inventory, deploy]
        with self.log.open("wb") as output:
            return subprocess.Popen(
                [sys.executable, "-m", "pyinfra", *typed],
                cwd=ROOT,
                env=self.env(),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                # A shell that runs the tests in the background has them ignore Ctrl-C.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
            )

    def ssh(self, node: str, command: str, seconds: int = 60, stdin: str = "") -> str:
        """Run a shell command on a node over plain ssh: another route than the code under test."""
        done = subprocess.run(
            ["ssh", "-F", str(self.state.ssh_config), node, command],
            input=stdin,
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
                data["serving"].pop(model, None)
            else:
                data["serving"].setdefault(model, {}).update(keys)
        path.write_text(yaml.safe_dump(data))

    def reset(self) -> None:
        """Put group_vars/lab.yml back as the repository has it."""
        shutil.copy(ROOT / "group_vars/lab.yml", self.project / "group_vars/lab.yml")


@contextmanager
def standing(lab_id: str, profiles: Mapping[str, str], project: Path) -> Iterator[Fleet]:
    """
    Give a lab of this id with bare nodes, everything to download at hand, and a project for it.

    It is gone afterwards; GPUFLEET_KEEP_LAB keeps it, which saves minutes while a test is written.
    """
    lab = Lab.open(lab_id, print)
    keep = bool(os.environ.get("GPUFLEET_KEEP_LAB"))
    if not keep:
        lab.purge()  # what a killed run left
    lab.up(profiles)
    provisioning_sources.provide(LabState.load(lab_id), print)
    for folder in ("inventories", "group_vars", "host_vars"):
        shutil.copytree(ROOT / folder, project / folder)
    yield Fleet(Lab.open(lab_id, print), project)
    if not keep:
        lab.purge()


@pytest.fixture(scope="package")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two bare nodes with simulated GPUs, with everything to download at hand; nothing deployed."""
    if os.geteuid() != 0:
        pytest.fail("these tests boot nodes, which needs root; `make test-unit` does not")
    with standing(LAB_ID, NODES, tmp_path_factory.mktemp("project")) as found:
        yield found


@pytest.fixture(scope="package")
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


@pytest.fixture(scope="package")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TlsFleet]:
    """The lab of the walk: bare nodes at first, then as the test before has left them."""
    from tests.lab.walk import walk_fleet  # it needs the classes of this file

    with walk_fleet(tmp_path_factory.mktemp("walk")) as found:
        yield found
