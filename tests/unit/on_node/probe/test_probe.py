"""The probe as nodes run it: a Python reading it from stdin, against the simulated NVML.

What it must find is read from the profiles themselves, never from the probe.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from gpufleet.node.topology import node_from_probe
from gpufleet.remote import payload
from lab import machine, nvml
from tests.support.checkout import ROOT
from tests.support.record_node import SAME_EVERYWHERE, probe, probe_machine, recording
from tests.support.rows import each_row

NODES = ROOT / "src/gpufleet/catalog/data/nodes"
OLD_PYTHONS = sorted(Path.home().glob(".pyenv/versions/*/bin/python"))


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The directory of the simulated libnvidia-ml.so.1."""
    return nvml.build(tmp_path_factory.mktemp("nvml")).parent


@pytest.fixture
def probed(library, tmp_path):
    """`probed("h100x8", "gpu.5.error.* = 15")`: the document for a profile with these faults."""

    def run(profile, *faults, **parameters):
        overlay = tmp_path / "faults.conf"
        overlay.write_text("".join(f"{fault}\n" for fault in faults))
        return probe(library, nvml.profile(profile), overlay, **parameters)

    return run


def said_by(profile):
    """The profile's own lines, as {key: text}."""
    lines = nvml.profile(profile).read_text().splitlines()
    pairs = (line.split("=", 1) for line in lines if "=" in line and not line.startswith("#"))
    return {key.strip(): value.strip() for key, value in pairs}


def keys(value):
    """The shape of a document: names and nesting, without the values."""
    if isinstance(value, dict):
        return {} if "missing" in value else {key: keys(item) for key, item in value.items()}
    return [keys(item) for item in value] if isinstance(value, list) else None


# --- healthy hardware


@pytest.mark.parametrize("profile", nvml.profiles())
def test_every_profile_is_found_as_it_is_written(probed, profile):
    wanted = said_by(profile)

    found = probed(profile)

    assert found["errors"] == []
    assert found["driver"]["version"] == wanted["system.driver"]
    assert found["driver"]["cuda"] == int(wanted["system.cuda"])
    assert [gpu["index"] for gpu in found["gpus"]] == list(range(int(wanted["count"])))
    for gpu in found["gpus"]:
        own = {key: wanted[f"gpu.{gpu['index']}.{key}"] for key in ("uuid", "busid")}
        assert gpu["name"] == wanted["gpu.*.name"]
        assert gpu["uuid"] == own["uuid"]
        assert gpu["pci"]["bus_id"] == own["busid"].lower()[-12:]
        assert gpu["memory"]["total"] == int(wanted["gpu.*.mem.total_mib"]) << 20
        assert ".".join(map(str, gpu["compute_capability"])) == wanted["gpu.*.cc"]
    links = [0 if "missing" in gpu["links"] else len(gpu["links"]) for gpu in found["nvlink"]]
    assert set(links) == {int(wanted.get("gpu.*.nvlink.links", 0))}


@each_row("profile", nvml.profiles())
def test_the_recordings_have_all_that_the_probe_finds(library, profile):
    """Otherwise: `python -m tests.support.record_node`."""
    kept = json.loads((NODES / f"{profile}.json").read_text())

    assert keys(kept) == keys(recording(library, profile))


def test_every_profile_is_recorded():
    assert sorted(path.stem for path in NODES.glob("*.json")) == sorted(nvml.profiles())


def test_the_document_names_the_program_that_wrote_it(probed):
    """Facts that are kept can be told from those that another version of the probe found."""
    parts = (
        "probe/probe", "common/answers", "common/commands", "common/driver_files",
        "common/forked", "common/kernel_messages", "common/linux_facts", "common/model_folder",
        "common/nvml", "common/package_facts", "common/processes", "common/stage_units",
        "common/stages", "common/system", "common/systemctl",
        "probe/cordon_mark", "probe/nvml_gpus", "probe/nvml_links",
    )  # fmt: skip
    files = [ROOT / f"src/gpufleet/on_node/{part}.py" for part in parts]
    by_coreutils = subprocess.run(
        ["sh", "-c", 'cat "$@" | sha256sum', "sh", *files], capture_output=True, check=True
    )

    assert probed("t4x1")["probe"] == by_coreutils.stdout.decode().split()[0]


def test_gpus_hidden_by_a_module_option_are_named(probed):
    found = probed("t4x1", "excluded.0 = 0000:5d:00.0,GPU-5d")

    assert found["driver"]["excluded"] == [{"bus_id": "0000:5d:00.0", "uuid": "GPU-5d"}]


