"""The machine around the lab's simulated GPUs: its files and programs, on every kind of hardware.

Trees are written and read back as a node's programs would, through links and scripts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from lab import machine, nvml
from lab.faults import fault
from lab.machine.profile import expanded
from tests.support.checkout import ROOT
from tests.support.rows import each_row

PROFILES = nvml.profiles()
ACS_REDIRECT = 0x04 | 0x08 | 0x20  # PCI_ACS_RR, _CR, _EC, linux/pci_regs.h


@pytest.fixture(scope="session")
def tree(tmp_path_factory):
    """`tree("h100x8")`: the root of a healthy machine, written once."""
    written = {}

    def of(profile):
        if profile not in written:
            root = tmp_path_factory.mktemp(profile)
            written[profile] = machine.write(machine.of(profile), root)
        return written[profile]

    return of


def read(path):
    return path.read_text().strip()


def ask(root, program, *arguments):
    """Run one of a tree's programs; return status, standard output, standard error."""
    done = subprocess.run([root / program, *arguments], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout, done.stderr


def functions(root, vendor, kind):
    """The PCI functions of a vendor whose class begins with `kind`: {address: directory}."""
    return {
        each.name: each.resolve()
        for each in (root / "sys/bus/pci/devices").iterdir()
        if read(each / "vendor") == vendor and read(each / "class").startswith(kind)
    }


def nvml_numbers(profile, key):
    """What the profile's file says of each GPU, read without our own reader of profiles."""
    found = {}
    for line in nvml.profile(profile).read_text().splitlines():
        name, _, value = line.partition("=")
        for gpu in range(16):
            if name.strip() in {f"gpu.*.{key}", f"gpu.{gpu}.{key}"}:
                found[gpu] = value.strip()
    return found


# --- every healthy machine


@each_row("profile", PROFILES)
def test_no_link_of_a_tree_leads_nowhere(tree, profile):
    links = [path for path in tree(profile).rglob("*") if path.is_symlink()]

    assert links
    assert [path for path in links if not path.exists()] == []
    assert [path for path in links if path.readlink().is_absolute()] == [], "the tree may be moved"


@each_row("profile", PROFILES)
def test_the_bus_has_the_gpus_that_nvml_has(tree, profile):
    root = tree(profile)
    about = machine.Profile.of(profile)

    gpus = functions(root, "0x10de", "0x03")

    assert sorted(gpus) == sorted(about.gpu(i, "busid").lower() for i in range(about.count))
    for index in range(about.count):
        at = gpus[about.gpu(index, "busid").lower()]
        assert read(at / "device") == f"0x{int(about.gpu(index, 'pci.id'), 16) >> 16:04x}"
        assert (at / "driver").resolve().name == "nvidia"
        if profile != "t4x1":  # a virtual machine has no NUMA
            assert read(at / "numa_node") == about.gpu(index, "numa")


@each_row("profile", PROFILES)
def test_functions_are_as_near_as_the_profile_says(tree, profile):
    """GPUs whose paths agree in NUMA node and host bridge share that bridge, and so on down."""
    if profile == "t4x1":
        pytest.skip("one GPU")
    root, about = tree(profile), machine.Profile.of(profile)
    at = functions(root, "0x10de", "0x03")

    for one in range(about.count):
        for other in range(one):
            paths = [about.gpu(gpu, "path").split(".") for gpu in (one, other)]
            agree = next((i for i in range(4) if paths[0][i] != paths[1][i]), 4)
            places = [
                at[about.gpu(gpu, "busid").lower()].relative_to(root.resolve()).parts
                for gpu in (one, other)
            ]
            shared = sum(a == b for a, b in zip(*places, strict=False))
            # sys, devices, host bridge, root port, the switch's upper port
            assert min(shared, 5) == {0: 2, 1: 2, 2: 3, 3: 4, 4: 5}[agree]


@pytest.mark.parametrize("profile", ["h100x8", "h200x8", "a100x8"])
def test_nvswitches_are_where_the_links_of_the_gpus_end(tree, profile, nvml_answers):
    """At the same addresses, and the same product, as NVML says of the links' far ends."""
    found = functions(tree(profile), "0x10de", "0x0680")

    ends, products = nvml_answers(
        profile,
        "[nvmlDeviceGetNvLinkRemotePciInfo(gpu(0), i).busId.lower()[4:] for i in range(12)]",
        "[nvmlDeviceGetNvLinkRemotePciInfo(gpu(0), i).pciDeviceId >> 16 for i in range(12)]",
    )
    assert set(found) == set(ends)
    assert {int(read(at / "device"), 16) for at in found.values()} == set(products)


@pytest.fixture
def nvml_answers(tmp_path_factory):
    """`nvml_answers("h100x8", "nvmlDeviceGetCount()")`: what the unmodified binding is told."""
    library = nvml.build(tmp_path_factory.getbasetemp() / "nvml")

    def answers(profile, *questions):
        done = subprocess.run(
            [
                sys.executable,
                "-I",
                ROOT / "tests/unit/lab/nvml/interview.py",
                nvml.BINDING.parent,
            ],
            input=json.dumps(questions),
            env={
                **os.environ,
                "LD_LIBRARY_PATH": str(library.parent),
                "GPUFLEET_NVML_PROFILE": str(nvml.profile(profile)),
            },
            capture_output=True,
            text=True,
            check=True,
        )
        return json.loads(done.stdout)

    return answers


@pytest.mark.parametrize("profile", ["h100x8", "a100x8", "gb200x4", "b200x8"])
def test_behind_every_switch_of_a_training_machine_are_as_many_nics_as_gpus(tree, profile):
    root, about = tree(profile), machine.Profile.of(profile)
    at = functions(root, "0x10de", "0x03")
    nics = {
        path.name: (path / "device").resolve().parents[1]
        for path in (root / "sys/class/infiniband").iterdir()
    }

    for index in range(about.count):
        gpu = (root / "sys/bus/pci/devices" / about.gpu(index, "busid").lower()).resolve()
        beside = sum(gpu.parents[1] in each.parents for each in at.values())
        assert list(nics.values()).count(gpu.parents[1]) == beside
    for name in nics:
        port = root / f"sys/class/infiniband/{name}/ports/1"
        assert read(port / "state") == "4: ACTIVE"
        assert read(port / "rate").split()[0] in {"200", "400"}


def test_a_board_of_blackwells_names_the_nics_that_manage_its_switches(tree):
    vpd = sorted((tree("b200x8") / "sys/devices").rglob("vpd"))

    assert len(vpd) == 2
    assert all("SW_MNG" in read(path) for path in vpd)
    assert sorted((tree("h100x8") / "sys/devices").rglob("vpd")) == []


@each_row("profile", PROFILES)
def test_the_driver_is_of_one_version_everywhere(tree, profile):
    root = tree(profile)
    version = machine.Profile.of(profile).driver

    assert read(root / "sys/module/nvidia/version") == version
    assert f"  {version}  " in read(root / "proc/driver/nvidia/version")
    (library,) = root.rglob("libnvidia-ml.so.1")
    assert library.resolve().name == f"libnvidia-ml.so.{version}"
    kernel = read(root / "proc/sys/kernel/osrelease")
    assert (
        ask(root, "usr/sbin/modinfo", "-k", kernel, "-F", "version", "nvidia")[1].strip() == version
    )
    log = ask(root, "usr/bin/dmesg")[1]
    assert f"  {version}  Release Build" in log
    assert "Xid" not in log


@each_row("profile", PROFILES)
def test_the_kernel_of_a_healthy_machine_has_its_module(tree, profile):
    root = tree(profile)
    kernel = read(root / "proc/sys/kernel/osrelease")

    assert [path.name for path in (root / "lib/modules").iterdir()] == [kernel]
    assert (root / f"lib/modules/{kernel}/modules.dep").exists()
    assert "nvidia" in [row.split()[0] for row in read(root / "proc/modules").splitlines()]
    assert not (root / "run/reboot-required").exists()


@each_row("profile", PROFILES)
def test_cpus_are_those_beside_the_gpus(tree, profile):
    online = expanded(read(tree(profile) / "sys/devices/system/cpu/online"))

    for cpus in nvml_numbers(profile, "cpus").values():
        assert expanded(cpus) <= online


def acs_control(config):
    """A function's ACS control word, found as Linux finds it: along the list of capabilities."""
    at = 0x100
    while at:
        header = int.from_bytes(config[at : at + 4], "little")
        if header & 0xFFFF == 0x0D:  # PCI_EXT_CAP_ID_ACS
            return int.from_bytes(config[at + 6 : at + 8], "little")
        at = header >> 20
    return None


@each_row("profile", PROFILES)
def test_no_healthy_bridge_redirects(tree, profile):
    bridges = [
        path.parent
        for path in (tree(profile) / "sys/devices").rglob("config")
        if read(path.parent / "class") == "0x060400"
    ]
    controls = [acs_control((bridge / "config").read_bytes()) for bridge in bridges]

    assert bool(bridges) == (profile != "t4x1"), "a virtual machine shows no bridges"
    assert not any(control & ACS_REDIRECT for control in controls if control is not None)


def test_bridges_redirect_where_the_machine_says_so(tmp_path):
    root = machine.write(machine.of("l40sx8", fault("acs-on")), tmp_path)

    gpu = functions(root, "0x10de", "0x03")["0000:01:00.0"]
    assert acs_control((gpu.parent / "config").read_bytes()) & ACS_REDIRECT
    assert acs_control((gpu / "config").read_bytes()) is None


def test_all_but_root_see_the_beginning_of_the_configuration_space(tmp_path):
    root = machine.write(machine.of("h100x8", fault("no-permission")), tmp_path)

    sizes = {path.stat().st_size for path in (root / "sys/devices").rglob("config")}
    assert sizes == {64}


@pytest.mark.parametrize(
    ("profile", "value"), [("b200x8", b"\1"), ("h100x8", b"\0"), ("t4x1", None)]
)
def test_secure_boot_is_one_byte_after_its_attributes(tree, profile, value):
    found = list((tree(profile) / "sys/firmware/efi/efivars").glob("SecureBoot-8be4df61-*"))

    assert [path.read_bytes()[4:] for path in found] == ([value] if value else [])
    assert all(len(path.read_bytes()) == 5 for path in found)


def test_answers_are_what_system_calls_give(tmp_path):
    found = machine.answers(machine.of("h100x8"))

    assert found["disks"]["/"]["free_mib"] < found["disks"]["/"]["size_mib"]
    assert found["shm"]["size_mib"] > 1_000_000  # half of 2 TiB
    assert found["clock"]["synchronized"] is True
    assert found["library"]["version"] == "570.124.06"
    assert found["uid"] == 0
    assert machine.answers(machine.of("gb200x4"))["arch"] == "aarch64"


# --- programs

JOURNAL = ("-k", "-b", "-o", "short-monotonic", "--no-pager", "-n", "200000")
UNITS = "--property=Id,LoadState,ActiveState,SubState,UnitFileState,Result"


@each_row(
    ("program", "arguments"),
    [
        ("usr/bin/journalctl", ["-k"]),
        ("usr/bin/journalctl", [*JOURNAL, "--utc"]),
        ("usr/bin/dmesg", ["-T"]),
        ("usr/sbin/modinfo", ["--basedir", "/", "nvidia"]),
        ("usr/sbin/modinfo", ["-k", "6.8.0-90-generic", "mlx5_core"]),
        ("usr/bin/systemctl", ["restart", "nvidia-fabricmanager.service"]),
        ("usr/bin/systemctl", ["show", "--property=MainPID", "nvidia-fabricmanager.service"]),
        ("usr/bin/systemctl", ["show", "--value", "nvidia-fabricmanager.service"]),
        ("usr/bin/dpkg-query", ["-l"]),
        ("usr/bin/dpkg-query", ["-W", "-f", "${Maintainer}\n"]),
        ("usr/bin/apt-config", ["shell"]),
        ("usr/bin/apt-config", ["dump", "--no-empty"]),
        ("usr/bin/apt-config", ["-o", "APT::Periodic=0", "dump"]),
    ],
)
def test_a_question_that_was_changed_has_no_answer(tree, program, arguments):
    """Else a test would pass on the answer to another question."""
    status, out, err = ask(tree("h100x8"), program, *arguments)

    assert (status, out) == (2, "")
    assert "does not know" in err


def test_rpm_refuses_too(tree):
    status, out, _ = ask(tree("l40sx8"), "usr/bin/rpm", "-qa")

    assert (status, out) == (2, "")
    assert not (tree("l40sx8") / "usr/bin/dpkg-query").exists()


def test_journal_and_ring_say_the_same(tree):
    root = tree("h100x8")
    journal = ask(root, "usr/bin/journalctl", *JOURNAL)[1].splitlines()
    ring = ask(root, "usr/bin/dmesg")[1].splitlines()

    assert [line.replace("gpu-01 kernel: ", "") for line in journal] == ring
    assert ring[0].startswith("[    0.000000] Linux version 6.8.0-90-generic")


def test_systemctl_answers_a_block_for_each_unit(tree):
    names = ("nvidia-fabricmanager.service", "no-such.service")
    status, out, _ = ask(
        tree("h100x8"), "usr/bin/systemctl", "show", "--no-pager", UNITS, "--", *names
    )
    blocks = [
        dict(line.split("=", 1) for line in block.splitlines()) for block in out.split("\n\n")
    ]

    assert status == 0
    assert blocks == [
        {"Id": names[0], "LoadState": "loaded", "ActiveState": "active", "SubState": "running",
         "UnitFileState": "enabled", "Result": "success"},
        {"Id": names[1], "LoadState": "not-found", "ActiveState": "inactive", "SubState": "dead",
         "UnitFileState": "", "Result": "success"},
    ]  # fmt: skip


@each_row(
    ("profile", "state"),
    [("h100x8", "active"), ("a100x8", "active"), ("b200x8", "active"), ("gb200x4", "inactive"),
     ("l40sx8", "inactive"), ("h100x2-nvl", "failed")],
)  # fmt: skip
def test_the_fabric_manager_runs_where_the_machine_has_switches_of_its_own(tree, profile, state):
    out = ask(tree(profile), "usr/bin/systemctl", "show", UNITS, "nvidia-fabricmanager.service")[1]

    assert f"ActiveState={state}\n" in out


def test_dpkg_query_answers_patterns_and_says_which_match_nothing(tree):
    status, out, err = ask(
        tree("a100x8"), "usr/bin/dpkg-query", "-W",
        "-f", "${db:Status-Abbrev}|${Package}|${Version}\n", "nvidia-f*", "nothing-*",
    )  # fmt: skip

    assert status == 1
    assert out == "hi |nvidia-fabricmanager-535|535.183.06-1\n"
    assert "no packages found matching nothing-*" in err


def test_dpkg_query_agrees_with_the_real_one(tmp_path):
    """The same database, asked with the same words."""
    about = machine.of("a100x8")
    database = tmp_path / "dpkg"
    database.mkdir()
    (database / "status").write_text(
        "\n".join(
            f"Package: {name}\nStatus: {'hold' if package.held else 'install'} ok installed\n"
            f"Architecture: amd64\nMaintainer: nobody\nVersion: {package.version}\nDescription: x\n"
            for name, package in about.packages.items()
        )
    )
    words = [
        "-W",
        "-f",
        "${Package}\t${Version}\t${db:Status-Abbrev}\n",
        "nvidia*",
        "linux-*",
        "x*",
    ]
    try:
        real = subprocess.run(
            ["dpkg-query", f"--admindir={database}", *words],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    except FileNotFoundError:
        pytest.skip("no dpkg on this machine")

    status, out, _ = ask(machine.write(about, tmp_path / "root"), "usr/bin/dpkg-query", *words)

    assert (status, sorted(out.splitlines())) == (real.returncode, sorted(real.stdout.splitlines()))


def test_a_log_that_may_not_be_read_says_so(tmp_path):
    root = machine.write(machine.of("h100x8", fault("log-unreadable")), tmp_path)

    status, out, err = ask(root, "usr/bin/journalctl", *JOURNAL)
    assert (status, out) == (1, "")
    assert "insufficient permissions" in err
    assert "not permitted" in ask(root, "usr/bin/dmesg")[2]
