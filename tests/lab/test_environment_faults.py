"""What breaks around a fleet: disks, name service, cables, programs, other operators.

Long: `make test-long PART=environment-faults` writes docs/measured/environment-faults.md
(tests/lab/environment.py says what holds of each row).
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.lab import made_release
from tests.lab.environment import (
    BROKEN,
    NODES,
    PATIENCE,
    OneRelease,
    broken,
    killed,
    last_words,
    refused,
    serving_fleet,
)
from tests.lab.faults import reached
from tests.lab.upgrade_fleet import GATES, GATEWAY, NEW
from tests.lab.walk import RATE, UNI_FLAGS
from tests.support.checkout import own_lab

LAB_ID = own_lab("gfef")
CUT_SECONDS = 300
"""Seconds within which a deploy has to end whose node is cut off: SSH's keepalive, and its own
deadlines."""

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneRelease]:
    with serving_fleet(LAB_ID, tmp_path_factory.mktemp("environment")) as found:
        yield found


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


@pytest.mark.parametrize(
    ("unit", "node"),
    [
        ("gpufleet-watchdog", BROKEN),
        ("prometheus-node-exporter", BROKEN),
        ("ssh", BROKEN),
        ("prometheus", GATEWAY),
        ("prometheus-alertmanager", GATEWAY),
    ],
)
def test_a_program_that_the_kernel_kills_is_back_and_nothing_is_lost(
    fleet: OneRelease, unit: str, node: str
) -> None:
    """SIGKILL is what the OOM killer sends."""
    with broken(fleet, f"`{unit}` is killed as by the OOM killer", lambda: None) as row:
        row.said = f"nothing: systemd restarted it after {killed(fleet, node, unit):.0f} s"
    assert row.clients.failed == 0


def test_a_gateway_that_the_kernel_kills_is_back_and_loses_what_was_under_way(
    fleet: OneRelease,
) -> None:
    """It is the only one; with a pair the other takes the address."""
    unit = "gpufleet-gateway"
    with broken(fleet, f"the only `{unit}` is killed as by the OOM killer", lambda: None) as row:
        seconds = killed(fleet, GATEWAY, unit)
        row.said = f"nothing: systemd restarted it after {seconds:.0f} s"
    assert row.clients.failed <= (seconds + 2) * RATE, row.clients.failures


def test_an_upgrade_whose_gates_would_ask_a_stopped_alertmanager_drains_nothing(
    fleet: OneRelease,
) -> None:
    before = fleet.wanted["serving"]["tiny"]["flags"]

    def mend() -> None:
        fleet.ssh(GATEWAY, "systemctl start prometheus-alertmanager")
        fleet.declare(upgrade={"gates": GATES})
        fleet.declare_model(flags=before)

    with broken(fleet, "Alertmanager is stopped, and an upgrade begins", mend) as row:
        fleet.ssh(GATEWAY, "systemctl stop prometheus-alertmanager")
        fleet.declare(upgrade={"gates": {**GATES, "alerts": True}})
        fleet.declare_model(flags={**before, "max-num-seqs": before["max-num-seqs"] + 1})
        done = fleet.upgrade()
        assert done.returncode != 0, done.stdout
        assert "Traceback" not in done.stdout, done.stdout
        assert "lertmanager" in done.stdout, done.stdout
        row.said = last_words(done.stdout)
        assert not any(fleet.drained().values())
        assert not fleet.locked()
    assert row.clients.failed == 0


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
        at = reached(fleet)
        where = at if at.startswith(("before ", "after ")) else f"in {at}"
        row.said = f"ended after {spent:.0f} s, {where}: {last_words(output)}"


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
