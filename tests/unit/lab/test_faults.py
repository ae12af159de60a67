"""The lab's faults: each really breaks something, on all hardware that can have it, also together.

Whether NVML answers otherwise with a fault than without is asked through the unmodified binding.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from functools import cache
from itertools import combinations

import pytest

from gpufleet.catalog.checks import CHECKS
from gpufleet.checks.finding import Severity
from gpufleet.errors import FleetError
from lab import machine, nvml
from lab.faults import FAULTS, fault, find_fault, possible
from lab.machine import Profile
from tests.support.checkout import ROOT

pytestmark = pytest.mark.slow

DOCUMENT = ROOT / "docs/develop/lab-faults.md"
KEYS = ROOT / "docs/develop/lab-profiles.md"
INTERVIEW = ROOT / "tests/unit/lab/nvml/interview.py"
ON = {
    name: next(at for at in ("h100x8", "b200x8", "t4x1", "gb200x4") if each.applies(Profile.of(at)))
    for name, each in FAULTS.items()
}

SILENT = 10  # seconds after which NVML is taken to hang; it answers within one

# Everything that a fault may change, asked of the last GPU of a machine.
QUESTIONS = (
    "nvmlDeviceGetCount()",
    "[nvmlDeviceGetUUID(gpu(i)) for i in range(nvmlDeviceGetCount())]",
    "nvmlGetExcludedDeviceCount()",
    "nvmlSystemGetDriverVersion()",
    *(
        f"[nvmlDeviceGet{what}({{gpu}}) for _ in range(8)]"
        for what in (
            "Name", "VbiosVersion", "EccMode", "MigMode", "ComputeMode", "PersistenceMode",
            "RetiredPagesPendingStatus", "CurrentClocksEventReasons", "CurrPcieLinkWidth",
            "PcieReplayCounter", "PowerManagementLimit", "RemappedRows", "RowRemapperHistogram",
            "MemoryInfo", "ComputeRunningProcesses", "MaxPcieLinkGeneration",
        )
    ),
    "nvmlDeviceGetTotalEccErrors({gpu}, 1, 0)",
    "nvmlDeviceGetTotalEccErrors({gpu}, 0, 0)",
    "filled('nvmlDeviceGetSramEccErrorStatus', 'c_nvmlEccSramErrorStatus_v1_t', {index})",
    "[len(nvmlDeviceGetRetiredPages({gpu}, cause)) for cause in (0, 1)]",
    "nvmlDeviceValidateInforom({gpu})",
    "nvmlDeviceGetTemperature({gpu}, 0)",
    "[field({index}, n) for n in (82, 230)]",
    "[nvmlDeviceGetNvLinkState({gpu}, link) for link in range(18)]",
    "[nvmlDeviceGetNvLinkErrorCounter({gpu}, 3, n) for n in range(5)]",
    "[field({index}, n, 3) for n in (208, 211, 214, 220)]",
    "fabric({index}, 'c_nvmlGpuFabricInfo_v2_t')",
    "nvmlDeviceGetRepairStatus({gpu})",
)  # fmt: skip


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    return nvml.build(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="session")
def answers(library, tmp_path_factory):
    """`answers(machine)`: what NVML says of its last GPU; "hang" or "crash" if it says nothing."""

    def asked(about):
        profile = tmp_path_factory.mktemp("profile") / "nvml.conf"
        profile.write_text(machine.profile_text(about))
        last = about.profile.count - 1
        questions = [
            question.format(gpu=f"gpu({last})", index=last) if "{" in question else question
            for question in QUESTIONS
        ]
        try:
            done = subprocess.run(
                [sys.executable, "-I", INTERVIEW, nvml.BINDING.parent],
                input=json.dumps(questions),
                env={
                    **os.environ,
                    "LD_LIBRARY_PATH": str(library.parent),
                    "GPUFLEET_NVML_PROFILE": str(profile),
                },
                capture_output=True,
                text=True,
                timeout=SILENT,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "hang"
        assert done.returncode <= 0, done.stderr
        return "crash" if done.returncode else json.loads(done.stdout)

    return asked


@pytest.fixture(scope="session")
def healthy_answers(answers):
    """`healthy_answers("h100x8")`: the same of the machine as it was delivered, asked once."""

    @cache
    def asked(profile):
        said = answers(machine.of(profile))
        assert isinstance(said, list)
        return said

    return asked


def broken(name, profile=None):
    """A machine with a fault on its last GPU."""
    healthy = machine.of(profile or ON[name])
    return find_fault(name).on(healthy, healthy.profile.count - 1)


def around(about):
    """Everything of a machine that is not NVML's."""
    return machine.files(about), machine.programs(about), machine.answers(about)


