"""The repository that the tests stand in."""

from __future__ import annotations

import hashlib
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[2]


def own_lab(name: str) -> str:
    """
    Return the id of a lab that belongs to this checkout's tests or benchmarks.

    Another checkout's run of the same test has another id, so that neither takes the other's away;
    a run of this one finds what a killed run has left. `name` has up to five characters, because
    an id has eight.
    """
    return name + hashlib.sha256(str(ROOT).encode()).hexdigest()[:3]


def commit() -> str:
    """Return what is checked out, shortened, for tables that say what they were made from."""
    return subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=10,
    ).stdout.strip()
