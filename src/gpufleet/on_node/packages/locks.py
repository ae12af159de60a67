"""RUNS ON THE NODE: wait for other package managers, and report which process holds the lock.

apt, dpkg and rpm lock files with fcntl(2), whose F_GETLK returns the holder. dnf writes its process
id to a file. A lock without a holder is free, even if its file exists.

apt's own DPkg::Lock::Timeout waits for both locks of dpkg, but not for /var/lib/apt/lists/lock and
/var/cache/apt/archives/lock. At its end it does not report the holder (measured with apt 2.6.1).
`dpkg --configure -a` waits for no lock.
"""

from __future__ import annotations

import fcntl
import os
import struct
import time
from typing import Callable, List, Optional

from gpufleet.on_node.common import file_lock

# dpkg(1) and apt(8): the frontend's lock is held during a whole run, and dpkg's own lock by each
# process of dpkg.
APT = ("/var/lib/dpkg/lock-frontend", "/var/lib/dpkg/lock")
RPM = ("/var/lib/rpm/.rpm.lock", "/usr/lib/sysimage/rpm/.rpm.lock")
# dnf 4 (`persistdir` in dnf.conf(5)): the file has the process id of a run that changes the
# database.
DNF = ("/var/lib/dnf/rpmdb_lock.pid",)
LOOK_SECONDS = 0.5
# fcntl(2), struct flock on 64-bit Linux: type, whence, start, length, process.
FLOCK = "hhqqi"


class LockedError(Exception):
    """Raised if a lock is not released in time. The text has the holder and the time."""


def wait(root: str, manager: str, seconds: float, say: Callable[[str], None]) -> None:
    """
    Wait until no program changes packages.

    At the deadline, raises `LockedError` with the holder of the lock.
    """
    deadline = time.monotonic() + seconds
    said = ""
    while True:
        holder = find(root, manager)
        if holder is None:
            return
        if holder != said:
            said = holder
            say("waiting for %s" % holder)
        if time.monotonic() >= deadline:
            raise LockedError(
                "%s, and has not released it in %d s: wait until that process has ended, or end it "
                "on the node, then run again; nothing was touched" % (holder, seconds)
            )
        time.sleep(LOOK_SECONDS)


def find(root: str, manager: str) -> Optional[str]:
    """Return a description of the process that holds a package lock, or None."""
    for path in APT if manager == "apt" else RPM:
        pid = holder_of(root + path)
        if pid is not None:
            return "%s holds %s" % (process(pid), root + path)
    for path in DNF if manager == "dnf" else ():
        pid = written_in(root + path)
        if pid is not None and is_dnf(pid):
            return "%s holds %s" % (process(pid), root + path)
    return None


def holder_of(path: str) -> Optional[int]:
    """
    Return the PID of the process that holds a file's fcntl lock, or None if there is none.

    If the process is not visible from here, the result is 0.
    """
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        asked = struct.pack(FLOCK, fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        kind, _, _, _, pid = struct.unpack(FLOCK, fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    finally:
        os.close(descriptor)
    return None if kind == fcntl.F_UNLCK else int(pid)


def written_in(path: str) -> Optional[int]:
    """Return the process id that is written in a file, or None."""
    try:
        with open(path) as file:
            return int(file.read(20))
    except (OSError, ValueError):
        return None


def is_dnf(pid: int) -> bool:
    """
    Return whether a process is a package manager. The id may now belong to a different process.
    """
    words = " ".join(command(pid))
    return any(name in words for name in ("dnf", "yum", "rpm", "packagekit"))


def process(pid: int) -> str:
    """Describe a process: its id, command line and start time."""
    if pid <= 0:
        return "a process outside of this system"
    words = command(pid)
    since = start_time(pid)
    return "process %d (%s)%s" % (
        pid,
        " ".join(words)[:200] or "already gone",
        " running since %s" % since if since else "",
    )


def command(pid: int) -> List[str]:
    """Return a process' command line."""
    try:
        with open("/proc/%d/cmdline" % pid, "rb") as file:
            text = file.read(4096).decode("utf-8", "replace")
    except OSError:
        return []
    return [word for word in text.split("\0") if word]


def start_time(pid: int) -> str:
    """
    Return when a process was started, in UTC by the node's clock. For an ended process, return "".
    """
    try:
        with open("/proc/%d/stat" % pid) as file:
            # proc(5): field 22 is the start in ticks since boot. Field 2, the name, may have blanks
            # and parentheses.
            ticks = int(file.read().rpartition(")")[2].split()[19])
        with open("/proc/stat") as file:
            boot = next(int(line.split()[1]) for line in file if line.startswith("btime"))
    except (OSError, ValueError, IndexError, StopIteration):
        return ""
    moment = time.gmtime(boot + ticks // os.sysconf("SC_CLK_TCK"))
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", moment)


def take(path: str, seconds: float) -> int:
    """Lock gpufleet's lock file until this process ends. Raises `LockedError` on a timeout."""
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def refusal() -> LockedError:
        return LockedError(
            "another run of gpufleet changes packages on this node (%s), and has done so for more "
            "than %d s. Wait until that run has ended, then run again; nothing was touched"
            % (process(holder_of(path) or 0), seconds)
        )

    try:
        file_lock.lock(descriptor, seconds, refusal, call=fcntl.lockf)
    except LockedError:
        os.close(descriptor)
        raise
    return descriptor
