"""`--vllm VERSION` and `--sglang VERSION` change the lines that declare it, and no other byte."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import yaml

from gpufleet.errors import FleetError
from gpufleet.inventory import loader
from gpufleet.inventory.loader import Fleet
from gpufleet.settings.engine_flags import EngineName
from gpufleet.upgrade.plan import declare_version
from tests.support.checkout import ROOT

TO: dict[EngineName, str] = {"vllm": "0.32.0"}
GPU = """\
# What all GPU nodes run.
vllm:
  version: "0.31.1"   # tested on the canary
  lock: {locks}/vllm-0.31.1.txt
  listen: 127.0.0.1
serving: {{}}
"""
INVENTORY = """\
from gpufleet import inventory

globals().update(inventory.load(
    __file__, groups={"gpu": ["gpu-01", "gpu-02", "gpu-03"], "old": ["gpu-03"]}
))
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    for folder in ("inventories", "group_vars", "host_vars", "locks"):
        (tmp_path / folder).mkdir()
    (tmp_path / "inventories/prod.py").write_text(INVENTORY)
    (tmp_path / "group_vars/gpu.yml").write_text(GPU.format(locks=tmp_path / "locks"))
    for version in ("0.31.1", "0.32.0"):
        (tmp_path / f"locks/vllm-{version}.txt").write_text("")
    return tmp_path


def read(project: Path) -> Fleet:
    return loader.read(project / "inventories/prod.py")


def test_only_the_two_lines_change(project: Path) -> None:
    """Quotes and comments stay; read anew, all nodes have the version and its lock."""
    before = (project / "group_vars/gpu.yml").read_text().splitlines()
    declared = read(project)
    edits = declare_version.version_edits(declared, TO)
    declare_version.write_down(declared.root, edits)

    after = (project / "group_vars/gpu.yml").read_text().splitlines()
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert changed == [
        (
            '  version: "0.31.1"   # tested on the canary',
            '  version: "0.32.0"   # tested on the canary',
        ),
        (f"  lock: {project}/locks/vllm-0.31.1.txt", f"  lock: {project}/locks/vllm-0.32.0.txt"),
    ]
    assert str(edits[0]) == "group_vars/gpu.yml:3: vllm.version: 0.31.1 -> 0.32.0"
    again = read(project)
    assert {each.settings.vllm.version for each in again.nodes.values() if each.settings.vllm} == {
        "0.32.0"
    }
    # What is planned before anything is written is what is declared afterwards.
    early = declare_version.apply_edits(declared, TO)
    assert {n: each.settings for n, each in early.nodes.items()} == {
        n: each.settings for n, each in again.nodes.items()
    }


def test_each_engine_has_its_own_lines(project: Path) -> None:
    path = project / "group_vars/gpu.yml"
    section = f"sglang:\n  version: 0.5.22\n  lock: {project}/locks/sglang-0.5.22.txt\n"
    path.write_text(path.read_text() + section)
    for version in ("0.5.22", "0.5.23"):
        (project / f"locks/sglang-{version}.txt").write_text("")
    before = path.read_text()
    declared = read(project)
    only, both = {"sglang": "0.5.23"}, {"vllm": "0.32.0", "sglang": "0.5.23"}

    edits = declare_version.version_edits(declared, only)  # type: ignore[arg-type]
    assert str(edits[0]) == "group_vars/gpu.yml:8: sglang.version: 0.5.22 -> 0.5.23"
    assert [str(each) for each in declare_version.version_edits(declared, both)[2:]] == [  # type: ignore[arg-type]
        str(each) for each in edits
    ]
    declare_version.write_down(project, edits)
    assert path.read_text() == before.replace("0.5.22", "0.5.23")
    early = declare_version.apply_edits(declared, only)  # type: ignore[arg-type]
    again = read(project)
    assert {n: each.settings for n, each in early.nodes.items()} == {
        n: each.settings for n, each in again.nodes.items()
    }


def test_an_engine_that_no_node_has_is_refused(project: Path) -> None:
    with pytest.raises(FleetError, match="none of the nodes has `sglang` in its group_vars"):
        declare_version.version_edits(read(project), {"sglang": "0.5.23"})


def test_a_release_that_settings_refuse_is_refused_before_it_is_written(project: Path) -> None:
    (project / "locks/vllm-0.17.0.txt").write_text("")
    with pytest.raises(FleetError, match=r"--vllm 0.17.0: vLLM 0.17.0 has no flag --shutdown"):
        declare_version.version_edits(read(project), {"vllm": "0.17.0"})


