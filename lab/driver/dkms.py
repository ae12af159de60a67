#!/usr/bin/python3 -I
"""RUNS IN A LAB NODE: dkms(8), whose builds write modules with only their description.

Its states, directories, exit statuses and output are those of Debian 12's dkms, as far as a deploy
uses them. A build needs the kernel's headers, and fails like with a compiler if the sources have a
file `broken` or the node has `FAILS`. Standard library only.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

sys.path.insert(0, "/usr/lib/gpufleet-lab")
import fake_kernel_module  # type: ignore[import-not-found]

TREE, SOURCES, MODULES = Path("/var/lib/dkms"), Path("/usr/src"), Path("/lib/modules")
FAILS = Path("/etc/gpufleet-lab/dkms-fails")  # empty, or the kernels for which builds fail
SECONDS = Path("/etc/gpufleet-lab/dkms-seconds")  # how long a build takes
ARCH = os.uname().machine
SIGNER = "DKMS module signing key"  # of the key that Debian's dkms makes, which no firmware knows

# Exit statuses of dkms 3.0.10.
NO_SOURCE, ALREADY_ADDED, BUILD_FAILED, NO_HEADERS, NOT_THERE = 2, 3, 10, 21, 3


@dataclass(frozen=True)
class Module:
    """One version of one package of modules."""

    name: str
    version: str

    @property
    def home(self) -> Path:
        """Return the directory of dkms' state for the module."""
        return TREE / self.name / self.version

    @property
    def source(self) -> Path:
        """Return the directory of the package's sources."""
        return SOURCES / f"{self.name}-{self.version}"

    def built(self, kernel: str) -> Path:
        """Return the directory of the module's built files for a kernel."""
        return self.home / kernel / ARCH / "module"

    def mark(self, kernel: str) -> Path:
        """Return the link with the version that is installed for a kernel."""
        return TREE / self.name / f"kernel-{kernel}-{ARCH}"

    def installed(self, kernel: str) -> bool:
        """Return whether this version is installed for a kernel."""
        mark = self.mark(kernel)
        return mark.is_symlink() and mark.readlink().parts[0] == self.version

    def files(self) -> list[str]:
        """Return the names of its modules, from its dkms.conf."""
        text = (self.home / "source/dkms.conf").read_text()
        return re.findall(r'^BUILT_MODULE_NAME\[\d+\]="?([\w-]+)"?', text, re.MULTILINE)


def say(text: str) -> None:
    """Print a line at once, because dpkg's own lines come in between."""
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def fail(status: int, said: str) -> NoReturn:
    """Print an error and exit like dkms."""
    sys.stderr.write(f"Error! {said}\n")
    sys.exit(status)


def add(module: Module) -> None:
    """Register the sources."""
    if not (module.source / "dkms.conf").is_file():
        fail(NO_SOURCE, f"Could not find module source directory.\nDirectory: {module.source}")
    if module.home.exists():
        return
    module.home.mkdir(parents=True)
    (module.home / "source").symlink_to(module.source)
    say(f"Creating symlink {module.home}/source -> {module.source}")


def build(module: Module, kernel: str) -> None:
    """Write the modules' files for a kernel."""
    if module.built(kernel).exists():
        return
    if not (MODULES / kernel / "build").exists():
        fail(
            NO_HEADERS,
            f"Your kernel headers for kernel {kernel} cannot be found at "
            f"/lib/modules/{kernel}/build or /lib/modules/{kernel}/source.",
        )
    say("Building module:\nCleaning build area...")
    if SECONDS.exists():
        time.sleep(float(SECONDS.read_text()))
    work = module.home / "build"
    shutil.rmtree(work, ignore_errors=True)
    work.mkdir()
    if refuses(module, kernel):
        log = work / "make.log"
        log.write_text(
            f"DKMS make.log for {module.name}-{module.version} for kernel {kernel} ({ARCH})\n"
            "nv.c:1042:9: error: implicit declaration of function 'vm_flags_set'\n"
            "make: *** [Makefile:82: modules] Error 2\n"
        )
        fail(
            BUILD_FAILED,
            f"Bad return status for module build on kernel: {kernel} ({ARCH})\n"
            f"Consult {log} for more information.",
        )
    licence = (module.source / "LICENCE").read_text().strip()
    for name in module.files():
        fields = (
            ("version", module.version),
            ("supported", "external"),
            ("license", licence),
            ("name", name.replace("-", "_")),
            ("vermagic", f"{kernel} SMP preempt mod_unload modversions"),
        )
        (work / f"{name}.ko").write_bytes(fake_kernel_module.image(fields, ARCH, SIGNER))
    module.built(kernel).parent.mkdir(parents=True, exist_ok=True)
    work.rename(module.built(kernel))


