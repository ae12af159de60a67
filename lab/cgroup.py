"""Find the lab's processes by cgroup, including those that outlive their command.

A lab owns one directory per cgroup hierarchy:

    gf-<id>/<node>/keeper     the loop that restarts the node after a reboot
    gf-<id>/<node>/machine    systemd-nspawn, which adds `payload` and `supervisor` below
    gf-<id>/<service>         the proxy, the mirror

systemd needs cgroup v2, which every supported machine has: at /sys/fs/cgroup, or beside the v1
hierarchies at /sys/fs/cgroup/unified. On such a hybrid machine systemd-nspawn also writes into v1's
`name=systemd`, so the same directories are made there.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from gpufleet.errors import FleetError

# Limits of services inside nodes (MemoryMax= ...) hold only where the machine's v2 hierarchy has
# these controllers; elsewhere systemd accepts and shows them without effect.
_CONTROLLERS = ("cpu", "memory", "pids")


@cache
def unified() -> Path:
    """Return the mount point of cgroup v2. Raises `FleetError` if there is none."""
    for kind, where, _ in _mounts():
        if kind == "cgroup2":
            return where
    raise FleetError(
        "This machine has no mounted cgroup v2, which systemd on the lab's nodes needs."
    )


@cache
def hierarchies() -> tuple[Path, ...]:
    """Return every hierarchy that systemd-nspawn uses here, cgroup v2 first."""
    named = [w for kind, w, options in _mounts() if kind == "cgroup" and "name=systemd" in options]
    return (unified(), *named)


@cache
def _memory_apart() -> Path | None:
    """Return the mount point of v1's memory controller, or None if v2 has it or there is none."""
    kinds = ((kind, where) for kind, where, options in _mounts() if "memory" in options)
    return next((where for kind, where in kinds if kind == "cgroup"), None)


def _mounts() -> list[tuple[str, Path, list[str]]]:
    lines = (line.split() for line in Path("/proc/mounts").read_text().splitlines())
    return [(kind, Path(where), options.split(",")) for _, where, kind, options, *_ in lines]


def create(group: str) -> list[Path]:
    """Create the cgroup `group` (`gf-lab/gpu-01/machine`) in every hierarchy; return the paths."""
    paths = [root / group for root in hierarchies()]
    for path in paths:
        path.mkdir(parents=True, exist_ok=True)
    level = unified()
    for part in group.split("/"):
        _offer_controllers(level)
        level /= part
    return paths


def _offer_controllers(level: Path) -> None:
    """Allow resource limits for the children of `level`, as far as the machine supports them."""
    have = (level / "cgroup.controllers").read_text().split()
    for controller in set(_CONTROLLERS).intersection(have):
        try:
            (level / "cgroup.subtree_control").write_text(f"+{controller}")
        except OSError:  # the machine keeps this controller for itself
            continue


# Enter every hierarchy's cgroup, then leave the command to run by itself in a session of its own.
_ENTER = """
for group in $GROUPS_TO_ENTER; do echo $$ >"$group/cgroup.procs" || exit 1; done
exec setsid --fork "$@"
"""


def start(
    group: str, args: Sequence[str | Path], log: Path, env: Mapping[str, str] | None = None
) -> None:
    """
    Start a command in the cgroup `group` that outlives this process; append its output to `log`.

    The command enters its cgroup before it runs, and is there on return. So it can be found there,
    and cannot start after `group` is removed.
    """
    paths = create(group)
    with log.open("ab") as output:
        subprocess.run(
            ["sh", "-c", _ENTER, "enter", *map(str, args)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd="/",
            env={**os.environ, **(env or {}), "GROUPS_TO_ENTER": " ".join(map(str, paths))},
            check=True,
            timeout=30,
        )


def bound_memory(group: str, mib: int) -> None:
    """
    Limit the total memory of all nodes of `group` in MiB, including the page cache.

    Raises `FleetError` if the machine does not support this.
    """
    apart = _memory_apart()
    within = (apart or unified()) / group
    try:
        within.mkdir(parents=True, exist_ok=True)
        (within / ("memory.limit_in_bytes" if apart else "memory.max")).write_text(f"{mib << 20}")
    except OSError as error:
        raise FleetError(
            f"The memory of {group} cannot be limited ({error}): a limit needs the kernel's memory "
            "controller, which is off (see /proc/cgroups) or belongs to another user."
        ) from error
    # A process starts in its parent's cgroup, and the parent may be moved afterwards.
    for _ in range(2 if apart else 0):
        for pid in pids(group):
            with contextlib.suppress(ProcessLookupError):
                (within / "cgroup.procs").write_text(str(pid))


def pids(group: str) -> list[int]:
    """Return every process of `group` and of the cgroups below it."""
    found: list[int] = []
    # os.walk and not rglob: a cgroup that goes away between listing and reading is no error.
    for folder, _, _ in os.walk(unified() / group):
        with contextlib.suppress(OSError):
            found += map(int, Path(folder, "cgroup.procs").read_text().split())
    return found


def populated(group: str) -> bool:
    """Return whether `group`, or a cgroup below it, has a process."""
    try:
        return "populated 1" in (unified() / group / "cgroup.events").read_text()
    except OSError:
        return False


def kill(group: str, limit: float = 20.0) -> None:
    """
    Kill every process of `group` at once, and wait until all have ended.

    No process can start another meanwhile. Raises `FleetError` if a process is left after `limit`
    seconds.
    """
    try:
        (unified() / group / "cgroup.kill").write_text("1")
    except FileNotFoundError:
        if not (unified() / group).exists():
            return
        raise FleetError(
            "This kernel has no cgroup.kill: the lab needs Linux 5.14 or newer."
        ) from None
    deadline = time.monotonic() + limit
    while populated(group):
        if time.monotonic() > deadline:
            raise FleetError(
                f"Processes {pids(group)} of {group} survive SIGKILL: see /proc/PID/stack."
            )
        time.sleep(0.02)


def remove(group: str) -> None:
    """Kill the processes in `group`, then remove it from every hierarchy."""
    kill(group)
    for root in filter(None, (*hierarchies(), _memory_apart())):
        # Until a killed process is reaped, v1 still lists it and its cgroup is busy.
        deadline = time.monotonic() + 5
        while (root / group).exists():
            try:
                for path in sorted((root / group).rglob("*/"), reverse=True):
                    path.rmdir()
                (root / group).rmdir()
            except OSError as error:
                if time.monotonic() > deadline:
                    raise FleetError(f"Cannot remove cgroup {root / group}: {error}.") from error
                time.sleep(0.05)
