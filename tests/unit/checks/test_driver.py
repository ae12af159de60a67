"""The driver's own checks: silent, of two versions, too old; GPUs too old or too new."""

from __future__ import annotations

import pytest

from gpufleet.checks.finding import Severity
from gpufleet.checks.probe_facts import Needs
from tests.support.rows import each_row
from tests.support.silent_driver import GONE, silent, without_driver, without_module

CUDA_12_8 = Needs((12, 8), "the wheels of vLLM 0.20.0")
CUDA_13 = Needs((13, 0), "the wheels of vLLM 0.33.0")


def about_the_driver(judged):
    return {trouble for trouble in judged.troubles if trouble[0].startswith("driver-")}


# --- it does not answer


@each_row(
    ("missing", "severity", "words"),
    [
        ("version_mismatch", "block", ["different versions", "modprobe -r", "`reboot`"]),
        ("library_not_found", "block", ["libnvidia-ml.so.1", "ldconfig -p"]),
        ("no_permission", "unknown", ["/dev/nvidia*"]),
        ("no_ctypes", "unknown", ["apt install python3"]),
        ("timeout", "block", ["did not answer in time", "dmesg", "over the BMC"]),
        ("crashed", "block", ["crashed", "dpkg --audit"]),
        ("unknown", "block", ["NVML does not start", "unknown, code 999"]),
    ],
)
def test_a_silent_driver_is_explained_and_stops_the_node(
    document, judged, missing, severity, words
):
    code = {"code": 999} if missing == "unknown" else {}

    said = judged(silent(document("h100x8"), missing, **code))

    assert ("driver-loaded", severity, None) in said.troubles
    assert all(word in said.text("driver-loaded") for word in words)


def test_a_bare_node_is_told_what_installs_a_driver(document, judged):
    bare = without_driver(document("h100x8"))

    said = judged(bare)

    assert ("driver-loaded", "block", None) in said.troubles
    text = said.text("driver-loaded")
    assert "no NVIDIA driver is installed" in text
    assert "gpufleet lock INVENTORY" in text
    assert "gpufleet deploy node INVENTORY" in text
    assert "pyinfra INVENTORY deploys/node.py" in text


def test_a_bare_node_with_a_lock_is_told_to_install_the_driver_of_that(document, judged):
    bare = without_driver(document("h100x8"))

    text = judged(bare, {"gpu_lock": {"driver": "580.95.05"}}).text("driver-loaded")

    assert "install driver 580.95.05 of gpu_lock: `gpufleet deploy node INVENTORY`" in text
    assert "gpufleet lock" not in text


def test_what_a_silent_driver_was_not_asked_is_unknown_and_not_passed(document, judged):
    said = judged(silent(document("h100x8"), "timeout", seconds=20))

    assert said.worst("gpu-count").severity is Severity.UNKNOWN
    assert said.worst("mig").severity is Severity.UNKNOWN


def nouveau(document):
    document["system"]["modules"].append("nouveau")


def unsigned(document):
    document["system"]["secure_boot"] = True
    document["driver"]["disk"]["signer"] = GONE


def refused(document):
    document["system"]["secure_boot"] = True
    line = "Loading of module with unavailable key is rejected"
    document["kernel_log"]["lines"].append([7.1, line])


def not_built(document):
    document["driver"]["disk"] = GONE


def given_away(document):
    for function in document["pci"]:
        function["driver"] = "vfio-pci"


def no_device_files(document):
    document["driver"]["module"] = "570.124.06"


def no_devices(document):
    document["pci"] = []


def nothing_more(document):
    """Only NVML's word."""


@each_row(
    ("also", "words"),
    [
        (nouveau, ["nouveau uses the GPUs", "update-initramfs"]),
        (unsigned, ["Secure Boot", "not signed", "mokutil --import"]),
        (refused, ["Secure Boot", "unavailable key is rejected"]),
        (not_built, ["not built for 6.", "dkms autoinstall"]),
        (given_away, ["every GPU is bound to vfio-pci"]),
        (no_device_files, ["570.124.06 is loaded", "nvidia-modprobe -c0 -u"]),
        (no_devices, ["no NVIDIA device", "lspci -d 10de:"]),
        (nothing_more, ["kernel module is not loaded", "modprobe nvidia"]),
    ],
)
def test_why_the_module_is_not_loaded(document, judged, also, words):
    found = without_module(document("h100x8"))
    also(found)

    said = judged(found)

    assert ("driver-loaded", "block", None) in said.troubles
    assert all(word in said.text("driver-loaded") for word in words)


