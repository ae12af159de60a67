"""A driver that was installed comes into force: by a reload, by a reboot, or somebody is named.

Packages are installed by hand here, as an administrator might, so that what follows is all that is
tested. The tests are one story of one node, in this order.
"""

from __future__ import annotations

import base64
import json
import os
import pty
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path

import pytest
import yaml

from lab import vendor
from lab.nodes import Lab
from lab.vendor import Vendor
from lab.vendor.repository import public_key
from tests.lab.conftest import Fleet, Run
from tests.support.checkout import ROOT, own_lab

pytestmark = pytest.mark.long

LAB_ID = own_lab("gfd")
NODE = "gpu-01"
KEY = "/etc/apt/by-hand.gpg"
STAGE = "vllm-test-0.service"
OLD, NEW, OTHER_BRANCH = "580.95.05", "580.178.04", "595.91.07"

DEPLOY = """\
from gpufleet.fleet.run import bare_node, refusals
from roles.driver_activation import check_driver, driver_activation
from roles.fabric_manager import fabric_manager
from roles.persistenced import persistenced

with refusals():
    node = bare_node()
    driver_activation(node)
    fabric_manager(node)
    persistenced(node)
    check_driver(node)
"""
SERVE = """\
from roles.driver_activation import require_in_service

require_in_service()
"""
# Holds a GPU as vLLM does, in a unit that is ours by what it records.
UNIT = """\
[Unit]
AssertPathExists=/dev/nvidiactl
[Service]
ExecStartPre=+/bin/sh -c 'mkdir -p /run/gpufleet/started && printf x > /run/gpufleet/started/%n'
ExecStart=/bin/sh -c 'exec 3</dev/nvidia0; exec sleep infinity'
[Install]
WantedBy=multi-user.target
"""
PARTS = (
    "libcuda1",
    "libnvidia-ml1",
    "libnvidia-nscq",
    "nvidia-driver-cuda",
    "nvidia-fabricmanager",
    "nvidia-kernel-open-dkms",
    "nvidia-modprobe",
    "nvidia-persistenced",
    "nvidia-smi",
)


class Node(Fleet):
    """The lab's one node, and a project that knows only it."""

    @property
    def inventory(self) -> str:
        return str(self.project / "inventories/bare.py")

    def lock(self, driver: str, reboot: str = "never") -> None:
        written = {
            "cuda": {"repository": asdict(self.repository)},
            "gpu_lock": {"driver": driver},
            "gpu": {"reboot": reboot, "reboot_seconds": 120},
        }
        (self.project / "group_vars/bare.yml").write_text(yaml.safe_dump(written))

    @property
    def repository(self) -> Vendor:
        return vendor.build(self.state.dir, self.state.mirror_url)

    def sh(self, command: str, seconds: int = 120) -> str:
        return self.ssh(NODE, command, seconds).strip()

    def install(self, driver: str) -> None:
        """Do what an administrator's apt does."""
        names = " ".join(f"{part}={driver}-1" for part in PARTS)
        self.sh(
            "export DEBIAN_FRONTEND=noninteractive; apt-get -q update >/dev/null && apt-get -q -y "
            f"--allow-downgrades install {names}",
            300,
        )

    def deploy(self, *arguments: str) -> Run:
        return self.pyinfra(
            "-y", "--json", *arguments, deploy=str(self.project / "deploy.py"), seconds=400
        )

    def smi(self) -> str:
        """Return NVML's word by the vendor's program."""
        return self.sh(
            "nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>&1 | sort -u || true"
        )

    @property
    def boot_id(self) -> str:
        return self.sh("cat /proc/sys/kernel/random/boot_id")

    @property
    def mark(self) -> str:
        return self.sh("cat /var/lib/gpufleet/unchecked 2>/dev/null || true")

    def is_active(self, unit: str) -> bool:
        return self.sh(f"systemctl is-active {unit} || true") == "active"

    def pid(self, unit: str) -> str:
        return self.sh(f"systemctl show -P MainPID {unit}")


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    project: Path = tmp_path_factory.mktemp("in-force")
    lab = Lab.open(LAB_ID, print)
    lab.purge()
    lab.up({NODE: "h100x8"}, without_driver=[NODE])
    for folder in ("inventories", "group_vars"):
        (project / folder).mkdir()
    (project / "inventories/bare.py").write_text(
        "from gpufleet import inventory\nfrom lab.inventory import groups\n"
        "globals().update(inventory.load(__file__, groups=groups()))\n"
    )
    (project / "deploy.py").write_text(DEPLOY)
    found = Node(Lab.open(LAB_ID, print), project)
    source = f"deb [signed-by={KEY}] {found.repository.url}/ /"
    key = base64.b64encode(public_key(found.state.dir / "vendor")).decode()
    found.ssh(NODE, f"base64 -d > {KEY}", stdin=key)
    found.ssh(NODE, "cat > /etc/apt/sources.list.d/by-hand.list", stdin=source)
    found.ssh(NODE, "cat > /etc/modprobe.d/by-hand.conf", stdin="blacklist nouveau\n")
    found.install(OLD)
    found.ssh(NODE, f"cat > /etc/systemd/system/{STAGE}", stdin=UNIT)
    found.sh(f"systemctl daemon-reload; systemctl enable -q {STAGE}")
    yield found
    lab.purge()


def test_a_reboot_that_may_not_be_is_said_and_not_made(node: Node):
    node.lock(OLD, reboot="never")
    before = node.boot_id
    run = node.deploy()
    assert run.status == 1
    assert "nouveau uses the GPUs" in run.output
    assert "gpu.reboot is never" in run.output
    assert node.boot_id == before
    assert node.mark


