"""Manage a lab's disk: one sparse image, mounted for the files of its nodes.

    nodes.img    as large as the free space at its creation; uses only the space of written data
    nodes/       the mount point of the image while the lab is up

A lab is deleted by deleting this one file. Nodes write hundreds of thousands of files, and a disk
that discards the blocks of each file would need minutes to delete them. Without loop devices, as in
some containers, nodes/ is an ordinary directory.
"""

from __future__ import annotations

import os
import time
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import IO

from gpufleet.errors import FleetError
from lab import run_command
from lab.progress import Say
from lab.state import LabState, exclusive

GIB = 1 << 30
LEAST_GIB = 8
RELEASE_SECONDS = 30.0
"""Seconds until the boot of another node releases its copy of this machine's mounts.

This takes 1 to 3 s, and over 10 s with three labs on two busy cores. If a node of a different lab
booted while the disk was mounted, this node may keep the mount until it ends. In this case waiting
does not help, and the kernel frees the device later.
"""
# A journal, so that a lab survives a crash of this machine. Small files need no larger journal.
JOURNAL_MIB = 64
_FORMAT = ("-q", "-F", "-m", "0", "-J", f"size={JOURNAL_MIB}", "-E", "lazy_itable_init=1,nodiscard")
# Without noinit_itable, the kernel would write all inode tables (1 GB) for a lab of some minutes.
_OPTIONS = "loop,noatime,noinit_itable"


def mount(state: LabState, say: Say) -> None:
    """Mount the lab's disk, created if missing; a directory that has nodes already stays one."""
    folder, image = _folder(state), state.dir / "nodes.img"
    folder.mkdir(parents=True, exist_ok=True)
    try:
        with _lock(state) as held:
            if folder.is_mount() or any(folder.iterdir()):
                return
            if not image.exists():
                _make(image, held)
            run_command.run("mount", "-o", _OPTIONS, image, folder, lock=held)
            _bypass_cache(folder)
    except FleetError as error:
        say(f"the nodes' files are in a directory, so their deletion takes longer: {error}")


def unmount(state: LabState) -> None:
    """Unmount the disk, if mounted, and wait until its loop device is free."""
    with _lock(state):
        while _folder(state).is_mount():
            run_command.run("umount", _folder(state))
    deadline = time.monotonic() + RELEASE_SECONDS
    while _is_held(state.dir / "nodes.img") and time.monotonic() < deadline:
        time.sleep(0.05)


def _lock(state: LabState) -> AbstractContextManager[IO[str]]:
    """Return the disk's lock, which a `mount` that outlives its command also holds."""
    return exclusive(f"disk-{state.id}")


def _is_held(image: Path) -> bool:
    """Return whether a loop device has the image; a lab that boots a node copies mounts."""
    for each in Path("/sys/block").glob("loop*/loop/backing_file"):
        with suppress(OSError):
            if each.read_text().strip() == str(image):
                return True
    return False


def _folder(state: LabState) -> Path:
    return state.dir / "nodes"


def _bypass_cache(folder: Path) -> None:
    """Keep nodes' files in memory only once, if possible, without the image's blocks."""
    device = run_command.run("findmnt", "--noheadings", "--output", "SOURCE", folder).strip()
    run_command.run("losetup", "--direct-io=on", device, check=False)


def _make(image: Path, held: IO[str]) -> None:
    free = os.statvfs(image.parent)
    size = max(free.f_bavail * free.f_frsize // GIB, LEAST_GIB) * GIB
    draft = image.with_name(f".{image.name}.new")
    with draft.open("wb") as file:
        file.truncate(size)
    run_command.run("mkfs.ext4", *_FORMAT, draft, lock=held)
    draft.rename(image)
