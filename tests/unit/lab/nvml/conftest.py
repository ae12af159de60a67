"""What every test of the simulated NVML needs: the library, and a machine that answers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from lab import nvml

INTERVIEW = Path(__file__).with_name("interview.py")


@dataclass(frozen=True)
class Machine:
    """A simulated machine: one profile, faults laid over it, and a state file of its own."""

    library: Path
    profile: Path
    overlay: Path
    state: Path

    def ask(self, *questions: str, timeout: float = 20) -> list[Any]:
        """The answers of a new process to all questions, in order."""
        run = self.run(json.dumps(questions), timeout=timeout)
        assert run.returncode == 0, run.stderr
        answers: list[Any] = json.loads(run.stdout)
        return answers

    def run(self, questions: str, timeout: float = 20) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-I", str(INTERVIEW), str(nvml.BINDING.parent)],
            input=questions,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
            env={
                **os.environ,
                "LD_LIBRARY_PATH": str(self.library.parent),
                "GPUFLEET_NVML_PROFILE": f"{self.profile}:{self.overlay}",
                "GPUFLEET_NVML_STATE": str(self.state),
            },
        )


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture
def machine(library: Path, tmp_path: Path) -> Callable[..., Machine]:
    """`machine("h100x8", "gpu.3.nvlink.down = 7")`: a profile by name, and lines laid over it."""

    def prepare(name: str, *faults: str) -> Machine:
        overlay = tmp_path / "overlay.conf"
        overlay.write_text("\n".join(faults) + "\n")
        return Machine(library, nvml.profile(name), overlay, tmp_path / "state")

    return prepare
