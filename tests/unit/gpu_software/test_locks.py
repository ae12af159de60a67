"""What nodes run, as a lock; a lock as a file."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from gpufleet.artifacts import release
from gpufleet.catalog.driver_branches import BRANCHES
from gpufleet.errors import FleetError
from gpufleet.gpu_software import lock_rules
from gpufleet.gpu_software.lock_file import lock_text
from gpufleet.gpu_software.lock_from_nodes import build_lock
from gpufleet.gpu_software.version_sets import release_sets
from gpufleet.paths import write_whole
from gpufleet.settings import gpu_lock
from gpufleet.settings.gpu_lock import GpuLock
from gpufleet.settings.node_settings import NodeSettings
from tests.support.checkout import ROOT
from tests.support.rows import each_row

REPOSITORY = {"url": "http://mirror/repos", "keyring_sha256": "a" * 64}


def recorded(machine: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(
        (ROOT / f"src/gpufleet/catalog/data/nodes/{machine}.json").read_text()
    )
    return document


def changed(machine: str, **parts: Any) -> dict[str, Any]:
    """Return a recorded machine with other values: `driver__module="580.95.05"`."""
    document = copy.deepcopy(recorded(machine))
    for path, value in parts.items():
        *above, last = path.split("__")
        place = document
        for key in above:
            place = place[key]
        place[last] = value
    return document


def packages(machine: str, **more: str) -> dict[str, Any]:
    there = recorded(machine)["system"]["packages"]
    named = {name.replace("_", "-"): version for name, version in more.items()}
    return {**there, **{name: {"version": each, "held": False} for name, each in named.items()}}


def read(*documents: Mapping[str, Any], **settings: Any) -> GpuLock:
    nodes = {f"gpu-{number:02}": each for number, each in enumerate(documents, 1)}
    return build_lock(nodes, dict.fromkeys(nodes, NodeSettings.model_validate(settings)))


def refused(*documents: Mapping[str, Any], **settings: Any) -> tuple[str, ...]:
    with pytest.raises(FleetError) as found:
        read(*documents, **settings)
    return found.value.problems


# -- what nodes run --------------------------------------------------------------------------------


def test_a_lock_is_what_a_node_runs() -> None:
    assert read(recorded("b200x8")) == GpuLock.model_validate(
        {
            "driver": "580.95.05",
            "modules": "open",
            "kernel": "held",
            "nvlsm": "2025.06.11-1",
            "dcgm": {"version": "1:4.5.3-1"},
        }
    )
    assert read(recorded("a100x8")).modules == "proprietary"


@pytest.mark.parametrize(
    ("installed", "toolkit"),
    [
        ({}, {"profile": "none"}),
        (
            {"cuda_nvcc_13_0": "13.0.88-1"},
            {"profile": "jit", "branch": "13-0", "version": "13.0.88-1"},
        ),
        (
            {"cuda_nvcc_13_0": "13.0.88-1", "cuda_toolkit_13_0": "13.0.3-1"},
            {"profile": "full", "branch": "13-0", "version": "13.0.3-1"},
        ),
        (  # not a toolkit
            {"cuda_toolkit_13_0_config_common": "13.0.96-1"},
            {"profile": "none"},
        ),
    ],
)
def test_a_toolkit_is_whole_or_a_compiler(
    installed: dict[str, str], toolkit: dict[str, str]
) -> None:
    node = changed("h100x8", system__packages=packages("h100x8", **installed))

    assert read(node).toolkit.model_dump(exclude_none=True) == toolkit


def test_of_several_toolkits_the_declared_one_is_locked() -> None:
    both = packages("h100x8", cuda_toolkit_13_0="13.0.3-1", cuda_toolkit_12_9="12.9.1-1")
    node = changed("h100x8", system__packages=both)
    declared = {"repository": REPOSITORY, "toolkit": "12-9", "version": "12.9.1-1"}

    assert "set the one to keep in `cuda.toolkit`" in refused(node)[0]
    assert read(node, cuda=declared).toolkit.branch == "12-9"


def test_the_declared_vllm_is_locked_with_the_nodes_python() -> None:
    vllm = {"version": "0.32.0", "lock": "a", "listen": "127.0.0.1"}
    node = changed("h100x8", python="3.12.3")

    found = read(node, vllm=vllm).vllm
    assert found
    assert (found.version, found.python) == ("0.32.0", "3.12")
    own = read(node, vllm={**vllm, "python": "/opt/py/bin/python3.13"}).vllm
    assert own
    assert own.python == "3.13"
    assert read(node, vllm={**vllm, "python": "/opt/py/bin/python"}).vllm is None
    assert read(node).vllm is None


@each_row(
    ("parts", "said"),
    [
        ({"driver__module": {"missing": "absent"}}, "no NVIDIA driver is loaded"),
        ({"driver__library__version": "580.95.05"}, "has 580.95.05 as its library"),
        ({"driver__disk__version": "580.95.05"}, "has 580.95.05 on disk"),
        ({"driver__disk": {"missing": "absent"}}, "an unreadable version on disk"),
        ({"driver__library": {"missing": "timeout"}}, "an unreadable version as its library"),
        ({"driver__proc": {"missing": "absent"}}, "the loaded kernel modules could not"),
        (
            {"system__packages": {"missing": "timeout"}},
            "the node's packages could not be read (timeout)",
        ),
        ({"system__units": {"missing": "timeout"}}, "the node's units could not be read (timeout)"),
    ],
)
def test_a_node_between_versions_or_unread_is_not_locked(parts: dict[str, Any], said: str) -> None:
    problems = refused(recorded("h100x8"), changed("h100x8", **parts))

    assert len(problems) == 1
    assert problems[0].startswith("gpu-02: ")
    assert said in problems[0]


def test_a_fabric_manager_of_another_version_is_not_locked() -> None:
    other = {**packages("h100x8"), "nvidia-fabricmanager-570": {"version": "570.86.15-1"}}
    for each in other.values():
        each.setdefault("held", False)

    (said,) = refused(changed("h100x8", system__packages=other))
    assert "570.86.15 as its fabric manager" in said


def test_nodes_that_differ_are_named_key_by_key() -> None:
    older = recorded("h100x8")
    newer = changed(
        "h100x8",
        driver__module="570.211.01",
        driver__disk__version="570.211.01",
        driver__library__version="570.211.01",
        system__packages={
            **packages("h100x8", datacenter_gpu_manager_4_core="1:4.6.0-1"),
            "nvidia-fabricmanager-570": {"version": "570.211.01-1", "held": False},
        },
    )

    problems = refused(older, older, newer)

    assert [each.split(":")[0] for each in problems] == [
        "gpu_lock.driver differs between nodes",
        "gpu_lock.dcgm differs between nodes",
    ]
    assert "570.124.06 on gpu-01, gpu-02; 570.211.01 on gpu-03" in problems[0]


def test_nodes_without_nvlink_5_switches_do_not_differ_by_nvlsm() -> None:
    with_switches = recorded("b200x8")
    without = copy.deepcopy(with_switches)
    del without["system"]["packages"]["nvlsm"]

    assert read(without, with_switches).nvlsm == "2025.06.11-1"


# -- the sets --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", release_sets())
def test_a_set_fits_together_and_what_we_ship(name: str) -> None:
    found = release_sets()[name].lock
    ours = (ROOT / "locks/vllm-0.32.0.txt").read_bytes()

    assert found.exact
    assert found.branch in BRANCHES
    assert not tuple(gpu_lock.lock_objections(found))
    assert not tuple(
        lock_rules.release_objections(found, release.wheels(ours, "locks/vllm-0.32.0.txt"))
    )
    assert set(release_sets()[name].why) <= set(GpuLock.model_fields)


@pytest.mark.parametrize("name", release_sets())
def test_a_locks_file_reads_back_as_the_lock(name: str) -> None:
    found = release_sets()[name]
    written = lock_text(found.lock, "Somewhere.", found.why)

    assert GpuLock.model_validate(yaml.safe_load(written)["gpu_lock"]) == found.lock
    assert max(map(len, written.splitlines())) <= 100


def test_a_branch_and_a_python_are_not_written_as_numbers() -> None:
    given = GpuLock.model_validate(
        {"driver": "580", "vllm": {"version": "0.32.0", "python": "3.10"}}
    )

    assert GpuLock.model_validate(yaml.safe_load(lock_text(given, "", {}))["gpu_lock"]) == given


# -- the file --------------------------------------------------------------------------------------


def test_a_file_that_cannot_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "group_vars").write_text("no directory")

    with pytest.raises(FleetError) as found:
        write_whole(tmp_path / "group_vars/h100.lock.yml", "a")
    assert "cannot be written" in str(found.value)
    assert (tmp_path / "group_vars").read_text() == "no directory"
