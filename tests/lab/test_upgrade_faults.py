"""What goes wrong while a fleet is changed, each under load, and what came of it.

Long. Releases that are bad are real ones with a line of their source replaced
(`tests/lab/made_release.py`). Every row begins with the fleet whole on one of two releases, and
ends so, by nothing but what the row says a person had to do: the next one begins where it ended.
`make test-long` writes docs/measured/upgrade-faults.md: rows that did not hold stay as they were.
"""

from __future__ import annotations

import os
import random
import re
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.lab import made_release
from tests.lab.made_release import DIES, Change
from tests.lab.upgrade_fleet import GATES, GATEWAY, NEW, OLD, RATE, UpgradeFleet, upgrade_fleet
from tests.lab.upgrade_load import Summary, summary
from tests.support.checkout import own_lab
from tests.support.measured import note

pytestmark = [pytest.mark.long, pytest.mark.timeout(5400)]

LAB_ID = own_lab("gfuf")
# Drawn once and written down by the seed, so that a failure can be repeated.
DRAW = random.Random(20261122)
KILLS = [round(DRAW.uniform(2, 75), 1) for _ in range(20)]
NOTHING = "nothing"
ONCE_MORE = "the same command once more"
RESUME = "`gpufleet upgrade --resume`"
# A node that lost its power is off for so long.
OFF_SECONDS = 45
# The canary, then all that are left: what a fault meets does not depend on the number of waves.
SHORT = {"soak_seconds": 15, "baseline_seconds": 15, "latency_least_requests": 8}
RULES: dict[str, Any] = {"canary": 1, "waves": [3], "gates": {**GATES, **SHORT}}
# A server that takes 0.2 s a token gets few requests beside three quick ones: the gateway gives
# each to the least busy.
SLOW_GATES = {"soak_seconds": 30, "latency_ratio": 2.0, "latency_least_requests": 3}


@dataclass
class Row:
    """What happened, what clients saw, how the fleet stood, what was said, what was to be done."""

    fault: str
    clients: Summary = field(default_factory=lambda: Summary(0, 0))
    stood: str = ""
    said: str = ""
    person: str = NOTHING


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpgradeFleet]:
    with upgrade_fleet(LAB_ID, tmp_path_factory.mktemp("up")) as found:
        found.declare(upgrade=RULES)
        found.bring(OLD, NEW)
        found.deploy()
        yield found


@pytest.fixture
def fleet(served: UpgradeFleet) -> Iterator[UpgradeFleet]:
    """The fleet whole on one of the two releases, with that declared: where the last row ended."""
    begin_whole(served)
    yield served
    for node in served.gpu_nodes:
        if not any(each.name == node and each.on for each in served.lab.status()):
            served.lab.power(node, "on")
        served.ssh(node, f"rm -f {DIES}")
    served.start_mirror()


def begin_whole(fleet: UpgradeFleet) -> None:
    """Declare what the fleet serves; where a row has failed and left a mess, clear it by force."""
    there = set(fleet.releases().values())
    whole = len(there) == 1 and there <= {OLD, NEW} and not fleet.unfinished()
    fleet.declare(upgrade=RULES)
    if whole and not fleet.locked() and not any(fleet.drained().values()):
        fleet.declare_release(*there)
        return
    fleet.given_up()
    fleet.declare_release(OLD)
    run = fleet.pyinfra("-y", seconds=1200)
    assert run.status == 0, run.output


@contextmanager
def struck(fleet: UpgradeFleet, fault: str, rate: float = RATE) -> Iterator[Row]:
    """Have clients ask throughout; keep the row if everything within held."""
    row = Row(fault)
    name = re.sub(r"\W+", "-", fault)
    with fleet.load(name, rate) as load:
        while len(load.requests()) < 3 * rate:
            time.sleep(0.5)
        yield row
        time.sleep(3)
        load.stop()
        row.clients = summary(load.requests())
    write(row)


def stands(fleet: UpgradeFleet) -> str:
    """Say in a few words which release how many nodes run, and what is marked."""
    releases = Counter(fleet.releases().values())
    marks = sorted(
        f"{node}: {', '.join(found)}" for node, found in fleet.drained().items() if found
    )
    on = ", ".join(
        f"{count} on {name}" if name else f"{count} on none" for name, count in releases.items()
    )
    return f"{on}; {'; '.join(marks) if marks else 'nothing drained'}"


_WHEN = re.compile(r"^(?:\d+ (?:h|min|s) +)+(?:wave \d+ of \d+ +)?")
_TELLS = re.compile(r"^(error|stopped|paused|finished|(\S+: )?stuck|Interrupted): ")


