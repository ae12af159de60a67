"""Make a lab node show the kernel, the driver and the packages of its hardware profile.

`place` writes a `lab.machine.Machine` into the node's root; `follow` makes a running node see it.

The kernel's view (PCI bus, modules, RDMA, EFI, IOMMU groups, memory) is in a separate tree, which
lab/node_init.py binds over /proc and /sys. Each `place` corrects the whole tree. So a fault stays
through reboots until it is cleared, and the next `place` completes a killed one.
"""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from gpufleet.errors import FleetError
from lab import (
    cgroup,
    driver,
    fake_kernel_log,
    gpu_simulator,
    installed_software,
    node_init,
    run_command,
    syscall_shim,
)
from lab.fake_kernel_log import MACHINE
from lab.machine import (
    Entry,
    Folder,
    Link,
    Machine,
    Package,
    bare_machine,
    device_path,
    files,
    profile_text,
)
from lab.state import NO_GPUS, write

# The node's first process, which binds the tree into place.
NODE_INIT = Path("usr/lib/gpufleet-lab/node_init.py")

# The parts of a machine's tree that replace the kernel's. All else in /proc and /sys stays real,
# also the net devices, through which the node is reached.
_SHOWN = re.compile(
    r"/proc/(?:driver/.*|cmdline|meminfo|modules)"
    r"|/sys/(?:bus/pci|module|firmware|class/infiniband|kernel/iommu_groups)(?:/.*)?"
    r"|/sys/devices/pci[0-9a-f]{4,}:(?!.*/net/).*"
)
# Files in /run that packages create at a boot.
_RUN = re.compile(r"/run/.*")

# Only root may read the configuration space above 64 bytes. A plain file can have only one mode for
# all its bytes.
_PRIVATE = {"config": 0o600}

_LISTED = "shown.json"  # the lab's entries in the tree, and their profile
_BEHIND = "behind"  # exists while a running node may not have seen all changes
_TMPFILES = Path("etc/tmpfiles.d/gpufleet-lab.conf")


@dataclass(frozen=True)
class Changes:
    """Changes by `place` that a running node does not notice itself."""

    shown: bool
    log: bool
    run: bool
    units: installed_software.Units


def profile_of(root: Path) -> str | None:
    """Return the profile of the machine that was last placed at `root`, or None."""
    try:
        return str(json.loads((root / MACHINE / _LISTED).read_text())["profile"])
    except FileNotFoundError:
        return None


def place(
    root: Path, machine: Machine, *, without_driver: bool = False, running: bool = False
) -> Changes:
    """
    Write the machine into the node whose root is mounted at `root`; correct files stay.

    On a node that was delivered without a driver, all of NVIDIA's software belongs to the node. If
    such a node is `running`, its loaded modules stay as they are. If it is off, no module is
    loaded.

    If the node is running, call `follow` afterwards, and then `mark_placed`. If the lab was killed
    before the last `mark_placed`, the result reports all parts as changed. To change the profile,
    switch off the node first. Raises FleetError if the node's package manager is running.
    """
    machine = fit_to_host(machine)
    if not without_driver:
        return _place(root, machine, own_driver=False)
    driver.install(root)
    driver.write_loadable(root, driver.loadable(machine, kernel_tree))
    with driver.hold_modules(root, running=running) as loaded:
        return _place(root, bare_machine(machine, loaded), own_driver=True)


def _place(root: Path, machine: Machine, *, own_driver: bool) -> Changes:
    home = root / MACHINE
    program = Path(node_init.__file__).read_text()
    write(root / NODE_INIT, program, 0o755)
    if profile_of(root) not in (None, machine.profile.name):
        for part in ("proc", "sys"):
            shutil.rmtree(home / part, ignore_errors=True)
    home.mkdir(parents=True, exist_ok=True)
    behind = (home / _BEHIND).exists()
    (home / _BEHIND).touch()
    tree = files(machine)
    syscall_shim.install(root, home, machine)
    gpu_simulator.describe(root, profile_text(machine))
    if not own_driver:
        gpu_simulator.install(root, machine.library.version if machine.library else None)
    rules = (f"f+ {path} 0644 root root - {_line(tree[path])}\n" for path in tree if _run(path))
    changes = Changes(
        shown=_show(home, machine, tree),
        log=_log(home, machine),
        run=write(root / _TMPFILES, "".join(["# Written by the lab.\n", *rules])),
        units=installed_software.deliver(root, machine, dkms=own_driver),
    )
    return Changes(True, True, True, installed_software.all_units(machine)) if behind else changes


