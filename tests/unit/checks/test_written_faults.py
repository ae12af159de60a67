"""Faults written into recordings, and what is normal: how many are found, and that none is blocked.

Each class of fault that operators of GPU fleets report, in each number, word and line that the
probe reads. Hardware's own faults, on all kinds of machine, are in `test_matrix.py`; what is said
of each number that is halved, doubled or missing is in `test_outliers.py`.
"""

from __future__ import annotations

import pytest

from gpufleet.checks.finding import Severity
from gpufleet.checks.probe_facts import Needs
from tests.support.measured import note
from tests.unit.checks.test_outliers import put

GPU = 5  # of eight
LOST = {"missing": "lost", "code": 15}


def facts(*path, value, every=False):
    """Return a change of one fact: of the GPU, or of every one."""

    def change(document):
        for gpu in document["gpus"] if every else [document["gpus"][GPU]]:
            put(gpu, path, value)

    return change


def node(*path, value):
    """Return a change of one fact of the node."""
    return lambda document: put(document, path, value)


def says(*lines, times=1, apart=1.0):
    """Return a change that adds lines to the kernel log. {at}: the GPU's PCI address."""

    def change(document):
        at = document["gpus"][GPU]["pci"]["bus_id"]
        document["kernel_log"]["lines"] += [
            [900_000.0 + number * apart, line.format(at=at, short=at.rpartition(".")[0])]
            for number in range(times)
            for line in lines
        ]

    return change


def all_of(*changes):
    def change(document):
        for each in changes:
            each(document)

    return change


def links(number, **values):
    """Return a change of one NVLink of the GPU."""

    def change(document):
        document["nvlink"][GPU]["links"][number] |= values

    return change


def unit(name, **state):
    return lambda document: document["system"]["units"][name].update(state)


def without_gpu(*, on_bus):
    """Return a change that takes the GPU out of NVML's list, and off the PCI bus or not."""

    def change(document):
        at = document["gpus"][GPU]["pci"]["bus_id"]
        for section in ("gpus", "nvlink", "numa", "fabric"):
            del document[section][GPU]
        for place, gpu in enumerate(document["gpus"]):
            gpu["index"] = place
        for matrix in (*document["p2p"].values(), document["pcie"]):
            del matrix[GPU]
            for row in matrix:
                del row[GPU]
        document["driver"]["gpu_count"] -= 1
        if not on_bus:
            document["pci"] = [each for each in document["pci"] if each["bus_id"] != at]

    return change


def switch_ports(**values):
    return lambda document: document["nics"]["infiniband"][2]["ports"][0].update(values)


STRANGER = {
    "pid": 77, "usedGpuMemory": 9 << 30, "name": "python3", "unit": "user@1000", "uid": 1000,
}  # fmt: skip
FAILED = {"active": "failed", "sub": "failed", "result": "exit-code"}
STOPPED = {"active": "inactive", "sub": "dead"}