def test_an_unsigned_module_without_secure_boot_is_not_the_reason(document, judged):
    found = without_module(document("h100x8"))
    found["driver"]["disk"]["signer"] = GONE

    assert "Secure Boot" not in judged(found).worst("driver-loaded").found


# --- two versions


def test_a_library_newer_than_the_loaded_module_stops_the_node(document, judged):
    """What an unattended upgrade leaves behind until the next reboot."""
    found = silent(document("h100x8"), "version_mismatch", code=18)
    found["driver"]["library"]["version"] = "570.172.08"
    found["driver"]["nvml"] = "12.570.172.08"

    said = judged(found)

    assert about_the_driver(said) >= {("driver-versions", "block", None)}
    assert "570.124.06" in said.worst("driver-versions").found
    assert "570.172.08" in said.worst("driver-versions").found


def test_versions_come_from_wherever_they_are_known(document, judged):
    """Without sysfs from /proc; without a file name from NVML's own answer."""
    found = silent(document("h100x8"), "version_mismatch", code=18)
    found["driver"]["module"] = GONE
    found["driver"]["library"] = GONE
    found["driver"]["nvml"] = "12.575.57.08"

    text = judged(found).worst("driver-versions").found

    assert "570.124.06" in text
    assert "575.57.08" in text


def test_a_second_set_of_libraries_is_a_warning_while_nvml_answers(document, judged):
    found = document("h100x8")
    found["driver"]["library"]["version"] = "570.172.08"

    assert judged(found).troubles == {("driver-versions", "warn", None)}


def test_versions_that_cannot_be_read_are_unknown(document, judged):
    found = document("h100x8")
    found["driver"]["library"] = found["driver"]["nvml"] = {"missing": "timeout"}

    assert judged(found).troubles == {("driver-versions", "unknown", None)}


def test_versions_are_not_compared_where_one_of_the_two_is_not_installed(document, judged):
    said = judged(without_module(document("h100x8")))

    assert said.worst("driver-versions").severity is Severity.INFO


# --- too old for vLLM


@each_row(
    ("profile", "needs", "severity"),
    [
        ("h100x8", Needs(), Severity.OK),  # nothing declared
        ("h100x8", CUDA_12_8, Severity.OK),  # R570 runs 12.8
        ("b200x8", CUDA_12_8, Severity.OK),  # R580 runs 13.0, and whatever is older
        ("b200x8", CUDA_13, Severity.OK),
        ("l40sx8", CUDA_12_8, Severity.INFO),  # R550 runs 12.4: minor version compatibility
        ("h100x8", CUDA_13, Severity.BLOCK),
        ("rtx4090x2", CUDA_13, Severity.BLOCK),
    ],
)
def test_the_driver_runs_the_wheels_cuda(document, judged, profile, needs, severity):
    found = judged(document(profile), needs=needs).worst("driver-minimum")

    assert found.severity is severity


def test_a_driver_too_old_names_what_it_runs_and_what_it_would_take(document, judged):
    said = judged(document("h100x8"), needs=CUDA_13)

    assert said.troubles == {("driver-minimum", "block", None)}
    text = said.text("driver-minimum")
    assert all(word in text for word in ["570.124.06", "12.8", "13.0", "580.65.06", "vLLM 0.33.0"])


def test_only_data_centre_boards_are_offered_forward_compatibility(document, judged):
    """On GeForce the compatibility package makes CUDA end with error 804."""
    assert "cuda-compat-13-0" in judged(document("h100x8"), needs=CUDA_13).text("driver-minimum")
    geforce = judged(document("rtx4090x2"), needs=CUDA_13)
    assert "cuda-compat" not in geforce.text("driver-minimum")


def test_a_driver_that_is_too_old_is_replaced_by_that_of_the_lock(document, judged):
    lock = {"gpu_lock": {"driver": "580.95.05"}}
    old = {"gpu_lock": {"driver": "570.124.06"}}

    assert "install driver 580.95.05 of gpu_lock: `gpufleet deploy node" in judged(
        document("h100x8"), lock, needs=CUDA_13
    ).text("driver-minimum")
    assert "install driver" not in judged(document("h100x8"), old, needs=CUDA_13).text(
        "driver-minimum"
    )


def test_declared_forward_compatibility_is_a_warning(document, judged):
    """The operator asked for it; whether the package is there is not read."""
    vllm = {
        "version": "0.33.0",
        "lock": "locks/vllm.txt",
        "listen": "127.0.0.1",
        "environment": {"VLLM_ENABLE_CUDA_COMPATIBILITY": "1"},
    }

    said = judged(document("h100x8"), settings={"vllm": vllm}, needs=CUDA_13)

    assert said.troubles == {("driver-minimum", "warn", None)}


