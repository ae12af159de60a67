"""The driver is exchanged as one act on a machine in a folder; being killed costs nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpufleet.gpu_software.driver_activation import Active, InUse, NeedsReload, driver_state
from tests.support.driver_machine import STAGE, Machine

pytestmark = pytest.mark.slow

NEW = "580.178.04"
OLD = "580.95.05"
LOAD = ["nvidia", "nvidia_modeset", "nvidia_drm", "nvidia_uvm"]
OWN = {"nvidia-persistenced.service", "nvidia-dcgm.service"}


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


def reload(machine: Machine, seen: dict | None = None) -> dict | None:
    """Do what the role does: look, decide, act."""
    wanted = driver_state(seen or machine.run("look"), "580")
    assert isinstance(wanted, NeedsReload), wanted
    return machine.run("reload", version=wanted.version, load=list(wanted.load))


def converge(machine: Machine) -> None:
    """Do what a run of the deploy does, until the node serves."""
    machine.run("mark", reason="test")
    seen = machine.run("look")
    if isinstance(driver_state(seen, "580"), NeedsReload):
        assert reload(machine, seen)["error"] == ""
    assert machine.run("start")["error"] == ""
    assert machine.run("clear")["error"] == ""


def test_everything_stops_in_order_and_starts_in_the_reverse(machine):
    """Stages before services, modules before those they use; only what ran is started."""
    machine.run("mark", reason="packages change")
    said = reload(machine)

    assert said["loaded"] == NEW
    assert machine.changes == [
        "systemctl daemon-reload",
        f"systemctl stop -- {STAGE}",
        "systemctl stop -- nvidia-dcgm.service",
        "systemctl stop -- nvidia-persistenced.service",
        "rmmod nvidia_uvm",
        "rmmod nvidia_drm",
        "rmmod nvidia_modeset",
        "rmmod nvidia",
        "modprobe nvidia",
        "modprobe nvidia_modeset",
        "modprobe nvidia_drm",
        "modprobe nvidia_uvm",
        "nvidia-modprobe -c0 -u",
        "systemctl reset-failed -- nvidia-persistenced.service",
        "systemctl start -- nvidia-persistenced.service",
        "systemctl reset-failed -- nvidia-dcgm.service",
        "systemctl start -- nvidia-dcgm.service",
    ]
    assert machine.up == OWN  # the stage waits for the check


def test_stages_start_when_the_node_was_checked_and_not_before(machine):
    machine.run("mark", reason="packages change")
    reload(machine)
    machine.run("start")
    assert STAGE not in machine.up

    assert machine.run("clear")["started"] == [STAGE]
    assert {STAGE, *OWN} == machine.up
    seen = machine.run("look")
    assert seen["mark"] is None
    assert seen["kept"] == {"units": [], "modules": []}


def test_a_process_of_nobodys_keeps_the_driver_and_everything_runs_on(machine):
    machine.process(4711, "python3", "session-3.scope")
    seen = machine.run("look")
    state = driver_state(seen, "580")
    assert isinstance(state, InUse)
    assert "process 4711 python3 of session-3.scope" in state.sentence

    # It came after the look: the program looks once more.
    said = machine.run("reload", version=NEW, load=LOAD)
    assert "process 4711 python3 of session-3.scope: nothing was stopped" in said["error"]
    assert [each["pid"] for each in said["held"]] == [4711]
    assert machine.changes == []
    assert {STAGE, *OWN} == machine.up


def test_a_module_that_the_kernel_itself_holds_is_said_and_services_are_put_back(machine):
    machine.run("mark", reason="test")
    machine.set(busy=["nvidia_drm"])
    said = reload(machine)
    assert said["busy"]
    assert "nvidia_drm is in use" in said["error"]
    assert machine.up == OWN
    assert machine.state["version"] == OLD
    assert set(machine.state["loaded"]) == set(LOAD)


def test_nothing_is_unloaded_when_a_count_tells_that_it_would_stop_half_way(machine):
    (machine.root / "sys/module/nvidia_drm/holders").mkdir(parents=True)
    machine.write("sys/module/nvidia_drm/refcnt", "1\n")
    said = reload(machine)
    assert said["busy"]
    assert "module nvidia_drm has 1 users" in said["error"]
    assert not [line for line in machine.changes if line.startswith("rmmod")]


def test_a_service_that_does_not_start_with_the_new_driver_is_named(machine):
    machine.set(failing=["nvidia-dcgm.service"])
    said = reload(machine)
    assert f"driver {NEW} is loaded" in said["error"]
    assert "nvidia-dcgm.service" in said["error"]
    assert "journalctl" in said["error"]


def test_without_a_module_on_the_disk_what_modprobe_says_is_said(machine):
    wanted = driver_state(machine.run("look"), None)
    machine.set(disk="")
    said = machine.run("reload", version=wanted.version, load=list(wanted.load))
    assert "Module nvidia not found" in said["error"]


def test_a_node_without_a_driver_gets_it_loaded(tmp_path):
    machine = Machine(tmp_path / "bare", loaded=None)
    assert reload(machine)["loaded"] == NEW
    assert machine.state["loaded"] == ["nvidia", "nvidia_uvm"]


def test_the_mark_keeps_its_first_reason_until_a_check_gives_another(machine):
    machine.run("mark", reason="first")
    machine.run("mark", reason="second")
    assert machine.run("look")["mark"] == "first"
    machine.run("fail", reason="GPU 3 is gone")
    assert machine.run("look")["mark"] == "GPU 3 is gone"


def test_a_stage_that_the_mark_kept_down_at_boot_starts_after_the_check(machine):
    """Nobody stopped it: the operator has rebooted the node by hand."""
    machine.write("var/lib/gpufleet/unchecked", "its packages changed")
    machine.state["units"][STAGE] |= {"ActiveState": "inactive", "ConditionResult": "no"}
    machine.set(version=NEW)
    assert machine.run("look")["barred"] == [STAGE]
    assert machine.run("clear")["started"] == [STAGE]


def test_services_that_their_packages_stopped_start_again(machine):
    machine.run("mark", reason="packages change")
    for unit in OWN:
        machine.state["units"][unit]["ActiveState"] = "inactive"
    machine.set()
    assert set(machine.run("start")["started"]) == OWN
    assert machine.run("look")["kept"]["units"] == []


def test_a_unit_of_somebody_else_is_never_touched(machine):
    machine.state["units"]["vllm-router.service"] = {"LoadState": "loaded", "ActiveState": "active"}
    machine.set()
    converge(machine)
    assert not [line for line in machine.changes if "router" in line]


MOMENTS = [
    # Before each command that changes something, in a whole reload with its mark.
    *((step, "before") for step in range(1, 18)),
    # After a stage's stop, the last unload, the first load.
    *((step, "after") for step in (2, 8, 9)),
]


@pytest.mark.parametrize(("step", "when"), MOMENTS)
def test_killed_anywhere_the_next_run_converges(machine, step, when):
    """And what ran before runs again: what was stopped is written down before it is."""
    machine.set(die_at=[step, when])
    if machine.run("mark", reason="test"):
        assert reload(machine) is None
    assert machine.state["steps"] == step
    machine.set(die_at=None)

    converge(machine)
    assert machine.state["version"] == NEW
    assert set(machine.state["loaded"]) == set(LOAD)
    assert {STAGE, *OWN} == machine.up

    before = len(machine.changes)
    assert isinstance(driver_state(machine.run("look"), "580"), Active)
    assert len(machine.changes) == before
