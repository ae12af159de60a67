"""`gpufleet check` on live nodes: bare and deployed, well and broken.

What a check says is compared with the fault that was put on the node, and with what other people's
programs show of the same GPUs.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lab import nvml_monitors
from lab.nodes import Lab
from tests.lab.conftest import ROOT, Fleet
from tests.support.checkout import own_lab

LAB_ID = own_lab("gfk")
HGX, PCIE = "gpu-01", "gpu-02"
GPUFLEET = Path(sys.executable).with_name("gpufleet")


@dataclass
class Bare:
    """Two nodes as a data centre hands them over: a driver, and nothing of ours."""

    lab: Lab
    project: Path

    @property
    def inventory(self) -> str:
        return str(self.project / "inventories/bare.py")

    def run(self, *command: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*map(str, command)],
            cwd=ROOT,
            env={**os.environ, "GPUFLEET_LAB": LAB_ID, **environment},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def check(self, *arguments: str, inventory: str = "") -> dict[str, Any]:
        """Return the report of `gpufleet check --json`, whose exit status must agree with it."""
        run = self.run(GPUFLEET, "check", inventory or self.inventory, "--json", *arguments)
        assert "Traceback" not in run.stderr, run.stderr
        assert run.returncode in {0, 1}, run.stderr
        report: dict[str, Any] = json.loads(run.stdout)
        assert run.returncode == int(not report["fit"])
        return report

    def ssh(self, node: str, command: str) -> str:
        done = self.run("ssh", "-F", str(self.lab.facts.ssh_config), node, command)
        assert done.returncode == 0, f"{node}: {command}: {done.stderr}"
        return done.stdout


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bare]:
    lab = Lab.open(LAB_ID, print)
    lab.purge()  # what a killed run left
    lab.up({HGX: "h100x8", PCIE: "a100x4-pcie"})
    project = tmp_path_factory.mktemp("bare")
    (project / "inventories").mkdir()
    (project / "inventories/bare.py").write_text(
        "from gpufleet import inventory\nfrom lab.inventory import groups\n"
        "globals().update(inventory.load(__file__, groups=groups()))\n"
    )
    yield Bare(Lab.open(LAB_ID, print), project)
    lab.purge()


@pytest.fixture
def broken(bare: Bare) -> Iterator[Callable[..., None]]:
    """`broken(fault, gpu)`: break the HGX node; it is mended afterwards."""
    yield lambda fault, gpu=None: bare.lab.fault(HGX, fault, gpu) and None
    bare.lab.clear(HGX)


def stopping(report: dict[str, Any]) -> set[tuple[str, str, int | None]]:
    """Return (check, node, GPU) of everything that stops work and was asked."""
    return {
        (each["check"], each["node"], each["gpu"] and each["gpu"]["index"])
        for each in report["findings"]
        if each["severity"] in {"block", "unknown"} and not each["found"].startswith("not queried")
    }


def test_bare_healthy_nodes_are_fit_and_stay_as_they_were(bare: Bare) -> None:
    """Read-only: no file of the node is younger than the check, but what logging in writes."""
    for node in (HGX, PCIE):
        bare.ssh(node, "touch /run/before")
    report = bare.check()

    amiss = [each for each in report["findings"] if each["severity"] not in {"ok", "info"}]
    # Nodes of the lab have the disk of this machine, with what it happens to have left.
    assert [each for each in amiss if each["check"] != "disk-space"] == []
    for node in (HGX, PCIE):
        younger = bare.ssh(node, "find / -xdev -newer /run/before -type f ! -path '/var/log/*'")
        assert younger.split() == []


def test_the_same_inside_pyinfra(bare: Bare) -> None:
    run = bare.run(
        sys.executable, "-m", "pyinfra", "-y", bare.inventory, str(ROOT / "deploys/check.py")
    )

    assert run.returncode == 0, run.stdout + run.stderr
    assert "fit" in run.stdout
    assert "8 x NVIDIA H100 80GB HBM3" in run.stdout


# One of every kind; the whole catalogue is crossed with all hardware offline, in the same probe.
@pytest.mark.parametrize(
    ("fault", "gpu", "check"),
    [
        ("gpu-lost", 5, "gpu-answers"),
        ("gpu-crash", 2, "gpu-answers"),
        ("gpu-missing", 7, "gpu-count"),
        ("ecc-uncorrected", 3, "ecc-uncorrected"),
        ("nvlink-dead-link", 6, "nvlink-links"),
        ("fabric-stale", None, "fabric-manager"),
        ("foreign-process", 1, "foreign-processes"),
        ("no-driver", None, "driver-loaded"),
        ("mismatch", None, "driver-versions"),
        ("xid-79", 4, "xid"),
    ],
)
def test_a_fault_stops_the_node_that_has_it_and_no_other(
    bare: Bare, broken: Callable[..., None], fault: str, gpu: int | None, check: str
) -> None:
    broken(fault, gpu)

    report = bare.check()

    found = stopping(report)
    assert (check, HGX) in {(name, node) for name, node, _ in found}
    assert {node for _, node, _ in found} == {HGX}
    if gpu is not None and check != "gpu-count":
        assert gpu in {index for name, _, index in found if name == check}


@pytest.mark.parametrize(
    ("fault", "check"),
    [("module-differs", "reboot-module"), ("kernel-without-module", "reboot-kernel")],
)
def test_what_the_next_reboot_breaks_is_said_today(
    bare: Bare, broken: Callable[..., None], fault: str, check: str
) -> None:
    broken(fault)

    report = bare.check()

    assert report["fit"]
    assert (check, "warn") in {(each["check"], each["severity"]) for each in report["findings"]}


def test_a_gpu_that_hangs_costs_its_own_facts_and_no_more_than_the_deadline(
    bare: Bare, broken: Callable[..., None]
) -> None:
    broken("gpu-hang", 2)

    began = time.monotonic()
    report = bare.check()

    assert time.monotonic() - began < 60
    assert report["nodes"][HGX]["unfit_gpus"] == [2]
    others = [gpu for gpu in report["facts"][HGX]["gpus"] if gpu["index"] != 2]
    assert all("missing" not in gpu for gpu in others)


def test_a_node_without_power_is_unknown_and_delays_nobody(bare: Bare) -> None:
    bare.lab.power(PCIE, "off")
    try:
        began = time.monotonic()
        report = bare.check("--seconds", "20")
        spent = time.monotonic() - began
    finally:
        bare.lab.power(PCIE, "on")

    assert spent < 30
    assert stopping(report) == {("probe", PCIE, None)}
    assert report["nodes"][HGX]["verdict"] in {"ok", "info", "warn"}  # warn: this machine's disk


def test_a_node_without_python_gets_one_clear_line(bare: Bare) -> None:
    bare.ssh(PCIE, "mv /usr/bin/python3 /usr/bin/python3.away")
    try:
        report = bare.check("--limit", PCIE)
    finally:
        bare.ssh(PCIE, "mv /usr/bin/python3.away /usr/bin/python3")

    (finding,) = report["findings"]
    assert finding["severity"] == "unknown"
    assert "no python3 on this node: install it" in finding["found"]
    assert "\n" not in finding["found"]


def test_without_root_it_says_what_only_root_may_read(bare: Bare) -> None:
    """Everything else is read by an ordinary user, and is the same."""
    bare.ssh(
        HGX,
        "id guest 2>/dev/null || useradd -m guest; install -d -o guest -m 700 ~guest/.ssh; "
        "install -o guest -m 600 /root/.ssh/authorized_keys ~guest/.ssh/authorized_keys",
    )
    (bare.project / "inventories/guest.py").write_text(
        "from gpufleet import inventory\nfrom lab.inventory import groups\n"
        "found = {group: [(name, {**data, 'ssh_user': 'guest'}) for name, data in nodes]\n"
        "         for group, nodes in groups().items()}\n"
        "globals().update(inventory.load(__file__, groups=found))\n"
    )

    report = bare.check("--limit", HGX, inventory=str(bare.project / "inventories/guest.py"))

    unknown = {each["check"]: each["found"] for each in report["findings"]
               if each["severity"] == "unknown"}  # fmt: skip
    assert set(unknown) <= {"xid", "sxid", "iommu-acs"}
    assert "only root can read the kernel log" in unknown["xid"]


@pytest.fixture(scope="module")
def beside(bare: Bare) -> Bare:
    """The nodes with nvitop on them."""
    for node in (HGX, PCIE):
        nvml_monitors.install(bare.lab.root(node))
    return bare


NVITOP = """
import json
from nvitop import Device
print(json.dumps([{
    "index": d.index, "uuid": d.uuid(), "name": d.name(), "bus_id": d.bus_id(),
    "total": d.memory_total(), "temperature": d.temperature(), "power": d.power_usage(),
    "limit": d.power_limit(), "persistence": d.persistence_mode(), "ecc": d.total_volatile_uncorrected_ecc_errors(),
    "compute": d.compute_mode(), "mig": d.mig_mode(), "cc": d.cuda_compute_capability(),
} for d in Device.all()]))
"""  # noqa: E501


@pytest.mark.parametrize("node", [HGX, PCIE])
def test_nvitop_sees_what_we_see(beside: Bare, node: str) -> None:
    shown = beside.ssh(node, f"{nvml_monitors.RUN} nvitop -1")
    program = NVITOP.replace("'", "'\\''")
    theirs = json.loads(beside.ssh(node, f"{nvml_monitors.RUN.removesuffix(' -m')} -c '{program}'"))
    ours = beside.check()["facts"][node]["gpus"]

    assert ours[0]["name"].removeprefix("NVIDIA ")[:12] in shown
    on = {0: "Disabled", 1: "Enabled"}
    for their, our in zip(theirs, ours, strict=True):
        assert their["index"] == our["index"]
        assert their["uuid"] == our["uuid"]
        assert their["name"] == our["name"]
        assert their["bus_id"] == our["pci"]["nvml_bus_id"]
        assert their["total"] == our["memory"]["total"]
        # It shows none where the driver is too old for the one function it knows (R570).
        assert their["temperature"] in {our["temperature_celsius"], "N/A"}
        assert their["power"] == our["power_draw_milliwatts"]
        assert their["limit"] == our["power_limit_milliwatts"]
        assert their["persistence"] == on[our["persistence_mode"]]
        assert their["ecc"] == our["ecc_uncorrected_volatile"]
        assert their["compute"] == {0: "Default"}[our["compute_mode"]]
        assert their["mig"] == on[our["mig_mode"]["current"]]
        assert their["cc"] == our["compute_capability"]


def test_the_topology_of_a_live_node(bare: Bare) -> None:
    run = bare.run(GPUFLEET, "topology", bare.inventory, PCIE, "--json")

    found = json.loads(run.stdout)
    assert found["islands"] == [[0, 1], [2, 3]]
    assert found["max_tp"] == 2


# -- in the deploys --------------------------------------------------------------------------------


@pytest.fixture
def sick(deployed: Fleet) -> Iterator[Fleet]:
    """The deployed fleet with uncorrectable errors on a GPU that serves nothing."""
    deployed.lab.fault("gpu-01", "ecc-uncorrected", 7)
    yield deployed
    deployed.lab.clear("gpu-01")
    deployed.reset()


def test_a_deploy_places_nothing_on_a_node_with_an_unfit_gpu(sick: Fleet) -> None:
    before = sick.pids()

    run = sick.pyinfra("-y")

    assert run.status == 1
    assert "gpu-01 GPU 7: ecc-uncorrected (block)" in run.output
    assert "checks.degraded: true" in run.output
    assert "Traceback" not in run.output
    assert sick.pids() == before


def test_degraded_service_goes_on_without_it_and_the_plan_shows_it(sick: Fleet) -> None:
    before = sick.pids()
    (sick.project / "host_vars").mkdir(exist_ok=True)
    host_vars = sick.project / "host_vars/gpu-01.yml"
    host_vars.write_text("checks: {degraded: true}\n")
    try:
        run = sick.pyinfra("-y", "--json")
        verified = sick.pyinfra("-y", deploy="deploys/verify.py")
    finally:
        host_vars.unlink()

    assert run.status == 0, run.output
    assert run.changed == {}
    assert sick.pids() == before
    assert "GPU 7 is not used (ecc-uncorrected)" in run.stderr
    assert verified.status == 0, verified.output


def test_verify_names_what_is_unfit_and_still_asks_what_runs(sick: Fleet) -> None:
    run = sick.pyinfra("-y", deploy="deploys/verify.py")

    assert run.status == 0, run.output
    assert "gpu-01 GPU 7: ecc-uncorrected (block)" in run.output
