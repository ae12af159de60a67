"""The lab's nodes are machines like any other, and leave nothing behind.

What is asserted is read with the machine's own tools (ssh, ip, /proc), not with the lab's code.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import pytest

from lab import cgroup
from lab.nodes import Lab
from tests.support.checkout import own_lab

LAB_ID = own_lab("gfn")
# begins like the other: what belongs to one is not taken for the other's
DOOMED_ID = f"{LAB_ID}k"
NODES = {"gpu-01": "h100x8", "gpu-02": "a100x4-pcie"}
STATE = Path("/var/lib/gpufleet-lab")

# What a node prints of its GPUs, by the C library alone.
COUNT_GPUS = """python3 -c '
import ctypes
nvml, count = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.c_uint()
print(nvml.nvmlInit_v2(), nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)), count.value)'"""


@pytest.fixture(scope="module", autouse=True)
def _root() -> None:
    if os.geteuid() != 0:
        pytest.skip("lab nodes need root: they are made of mounts, namespaces and interfaces")


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    lab = Lab.open(LAB_ID, print)
    lab.purge()  # what a test run that was killed has left
    lab.up(NODES)
    yield lab
    lab.purge()


@pytest.fixture
def doomed() -> Iterator[Lab]:
    """A lab that is killed while it comes up."""
    lab = Lab.open(DOOMED_ID, print)
    lab.purge()
    yield lab
    lab.purge()


def ssh(
    lab: Lab, node: str, command: str, *options: str, limit: float = 20
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["ssh", "-F", STATE / lab.facts.id / "ssh_config", *options, node, command],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=limit,
        check=False,
    )


def said(lab: Lab, node: str, command: str) -> str:
    """Return what a command prints on a node where it succeeds."""
    done = ssh(lab, node, command)
    assert done.returncode == 0, f"{node}: {command}: {done.stderr}"
    return done.stdout.strip()


def boot_ids(lab: Lab) -> dict[str, str]:
    return {node: said(lab, node, "cat /proc/sys/kernel/random/boot_id") for node in NODES}


def wait_for(condition: Callable[[], bool], limit: float = 30) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.005)


def below(root: str) -> Iterator[Path]:
    """Yield what is below; other labs may remove theirs meanwhile, which Path.rglob fails on."""
    for folder, folders, files in os.walk(root):
        yield from (Path(folder, name) for name in (*folders, *files))


def held_locks(paths: Iterable[Path]) -> set[Path]:
    """Return those that a process has locked, as nspawn does while its node runs."""
    inodes = {int(line.split()[-3].split(":")[2]) for line in
              Path("/proc/locks").read_text().splitlines()}  # fmt: skip
    held = set()
    for path in paths:
        with contextlib.suppress(FileNotFoundError):
            if path.stat().st_ino in inodes:
                held.add(path)
    return held


def left_on_machine(lab_id: str) -> set[str]:
    """
    Return every interface, namespace, route, nft table, mount, disk, cgroup and process there is.

    Those of other labs, which may come and go meanwhile, are left out: nspawn's locks, which do not
    name theirs, while their nodes run.
    """

    def lines(*command: str) -> list[str]:
        done = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.splitlines()

    found = {f"link {link['ifname']}" for link in json.loads("".join(lines("ip", "-j", "link")))}
    found |= {f"netns {line}" for line in lines("ip", "netns", "list")}
    found |= {f"route {line}" for line in lines("ip", "route") if "linkdown" not in line}
    found |= {f"nft {line}" for line in lines("nft", "list", "tables")}
    found |= {f"mount {line}" for line in Path("/proc/mounts").read_text().splitlines()}
    disks = Path("/sys/block").glob("loop*/loop/backing_file")
    found |= {f"disk {disk.read_text().strip()}" for disk in disks}
    found |= {f"cgroup {path}" for path in below("/sys/fs/cgroup") if path.name[:3] == "gf-"}
    found |= {f"shm {path}" for path in Path("/dev/shm").iterdir()}
    kept = {path for path in below("/run/systemd/nspawn") if "-" in path.name}
    found |= {f"nspawn {path}" for path in kept - held_locks(kept)}
    for process in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = process.read_text().replace("\0", " ")
        except OSError:  # it has ended meanwhile
            continue
        if f"gpufleet-lab/{lab_id}/" in command:
            found.add(f"process {command}")
    others = re.compile(
        rf"g[fd][-_](?!{lab_id}\b)|gpufleet-lab/(?!{lab_id}/)|/dev/shm/(?!{lab_id}-)"
    )
    theirs = {
        f"route unreachable {json.loads(file.read_text())['net']}"
        for file in STATE.glob("*/lab.json")
        if file.parent.name != lab_id
    }
    return {
        each
        for each in found
        if not others.search(each) and each.partition(" metric")[0] not in theirs
    }


