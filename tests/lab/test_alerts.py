"""What is broken on a node makes the right alert fire for that node and GPU, and mending ends it.

Faults are the lab's, seen by real exporters, a real Prometheus with the rules that are rendered
for everybody, and a real Alertmanager, which is what is asked. All faults are set at once, each on
a GPU of its own, so that an alert that names another one is found. Times are measured: they are of
rules without their waiting time (`monitoring.alerts`), scraped every 5 s.

`make test-long` writes docs/measured/alert-faults.md.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import yaml

from gpufleet.monitoring.rules.files import groups
from tests.lab.conftest import Fleet, standing
from tests.lab.test_watchdog import Load
from tests.support.checkout import own_lab
from tests.support.measured import note

pytestmark = [pytest.mark.long, pytest.mark.timeout(5400)]

LAB_ID = own_lab("gfal")
HGX, PCIE, WATCHER = "gpu-01", "gpu-02", "mon-03"
NODES = {HGX: "h100x8", PCIE: "a100x4-pcie", WATCHER: "none"}
PAGES = {alert.name: alert.page for rules in groups({}) for alert in rules.alerts}
# Rates are over 5 minutes, averages over 10; DCGM's exporter reads every 15 s.
FIRES_WITHIN = 900
# An Xid is counted for 5 minutes and kept for 10 more.
ENDS_WITHIN = 1500


@dataclass
class Broken:
    """One fault, the alert that it has to make fire, and what was measured."""

    alert: str
    says: str
    node: str
    fault: str = ""
    """The lab's name for it; empty: `command` and `mend` do it."""
    gpu: int | None = None
    labels: dict[str, str] = field(default_factory=dict)
    """What the alert has to say besides node and GPU."""
    command: str = ""
    mend: str = ""
    ends: bool = True
    """False: it goes on firing for longer than anybody waits here."""
    fired: float | None = None
    ended: float | None = None

    @property
    def wanted(self) -> dict[str, str]:
        """Labels of the alert."""
        gpu = {} if self.gpu is None else {"gpu": str(self.gpu)}
        return {"instance": self.node, **gpu, **self.labels}


# The frozen worker is one of two: /health goes on answering 200.
WORKER = "$(pgrep -u vllm -f VLLM::Worker_TP1 | head -1)"

FAULTS = (
    Broken("XidOffTheBus", "a GPU falls off the bus (Xid 79)", HGX, "xid-79", 0, {"xid": "79"}),
    # Not Xid 119: after it DCGM asks no GPU of the node any more, as tests/monitoring shows.
    Broken("XidNvlink", "an NVLink has an error (Xid 74)", HGX, "xid-74", 1),
    Broken("XidCritical", "an uncorrectable error of the memory (Xid 48)", HGX, "xid-48", 2),
    Broken("EccUncorrected", "the same, as its counter", HGX, "", 2, ends=False),
    Broken("RowRemapPending", "a row is pending until a reset", HGX, "remap-pending", 3),
    Broken("RowRemapFailed", "a row could not be remapped", HGX, "remap-failed", 4),
    Broken("NvlinkErrors", "a link retransmits packets", HGX, "nvlink-errors", 5),
    Broken("GpuHardwareSlowdown", "too hot: the clocks halve", HGX, "throttle-hw-thermal", 6),
    Broken("GpuHot", "hotter than where it slows down", HGX, "hot", 7),
    Broken("RebootPending", "the next kernel has no module", HGX, "kernel-without-module"),
    Broken(
        "ExporterDown",
        "an exporter is stopped",
        PCIE,
        labels={"job": "dcgm"},
        command="systemctl stop nvidia-dcgm-exporter",
        mend="systemctl start nvidia-dcgm-exporter",
    ),
    Broken(
        "VllmStalled",
        "a worker is frozen (SIGSTOP) under load; its watchdog only warns",
        HGX,
        labels={"stage": "tiny-0"},
        command=f"kill -STOP {WORKER}",
        mend=f"kill -CONT {WORKER}",
    ),
    Broken(
        "VllmDown",
        "a stage's unit is stopped by hand",
        PCIE,
        labels={"stage": "tiny-1"},
        command="systemctl stop vllm-tiny-1",
        mend="systemctl start vllm-tiny-1",
    ),
)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    """Two nodes that serve and one that watches, with rules that wait for nothing."""
    with standing(LAB_ID, NODES, tmp_path_factory.mktemp("project")) as found:
        changed = {name: {"for_seconds": 0} for name in {each.alert for each in FAULTS}}
        (found.project / "group_vars/monitoring.yml").write_text(
            yaml.safe_dump(
                {
                    "gpu_node": False,
                    "monitoring": {"prometheus": {"scrape_seconds": 5}, "alerts": changed},
                }
            )
        )
        found.set({"tiny": {"watchdog": {"mode": "warn", "seconds": 30}}})
        for deploy in ("deploys/vllm.py", "deploys/monitoring.py"):
            run = found.pyinfra("-y", deploy=deploy, seconds=1800)
            assert run.status == 0, run.output
        yield found


