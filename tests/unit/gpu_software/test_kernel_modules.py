"""Every installed kernel has the locked driver's module on its disk, whatever DKMS and apt said."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gpufleet.gpu_software.kernel_modules import (
    build_refusal,
    kernels_without_module,
    module_problems,
)
from gpufleet.node.machine import Machine
from gpufleet.remote import payload
from tests.support.rows import each_row

RUNNING, NEXT = "6.1.0-40-amd64", "6.1.0-41-amd64"
SECONDS = 60
EFI = "sys/firmware/efi/efivars/SecureBoot-8be4df61-93ca-11d2-aa0d-00e098032b8c"

# Stand-ins for programs of the node; ROOT is two directories above them. A kernel's module is a
# file that has its version.
MODINFO = """#!/bin/sh
file="${0%/usr/sbin/*}/lib/modules/$2/nvidia.ko"
[ -e "$file" ] || { echo "modinfo: ERROR: Module nvidia not found." >&2; exit 1; }
printf 'filename:       /lib/modules/%s/nvidia.ko\\nversion:        %s\\n' "$2" "$(cat "$file")"
[ -e "$file.signer" ] && printf 'signer:         %s\\n' "$(cat "$file.signer")"
exit 0
"""
# dkms install -m NAME -v VERSION -k KERNEL
DKMS = """#!/bin/sh
root="${0%/usr/sbin/*}"
[ -e "$root/lib/modules/$7/build" ] || {
    echo "Error! Your kernel headers for kernel $7 cannot be found." >&2; exit 21; }
[ -e "$root/usr/src/$3-$5/broken" ] && {
    mkdir -p "$root/var/lib/dkms/$3/$5/build"
    echo "nv.c:1042: error: implicit declaration" > "$root/var/lib/dkms/$3/$5/build/make.log"
    echo "Consult /var/lib/dkms/$3/$5/build/make.log for more information." >&2; exit 10; }
printf %s "$5" > "$root/lib/modules/$7/nvidia.ko"
"""


class Disk:
    """A node's files, below a folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/sys/kernel/osrelease", RUNNING)
        for kernel in (RUNNING, NEXT):
            self.write(f"lib/modules/{kernel}/modules.dep", "")
            self.write(f"lib/modules/{kernel}/build", "")
        self.program("modinfo", MODINFO)
        self.program("dkms", DKMS)
        self.sources("580.95.05")

    def write(self, path: str, text: str) -> Path:
        at = self.root / path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(text)
        return at

    def program(self, name: str, text: str) -> None:
        self.write(f"usr/sbin/{name}", text).chmod(0o755)

    def sources(self, version: str) -> None:
        text = f'PACKAGE_NAME="nvidia"\nPACKAGE_VERSION="{version}"\n'
        self.write(f"usr/src/nvidia-{version}/dkms.conf", text)

    def module(self, kernel: str, version: str) -> None:
        self.write(f"lib/modules/{kernel}/nvidia.ko", version)

    def has(self, kernel: str) -> str | None:
        path = self.root / f"lib/modules/{kernel}/nvidia.ko"
        return path.read_text() if path.exists() else None

    def ask(self, action: str, **more: Any) -> dict[str, Any]:
        program = payload.program(
            "gpu_software/kernel_modules", action=action, sysroot=str(self.root), **more
        )
        done = subprocess.run(
            [sys.executable, "-I", "-"], input=program, capture_output=True, text=True,
            timeout=SECONDS, check=True, env={"PATH": os.environ["PATH"]},
        )  # fmt: skip
        document: dict[str, Any] = json.loads(done.stdout)
        assert document["error"] == ""
        return document

    def build(self, driver: str = "580.95.05") -> dict[str, Any]:
        kernels = list(kernels_without_module(self.ask("look"), driver))
        return self.ask("build", kernels=kernels, version=driver)


@pytest.fixture
def disk(tmp_path: Path) -> Disk:
    return Disk(tmp_path)


def test_a_kernel_without_module_is_found_whatever_packages_say(disk: Disk) -> None:
    """The packages' script builds for the running kernel alone, and ends well."""
    disk.module(RUNNING, "580.95.05")
    seen = disk.ask("look")

    assert kernels_without_module(seen, "580.95.05") == (NEXT,)
    (problem,) = module_problems(seen, "580.95.05")
    assert f"kernel {NEXT} is installed, boots next and has no NVIDIA module" in problem


def test_a_module_of_another_version_is_none(disk: Disk) -> None:
    disk.module(RUNNING, "580.95.05")
    disk.module(NEXT, "570.124.06")

    assert kernels_without_module(disk.ask("look"), "580.95.05") == (NEXT,)
    assert kernels_without_module(disk.ask("look"), "580") == (NEXT,)
    assert kernels_without_module(disk.ask("look"), "570") == (RUNNING,)


