#!/usr/bin/python3 -I
"""RUNS IN A LAB NODE: simulate module loading on a node that was delivered without a driver.

A node runs on this machine's kernel, which loads no modules. `LOADABLE` (lab/driver/__init__.py)
has the entries that each module would show in /proc and /sys. This program writes the entries into
the machine's tree, which the node sees as its kernel's, and removes them. Its names are:

    modprobe, rmmod     as kmod's, for modules that the node has files of; others are kmod's own
    nvidia-modprobe     makes the device nodes, which are plain files here
    loader.py boot      by lab/node_init.py first of all in a boot: loads what is on the disk

A module cannot be unloaded while a process holds its device, or another module needs it. Standard
library only.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MACHINE = Path("/var/lib/gpufleet-lab/machine")
LOADABLE, LOADED, LOCK = (MACHINE / f"{name}" for name in ("loadable.json", "driver.json", "lock"))
NVML_STATE = Path("/etc/gpufleet-lab/nvml.conf.state")
ENROLLED = MACHINE / "enrolled"  # the signers that the firmware trusts, a line each
KMOD = "/bin/kmod"
NVIDIA_MODPROBE = Path("/usr/bin/nvidia-modprobe")
EFI = MACHINE / "sys/firmware/efi/efivars"

NEEDS = {
    "nvidia_uvm": ("nvidia",),
    "nvidia_modeset": ("nvidia",),
    "nvidia_drm": ("nvidia_modeset",),
    "nvidia_peermem": ("nvidia",),
}
# Which device nodes keep a module in use.
HOLDS = {
    "nvidia": re.compile(r"/dev/nvidia(\d+|ctl|-nvswitch.*|-caps.*)"),
    "nvidia_uvm": re.compile(r"/dev/nvidia-uvm.*"),
    "nvidia_modeset": re.compile(r"/dev/nvidia-modeset"),
}
# Settings of the simulated NVML that the driver stores, and not the hardware.
VOLATILE = re.compile(r"gpu\.[^.]+\.(persistence|computemode|fabric\.state) ")
CONFIGURATION = ("/etc/modprobe.d", "/run/modprobe.d", "/usr/lib/modprobe.d", "/lib/modprobe.d")
BOOT_LISTS = ("/etc/modules-load.d", "/run/modules-load.d", "/usr/lib/modules-load.d")


class RefusedError(Exception):
    """The kernel's refusal, with kmod's text."""


# -- what is loaded --------------------------------------------------------------------------------


def read_loaded() -> dict[str, Any]:
    """Return the modules loaded since boot: {"modules": [...], "version": ..., "flavour": ...}."""
    try:
        found: dict[str, Any] = json.loads(LOADED.read_text())
    except FileNotFoundError:
        found = {"modules": [], "version": None, "flavour": "open"}
    return found


def remember(state: dict[str, Any]) -> None:
    """Write the loaded modules for the lab and the next call, and show them in /proc/modules."""
    draft = LOADED.with_suffix(".new")
    draft.write_text(json.dumps(state))
    draft.rename(LOADED)
    names = sorted({*json.loads(LOADABLE.read_text())["modules"], *state["modules"]})
    # Written in place, because the file may be bound over the kernel's, and a bind stays on its
    # file.
    with (MACHINE / "proc/modules").open("r+") as file:
        file.truncate()
        file.write("".join(f"{name} 16384 0 - Live 0x0000000000000000\n" for name in names))


@contextmanager
def hold_lock() -> Iterator[None]:
    """Hold the lock for all changes of modules."""
    with LOCK.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


# -- loading ---------------------------------------------------------------------------------------


def file_of(name: str) -> Path | None:
    """Return the running kernel's file of a module."""
    folder = Path("/lib/modules", os.uname().release)
    names = {f"{name}.ko", f"{name.replace('_', '-')}.ko"}
    found = (path for path in folder.rglob("*.ko") if path.name in names)
    return next(found, None)


def load(name: str) -> None:
    """Load a module and its dependencies. Raises `RefusedError` with kmod's text."""
    state = read_loaded()
    if name in state["modules"] or name in json.loads(LOADABLE.read_text())["modules"]:
        return
    path = file_of(name)
    if path is None:
        folder = f"/lib/modules/{os.uname().release}"
        raise RefusedError(f"FATAL: Module {name} not found in directory {folder}")
    if not trusted(path):
        raise RefusedError(f"ERROR: could not insert '{name}': Key was rejected by service")
    for needed in NEEDS.get(name, ()):
        load(needed)
    state = read_loaded()
    state["modules"] = sorted([*state["modules"], name])
    if name == "nvidia":
        fields = modinfo(path)
        flavour = "open" if "GPL" in fields.get("license", "") else "proprietary"
        if any(entries("nouveau")) and "nouveau" in state["modules"]:
            raise RefusedError(f"ERROR: could not insert '{name}': No such device")
        state["version"], state["flavour"] = fields["version"], flavour
    for at, entry in entries(name, state).items():
        put(at, entry)
    remember(state)
    if name == "nvidia" and NVIDIA_MODPROBE.exists():
        device_nodes()  # as udev does when the module appears