def test_old_drivers_answer_what_they_can(probed):
    """Nothing is lost silently: a fact that R535 does not know is missing, others fall back."""
    found = probed("h100x8", "system.driver = 535.104.05")

    assert found["errors"] == []
    assert "missing" in found["gpus"][0]["recovery_action"]  # from R570
    assert found["fabric"][0]["struct"] == 1  # the wider ones are from R550 and R580
    assert found["gpus"][0]["temperature_celsius"] > 0  # asked in the way of before R570


def test_a_hybrid_cube_mesh_is_two_islands(probed):
    """DGX-1V: three peers of the same four, and one twin in the other; no switch."""
    mesh = [
        f"gpu.{gpu}.nvlink.to = "
        + ",".join(f"{3 * n}-{3 * n + 2}:{peer}" for n, peer in enumerate(peers))
        for gpu in range(8)
        if (peers := [*(set(range(gpu & 4, (gpu & 4) + 4)) - {gpu}), gpu ^ 4])
    ]

    node = node_from_probe("gpu-01", probed("a100x8", *mesh))

    assert node.islands == ((0, 1, 2, 3), (4, 5, 6, 7))
    assert (node.nvlink[0, 4], (0, 5) in node.nvlink) == (3, False)


# --- one sick GPU


def healthy_beside(found, sick):
    """Whether all GPUs but one told everything, and reach each other."""
    others = [gpu for gpu in found["gpus"] if gpu["index"] != sick]
    reach = found["p2p"]["nvlink"]
    return all("uuid" in gpu for gpu in others) and all(
        reach[a["index"]][b["index"]] == 0 for a in others for b in others if a is not b
    )


@pytest.mark.parametrize("code", [15, 16, 999])
def test_a_lost_gpu_costs_itself_only(probed, code):
    """A driver answers any of these for a GPU that is gone."""
    found = probed("h100x8", f"gpu.5.error.* = {code}")

    assert found["gpus"][5]["code"] == found["nvlink"][5]["code"] == code
    assert [error["about"] for error in found["errors"]] == ["gpus[5]"]
    assert healthy_beside(found, 5)


def test_a_hanging_gpu_costs_itself_and_its_deadline_only(probed):
    found = probed("h100x8", "gpu.2.hang.* = 600", seconds={"gpu": 2})

    assert found["gpus"][2] == {"index": 2, "missing": "timeout", "seconds": 2}
    assert healthy_beside(found, 2)


def test_a_crash_in_the_library_costs_its_gpu_only(probed):
    found = probed("h100x8", "gpu.7.crash.nvmlDeviceGetName = 1")

    assert found["gpus"][7] == {"index": 7, "missing": "crashed", "signal": 11}
    assert healthy_beside(found, 7)


def test_a_gpu_that_hangs_at_its_neighbours_keeps_its_own_facts(probed):
    found = probed("h100x8", "gpu.1.hang.nvmlDeviceGetP2PStatus = 60", seconds={"pairs": 1})

    assert found["gpus"][1]["uuid"]
    assert found["p2p"]["nvlink"][1][0]["missing"] == "timeout"
    assert found["p2p"]["nvlink"][0][1] == 0
    assert [error["about"] for error in found["errors"]] == ["p2p[1]"]


def test_a_question_that_fails_costs_its_answer_only(probed):
    found = probed("h100x8", "gpu.0.error.nvmlDeviceGetTotalEccErrors = 4")

    assert found["gpus"][0]["ecc_uncorrected_volatile"] == {"missing": "no_permission", "code": 4}
    assert found["errors"] == []


def test_a_slowdown_by_hardware_is_looked_at_three_times(probed):
    """It may last a moment; what lasts a second is for the operator."""
    gpus = probed("h100x8", "gpu.3.clocks.reasons = 0x48")["gpus"]

    assert gpus[3]["throttle_samples"] == [0x48] * 3
    assert gpus[3]["throttle_reasons"] == 0x48
    assert {tuple(gpu["throttle_samples"]) for gpu in gpus if gpu is not gpus[3]} == {(1,)}


def test_a_corrupted_inforom_is_the_reason_itself(probed):
    gpus = probed("h100x8", "gpu.3.inforom.corrupted = 1")["gpus"]

    assert gpus[3]["inforom_valid"] == {"missing": "corrupted_inforom", "code": 14}
    assert gpus[2]["inforom_valid"] is True


