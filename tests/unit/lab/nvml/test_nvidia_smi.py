"""What is typed to the stand-in for nvidia-smi repairs a simulated GPU, and no other one."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from lab.active_faults import Broken, machine_with
from lab.machine import profile_text
from lab.vendor.templates import program
from tests.support.record_node import probe

REPAIRS = {
    "power-capped": ("-i 1 -pl 700", "power_limit_milliwatts"),
    "persistence-off": ("-pm 1", "persistence_mode"),
    "compute-exclusive": ("-c 0 -i 1", "compute_mode"),
    "mig-on": ("-mig 0 -i 1", "mig_mode"),
    "recovery-reset": ("-r -i 1", "recovery_action"),
    "remap-pending": ("-r", "remapped_rows"),
}


@pytest.mark.parametrize("fault", REPAIRS)
def test_a_command_gives_a_gpu_back_what_a_sound_one_has(
    library: Path, tmp_path: Path, fault: str
) -> None:
    typed, key = REPAIRS[fault]
    profile, state = tmp_path / "nvml.conf", tmp_path / "nvml.conf.state"
    profile.write_text(profile_text(machine_with("h100x8", [Broken(fault, 1)])))
    smi = tmp_path / "nvidia-smi"
    smi.write_text(str(program("nvidia_smi.py", VERSION="580.95.05").content))

    def values() -> list[object]:
        found = [gpu[key] for gpu in probe(library.parent, profile)["gpus"][:2]]
        return [each["pending"] if key == "remapped_rows" else each for each in found]

    sound, broken = values()
    assert broken != sound
    subprocess.run(
        [sys.executable, smi, *shlex.split(typed)],
        env={
            **os.environ,
            "LD_LIBRARY_PATH": str(library.parent),
            "GPUFLEET_NVML_PROFILE": str(profile),
            "GPUFLEET_NVML_STATE": str(state),
        },
        check=True,
        timeout=60,
    )
    assert values() == [sound, sound]
