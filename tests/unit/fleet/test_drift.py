"""Drift over recorded nodes: each of these was healthy, and one thing on it was moved."""

from __future__ import annotations

import datetime as dt
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from gpufleet.converge.desired import DesiredState, File, Package, Unit
from gpufleet.converge.diff import difference
from gpufleet.converge.snapshot import FileState, PackageState, Snapshot, UnitState
from gpufleet.fleet import drift
from gpufleet.fleet.drift import (
    Deviation,
    Drift,
    DriftState,
    NodeDrift,
    Unread,
    Urgency,
    drift_from_probes,
)
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.parse import parse_settings
from tests.support.checkout import ROOT
from tests.support.rows import each_row

RECORDED = sorted((ROOT / "src/gpufleet/catalog/data/nodes").glob("*.json"))
SCHEMA = json.loads((ROOT / "docs/reference/drift.schema.json").read_text())
TODAY = dt.date(2026, 1, 1)
NODE = "gpu-01"
NEW_KERNEL = "6.8.0-99-generic"
ABSENT = {"missing": "absent"}
TIMEOUT = {"missing": "timeout", "seconds": 5}

Document = dict[str, Any]


def recorded(profile: str = "h100x8") -> Document:
    document: Document = json.loads(
        (ROOT / f"src/gpufleet/catalog/data/nodes/{profile}.json").read_text()
    )
    return document


def locked(driver: str) -> NodeSettings:
    return parse_settings({"gpu_lock": {"driver": driver}})


def told(document: Document | str, settings: NodeSettings | None = None) -> NodeDrift:
    return drift_from_probes({NODE: document}, {NODE: settings or NodeSettings()}, TODAY)[NODE]


# --- what somebody has done to a node, and where it has to be found


def libraries_upgraded(node: Document) -> None:
    node["driver"]["library"]["version"] = "570.133.20"
    node["driver"]["init"] = {"missing": "version_mismatch", "code": 18}


def module_upgraded(node: Document) -> None:
    node["driver"]["disk"]["version"] = node["driver"]["kernels"][0]["nvidia"] = "570.133.20"


def module_gone(node: Document) -> None:
    node["driver"]["disk"] = node["driver"]["kernels"][0]["nvidia"] = ABSENT


def kernel_without_module(node: Document) -> None:
    node["driver"]["kernels"][0]["newest"] = False
    node["driver"]["kernels"].append(
        {"kernel": NEW_KERNEL, "running": False, "newest": True, "nvidia": ABSENT, "signer": ABSENT}
    )


def kernel_with_another_module(node: Document) -> None:
    kernel_without_module(node)
    node["driver"]["kernels"][1] |= {"nvidia": "565.57.01", "signer": "a key"}


def unsigned(node: Document) -> None:
    node["system"]["secure_boot"] = True
    node["driver"]["kernels"][0]["signer"] = node["driver"]["disk"]["signer"] = ABSENT


def module_unloaded(node: Document) -> None:
    node["driver"]["init"] = {"missing": "driver_not_loaded", "code": 9}
    node["driver"]["module"] = node["driver"]["proc"] = ABSENT


def nouveau_has_the_gpus(node: Document) -> None:
    module_unloaded(node)
    node["system"]["modules"].append("nouveau")


def fabric_manager_upgraded(node: Document) -> None:
    node["system"]["packages"]["nvidia-fabricmanager-570"]["version"] = "570.133.20-1"


def fabric_manager_stopped(node: Document) -> None:
    unit = node["system"]["units"]["nvidia-fabricmanager.service"]
    unit |= {"active": "inactive", "sub": "dead"}


def fabric_manager_failed(node: Document) -> None:
    unit = node["system"]["units"]["nvidia-fabricmanager.service"]
    unit |= {"active": "failed", "sub": "failed", "result": "exit-code"}


def blacklist_removed(node: Document) -> None:
    node["system"]["unattended_upgrades"]["blacklist"] = []


def vendor_let_in(node: Document) -> None:
    blacklist_removed(node)
    node["system"]["unattended_upgrades"]["origins"] = ["NVIDIA CUDA:"]