def place_nothing(root: Path) -> None:
    """Make the node at `root` a node without GPUs, with the real kernel, bus and packages."""
    home = root / MACHINE
    home.mkdir(parents=True, exist_ok=True)
    write(root / NODE_INIT, "#!/bin/sh\nexec /usr/lib/systemd/systemd\n", 0o755)
    write(home / _LISTED, json.dumps({"profile": NO_GPUS, "paths": []}))


def kernel_tree(machine: Machine) -> dict[str, Entry]:
    """Return a machine's entries that replace the kernel's, by path."""
    return {path: entry for path, entry in files(machine).items() if _SHOWN.fullmatch(path)}


def mark_placed(root: Path) -> None:
    """Record that the node, which follows or is off, matches the result of `place`."""
    (root / MACHINE / _BEHIND).unlink(missing_ok=True)


def follow(group: str, root: Path, changes: Changes) -> None:
    """Make the node in the cgroup `group` see the changes of `place` at `root`."""
    if changes.shown:
        _inside(group, f"/{NODE_INIT}", "refresh")
    if changes.log:
        fake_kernel_log.write(root)
    if changes.run:
        asked = [rule.split()[1] for rule in (root / _TMPFILES).read_text().splitlines()[1:]]
        _inside(group, "sh", "-c", "rm -f /run/reboot-required*")
        if asked:
            _inside(group, "systemd-tmpfiles", "--create", f"/{_TMPFILES}")
    if changes.units:
        _inside(group, "systemctl", "daemon-reload")
        for verb, names in changes.units.items():
            # A fault may want the unit to fail at its start.
            _inside(group, "systemctl", verb, "--", *names, check=False)


def fit_to_host(machine: Machine) -> Machine:
    """
    Return the machine, limited to the abilities of a node on this host.

    The kernel is this machine's: its release takes the place of the profile's, and other releases
    keep their order to it. The system is the base image's, so packages are dpkg's.
    """
    releases = dict(_releases(machine))

    def named(text: str) -> str:
        # In one pass and longest first: a release may begin like another, or like its successor.
        pattern = "|".join(map(re.escape, sorted(releases, key=len, reverse=True)))
        return re.sub(pattern, lambda match: releases[match[0]], text)

    return replace(
        machine,
        arch=platform.machine(),
        kernel=named(machine.kernel),
        kernels=tuple(replace(each, release=named(each.release)) for each in machine.kernels),
        cmdline=named(machine.cmdline),
        log=tuple((seconds, named(text)) for seconds, text in machine.log),
        packages=dict(_packages(machine, releases)) if machine.apt else {},
    )


def _packages(machine: Machine, releases: Mapping[str, str]) -> Iterator[tuple[str, Package]]:
    """
    Yield the machine's packages; kernel packages get the kernel's release in name and version.
    """
    for name, package in machine.packages.items():
        kernel, _, release = name.partition("-")[2].partition("-")
        if name.startswith("linux-") and release in releases:
            new = releases[release]
            yield f"linux-{kernel}-{new}", replace(package, version=f"{new}-1")
        else:
            yield name, package


def _releases(machine: Machine) -> Iterator[tuple[str, str]]:
    """Yield (release of the profile, release in the node) of every installed kernel."""
    running = platform.release()
    yield machine.kernel, running
    match = re.match(r"(\d+)\.(\d+)", running)
    major, minor = (int(match[1]), int(match[2])) if match else (6, 0)
    others = sorted({each.release for each in machine.kernels} - {machine.kernel}, key=_order)
    for number, release in enumerate(others):
        newer = _order(release) > _order(machine.kernel)
        yield release, f"{major}.{minor + 1 if newer else max(0, minor - 1)}.{number}-lab"


