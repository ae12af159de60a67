"""What an operator switches stays switched for the next process, until the state is deleted."""

import os
import subprocess
import sys

import pytest

from lab import nvml


def test_a_switched_mode_is_read_back_by_another_process(machine):
    """Persistence, compute mode and power limit change at once, on the one GPU only."""
    node = machine("h100x8", "gpu.*.persistence = 0")
    read = (
        "[nvmlDeviceGetPersistenceMode(gpu(i)) for i in (2, 3)]",
        "[nvmlDeviceGetComputeMode(gpu(i)) for i in (2, 3)]",
        "[nvmlDeviceGetPowerManagementLimit(gpu(i)) // 1000 for i in (2, 3)]",
    )
    assert node.ask(*read) == [[0, 0], [0, 0], [700, 700]]

    first = node.ask(
        "nvmlDeviceSetPersistenceMode(gpu(3), 1)",
        "nvmlDeviceSetComputeMode(gpu(3), 3)",
        "nvmlDeviceSetPowerManagementLimit(gpu(3), 600000)",
        *read,
    )

    assert first[3:] == node.ask(*read) == [[0, 1], [0, 3], [700, 600]]
    node.state.unlink()
    assert node.ask(*read) == [[0, 0], [0, 0], [700, 700]]


def test_a_mode_that_waits_for_a_reset(machine):
    """ECC everywhere and MIG on Ampere become pending; MIG on Hopper switches at once."""
    ampere = machine("a100x8").ask(
        "nvmlDeviceSetEccMode(gpu(0), 0)",
        "nvmlDeviceSetMigMode(gpu(0), 1)",
        "nvmlDeviceGetEccMode(gpu(0))",
        "nvmlDeviceGetMigMode(gpu(0))",
    )
    assert ampere[2:] == [[1, 0], [0, 1]]

    hopper = machine("h100x8").ask(
        "nvmlDeviceSetMigMode(gpu(1), 1)", "nvmlDeviceGetMigMode(gpu(1))"
    )
    assert hopper == [0, [1, 1]]


def test_nonsense_is_refused(machine):
    """A limit outside the board's range, an unknown mode: invalid argument, nothing written."""
    node = machine("h100x8")

    answers = node.ask(
        "nvmlDeviceSetPowerManagementLimit(gpu(0), 1)",
        "nvmlDeviceSetComputeMode(gpu(0), 1)",
        "nvmlDeviceSetPersistenceMode(gpu(0), 2)",
    )

    assert answers == [{"error": 2}] * 3
    assert not node.state.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can try what others may not")
def test_only_root_switches(machine):
    """Anybody else gets no permission, as from the real driver."""
    question = "(__import__('os').setuid(65534), nvmlDeviceSetPersistenceMode(gpu(0), 1))"

    assert machine("t4x1").ask(question) == [{"error": 4}]


def test_without_a_named_state_file_it_lies_beside_the_profile(machine, tmp_path):
    """A node needs no more than its profile in place."""
    node = machine("t4x1")
    profile = tmp_path / "nvml.conf"
    profile.write_text(node.profile.read_text())
    env = {
        "LD_LIBRARY_PATH": str(node.library.parent),
        "GPUFLEET_NVML_PROFILE": str(profile),
    }
    script = (
        f"import sys; sys.path.insert(0, {str(nvml.BINDING.parent)!r})\n"
        "from pynvml import *\n"
        "nvmlInit(); nvmlDeviceSetPersistenceMode(nvmlDeviceGetHandleByIndex(0), 0)"
    )

    subprocess.run([sys.executable, "-c", script], env=env, check=True)

    assert (tmp_path / "nvml.conf.state").read_text() == "gpu.0.persistence = 0\n"
