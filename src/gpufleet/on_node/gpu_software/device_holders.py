"""RUNS ON THE NODE, as root: list the processes that have NVIDIA's device files open or mapped.

A mapping continues to exist when its file descriptor is closed (mmap(2)), so both are checked. The
host's /proc also has the processes in other PID namespaces (containers).
"""

from __future__ import annotations

import contextlib
import os
import re
from typing import Any, Iterator

from gpufleet.on_node.common import linux_facts
from gpufleet.on_node.common.answers import is_missing, read
from gpufleet.on_node.common.linux_facts import line
from gpufleet.on_node.common.processes import unit

DEVICE = re.compile(r"/dev/nvidia[\w./-]*")
# Size limit of /proc/PID/maps. For a process that uses CUDA, the file has some thousand lines.
MAPS_BYTES = 16 << 20


def holders() -> list[dict[str, Any]]:
    """
    Return {"pid", "name", "unit", "devices"} of each process, sorted by PID.

    `unit` is null if the process belongs to no unit.
    """
    found = []
    for pid in sorted(int(name) for name in linux_facts.directory_names("/proc") if name.isdigit()):
        devices = sorted({*open_devices(pid), *mapped_devices(pid)})
        if devices and pid != os.getpid():
            name, within = read(line, "/proc/%d/comm" % pid), read(unit, pid)
            found.append(
                {
                    "pid": pid,
                    "name": "?" if is_missing(name) else name,
                    "unit": None if is_missing(within) else within,
                    "devices": devices,
                }
            )
    return found


def open_devices(pid: int) -> Iterator[str]:
    """Yield NVIDIA's device files among a process' descriptors."""
    at = linux_facts.ROOT + "/proc/%d/fd" % pid
    with contextlib.suppress(OSError):  # the process has ended, or it is a kernel thread
        for number in os.listdir(at):
            with contextlib.suppress(OSError):
                found = DEVICE.match(os.readlink(at + "/" + number))
                if found:
                    yield found.group(0)


def mapped_devices(pid: int) -> Iterator[str]:
    """Yield NVIDIA's device files among a process' mappings."""
    at = linux_facts.ROOT + "/proc/%d/maps" % pid
    with contextlib.suppress(OSError), open(at, encoding="utf-8", errors="replace") as maps:
        for row in maps.read(MAPS_BYTES).splitlines():
            found = DEVICE.search(row)
            if found:
                yield found.group(0)