def test_it_is_undone_byte_by_byte(project: Path) -> None:
    """And written twice, it is written once."""
    path = project / "group_vars/gpu.yml"
    before = path.read_bytes()
    edits = declare_version.version_edits(read(project), TO)
    declare_version.write_down(project, edits)
    declare_version.write_down(project, edits)
    assert path.read_bytes() != before
    declare_version.write_down(project, [each.inverse for each in edits])

    assert path.read_bytes() == before


def test_a_version_that_is_declared_already_changes_nothing(project: Path) -> None:
    """No line is to be written."""
    assert declare_version.version_edits(read(project), {"vllm": "0.31.1"}) == ()


@pytest.mark.parametrize(
    ("file", "text", "problem"),
    [
        (
            "group_vars/old.yml",
            "vllm: {{version: 0.31.1, lock: {locks}/vllm-0.31.1.txt, listen: 127.0.0.1}}\n",
            r"group_vars/old.yml:1: `vllm: .*` is not simply `version: 0.31.1`",
        ),
        (
            "group_vars/old.yml",
            "vllm:\n  version: 0.31.1\n  lock: {locks}/stable.txt\n  listen: 127.0.0.1\n",
            r"group_vars/old.yml:3: vllm.lock is .*stable.txt. This file name does not",
        ),
        (
            "host_vars/gpu-03.yml",
            "vllm:\n  version: 0.30.0\n  lock: {locks}/other/vllm-0.30.0.txt\n"
            "  listen: 127.0.0.1\n",
            r"other/vllm-0.32.0.txt: does not exist, but gpu-03 is built from this file",
        ),
    ],
)
def test_what_is_not_certain_is_for_a_person_to_write(
    project: Path, file: str, text: str, problem: str
) -> None:
    """Nothing is written, not even the lines that were certain."""
    (project / file).write_text(text.format(locks=project / "locks"))
    before = yaml.safe_load((project / "group_vars/gpu.yml").read_text())

    with pytest.raises(FleetError, match=problem):
        declare_version.version_edits(read(project), TO)
    assert yaml.safe_load((project / "group_vars/gpu.yml").read_text()) == before


def test_lines_that_other_nodes_have_too_are_not_written(project: Path) -> None:
    """--limit names one node, and the line is that of all three."""
    with pytest.raises(FleetError, match=r"vllm.version also applies to gpu-02(,| and) gpu-03"):
        declare_version.version_edits(read(project), TO, ["gpu-01"])


def test_a_line_that_somebody_has_changed_meanwhile_stays(project: Path) -> None:
    """The file is left as it is, whole."""
    edits = declare_version.version_edits(read(project), TO)
    path = project / "group_vars/gpu.yml"
    path.write_text(path.read_text().replace('"0.31.1"', '"0.31.2"'))
    before = path.read_text()

    with pytest.raises(FleetError, match=r"gpu.yml:3: this line is no longer `version: 0.31.1`"):
        declare_version.write_down(project, edits)
    assert path.read_text() == before


def test_a_lock_is_found_from_the_project_wherever_the_command_is_typed(
    project: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And what is written for another version is what stood there: a path from the project."""
    (project / "group_vars/gpu.yml").write_text(GPU.format(locks="locks"))
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    declared = read(project)

    vllm = declared.nodes["gpu-01"].settings.vllm
    assert vllm is not None
    assert vllm.lock == str(project / "locks/vllm-0.31.1.txt")
    # One that is not in the project is the one that gpufleet ships.
    assert vllm.uv_lock == str(ROOT / "locks/uv.txt")
    edits = declare_version.version_edits(declared, TO)
    assert edits[1].after == "locks/vllm-0.32.0.txt"
    monkeypatch.chdir(project)
    assert read(project).nodes["gpu-01"].settings.vllm.lock == "locks/vllm-0.31.1.txt"  # type: ignore[union-attr]


def test_links_modes_and_line_ends_stay(project: Path) -> None:
    elsewhere = project / "shared.yml"
    text = GPU.format(locks=project / "locks").replace("\n", "\r\n").rstrip()
    elsewhere.write_bytes(text.encode())
    elsewhere.chmod(0o600)
    file = project / "group_vars/gpu.yml"
    file.unlink()
    file.symlink_to("../shared.yml")

    declared = read(project)
    declare_version.write_down(declared.root, declare_version.version_edits(declared, TO))

    assert file.is_symlink()
    assert stat.S_IMODE(elsewhere.stat().st_mode) == 0o600
    assert elsewhere.read_bytes().decode() == text.replace("0.31.1", "0.32.0")
