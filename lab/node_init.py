#!/usr/bin/python3 -I
"""RUNS IN A LAB NODE: lay the simulated machine over the kernel's view, then become systemd.

A node is a container, so its kernel has no NVIDIA driver, no GPUs on the PCI bus and no RDMA
device. The lab writes the files that such a kernel would show to the tree `MACHINE`
(lab/node_machine.py): proc/, sys/, boot_id. This program mounts these files over the kernel's own,
so that every program of the node reads them at the same paths as on a server. The node sees later
changes of the tree at once.

    node_init.py            the node's first process: lays, then runs systemd
    node_init.py refresh    in a running node: what binds alone do not follow (new directories of
                           COVERED, files of /proc)

All other parts of the kernel's view stay as they are: net devices, block devices, CPUs, processes.
The program uses only the standard library, because it is the first program that runs in the node.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Callable, Iterator

MACHINE = "/var/lib/gpufleet-lab/machine"
BOOT_ID = "/proc/sys/kernel/random/boot_id"
LOADER = "/usr/lib/gpufleet-lab/loader.py"  # lab/driver/
SYSTEMD = "/usr/lib/systemd/systemd"

# Directories that show the machine's entries and, beside them, the kernel's own.
COVERED = ("/sys/devices", "/sys/class")
# The kernel's own entries that these directories hide, because this machine's RDMA devices do not
# belong to the node.
HIDDEN = ("infiniband",)
# Directories of which the machine has all entries. A kernel without PCI bus or EFI may lack them.
REPLACED = (
    "/proc/driver",
    "/sys/bus/pci",
    "/sys/firmware",
    "/sys/kernel/iommu_groups",
    "/sys/module",
)

COVER = "machine"  # as which covers are mounted
# mount(2) and umount2(2), sys/mount.h.
RDONLY, NOSUID, NODEV, REMOUNT, BIND, REC = 1, 2, 4, 32, 4096, 16384
DETACH = 2


def mount(source: str, target: str, kind: str = "", flags: int = 0) -> None:
    """Call mount(2). Raises `OSError`."""
    _call("mount", *(os.fsencode(part) for part in (source, target, kind)), flags, None)


def unmount(target: str) -> None:
    """Remove the topmost mount of `target`; open files stay valid."""
    _call("umount2", os.fsencode(target), DETACH)


def _call(function: str, *arguments: object) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    if getattr(libc, function)(*arguments) != 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{function}{arguments}: {os.strerror(code)}")


def bind(source: str, target: str, *, as_it_is: bool = False) -> None:
    """Bind `source`, with the mounts below it, to `target`, optionally read-only."""
    mount(source, target, flags=BIND | REC)
    if not as_it_is:
        mount("", target, flags=REMOUNT | BIND | RDONLY | NOSUID | NODEV)


def replace(target: str) -> None:
    """Show only the machine's directory, which may be empty."""
    os.makedirs(MACHINE + target, exist_ok=True)
    if not os.path.isdir(target) and os.access(os.path.dirname(target), os.W_OK):
        os.mkdir(target)
    if os.path.isdir(target):
        bind(MACHINE + target, target)
    else:
        cover(os.path.dirname(target))


def cover(target: str) -> None:
    """Show the machine's directory and the kernel's as one."""
    kernels = os.open(target, os.O_PATH | os.O_DIRECTORY)  # reachable while it is covered
    mount(COVER, target, "tmpfs", NOSUID | NODEV)
    merge(MACHINE + target, f"/proc/self/fd/{kernels}", target)
    os.close(kernels)
    mount("", target, flags=REMOUNT | BIND | RDONLY | NOSUID | NODEV)


def merge(first: str, second: str, into: str) -> None:
    """Fill the directory `into` from two others; the first one's entries have precedence."""
    for name in sorted({*entries(first), *entries(second)}):
        target, ours, theirs = (f"{folder}/{name}" for folder in (into, first, second))
        source = ours if os.path.lexists(ours) else theirs
        if source is theirs and name in HIDDEN:
            continue
        if os.path.islink(source):
            os.symlink(os.readlink(source), target)
        elif not os.path.isdir(source):
            os.close(os.open(target, os.O_CREAT))
            bind(source, target, as_it_is=source is theirs)
        else:
            os.mkdir(target)
            if source is ours and os.path.isdir(theirs):
                merge(ours, theirs, target)
            else:
                bind(source, target, as_it_is=source is theirs)


def entries(folder: str) -> list[str]:
    """Return the names in a directory, or [] if it does not exist."""
    return os.listdir(folder) if os.path.isdir(folder) else []