def test_a_dry_run_says_that_it_would_reboot(node: Node):
    node.lock(OLD, reboot="when_needed")
    before = node.boot_id
    run = node.pyinfra("--dry", deploy=str(node.project / "deploy.py"))
    assert "would reboot: nouveau uses the GPUs" in run.output
    assert node.boot_id == before


def test_asked_at_a_terminal_no_means_no(node: Node):
    node.lock(OLD, reboot="ask")
    before = node.boot_id
    master, slave = pty.openpty()
    with subprocess.Popen(
        [sys.executable, "-m", "pyinfra", "-y", node.inventory, str(node.project / "deploy.py")],
        cwd=ROOT,
        env=node.env(),
        stdin=slave,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    ) as run:
        assert run.stdout
        said = b""
        while b"Reboot it now? [y/N]" not in said and (piece := run.stdout.read1()):
            said += piece
        assert b"nouveau uses the GPUs" in said
        os.write(master, b"n\n")
        said += run.stdout.read()
    assert run.returncode == 1
    assert b"the operator declined a reboot" in said
    assert node.boot_id == before


def test_a_reboot_is_proven_by_another_boot_id_and_the_node_serves_when_it_was_checked(node: Node):
    node.lock(OLD, reboot="when_needed")
    before = node.boot_id
    run = node.deploy()
    assert run.status == 0, run.output
    assert node.boot_id != before
    assert node.smi() == OLD
    assert node.mark == ""
    assert node.is_active("nvidia-fabricmanager")
    # Enabled, and kept down by the mark while the node booted.
    assert node.is_active(STAGE)


def test_a_second_run_changes_nothing(node: Node):
    pid = node.pid(STAGE)
    run = node.deploy()
    assert run.status == 0, run.output
    assert run.changed == {}
    assert node.pid(STAGE) == pid


def test_a_patch_comes_into_force_without_a_reboot_and_what_ran_runs_again(node: Node):
    boot, pid = node.boot_id, node.pid(STAGE)
    node.install(NEW)
    assert "mismatch" in node.smi()
    assert node.pid(STAGE) == pid

    node.lock(NEW)
    run = node.deploy()
    assert run.status == 0, run.output
    assert node.smi() == NEW
    assert node.boot_id == boot
    assert node.is_active(STAGE)
    assert node.is_active("nvidia-fabricmanager")
    assert node.is_active("nvidia-persistenced")
    assert node.mark == ""
    assert node.deploy().changed == {}


def test_who_holds_the_driver_is_named_and_nothing_is_stopped(node: Node):
    node.install(OTHER_BRANCH)
    node.lock(OTHER_BRANCH, reboot="when_needed")
    stage, boot = node.pid(STAGE), node.boot_id
    held = node.sh("systemd-run -q --unit=strange sh -c 'exec 3</dev/nvidia1; exec sleep 99999'; "
                   "sleep 1; systemctl show -P MainPID strange")  # fmt: skip
    run = node.deploy()
    assert run.status == 1
    assert f"process {held} sleep of strange.service" in run.output
    assert node.pid(STAGE) == stage
    assert node.boot_id == boot, "nobody's process is ended by a reboot"
    assert node.mark

    node.sh("systemctl stop strange")
    run = node.deploy()
    assert run.status == 0, run.output
    assert node.smi() == OTHER_BRANCH
    assert node.boot_id == boot
    assert node.is_active(STAGE)


def test_a_node_that_fails_its_check_stays_out_of_service_with_the_reason(node: Node):
    node.install(OLD)
    node.lock(OLD)
    node.gpufleet("lab", "--id", LAB_ID, "fault", NODE, "remap-failed", "--gpu", "3")
    run = node.deploy()
    assert run.status == 1
    assert "row-remap-failed" in run.output
    assert "row-remap-failed" in node.mark
    assert not node.is_active(STAGE)
    # Whoever asks systemd for it, at boot too.
    node.sh(f"systemctl start {STAGE}")
    assert not node.is_active(STAGE)
    # And what would start stages says so instead.
    (node.project / "serve.py").write_text(SERVE)
    run = node.pyinfra("-y", deploy=str(node.project / "serve.py"))
    assert run.status == 1
    assert "the node is out of service" in run.output
    assert "row-remap-failed" in run.output

    node.gpufleet("lab", "--id", LAB_ID, "fault", NODE, "--clear")
    run = node.deploy()
    assert run.status == 0, run.output
    assert node.is_active(STAGE)
    assert node.mark == ""


def test_after_a_power_cut_in_a_reload_the_next_run_converges(node: Node):
    node.install(NEW)
    node.lock(NEW)
    # The stage takes a while to stop, and the power goes meanwhile.
    slow = f"/etc/systemd/system/{STAGE}.d/slow.conf"
    node.sh(f"mkdir -p {slow.rpartition('/')[0]}; echo '[Service]' > {slow}")
    node.sh(f"echo ExecStop=/bin/sleep 20 >> {slow}; systemctl daemon-reload")
    with ThreadPoolExecutor() as pool:
        run = pool.submit(node.deploy)
        kept = "/var/lib/gpufleet/driver-reload.json"
        while not node.sh(f"test -e {kept} && echo there || true") and not run.done():
            time.sleep(0.3)
        assert node.gpufleet("lab", "--id", LAB_ID, "power", NODE, "cycle").status == 0
    assert run.result().status == 1
    assert node.mark
    assert json.loads(node.sh("cat /var/lib/gpufleet/driver-reload.json"))["units"]
    assert not node.is_active(STAGE)

    run = node.deploy()
    assert run.status == 0, run.output
    assert node.smi() == NEW
    assert node.is_active(STAGE)
    assert node.mark == ""
    assert node.deploy().changed == {}
