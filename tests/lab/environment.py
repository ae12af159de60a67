"""What breaks around a fleet: each fault becomes a row of docs/measured/environment-faults.md.

Two lab nodes serve one model behind the gateway, and clients ask throughout. After each fault one
ordinary deploy has to converge, and a further one to change nothing.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from lab import syscall_shim
from tests.lab.conftest import Run
from tests.lab.upgrade_fleet import NEW, UpgradeFleet, upgrade_fleet
from tests.lab.upgrade_load import Summary, summary
from tests.lab.walk import RATE, UNI, UNI_FLAGS
from tests.support.measured import note

NODES = ("gpu-01", "gpu-02")
BROKEN = NODES[1]
PAGE = "measured/environment-faults.md"
PATIENCE = 120.0
"""Seconds within which systemd has to bring a program back, and a deploy to come to its work."""


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
    late: int = 0
    """By how many seconds the controller's clock is wrong."""

    def env(self) -> dict[str, str]:
        wrong = {
            "LD_PRELOAD": str(syscall_shim.build()),
            "GPUFLEET_LAB_CLOCK_OFFSET": str(self.late),
        }
        return {**super().env(), **(wrong if self.late else {})}


@contextmanager
def serving_fleet(lab_id: str, project: Path) -> Iterator[OneRelease]:
    """Give the fleet, deployed and serving."""
    with upgrade_fleet(lab_id, project, NODES, also=(), kind=OneRelease) as found:
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
    named = [line for line in run.output.splitlines() if any(word in line for word in words)]
    return last_words("\n".join(named) or run.output)


def last_words(output: str) -> str:
    """Return the last lines of an output that name an error, or else the node, shortened."""
    lines = [OWN_PLACE.sub("", line.strip()) for line in output.splitlines()]
    # pyinfra's own last line of an operation says nothing but how many commands it ran.
    of_error = [line for line in lines if ERROR.search(line) and not COUNTED.search(line)]
    found = dict.fromkeys(of_error or [line for line in lines if NODE.search(line)] or lines)
    return " / ".join(list(found)[-3:])[:300]


OWN_PLACE = re.compile(r"/\S*/(?=\.gpufleet/)|/tmp/\S*/(?=\S)")
"""Of a path in a test's own folder: what says nothing of the fault."""
NODE = re.compile("|".join(NODES))
COUNTED = re.compile(r"executed \d+ commands")
ERROR = re.compile(r"[Ee]rror:|ead-only|No space|is refused|would be refused|is being deployed")


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