def test_errors_are_counted_where_they_were(probed):
    """Memory and caches have different thresholds; pages and rows are different repairs."""
    faults = ("ecc.unc_vol.dram = 2", "ecc.cor_agg.sram = 7", "ecc.unc_agg.dram = 5")
    gpu = probed("h100x8", *(f"gpu.1.{fault}" for fault in faults))["gpus"][1]

    assert gpu["ecc_dram"] == {
        "corrected_volatile": 0,
        "uncorrected_volatile": 2,
        "corrected_aggregate": 0,
        "uncorrected_aggregate": 5,
    }
    assert gpu["ecc_sram_counts"]["corrected_aggregate"] == 7
    retired = probed("t4x1", "gpu.0.retired.sbe = 3", "gpu.0.retired.dbe = 40")["gpus"][0]
    assert retired["retired_pages"] == {"single_bit": 3, "double_bit": 40}


def test_links_count_their_errors_each(probed):
    found = probed("h100x8", "gpu.3.nvlink.err.replay.7 = 4", "gpu.3.nvlink.err.crc_data.7 = 9")

    errors = [link["errors"] for link in found["nvlink"][3]["links"]]
    clean = dict.fromkeys(("replay", "recovery", "crc_flit", "crc_data", "ecc"), 0)
    assert errors[7] == {**clean, "replay": 4, "crc_data": 9}
    assert errors[6] == clean


def test_nvlink_5_counts_otherwise(probed):
    """Its rates come as a mantissa and an exponent: 0x30c is 3e-12 (nvml.h, BER macros)."""
    faults = {"208.3": 5, "211.3": 6, "213.3": 7, "214.3": 8, "220.3": 0x30C, "222.3": 0xF0F}
    found = probed("b200x8", *(f"gpu.2.field.{id_} = {value}" for id_, value in faults.items()))

    errors = [link["errors"] for link in found["nvlink"][2]["links"]]
    assert errors[3] == {
        "receive": 5,
        "integrity": 6,
        "recovery_ok": 7,
        "recovery_failed": 8,
        "effective_ber": 3e-12,
        "symbol_ber": 15e-15,
    }
    assert all(value < 1e-200 for value in errors[4].values())  # the least that can be packed


def test_a_tray_knows_its_place_in_the_rack(probed):
    wanted = said_by("gb200x4")

    platform = probed("gb200x4")["gpus"][0]["platform"]

    assert platform["chassis_serial"] == wanted["gpu.*.platform.chassis"]
    assert str(platform["tray"]) == wanted["gpu.*.platform.tray"]
    assert str(platform["slot"]) == wanted["gpu.*.platform.slot"]


def test_a_dead_link_is_one_link(probed):
    found = probed("h100x8", "gpu.3.nvlink.down = 7")

    inactive = [
        (gpu, link["link"])
        for gpu, about in enumerate(found["nvlink"])
        for link in about["links"]
        if link["state"] != 1
    ]
    assert inactive == [(3, 7)]


def test_a_stuck_process_holds_nothing_of_the_probe_open(library, tmp_path):
    """
    A process stuck in the kernel survives SIGKILL. Whoever reads the probe's output must not wait
    for it, and it must end by itself if the probe is killed meanwhile.
    """
    overlay = tmp_path / "faults.conf"
    overlay.write_text("gpu.0.hang.* = 60\n")
    profiles = f"{nvml.profile('t4x1')}:{overlay}"
    running = subprocess.Popen(
        [sys.executable, "-I", "-"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "LD_LIBRARY_PATH": str(library), "GPUFLEET_NVML_PROFILE": profiles},
        text=True,
    )
    try:
        seconds = {"init": 3, "gpu": 3, "pairs": 0}
        running.stdin.write(payload.program("probe/probe", nvml=True, seconds=seconds))
        running.stdin.close()
        stuck = stuck_child_of(running.pid)
        outputs = {Path(f"/proc/{stuck}/fd/{number}").readlink() for number in (0, 1, 2)}
        running.kill()
        assert outputs == {Path(os.devnull)}
        assert running.stdout.read() == ""  # the end of file comes although the process lives
        assert ends_within(15, stuck)
    finally:
        running.kill()
        running.wait()


def stuck_child_of(pid):
    """Wait for a second child that lives half a second: the first keeps the driver awake."""
    seen = Counter()
    for _ in range(200):
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
        seen.update(child for child in children if lives(child))
        lasting = [int(child) for child, samples in seen.items() if samples >= 10]
        if len(lasting) > 1:
            return max(lasting)
        time.sleep(0.05)
    raise AssertionError("the probe forked nothing that lasts")