def last_words(output: str, lines: int = 3) -> str:
    """Return the last lines of what was said that tell how it ended."""
    said = (_WHEN.sub("", line.strip()) for line in output.splitlines())
    found = list(dict.fromkeys(line for line in said if _TELLS.search(line)))
    return " / ".join(line[:250] for line in found[-lines:]).replace("|", ":")


def serving_on(fleet: UpgradeFleet, release: str) -> None:
    """Hold that the fleet serves from one release, with nothing drained and nobody's lock."""
    assert set(fleet.releases().values()) == {release}, fleet.releases()
    assert not any(fleet.drained().values()), fleet.drained()
    assert not fleet.locked()


# -- a release that is bad -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "version", "change", "found"),
    [
        ("the new release does not start", "0.32.1", made_release.UNSTARTABLE, ": failed: "),
        ("the new release answers wrong", "0.32.2", made_release.WRONG, "golden did not pass"),
        ("the new release is slow", "0.32.3", made_release.SLOW, "traffic did not pass"),
    ],
)
def test_a_bad_release_is_found_by_the_canary_and_taken_back(
    fleet: UpgradeFleet, fault: str, version: str, change: Change, found: str
) -> None:
    """One node has it for a while; then none; and clients have seen nothing of it."""
    before = fleet.wanted["vllm"]["version"]
    fleet.offer(version, change)
    fleet.bring(version)
    if change is made_release.SLOW:
        fleet.declare(upgrade={"gates": {**RULES["gates"], **SLOW_GATES}})
    with struck(fleet, fault) as row:
        done = fleet.upgrade("--vllm", version)
        row.said, row.stood = last_words(done.stdout), stands(fleet)
        assert done.returncode == 1, done.stdout
        assert "Traceback" not in done.stdout
        # It was found where it should be, and the lines are what they were.
        assert found in done.stdout
        assert fleet.declared()["vllm"]["version"] == before
        assert len(fleet.noted("switching")) == 1
        serving_on(fleet, before)
    assert row.clients.failed == 0, row.clients.failures


def test_a_flag_that_the_new_release_does_not_have_stops_it_before_the_first_drain(
    fleet: UpgradeFleet,
) -> None:
    before = fleet.wanted["vllm"]["version"]
    fleet.offer("0.32.6", made_release.RENAMED)
    fleet.bring("0.32.6", refused=True)
    with struck(fleet, "a flag is unknown to the new release") as row:
        done = fleet.upgrade("--vllm", "0.32.6")
        row.said, row.stood = last_words(done.stdout), stands(fleet)
        assert done.returncode != 0, done.stdout
        assert "serving.tiny.flags.enforce-eager" in done.stdout
        assert "Traceback" not in done.stdout
        assert not fleet.noted("draining")
        assert fleet.declared()["vllm"]["version"] == before
        serving_on(fleet, before)
        row.person = f"write the flag as the new release has it; {ONCE_MORE}"
    assert row.clients.failed == 0, row.clients.failures


def test_a_release_that_dies_after_its_gates_goes_no_further(fleet: UpgradeFleet) -> None:
    """Requests that the dying server had are lost, and no others; it goes back by itself."""
    before = fleet.wanted["vllm"]["version"]
    fleet.offer("0.32.4", made_release.DYING)
    fleet.bring("0.32.4")
    with struck(fleet, "the new release dies after the gates, again and again") as row:
        run = fleet.begin("upgrade", "--vllm", "0.32.4")
        (node,) = nodes_of(fleet, fleet.await_entry(run, "done"))
        fleet.ssh(node, f"touch {DIES}")
        status = run.wait(timeout=1500)
        row.said, row.stood = last_words(fleet.said()), stands(fleet)
        assert status == 1, fleet.said()
        assert "Traceback" not in fleet.said()
        assert "was ready earlier, but no longer serves" in fleet.said()
        assert len(fleet.noted("switching")) == 1
        assert fleet.declared()["vllm"]["version"] == before
        serving_on(fleet, before)


def nodes_of(fleet: UpgradeFleet, entry: dict[str, object]) -> tuple[str, ...]:
    """Return the nodes of the group that a journal's entry is about."""
    planned = next(each for each in reversed(fleet.journal()) if each["what"] == "planned")
    for wave in planned["said"]["waves"]:
        for group in wave["groups"]:
            if group["id"] == entry["group"]:
                return tuple(group["nodes"])
    raise AssertionError(entry)


# -- what the new release is built from ------------------------------------------------------------


