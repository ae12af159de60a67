"""How a driver stands, and what is done about it: the table of
docs/gpu-nodes/driver-activation.md."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from gpufleet.gpu_software.driver_activation import (
    STOP_ORDER,
    Active,
    Blocked,
    InUse,
    NeedsReboot,
    NeedsReload,
    Unknown,
    decide,
    driver_state,
)
from tests.support.checkout import ROOT
from tests.support.rows import each_row

OLD, NEW = "570.133.20", "580.95.05"
PATCH = "580.178.04"
HOLDER = {"pid": 4711, "name": "python3", "unit": "session-3.scope", "devices": ["/dev/nvidia0"]}


def document(
    loaded: str | None,
    disk: str | None,
    library: str | None = "as the disk",
    **more: Any,
) -> dict[str, Any]:
    """Return a recorded node's probe, with other versions of its driver."""
    found = copy.deepcopy(
        json.loads((ROOT / "src/gpufleet/catalog/data/nodes/h100x8.json").read_text())
    )
    absent = {"missing": "absent"}
    kernel = found["kernel"]
    here = {"kernel": kernel, "running": True, "newest": True, "signer": absent}
    library = disk if library == "as the disk" else library
    found["driver"] |= {
        "module": loaded or absent,
        "disk": {"version": disk, "signer": absent, "file": "/x"} if disk else absent,
        "library": {"file": "/x", "version": library} if library else absent,
        "nvml": absent,
        "kernels": [here | {"nvidia": disk or absent}],
    }
    modules = ["nvidia", "nvidia_uvm", "nvidia_modeset"] if loaded else []
    found["system"] |= {"modules": ["ext4", *modules], "reboot_required": False}
    return found | more


def with_newer_kernel(found: dict[str, Any], module: str | None) -> dict[str, Any]:
    """Add a kernel that boots next."""
    found["driver"]["kernels"][0]["newest"] = False
    found["driver"]["kernels"].append(
        {
            "kernel": "9.9.9-newer",
            "running": False,
            "newest": True,
            "nvidia": module or {"missing": "absent"},
            "signer": {"missing": "absent"},
        }
    )
    return found


def test_one_version_everywhere_is_in_force():
    assert driver_state(document(NEW, NEW), NEW) == Active(NEW)
    assert driver_state(document(NEW, NEW), "580") == Active(NEW)


def test_without_the_librarys_file_nvml_says_its_version():
    """As NVML says it: CUDA's major version before the driver's."""
    seen = document(NEW, NEW, None)
    seen["driver"]["nvml"] = f"13.{NEW}"
    assert driver_state(seen, NEW) == Active(NEW)
    seen["driver"]["nvml"] = f"12.{OLD}"
    assert f"the libraries are {OLD}" in str(driver_state(seen, NEW))


def test_the_other_flavour_of_the_same_version_is_another_module():
    """Both are 580.95.05 to modinfo and to NVML."""
    seen = document(NEW, NEW)
    assert "Open Kernel Module" in seen["driver"]["proc"]
    assert driver_state(seen, NEW, "open") == Active(NEW)
    found = driver_state(seen, NEW, "proprietary")
    assert isinstance(found, NeedsReload)
    assert "gpu_lock.modules is proprietary" in found.reason
    # What does not say which it is, is not guessed at.
    seen["driver"]["proc"] = {"missing": "absent"}
    assert driver_state(seen, NEW, "proprietary") == Active(NEW)


def test_recorded_machines_are_in_force_as_they_are():
    """The probes of healthy machines, none of which this module was written for."""
    for path in sorted(Path(ROOT / "src/gpufleet/catalog/data/nodes").glob("*.json")):
        assert isinstance(driver_state(json.loads(path.read_text()), None), Active), path.name


def test_another_module_on_the_disk_is_loaded_without_a_reboot_when_only_ours_hold_it():
    active = (STOP_ORDER[3], "vllm-b-0.service", "vllm-a-0.service", STOP_ORDER[1])
    unit = {**HOLDER, "unit": "vllm-a-0.service"}
    found = driver_state(document(NEW, PATCH, active=active, holders=[unit]), "580")
    assert isinstance(found, NeedsReload)
    assert found.version == PATCH
    assert found.stop == ("vllm-a-0.service", "vllm-b-0.service", STOP_ORDER[1], STOP_ORDER[3])
    assert found.unload == ("nvidia_uvm", "nvidia_modeset", "nvidia")
    assert found.load == ("nvidia", "nvidia_modeset", "nvidia_uvm")
    assert found.start == (STOP_ORDER[3], STOP_ORDER[1])  # stages wait for the check