PLANTED = [
    (libraries_upgraded, "check: driver-versions", Urgency.NOW),
    (module_upgraded, "check: reboot-module", Urgency.NEXT_BOOT),
    (module_gone, "check: reboot-module", Urgency.NEXT_BOOT),
    (kernel_without_module, "check: reboot-kernel", Urgency.NEXT_BOOT),
    (kernel_with_another_module, "check: reboot-module", Urgency.NEXT_BOOT),
    (unsigned, "check: reboot-signature", Urgency.NEXT_BOOT),
    (module_unloaded, "check: driver-loaded", Urgency.NOW),
    (nouveau_has_the_gpus, "check: nouveau", Urgency.NOW),
    (fabric_manager_upgraded, "check: fabric-manager", Urgency.NOW),
    (fabric_manager_stopped, "check: fabric-manager", Urgency.NOW),
    (fabric_manager_failed, "check: fabric-manager", Urgency.NOW),
    (blacklist_removed, "check: unattended-upgrades", Urgency.NEXT_UPGRADE),
    (vendor_let_in, "check: unattended-upgrades", Urgency.NEXT_UPGRADE),
]


@each_row("path", RECORDED, ids=lambda path: path.stem)
def test_a_healthy_node_has_no_drift(path: Path) -> None:
    document = json.loads(path.read_text())
    assert told(document) == NodeDrift()
    assert told(document, locked(document["driver"]["module"])) == NodeDrift()


@each_row(("plant", "source", "when"), PLANTED, ids=lambda each: getattr(each, "__name__", ""))
def test_what_was_moved_is_found_and_when_it_matters(
    plant: Callable[[Document], None], source: str, when: Urgency
) -> None:
    """Each is found by its own check, and its remedy is said."""
    document = recorded()
    plant(document)

    found = told(document)

    assert found.state is DriftState.DRIFTED
    assert [each.matters for each in found.moved if each.source == source] == [when]
    assert all(each.remedy for each in found.moved)


@pytest.mark.parametrize("lock", ["580", "570.133.20", "570.12"])
def test_every_part_that_is_not_the_locks_version_is_named(lock: str) -> None:
    """Of a node that is consistent in itself only the lock can tell that it is the wrong one."""
    found = told(recorded(), locked(lock)).moved

    assert {each.source for each in found} == {"gpu_lock.driver"}
    assert [each.what.partition(" is ")[0] for each in found] == [
        "the loaded kernel module",
        "the module on the disk",
        "libnvidia-ml.so.1",
    ]
    assert all(lock in each.what and "570.124.06" in each.what for each in found)


def test_a_lock_of_a_branch_lets_every_version_of_it_be() -> None:
    assert told(recorded(), locked("570")) == NodeDrift()


# --- what is not known


def test_a_node_without_a_probe_is_unknown_and_not_clean() -> None:
    found = told("cannot be reached: no route to host")
    assert found.state is DriftState.UNKNOWN
    assert "no route to host" in found.unread[0].why


@pytest.mark.parametrize(
    ("at", "check"),
    [
        (("driver", "kernels"), "reboot-kernel"),
        (("system", "unattended_upgrades"), "unattended-upgrades"),
        (("system", "packages"), "unattended-upgrades"),
        (("driver", "module"), "reboot-module"),
    ],
    ids=lambda each: ".".join(each) if isinstance(each, tuple) else "",
)
def test_a_fact_that_could_not_be_read_is_unknown(at: tuple[str, str], check: str) -> None:
    document = recorded()
    document[at[0]][at[1]] = TIMEOUT

    found = told(document)

    assert found.state is not DriftState.CLEAN
    assert f"check: {check}" in {each.source for each in found.unread}


def test_what_an_operator_accepts_is_no_drift() -> None:
    known = {"check": "reboot-kernel", "node": "*", "until": "2026-02-01", "reason": "Sunday"}
    accepted = parse_settings({"checks": {"accept": [known]}})
    document = recorded()
    kernel_without_module(document)
    assert told(document, accepted) == NodeDrift()


# --- what a deploy would change


UNIT = "nvidia-fabricmanager.service"
OPTIONS = "/etc/modprobe.d/gpufleet-nvidia.conf"
UPGRADES = "/etc/apt/apt.conf.d/52gpufleet-unattended-upgrades"