def other(fleet: UpgradeFleet) -> str:
    """Return the release to go to."""
    return OLD if fleet.wanted["vllm"]["version"] == NEW else NEW


def forget(fleet: UpgradeFleet, version: str) -> None:
    """Delete a release and the downloads of uv on all GPU nodes: the next deploy builds it."""
    there = f"/opt/vllm/releases/{version}-* /var/cache/gpufleet/uv/*"
    for node in fleet.gpu_nodes:
        fleet.ssh(node, f"rm -rf {there}", seconds=120)


def test_a_disk_that_is_full_while_building_stops_it_before_the_first_drain(
    fleet: UpgradeFleet,
) -> None:
    """What uv unpacks into has 60 MB on the node that builds for all: the first."""
    before, target = fleet.wanted["vllm"]["version"], other(fleet)
    cache, node = "/var/cache/gpufleet/uv", fleet.gpu_nodes[0]
    forget(fleet, target)
    fleet.ssh(node, f"mkdir -p {cache} && mount -t tmpfs -o size=60M full {cache}")
    try:
        with struck(fleet, "a node's disk is full while the release is built") as row:
            done = fleet.upgrade("--vllm", target)
            row.said, row.stood = last_words(done.stdout), stands(fleet)
            stopped_early(fleet, done, before)
            assert "No space left on device" in done.stdout
            fleet.ssh(node, f"umount {cache}")
            once_more(fleet, target)
            row.person = f"make room; {ONCE_MORE}"
    finally:
        fleet.ssh(node, f"umount {cache} 2>/dev/null; :")
    assert row.clients.failed == 0, row.clients.failures


def test_a_mirror_that_is_gone_stops_it_before_the_first_drain(fleet: UpgradeFleet) -> None:
    before, target = fleet.wanted["vllm"]["version"], other(fleet)
    forget(fleet, target)
    fleet.stop_mirror()
    with struck(fleet, "the mirror of packages is gone") as row:
        done = fleet.upgrade("--vllm", target)
        row.said, row.stood = last_words(done.stdout), stands(fleet)
        stopped_early(fleet, done, before)
        fleet.start_mirror()
        once_more(fleet, target)
        row.person = f"bring it back; {ONCE_MORE}"
    assert row.clients.failed == 0, row.clients.failures


def stopped_early(
    fleet: UpgradeFleet, done: subprocess.CompletedProcess[str], version: str
) -> None:
    """Hold that nothing was drained, and that the fleet serves and is declared as it was."""
    assert done.returncode == 2, done.stdout
    assert "Traceback" not in done.stdout
    assert not fleet.noted("draining")
    assert fleet.declared()["vllm"]["version"] == version
    serving_on(fleet, version)


def once_more(fleet: UpgradeFleet, version: str) -> None:
    """Give the same command, once what kept it from being carried out is gone."""
    again = fleet.upgrade("--vllm", version)
    assert again.returncode == 0, again.stdout
    serving_on(fleet, version)


# -- a machine that goes ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "when"),
    [
        ("a node loses its power while it is drained", "drained"),
        ("a node loses its power while it loads the model", "switched"),
    ],
)
def test_a_node_that_loses_its_power_is_changed_once_it_is_back(
    fleet: UpgradeFleet, fault: str, when: str
) -> None:
    """It serves nothing at that moment, so clients see nothing of it."""
    target = other(fleet)
    with struck(fleet, fault) as row:
        run = fleet.begin("upgrade", "--vllm", target)
        (node,) = nodes_of(fleet, fleet.await_entry(run, when))
        fleet.lab.power(node, "off")
        time.sleep(OFF_SECONDS)
        fleet.lab.power(node, "on")
        status = run.wait(timeout=2400)
        row.said, row.stood = last_words(fleet.said()), stands(fleet)
        assert "Traceback" not in fleet.said()
        if status:
            row.person = resumed(fleet)
        serving_on(fleet, target)
    assert row.clients.failed == 0, row.clients.failures


def resumed(fleet: UpgradeFleet) -> str:
    """Do what a person is told to, until the fleet is as declared; return what that was."""
    done = fleet.upgrade("--resume")
    if done.returncode == 0:
        return RESUME
    again = fleet.upgrade()
    assert again.returncode == 0, again.stdout
    return f"{RESUME}, which says why not; then `gpufleet upgrade`"