def ends_within(seconds, pid):
    deadline = time.monotonic() + seconds
    while lives(pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    return not lives(pid)


def lives(pid):
    """Whether a process exists and is more than a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# --- no driver, no library, no Python to speak of


@pytest.mark.parametrize(
    ("code", "reason"), [(9, "driver_not_loaded"), (18, "version_mismatch"), (4, "no_permission")]
)
def test_without_a_driver_the_machine_is_still_described(probed, code, reason):
    found = probed("h100x8", f"error.nvmlInitWithFlags = {code}")

    assert found["driver"]["init"] == {"missing": reason, "code": code}
    assert found["gpus"] == []
    assert found["hostname"] == os.uname().nodename


@pytest.mark.parametrize(
    ("fault", "reason"),
    [("hang.nvmlInitWithFlags = 60", "timeout"), ("crash.nvmlInitWithFlags = 1", "crashed")],
)
def test_a_driver_that_hangs_or_crashes_is_told_apart(probed, fault, reason):
    found = probed("h100x8", fault, seconds={"init": 1})

    assert found["driver"]["init"]["missing"] == reason


def test_a_library_that_does_not_load_says_why(tmp_path):
    """NVIDIA's binding says only that there is none; an operator needs the loader's words."""
    (tmp_path / "libnvidia-ml.so.1").write_text("not a library, but more than its header's bytes")

    found = probe(tmp_path)

    assert found["driver"]["init"]["missing"] == "library_not_found"
    assert "libnvidia-ml.so.1" in found["driver"]["init"]["detail"]


def run_without(module):
    """Run the probe on a Python that lacks a module."""
    return subprocess.run(
        [sys.executable, "-I", "-"],
        input=f"import sys; sys.modules[{module!r}] = None\n"
        + payload.program("probe/probe", nvml=True),
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_python_without_ctypes_says_so_in_the_document():
    found = json.loads(run_without("ctypes").stdout)

    assert found["driver"]["init"]["missing"] == "no_ctypes"
    assert "ctypes" in found["driver"]["init"]["detail"]


def test_a_python_without_json_says_what_to_install():
    """Debian's python3-minimal."""
    done = run_without("json")

    assert (done.returncode, done.stdout) == (1, "")
    assert "install the whole of it" in done.stderr
    assert "Traceback" not in done.stderr


# --- the machine's files


CARD = "/sys/devices/pci0000:15/0000:15:01.0/0000:16:00.0"
NIC = "/sys/devices/pci0000:15/0000:15:01.0/0000:17:00.0"
BARE_METAL = {
    "/etc/machine-id": "0123456789abcdef0123456789abcdef",
    "/etc/os-release": 'NAME="Ubuntu"\nID=ubuntu\nVERSION_ID="24.04"\n',
    "/proc/meminfo": "MemTotal:       2113461420 kB\nMemFree:        2113461420 kB\n",
    "/proc/sys/kernel/hostname": "gpu-01",
    "/proc/sys/kernel/osrelease": "6.8.0-88-generic",
    "/proc/sys/kernel/random/boot_id": "9e6f4b52-4c0e-4f5a-8a43-000000000001",
    "/sys/devices/system/cpu/online": "0-223",
    "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module  570.124.06\n",
    "/sys/module/nvidia/version": "570.124.06\n",
    "/proc/driver/nvidia/gpus/0000:18:00.0/information": "",
    f"{CARD}/vendor": "0x10de\n",
    f"{CARD}/device": "0x2330\n",
    f"{CARD}/class": "0x030200\n",
    f"{CARD}/numa_node": "1\n",
    f"{NIC}/vendor": "0x15b3\n",
    f"{NIC}/device": "0x1021\n",
    f"{NIC}/class": "0x020700\n",
    f"{NIC}/numa_node": "0\n",
    f"{NIC}/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
    f"{NIC}/infiniband/mlx5_0/ports/1/rate": "400 Gb/sec (4X NDR)\n",
    f"{NIC}/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
    f"{NIC}/net/ibs1/address": "00:00:10:29\n",
    f"{NIC}/net/ibs1/operstate": "up\n",
    f"{NIC}/net/ibs1/mtu": "2044\n",
    "/proc/net/route": "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\n"
    "ibs1\t00000000\t0102000A\t0003\t0\t0\t200\t00000000\n"
    "eno1\t00000000\t0102000A\t0003\t0\t0\t100\t00000000\n"
    "eno1\t0002000A\t00000000\t0001\t0\t0\t100\t00FFFFFF\n",
    "/proc/net/if_inet6": "fe800000000000000000000000000001 02 40 20 80     ibs1\n",
}


def write_tree(root, files):
    """Write `files` (absolute path: text) below `root`."""
    for path, text in files.items():
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


@pytest.fixture
def bare_metal(tmp_path):
    """A sysfs with one GPU and one NIC behind one bridge; its name tests how parameters travel."""
    root = write_tree(tmp_path / 'it\'s "one" %s {} \\', BARE_METAL)
    for link, target in {
        "/sys/bus/pci/devices/0000:16:00.0": CARD,
        "/sys/bus/pci/devices/0000:17:00.0": NIC,
        "/sys/class/infiniband/mlx5_0": f"{NIC}/infiniband/mlx5_0",
        "/sys/class/net/ibs1": f"{NIC}/net/ibs1",
        f"{NIC}/infiniband/mlx5_0/device": NIC,
        f"{NIC}/net/ibs1/device": NIC,
    }.items():
        at = root / link.lstrip("/")
        at.parent.mkdir(parents=True, exist_ok=True)
        at.symlink_to(os.path.relpath(root / target.lstrip("/"), at.parent))
    return root


def test_the_machine_is_described_by_its_files(probed, bare_metal):
    found = probed("t4x1", sysroot=str(bare_metal))

    assert (found["hostname"], found["cpus"], found["memory_mib"]) == ("gpu-01", 224, 2063927)
    assert found["os_release"] == {"id": "ubuntu", "version_id": "24.04"}
    assert found["driver"]["module"] == "570.124.06"
    assert found["driver"]["proc"].startswith("NVRM version")
    assert found["driver"]["proc_gpus"] == ["0000:18:00.0"]
    (card,) = found["pci"]
    assert (card["bus_id"], card["numa_node"], card["path"]) == ("0000:16:00.0", 1, CARD)


def test_nics_are_found_with_their_place_on_the_bus(probed, bare_metal):
    nics = probed("t4x1", sysroot=str(bare_metal))["nics"]

    (infiniband,), (net,) = nics["infiniband"], nics["net"]
    assert infiniband["ports"][0]["rate"] == "400 Gb/sec (4X NDR)"
    assert infiniband["pci"]["path"] == net["pci"]["path"] == NIC
    assert (net["name"], net["mtu"], net["ipv6"]) == ("ibs1", 2044, ["fe80::1"])
    assert net["speed"] == {"missing": "absent"}
    assert nics["default_route"] == "eno1"  # of two routes the one with the lower metric


def test_linux_knows_the_numa_node_where_it_lists_the_gpu(probed, bare_metal):
    found = probed("t4x1", "gpu.0.busid = 0000:16:00.0", sysroot=str(bare_metal))

    assert found["numa"][0]["node"] == 1


def test_a_file_that_hangs_costs_the_files_only(probed, tmp_path):
    """As a dead network mount or a sick device's sysfs does; here, a pipe nobody writes to."""
    (tmp_path / "etc").mkdir()
    os.mkfifo(tmp_path / "etc/machine-id")

    found = probed("t4x1", sysroot=str(tmp_path), seconds={"turn": 1, "beside": 2})

    assert found["hostname"] == found["driver"]["module"] == {"missing": "timeout", "seconds": 2}
    assert [error["about"] for error in found["errors"]] == ["host"]
    assert found["gpus"][0]["name"] == "Tesla T4"


def test_nothing_is_written_on_the_node(library, tmp_path):
    subprocess.run(
        [sys.executable, "-I", "-"],
        input=payload.program("probe/probe", nvml=True),
        env={
            "LD_LIBRARY_PATH": str(library),
            "GPUFLEET_NVML_PROFILE": f"{nvml.profile('t4x1')}:{os.devnull}",
            "HOME": str(tmp_path),
            "TMPDIR": str(tmp_path),
        },
        cwd=tmp_path,
        text=True,
        stdout=subprocess.DEVNULL,
        check=True,
    )

    assert list(tmp_path.iterdir()) == []


# --- the Pythons of nodes


@each_row("python", OLD_PYTHONS, ids=lambda path: path.parts[-3])
def test_the_pythons_at_hand_run_the_probe_or_say_that_they_are_too_old(library, python):
    version = tuple(int(part) for part in python.parts[-3].split(".")[:2])
    if version < (3, 8):
        done = subprocess.run(
            [python, "-c", "import sys; exec(sys.stdin.read())"],
            input=payload.program("probe/probe", nvml=True),
            capture_output=True,
            text=True,
            check=False,
        )
        assert "gpufleet needs 3.8 or newer" in done.stderr
    else:
        found = probe_machine(library, machine.of("a100x4-pcie"), python=str(python))
        kept = json.loads((NODES / "a100x4-pcie.json").read_text())
        changed = {key for key, value in kept.items() if found[key] != value}
        assert changed <= {*SAME_EVERYWHERE}
