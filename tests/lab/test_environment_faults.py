"""What breaks around a fleet: disks, name service, mirrors, cables, programs, other operators.

Long: `make test-long PART=environment-faults` writes docs/measured/environment-faults.md. Clients
ask throughout. After each fault one ordinary deploy has to converge, and a further one to change
nothing. A node's clock cannot be moved in the lab: it is the machine's.
"""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.lab import made_release
from tests.lab.conftest import Run
from tests.lab.faults import reached
from tests.lab.upgrade_fleet import GATEWAY, NEW, UpgradeFleet, upgrade_fleet
from tests.lab.upgrade_load import Summary, summary
from tests.lab.walk import RATE, UNI, UNI_FLAGS
from tests.support.checkout import own_lab
from tests.support.measured import note

LAB_ID = own_lab("gfef")
NODES = ("gpu-01", "gpu-02")
BROKEN = NODES[1]
PAGE = "measured/environment-faults.md"
PATIENCE = 120.0
"""Seconds within which systemd has to bring a program back."""
CUT_SECONDS = 300
"""Seconds within which a deploy has to end whose node is cut off: SSH's keepalive, and its own
deadlines."""

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@dataclass
class Row:
    """What was broken, what the deploy said of it, and what clients saw until it converged."""

    fault: str
    said: str = ""
    seconds: float = 0.0
    clients: Summary = field(default_factory=lambda: Summary(0, 0))


class OneRelease(UpgradeFleet):
    """A fleet that begins with the newest release."""

    first: str = NEW


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneRelease]:
    project = tmp_path_factory.mktemp("environment")
    with upgrade_fleet(LAB_ID, project, NODES, also=(), kind=OneRelease) as found:
        found.declare_release(NEW)
        found.declare_model(flags=UNI_FLAGS, environment=UNI)
        found.deploy()
        yield found


@contextmanager
def broken(fleet: OneRelease, fault: str, mend: Callable[[], object]) -> Iterator[Row]:
    """Have clients ask throughout; mend, converge, and write the row if all of that held."""
    row = Row(fault)
    with fleet.load("broken", rate=RATE) as load:
        while len(load.requests()) < 5:
            time.sleep(0.2)
        try:
            yield row
        finally:
            mend()
        begin = time.monotonic()
        run = fleet.pyinfra("-y", seconds=900)
        row.seconds = time.monotonic() - begin
        assert run.status == 0, run.output
        load.stop()
        row.clients = summary(load.requests())
    fleet.changes_nothing()
    seen = row.clients
    how = ", ".join(f"{count} x {what}" for what, count in seen.failures.items())
    lost = f"{seen.failed} of {seen.requests} failed" + (f" ({how})" if how else "")
    note(PAGE, row.fault, row.said, lost, f"{row.seconds:.0f} s")


def refused(run: Run, *words: str) -> str:
    """Assert that a run failed, with these words and no traceback; return its last words."""
    assert run.status != 0, run.output
    assert "Traceback" not in run.output, run.output
    for word in words:
        assert word in run.output, run.output
    return last_words(run.output)


def last_words(output: str) -> str:
    """Return the last lines of an output that name an error, or else the node, shortened."""
    lines = [
        re.sub(r"/\S*/\.gpufleet/", ".gpufleet/", line.strip()) for line in output.splitlines()
    ]
    of_error = [line for line in lines if ERROR.search(line) and "executed 0 commands" not in line]
    found = dict.fromkeys(of_error or [line for line in lines if BROKEN in line])
    return " / ".join(list(found)[-3:])[:300]


ERROR = re.compile(r"[Ee]rror:|ead-only|No space|is refused|would be refused|is being deployed")


# -- disks -----------------------------------------------------------------------------------------


def test_a_node_whose_disk_is_read_only_is_named_and_serves_on(fleet: OneRelease) -> None:
    """Mounts over the folders that a deploy writes: a container's root cannot be remounted."""
    folders = "/etc /usr/local"

    def mend() -> None:
        fleet.ssh(BROKEN, f"umount {folders}")

    with broken(fleet, "a node's disk is read-only", mend) as row:
        fleet.ssh(
            BROKEN,
            f"for each in {folders}; do "
            "mount --bind $each $each && mount -o remount,bind,ro $each || exit 1; done",
        )
        fleet.declare(node_exporter={"without": ["zfs"]})
        row.said = refused(fleet.pyinfra("-y"), BROKEN, "ead-only")
    assert row.clients.failed == 0