def entries(name: str, state: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return a module's entries by path: a text, {"to": ...} for a link, None for a directory."""
    kind = f"nvidia-{state['flavour']}" if state and name == "nvidia" else name
    own: dict[str, Any] = json.loads(LOADABLE.read_text())["shows"].get(kind, {})
    version = (state or {}).get("version") or ""
    shown = {
        path: entry.replace("@VERSION@", version) if isinstance(entry, str) else entry
        for path, entry in own.items()
    }
    if state:
        at = f"/sys/module/{name}"
        shown |= {f"{at}/initstate": "live\n", f"{at}/refcnt": "0\n", f"{at}/holders": None}
        if name == "nvidia":
            shown["/proc/driver/nvidia/params"] = parameters()
    return shown


def put(path: str, entry: Any) -> None:
    """Write one entry into the machine's tree."""
    at = MACHINE / path.lstrip("/")
    if entry is None:
        at.mkdir(parents=True, exist_ok=True)
        return
    at.parent.mkdir(parents=True, exist_ok=True)
    at.unlink(missing_ok=True)
    if isinstance(entry, dict):
        at.symlink_to(entry["to"])
    else:
        at.write_text(entry)


def modinfo(path: Path) -> dict[str, str]:
    """Return the fields of a module's file, its strings KEY=VALUE."""
    rows = (part.decode(errors="replace") for part in path.read_bytes().split(b"\0"))
    pairs = (row.partition("=") for row in rows if re.match(r"[a-z]+=", row))
    return {key: value for key, _, value in pairs}


def trusted(path: Path) -> bool:
    """Return whether the kernel accepts the module; Secure Boot requires an enrolled signer."""
    switches = list(EFI.glob("SecureBoot-*"))
    if not switches or switches[0].read_bytes()[-1] != 1 or "/kernel/" in str(path):
        return True
    said = subprocess.run(
        ["/sbin/modinfo", "-F", "signer", str(path)], capture_output=True, text=True, check=False
    )
    trusted_ones = ENROLLED.read_text().splitlines() if ENROLLED.exists() else []
    return said.stdout.strip() in trusted_ones


# -- unloading -------------------------------------------------------------------------------------


def unload(name: str) -> None:
    """Unload a module. Raises `RefusedError` with kmod's text while it is in use."""
    state = read_loaded()
    if name not in state["modules"]:
        raise RefusedError(f"ERROR: Module {name} is not currently loaded")
    above = [each for each in state["modules"] if name in NEEDS.get(each, ())]
    if above:
        raise RefusedError(f"ERROR: Module {name} is in use by: {' '.join(above)}")
    # nouveau also draws the console, so the console keeps it in use.
    if name == "nouveau" or any(holders(name)):
        raise RefusedError(f"ERROR: Module {name} is in use")
    take_away(name, state)
    remember(state)


def take_away(name: str, state: dict[str, Any]) -> None:
    """Remove a module's entries, and the module from the loaded ones."""
    for path in entries(name, state):
        at = MACHINE / path.lstrip("/")
        if at.is_symlink() or at.is_file():
            at.unlink()
    state["modules"].remove(name)
    shutil.rmtree(MACHINE / "sys/module" / name, ignore_errors=True)
    if name == "nvidia":
        shutil.rmtree(MACHINE / "proc/driver/nvidia", ignore_errors=True)
        state["version"] = None
        forget_settings()
    for driver in (name, f"{name}-nvswitch"):
        shutil.rmtree(MACHINE / "sys/bus/pci/drivers" / driver, ignore_errors=True)


def forget_settings() -> None:
    """Forget the settings that the driver holds; settings stored by the boards stay."""
    try:
        lines = NVML_STATE.read_text().splitlines(keepends=True)
    except FileNotFoundError:
        return
    draft = NVML_STATE.with_suffix(".new")
    draft.write_text("".join(line for line in lines if not VOLATILE.match(line)))
    draft.rename(NVML_STATE)


def holders(name: str) -> Iterator[int]:
    """Yield the processes that have a device of the module open."""
    device = HOLDS.get(name)
    for folder in Path("/proc").glob("[0-9]*/fd") if device else ():
        try:
            names = [str(link.readlink()) for link in folder.iterdir()]
        except OSError:  # it has ended meanwhile
            continue
        if any(device and device.fullmatch(each) for each in names):
            yield int(folder.parent.name)


# -- configuration ---------------------------------------------------------------------------------


def configuration(folders: tuple[str, ...]) -> Iterator[list[str]]:
    """Yield the words of every line; for equal file names, the first folder's file counts."""
    seen: dict[str, Path] = {}
    for folder in folders:
        for path in sorted(Path(folder).glob("*.conf")):
            seen.setdefault(path.name, path)
    for path in seen.values():
        for line in path.read_text(errors="replace").splitlines():
            words = line.split()
            if words and not words[0].startswith(("#", ";")):
                yield words


def blacklisted(name: str) -> bool:
    """Return whether the module must not be loaded for its hardware."""
    return any(
        words[0] in ("blacklist", "install") and words[1:2] == [name]
        for words in configuration(CONFIGURATION)
    )


def parameters() -> str:
    """Return /proc/driver/nvidia/params, the options with which the module was loaded."""
    given: dict[str, str] = {}
    for words in configuration(CONFIGURATION):
        if words[:2] == ["options", "nvidia"]:
            pairs = (word.removeprefix("NVreg_").partition("=") for word in words[2:])
            given.update({name: value for name, _, value in pairs})
    return "".join(f"{name}: {value}\n" for name, value in sorted(given.items()))


# -- device nodes ----------------------------------------------------------------------------------


def device_nodes(*further: str) -> None:
    """Create the device nodes of every GPU and NVSwitch, and `further` ones."""
    known = json.loads(LOADABLE.read_text())
    gpus, switches = range(known["gpus"]), range(known["switches"])
    names = ["nvidiactl", *(f"nvidia{number}" for number in gpus), *further]
    if switches:
        names += ["nvidia-nvswitchctl", *(f"nvidia-nvswitch{number}" for number in switches)]
    for name in names:
        node = Path("/dev", name)
        node.touch(exist_ok=True)
        node.chmod(0o666)


# -- programs --------------------------------------------------------------------------------------


def boot() -> None:
    """Unload all modules, then load those of a booting machine."""
    state = read_loaded()
    for name in list(state["modules"]):
        take_away(name, state)
    remember({"modules": [], "version": None, "flavour": "open"})
    forget_settings()
    asked = [words[0] for words in configuration(BOOT_LISTS)]
    found = [name for name in ("nouveau", "nvidia") if file_of(name) and not blacklisted(name)]
    for name in [*found, *asked]:
        try:
            load(name.replace("-", "_"))
        except RefusedError as refused:
            sys.stderr.write(f"loader: {refused}\n")  # the console


def is_simulated(name: str) -> bool:
    """Return whether this program handles the module instead of kmod."""
    shown = json.loads(LOADABLE.read_text())
    return name in NEEDS or name in ("nvidia", "nouveau", *shown["modules"]) or bool(file_of(name))


def modprobe(arguments: list[str]) -> None:
    """Load, or with -r unload, like modprobe(8)."""
    flags = [each for each in arguments if each.startswith("-")]
    names = [each.replace("-", "_") for each in arguments if not each.startswith("-")]
    removes = bool({"-r", "--remove"} & set(flags))
    understood = {"-r", "--remove", "-a", "--all", "-q", "--quiet", "-b", "--use-blacklist"}
    if not names or not set(flags) <= understood or not is_simulated(names[0]):
        os.execv(KMOD, ["modprobe", *arguments])
    if not {"-a", "--all"} & set(flags) and not removes:
        names = names[:1]  # the rest are the module's parameters
    for name in names:
        if {"-b", "--use-blacklist"} & set(flags) and blacklisted(name):
            continue
        if removes and name not in read_loaded()["modules"]:
            continue
        (unload if removes else load)(name)


def rmmod(arguments: list[str]) -> None:
    """Unload like rmmod(8)."""
    for name in (each.replace("-", "_") for each in arguments if not each.startswith("-")):
        unload(name)


def nvidia_modprobe(arguments: list[str]) -> None:
    """Load the driver and create its device nodes; -u is for CUDA's memory, -m for modesetting."""
    load("nvidia")
    text = "".join(each[1:] for each in arguments if re.match(r"-[a-z]", each))
    if "u" in text or "--unified-memory" in arguments:
        load("nvidia_uvm")
        device_nodes("nvidia-uvm", "nvidia-uvm-tools")
    if "m" in text or "--modeset" in arguments:
        load("nvidia_modeset")
        device_nodes("nvidia-modeset")
    device_nodes()


def main() -> None:
    """Run as the program in argv[0]."""
    program, arguments = Path(sys.argv[0]).name, sys.argv[1:]
    programs = {"modprobe": modprobe, "rmmod": rmmod, "nvidia-modprobe": nvidia_modprobe}
    try:
        with hold_lock():
            if program in programs:
                programs[program](arguments)
            elif arguments == ["boot"]:
                boot()
    except RefusedError as refused:
        if not {"-q", "--quiet"} & set(arguments):
            sys.stderr.write(f"{program}: {refused}\n")
        sys.exit(1)


if __name__ == "__main__":
    main()
