"""A node's own facts, as its timer has them read: simulated machines, the simulated NVML.

What they must say is read from the machine's own description, never from the program; what was
written is read with Prometheus' own parser and its promtool.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpufleet.monitoring.metrics import gpufleet_metrics
from gpufleet.planning.stage import Stage
from gpufleet.remote import payload
from gpufleet.serving.unit import render_unit
from gpufleet.settings.serving_settings import Served, Vllm
from lab import machine, nvml
from lab.faults import fault
from tests.unit.monitoring.programs import program

# Each test starts programs of its own.
pytestmark = pytest.mark.slow

OLD_PYTHONS = [
    path
    for path in sorted(Path.home().glob(".pyenv/versions/*/bin/python"))
    if tuple(map(int, path.parts[-3].split(".")[:2])) >= (3, 8)
]
# The unit's TimeoutStartSec=: whatever hangs, the program has ended by itself before.
UNIT_SECONDS = 50
# Deadlines that a busy machine does not miss; a test of one gives its own.
PATIENCE = {"part": 30, "log": 30, "init": 30, "gpu": 30}
TINY = Stage(
    model="tiny",
    replica=0,
    node="gpu-01",
    gpus=(0,),
    gpu_uuids=("GPU-1",),
    port=8000,
    tensor_parallel=1,
)


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The directory of the simulated libnvidia-ml.so.1."""
    return nvml.build(tmp_path_factory.mktemp("nvml")).parent


class Node:
    """A machine in a folder, as the role leaves it."""

    def __init__(self, about, root, library, **declared):
        self.about, self.root, self.library = about, machine.write(about, root), library
        for each in ("var/lib/gpufleet/textfile", "var/lib/gpufleet/deploys", "etc/gpufleet",
                     "run/gpufleet-facts"):  # fmt: skip
            (root / each).mkdir(parents=True)
        told = {"schema": 1, "gpu_node": True, "dcgm": True, "gpus": 8, "lock": "", "release": ""}
        self.file("etc/gpufleet/facts.json", json.dumps({**told, **declared}))
        self.file("nvml.conf", machine.profile_text(about))

    def file(self, path, text):
        at = self.root / path
        at.parent.mkdir(parents=True, exist_ok=True)
        at.write_text(text)
        return at

    def read(self, python=sys.executable, **seconds):
        """Have the facts read, and return them as {name: [(labels, value)]}."""
        done = subprocess.run(
            [python, "-I", "-"],
            input=payload.program(
                "monitoring/node_facts",
                nvml=True,
                sysroot=str(self.root),
                answers=machine.answers(self.about),
                seconds={**PATIENCE, **seconds},
            ),
            env={
                **os.environ,
                "LD_LIBRARY_PATH": str(self.library if self.about.library else self.root),
                "GPUFLEET_NVML_PROFILE": str(self.root / "nvml.conf"),
            },
            capture_output=True,
            text=True,
            timeout=UNIT_SECONDS,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return parsed(self.text)

    @property
    def text(self):
        return (self.root / "var/lib/gpufleet/textfile/facts.prom").read_text()


@pytest.fixture
def node(library, tmp_path):
    """`node("h100x8", fault("mismatch"), dcgm=False)`."""

    def made(profile, *faults, **declared):
        return Node(machine.of(profile, *faults), tmp_path / "root", library, **declared)

    return made


def parsed(text):
    """Return {name: [(labels, value)]} by the publisher's own parser."""
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, []).append((sample.labels, sample.value))
    return found


def values(found, name, key):
    """Return {value of a label: value} of one metric."""
    return {labels[key]: value for labels, value in found.get(f"gpufleet_{name}", [])}


def failed(found):
    return {part for part, value in values(found, "facts_failed", "part").items() if value}


def serves(node):
    """Give a node a unit of a stage, and a systemd that says it runs."""
    served = Served(model="/srv/tiny")
    vllm = Vllm(version="0.32.0", lock="locks/vllm.txt", listen="127.0.0.1")
    unit = render_unit(TINY, served, vllm, release="0.32.0-1a2b3c4d5e")
    node.file("etc/systemd/system/vllm-tiny-0.service", unit.content)
    node.file("etc/systemd/system/vllm-router.service", "[Service]\nExecStart=/bin/true\n")
    said = "Id=vllm-tiny-0.service\nActiveState=active\nNRestarts=3"
    systemctl(node, f"cat <<'END'\n{said}\nEND\n")