# -- nodes are machines ----------------------------------------------------------------------------


def test_nodes_answer_ssh_with_host_keys_that_were_known_before(lab: Lab) -> None:
    """No key is accepted on first sight: a node that shows another one is refused."""
    for node in NODES:
        assert said(lab, node, "hostname") == node
        assert said(lab, node, "systemctl is-system-running --wait") == "running"

    wrong = ssh(lab, "gpu-01", "true", "-o", "HostKeyAlias=gpu-02")
    assert wrong.returncode == 255
    assert "Host key verification failed" in wrong.stderr


def test_a_node_reaches_the_lab_and_nothing_else(lab: Lab) -> None:
    """Another node and this machine's mirror answer; anywhere else is refused at once."""
    facts = json.loads((STATE / LAB_ID / "lab.json").read_text())
    said(lab, "gpu-01", "ping -c1 -W2 gpu-02")
    mirror = f"curl -s -o /dev/null -w '%{{http_code}}' -m 5 {facts['mirror_url']}/"
    assert said(lab, "gpu-01", mirror) != "000"

    # The machine's own address outside the lab, and one that is nobody's (RFC 5737).
    machine = subprocess.run(["hostname", "-I"], capture_output=True, text=True, check=True)
    for outside in (*machine.stdout.split()[:1], "198.51.100.7"):
        if outside.startswith(facts["net"].rpartition(".")[0]):
            continue
        tried = "-s -o /dev/null -m 5 -w '%{time_total}'"
        refused = ssh(lab, "gpu-01", f"curl {tried} http://{outside}/")
        assert refused.returncode == 7, "7 is curl's: failed to connect; 28 would be a timeout"
        assert float(refused.stdout) < 1


def test_apt_works_on_a_node_and_the_proxy_gives_debian_only(lab: Lab) -> None:
    said(lab, "gpu-01", "apt-get -qq update && apt-get -qq install --dry-run jq")
    facts = json.loads((STATE / LAB_ID / "lab.json").read_text())
    through = f"curl -s -o /dev/null -w '%{{http_code}}' -m 5 -x {facts['proxy']}"
    assert said(lab, "gpu-01", f"{through} http://example.com/") == "403"


def test_a_node_answers_for_its_own_gpus(lab: Lab) -> None:
    """Each node has the hardware of its own profile."""
    assert said(lab, "gpu-01", COUNT_GPUS) == "0 0 8"
    assert said(lab, "gpu-02", COUNT_GPUS) == "0 0 4"


def test_a_node_tunes_its_kernel_not_the_machines(lab: Lab) -> None:
    """vm.* is one for the whole machine, and is lost at a reboot like any unsaved setting."""
    before = Path("/proc/sys/vm/swappiness").read_text()
    said(lab, "gpu-01", "sysctl -w vm.swappiness=7")
    assert said(lab, "gpu-01", "cat /proc/sys/vm/swappiness") == "7"
    assert Path("/proc/sys/vm/swappiness").read_text() == before
    lab.power("gpu-01", "cycle")
    assert said(lab, "gpu-01", "cat /proc/sys/vm/swappiness") == before.strip()


# -- power and network -----------------------------------------------------------------------------


