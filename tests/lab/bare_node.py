"""A node of the lab with GPUs and nothing of NVIDIA's, and how a test sees what it becomes.

What a test asserts is read by other roads than the code under test takes: dpkg, the kernel's own
files, `nvidia-smi`, over plain ssh.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import yaml

from lab import vendor
from lab.base_image import recipe
from lab.nodes import Lab
from tests.lab.conftest import Fleet

NODE = "gpu-01"
DEPLOY = "deploys/node.py"
DCGM = {"version": "1:4.6.0-1", "exporter": "4.8.2-1"}


@dataclass(frozen=True)
class Triple:
    """The versions that have to be one: loaded module, NVML's library, running fabric manager."""

    module: str
    library: str
    fabric_manager: str

    @property
    def is_one(self) -> bool:
        return len({self.module, self.library, self.fabric_manager}) == 1


@dataclass
class BareNode(Fleet):
    """A lab with one node, and the variables that its deploys go by."""

    def lock(self, driver: str, **more: Any) -> None:
        """Have the next deploy bring this driver."""
        written = {
            "cuda": {"repository": self.repository},
            "gpu_lock": {"driver": driver, "dcgm": DCGM, **more},
            "gpu": {"reboot": "when_needed", "reboot_seconds": 120},
        }
        (self.project / "group_vars/bare.yml").write_text(yaml.safe_dump(written))

    @cached_property
    def repository(self) -> dict[str, str]:
        """The vendor's repository as variables name it; it is built when it is first asked for."""
        found = vendor.build(self.state.dir, self.state.mirror_url)
        return {
            "url": found.url,
            "keyring": found.keyring,
            "keyring_sha256": found.keyring_sha256,
        }

    @property
    def inventory(self) -> str:
        return str(self.project / "inventories/bare.py")

    def deploy(self, *arguments: str, seconds: int = 600):
        """Run the one command."""
        return self.pyinfra("-y", *arguments, deploy=DEPLOY, seconds=seconds)

    def begin(self) -> subprocess.Popen[bytes]:
        """Start it and return at once: to be interrupted."""
        return self.popen(deploy=DEPLOY)

    def sh(self, command: str, seconds: int = 60) -> str:
        return self.ssh(NODE, command, seconds).strip()

    def triple(self) -> Triple:
        """Return the versions, "" for what is not there or does not run."""
        smi = "nvidia-smi --query-gpu=driver_version --format=csv,noheader 2>/dev/null"
        package = "dpkg-query -W -f '${Version}' nvidia-fabricmanager 2>/dev/null"
        text = self.sh(
            "echo module=$(cat /sys/module/nvidia/version 2>/dev/null); "
            f"echo library=$({smi} | sort -u); "
            f"systemctl -q is-active nvidia-fabricmanager && echo fabric=$({package}); true"
        )
        found = dict(line.split("=", 1) for line in text.splitlines())
        return Triple(found["module"], found["library"], found.get("fabric", "").rpartition("-")[0])

    def installed(self, pattern: str) -> dict[str, str]:
        """Return {package: version} of what dpkg has fully installed, by a pattern of names."""
        text = self.sh(
            "dpkg-query -W -f '${db:Status-Abbrev} ${Package} ${Version}\\n' "
            f"'{pattern}' 2>/dev/null || true"
        )
        rows = (line.split() for line in text.splitlines())
        return {row[1]: row[2] for row in rows if row[0][1] == "i"}

    def held(self) -> set[str]:
        return set(self.sh("apt-mark showhold").split())

    def boot_id(self) -> str:
        return self.sh("cat /proc/sys/kernel/random/boot_id")

    def is_marked(self) -> str:
        """Return why the node is out of service, "" if it is not."""
        return self.sh("cat /var/lib/gpufleet/unchecked 2>/dev/null || true")

    def written(self) -> str:
        """Return what grows with every package command that writes."""
        return self.sh("cat /var/log/dpkg.log /var/log/apt/history.log | sha256sum")

    def broken_packages(self) -> str:
        """Return what dpkg itself finds unfinished."""
        return self.sh("dpkg --audit")


@contextmanager
def bare_node(lab_id: str, project: Path, profile: str = "h100x8") -> Iterator[BareNode]:
    """
    Give a lab with one node that has no driver; it is gone afterwards.

    GPUFLEET_KEEP_LAB keeps it, which saves a minute while a test is written.
    """
    lab = Lab.open(lab_id, print)
    keep = bool(os.environ.get("GPUFLEET_KEEP_LAB"))
    if not keep:
        lab.purge()  # what a killed run left
    lab.up({NODE: profile}, without_driver=[NODE])
    for folder in ("inventories", "group_vars"):
        (project / folder).mkdir()
    (project / "inventories/bare.py").write_text(
        "from gpufleet import inventory\nfrom lab.inventory import groups\n"
        "globals().update(inventory.load(__file__, groups=groups()))\n"
    )
    yield BareNode(Lab.open(lab_id, print), project)
    if not keep:
        lab.purge()


def archives(fleet: Fleet) -> list[dict[str, Any]]:
    """
    Return where the lab's own apt takes packages from, as `mirror.archives` names it.

    The headers of this machine's kernel come with the vendor's repository, which signs them.
    """
    of_debian = [
        {
            "url": url.rstrip("/"),
            "suites": [suite],
            "components": components,
            "key_file": signed.removeprefix("[signed-by=").removesuffix("]"),
        }
        for _, signed, url, suite, *components in (line.split() for line in recipe().sources)
    ]
    key = fleet.project / "kernels.gpg"
    key.write_bytes((fleet.state.dir / "vendor/signing-key.gpg").read_bytes())
    kernels = {"url": f"{fleet.state.mirror_url}/kernels", "suites": ["/"], "key_file": str(key)}
    return [*of_debian, kernels]


def vendor_state(node: BareNode, state: str) -> None:
    """Have the vendor's repository be as `gpufleet lab vendor STATE` makes it."""
    done = node.gpufleet("lab", "--id", node.state.id, "vendor", state)
    assert done.status == 0, done.output