def systemctl(node, script):
    (node.root / "usr/bin/systemctl").write_text(f"#!/bin/sh\n{script}")


def declared_metrics(*kinds):
    return {metric.name: metric for kind in kinds for metric in kind}


# --- healthy


def test_a_healthy_node_says_what_its_machine_is(node):
    healthy = node("h100x8", lock="ab12", release="0.32.0-1a2b3c4d5e")
    serves(healthy)
    about = healthy.about

    found = healthy.read()

    ((labels, one),) = found["gpufleet_node_info"]
    assert one == 1
    assert labels == {
        "kernel": about.kernel,
        "driver_loaded": about.loaded,
        "driver_disk": about.loaded,
        "library": about.library.version,
        "fabric_manager": about.loaded,
        "lock": "ab12",
        "release": "0.32.0-1a2b3c4d5e",
    }
    assert failed(found) == set()
    assert values(found, "driver_mismatch", "part") == {
        "disk": 0, "library": 0, "fabric_manager": 0}  # fmt: skip
    assert set(values(found, "reboot_pending", "reason").values()) == {0}
    assert values(found, "gpus", "state") == {"expected": 8, "present": 8}
    assert found["gpufleet_node_unchecked"] == [({}, 0)]
    assert found["gpufleet_stage_info"] == [
        (
            {
                "stage": "tiny-0",
                "model": "tiny",
                "release": "0.32.0-1a2b3c4d5e",
                "unit": "vllm-tiny-0.service",
            },
            1,
        )
    ]
    assert found["gpufleet_stage_active"] == [({"stage": "tiny-0"}, 1)]
    assert found["gpufleet_stage_restarts_total"] == [({"stage": "tiny-0"}, 3)]
    ((_, at),) = found["gpufleet_facts_timestamp_seconds"]
    assert abs(at - time.time()) < UNIT_SECONDS


def test_where_dcgm_measures_nvml_is_not_even_started(node):
    """It would be asked in vain: this one never starts."""
    found = node("h100x8", fault("nvml-hang")).read()

    assert failed(found) == set()
    assert not any(name.startswith("gpufleet_gpu_") for name in found)


def test_without_dcgm_every_gpu_says_what_nvml_says_of_it(node):
    without = node("h100x8", dcgm=False)
    profile = without.root / "nvml.conf"
    lines = ("temp.gpu = 61", "power.draw_mw = 312500", "util.gpu = 37", "clocks.sm = 1410",
             "mem.used_mib = 1000")  # fmt: skip
    profile.write_text(profile.read_text() + "".join(f"gpu.3.{line}\n" for line in lines))
    gpu = without.about.profile.gpu
    usable = int(gpu(3, "mem.total_mib")) - int(gpu(3, "mem.reserved_mib"))

    found = without.read()

    assert failed(found) == set()
    for name, value in (
        ("temperature_celsius", 61),
        ("power_watts", 312.5),
        ("utilization_ratio", 0.37),
        ("sm_clock_hertz", 1410e6),
        ("memory_used_bytes", 1000 * 2**20),
        ("memory_free_bytes", (usable - 1000) * 2**20),
        ("ecc_uncorrected_total", 0),
        ("row_remap_pending", 0),
        ("row_remap_failure", 0),
    ):
        of_gpu = {
            (labels["gpu"], labels["UUID"]): value
            for labels, value in found[f"gpufleet_gpu_{name}"]
        }
        assert of_gpu["3", gpu(3, "uuid")] == value, name
        assert len(of_gpu) == 8


@pytest.mark.parametrize(
    ("name", "metric"),
    [
        ("remap-pending", "row_remap_pending"),
        ("remap-failed", "row_remap_failure"),
        ("ecc-uncorrected", "ecc_uncorrected_total"),
    ],
)
def test_without_dcgm_memory_that_fails_is_seen_on_its_gpu(node, name, metric):
    found = node("h100x8", fault(name, gpu=6), dcgm=False).read()

    bad = {gpu for gpu, value in values(found, f"gpu_{metric}", "gpu").items() if value}
    assert bad == {"6"}


def test_a_board_without_ecc_and_row_remapper_is_no_failure(node):
    found = node("rtx4090x2", dcgm=False, gpus=2).read()

    assert failed(found) == set()
    assert "gpufleet_gpu_row_remap_pending" not in found
    assert len(found["gpufleet_gpu_temperature_celsius"]) == 2