def test_a_gateway_that_dies_comes_back_with_what_was_drained(fleet: UpgradeFleet) -> None:
    """There is one, so clients lose what it carried; what it comes back with is the drain."""
    target = other(fleet)
    with struck(fleet, "the only gateway's process is killed") as row:
        run = fleet.begin("upgrade", "--vllm", target)
        fleet.await_entry(run, "drained")
        fleet.ssh(GATEWAY, "pkill -KILL -x haproxy")
        status = run.wait(timeout=2400)
        row.said, row.stood = last_words(fleet.said()), stands(fleet)
        assert "Traceback" not in fleet.said()
        if status:
            row.person = resumed(fleet)
        serving_on(fleet, target)


# -- the controller --------------------------------------------------------------------------------


def test_ctrl_c_leaves_a_fleet_that_serves_and_can_be_gone_on_with(fleet: UpgradeFleet) -> None:
    target = other(fleet)
    with struck(fleet, "the operator's Ctrl-C while a replica loads") as row:
        run = fleet.begin("upgrade", "--vllm", target)
        fleet.await_entry(run, "switching")
        os.kill(run.pid, signal.SIGINT)
        status = run.wait(timeout=900)
        row.said, row.stood = last_words(fleet.said()), stands(fleet)
        assert status == 130, fleet.said()
        assert "Traceback" not in fleet.said()
        assert not any(fleet.drained().values()), fleet.drained()
        row.person = f"{resumed(fleet)}, or `--abort`"
        serving_on(fleet, target)
    assert row.clients.failed == 0, row.clients.failures


def test_a_whole_fleet_goes_back_without_network(fleet: UpgradeFleet) -> None:
    """To what it was before the last upgrade, of what lies on the nodes."""
    with struck(fleet, "a release is not wanted after all, and the mirror is gone") as row:
        fleet.stop_mirror()
        target = other(fleet)
        run = fleet.begin("rollback")
        status = run.wait(timeout=2400)
        row.said, row.stood = last_words(fleet.said()), stands(fleet)
        assert status == 0, fleet.said()
        assert "Traceback" not in fleet.said()
        assert fleet.declared()["vllm"]["version"] == target
        serving_on(fleet, target)
        row.person = "`gpufleet rollback`"
    assert row.clients.failed == 0, row.clients.failures


# -- the controller again, last: it takes as long as all others together ---------------------------


def test_a_controller_killed_at_any_moment_is_resumed_and_no_request_is_lost(
    fleet: UpgradeFleet,
) -> None:
    """The next run begins with what the last one had announced and not done."""
    # The requests that wait after a kill are load: two of four replicas have to carry it, so there
    # are half as many.
    fleet.declare(upgrade={**RULES, "waves": [2]})
    target, back, ended = other(fleet), fleet.wanted["vllm"]["version"], 0
    reached: list[str] = []
    fault = f"the controller is killed (-9) at {len(KILLS)} random moments"
    with struck(fleet, fault, RATE / 2) as row:
        run = fleet.begin("upgrade", "--vllm", target)
        for seconds in KILLS:
            try:
                status = run.wait(timeout=seconds)
            except subprocess.TimeoutExpired:
                os.killpg(run.pid, signal.SIGKILL)
                run.wait(timeout=30)
                if fleet.unfinished():
                    reached.append(fleet.journal()[-1]["what"])
                    run = fleet.begin("upgrade", "--resume")
                else:
                    reached.append("before the journal, or after its end")
                    run = fleet.begin("upgrade", "--vllm", target)
                continue
            assert status == 0, fleet.said()
            ended += 1
            target, back = back, target
            run = fleet.begin("upgrade", "--vllm", target)
        assert run.wait(timeout=2400) == 0, fleet.said()
        row.said, row.stood = last_words(fleet.said()), stands(fleet)
        row.person = f"{RESUME}, each time"
        serving_on(fleet, target)
        moments = ", ".join(f"{name} {count}" for name, count in Counter(reached).most_common())
        row.said += f"; killed after: {moments}; {ended + 1} upgrades"
    assert row.clients.failed == 0, row.clients.failures


# -- the table -------------------------------------------------------------------------------------


def write(row: Row) -> None:
    """Write a row of docs/measured/upgrade-faults.md."""
    note(
        "measured/upgrade-faults.md",
        row.fault,
        spoken(row.clients),
        row.stood,
        row.said,
        row.person,
    )


def spoken(seen: Summary) -> str:
    """Say what clients saw."""
    how = ", ".join(f"{count} x {what}" for what, count in seen.failures.items())
    told = f"{seen.failed} of {seen.requests} failed" + (f" ({how})" if how else "")
    if len(seen.texts) > 1:
        other = sum(sorted(seen.texts.values())[:-1])
        told += f", {other} answered otherwise"
    return f"{told}; longest pause {seen.pause:.1f} s"