def test_a_reboot_is_a_new_boot_with_the_same_files(lab: Lab) -> None:
    before = said(lab, "gpu-01", "cat /proc/sys/kernel/random/boot_id; touch /kept /run/lost")
    ssh(lab, "gpu-01", "systemctl reboot")
    ask = "cat /proc/sys/kernel/random/boot_id && ls -d /kept /run/lost 2>/dev/null"
    wait_for(lambda: (now := ssh(lab, "gpu-01", ask).stdout) != "" and before not in now)
    assert ssh(lab, "gpu-01", ask).stdout.split()[1:] == ["/kept"]
    assert float(said(lab, "gpu-01", "cut -d' ' -f1 /proc/uptime")) < 60


def test_power_off_is_a_pulled_plug_and_on_starts_again(lab: Lab) -> None:
    """The other node stays up; the one that is off answers nothing, not even with a refusal."""
    before = boot_ids(lab)
    lab.power("gpu-02", "off")
    gone = ssh(lab, "gpu-02", "true", "-o", "ConnectTimeout=2")
    assert gone.returncode == 255
    assert "refused" not in gone.stderr
    lab.power("gpu-02", "on")
    after = boot_ids(lab)
    assert after["gpu-01"] == before["gpu-01"]
    assert after["gpu-02"] != before["gpu-02"]


def test_a_cut_link_is_silent_and_heals(lab: Lab) -> None:
    lab.net("gpu-02", "cut")
    assert ssh(lab, "gpu-01", "ping -c1 -W1 gpu-02").returncode == 1
    lab.net("gpu-02", "heal")
    said(lab, "gpu-01", "ping -c1 -W2 gpu-02")


def test_a_deaf_node_hears_all_but_one(lab: Lab) -> None:
    """Cut one way: what comes from elsewhere arrives, and so does what the deaf node sends."""
    lab.net("gpu-02", "deaf gpu-01")
    try:
        assert ssh(lab, "gpu-01", "ping -c1 -W1 gpu-02").returncode == 1
        counted = "cat /sys/class/net/eth0/statistics/rx_packets"
        before = int(said(lab, "gpu-01", counted))
        ssh(lab, "gpu-02", "ping -c20 -i0.01 -W1 gpu-01")
        assert int(said(lab, "gpu-01", counted)) - before >= 20
    finally:
        lab.net("gpu-02", "heal")
    said(lab, "gpu-01", "ping -c1 -W2 gpu-02")


def test_a_delayed_node_answers_late_and_loses_nothing(lab: Lab) -> None:
    said(lab, "gpu-01", "ping -c1 -W2 gpu-02")  # so that nobody has to look for it first
    lab.net("gpu-02", "delay 100")
    try:
        echoes = said(lab, "gpu-01", "ping -c5 -i0.2 -W2 gpu-02")
        assert "5 received" in echoes
        times = [float(each) for each in re.findall(r"time=([0-9.]+) ms", echoes)]
        assert min(times) >= 200, echoes
        # Segments larger than the MTU and unfinished checksums pass: 3 MB arrive whole.
        assert said(lab, "gpu-02", "seq 500000") == "\n".join(map(str, range(1, 500001)))
    finally:
        lab.net("gpu-02", "heal")
    assert "time=0." in said(lab, "gpu-01", "ping -c1 -W2 gpu-02")


def test_up_again_changes_nothing(lab: Lab) -> None:
    before = boot_ids(lab)
    lab.up(NODES)
    assert boot_ids(lab) == before


def test_up_takes_away_what_a_killed_removal_left(lab: Lab) -> None:
    """A node that is removed has another name first; whoever was killed then left that."""
    rest = STATE / LAB_ID / "nodes/.gpu-03.gone"
    (rest / "upper/etc").mkdir(parents=True)
    (rest / "upper/etc/note").write_text("of a node that was not asked for any more")
    before = boot_ids(lab)
    lab.up(NODES)
    assert not rest.exists()
    assert boot_ids(lab) == before


