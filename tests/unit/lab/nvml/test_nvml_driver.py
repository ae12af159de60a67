"""A library that finds out which driver is loaded opens for its own version, and for no other."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from lab import nvml
from tests.unit.lab.nvml.conftest import Machine

SUCCESS, NOT_LOADED, MISMATCH = 0, 9, 18


@dataclass(frozen=True)
class Node:
    """Where a package has put a library, and where a kernel shows which driver it has."""

    machine: Machine
    loaded: Path
    device: Path

    def load(self, version: str | None) -> None:
        """Have this driver's module loaded, or none."""
        if version is None:
            self.loaded.unlink(missing_ok=True)
        else:
            self.loaded.write_text(f"{version}\n")

    def opens(self) -> int:
        """Return what nvmlInit answers."""
        [answer] = self.machine.ask("nvmlDeviceGetCount() and 0")
        return answer["error"] if isinstance(answer, dict) else answer


@pytest.fixture
def node(machine: Callable[..., Machine], library: Path, tmp_path: Path) -> Callable[[str], Node]:
    """A node on whose disk is the library of a version."""

    def installed(version: str) -> Node:
        loaded, device = tmp_path / "version", tmp_path / "nvidiactl"
        found = machine("h100x8", f"system.loaded = {loaded}", f"system.device = {device}")
        folder = tmp_path / "lib"
        folder.mkdir(exist_ok=True)
        link = folder / nvml.SONAME
        link.unlink(missing_ok=True)
        shutil.copy(library, folder / f"libnvidia-ml.so.{version}")
        link.symlink_to(f"libnvidia-ml.so.{version}")
        return Node(Machine(link, found.profile, found.overlay, found.state), loaded, device)

    return installed


@pytest.mark.parametrize(
    ("loaded", "answer"),
    [
        (None, NOT_LOADED),
        ("580.95.05", SUCCESS),
        ("580.178.04", MISMATCH),
        ("580.95", MISMATCH),
        ("580.95.051", MISMATCH),
        ("", MISMATCH),
    ],
)
def test_only_the_library_of_the_loaded_version_opens(
    node: Callable[[str], Node], loaded: str | None, answer: int
) -> None:
    here = node("580.95.05")
    here.load(loaded)

    assert here.opens() == answer


def test_the_answer_follows_loading_and_unloading(node: Callable[[str], Node]) -> None:
    here = node("595.91.07")
    answers = []
    for loaded in ("580.178.04", None, "595.91.07", "580.178.04"):
        here.load(loaded)
        answers.append(here.opens())

    assert answers == [MISMATCH, NOT_LOADED, SUCCESS, MISMATCH]


def test_a_new_library_beside_the_old_module_does_not_open(node: Callable[[str], Node]) -> None:
    """What an upgrade leaves until the module is loaded anew."""
    node("580.95.05").load("580.95.05")
    upgraded = node("580.178.04")

    assert upgraded.opens() == MISMATCH
    upgraded.load("580.178.04")
    assert upgraded.opens() == SUCCESS


@pytest.mark.parametrize(
    ("version", "cuda", "branch"),
    [
        ("580.95.05", 13000, "r580_00"),
        ("595.91.07", 13020, "r595_00"),
        ("615.71.09", 13040, "r615_00"),
    ],
)
def test_versions_are_those_of_the_package_not_of_the_profile(
    node: Callable[[str], Node], version: str, cuda: int, branch: str
) -> None:
    here = node(version)
    here.load(version)

    assert here.machine.ask(
        "nvmlSystemGetDriverVersion()",
        "nvmlSystemGetNVMLVersion()",
        "nvmlSystemGetCudaDriverVersion_v2()",
        "nvmlSystemGetDriverBranch().branch",
        "nvmlDeviceGetGspFirmwareVersion(gpu(0))",
    ) == [version, f"{cuda // 1000}.{version}", cuda, branch, version]


def test_its_own_version_is_told_unopened(node: Callable[[str], Node]) -> None:
    """As the probe asks for it while nothing else is answered."""
    here = node("580.178.04")
    here.load("580.95.05")
    asked = (
        "import ctypes; nvml = ctypes.CDLL('libnvidia-ml.so.1'); "
        "text = ctypes.create_string_buffer(96); "
        "print(nvml.nvmlSystemGetNVMLVersion(text, 96), text.value.decode())"
    )

    printed = subprocess.run(
        [sys.executable, "-c", asked],
        capture_output=True,
        text=True,
        check=True,
        env={
            **os.environ,
            "LD_LIBRARY_PATH": str(here.machine.library.parent),
            "GPUFLEET_NVML_PROFILE": f"{here.machine.profile}:{here.machine.overlay}",
        },
    ).stdout

    assert printed.strip() == "0 13.580.178.04"


def test_who_has_the_library_open_holds_the_device(node: Callable[[str], Node]) -> None:
    """Until the last user of the library has closed it; a failed opening holds nothing."""
    here = node("580.95.05")
    held = f"""
import ctypes, json, os
nvml = ctypes.CDLL({str(here.machine.library)!r})
def holds():
    links = [f"/proc/self/fd/{{each}}" for each in os.listdir("/proc/self/fd")]
    return any(os.readlink(each) == {str(here.device)!r} for each in links if os.path.exists(each))
found = []
for call in ("nvmlInit_v2", "nvmlInit_v2", "nvmlShutdown", "nvmlShutdown"):
    found.append([getattr(nvml, call)(), holds()])
print(json.dumps(found))
"""

    def asked() -> list[list[object]]:
        environment = {
            **os.environ,
            "GPUFLEET_NVML_PROFILE": f"{here.machine.profile}:{here.machine.overlay}",
        }
        run = subprocess.run(
            [sys.executable, "-c", held],
            capture_output=True,
            text=True,
            check=True,
            env=environment,
        )
        answers: list[list[object]] = json.loads(run.stdout)
        return answers

    here.load("580.178.04")
    assert asked()[:2] == [[MISMATCH, False], [MISMATCH, False]]
    here.load("580.95.05")
    assert asked() == [[SUCCESS, True], [SUCCESS, True], [SUCCESS, True], [SUCCESS, False]]


def test_a_profile_without_the_key_says_what_it_says(machine: Callable[..., Machine]) -> None:
    """Documents of machines and nodes with a driver have their version in the profile alone."""
    [driver] = machine("h100x8").ask("nvmlSystemGetDriverVersion()")

    assert driver == "570.124.06"