# Class, what is wrong, recording, whether siblings are there, the change.
FAULTS = [
    # The GPU itself.
    ("gone", "a GPU is off the bus", "h200x8", False, without_gpu(on_bus=False)),
    ("gone", "a GPU is on the bus and not in NVML", "h200x8", False, without_gpu(on_bus=True)),
    ("gone", "a GPU is off the bus, siblings have it", "l40sx8", True, without_gpu(on_bus=False)),
    ("gone", "a GPU answers that it is lost", "h200x8", False,
     lambda d: d["gpus"].__setitem__(GPU, {"index": GPU, **LOST})),
    ("gone", "a GPU does not answer in time", "h200x8", False,
     lambda d: d["gpus"].__setitem__(GPU, {"index": GPU, "missing": "timeout"})),
    ("gone", "a GPU has another's UUID", "h200x8", False,
     lambda d: d["gpus"][GPU].update(uuid=d["gpus"][2]["uuid"])),
    ("gone", "a GPU is lost halfway through", "h200x8", False, facts("remapped_rows", value=LOST)),
    ("gone", "the driver asks for a reset", "h200x8", False, facts("recovery_action", value=1)),
    ("gone", "the driver asks for a reboot", "h200x8", False, facts("recovery_action", value=2)),
    ("gone", "the driver did not start a GPU", "h200x8", False,
     all_of(without_gpu(on_bus=True),
            says("NVRM: GPU 0000:9a:00.0: RmInitAdapter failed! (0x62:0xffff:2477)"))),
    # Its kind.
    ("kind", "another model among eight", "h200x8", False, facts("name", value="NVIDIA H100")),
    ("kind", "another VBIOS among eight", "h200x8", False, facts("vbios", value="96.00.0A.00.01")),
    ("kind", "another VBIOS than the siblings'", "h200x8", True,
     facts("vbios", value="96.00.0A.00.01", every=True)),
    ("kind", "another driver than the siblings'", "h200x8", True,
     node("driver", "version", value="570.124.06")),
    ("kind", "a corrupt InfoROM", "h200x8", False,
     facts("inforom_valid", value={"missing": "corrupted_inforom", "code": 14})),
    # Memory.
    ("memory", "3 % less memory", "h200x8", False, facts("memory", "total", value=146_000_000_000)),
    ("memory", "half of the memory", "h200x8", False,
     facts("memory", "total", value=75_000_000_000)),
    ("memory", "all GPUs with less than the siblings", "h200x8", True,
     facts("memory", "total", value=140_000_000_000, every=True)),
    ("memory", "ECC is off", "h200x8", False,
     facts("ecc_mode", value={"current": 0, "pending": 0})),
    ("memory", "ECC goes off", "h200x8", False,
     facts("ecc_mode", value={"current": 1, "pending": 0})),
    ("memory", "an uncorrectable error", "h200x8", False,
     facts("ecc_uncorrected_volatile", value=1)),
    ("memory", "SRAM past its threshold", "h200x8", False,
     facts("ecc_sram", "bThresholdExceeded", value=1)),
    ("memory", "five SRAM errors", "h200x8", False,
     facts("ecc_sram", "aggregateUncParity", value=5)),
    ("memory", "SRAM's flag cannot be read", "h200x8", False,
     facts("ecc_sram", "bThresholdExceeded", value=LOST)),
    ("memory", "a flood of corrected errors", "h200x8", False,
     facts("ecc_corrected_volatile", value=90_000_000)),
    ("memory", "a flood of corrected SRAM errors", "h200x8", False,
     facts("ecc_sram_counts", "corrected_volatile", value=20_000)),
    ("memory", "a remap waits", "h200x8", False, facts("remapped_rows", "pending", value=1)),
    ("memory", "a remap waits, errors not contained", "l40sx8", False,
     facts("remapped_rows", "pending", value=1)),
    ("memory", "a remap failed", "h200x8", False, facts("remapped_rows", "failed", value=1)),
    ("memory", "512 rows remapped", "h200x8", False,
     facts("remapped_rows", "uncorrected", value=512)),
    ("memory", "a bank without spares", "h200x8", False, facts("remap_histogram", "none", value=1)),
    ("memory", "a repair waits", "b200x8", False, facts("repair", "channel_pending", value=1)),
    ("memory", "memory beyond repair", "b200x8", False, facts("memory_unrepairable", value=1)),
    ("memory", "half of it in use by nobody", "h200x8", False,
     facts("memory", "used", value=70_000_000_000)),
    # Heat, power, clocks.
    ("clocks", "hardware slows it for heat", "h200x8", False,
     facts("throttle_samples", value=[0x48, 0x48, 0x48])),
    ("clocks", "the power supply brakes it", "h200x8", False,
     facts("throttle_samples", value=[0x88, 0x88, 0x88])),
    ("clocks", "a power cap while idle", "h200x8", False, facts("throttle_reasons", value=0x4)),
    ("clocks", "heat while idle", "h200x8", False, facts("throttle_reasons", value=0x20)),
    ("clocks", "locked clocks", "h200x8", False, facts("throttle_reasons", value=0x2)),
    ("clocks", "lowered application clocks", "h200x8", False,
     facts("application_clocks_mhz", "sm", value=900)),
    ("clocks", "a lower highest clock", "h200x8", False, facts("clocks_max_mhz", "sm", value=1410)),
    ("clocks", "hotter than it slows down", "h200x8", False,
     facts("temperature_celsius", value=90)),
    ("clocks", "memory hotter than it may be", "h200x8", False,
     facts("temperature_memory_celsius", value=96)),
    ("clocks", "25 degrees hotter than its like, idle", "h200x8", False,
     facts("temperature_celsius", value=65)),
    ("clocks", "140 W more than its like, idle", "h200x8", False,
     facts("power_draw_milliwatts", value=210_000)),
    ("clocks", "a power limit of 300 W", "h200x8", False,
     facts("power_limit_milliwatts", value=300_000)),
    ("clocks", "a board of another power", "h200x8", False,
     facts("power_default_limit_milliwatts", value=600_000)),
    # PCIe.
    ("pcie", "x8 of x16", "h200x8", False, facts("pcie_width", value=8)),
    ("pcie", "a slot of x8", "h200x8", False,
     all_of(facts("pcie_width", value=8), facts("pcie_width_max", value=8))),
    ("pcie", "generation 3 at full clocks", "h200x8", False, facts("pcie_generation", value=3)),
    ("pcie", "a slot of generation 4", "h200x8", False,
     all_of(facts("pcie_generation", value=4), facts("pcie_generation_max", value=4))),
    ("pcie", "all GPUs in slots of generation 4", "h200x8", True,
     all_of(facts("pcie_generation", value=4, every=True),
            facts("pcie_generation_max", value=4, every=True))),
    ("pcie", "replays without end", "h200x8", False, facts("pcie_replays", value=90_000_000)),
    ("pcie", "a fatal AER error", "h200x8", False,
     says("pcieport 0000:00:01.0: AER: Uncorrectable (Fatal) error message received from {at}")),
    ("pcie", "an uncorrected AER error", "h200x8", False,
     says("nvidia {at}: AER: PCIe Bus Error: severity=Uncorrectable (Non-Fatal)")),
    ("pcie", "a flood of corrected AER errors", "h200x8", False,
     says("nvidia {at}: PCIe Bus Error: severity=Correctable, type=Data Link Layer", times=150)),
    ("pcie", "farther apart than in siblings", "l40sx8", True, node("pcie", 0, 1, value=50)),
    ("pcie", "another NUMA node than in siblings", "h200x8", True,
     node("numa", GPU, "node", value=0)),
    # NVLink and the fabric.
    ("nvlink", "a link is down", "h200x8", False, links(7, state=0)),
    ("nvlink", "no link is up", "h200x8", False,
     lambda d: [each.update(state=0) for each in d["nvlink"][GPU]["links"]]),
    ("nvlink", "a link at half speed", "h200x8", False, links(7, speed_mbps=13281)),
    ("nvlink", "fewer links on the board", "h200x8", False, node("nvlink", GPU, "count", value=12)),
    ("nvlink", "recoveries", "h200x8", False,
     lambda d: d["nvlink"][GPU]["links"][3]["errors"].update(recovery=40)),
    ("nvlink", "replays", "h200x8", False,
     lambda d: d["nvlink"][GPU]["links"][3]["errors"].update(replay=40_000)),
    ("nvlink", "the fabric has not begun", "h200x8", False, node("fabric", GPU, "state", value=1)),
    ("nvlink", "the fabric refused it", "h200x8", False, node("fabric", GPU, "status", value=23)),
    ("nvlink", "the fabric is degraded", "h200x8", False,
     all_of(node("fabric", GPU, "health_mask", value=0x1A9),
            node("fabric", GPU, "health_summary", value=2))),
    ("nvlink", "the fabric manager failed", "h200x8", False,
     unit("nvidia-fabricmanager.service", **FAILED)),
    ("nvlink", "the fabric manager is of another version", "h200x8", False,
     node("system", "packages", "nvidia-fabricmanager", "version", value="570.124.06-1")),
    ("nvlink", "IMEX failed", "gb200x4", False, unit("nvidia-imex.service", **FAILED)),
    ("nvlink", "the subnet manager failed", "b200x8", False,
     unit("nvlsm.service", load="loaded", **FAILED)),
    ("nvlink", "fewer C2C links", "gb200x4", False,
     lambda d: d["gpus"][1].update(c2c_links=d["gpus"][1]["c2c_links"] // 2)),
    ("nvlink", "a fatal SXid", "h200x8", False,
     says("nvidia-nvswitch0: SXid (PCI:0000:c4:00.0): 20034, Fatal, Link 30 LTSSM Fault Up")),
    # What the driver logged.
    *(("xid", f"Xid {number}", "h200x8", False,
       says(f"NVRM: Xid (PCI:{{short}}): {number}, pid='<unknown>', name=<unknown>, {more}"))
      for number, more in (
          (46, "GPU stopped"), (48, "DBE"), (61, "halt"), (62, "halt"), (63, "Row Remapper"),
          (64, "Row Remapper failed"), (74, "NVLink"), (79, "GPU has fallen off the bus."),
          (92, "High single-bit ECC error rate"), (94, "Contained"), (95, "Uncontained"),
          (109, "CTX SWITCH TIMEOUT"), (110, "security fault"), (119, "Timeout of GSP"),
          (120, "GSP task exception"), (136, "training failed"), (140, "unrecovered ECC"),
          (143, "init error"), (149, "NETIR_LINK_EVT Fatal XC0 i0 Link 08"), (151, "rotation"),
          (158, "timeout"), (167, "PCIE_FATAL_TIMEOUT"), (171, "DRAM"), (172, "SRAM"),
      )),
    ("xid", "Xid 154: a reboot is asked for", "h200x8", False,
     says("NVRM: Xid (PCI:{short}): 154, GPU recovery action changed from 0x0 (None) to 0x2 "
          "(Node Reboot Required)")),
    ("xid", "Xid 31 again and again on one GPU", "h200x8", False,
     says("NVRM: Xid (PCI:{short}): 31, pid=7, name=python3, MMU Fault", times=8, apart=600.0)),
    ("xid", "the log cannot be read", "h200x8", False,
     node("kernel_log", value={"missing": "no_permission"})),
    # How the node is set up.
    ("settings", "persistence mode is off", "h200x8", False, facts("persistence_mode", value=0)),
    ("settings", "MIG is on", "h200x8", False,
     facts("mig_mode", value={"current": 1, "pending": 1})),
    ("settings", "MIG goes on", "h200x8", False,
     facts("mig_mode", value={"current": 0, "pending": 1})),
    ("settings", "exclusive compute mode", "h200x8", False, facts("compute_mode", value=3)),
    ("settings", "a stranger's process", "h200x8", False, facts("processes", value=[STRANGER])),
    ("settings", "no /dev/nvidia-uvm", "h200x8", False,
     lambda d: d["driver"].update(devices=[e for e in d["driver"]["devices"] if "uvm" not in e])),
    ("settings", "the library is of another version", "h200x8", False,
     node("driver", "library", "version", value="570.124.06")),
    ("settings", "the next boot's module is another", "h200x8", False,
     all_of(node("driver", "disk", "version", value="570.124.06"),
            node("driver", "kernels", 0, "nvidia", value="570.124.06"))),
    ("settings", "the next kernel has no module", "h200x8", False,
     lambda d: (d["driver"]["kernels"][0].update(newest=False),
                d["driver"]["kernels"].append({"kernel": "6.8.0-99-generic", "running": False,
                                               "newest": True, "nvidia": None, "signer": None}))),
    ("settings", "the driver is too old for CUDA 13", "h200x8", False,
     node("driver", "cuda", value=12040)),
    ("settings", "ACS redirects peer traffic", "l40sx8", False,
     lambda d: [each.update(redirect=True) for each in d["system"]["acs"]]),
    ("settings", "upgrades of the driver by themselves", "h200x8", False,
     node("system", "unattended_upgrades", "blacklist", value=[])),
    # The machine.
    ("machine", "half of the CPUs", "h200x8", True, node("cpus", value=112)),
    ("machine", "a DIMM less", "h200x8", True, node("memory_mib", value=1_960_000)),
    ("machine", "an uncorrected memory error (EDAC)", "h200x8", False,
     node("system", "memory_errors", value={"corrected": 0, "uncorrected": 1})),
    ("machine", "many corrected memory errors (EDAC)", "h200x8", False,
     node("system", "memory_errors", value={"corrected": 40_000, "uncorrected": 0})),
    ("machine", "an uncorrected machine check", "h200x8", False,
     says("mce: [Hardware Error]: CPU 3: Machine Check: 0 Bank 5: bea0000000000108")),
    ("machine", "a UE line of EDAC", "h200x8", False,
     says("EDAC MC1: 1 UE memory read error on CPU_SrcID#0_MC#1_Chan#0_DIMM#0")),
    ("machine", "a flood of CE lines", "h200x8", False,
     says("EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#1", times=150)),
    ("machine", "the clock is not kept", "h200x8", False,
     node("system", "clock", "synchronized", value=False)),
    ("machine", "the clock may be wrong by 6 s", "h200x8", False,
     node("system", "clock", "max_error_us", value=6_000_000)),
    ("machine", "a small /dev/shm", "h200x8", False,
     node("system", "shm", value={"size_mib": 64, "free_mib": 64})),
    ("machine", "little memory is left", "h200x8", False,
     node("system", "memory_available_mib", value=2000)),
    ("machine", "the disk is full", "h200x8", False,
     node("system", "disks", "/", "free_mib", value=900)),
    ("machine", "an Ethernet link at 1 Gbit/s", "h200x8", True,
     node("nics", "net", 0, "speed", value=1000)),
    ("machine", "a smaller MTU", "h200x8", True, node("nics", "net", 0, "mtu", value=1280)),
    ("machine", "an InfiniBand port is down", "h200x8", False,
     switch_ports(state="1: DOWN", phys_state="3: Disabled")),
    ("machine", "an InfiniBand port is down, siblings' are up", "h200x8", True,
     switch_ports(state="1: DOWN", phys_state="3: Disabled")),
    ("machine", "an InfiniBand port at a quarter of its rate", "h200x8", False,
     switch_ports(rate="100 Gb/sec (1X NDR)")),
]  # fmt: skip

# What sound fleets differ in: none of it may keep work away.
BENIGN = [
    ("serves", "h200x8", False, lambda d: [gpu.update(
        temperature_celsius=78, power_draw_milliwatts=690_000, throttle_reasons=0x4,
        throttle_samples=[0x4], processes=[{"pid": 9, "usedGpuMemory": 120 << 30,
        "name": "VLLM::Worker", "unit": "vllm-a-0.service", "uid": 990}]) for gpu in d["gpus"]]),
    ("idles in P8", "l40sx8", False, lambda d: [gpu.update(
        performance_state=8, pcie_generation=1) for gpu in d["gpus"]]),
    ("one GPU 6 degrees warmer", "h200x8", False, facts("temperature_celsius", value=40)),
    ("a few corrected errors", "h200x8", False, facts("ecc_corrected_volatile", value=40)),
    ("errors of an earlier life", "h200x8", False, facts("ecc_uncorrected_aggregate", value=3)),
    ("remapped rows", "h200x8", False, facts("remapped_rows", "uncorrected", value=4)),
    ("a few replays", "h200x8", False, facts("pcie_replays", value=12)),
    ("1 % more memory in another branch", "h200x8", True,
     facts("memory", "total", value=152_000_000_000, every=True)),
    ("a clock change while it is read", "h200x8", False,
     facts("throttle_samples", value=[0x8, 0x0, 0x1])),
    ("raised application clocks", "h200x8", False, all_of(
        facts("application_clocks_mhz", "memory", value=3300),
        facts("throttle_reasons", value=0x2))),
    ("a lowered power limit everywhere", "h200x8", False,
     facts("power_limit_milliwatts", value=500_000, every=True)),
    ("Xid 13 of a program", "h200x8", False,
     says("NVRM: Xid (PCI:{short}): 13, pid=7, name=python3, Graphics SM Warp Exception")),
    ("Xid 31 of a program", "h200x8", False,
     says("NVRM: Xid (PCI:{short}): 31, pid=7, name=python3, MMU Fault")),
    ("Xid 43 of a program", "h200x8", False,
     says("NVRM: Xid (PCI:{short}): 43, pid=7, name=python3, Ch 00000008")),
    ("a fatal Xid before the driver was loaded", "h200x8", False,
     lambda d: d["kernel_log"]["lines"].insert(0, [0.5, "NVRM: Xid (PCI:0000:18:00): 79, lost"])),
    ("a corrected AER error of a disk", "h200x8", False,
     says("nvme 0000:c1:00.0: PCIe Bus Error: severity=Correctable, type=Physical Layer")),
    ("a few corrected machine checks", "h200x8", False,
     says("mce: [Hardware Error]: Machine check events logged", times=5)),
    ("what memory controllers say at boot", "h200x8", False,
     says("EDAC MC0: Giving out device to module i10nm_edac", "mce: CPU supports 32 MCE banks")),
    ("a non-fatal SXid", "h200x8", False,
     says("nvidia-nvswitch0: SXid (PCI:0000:c4:00.0): 12028, Non-fatal, Link 61 egress")),
    ("another kernel than the siblings", "h200x8", True, node("kernel", value="6.8.0-91-generic")),
    ("more CPUs than the siblings", "h200x8", True, node("cpus", value=256)),
    ("more memory than the siblings", "h200x8", True, node("memory_mib", value=4_127_854)),
    ("a faster link than the siblings", "h200x8", True,
     node("nics", "net", 0, "speed", value=100_000)),
    ("a card in another slot", "h200x8", True, node("nics", "net", 0, "pci", "numa_node", value=1)),
    ("booted just now", "h200x8", True, node("system", "uptime_seconds", value=90.0)),
    ("DCGM is not installed", "h200x8", False,
     unit("nvidia-dcgm.service", load="not-found", **STOPPED)),
    ("no swap of persistence by its daemon", "h200x8", False,
     unit("nvidia-persistenced.service", **STOPPED)),
    ("a second disk", "h200x8", True, node("system", "disks", "/srv", value={
        "mount": "/srv", "size_mib": 7_000_000, "free_mib": 6_900_000})),
    ("one InfiniBand card less cabled in all", "h200x8", True,
     lambda d: d["nics"]["infiniband"].pop()),
]  # fmt: skip

CLASSES = {
    "gone": "a GPU is gone, or does not answer",
    "kind": "another kind or firmware",
    "memory": "a GPU's memory",
    "clocks": "heat, power, clocks",
    "pcie": "PCIe",
    "nvlink": "NVLink and its fabric",
    "xid": "what the driver logged",
    "settings": "how the node is set up",
    "machine": "the machine around the GPUs",
}

# Which of them no check warns of, and why: it is as likely not cabled, a remark says so.
MISSED = {"an InfiniBand port is down"}


# What a serving node declares, and needs.
VLLM = {"vllm": {"version": "0.32.0", "lock": "l", "listen": "127.0.0.1"}}
NEEDS = Needs((13, 0), "locks/vllm-0.32.0.txt")
UNCHANGED = {}


def judge(document, judged, profile, with_siblings, change):
    """Return the worst that is said of a changed recording and not of the recording itself."""
    found = document(profile)
    change(found)
    siblings = [document(profile) for _ in range(3)] if with_siblings else []

    def said_of(asked):
        said = judged(asked, VLLM, NEEDS, siblings).findings
        return {
            (each.check, each.found): each.severity
            for each in said
            if each.cause is None and each.severity > Severity.OK
        }

    key = (profile, with_siblings)
    if key not in UNCHANGED:
        UNCHANGED[key] = said_of(document(profile))
    new = said_of(found)
    return max((new[each] for each in new.keys() - UNCHANGED[key]), default=Severity.OK)


@pytest.fixture
def results(document, judged):
    """By fault, the worst that is said of it."""
    return [
        (kind, fault, judge(document, judged, profile, siblings, change))
        for kind, fault, profile, siblings, change in FAULTS
    ]


def test_faults_written_into_recordings_are_found(results):
    """At least 95 of 100; each that is not is named here."""
    missed = {fault for _, fault, worst in results if worst <= Severity.INFO}

    assert missed == MISSED
    assert len(missed) <= 0.05 * len(FAULTS)
    assert len({fault for _, fault, _ in results}) == len(FAULTS) > 100
    assert {kind for kind, *_ in FAULTS} == set(CLASSES)


def test_what_sound_fleets_differ_in_blocks_nothing(document, judged):
    stopped = []
    for words, profile, siblings, change in BENIGN:
        worst = judge(document, judged, profile, siblings, change)
        if worst.stops:
            stopped.append(words)

    assert stopped == []
    assert len(BENIGN) >= 28


def test_every_change_changes_its_recording(document):
    for _, fault, profile, _, change in FAULTS:
        found = document(profile)
        change(found)
        assert found != document(profile), fault


@pytest.mark.long
def test_the_table_of_written_faults_is_written(document, judged, results):
    for kind, words in CLASSES.items():
        worst = [severity for its, _, severity in results if its == kind]
        stopped = sum(severity.stops for severity in worst)
        warned = sum(severity is Severity.WARN for severity in worst)
        left = [fault for its, fault, severity in results
                if its == kind and severity <= Severity.INFO]  # fmt: skip
        cells = (words, str(len(worst)), str(stopped), str(warned), ", ".join(left) or "none")
        note("measured/written-faults.md", *cells)
    worst = [judge(document, judged, profile, *more) for _, profile, *more in BENIGN]
    stopped = sum(severity.stops for severity in worst)
    warned = sum(severity is Severity.WARN for severity in worst)
    cells = ("none: what sound fleets differ in", str(len(worst)), str(stopped), str(warned), "-")
    note("measured/written-faults.md", *cells)
