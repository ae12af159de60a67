"""RUNS ON THE NODE: read the record of the deploy that holds the node while it is connected.

    /var/lib/gpufleet/change/deploy.json   {"id", "owner", "from", "since", "what", "process",
                                            "pid", "start", "boot"}

`process` is the deploy's process on the machine where the deploy runs. `pid` is the process on this
node that serves the deploy's connection. It is a process of sshd, or the deploy itself if the
deploy runs on this machine. Without its connection, a deploy cannot change this node, so a record
is valid only while the process `pid` exists. The process is identified by its start time and the
boot's id, so the record needs no clock, and a deploy does not have to remove it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from typing import Any, Dict, Optional

from gpufleet.on_node.common import change_files

DEPLOY = change_files.HOME + "/deploy.json"
SERVERS = ("sshd", "dropbear")
"""
Names of the process that serves a connection. Since OpenSSH 9.8 the process is sshd-session.
"""
# When a controller ends, its connection on a busy node may take this long to end.
ENDS_SECONDS = 3
POLL_SECONDS = 0.1
# The same values as on the controller (remote/ssh.py): the connection ends after 30 s of silence.
KEEPALIVE = (("TCP_KEEPIDLE", 15), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 3))
UNACKED_MS = 30000
# The system call's number is the same on every architecture (Linux 5.3 and 5.6).
PIDFD_OPEN = 434
PIDFD_GETFD = 438

Record = Optional[Dict[str, Any]]


def deploy_obstacle(run: str, upgrade: Optional[str], lock: Record, living: Record) -> str:
    """
    Return which mark blocks a deploy: "lock", "deploy", or "" if none does.

    `upgrade` is the id of the upgrade that runs this deploy. `living` is the record of the deploy
    that holds the node.
    """
    if lock is not None and (upgrade is None or lock.get("id") != upgrade):
        return "lock"
    return "deploy" if living is not None and living.get("id") != run else ""


def upgrade_obstacle(upgrade: str, lock: Record, living: Record, *, steal: bool) -> str:
    """
    Return which mark blocks an upgrade: "lock", "deploy", or "" if none does.

    The upgrade's own lock does not block it. With `steal`, another upgrade's lock does not block it
    either, but a deploy still does.
    """
    if lock is not None and lock.get("id") == upgrade:
        return ""
    if lock is not None and not steal:
        return "lock"
    return "deploy" if living is not None else ""


def living_deploy() -> Record:
    """Return the record of the deploy that holds this node, or None."""
    try:
        found = change_files.document(DEPLOY)
    except change_files.RefusedError:
        # The file does not record a process, so it must not have to be removed by hand.
        return None
    if found is None or found.get("boot") != boot_id():
        return None
    start = start_of(found.get("pid"))
    return found if start is not None and start == found.get("start") else None


def await_end(run: Optional[str] = None) -> None:
    """
    Wait up to `ENDS_SECONDS` for another deploy to end, because its connection may be closing.
    """
    until = time.monotonic() + ENDS_SECONDS
    while time.monotonic() < until:
        found = living_deploy()
        if found is None or found.get("id") == run:
            return
        time.sleep(POLL_SECONDS)


def start_of(pid: Any) -> Optional[int]:
    """Return a process' start time in ticks since boot, or None if it does not exist."""
    try:
        with open("/proc/%d/stat" % pid, encoding="utf-8", errors="replace") as file:
            # The process' name is in parentheses and may have any characters.
            words = file.read().rpartition(")")[2].split()
        return None if words[0] in ("Z", "X") else int(words[19])
    except (OSError, TypeError, ValueError, IndexError):
        return None


def boot_id() -> str:
    """Return the id of the current boot."""
    with open("/proc/sys/kernel/random/boot_id", encoding="utf-8") as file:
        return file.read().strip()


def connection_process() -> Optional[int]:
    """Return the process that serves this program's SSH connection, or None."""
    pid = os.getppid()
    with contextlib.suppress(OSError, ValueError, IndexError):
        while pid > 1:
            with open("/proc/%d/stat" % pid, encoding="utf-8", errors="replace") as file:
                before, _, after = file.read().rpartition(")")
            if before.partition("(")[2].startswith(SERVERS):
                return pid
            pid = int(after.split()[1])
    return None


def watch_connection(pid: int) -> None:
    """
    Enable TCP keepalive on a connection, with the same values as on the controller.

    sshd's own keepalive starts only after two hours. This function sets the options on sshd's
    socket, which requires root. On Linux before 5.6, or in a sandbox that forbids this, sshd's
    interval remains.
    """
    with contextlib.suppress(Exception):
        import ctypes  # Debian's python3-minimal has no ctypes

        call = ctypes.CDLL(None, use_errno=True).syscall
        process = call(PIDFD_OPEN, pid, 0)
        if process < 0:
            return
        try:
            for name in os.listdir("/proc/%d/fd" % pid):
                # A descriptor may be closed between the listing and the look at it.
                with contextlib.suppress(OSError):
                    if os.readlink("/proc/%d/fd/%s" % (pid, name)).startswith("socket:"):
                        copy = call(PIDFD_GETFD, process, int(name), 0)
                        if copy >= 0:
                            with socket.socket(fileno=copy) as found:
                                ask_often(found)
        finally:
            os.close(process)


def ask_often(connection: socket.socket) -> None:
    """Make a TCP connection end if its peer has not responded for half a minute."""
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    if connection.type != socket.SOCK_STREAM:
        return
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (*KEEPALIVE, ("TCP_USER_TIMEOUT", UNACKED_MS)):
        connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
