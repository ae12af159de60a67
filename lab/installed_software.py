"""Install the software of a lab node's machine: kernels, units, packages, apt's settings.

The node then has this software like any other. It is written once. Later runs rewrite only the
parts that a fault has changed, so changes by an administrator or a deploy stay. The packages
contain no programs, the units run `sleep`, and the kernel modules have a description but cannot be
loaded.
"""

from __future__ import annotations

import json
import platform
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lab import driver, fake_dpkg, fake_kernel_module, run_command
from lab.fake_kernel_log import MACHINE
from lab.machine import Machine, Unit
from lab.state import write
from lab.vendor import kernels

# systemctl's verbs, in their order -> units; empty if no action is necessary.
Units = dict[str, list[str]]

# A deploy installs these packages, so a node is delivered without them.
_DEPLOYED_UNITS = {"nvidia-dcgm.service"}
_DEPLOYED_PACKAGES = re.compile(r"datacenter-gpu-manager.*")

_DELIVERED = "delivered.json"  # the software as it was last written
_UNITS = Path("usr/lib/systemd/system")
_WANTED = "multi-user.target.wants"
_ENABLED = Path("etc/systemd/system") / _WANTED
# Names that Debian's unattended-upgrades package has.
_PERIODIC = Path("etc/apt/apt.conf.d/20auto-upgrades")
_UPGRADES = Path("etc/apt/apt.conf.d/50unattended-upgrades")

# Commands that end with this value of systemd's `Result=`. A successful unit does not end.
_ENDS = {"exit-code": "/usr/bin/false", "signal": "/bin/sh -c 'kill -KILL $$$$'"}

# dpkg's name for each machine name of `uname -m`.
_ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


def deliver(root: Path, machine: Machine, *, dkms: bool = False) -> Units:
    """
    Write the changed parts of its machine's software to the root of a node.

    With `dkms`, the node builds its drivers itself, and so has dkms, kernel headers and nouveau.

    Returns the actions that a running node's systemd must take. If a call was killed, the next call
    completes it.
    """
    record = root / MACHINE / _DELIVERED
    before = json.loads(record.read_text()) if record.exists() else {}
    now = described(machine)
    if dkms:
        now["packages"]["dkms"] = {"version": driver.DKMS_VERSION, "held": False}
        for name, package in now["packages"].items():
            package["files"] = _of_the_distribution(name)
        now["kernels"] = {
            release: {**kernel, "headers": True} for release, kernel in now["kernels"].items()
        }

    def each(kind: str) -> dict[str, Any]:
        """Yield every entry of a kind that changed; None for one that was removed."""
        old, new = before.get(kind, {}), now[kind]
        changed = sorted(name for name in {*old, *new} if old.get(name) != new.get(name))
        return {name: new.get(name) for name in changed}

    for release, kernel in each("kernels").items():
        _kernel(root, release, kernel)
    for path, text in each("files").items():
        if text is None:
            (root / path).unlink(missing_ok=True)
        else:
            write(root / path, text)
    fake_dpkg.enter(
        root,
        {name: entry and fake_dpkg.Entry(**entry) for name, entry in each("packages").items()},
        _ARCHITECTURES[platform.machine()],
    )
    units = each("units")
    for name, state in units.items():
        _unit(root, name, state and Unit(**state))
    write(record, json.dumps(now, indent=1))
    return _verbs(units)


def all_units(machine: Machine) -> Units:
    """Return systemd's actions for every unit, regardless of changes."""
    return _verbs(described(machine)["units"])


def described(machine: Machine) -> dict[str, dict[str, Any]]:
    """Return the machine's software as JSON data, by kind and name."""
    packages = {
        name: {"version": each.version, "held": each.held}
        for name, each in machine.packages.items()
        if not _DEPLOYED_PACKAGES.fullmatch(name)
    }
    units = {
        name: vars(unit)
        for name, unit in machine.units.items()
        if unit.load == "loaded" and name not in _DEPLOYED_UNITS
    }
    kernels = {
        each.release: {"nvidia": each.nvidia, "signer": each.signer, "licence": _licence(machine)}
        for each in machine.kernels
    }
    return {"kernels": kernels, "files": _apt(machine), "packages": packages, "units": units}


def _licence(machine: Machine) -> str:
    return "Dual MIT/GPL" if machine.flavour == "open" else "NVIDIA"


# -- kernels ---------------------------------------------------------------------------------------


