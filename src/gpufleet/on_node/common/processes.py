"""RUNS ON THE NODE: read a process' name, systemd unit and user from /proc.

If this program runs in a different PID namespace than the driver, a PID may be absent. This is not
an error.
"""

from __future__ import annotations

import re
from typing import Any, Callable

from gpufleet.on_node.common.answers import CannotRead, is_missing, read
from gpufleet.on_node.common.linux_facts import line


def describe_process(pid: int, otherwise: Callable[[int], Any]) -> dict[str, Any]:
    """
    Return a process' name, systemd unit and user. If the name is unknown, `otherwise` queries it.
    """
    name = read(line, "/proc/%d/comm" % pid)
    return {
        "name": read(otherwise, pid) if is_missing(name) else name,
        "unit": read(unit, pid),
        "uid": read(uid, pid),
    }


def unit(pid: int) -> str:
    """Return the innermost systemd unit of a process."""
    rows = [row.split(":", 2) for row in line("/proc/%d/cgroup" % pid).splitlines()]
    # A line "0::/path" is cgroup v2. With cgroup v1, systemd has a hierarchy of its own.
    for controllers in ("", "name=systemd"):
        for row in rows:
            if len(row) == 3 and row[1] == controllers:
                found = [
                    part for part in row[2].split("/") if part.endswith((".service", ".scope"))
                ]
                if found:
                    return found[-1]
    raise CannotRead("absent", detail="in no unit")


def uid(pid: int) -> int:
    """Return a process' real user id."""
    found = re.search(r"^Uid:\s+(\d+)", line("/proc/%d/status" % pid), re.MULTILINE)
    if not found:
        raise CannotRead("absent", detail="no Uid")
    return int(found.group(1))
