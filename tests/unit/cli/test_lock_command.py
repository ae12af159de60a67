"""`gpufleet lock`: one file for a group, from what all its nodes run or from a set of versions."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest
import yaml
from click.testing import CliRunner

from gpufleet.artifacts import release
from gpufleet.catalog.driver_branches import BRANCHES
from gpufleet.cli.lock_command import lock
from gpufleet.errors import FleetError
from gpufleet.gpu_software import lock_file, lock_rules
from gpufleet.gpu_software.lock_file import lock_text
from gpufleet.gpu_software.lock_from_nodes import build_lock
from gpufleet.gpu_software.version_sets import release_sets
from gpufleet.inventory import loader
from gpufleet.settings import gpu_lock
from gpufleet.settings.gpu_lock import GpuLock
from gpufleet.settings.node_settings import NodeSettings
from tests.support.checkout import ROOT
from tests.support.rows import each_row

REPOSITORY = {"url": "http://mirror/repos", "keyring_sha256": "a" * 64}


def recorded(machine: str) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((ROOT / f"tests/data/nodes/{machine}.json").read_text())
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

    assert "name the one to keep in `cuda.toolkit`" in refused(node)[0]
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
        ({"driver__disk__version": "580.95.05"}, "has 580.95.05 on the disk"),
        ({"driver__disk": {"missing": "absent"}}, "none that can be read on the disk"),
        ({"driver__library": {"missing": "timeout"}}, "none that can be read as its library"),
        ({"driver__proc": {"missing": "absent"}}, "which kernel modules are loaded could not"),
        ({"system__packages": {"missing": "timeout"}}, "its packages could not be read (timeout)"),
        ({"system__units": {"missing": "timeout"}}, "its units could not be read (timeout)"),
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
        "gpu_lock.driver is not one",
        "gpu_lock.dcgm is not one",
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


class Project:
    """An inventory of two nodes in a group, with its variables."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.write(
            "inventories/prod.py",
            """\
            from gpufleet import inventory
            globals().update(inventory.load(__file__, groups={"h100": ["gpu-01", "gpu-02"]}))
            """,
        )
        self.write(
            "group_vars/prod.yml",
            f"""\
            cuda:
              repository: {json.dumps(REPOSITORY)}
            """,
        )

    def write(self, name: str, content: str) -> Path:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(dedent(content))
        return path

    @property
    def inventory(self) -> str:
        return str(self.path / "inventories/prod.py")

    def fleet(self) -> loader.Fleet:
        return loader.read(self.inventory)

    def mistakes(self) -> tuple[str, ...]:
        with pytest.raises(FleetError) as found:
            self.fleet()
        return found.value.problems


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path)


LOCK = 'gpu_lock:\n  driver: "580.95.05"\n'


def test_a_groups_lock_is_read_beside_its_variables(project: Project) -> None:
    project.write("group_vars/h100.lock.yml", LOCK)

    fleet = project.fleet()

    found = fleet.nodes["gpu-01"].settings.gpu_lock
    assert found
    assert found.driver == "580.95.05"
    assert str(fleet.nodes["gpu-01"].origins["gpu_lock"]) == "group_vars/h100.lock.yml:1"
    assert fleet.remarks == ()


def test_what_the_lock_fills_in_is_shown_as_the_locks(project: Project) -> None:
    project.write(
        "group_vars/h100.lock.yml", LOCK + '  dcgm:\n    version: "1:4.6.0-1"\n    exporter: "1"\n'
    )

    shown = project.fleet().as_json(["gpu-01"])["nodes"]["gpu-01"]["values"]

    assert shown["dcgm.version"] == {
        "value": "1:4.6.0-1",
        "set_in": "group_vars/h100.lock.yml:4",
    }


def test_a_lock_of_no_group_is_named_as_unread(project: Project) -> None:
    project.write("group_vars/h200.lock.yml", LOCK)

    assert project.fleet().remarks == (
        "group_vars/h200.lock.yml is not read: nothing in this inventory is called 'h200'; did you "
        "mean 'h100'?",
    )


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"h100.lock.yml": LOCK, "h100.yml": LOCK},
            "group_vars/h100.lock.yml:1: gpu_lock: the group has another one in "
            "group_vars/h100.yml:1: remove one of the two",
        ),
        (
            {"h100.lock.yml": LOCK + "gpus:\n  count: 8\n"},
            "group_vars/h100.lock.yml:3: gpus: this file has `gpu_lock` alone, and `gpufleet lock` "
            "writes it anew: move it to group_vars/h100.yml",
        ),
        (
            {"h100.lock.yml": "# nothing\n"},
            "group_vars/h100.lock.yml: is empty: `gpufleet lock` writes it, or remove it",
        ),
        (
            {
                "h100.lock.yml": LOCK + "  dcgm:\n    version: '1:4.6.0-1'\n",
                "h100.yml": "dcgm:\n  version: '1:4.5.3-1'\n  exporter_version: null\n",
            },
            "group_vars/h100.yml:2: dcgm.version: is 1:4.5.3-1, and gpu_lock.dcgm.version is "
            "1:4.6.0-1: correct the one that is wrong, or remove it here (gpu_lock.dcgm.version is "
            "in group_vars/h100.lock.yml:4)",
        ),
    ],
)
def test_mistakes_around_a_lock_name_file_and_line(
    project: Project, files: dict[str, str], said: str
) -> None:
    for name, content in files.items():
        project.write(f"group_vars/{name}", content)

    assert project.mistakes() == (said,)


