"""`gpufleet lock`: one file for a group, from what all its nodes run or from a set of versions."""

from __future__ import annotations

import json
from pathlib import Path
from textwrap import dedent

import pytest
import yaml
from click.testing import CliRunner

from gpufleet.cli.lock_command import lock
from gpufleet.errors import FleetError
from gpufleet.gpu_software.version_sets import release_sets
from gpufleet.inventory import loader

REPOSITORY = {"url": "http://mirror/repos", "keyring_sha256": "a" * 64}


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
        "group_vars/h200.lock.yml is not read, because this inventory has no group or "
        "node 'h200'; did you mean 'h100'?",
    )


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (
            {"h100.lock.yml": LOCK, "h100.yml": LOCK},
            "group_vars/h100.lock.yml:1: gpu_lock: the group also has a lock in "
            "group_vars/h100.yml:1: remove one of the two locks",
        ),
        (
            {"h100.lock.yml": LOCK + "gpus:\n  count: 8\n"},
            "group_vars/h100.lock.yml:3: gpus: this file may only contain `gpu_lock`, because "
            "`gpufleet lock` overwrites the file: move the key to group_vars/h100.yml",
        ),
        (
            {"h100.lock.yml": "# nothing\n"},
            "group_vars/h100.lock.yml: the file is empty: write it with `gpufleet lock`, or remove "
            "it",
        ),
        (
            {
                "h100.lock.yml": LOCK + "  dcgm:\n    version: '1:4.6.0-1'\n",
                "h100.yml": "dcgm:\n  version: '1:4.5.3-1'\n  exporter_version: null\n",
            },
            "group_vars/h100.yml:2: dcgm.version: is 1:4.5.3-1, but gpu_lock.dcgm.version is "
            "1:4.6.0-1: correct the wrong value, or remove dcgm.version (gpu_lock.dcgm.version is "
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
    assert "'h100.lock' cannot be the name of a group" in said


def test_a_driver_too_old_for_vllms_wheels_is_refused_before_any_node(project: Project) -> None:
    wheels = project.write("vllm.txt", "nvidia-cuda-runtime==13.0.96 \\\n")
    project.write("group_vars/h100.lock.yml", 'gpu_lock:\n  driver: "570.211.01"\n')
    project.write(
        "group_vars/h100.yml",
        f"vllm:\n  version: 0.32.0\n  lock: {wheels}\n  listen: 127.0.0.1\n",
    )

    (said,) = project.mistakes()
    assert said.startswith("group_vars/h100.lock.yml:2: gpu_lock.driver: is 570.211.01, but ")
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
        lock,
        ["examples/explained/inventories/prod.py", "--set", name, "--dry"],
        standalone_mode=False,
    )

    assert found.exception is None
    assert found.return_value == 1
    assert yaml.safe_load(found.stdout)["gpu_lock"]["driver"] == release_sets()[name].lock.driver


def test_a_lock_that_variables_contradict_is_not_written(project: Project) -> None:
    project.write("group_vars/h100.yml", "dcgm:\n  version: 1:4.5.3-1\n  exporter_version: null\n")

    status, _, said = run(project, "--group", "h100", "--set", "r595")

    assert status == 2
    assert "dcgm.version: is 1:4.5.3-1, but gpu_lock.dcgm.version is 1:4.6.0-1" in said
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
    assert said.startswith(
        "group_vars/h100.yml:1: gpu_lock: is already set in this file for gpu-01"
    )