# --- the catalogue


def test_names_are_words_with_hyphens():
    assert all(re.fullmatch(r"[a-z0-9]+(-[a-z0-9]+)*", name) for name in FAULTS)
    assert [each.name for each in FAULTS.values()] == list(FAULTS)


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_says_which_check_finds_it(name):
    """By an id and a severity that exist, on all hardware that can have it."""
    words = {severity.word for severity in Severity} - {"ok"}
    for profile in map(Profile.of, nvml.profiles()):
        if FAULTS[name].applies(profile):
            found = FAULTS[name].expected(profile)
            assert set(found) <= set(CHECKS)
            assert set(found.values()) <= words
            assert bool(found) != FAULTS[name].harmless


def test_every_check_of_gpus_and_driver_has_a_fault_that_it_finds():
    """A check that nothing in the lab can trip has never been seen to work."""
    found = {check for each in FAULTS.values() for check in each.finds}

    # What needs another profile, two nodes, a node that does not answer at all, or the controllers
    # of its memory, which a container's /sys does not have.
    elsewhere = {"probe", "compute-capability", "nvlink-width", "pcie-generation"}
    elsewhere |= {"node-outlier", "host-ecc"}
    assert set(CHECKS) - found == elsewhere


def test_pending_remaps_block_where_errors_are_not_contained():
    """GA100, GH100 and GB10x contain errors, AD10x does not: NVIDIA GPU Memory Error Management."""
    found = {
        name: find_fault("remap-pending").expected(Profile.of(name))["row-remap-pending"]
        for name in ("a100x8", "a100x4-pcie", "h100x8", "h100x2-nvl", "h200x8", "b200x8", "l40sx8")
    }

    assert found.pop("l40sx8") == "block"
    assert set(found.values()) == {"warn"}


def test_the_document_lists_every_fault():
    """In the order of the catalogue, with its sentence, its checks and its hardware."""
    rows = [
        [cell.strip() for cell in line.strip("|\n").split(" | ")]
        for line in DOCUMENT.read_text().splitlines()
        if re.match(r"\| `[a-z0-9-]+` \|.*\|.*\|.*\|$", line)
    ]

    assert [row[0].strip("` ") for row in rows] == list(FAULTS)
    for row in rows:
        each = FAULTS[row[0].strip("` ")]
        able = {name for name in nvml.profiles() if each.applies(Profile.of(name))}
        said = set(re.findall(r"[a-z0-9-]+", row[3])) - {"all", "but"}
        assert row[1] == each.says
        assert set(re.findall(r"`([a-z-]+)`", row[2])) == set(each.finds)
        assert able == (set(nvml.profiles()) - said if row[3].startswith("all") else said)


# --- each fault breaks something


@pytest.mark.parametrize("profile", nvml.profiles())
def test_every_fault_changes_the_machine(profile):
    healthy = machine.of(profile)
    before = around(healthy)

    for name in possible(healthy.profile):
        about = broken(name, profile)
        assert about.nvml or around(about) != before, name


def answered(about):
    """The lines that change answers: an Xid is an event, told to those alone who wait for it."""
    return [line for line in about.nvml if ".xid." not in line]


@pytest.mark.parametrize("name", [name for name in FAULTS if answered(broken(name))])
def test_nvml_answers_otherwise_with_the_fault(name, answers, healthy_answers):
    assert answers(broken(name)) != healthy_answers(ON[name])


def test_lines_name_keys_that_the_library_reads():
    """A key that no document knows is a typing mistake: it would change nothing."""
    text = DOCUMENT.read_text() + KEYS.read_text()
    patterns = re.findall(r"^\| `([^`]+)`", text, re.MULTILINE)
    known = re.compile("|".join(re.sub(r"[A-Z]+", r"[^.]+", re.escape(p)) for p in patterns))

    for name in FAULTS:
        for line in broken(name).nvml:
            key = re.sub(r"^gpu\.(\*|\d+)\.", "", line.split("=")[0].strip())
            assert known.fullmatch(key), (name, key)


# --- together


@pytest.mark.parametrize("profile", ["h100x8", "b200x8"])
def test_any_two_faults_may_be_put_together(profile):
    """Both stay: the lines of both are there, and what both say in the log."""
    healthy = machine.of(profile)
    for one, other in combinations(possible(healthy.profile), 2):
        both = find_fault(other).on(find_fault(one).on(healthy, 1), 2)

        assert set(find_fault(other).on(healthy, 2).nvml) <= set(both.nvml)
        # A GPU that is missing renumbers the others, so its lines depend on what was there.
        assert len(both.nvml) >= len(find_fault(one).on(healthy, 1).nvml)