def test_up_mends_a_node_whose_supervisor_was_killed(lab: Lab) -> None:
    """A node without the process that reboots it would not come back: it starts afresh."""
    before = boot_ids(lab)
    keepers = Path("/sys/fs/cgroup").rglob(f"gf-{LAB_ID}/gpu-01/keeper/cgroup.procs")
    for pid in {int(pid) for keeper in keepers for pid in keeper.read_text().split()}:
        os.kill(pid, signal.SIGKILL)
    lab.up(NODES)
    after = boot_ids(lab)
    assert after["gpu-01"] != before["gpu-01"]
    assert after["gpu-02"] == before["gpu-02"]


# -- nothing is left -------------------------------------------------------------------------------


def _bridge_is_there() -> bool:
    return Path(f"/sys/class/net/gf-{DOOMED_ID}").exists()


def _disk_is_made() -> bool:
    return (STATE / DOOMED_ID / "nodes.img").exists()


def _root_is_mounted() -> bool:
    return (STATE / DOOMED_ID / "nodes/gpu-01/root").is_mount()


def _node_is_booting() -> bool:
    return (STATE / DOOMED_ID / "nodes/gpu-01/console.log").exists()


MOMENTS = [_disk_is_made, _bridge_is_there, _root_is_mounted, _node_is_booting]


def kill_up_when(moment: Callable[[], bool]) -> None:
    up = [sys.executable, "-m", "lab", "--id", DOOMED_ID, "up", "--bare"]
    with subprocess.Popen(
        [*up, *(f"{name}={profile}" for name, profile in NODES.items())],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    ) as process:
        wait_for(moment)
        process.kill()


@pytest.mark.parametrize("moment", MOMENTS)
def test_down_after_a_killed_up_leaves_nothing(doomed: Lab, moment: Callable[[], bool]) -> None:
    before = left_on_machine(DOOMED_ID)
    kill_up_when(moment)
    doomed.down()
    assert left_on_machine(DOOMED_ID) - before == set()


@pytest.mark.parametrize("moment", MOMENTS)
def test_up_after_a_killed_up_works(doomed: Lab, moment: Callable[[], bool]) -> None:
    kill_up_when(moment)
    doomed.up(NODES)
    assert [said(doomed, node, "hostname") for node in NODES] == list(NODES)


def test_down_keeps_what_nodes_have_written(doomed: Lab) -> None:
    """Down is every machine's power at once; only purge forgets."""
    before = left_on_machine(DOOMED_ID)
    doomed.up({"gpu-01": NODES["gpu-01"]})
    there = {each.split()[0] for each in left_on_machine(DOOMED_ID) - before}
    kinds = {"cgroup", "disk", "link", "mount", "netns", "nft", "nspawn", "process", "route"}
    assert there >= kinds
    said(doomed, "gpu-01", "echo kept >/root/note && sync")
    doomed.down()
    assert left_on_machine(DOOMED_ID) - before == set()
    doomed.up()
    assert said(doomed, "gpu-01", "cat /root/note") == "kept"
    doomed.purge()
    assert not (STATE / DOOMED_ID).exists()


def test_the_memory_of_a_labs_nodes_can_be_bounded(doomed: Lab) -> None:
    """What the kernel keeps of their files counts; with the lab goes the bound."""
    before = left_on_machine(DOOMED_ID)
    doomed.up({"gpu-01": NODES["gpu-01"]})
    cgroup.bound_memory(doomed.facts.prefix, 300)
    there = kept_of_files()
    said(doomed, "gpu-01", "head -c 1G /dev/zero >/root/large && sync /root/large")
    assert kept_of_files() - there < 500
    doomed.purge()
    assert left_on_machine(DOOMED_ID) - before == set()


def kept_of_files() -> int:
    """Return the MiB that the machine keeps of files."""
    found = re.search(r"^Cached: +(\d+) kB$", Path("/proc/meminfo").read_text(), re.MULTILINE)
    assert found is not None
    return int(found[1]) >> 10
