"""What is wrong with what a fleet relies on: mirrors, certificates, clocks, answers.

Long: `make test-long PART=environment-faults` writes docs/measured/environment-faults.md
(tests/lab/environment.py says what holds of each row).
"""

from __future__ import annotations

import datetime as dt
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import yaml

from tests.lab import made_release
from tests.lab.environment import (
    BROKEN,
    NODES,
    PATIENCE,
    OneRelease,
    broken,
    last_words,
    refused,
    serving_fleet,
)
from tests.lab.relay import Relay, relay
from tests.lab.upgrade_fleet import NEW
from tests.lab.walk import UNI_FLAGS
from tests.support.checkout import own_lab
from tests.unit.monitoring.test_exporters import Authority, pem

LAB_ID = own_lab("gfes")
DAY = 86400
END_SECONDS = 10
"""Within which a deploy ends after Ctrl-C."""
DRIP_SECONDS = 60
"""How long a deploy is left alone with a mirror that drips."""

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OneRelease]:
    with serving_fleet(LAB_ID, tmp_path_factory.mktemp("sources")) as found:
        yield found


def begun(fleet: OneRelease, *arguments: str) -> subprocess.Popen[bytes]:
    """Start a deploy; return once it is at work."""
    run = fleet.popen(*arguments)
    deadline = time.monotonic() + PATIENCE
    while "Starting operation" not in fleet.log.read_text(errors="replace"):
        assert run.poll() is None, fleet.log.read_text()
        assert time.monotonic() < deadline, fleet.log.read_text()
        time.sleep(0.1)
    return run


# -- mirrors ---------------------------------------------------------------------------------------


@contextmanager
def other_revision(fleet: OneRelease, mirror: Relay) -> Iterator[None]:
    """Declare a revision that the hub has besides, by way of `mirror`; take it back at the end."""
    path = fleet.state.dir / "models/lab/tiny/README.md"
    before = path.read_bytes() if path.exists() else None
    old, endpoint = fleet.revision(), fleet.wanted["vllm"]["hf_endpoint"]
    new = fleet.change_model(f"{time.time()}")
    fleet.declare(vllm={"hf_endpoint": f"{mirror.url}/hub"})
    fleet.declare_model(revision=new)
    try:
        yield
    finally:
        if before is None:
            path.unlink()
        else:
            path.write_bytes(before)
        assert fleet.revision() == old
        fleet.declare(vllm={"hf_endpoint": endpoint})
        fleet.declare_model(revision=old)


def test_weights_that_a_mirror_has_changed_are_not_served(fleet: OneRelease) -> None:
    """Their size is right, so the Hub's client takes them; the lock of models does not."""
    with relay(str(fleet.state.machine), fleet.state.mirror_url) as mirror:
        fault = "a mirror changes a model's weights"
        with broken(fleet, fault, lambda: None) as row, other_revision(fleet, mirror):
            locked = fleet.gpufleet("lock", fleet.inventory, "--models")
            assert locked.status == 0, locked.output
            mirror.does = "changes"
            row.said = refused(fleet.pyinfra("-y", seconds=900), "model.safetensors")
            assert mirror.asked
        assert row.clients.failed == 0


def downloading(fleet: OneRelease) -> subprocess.Popen[bytes]:
    """Start a deploy; return once a node downloads a model."""
    run = begun(fleet)
    deadline = time.monotonic() + PATIENCE * 2
    # The controller asks the mirror, too: for the weights' header, before any operation.
    while "download of" not in fleet.log.read_text(errors="replace"):
        assert run.poll() is None, fleet.log.read_text()
        assert time.monotonic() < deadline, fleet.log.read_text()
        time.sleep(0.2)
    return run


def interrupted(fleet: OneRelease, run: subprocess.Popen[bytes]) -> tuple[int, str]:
    """Type Ctrl-C; return the deploy's status and output, once it has ended, in time."""
    os.killpg(run.pid, signal.SIGINT)
    status = run.wait(timeout=END_SECONDS)
    output = fleet.log.read_text(errors="replace")
    assert "Traceback" not in output, output
    return status, output


@pytest.mark.parametrize("does", ["drips", "is silent"])
def test_a_deploy_from_a_mirror_that_does_not_send_can_be_ended(
    fleet: OneRelease, does: str
) -> None:
    with relay(str(fleet.state.machine), fleet.state.mirror_url) as mirror:
        with (
            broken(fleet, f"a mirror {does} while it sends a model's weights", lambda: None) as row,
            other_revision(fleet, mirror),
        ):
            mirror.does = does
            run = downloading(fleet)
            time.sleep(DRIP_SECONDS)
            went_on = run.poll() is None
            status, output = interrupted(fleet, run)
            assert "may continue to run on the nodes: gpu-0" in output
            assert "run the same command again:" in output
            shown = [line.strip() for line in output.splitlines() if "download of" in line]
            row.said = (
                f"{'still waited' if went_on else 'had ended'} after {DRIP_SECONDS} s; "
                f"status {status} after Ctrl-C: {(shown or ['nothing shown'])[-1][:160]}"
            )
        assert row.clients.failed == 0