def test_what_lacks_is_built_and_then_nothing_lacks(disk: Disk) -> None:
    disk.module(RUNNING, "570.124.06")
    seen = disk.build()

    assert module_problems(seen, "580.95.05") == ()
    assert [disk.has(kernel) for kernel in (RUNNING, NEXT)] == ["580.95.05"] * 2
    assert kernels_without_module(disk.ask("look"), "580.95.05") == ()


def test_of_a_branch_the_newest_sources_are_built(disk: Disk) -> None:
    """580.178.04 is newer than 580.95.05, although its text sorts before."""
    disk.sources("580.178.04")
    disk.sources("595.91.07")
    disk.build("580")
    assert disk.has(NEXT) == "580.178.04"


def test_without_headers_dkms_says_so_and_the_other_kernel_gets_its_module(disk: Disk) -> None:
    (disk.root / f"lib/modules/{NEXT}/build").unlink()
    seen = disk.build()

    (problem,) = module_problems(seen, "580.95.05")
    assert disk.has(RUNNING) == "580.95.05"
    assert f"headers for kernel {NEXT} cannot be found" in problem


def test_of_a_build_that_fails_the_compilers_words_are_shown(disk: Disk) -> None:
    disk.write("usr/src/nvidia-580.95.05/broken", "")
    found = module_problems(disk.build(), "580.95.05")

    assert len(found) == 2
    assert all("nv.c:1042: error: implicit declaration" in each for each in found)


def test_a_build_that_fails_without_a_word_is_a_failure_with_its_status(disk: Disk) -> None:
    disk.program("dkms", "#!/bin/sh\nexit 7\n")
    found = module_problems(disk.build(), "580.95.05")

    assert len(found) == 2
    assert all("status 7" in each for each in found)


def test_without_sources_there_is_nothing_to_build(disk: Disk) -> None:
    found = module_problems(disk.build("595.91.07"), "595.91.07")
    assert len(found) == 2
    assert all("/usr/src has no sources of NVIDIA's modules of 595.91.07" in each for each in found)


def test_what_dkms_leaves_of_a_removed_kernel_is_no_kernel(disk: Disk) -> None:
    disk.write("lib/modules/6.1.0-39-amd64/updates/dkms/nvidia.ko", "570.124.06")
    for kernel in (RUNNING, NEXT):
        disk.module(kernel, "580.95.05")
    assert module_problems(disk.ask("look"), "580.95.05") == ()


def test_kernels_that_cannot_be_listed_are_not_fine() -> None:
    seen = {"kernels": {"missing": "timeout"}, "secure_boot": False, "enrolled": False}
    assert kernels_without_module(seen, "580") == ()
    (said,) = module_problems(seen, "580")
    assert "could not read which kernels have an NVIDIA module (timeout)" in said


# Secure Boot


def secured(disk: Disk) -> None:
    """Firmware that lets signed modules in, and a key that DKMS signs with."""
    disk.write(EFI, "")
    (disk.root / EFI).write_bytes(b"\x06\x00\x00\x00\x01")
    disk.write("var/lib/dkms/mok.pub", "key")
    for kernel in (RUNNING, NEXT):
        disk.module(kernel, "580.95.05")
        disk.write(f"lib/modules/{kernel}/nvidia.ko.signer", "DKMS module signing key")


def test_signed_modules_whose_key_the_firmware_knows_load(disk: Disk) -> None:
    secured(disk)
    disk.program("mokutil", '#!/bin/sh\necho "$2 is already enrolled"\nexit 1\n')
    seen = disk.ask("look")

    assert (seen["secure_boot"], seen["enrolled"]) == (True, True)
    assert module_problems(seen, "580.95.05") == ()


def test_a_key_that_the_firmware_does_not_know_is_told_apart(disk: Disk) -> None:
    secured(disk)
    disk.program("mokutil", '#!/bin/sh\necho "$2 is not enrolled"\n')
    (problem,) = module_problems(disk.ask("look"), "580.95.05")
    assert "firmware does not know DKMS's signing key" in problem


def test_modules_without_signature_are_told_apart(disk: Disk) -> None:
    secured(disk)
    (disk.root / f"lib/modules/{NEXT}/nvidia.ko.signer").unlink()
    (problem,) = module_problems(disk.ask("look"), "580.95.05")
    assert f"the modules of {NEXT} are not signed" in problem


@each_row(
    ("secure_boot", "policy", "refused"),
    [
        (False, "refuse", False),
        (True, "refuse", True),
        (None, "refuse", True),
        (True, "enrolled", False),
        (None, "enrolled", False),
    ],
)
def test_a_node_whose_firmware_would_not_let_modules_in_is_refused_before(
    secure_boot: bool | None, policy: Any, refused: bool
) -> None:
    """Not known is as good as on: modules that do not load would cost the GPUs."""
    found = build_refusal(Machine(gpus=(0x2330,), secure_boot=secure_boot), policy)
    assert (found is not None) == refused