def test_a_node_without_gpus_has_no_facts_of_any(node):
    found = node("t4x1", gpu_node=False, gpus=None).read()

    assert values(found, "facts_failed", "part") == {"declared": 0, "host": 0, "stages": 0}
    names = {"driver_mismatch", "gpus", "gpu_temperature_celsius"}
    assert not {f"gpufleet_{name}" for name in names} & set(found)


# --- the list and the program agree


def test_all_that_is_listed_is_served_and_nothing_else(node):
    """In names, types and labels, both ways; promtool has nothing against it."""
    everything = node("h100x8", fault("xid-79", gpu=2), dcgm=False)
    serves(everything)
    everything.file("var/lib/gpufleet/deploys/vllm", "1700000000\n")
    listed = declared_metrics(gpufleet_metrics.FACTS, gpufleet_metrics.GPU_FALLBACK)

    found = everything.read()

    assert set(found) == set(listed)
    for name, samples in found.items():
        assert {tuple(sorted(labels)) for labels, _ in samples} == {
            tuple(sorted(listed[name].labels))
        }, name
    types = {
        name: kind
        for _, _, name, kind in (
            line.split() for line in everything.text.splitlines() if line.startswith("# TYPE")
        )
    }
    assert types == {name: metric.type for name, metric in listed.items()}
    said = subprocess.run(
        [program("prometheus", "usr/bin/promtool"), "check", "metrics"],
        input=everything.text,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (said.returncode, said.stdout + said.stderr) == (0, "")


@pytest.mark.parametrize(
    "python", [*OLD_PYTHONS[:1], *OLD_PYTHONS[-1:]], ids=lambda path: path.parts[-3]
)
def test_the_oldest_and_the_newest_python_read_the_same(node, python):
    found = node("a100x4-pcie", dcgm=False, gpus=4).read(python=str(python))

    assert failed(found) == set()
    assert len(found["gpufleet_gpu_sm_clock_hertz"]) == 4


def test_the_installed_program_carries_all_that_it_needs(tmp_path):
    """On this machine, which has no such directory: it comes as far as saying so."""
    installed = tmp_path / "node-facts"
    installed.write_bytes(payload.archive("monitoring/node_facts", nvml=True))
    if Path("/var/lib/gpufleet/textfile").exists():
        pytest.skip("this machine is a node")

    done = subprocess.run(
        [sys.executable, "-IB", installed], capture_output=True, text=True, check=False
    )

    assert "pynvml.py" in zipfile.ZipFile(installed).namelist()
    assert done.returncode == 1
    assert done.stderr == "/var/lib/gpufleet/textfile: No such file or directory\n"


# --- what is wrong is said


def test_a_library_of_another_version_is_a_mismatch(node):
    found = node("h100x8", fault("mismatch")).read()

    assert values(found, "driver_mismatch", "part")["library"] == 1


def test_a_fabric_manager_of_another_version_is_a_mismatch(node):
    found = node("h100x8", fault("fabric-manager-version")).read()

    assert values(found, "driver_mismatch", "part") == {
        "disk": 0, "library": 0, "fabric_manager": 1}  # fmt: skip


def test_another_module_on_the_disk_waits_for_a_reboot(node):
    found = node("h100x8", fault("module-differs")).read()

    assert values(found, "driver_mismatch", "part")["disk"] == 1
    assert values(found, "reboot_pending", "reason")["driver"] == 1


def test_a_package_that_asked_for_a_reboot_is_heard(node):
    waiting = node("h100x8")
    waiting.file("run/reboot-required", "")

    found = waiting.read()

    assert values(found, "reboot_pending", "reason") == {"packages": 1, "kernel": 0, "driver": 0}


def test_a_newer_kernel_waits_for_a_reboot(node):
    found = node("h100x8", fault("kernel-without-module")).read()

    assert values(found, "reboot_pending", "reason")["kernel"] == 1


def test_a_marked_node_says_so(node):
    marked = node("h100x8")
    marked.file("var/lib/gpufleet/unchecked", "the driver is being changed")

    assert marked.read()["gpufleet_node_unchecked"] == [({}, 1)]


def test_without_a_driver_nothing_is_loaded_and_no_gpu_is_present(node):
    found = node("h100x8", fault("no-driver")).read()

    ((labels, _),) = found["gpufleet_node_info"]
    assert (labels["driver_loaded"], labels["driver_disk"]) == ("", "")
    assert values(found, "gpus", "state") == {"expected": 8, "present": 0}
    assert "gpufleet_driver_mismatch" not in found


def test_without_a_driver_nvml_is_a_part_that_failed(node):
    found = node("h100x8", fault("no-driver"), dcgm=False).read()

    assert failed(found) == {"nvml"}
    assert "gpufleet_gpu_temperature_celsius" not in found


def test_a_gpu_that_the_driver_gave_up_is_not_present(node):
    found = node("h100x8", fault("gpu-missing", gpu=5)).read()

    assert values(found, "gpus", "state") == {"expected": 8, "present": 7}


def test_a_gpu_that_fell_off_the_bus_is_not_present_although_the_driver_lists_it(node):
    """Whoever reads its configuration space gets ones: nobody answers there."""
    lost = node("h100x8")
    bus_id = lost.about.gpu_bus_id(5)
    (lost.root / f"sys/bus/pci/devices/{bus_id}/config").write_bytes(b"\xff" * 64)

    assert values(lost.read(), "gpus", "state") == {"expected": 8, "present": 7}


@pytest.mark.parametrize("name", ["gpu-lost", "gpu-lost-999", "gpu-hang"])
def test_a_gpu_that_nvml_has_lost_costs_itself_only(node, name):
    found = node("h100x8", fault(name, gpu=5), dcgm=False).read(gpu=3)

    assert failed(found) == {"nvml"}
    assert values(found, "gpus", "state") == {"expected": 8, "present": 7}
    of_gpus = values(found, "gpu_temperature_celsius", "gpu")
    assert sorted(of_gpus) == ["0", "1", "2", "3", "4", "6", "7"]


def test_an_nvml_that_never_starts_ends_at_its_deadline(node):
    hung = node("h100x8", fault("nvml-hang"), dcgm=False)

    found = hung.read(init=1)

    assert failed(found) == {"nvml"}
    assert values(found, "gpus", "state") == {"expected": 8, "present": 8}
    assert "gpufleet_gpu_temperature_celsius" not in found


def test_a_question_that_is_stuck_is_not_asked_again(node):
    """A process in the kernel cannot be killed: here is one that lives, with all that tells it."""
    hung = node("h100x8", fault("nvml-hang"), dcgm=False)
    with subprocess.Popen(["sleep", "600"]) as stuck:
        try:
            ticks = Path(f"/proc/{stuck.pid}/stat").read_text().rpartition(")")[2].split()[19]
            about = {"nvml": {"pid": stuck.pid, "began": ticks}}
            kept = hung.file("run/gpufleet-facts/stuck.json", json.dumps(about))

            found = hung.read(init=600)

            assert failed(found) == {"nvml"}
            assert json.loads(kept.read_text()) == about
        finally:
            stuck.kill()
    found = hung.read(init=1)
    assert failed(found) == {"nvml"}
    assert "nvml" not in json.loads(kept.read_text())


def test_a_systemd_that_does_not_answer_costs_the_stages_only(node):
    silent = node("h100x8")
    serves(silent)
    systemctl(silent, "echo 'Failed to connect to bus' >&2; exit 1\n")

    found = silent.read()

    assert failed(found) == {"stages"}
    assert "gpufleet_stage_active" not in found
    assert "gpufleet_node_info" in found


def test_a_node_without_stages_needs_no_systemd(node):
    bare = node("h100x8")
    (bare.root / "usr/bin/systemctl").unlink()

    assert failed(bare.read()) == set()


@pytest.mark.parametrize("text", ["{", "[]", '{"schema": 2}'])
def test_a_declaration_that_is_broken_is_said_and_nothing_is_guessed(node, text):
    broken = node("h100x8")
    broken.file("etc/gpufleet/facts.json", text)

    found = broken.read()

    assert failed(found) == {"declared"}
    assert "gpufleet_gpus" not in found
    ((labels, _),) = found["gpufleet_node_info"]
    assert labels["kernel"] == broken.about.kernel


def test_a_part_that_fails_leaves_no_value_of_before(node):
    """The file is made anew each time: what was true once is not said again."""
    once = node("h100x8")
    assert values(once.read(), "driver_mismatch", "part")["disk"] == 0
    modinfo = once.root / "usr/sbin/modinfo"
    modinfo.write_text("#!/bin/sh\necho 'modinfo: ERROR: broken' >&2; exit 1\n")

    found = once.read()

    ((labels, _),) = found["gpufleet_node_info"]
    assert labels["driver_disk"] == "unknown"
    assert "disk" not in values(found, "driver_mismatch", "part")


# --- what costs


def test_what_costs_is_asked_again_only_when_its_files_have_changed(node):
    """modinfo and the package database, by a count of their runs."""
    counted = node("h100x8")
    kernel = counted.about.kernel
    module = counted.file(f"lib/modules/{kernel}/updates/dkms/nvidia.ko", "old")
    counted.file(f"lib/modules/{kernel}/modules.dep", "updates/dkms/nvidia.ko: kernel/x.ko\n")
    status = counted.file("var/lib/dpkg/status", "")
    runs = counted.root / "runs"
    for path in ("usr/sbin/modinfo", "usr/bin/dpkg-query"):
        at = counted.root / path
        at.write_text(at.read_text().replace("\n", f"\necho {path} >> {runs}\n", 1))

    counted.read()
    again = counted.read()
    assert sorted(runs.read_text().split()) == ["usr/bin/dpkg-query", "usr/sbin/modinfo"]
    assert values(again, "driver_mismatch", "part") == {
        "disk": 0, "library": 0, "fabric_manager": 0}  # fmt: skip

    module.write_text("new one")
    status.write_text("Package: x\n")
    counted.read()
    assert len(runs.read_text().split()) == 4


def test_xids_are_counted_since_boot_and_only_new_lines_are_read(node):
    one = node("h100x8", fault("xid-79", gpu=2), dcgm=False)
    uuid = one.about.profile.gpu(2, "uuid")
    before = one.read()["gpufleet_gpu_xid_errors_total"]
    journal = one.root / "usr/bin/journalctl"
    line = next(text for text in journal.read_text().splitlines() if "Xid (" in text)
    ends = "\nEND-OF-ANSWERS\n"
    journal.write_text(journal.read_text().replace(ends, f"\n{line}{ends}"))

    after = one.read()["gpufleet_gpu_xid_errors_total"]

    assert ({"gpu": "2", "UUID": uuid, "xid": "79"}, 1) in before
    assert ({"gpu": "2", "UUID": uuid, "xid": "79"}, 2) in after
    kept = json.loads((one.root / "run/gpufleet-facts/known.json").read_text())
    assert kept["xids"]["cursor"].startswith("line-")


def test_an_xid_of_a_gpu_that_fell_off_the_bus_keeps_its_name(node):
    """The driver lists the GPU still and has forgotten its UUID; NVML does not know it."""
    one = node("h100x8", fault("xid-79", gpu=2), dcgm=False)
    bus_id, uuid = one.about.gpu_bus_id(2), one.about.profile.gpu(2, "uuid")
    before = one.read()["gpufleet_gpu_xid_errors_total"]
    about = one.root / f"proc/driver/nvidia/gpus/{bus_id}/information"
    about.write_text(about.read_text().replace(uuid, "GPU-????????-????-????-????-????????????"))
    (one.root / f"sys/bus/pci/devices/{bus_id}/config").write_bytes(b"\xff" * 64)
    profile = one.root / "nvml.conf"
    profile.write_text(profile.read_text() + "gpu.2.error.* = 15\n")

    found = one.read()

    assert found["gpufleet_gpu_xid_errors_total"] == before
    assert values(found, "gpus", "state") == {"expected": 8, "present": 7}


def test_xids_come_from_the_ring_where_there_is_no_journal(node):
    one = node("h100x8", fault("xid-79", gpu=2), dcgm=False)
    (one.root / "usr/bin/journalctl").unlink()

    first, second = one.read(), one.read()

    assert values(first, "gpu_xid_errors_total", "xid")["79"] == 1
    assert second["gpufleet_gpu_xid_errors_total"] == first["gpufleet_gpu_xid_errors_total"]


def test_a_kernel_log_that_may_not_be_read_is_no_log_without_xids(node):
    found = node("h100x8", fault("log-unreadable"), dcgm=False).read()

    assert "xids" in failed(found)


def test_a_run_leaves_no_draft_and_takes_away_that_of_a_killed_one(node):
    one = node("t4x1", gpus=1)
    folder = one.root / "var/lib/gpufleet/textfile"
    (folder / "facts.prom.tmp").write_text("half a li")

    one.read()

    assert [each.name for each in folder.iterdir()] == ["facts.prom"]
    assert (folder / "facts.prom").stat().st_mode & 0o777 == 0o644
    shutil.rmtree(one.root / "run/gpufleet-facts")
    assert failed(one.read()) == set()
