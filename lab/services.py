"""Run the lab's services on this machine: a proxy to Debian, a mirror of the rest.

Each service is a foreground program in a cgroup of the lab. The lab finds and ends the service by
this cgroup, and never by a stored pid, which may belong to a different process by then.
"""

from __future__ import annotations

import hashlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from gpufleet.errors import FleetError
from lab import cgroup, proxy, run_command
from lab.progress import Say, silent
from lab.state import MIRROR_PORT, PROXY_PORT, LabState, write

# Seconds until a service listens: measured 0.2, and more for a proxy that rebuilds its index.
_START_LIMIT = 30.0
# Seconds for a clean end. Then the service is killed, and the proxy rebuilds its index at the next
# start.
_STOP_LIMIT = 5.0

_CHECKOUT = Path(__file__).parent.parent


def start(state: LabState, say: Say = silent) -> None:
    """
    Start the services that are not running, and return when they listen. The bridge must be up.
    """
    if proxy.configure(state):
        _stop(state, "proxy")
    if not _runs(state, "proxy", PROXY_PORT):
        proxy.prepare(state)
        _start(state, "proxy", PROXY_PORT, proxy.program(state), say)
    if write(state.dir / "mirror.code", _code()):
        _stop(state, "mirror")  # a service that was started before an update of this program
    if not _runs(state, "mirror", MIRROR_PORT):
        listen = f"{state.machine}:{MIRROR_PORT}"
        mirror = [
            sys.executable,
            "-m",
            "lab.package_mirror",
            "--state",
            str(state.dir),
            "--listen",
            listen,
        ]
        _start(state, "mirror", MIRROR_PORT, mirror, say)


def _code() -> str:
    """Return a hash of the mirror's programs."""
    parts = [*sorted(_CHECKOUT.glob("lab/*.py")), *sorted(_CHECKOUT.glob("lab/vendor/*.py"))]
    return hashlib.sha256(b"".join(part.read_bytes() for part in parts)).hexdigest() + "\n"


def stop(state: LabState) -> None:
    """Stop the running services; this also works after a `kill -9` or if none was started."""
    _stop(state, "mirror")
    _stop(state, "proxy")
    proxy.tidy(state)


def _runs(state: LabState, service: str, port: int) -> bool:
    return cgroup.populated(_group(state, service)) and _listens(state, port)


def _start(state: LabState, service: str, port: int, program: Sequence[str], say: Say) -> None:
    _stop(state, service)  # a service that runs but does not listen
    log = state.dir / f"{service}.log"
    cgroup.start(_group(state, service), program, log, {"PYTHONPATH": str(_CHECKOUT)})
    deadline = time.monotonic() + _START_LIMIT
    while not _listens(state, port):
        if time.monotonic() > deadline or not cgroup.populated(_group(state, service)):
            said = run_command.tail(log.read_text(errors="replace").splitlines())
            raise FleetError(f"The lab's {service} did not start, see {log}: {said}.")
        time.sleep(0.05)
    say(f"{service}: http://{state.machine}:{port}")


def _stop(state: LabState, service: str) -> None:
    group = _group(state, service)
    for pid in cgroup.pids(group):
        try:
            os.kill(pid, signal.SIGTERM)
        except ProcessLookupError:
            continue
    deadline = time.monotonic() + _STOP_LIMIT
    while cgroup.populated(group) and time.monotonic() < deadline:
        time.sleep(0.05)
    cgroup.remove(group)


def _group(state: LabState, service: str) -> str:
    return f"{state.prefix}/{service}"


def _listens(state: LabState, port: int) -> bool:
    try:
        with socket.create_connection((str(state.machine), port), timeout=1):
            return True
    except OSError:
        return False
