"""Resolve the packages of a program with uv and a package index. The module starts uv as a process.

The version of uv is pinned in `pyproject.toml`, so that every machine creates the same locks.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from tempfile import NamedTemporaryFile

from gpufleet.artifacts.package_lock import Program
from gpufleet.errors import FleetError
from gpufleet.sanitize import printable

# uv reads the metadata of vLLM's 200 packages, but no wheels. This takes a minute with a slow
# index.
RESOLVE_SECONDS = 900
# The number of lines of uv's output that an error shows. The reason is at the end.
_SAID_LINES = 20


def resolve(
    requirements: Iterable[str],
    program: Program,
    *,
    python: str | None = None,
    index: str | None = None,
    find_links: Sequence[str] = (),
    constraints: str = "",
) -> str:
    """
    Return uv's resolution of the requirements in the format of `pylock.toml`.

    Only wheels are used. `index` replaces uv's default index or `UV_DEFAULT_INDEX`. It is passed in
    the environment, because a URL may contain a password. `constraints` are version pins that the
    resolution must satisfy. Raises `FleetError` if uv finds no compatible wheels or exceeds its
    time limit.
    """
    from uv import find_uv_bin

    words = [find_uv_bin(), "pip", "compile", "-", "--no-config", "--quiet", "--no-header"]
    words += ["--no-annotate", "--only-binary", ":all:", "--format", "pylock.toml"]
    words += ["--python", sys.executable, "--python-version", python or program.python]
    words += ["--python-platform", program.platform] if program.platform else ["--universal"]
    words += [word for each in find_links for word in ("--find-links", each)]
    environment = dict(os.environ)
    if index:
        environment["UV_DEFAULT_INDEX"] = index
    try:
        with NamedTemporaryFile("w", suffix=".txt", encoding="utf-8") as pins:
            pins.write(constraints)
            pins.flush()
            done = subprocess.run(
                [*words, "--constraints", pins.name],
                input="".join(f"{each}\n" for each in requirements),
                capture_output=True,
                text=True,
                env=environment,
                timeout=RESOLVE_SECONDS,
                check=False,
            )
    except subprocess.TimeoutExpired:
        raise FleetError(
            f"uv did not find compatible versions within {RESOLVE_SECONDS} s: run the command again"
        ) from None
    if done.returncode:
        said = [printable(line) for line in done.stderr.splitlines() if line.strip()]
        raise FleetError("uv found no compatible wheels:", *said[-_SAID_LINES:])
    return done.stdout
