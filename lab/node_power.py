"""Switch a node on and off: systemd-nspawn in its own cgroup and network, and its keeper."""

from __future__ import annotations

import os
import socket
import sys
import time
from pathlib import Path

from lab import cgroup, fake_kernel_log, run_command
from lab.node_machine import NODE_INIT
from lab.root_filesystem import SYSCTL
from lab.state import LabNode, LabState, write

_KEEPER = Path(__file__).with_name("keeper.sh")

_NSPAWN = Path("/run/systemd/nspawn")

# Seconds until sshd of a node must answer. Measured: 0.4 s on an idle machine, and 27 s while 128
# nodes booted at once on two cores.
BOOT_LIMIT = 90.0


def group(state: LabState, name: str) -> str:
    """Return the cgroup of the node and its keeper."""
    return f"{state.prefix}/{name}"


def is_on(state: LabState, name: str) -> bool:
    """
    Return whether the node runs and would come back from a reboot.

    A node whose keeper or nspawn was killed is not on. `off` removes the remains of such a node.
    """
    parts = ("keeper", "machine/supervisor", "machine/payload")
    return all(cgroup.populated(f"{group(state, name)}/{part}") for part in parts)


def on(state: LabState, node: LabNode) -> None:
    """Start the node from its mounted root; return before it has booted."""
    home, machine = state.node_dir(node.name), f"{group(state, node.name)}/machine"
    groups = cgroup.create(machine)
    environment = {
        "NODE_GROUPS": " ".join(map(str, groups)),
        "SYSCTL_FROM": str(_sysctl(state)),
        "SYSCTL_TO": str(home / "root" / SYSCTL),
        "ROOT": str(home / "root"),
        "KERNEL_LOG": f"{sys.executable} -I {fake_kernel_log.__file__}",
        "PORT": state.port(node),
        # The node sees only cgroup v2, like a present server, also if this machine has v1 too.
        "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1",
        # /proc/sys/net belongs to the node's network namespace, so the node may write to it.
        "SYSTEMD_NSPAWN_API_VFS_WRITABLE": "network",
    }
    nspawn = [
        *("systemd-nspawn", "--quiet", "--directory", str(home / "root")),
        *("--machine", f"{state.prefix}-{node.name}", f"--hostname={node.name}"),
        # Do not register with systemd-machined or create a scope. machined may not be installed,
        # and the lab creates the cgroups itself.
        *("--register=no", "--keep-unit", "--console=read-only"),
        f"--network-namespace-path=/run/netns/{state.netns(node.name)}",
        "--capability=CAP_NET_ADMIN",  # not implied by a network namespace from outside
        # Root may do this on a server, and deploy_mark.py needs it to watch a deploy's connection.
        "--system-call-filter=pidfd_open pidfd_getfd",
        # Parts that nspawn would otherwise share between this machine and the node.
        *("--resolv-conf=off", "--timezone=off", "--link-journal=no"),
        f"--bind=/{SYSCTL}:/proc/sys/vm",
        # The signal that requests a clean shutdown from systemd, as with --boot.
        "--kill-signal=SIGRTMIN+3",
        f"/{NODE_INIT}",
    ]
    keeper = f"{group(state, node.name)}/keeper"
    cgroup.start(keeper, [_KEEPER, *nspawn], home / "console.log", environment)


def off(state: LabState, name: str) -> None:
    """Cut the power: every process, including the keeper, is killed at once without a shutdown."""
    cgroup.remove(group(state, name))
    # Remains that nspawn could not remove because it was killed.
    propagate = _NSPAWN / "propagate" / f"{state.prefix}-{name}"
    if propagate.is_dir():
        propagate.rmdir()
    root = state.node_dir(name) / "root"
    if root.is_mount():
        (_NSPAWN / "locks" / f"inode-{root.stat().st_dev}:{root.stat().st_ino}").unlink(True)


def answers(node: LabNode, limit: float = BOOT_LIMIT) -> bool:
    """Return whether the node's sshd greets within `limit` seconds."""
    deadline = time.monotonic() + limit
    while True:
        try:
            with socket.create_connection((str(node.address), 22), timeout=1) as connection:
                connection.settimeout(2)
                if connection.recv(4) == b"SSH-":
                    return True
        except OSError:
            pass  # not yet
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)


def memory(state: LabState, name: str) -> int:
    """Return the bytes of memory of the node's processes, with their shares of shared memory."""
    total = 0
    for pid in cgroup.pids(group(state, name)):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:  # the process has ended
            continue
        total += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total * 1024


def console(state: LabState, name: str) -> str:
    """Return the last lines of the node's console, for an error message."""
    log = state.node_dir(name) / "console.log"
    return (
        run_command.tail(log.read_text(errors="replace").splitlines())
        if log.exists()
        else "nothing"
    )


def _sysctl(state: LabState) -> Path:
    """Return a copy of this machine's /proc/sys/vm, from which every boot of a node starts."""
    copy = state.dir / "sysctl-vm"
    for setting in Path("/proc/sys/vm").iterdir():
        if setting.is_file() and os.access(setting, os.R_OK) and setting.stat().st_mode & 0o444:
            write(copy / setting.name, setting.read_text())
    return copy