def test_a_node_without_inodes_is_named_and_serves_on(fleet: OneRelease) -> None:
    home = "/var/lib/gpufleet"

    def mend() -> None:
        fleet.ssh(BROKEN, f"umount {home}")

    with broken(fleet, "a node has no inodes left", mend) as row:
        fleet.ssh(
            BROKEN,
            f"mkdir /tmp/kept && cp -a {home}/. /tmp/kept && "
            f"mount -t tmpfs -o size=1G,nr_inodes=1k none {home} && "
            f"cp -a /tmp/kept/. {home} && rm -r /tmp/kept && "
            f"! (cd {home} && mkdir full && cd full && touch $(seq 1100)) 2>/dev/null",
        )
        fleet.declare(node_exporter={"without": ["zfs", "xfs"]})
        run = fleet.pyinfra("-y")
        assert "Traceback" not in run.output, run.output
        row.said = refused(run, BROKEN) if run.status else "nothing: no new file was needed"
    assert row.clients.failed == 0


def test_an_upgrade_on_a_controller_without_room_is_resumed(fleet: OneRelease) -> None:
    """The journal's disk fills while a replica is drained."""
    home = fleet.project / ".gpufleet"
    home.mkdir(exist_ok=True)

    def mend() -> None:
        (home / "filler").unlink(missing_ok=True)
        done = fleet.upgrade("--resume")
        assert done.returncode == 0, done.stdout
        kept = home.with_name("kept")
        shell(f"cp -a {home} {kept} && umount {home} && cp -a {kept}/. {home}")

    with broken(fleet, "the controller's disk is full in an upgrade", mend) as row:
        shell(f"mount -t tmpfs -o size=1M none {home}")
        fleet.declare_model(flags={**UNI_FLAGS, "max-num-seqs": 7})
        run = fleet.begin("upgrade")
        fleet.await_entry(run, "draining")
        fill(home / "filler")
        assert run.wait(timeout=900) != 0, fleet.said()
        assert "Traceback" not in fleet.said(), fleet.said()
        row.said = last_words(fleet.said())
    assert row.clients.failed == 0


def shell(command: str) -> None:
    subprocess.run(["sh", "-c", command], check=True, timeout=60)


def fill(path: Path) -> None:
    """Write until the disk is full."""
    with path.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(bytes(4096))
        except OSError:
            return


# -- what a node asks ------------------------------------------------------------------------------


def test_a_deploy_needs_no_name_service_where_nothing_is_downloaded(fleet: OneRelease) -> None:
    def mend() -> None:
        fleet.ssh(BROKEN, "mv /etc/resolv.conf.kept /etc/resolv.conf")

    with broken(fleet, "a node's name service is dead", mend) as row:
        fleet.ssh(
            BROKEN,
            "cp -a /etc/resolv.conf /etc/resolv.conf.kept; rm -f /etc/resolv.conf; "
            "echo nameserver 192.0.2.1 > /etc/resolv.conf",
        )
        run = fleet.pyinfra("-y")
        assert run.status == 0, run.output
        row.said = "nothing: the deploy succeeded"
    assert row.clients.failed == 0


def test_a_wheel_that_is_not_the_locked_one_is_not_installed(fleet: OneRelease) -> None:
    version = "0.32.7"
    fleet.offer(version, made_release.SLOW)
    # Still a whole archive: what is torn is refused before its hash is known.
    program = (
        "import glob, zipfile\n"
        f"for path in glob.glob('{made_release.ON_NODE}/*{version}*.whl'):\n"
        "    with zipfile.ZipFile(path, 'a') as wheel: wheel.writestr('more.txt', 'x')"
    )
    for node in NODES:
        fleet.ssh(node, "python3 -", stdin=program)

    def mend() -> None:
        fleet.declare_release(NEW)

    with broken(fleet, "a mirror serves a wheel that was changed", mend) as row:
        fleet.declare_release(version)
        row.said = refused(fleet.pyinfra("-y", seconds=900), "ash mismatch")
        assert set(fleet.releases().values()) == {NEW}
    assert row.clients.failed == 0


# -- what ends -------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit", ["gpufleet-watchdog", "prometheus-node-exporter", "ssh"])
def test_a_program_that_the_kernel_kills_is_back_and_nothing_is_lost(
    fleet: OneRelease, unit: str
) -> None:
    """SIGKILL is what the OOM killer sends."""
    with broken(fleet, f"`{unit}` is killed as by the OOM killer", lambda: None) as row:
        row.said = f"nothing: systemd had it back after {killed(fleet, BROKEN, unit):.0f} s"
    assert row.clients.failed == 0