def test_a_download_that_an_interrupted_deploy_left_is_ended_by_the_next(fleet: OneRelease) -> None:
    """The mirror sends again, but not what it has begun to send."""
    with relay(str(fleet.state.machine), fleet.state.mirror_url) as mirror:
        with other_revision(fleet, mirror):
            mirror.does = "drips"
            interrupted(fleet, downloading(fleet))
            mirror.does = ""
            again = fleet.pyinfra("-y", seconds=900)
            assert again.status == 0, again.output
        fleet.deploy()


def test_a_build_whose_uv_the_kernel_kills_leaves_the_old_release(fleet: OneRelease) -> None:
    version = "0.32.8"
    fleet.offer(version, made_release.SLOW)

    def mend() -> None:
        fleet.declare_release(NEW)

    with broken(fleet, "uv is killed in a build as by the OOM killer", mend) as row:
        fleet.declare_release(version)
        run = fleet.popen()
        deadline = time.monotonic() + PATIENCE * 3
        killed: set[str] = set()
        # Each node builds for itself once the first one has not.
        while run.poll() is None and killed != set(NODES):
            assert time.monotonic() < deadline, fleet.log.read_text()
            for node in set(NODES) - killed:
                if fleet.ssh(node, "pkill -KILL -f 'uv pip [s]ync' && echo killed || :").strip():
                    killed.add(node)
            time.sleep(0.2)
        assert run.wait(timeout=900) != 0
        output = fleet.log.read_text(errors="replace")
        assert "Traceback" not in output, output
        assert killed
        row.said = last_words(output)
        assert set(fleet.releases().values()) == {NEW}
    assert row.clients.failed == 0


# -- certificates ----------------------------------------------------------------------------------


def expired(fleet: OneRelease) -> dict[str, str]:
    """Write a certificate that has ended and its key; return them as settings name them."""
    since = dt.datetime.now(dt.UTC) - dt.timedelta(days=30)
    certificate, key = Authority().sign("gpu-01", days=29, since=since)
    paths = {
        "certificate_file": fleet.project / "expired.pem",
        "key_file": fleet.project / "expired.key",
    }
    paths["certificate_file"].write_bytes(pem(certificate))
    paths["key_file"].write_bytes(pem(key))
    return {name: str(path) for name, path in paths.items()}


def test_a_gateway_with_a_certificate_that_has_ended_is_refused(fleet: OneRelease) -> None:
    file = fleet.project / "group_vars/gateway.yml"
    before = file.read_text()

    def mend() -> None:
        file.write_text(before)

    with broken(fleet, "the gateway is to have a certificate that has ended", mend) as row:
        declared = yaml.safe_load(before)
        declared["gateway"] |= {"tls": expired(fleet)}
        file.write_text(yaml.safe_dump(declared))
        row.said = refused(fleet.pyinfra("-y", deploy="deploys/gateway.py"), "expired")
    assert row.clients.failed == 0


def test_exporters_with_a_certificate_that_has_ended_are_refused(fleet: OneRelease) -> None:
    def mend() -> None:
        del fleet.wanted["exporters"]
        fleet.declare()

    with broken(fleet, "exporters are to have a certificate that has ended", mend) as row:
        fleet.declare(exporters={"tls": expired(fleet)})
        row.said = refused(fleet.pyinfra("-y"), "expired")
    assert row.clients.failed == 0


# -- clocks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("days", [10, -10])
def test_a_node_whose_clock_jumps_is_deployed(fleet: OneRelease, days: int) -> None:
    """All programs of the node but systemd have the wrong time (lab/syscall_shim.c)."""
    file = "/var/lib/gpufleet-lab/machine/clock_offset"

    def mend() -> None:
        fleet.ssh(BROKEN, f"rm {file}; sleep 2")

    with broken(fleet, f"a node's clock jumps by {days:+d} days", mend) as row:
        fleet.ssh(BROKEN, f"echo {days * DAY} > {file}; sleep 2")
        jumped = float(fleet.ssh(BROKEN, "date +%s")) - time.time()
        assert abs(jumped - days * DAY) < 60
        fleet.declare(node_exporter={"without": ["zfs"] if days > 0 else ["zfs", "nfs"]})
        run = fleet.pyinfra("-y")
        assert "Traceback" not in run.output, run.output
        row.said = last_words(run.output) if run.status else "nothing: the deploy succeeded"
    assert row.clients.failed == 0


