"""What runs on this machine beside the nodes: the proxy to Debian, the mirror of everything else."""

from __future__ import annotations

from lab import mirror, proxy
from lab.progress import Say, silent
from lab.state import MIRROR_PORT, LabState


def start(state: LabState, say: Say = silent) -> None:
    """Start what is not running; the bridge must be up."""
    proxy.start(state, say)
    mirror.start(state.dir, f"{state.machine}:{MIRROR_PORT}")


def stop(state: LabState) -> None:
    """Stop what is running; works after a `kill -9`, and when nothing was ever started."""
    mirror.stop(state.dir)
    proxy.stop(state)
