"""Build a machine's programs as small shell scripts that answer like the real ones. Pure.

The scripts accept only the command lines that the probe uses. Any other command line ends with
status 2 and no output, and never with the output of a different command. The scripts are in
scripts/. This module inserts their answers, one row per line.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lab.machine.parts import Kernel, Machine

SCRIPTS = Path(__file__).parent / "scripts"

# dpkg's name for each machine name of `uname -m`.
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def programs(machine: Machine) -> dict[str, str]:
    """Return each program's absolute path and its text."""
    found = {
        "/usr/bin/journalctl": _script(
            "journalctl",
            (
                f"[{seconds:12.6f}] {machine.hostname} kernel: {text}"
                for seconds, text in machine.log
            ),
            access=machine.log_access,
        ),
        "/usr/bin/dmesg": _script(
            "dmesg",
            (f"[{seconds:12.6f}] {text}" for seconds, text in machine.log),
            access=machine.log_access,
        ),
        "/usr/sbin/modinfo": _script("modinfo", _modules(machine), kernel=machine.kernel),
        "/usr/bin/systemctl": _script("systemctl", _units(machine)),
    }
    if machine.apt:
        arch = _ARCHITECTURES[machine.arch]
        found["/usr/bin/dpkg-query"] = _script("dpkg-query", _packages(machine), arch=arch)
        found["/usr/bin/apt-config"] = _script("apt-config", _apt(machine, arch))
    else:
        found["/usr/bin/rpm"] = _script("rpm", _rpms(machine), arch=machine.arch)
    return found


def _script(name: str, rows: Iterable[str], **words: str) -> str:
    text = (SCRIPTS / name).read_text()
    for word, value in words.items():
        text = text.replace(f"@{word.upper()}@", value)
    return text.replace("@ANSWERS@\n", "".join(f"{row}\n" for row in rows))


def _modules(machine: Machine) -> Iterable[str]:
    for kernel in machine.kernels:
        if kernel.nvidia:
            for field, value in _module_fields(kernel, machine.flavour).items():
                yield f"{kernel.release}\t{field}\t{value}"


def _module_fields(kernel: Kernel, flavour: str) -> dict[str, str]:
    fields = {
        "filename": f"/lib/modules/{kernel.release}/updates/dkms/nvidia.ko",
        "version": kernel.nvidia or "",
        "supported": "external",
        "license": "Dual MIT/GPL" if flavour == "open" else "NVIDIA",
        "vermagic": f"{kernel.release} SMP preempt mod_unload modversions",
    }
    if kernel.signer:
        fields |= {"sig_id": "PKCS#7", "signer": kernel.signer, "sig_hashalgo": "sha512"}
    return fields


def _units(machine: Machine) -> Iterable[str]:
    for name, unit in sorted(machine.units.items()):
        yield f"{name}\t{unit.load}\t{unit.active}\t{unit.sub}\t{unit.enabled}\t{unit.result}"


def _packages(machine: Machine) -> Iterable[str]:
    for name, package in sorted(machine.packages.items()):
        yield f"{name}\t{package.version}\t{'hold' if package.held else 'install'}"


def _rpms(machine: Machine) -> Iterable[str]:
    for name, package in sorted(machine.packages.items()):
        version, _, release = package.version.rpartition("-")
        yield f"{name}\t{version}\t{release}"


def _apt(machine: Machine, arch: str) -> Iterable[str]:
    yield f'APT::Architecture "{arch}";'
    if (upgrades := machine.upgrades) is None:
        return
    switch = int(upgrades.enabled)
    yield 'APT::Periodic "";'
    yield f'APT::Periodic::Update-Package-Lists "{switch}";'
    yield f'APT::Periodic::Unattended-Upgrade "{switch}";'
    yield from _apt_list("Unattended-Upgrade::Allowed-Origins", upgrades.origins)
    yield from _apt_list("Unattended-Upgrade::Package-Blacklist", upgrades.blacklist)


def _apt_list(name: str, values: Iterable[str]) -> Iterable[str]:
    yield f'{name} "";'
    yield from (f'{name}:: "{value}";' for value in values)