@pytest.mark.parametrize(
    "groups", ['{"h100.lock": ["gpu-01"]}', '{"h": ["gpu-01"]}, children={"h100.lock": ["h"]}']
)
def test_no_group_can_be_called_like_a_lock(project: Project, groups: str) -> None:
    project.write(
        "inventories/prod.py",
        f"""\
        from gpufleet import inventory
        globals().update(inventory.load(__file__, groups={groups}))
        """,
    )

    (said,) = project.mistakes()
    assert "no group can be called 'h100.lock'" in said


def test_a_driver_too_old_for_vllms_wheels_is_refused_before_any_node(project: Project) -> None:
    wheels = project.write("vllm.txt", "nvidia-cuda-runtime==13.0.96 \\\n")
    project.write("group_vars/h100.lock.yml", 'gpu_lock:\n  driver: "570.211.01"\n')
    project.write(
        "group_vars/h100.yml",
        f"vllm:\n  version: 0.32.0\n  lock: {wheels}\n  listen: 127.0.0.1\n",
    )

    (said,) = project.mistakes()
    assert said.startswith("group_vars/h100.lock.yml:2: gpu_lock.driver: is 570.211.01, and ")
    assert "580.65.06" in said


def test_a_branch_past_its_end_is_a_remark(project: Project) -> None:
    project.write("group_vars/h100.lock.yml", 'gpu_lock:\n  driver: "535"\n')

    (said,) = project.fleet().remarks
    assert "R535 (long term support) has had no security updates since June 2026" in said


# -- the command -----------------------------------------------------------------------------------


def run(project: Project, *arguments: str) -> tuple[int, str, str]:
    """Return exit status, standard output and what was said beside it, refusals too."""
    found = CliRunner().invoke(lock, [project.inventory, *arguments], standalone_mode=False)
    if isinstance(found.exception, FleetError):
        return 2, found.stdout, str(found.exception)
    assert found.exception is None
    status: int = found.return_value
    return status, found.stdout, found.stderr


def test_locking_twice_writes_once(project: Project) -> None:
    file = project.path / "group_vars/h100.lock.yml"

    assert run(project, "--group", "h100", "--set", "r595")[0] == 0
    before = file.stat()
    assert run(project, "--group", "h100", "--set", "r595")[0] == 0
    assert file.stat().st_mtime_ns == before.st_mtime_ns
    assert file.stat().st_ino == before.st_ino
    found = project.fleet().nodes["gpu-02"].settings.gpu_lock
    assert found == release_sets()["r595"].lock


def test_dry_says_what_would_be_written_and_writes_nothing(project: Project) -> None:
    there = sorted(project.path.rglob("*"))

    status, out, _ = run(project, "--group", "h100", "--set", "r595", "--dry")

    assert status == 1
    assert sorted(project.path.rglob("*")) == there
    assert run(project, "--group", "h100", "--set", "r595")[0] == 0
    assert (project.path / "group_vars/h100.lock.yml").read_text() == out
    assert run(project, "--group", "h100", "--set", "r595", "--dry")[:2] == (0, "")


@pytest.mark.parametrize("name", release_sets())
def test_our_example_takes_every_set(name: str) -> None:
    """The variables that operators copy are right before a lock, and with it."""
    found = CliRunner().invoke(
        lock, ["inventories/prod.py", "--set", name, "--dry"], standalone_mode=False
    )

    assert found.exception is None
    assert found.return_value == 1
    assert yaml.safe_load(found.stdout)["gpu_lock"]["driver"] == release_sets()[name].lock.driver


def test_a_lock_that_variables_contradict_is_not_written(project: Project) -> None:
    project.write("group_vars/h100.yml", "dcgm:\n  version: 1:4.5.3-1\n  exporter_version: null\n")

    status, _, said = run(project, "--group", "h100", "--set", "r595")

    assert status == 2
    assert "dcgm.version: is 1:4.5.3-1, and gpu_lock.dcgm.version is 1:4.6.0-1" in said
    assert not (project.path / "group_vars/h100.lock.yml").exists()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--group", "h10", "--set", "r595"), "did you mean 'h100'?"),
        (("--set", "r580"), "did you mean 'r580-lts'?"),
    ],
)
def test_names_that_are_none_are_refused_with_those_there_are(
    project: Project, arguments: tuple[str, ...], said: str
) -> None:
    status, _, error = run(project, *arguments)

    assert status == 2
    assert said in error


def test_a_lock_written_elsewhere_is_not_hidden_by_another(project: Project) -> None:
    project.write("group_vars/h100.yml", LOCK)

    status, _, said = run(project, "--set", "r595")

    assert status == 2
    assert said.startswith("group_vars/h100.yml:1: gpu_lock: is there already for gpu-01")


def test_a_file_that_cannot_be_written_is_left_as_it_was(tmp_path: Path) -> None:
    (tmp_path / "group_vars").write_text("no directory")

    with pytest.raises(FleetError) as found:
        lock_file.write(tmp_path / "group_vars/h100.lock.yml", "a")
    assert "cannot be written" in str(found.value)
    assert (tmp_path / "group_vars").read_text() == "no directory"