def test_whoever_else_holds_it_is_named_and_what_he_has_open():
    found = driver_state(document(NEW, PATCH, holders=[HOLDER]), PATCH)
    assert isinstance(found, InUse)
    assert "process 4711 python3 of session-3.scope (/dev/nvidia0)" in found.sentence


def test_of_many_holders_there_is_a_count():
    many = [HOLDER | {"pid": pid} for pid in range(1, 10)]
    found = driver_state(document(NEW, PATCH, holders=many), PATCH)
    assert "and 5 more" in found.sentence


def test_what_was_stopped_and_unloaded_before_comes_back():
    kept = {"units": [STOP_ORDER[4], "vllm-a-0.service"], "modules": ["nvidia_peermem"]}
    found = driver_state(document(None, PATCH, kept=kept), PATCH)
    assert isinstance(found, NeedsReload)
    assert found.load == ("nvidia", "nvidia_uvm", "nvidia_peermem")
    assert found.start == (STOP_ORDER[4],)


@each_row(
    ("seen", "wanted", "kind", "said"),
    [
        (document(OLD, OLD), NEW, Blocked, "gpu_lock.driver is 580.95.05"),
        (document(NEW, NEW), "58", Blocked, "gpu_lock.driver is 58"),
        (document(OLD, NEW, OLD), NEW, Blocked, "was interrupted"),
        (document(OLD, NEW, None), NEW, Blocked, "libnvidia-ml.so.1 is missing"),
        (document(None, None), NEW, Blocked, "dkms status"),
        (document(NEW, PATCH, used_by=["nvidia_uvm", "gdrdrv"]), PATCH, NeedsReboot, "gdrdrv"),
        (with_newer_kernel(document(None, None, NEW), NEW), NEW, NeedsReboot, "9.9.9-newer"),
        (with_newer_kernel(document(None, None, NEW), None), NEW, Blocked, "dkms status"),
        (with_newer_kernel(document(None, None, NEW), OLD), NEW, Blocked, "dkms status"),
    ],
)
def test_what_a_reload_does_not_mend(seen, wanted, kind, said):
    found = driver_state(seen, wanted)
    assert isinstance(found, kind), found
    assert said in str(found)


def test_nouveau_gives_gpus_up_at_a_boot_only():
    seen = document(None, NEW)
    seen["system"]["modules"].append("nouveau")
    assert isinstance(driver_state(seen, NEW), NeedsReboot)


def test_nvmls_own_word_beats_equal_numbers():
    seen = document(NEW, NEW)
    seen["driver"]["init"] = {"missing": "version_mismatch", "code": 18}
    assert isinstance(driver_state(seen, NEW), NeedsReboot)


@pytest.mark.parametrize("fact", ["module", "disk"])
def test_what_could_not_be_read_is_never_in_force(fact):
    seen = document(NEW, NEW)
    seen["driver"][fact] = {"missing": "timeout", "seconds": 5, "detail": "modinfo"}
    found = driver_state(seen, NEW)
    assert isinstance(found, Unknown)
    assert "timeout: modinfo" in found.reasons[0]


def test_what_the_next_boot_changes_is_a_remark_and_no_reboot():
    seen = with_newer_kernel(document(NEW, NEW), None)
    seen["system"]["reboot_required"] = True
    found = driver_state(seen, NEW)
    assert isinstance(found, Active)
    assert "has no NVIDIA module" in found.remarks[0]
    assert "reboot-required" in found.remarks[1]


REBOOT = NeedsReboot("nouveau holds the GPUs", NEW)
RELOAD = NeedsReload("old is loaded", NEW)


@each_row(
    ("state", "policy", "terminal", "way"),
    [
        (Active(NEW), "never", False, "nothing"),
        (RELOAD, "never", False, "reload"),
        (RELOAD, "ask", True, "reload"),
        (REBOOT, "when_needed", False, "reboot"),
        (REBOOT, "ask", True, "ask"),
        (REBOOT, "ask", False, "fail"),
        (REBOOT, "never", True, "fail"),
        (InUse("x", ()), "when_needed", True, "fail"),
        (Blocked(("x",)), "when_needed", True, "fail"),
        (Unknown(("x",)), "when_needed", True, "fail"),
    ],
)
def test_what_is_done(state, policy, terminal, way):
    """Nobody's process is ever ended by a reboot, and nothing is rebooted on a guess."""
    assert decide(state, policy, terminal=terminal).way == way


def test_a_reboot_that_may_not_be_says_who_forbids_it():
    assert "gpu.reboot is never" in decide(REBOOT, "never", terminal=True).said
    assert "no terminal" in decide(REBOOT, "ask", terminal=False).said