def alerts(fleet: Fleet) -> list[dict[str, Any]]:
    """Return what is active in Alertmanager, as its own API says it."""
    address = "http://127.0.0.1:9093/api/v2/alerts?active=true"
    ask = f"import urllib.request as u; print(u.urlopen('{address}', timeout=20).read().decode())"
    found: list[dict[str, Any]] = json.loads(fleet.ssh(WATCHER, f'python3 -c "{ask}"'))
    return found


def matching(found: list[dict[str, Any]], broken: Broken) -> list[dict[str, Any]]:
    labels = [each["labels"] for each in found]
    wanted = {"alertname": broken.alert, **broken.wanted}
    return [each for each in labels if wanted.items() <= each.items()]


def test_each_fault_makes_its_alert_fire_where_it_is_and_mending_ends_it(fleet: Fleet) -> None:
    assert {each.alert for each in FAULTS} <= set(PAGES)
    before = [each["labels"] for each in alerts(fleet) if each["labels"]["severity"] == "page"]
    assert before == [], "a healthy fleet pages nobody"
    with Load(fleet, clients=2, tokens=200):
        time.sleep(10)
        broken_at = time.monotonic()
        for each in FAULTS:
            _strike(fleet, each)
        _watch(fleet, FAULTS, "fired", broken_at, FIRES_WITHIN)
        named = {
            (each["alertname"], each.get("instance"), each.get("gpu")) for each in _labels(fleet)
        }
    expected = {(each.alert, each.node, each.wanted.get("gpu")) for each in FAULTS}
    ours = {each.alert for each in FAULTS}
    assert {each for each in named if each[0] in ours} == expected

    mended_at = time.monotonic()
    for each in FAULTS:
        if each.mend:
            fleet.ssh(each.node, each.mend)
    for node in (HGX, PCIE):
        fleet.lab.clear(node)
    _watch(fleet, [each for each in FAULTS if each.ends], "ended", mended_at, ENDS_WITHIN)
    write()


def _labels(fleet: Fleet) -> list[dict[str, str]]:
    return [each["labels"] for each in alerts(fleet)]


def _strike(fleet: Fleet, broken: Broken) -> None:
    if broken.fault:
        fleet.lab.fault(broken.node, broken.fault, broken.gpu)
    elif broken.command:
        fleet.ssh(broken.node, broken.command)


def _watch(fleet: Fleet, rows: Any, what: str, since: float, seconds: float) -> None:
    """Note when each alert first fires, or first is gone; fail with those that do not."""
    while left := [each for each in rows if getattr(each, what) is None]:
        found = alerts(fleet)
        for each in left:
            if bool(matching(found, each)) is (what == "fired"):
                setattr(each, what, time.monotonic() - since)
        assert time.monotonic() - since < seconds, [
            (each.alert, each.wanted) for each in rows if getattr(each, what) is None
        ]
        time.sleep(3)


def write() -> None:
    """Write the rows of docs/measured/alert-faults.md."""
    for each in FAULTS:
        where = ", ".join(f"{name} {value}" for name, value in each.wanted.items())
        ended = "an hour (its window)" if each.ended is None else f"{each.ended:.0f} s"
        note(
            "measured/alert-faults.md",
            each.says,
            f"[{each.alert}](../alerts/{PAGES[each.alert]}.md)",
            where,
            f"{each.fired:.0f} s",
            ended,
            key=2,
        )