def files_of_proc() -> Iterator[str]:
    """Yield the files of /proc that the machine and this kernel both have."""
    for name in entries(f"{MACHINE}/proc"):
        if os.path.isfile(f"{MACHINE}/proc/{name}") and os.path.exists(f"/proc/{name}"):
            yield f"/proc/{name}"


def lay() -> Iterator[str]:
    """Mount everything that is missing, and yield errors."""
    changeable = os.stat("/sys").st_dev != os.stat("/sys/dev").st_dev
    if changeable:  # nspawn's own directory, with parts of sysfs bound into it
        yield from attempt(mount, "", "/sys", "", REMOUNT | BIND)
    for target in REPLACED:
        if not same(target):
            yield from attempt(replace, target)
    if changeable:
        yield from attempt(mount, "", "/sys", "", REMOUNT | BIND | RDONLY | NOSUID | NODEV)
    for target in COVERED:
        if not covered(target):
            yield from attempt(cover, target)
    for target in files_of_proc():
        if not same(target):
            yield from attempt(bind, MACHINE + target, target)
    if not same(BOOT_ID, "/boot_id"):
        yield from attempt(bind_boot_id)
    yield from attempt(resize_shared_memory)


def attempt(step: Callable[..., None], *arguments: object) -> Iterator[str]:
    """Run one step, and yield its error; the node continues without it."""
    try:
        step(*arguments)
    except OSError as error:
        yield f"node_init: {error}"


def refresh() -> Iterator[str]:
    """Apply changes that binds do not show: replaced files, new entries."""
    for target in bound_files():
        if not same(target):
            yield from attempt(unmount, target)
    for target in COVERED:
        if covered(target) and not covers(target):
            yield from attempt(unmount, target)
    yield from lay()


def covered(target: str) -> bool:
    """Return whether the directory shows the machine's entries beside the kernel's."""
    return any(place == target and source == COVER for place, _, source in mounts())


def covers(target: str) -> bool:
    """Return whether the directory shows each of the machine's entries, alone or merged."""
    return all(
        same(f"{target}/{name}") or not os.path.ismount(f"{target}/{name}")
        for name in entries(MACHINE + target)
        if os.path.isdir(f"{target}/{name}")
    ) and set(entries(MACHINE + target)) <= set(entries(target))


def mounts() -> Iterator[tuple[str, str, str]]:
    """Yield each mount's target, root in its file system, and source (proc_pid_mountinfo(5))."""
    with open("/proc/self/mountinfo") as table:
        for line in table:
            before, _, after = line.partition(" - ")
            yield before.split()[4], before.split()[3], after.split()[1]


def bind_boot_id() -> None:
    """Show the lab's id of this boot, because the kernel's log is filed by it."""
    while os.stat(BOOT_ID).st_dev != os.stat("/proc").st_dev:
        unmount(BOOT_ID)  # nspawn's, a file that is gone: nothing can be mounted over it
    bind(f"{MACHINE}/boot_id", BOOT_ID)


def bound_files() -> list[str]:
    """Return the files of /proc that are covered by the machine's files."""
    return [
        place
        for place, root, _ in mounts()
        if f"{MACHINE}/proc/" in root
        and os.path.dirname(place) == "/proc"
        and place not in REPLACED
    ]


def same(target: str, source: str = "") -> bool:
    """Return whether `target` shows the machine's file or directory."""
    try:
        return os.path.samefile(MACHINE + (source or target), target)
    except FileNotFoundError:
        return False


def resize_shared_memory() -> None:
    """Give /dev/shm the machine's size in MiB, which reserves no memory."""
    try:
        with open(f"{MACHINE}/shm_mib") as file:
            size = int(file.read())
    except FileNotFoundError:
        return
    _call(
        "mount", b"", b"/dev/shm", b"tmpfs", REMOUNT | NOSUID | NODEV, b"mode=1777,size=%dm" % size
    )


def load_modules() -> Iterator[str]:
    """Load a booting machine's modules on a node with a loader, and yield errors."""
    if os.path.exists(LOADER):
        code = os.spawnv(os.P_WAIT, LOADER, [LOADER, "boot"])
        if code != 0:
            yield f"node_init: {LOADER} boot ended with {code}"


if __name__ == "__main__":
    if sys.argv[1:] == ["refresh"]:
        sys.exit("\n".join(refresh()) or None)
    for failure in (*load_modules(), *lay()):
        print(failure, file=sys.stderr, flush=True)  # the console
    os.execv(SYSTEMD, [SYSTEMD])