def test_an_upgrade_is_resumed_though_the_controllers_clock_went_back(fleet: OneRelease) -> None:
    """Its journal is named for an earlier time than that of an upgrade before it."""
    fleet.declare_model(flags={**UNI_FLAGS, "max-num-seqs": 7})
    done = fleet.upgrade()
    assert done.returncode == 0, done.stdout

    def mend() -> None:
        fleet.late = 0

    with broken(fleet, "the controller's clock goes back a day between upgrades", mend) as row:
        fleet.late = -DAY
        fleet.declare_model(flags={**UNI_FLAGS, "max-num-seqs": 6})
        run = fleet.begin("upgrade")
        drained = False
        deadline = time.monotonic() + 600
        while not drained:
            assert run.poll() is None, fleet.said()
            assert time.monotonic() < deadline, fleet.said()
            drained = any(fleet.drained().values())
            time.sleep(0.2)
        os.killpg(run.pid, signal.SIGKILL)
        run.wait(timeout=30)
        fleet.late = 0
        done = fleet.upgrade("--resume")
        assert done.returncode == 0, done.stdout
        row.said = "nothing: `--resume` has gone on with the interrupted upgrade"
    assert not any(fleet.drained().values())
    assert not fleet.locked()
    assert row.clients.failed == 0


# -- the controller, and nodes that lie ------------------------------------------------------------


def test_an_upgrade_on_a_read_only_controller_begins_nothing(fleet: OneRelease) -> None:
    home = fleet.project / ".gpufleet"
    home.mkdir(exist_ok=True)

    def mend() -> None:
        subprocess.run(["umount", home], check=True, timeout=30)
        fleet.declare_model(flags=before)

    before = fleet.wanted["serving"]["tiny"]["flags"]
    with broken(fleet, "the controller's disk is read-only", mend) as row:
        for options in (("--bind", home), ("-o", "remount,bind,ro")):
            subprocess.run(["mount", *options, home], check=True, timeout=30)
        fleet.declare_model(flags={**before, "max-num-seqs": 5})
        done = fleet.upgrade()
        assert done.returncode != 0, done.stdout
        assert "Traceback" not in done.stdout
        assert "ead-only" in done.stdout
        row.said = last_words(done.stdout)
        assert not any(fleet.drained().values())
        assert not fleet.locked()
    assert row.clients.failed == 0


LIES = r"""#!/bin/sh
cat >/dev/null
printf '\033]52;c;Y3VybCBldmls\007{"schema": 1, "files": [7, "stages": 1e999}\n'
"""


PYTHON = "/usr/bin/python3"


def lies(fleet: OneRelease) -> None:
    """Have Python answer each question with nonsense; what runs on the node runs on."""
    fleet.ssh(
        BROKEN,
        f"mv {PYTHON} {PYTHON}.kept && cat > {PYTHON} && chmod 755 {PYTHON}",
        stdin=LIES,
    )


def lies_no_more(fleet: OneRelease) -> None:
    fleet.ssh(BROKEN, f"mv {PYTHON}.kept {PYTHON}")


def test_a_node_that_answers_nonsense_is_named_and_no_byte_of_it_is_printed(
    fleet: OneRelease,
) -> None:
    fault = "a node answers every question with nonsense and control codes"
    with broken(fleet, fault, lambda: lies_no_more(fleet)) as row:
        lies(fleet)
        run = fleet.pyinfra("-y")
        row.said = refused(run, BROKEN)
        assert "\x1b]" not in run.output
        assert "\x07" not in run.output
    assert row.clients.failed == 0


def test_an_upgrade_is_resumed_once_its_node_answers_well_again(fleet: OneRelease) -> None:
    """Killed while a node is drained; then a node answers the resumed upgrade with nonsense."""

    def mend() -> None:
        lies_no_more(fleet)
        done = fleet.upgrade("--resume")
        assert done.returncode == 0, done.stdout

    fault = "a node answers nonsense to an upgrade that is resumed"
    with broken(fleet, fault, mend) as row:
        number = fleet.wanted["serving"]["tiny"]["flags"]["max-num-seqs"]
        fleet.declare_model(flags={**UNI_FLAGS, "max-num-seqs": number + 1})
        run = fleet.begin("upgrade")
        fleet.await_entry(run, "draining")
        os.killpg(run.pid, signal.SIGKILL)
        run.wait(timeout=30)
        lies(fleet)
        done = fleet.upgrade("--resume")
        assert done.returncode != 0, done.stdout
        for printed in ("Traceback", "\x1b]", "\x07"):
            assert printed not in done.stdout, done.stdout
        assert BROKEN in done.stdout, done.stdout
        row.said = last_words(done.stdout)
    assert not any(fleet.drained().values())
    assert not fleet.locked()
    assert row.clients.failed == 0
