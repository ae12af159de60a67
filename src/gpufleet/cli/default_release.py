"""Find the default vLLM release of a command. Reads file names."""

from __future__ import annotations

from pathlib import Path

from gpufleet.versions import RELEASE, numbers

SHIPPED = "0.32.0"
"""The release of the lock that gpufleet ships, locks/vllm-0.32.0.txt."""


def default_release(root: Path | None = None) -> str:
    """
    Return the release of the project's newest lock, `locks/vllm-RELEASE.txt`.

    `root` is the project's directory (default: the current directory). If the project has no lock,
    return the release of the lock that gpufleet ships.
    """
    folder = (root or Path.cwd()) / "locks"
    names = (path.stem.removeprefix("vllm-") for path in folder.glob("vllm-*.txt"))
    found = [name for name in names if RELEASE.fullmatch(name)]
    return max(found, key=numbers, default=SHIPPED)