def _kernel(root: Path, release: str, kernel: Mapping[str, Any] | None) -> None:
    """Install a kernel's modules directory, as far as kmod reads it, or remove it."""
    folder = root / "lib/modules" / release
    if kernel is None:
        shutil.rmtree(folder, ignore_errors=True)
        return
    write(folder / "modules.builtin", "kernel/fs/ext4/ext4.ko\n")
    write(folder / "modules.order", "")
    if kernel.get("headers"):
        _kernel_packages(root, release)
    module = folder / "updates/dkms/nvidia.ko"
    module.parent.mkdir(parents=True, exist_ok=True)
    module.unlink(missing_ok=True)
    if version := kernel["nvidia"]:
        fields = (
            ("version", version),
            ("supported", "external"),
            ("license", str(kernel["licence"])),
            ("name", "nvidia"),
            ("vermagic", f"{release} SMP preempt mod_unload modversions"),
        )
        draft = module.with_name("nvidia.new")
        draft.write_bytes(fake_kernel_module.image(fields, platform.machine(), kernel["signer"]))
        draft.rename(module)
    run_command.run("chroot", root, "depmod", release)


def _kernel_packages(root: Path, release: str) -> None:
    """Add the files of a distribution's kernel and its headers."""
    text = kernels.header_files(release)
    files = kernels.image_files(release) | {path: each.encode() for path, each in text.items()}
    for path, content in files.items():
        target = root / path.lstrip("/")
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    at, to = kernels.header_link(release)
    link = root / at.lstrip("/")
    if not link.is_symlink():
        link.symlink_to(to)


def _of_the_distribution(name: str) -> tuple[str, ...]:
    """Return the files of a distribution's package, for their removal."""
    kind, _, release = name.removeprefix("linux-").partition("-")
    if kind != "headers":
        return ()
    return (*kernels.header_files(release), kernels.header_link(release)[0])


# -- units -----------------------------------------------------------------------------------------


def _unit(root: Path, name: str, unit: Unit | None) -> None:
    """Install a unit that has this state after boot, or remove it."""
    static, enabled = root / _UNITS / _WANTED / name, root / _ENABLED / name
    for link in (static, enabled):
        link.unlink(missing_ok=True)
    if unit is None:
        (root / _UNITS / name).unlink(missing_ok=True)
        return
    write(root / _UNITS / name, unit_text(name, unit))
    # A unit without [Install] section can only be enabled by the distribution's own link.
    for link, wanted in ((static, unit.enabled == "static"), (enabled, unit.enabled == "enabled")):
        if wanted:
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(f"/{_UNITS / name}")


def unit_text(name: str, unit: Unit) -> str:
    """Return the unit's file, which runs, fails or is skipped like `unit`."""
    lines = ["[Unit]", f"Description=The simulated machine's {name.removesuffix('.service')}"]
    if unit.active == "inactive" and unit.enabled in ("enabled", "static"):
        lines.append("ConditionPathExists=!/")
    lines += ["", "[Service]", "Type=exec"]
    lines.append(f"ExecStart={_ENDS.get(unit.result, '/usr/bin/sleep infinity')}")
    if unit.enabled != "static":
        lines += ["", "[Install]", "WantedBy=multi-user.target"]
    return "\n".join([*lines, ""])


def _verbs(units: Mapping[str, Mapping[str, str] | None]) -> Units:
    """Return systemd's actions for the units that have changed."""
    verbs: Units = {"stop": [], "reset-failed": [], "start": []}
    for name, state in units.items():
        verbs["stop"].append(name)
        verbs["reset-failed"].append(name)
        if state and state["active"] != "inactive":
            verbs["start"].append(name)
    return {verb: names for verb, names in verbs.items() if names}


# -- apt -------------------------------------------------------------------------------------------


def _apt(machine: Machine) -> dict[str, str]:
    """Return the settings of unattended-upgrades as apt configuration."""
    if (upgrades := machine.upgrades) is None:
        return {}
    switch = int(upgrades.enabled)
    names = ("Update-Package-Lists", "Unattended-Upgrade")
    return {
        str(_PERIODIC): "".join(f'APT::Periodic::{name} "{switch}";\n' for name in names),
        str(_UPGRADES): _apt_list("Allowed-Origins", upgrades.origins)
        + _apt_list("Package-Blacklist", upgrades.blacklist),
    }


def _apt_list(name: str, values: tuple[str, ...]) -> str:
    rows = "".join(f'    "{value}";\n' for value in values)
    return f"Unattended-Upgrade::{name} {{\n{rows}}};\n"