def test_a_gateway_that_the_kernel_kills_is_back_and_loses_what_was_under_way(
    fleet: OneRelease,
) -> None:
    """It is the only one; with a pair the other takes the address."""
    unit = "gpufleet-gateway"
    with broken(fleet, f"the only `{unit}` is killed as by the OOM killer", lambda: None) as row:
        seconds = killed(fleet, GATEWAY, unit)
        row.said = f"nothing: systemd had it back after {seconds:.0f} s"
    assert row.clients.failed <= (seconds + 2) * RATE, row.clients.failures


def killed(fleet: OneRelease, node: str, unit: str) -> float:
    """Kill a unit's main process, and return the seconds until it has another one."""

    def main_pid() -> str:
        return fleet.ssh(node, f"systemctl show -P MainPID {unit}").strip()

    pid = main_pid()
    assert pid != "0", f"{unit} does not run"
    begin = time.monotonic()
    fleet.ssh(node, f"systemctl kill --kill-whom=main -s KILL {unit}; :")
    while True:
        try:
            now = main_pid()
        except AssertionError:
            now = pid
        if now not in ("0", pid):
            return time.monotonic() - begin
        assert time.monotonic() - begin < PATIENCE, f"{unit} did not come back"
        time.sleep(0.2)


def test_a_node_whose_journal_has_ended_is_deployed(fleet: OneRelease) -> None:
    units = "systemd-journald.socket systemd-journald-dev-log.socket systemd-journald.service"

    def mend() -> None:
        fleet.ssh(BROKEN, f"systemctl start {units}")

    with broken(fleet, "a node's journald is stopped", mend) as row:
        fleet.ssh(BROKEN, f"systemctl stop {units} 2>/dev/null; :")
        run = fleet.pyinfra("-y")
        assert "Traceback" not in run.output, run.output
        row.said = last_words(run.output) if run.status else "nothing: the deploy succeeded"
    assert row.clients.failed == 0


def test_a_deploy_whose_node_is_cut_off_ends_in_time(fleet: OneRelease) -> None:
    """The connection stays half open: neither side is told."""

    def mend() -> None:
        fleet.lab.net(BROKEN, "heal")

    with broken(fleet, "a node's cable is pulled in a deploy", mend) as row:
        fleet.declare(node_exporter={"without": ["zfs", "xfs", "nfs"]})
        run = fleet.popen()
        deadline = time.monotonic() + PATIENCE
        while "Starting operation" not in fleet.log.read_text(errors="replace"):
            assert run.poll() is None, fleet.log.read_text()
            assert time.monotonic() < deadline, fleet.log.read_text()
            time.sleep(0.05)
        fleet.lab.net(BROKEN, "cut")
        begin = time.monotonic()
        run.wait(timeout=CUT_SECONDS)
        output = fleet.log.read_text(errors="replace")
        assert "Traceback" not in output, output
        spent = time.monotonic() - begin
        row.said = f"ended after {spent:.0f} s, at {reached(fleet)}: {last_words(output)}"


# -- who else is there -----------------------------------------------------------------------------


def test_two_deploys_at_once_leave_one_fleet(fleet: OneRelease) -> None:
    with broken(fleet, "two operators deploy at once", lambda: None) as row:
        fleet.declare(node_exporter={"without": ["zfs", "nfs"]})
        first = fleet.popen()
        second = fleet.pyinfra("-y")
        status = first.wait(timeout=900)
        output = fleet.log.read_text(errors="replace") + second.output
        assert "Traceback" not in output, output
        assert 0 in (status, second.status), output
        row.said = f"statuses {status} and {second.status}: {last_words(output)}"
    assert row.clients.failed == 0


@pytest.mark.parametrize("text", ['{"id": 7, "since": "abc"}', '{"since": 1e300}', "[[[", "null"])
def test_a_node_that_lies_about_its_lock_is_named(fleet: OneRelease, text: str) -> None:
    lock = "/var/lib/gpufleet/change/lock.json"

    def mend() -> None:
        fleet.ssh(BROKEN, f"rm -f {lock}")

    with broken(fleet, f"a node's lock is malformed: `{text}`", mend) as row:
        fleet.ssh(BROKEN, f"mkdir -p $(dirname {lock}) && cat > {lock}", stdin=text)
        run = fleet.pyinfra("-y")
        assert "Traceback" not in run.output, run.output
        row.said = refused(run, BROKEN) if run.status else "nothing: the deploy succeeded"
    assert row.clients.failed == 0