def _order(release: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", release)]


# -- the tree --------------------------------------------------------------------------------------


def _show(home: Path, machine: Machine, tree: Mapping[str, Entry]) -> bool:
    """Write the tree that replaces the kernel's; return whether it changed."""
    wanted = {path: entry for path, entry in tree.items() if _SHOWN.fullmatch(path)}
    wanted["/proc/meminfo"] = _meminfo(home, str(wanted["/proc/meminfo"]))
    for name in machine.modules:
        at = f"/sys/module/{name}"
        # Only modules that were loaded have a state, not those that are built in.
        wanted |= {f"{at}/initstate": "live\n", f"{at}/refcnt": "0\n", f"{at}/holders": Folder()}
    for function in machine.functions:  # lspci wants them
        wanted |= {f"{device_path(function)}/irq": "0\n", f"{device_path(function)}/resource": ""}

    listed = home / _LISTED
    before = set(json.loads(listed.read_text())["paths"]) if listed.exists() else set()
    # Recorded before the write, so that the remains of a killed call are found again.
    _remember(listed, machine, before | set(wanted))
    changed = write(home / "shm_mib", f"{machine.shm[0]}\n")
    for path in sorted(before - set(wanted), reverse=True):
        _remove(home, path, wanted)
        changed = True
    for path, entry in wanted.items():
        changed |= _put(home, path, entry)
    _remember(listed, machine, set(wanted))
    return changed


def _remember(listed: Path, machine: Machine, paths: set[str]) -> None:
    write(listed, json.dumps({"profile": machine.profile.name, "paths": sorted(paths)}))


def _put(home: Path, path: str, entry: Entry) -> bool:
    """Place one entry atomically; return whether it changed."""
    at, draft = home / path.lstrip("/"), home / "draft"
    if isinstance(entry, Folder):
        missing = not at.is_dir()
        at.mkdir(parents=True, exist_ok=True)
        return missing
    if isinstance(entry, Link):
        to = os.path.relpath(entry.to, PurePosixPath(path).parent)
        if at.is_symlink() and at.readlink() == Path(to):
            return False
        draft.unlink(missing_ok=True)
        draft.symlink_to(to)
    else:
        content = entry if isinstance(entry, bytes) else entry.encode()
        if at.is_file() and not at.is_symlink() and at.read_bytes() == content:
            return False
        draft.unlink(missing_ok=True)
        draft.write_bytes(content)
        draft.chmod(_PRIVATE.get(at.name, 0o644))
    at.parent.mkdir(parents=True, exist_ok=True)
    draft.rename(at)
    return True


def _remove(home: Path, path: str, wanted: Mapping[str, Entry]) -> None:
    """Remove one entry, and the directories that it leaves empty and unbound."""
    at = home / path.lstrip("/")
    if at.is_dir() and not at.is_symlink():
        empty = at
    else:
        at.unlink(missing_ok=True)
        empty = at.parent
    while not _bound(f"/{empty.relative_to(home)}") and f"/{empty.relative_to(home)}" not in wanted:
        try:
            empty.rmdir()
        except OSError:  # the directory is not empty, or no longer exists
            if empty.exists():
                return
        empty = empty.parent


def _bound(path: str) -> bool:
    """Return whether a running node has bound this directory or one below it."""
    return path in node_init.REPLACED or PurePosixPath(path).parent.as_posix() in (
        *node_init.COVERED,
        *(PurePosixPath(each).parent.as_posix() for each in node_init.REPLACED),
        "/",
    )


def _meminfo(home: Path, text: str) -> str:
    """Return this machine's /proc/meminfo with the simulated machine's amounts."""
    amounts = dict(line.split(":", 1) for line in text.splitlines())
    try:
        base = (home / "proc/meminfo").read_text()
    except FileNotFoundError:
        base = Path("/proc/meminfo").read_text()
    rows = (line.partition(":") for line in base.splitlines())
    return "".join(f"{name}:{amounts.get(name, value)}\n" for name, _, value in rows)


def _log(home: Path, machine: Machine) -> bool:
    """Write the kernel's messages if the journal needs them; return whether they changed."""
    log = home / "kernel.log"
    if machine.log_access == "journal":
        return write(log, "".join(f"{seconds}\t{text}\n" for seconds, text in machine.log))
    there = log.exists()
    log.unlink(missing_ok=True)
    return there


def _run(path: str) -> bool:
    return _RUN.fullmatch(path) is not None


def _line(entry: Entry) -> str:
    """Return a file's text in systemd-tmpfiles' form."""
    return entry.replace("\n", "\\n") if isinstance(entry, str) else ""


# -- in a running node -----------------------------------------------------------------------------


def _inside(group: str, *args: str, check: bool = True) -> None:
    """Run a command in the node's file system and process namespace."""
    pid = str(_first_process(group))
    run_command.run("nsenter", "-t", pid, "-m", "-p", "--", *args, check=check)


def _first_process(group: str) -> int:
    """Return the pid on this machine of the node's PID 1."""
    for pid in cgroup.pids(f"{group}/machine/payload"):
        try:
            status = Path(f"/proc/{pid}/status").read_text()
        except OSError:  # it has ended
            continue
        if re.search(r"^NSpid:\t\d+\t1$", status, re.MULTILINE):
            return pid
    raise FleetError(f"The node of {group} ended during this command: run `gpufleet lab up`.")