def refuses(module: Module, kernel: str) -> bool:
    """Return whether a compiler would refuse the sources."""
    if (module.source / "broken").exists():
        return True
    kernels = FAILS.read_text().split() if FAILS.exists() else None
    return kernels is not None and (not kernels or kernel in kernels)


def install(module: Module, kernel: str) -> None:
    """Install the modules in the kernel's directory."""
    add(module)
    build(module, kernel)
    if module.installed(kernel):
        return
    target = MODULES / kernel / "updates/dkms"
    target.mkdir(parents=True, exist_ok=True)
    for source in sorted(module.built(kernel).glob("*.ko")):
        draft = target / f".{source.name}.new"
        shutil.copyfile(source, draft)
        draft.rename(target / source.name)
        say(f"{source.name}:\n - Installation\n   - Installing to {target}/")
    mark = module.mark(kernel)
    mark.unlink(missing_ok=True)
    mark.symlink_to(f"{module.version}/{kernel}/{ARCH}")
    depmod(kernel)


def uninstall(module: Module, kernel: str) -> None:
    """Remove the modules from the kernel's directory; built files stay."""
    if not module.installed(kernel):
        return
    for name in module.files():
        (MODULES / kernel / "updates/dkms" / f"{name}.ko").unlink(missing_ok=True)
    module.mark(kernel).unlink()
    depmod(kernel)


def remove(module: Module, kernel: str | None) -> None:
    """Remove the module for a kernel, or for all kernels."""
    if not module.home.exists():
        fail(
            NOT_THERE,
            "There are no instances of module: "
            f"{module.name}\n{module.version} located in the DKMS tree.",
        )
    for each in [kernel] if kernel else kernels_of(module):
        uninstall(module, each)
        shutil.rmtree(module.home / each, ignore_errors=True)
    if not kernels_of(module):
        shutil.rmtree(module.home)
        say(f"Deleting module {module.name}-{module.version} completely from the DKMS tree.")


def depmod(kernel: str) -> None:
    """Index the kernel's modules."""
    subprocess.run(["/sbin/depmod", kernel], check=True, stderr=subprocess.DEVNULL)


def kernels_of(module: Module) -> list[str]:
    """Return the kernels for which the module was built."""
    return sorted(path.parent.parent.name for path in module.home.glob(f"*/{ARCH}/module"))


def modules() -> Iterator[Module]:
    """Yield every registered version of every module."""
    for path in sorted(TREE.glob("*/*/source")):
        yield Module(path.parent.parent.name, path.parent.name)


def status(wanted: Module | None) -> None:
    """Print a line for each module and kernel, like dkms 3."""
    for module in modules():
        if wanted and (module.name != wanted.name or wanted.version not in ("", module.version)):
            continue
        kernels = kernels_of(module)
        for kernel in kernels:
            state = "installed" if module.installed(kernel) else "built"
            say(f"{module.name}/{module.version}, {kernel}, {ARCH}: {state}")
        if not kernels:
            say(f"{module.name}/{module.version}: added")


def autoinstall(kernel: str) -> None:
    """Install the newest version of every module for a kernel."""
    newest = {module.name: module for module in modules()}
    for module in newest.values():
        if not (MODULES / kernel / "build").exists():
            say(f"Headers for kernel {kernel} are missing: {module.name} was not built.")
            continue
        install(module, kernel)


def arguments() -> argparse.Namespace:
    """Parse the options that packages and users use."""
    parser = argparse.ArgumentParser(prog="dkms", allow_abbrev=False)
    verbs = ("add", "build", "install", "uninstall", "remove", "status", "autoinstall")
    parser.add_argument("verb", choices=verbs)
    parser.add_argument("module", nargs="?", default="")
    parser.add_argument("-m", dest="name", default="")
    parser.add_argument("-v", dest="version", default="")
    parser.add_argument("-k", dest="kernel", default="")
    parser.add_argument("-a", "--arch")
    parser.add_argument("--all", action="store_true")
    for accepted in ("-q", "--quiet", "--force", "--no-depmod"):
        parser.add_argument(accepted, action="store_true", dest="accepted")
    return parser.parse_args()


def main() -> None:
    """Run one verb."""
    asked = arguments()
    name, _, version = asked.module.partition("/")
    module = Module(asked.name or name, asked.version or version)
    kernel = asked.kernel or os.uname().release
    if asked.verb == "status":
        status(module if module.name else None)
    elif asked.verb == "autoinstall":
        autoinstall(kernel)
    elif asked.verb == "add":
        add(module)
    elif asked.verb == "build":
        add(module)
        build(module, kernel)
    elif asked.verb == "install":
        install(module, kernel)
    elif asked.verb == "uninstall":
        uninstall(module, kernel)
    else:
        remove(module, None if asked.all else kernel)


if __name__ == "__main__":
    main()
