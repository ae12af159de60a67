"""gpufleet as a wheel, built from what is checked out, in an environment of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.support.checkout import ROOT

UV = Path(sys.executable).with_name("uv")


def build_wheel(out: Path) -> Path:
    """Build it by the hatchling of uv.lock."""
    _run(UV, "build", "--wheel", "--offline", "--no-build-isolation", "-o", out)
    (found,) = out.glob("*.whl")
    return found


def install_wheel(wheel: Path, environment: Path) -> Path:
    """Install it with the dependencies of uv.lock, by their hashes; return its `gpufleet`."""
    project = {"UV_PROJECT_ENVIRONMENT": str(environment)}
    _run(UV, "sync", "--frozen", "--offline", "--no-dev", "--no-install-project", **project)
    _run(UV, "pip", "install", "--offline", "--no-deps", "--python", environment, wheel)
    return environment / "bin/gpufleet"


def _run(*command: object, **environment: str) -> None:
    done = subprocess.run(
        [*map(str, command)],
        cwd=ROOT,
        env=os.environ | environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