def test_two_faults_are_both_seen(answers):
    both = machine.of(
        "h100x8", fault("nvlink-dead-link", 7), fault("xid-79", 2), fault("pcie-x8", 7)
    )
    said = dict(zip(QUESTIONS, answers(both), strict=True))

    assert said["[nvmlDeviceGetNvLinkState({gpu}, link) for link in range(18)]"][7] == 0
    assert said["[nvmlDeviceGetCurrPcieLinkWidth({gpu}) for _ in range(8)]"] == [8] * 8
    assert any("(PCI:0000:3a:00): 79, pid=" in text for _, text in both.log)


# --- some by what they are


def test_a_missing_gpu_is_that_gpu(answers):
    """NVML counts the others anew; the bus still has it, and no driver does."""
    healthy = machine.of("h100x8")
    about = find_fault("gpu-missing").on(healthy, 3)
    uuids = QUESTIONS.index("[nvmlDeviceGetUUID(gpu(i)) for i in range(nvmlDeviceGetCount())]")
    everyone = [healthy.profile.gpu(i, "uuid") for i in range(8)]

    said = answers(about)

    assert said[uuids] == everyone[:3] + everyone[4:]
    gone = about.function("0000:5d:00.0")
    assert (gone.driver, gone.class_code) == (None, 0x030200)
    assert "/proc/driver/nvidia/gpus/0000:5d:00.0/information" not in machine.files(about)


def test_a_dead_link_between_two_gpus_is_dead_at_both_ends():
    lines = find_fault("nvlink-dead-link").on(machine.of("a100x4-pcie"), 2).nvml

    assert set(lines) == {"gpu.2.nvlink.down = 7", "gpu.3.nvlink.down = 7"}


def test_the_bridge_of_a_missing_gpu_leads_nowhere():
    lines = find_fault("gpu-missing").on(machine.of("a100x4-pcie"), 1).nvml

    assert "gpu.0.nvlink.to = nowhere" in lines
    assert "gpu.1.nvlink.to = 0-11:2" in lines, "what was GPU 3 is GPU 2 now"


def test_without_its_library_a_machine_has_none(tmp_path):
    root = machine.write(broken("no-library"), tmp_path)

    assert list(root.rglob("libnvidia-ml*")) == []
    assert machine.answers(broken("no-library"))["library"] == {"missing": "absent"}


def test_a_newer_kernel_sorts_after_the_running_one():
    for profile in nvml.profiles():
        about = broken("kernel-without-module", profile)
        running, newer = (
            [int(part) for part in re.findall(r"\d+", kernel.release)] for kernel in about.kernels
        )

        assert newer > running
        assert [kernel.nvidia for kernel in about.kernels] == [about.profile.driver, None]


def test_a_library_that_was_upgraded_says_its_own_version(library, tmp_path):
    """NVML tells it without being initialised, which is how an operator sees the mismatch."""
    profile = tmp_path / "nvml.conf"
    profile.write_text(machine.profile_text(broken("mismatch", "h100x8")))
    program = (
        "import ctypes\n"
        "nvml = ctypes.CDLL('libnvidia-ml.so.1')\n"
        "text = ctypes.create_string_buffer(80)\n"
        "print(nvml.nvmlInitWithFlags(0), nvml.nvmlSystemGetNVMLVersion(text, 80), text.value)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"LD_LIBRARY_PATH": str(library.parent), "GPUFLEET_NVML_PROFILE": str(profile)},
        capture_output=True, text=True, check=True,
    )  # fmt: skip

    assert done.stdout == "18 0 b'12.570.211.01'\n"


# --- refusals


def test_hardware_that_cannot_have_a_fault_says_so():
    with pytest.raises(FleetError, match="t4x1 cannot have the fault 'sxid-fatal'"):
        machine.of("t4x1", fault("sxid-fatal"))


def test_a_gpu_that_is_not_there_cannot_be_broken():
    with pytest.raises(FleetError, match="h100x8 has no GPU 8: choose a GPU from 0 to 7"):
        machine.of("h100x8", fault("gpu-lost", gpu=8))


def test_a_fault_that_is_not_in_the_list_names_those_that_are():
    with pytest.raises(FleetError, match="choose one of gpu-lost, gpu-lost-999"):
        fault("gpu-on-fire")