@each_row(
    ("wanted", "seen", "when"),
    [
        pytest.param(
            Unit(UNIT),
            Snapshot(units={UNIT: UnitState("loaded", "active", "running", "disabled")}),
            Urgency.NEXT_BOOT,
            id="a-unit-that-runs-and-is-not-enabled",
        ),
        pytest.param(
            Unit(UNIT, enabled=False, running=None),
            Snapshot(units={UNIT: UnitState("loaded", "inactive", "dead", "enabled")}),
            Urgency.NEXT_BOOT,
            id="a-unit-that-would-start",
        ),
        pytest.param(
            Unit(UNIT),
            Snapshot(units={UNIT: UnitState("loaded", "inactive", "dead", "enabled")}),
            Urgency.NOW,
            id="a-unit-that-does-not-run",
        ),
        pytest.param(
            Package("nvidia-open", "580.95.05-1", hold=True),
            Snapshot(packages={"nvidia-open": PackageState("580.95.05-1", True, False)}),
            Urgency.NEXT_UPGRADE,
            id="a-hold-that-is-lost",
        ),
        pytest.param(
            Package("nvidia-open", "580.95.05-1", hold=True),
            Snapshot(packages={"nvidia-open": PackageState("580.178.04-1", True, True)}),
            Urgency.NOW,
            id="another-version",
        ),
        pytest.param(
            File(OPTIONS, b"blacklist nouveau\n"),
            Snapshot(files={OPTIONS: None}),
            Urgency.NEXT_BOOT,
            id="a-module's-options",
        ),
        pytest.param(
            File(UPGRADES, b"// keep the driver"),
            Snapshot(files={UPGRADES: FileState("file", "root", "root", 0o644, "0")}),
            Urgency.NEXT_UPGRADE,
            id="unattended-upgrades",
        ),
        pytest.param(
            File("/etc/vllm/x", b""),
            Snapshot(files={"/etc/vllm/x": None}),
            Urgency.NOW,
            id="a-file",
        ),
    ],
)
def test_when_a_change_matters_is_told_by_what_the_deploy_says(
    wanted: Any, seen: Snapshot, when: Urgency
) -> None:
    """The words are the deploy's own: were they others, this would find out."""
    (change,) = difference(DesiredState(wanted), seen).changes
    assert drift.urgency_of(change) is when


# --- what is said of a fleet

MOVED = NodeDrift((Deviation("deploys/node.py: tuning | settings", "write /etc/x: it is missing"),))
UNKNOWN = NodeDrift(unread=(Unread("check: probe", "no answer"),))


@each_row(
    ("found", "status"),
    [
        pytest.param(Drift({"a": NodeDrift(), "b": NodeDrift()}), 0, id="clean"),
        pytest.param(Drift({"a": NodeDrift(), "b": MOVED}), 1, id="one-moved"),
        pytest.param(Drift({"a": NodeDrift(), "b": UNKNOWN}), 2, id="one-unknown"),
        pytest.param(Drift({"a": MOVED, "b": UNKNOWN}), 1, id="moved-and-unknown"),
        pytest.param(Drift({"a": MOVED + UNKNOWN}), 1, id="both-of-one"),
        pytest.param(Drift({"a": NodeDrift()}, ("a GPU is unfit",)), 2, id="refused"),
        pytest.param(Drift({}), 2, id="nobody"),
    ],
)
def test_the_exit_status_is_0_only_where_all_was_read_and_nothing_moved(
    found: Drift, status: int
) -> None:
    assert found.status == status
    jsonschema.validate(found.as_json(), SCHEMA)


def test_the_json_has_all_that_was_found() -> None:
    document = recorded()
    module_upgraded(document)
    found = Drift({NODE: told(document) + UNKNOWN, "gpu-02": NodeDrift()})

    said = json.loads(json.dumps(found.as_json()))

    jsonschema.validate(said, SCHEMA)
    assert said["drift"] == "drifted"
    assert said["nodes"]["gpu-02"] == {"drift": "clean", "moved": [], "unread": []}
    (moved,) = said["nodes"][NODE]["moved"]
    assert moved["matters"] == "next boot"
    assert "570.133.20" in moved["what"]
    assert said["nodes"][NODE]["unread"] == [{"source": "check: probe", "why": "no answer"}]


def test_each_part_of_a_node_is_compared_by_its_own_deploy() -> None:
    vllm = {"version": "0.32.0", "lock": "locks/vllm.txt", "listen": "127.0.0.1"}
    served = {"vllm": vllm, "gateway": {"allow_unauthenticated": True, "allow_plain_http": True}}
    assert drift.deploy_files(parse_settings({"gpu_node": False})) == ()
    assert drift.deploy_files(parse_settings(served)) == ("deploys/vllm.py", "deploys/gateway.py")
    watcher = parse_settings({**served, "gpu_node": False, "monitoring": {}})
    assert drift.deploy_files(watcher) == ("deploys/gateway.py", "deploys/monitoring.py")
