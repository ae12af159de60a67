"""Install the operating system packages that the lab needs on this machine.

The lab installs only missing packages, and does not start their services. The lab runs its own
proxy on its own address. After a lab, a machine must not have an additional proxy that listens.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from gpufleet.errors import FleetError
from lab import run_command
from lab.progress import Say, silent, step
from lab.state import CACHE, exclusive

# Debian package -> what the lab uses of it.
NEEDED = {
    "debian-archive-keyring": "checks the base image's packages",
    "dpkg-dev": "builds the vendor repository's index",
    "gcc": "compiles the simulated GPU library",
    "gnupg": "signs the vendor repository",
    "iproute2": "network",
    "libc6-dev": "compiles the simulated GPU library",
    "mmdebstrap": "builds the base image",
    "nftables": "keeps nodes from reaching out; packet loss",
    "openssh-client": "keys, logins",
    "squid": "the nodes' way to Debian packages",
    "systemd-container": "systemd-nspawn runs the nodes",
    "systemd-journal-remote": "writes the nodes' kernel logs",
}

_POLICY = Path("/usr/sbin/policy-rc.d")
_POLICY_MARK = "# put here by the gpufleet lab while it installs packages"


def requirements(needed: Mapping[str, str] = NEEDED) -> list[str]:
    """Return the names of the packages in `needed` that this machine does not have."""
    if not shutil.which("apt-get"):
        raise FleetError(
            "This machine has no apt-get, but the lab runs only on Debian and its derivatives "
            f"(it needs {', '.join(needed)})."
        )
    form = "${db:Status-Status} ${Package}\n"
    listed = run_command.run("dpkg-query", "-W", "-f", form, *needed, check=False)
    have = {line.split()[1] for line in listed.splitlines() if line.startswith("installed ")}
    return sorted(set(needed) - have)


def ensure_packages(say: Say = silent, needed: Mapping[str, str] = NEEDED) -> list[str]:
    """Install the missing packages of `needed`, within minutes, and return their names."""
    # a different lab may be installing these packages
    with exclusive("packages", CACHE, limit=1200):
        _remove_stale_policy()
        missing = requirements(needed)
        if missing:
            _install(missing, say)
    return missing


def _install(missing: list[str], say: Say) -> None:
    with step(f"install {' '.join(missing)}", say), _no_services():
        _apt("update", "-qq")
        _apt("install", "-y", "-qq", "--no-install-recommends", *missing)
        if "squid" in missing:
            _disable("squid")


def _apt(*args: str) -> None:
    # 300 s, because a different package manager may be running. A whole installation took 12 s.
    run_command.run(
        "env",
        "DEBIAN_FRONTEND=noninteractive",
        "apt-get",
        "-oDPkg::Lock::Timeout=300",
        *args,
        limit=1200,
    )


def _disable(service: str) -> None:
    """Keep a package's own service from starting with the machine."""
    disable = ["systemctl", "disable", service]
    subprocess.run(disable, capture_output=True, check=False, timeout=60)


@contextmanager
def _no_services() -> Iterator[None]:
    """Let packages be installed without starting their services (Debian policy 9.3.3.1)."""
    # the machine has its own policy, because containers usually forbid services
    if _POLICY.exists():
        yield
        return
    draft = _POLICY.with_name(".policy-rc.d.new")
    draft.write_text(f"#!/bin/sh\n{_POLICY_MARK}\nexit 101\n")
    draft.chmod(0o755)
    os.link(draft, _POLICY)  # refuses to replace a policy that was created in the meantime
    draft.unlink()
    try:
        yield
    finally:
        _POLICY.unlink()


def _remove_stale_policy() -> None:
    """Remove gpufleet's policy that a killed installation has left."""
    if _POLICY.is_file() and _POLICY_MARK in _POLICY.read_text():
        _POLICY.unlink()