@pytest.mark.parametrize(("cuda", "severity"), [(11080, "block"), (12000, "ok")])
def test_a_declared_vllm_needs_cuda_12_at_least(document, judged, cuda, severity):
    """Also where its lock does not say which CUDA it brings."""
    found = document("h100x8")
    found["driver"]["cuda"] = cuda
    vllm = {"version": "0.32.0", "lock": "locks/vllm.txt", "listen": "127.0.0.1"}

    said = judged(found, settings={"vllm": vllm})

    assert said.worst("driver-minimum").severity.word == severity
    assert judged(found).worst("driver-minimum").severity is Severity.OK


def test_a_driver_whose_cuda_is_not_told_is_unknown(document, judged):
    found = document("h100x8")
    found["driver"]["cuda"] = {"missing": "unknown", "code": 999}

    assert judged(found, needs=CUDA_13).troubles == {("driver-minimum", "unknown", None)}


def test_the_cpu_build_of_vllm_needs_no_cuda(document, judged):
    vllm = {"version": "0.32.0", "lock": "l", "listen": "127.0.0.1", "device": "cpu"}
    found = document("t4x1")
    found["gpus"][0]["compute_capability"] = [5, 0]

    assert judged(found, settings={"vllm": vllm}, needs=CUDA_13).troubles == set()


# --- GPUs that the wheels have no kernels for


@each_row(
    ("capability", "needs", "severity"),
    [
        ([6, 1], Needs(), Severity.BLOCK),  # Pascal
        ([7, 0], Needs(), Severity.OK),  # Volta: some vLLM has kernels for it
        ([7, 0], CUDA_12_8, Severity.OK),
        ([7, 0], CUDA_13, Severity.BLOCK),
        ([7, 5], CUDA_13, Severity.OK),
        ([9, 0], Needs((12, 4)), Severity.OK),
        ([10, 0], Needs((12, 4)), Severity.BLOCK),  # Blackwell came with CUDA 12.8
        ([12, 0], Needs((12, 8)), Severity.OK),
        ([12, 1], Needs((12, 6)), Severity.BLOCK),
        ([13, 7], CUDA_13, Severity.OK),  # of the future: not known to be too new
    ],
)
def test_which_gpus_the_wheels_have_kernels_for(document, judged, capability, needs, severity):
    found = document("b200x8")
    found["gpus"][5]["compute_capability"] = capability

    said = judged(found, needs=needs)

    assert said.worst("compute-capability", gpu=5).severity is severity
    if severity is Severity.BLOCK:
        assert f"{capability[0]}.{capability[1]}" in said.text("compute-capability", gpu=5)


def test_a_capability_that_is_not_told_is_unknown(document, judged):
    found = document("h100x8")
    found["gpus"][2]["compute_capability"] = {"missing": "unknown", "code": 999}

    said = judged(found)

    assert said.worst("compute-capability", gpu=2).severity is Severity.UNKNOWN


# --- uvm-device

CUDA = {"vllm": {"version": "0.32.0", "lock": "l", "listen": "127.0.0.1"}}
CPU = {"vllm": {**CUDA["vllm"], "device": "cpu"}}


@each_row(
    ("settings", "severity", "loaded"),
    [(CUDA, "block", True), (CUDA, "block", False), ({}, "info", True), (CPU, "ok", True)],
)
def test_a_missing_uvm_device_stops_cuda(document, judged, settings, severity, loaded):
    found = document("h100x8")
    found["driver"]["devices"] = ["nvidia0", "nvidiactl"]
    if not loaded:
        found["system"]["modules"].remove("nvidia_uvm")

    said = judged(found, settings)

    assert said.worst("uvm-device").severity.word == severity
    if severity == "block":
        assert ("is not loaded" in said.text("uvm-device")) != loaded
        assert "nvidia-modprobe -c0 -u" in said.text("uvm-device")
        assert "even if you install the driver yourself" in said.text("uvm-device")


def test_device_files_that_cannot_be_read_are_unknown(document, judged):
    found = document("h100x8")
    found["driver"]["devices"] = {"missing": "error", "detail": "I/O error"}

    assert judged(found, CUDA).troubles == {("uvm-device", "unknown", None)}


def test_a_probe_of_before_did_not_look_for_device_files_and_that_is_said(document, judged):
    found = document("h100x8")
    del found["driver"]["devices"]

    said = judged(found, CUDA)

    assert said.troubles == set()
    assert "older gpufleet" in said.worst("uvm-device").found
