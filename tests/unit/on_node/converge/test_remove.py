"""What goes of folders that hold something that stays."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpufleet.on_node.common import deploy_mark
from gpufleet.on_node.converge import remove


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    for name in ("vllm/models/q/weights", "vllm/tiny-0/log", "vllm/.cache", "other/file"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    (tmp_path / "link").symlink_to(tmp_path / "other")
    (tmp_path / "empty").mkdir()
    return tmp_path


def test_what_stays_stays_and_all_around_it_goes(tree: Path) -> None:
    whole, keep = str(tree / "vllm"), [str(tree / "vllm/models")]

    found = remove.paths([whole], [], keep)
    assert found == [str(tree / "vllm/.cache"), str(tree / "vllm/tiny-0")]
    for path in found:
        remove.remove_path(path)

    assert sorted(str(each.relative_to(tree)) for each in (tree / "vllm").rglob("*")) == [
        "vllm/models",
        "vllm/models/q",
        "vllm/models/q/weights",
    ]
    assert remove.paths([whole], [], keep) == []


def test_a_folder_without_anything_that_stays_goes_as_a_whole(tree: Path) -> None:
    assert remove.paths([str(tree / "vllm")], [], []) == [str(tree / "vllm")]
    remove.remove_path(str(tree / "vllm"))

    assert not (tree / "vllm").exists()


def test_a_link_goes_and_what_it_leads_to_stays(tree: Path) -> None:
    remove.remove_path(str(tree / "link"))

    assert not (tree / "link").is_symlink()
    assert (tree / "other/file").exists()


def test_a_folder_that_goes_when_it_is_empty_is_there_until_then(tree: Path) -> None:
    both = [str(tree / "empty"), str(tree / "other")]

    assert remove.paths([], both, []) == [str(tree / "empty")]


def test_the_mark_of_the_run_itself_is_nothing_that_is_there(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mark = tree / "state/change/deploy.json"
    mark.parent.mkdir(parents=True)
    mark.touch()
    monkeypatch.setattr(deploy_mark, "DEPLOY", str(mark))
    state = str(tree / "state")

    assert remove.paths([state], [], []) == []
    (tree / "state/drained").mkdir()
    assert remove.paths([state], [], []) == [state]


def test_without_its_marks_nothing_of_a_part_is_looked_at(tree: Path) -> None:
    """Packages and units are another's then."""
    wanted = {
        "marks": [str(tree / "none*")],
        "units": ["*"],
        "packages": ["*"],
        "tables": [],
        "paths": [str(tree / "other")],
        "empty": [],
        "keep": [],
        "accounts": ["root"],
    }

    assert not any(remove.look(wanted).values())
    found = remove.look(wanted | {"marks": [str(tree / "oth*")], "units": [], "packages": []})
    assert found["paths"] == [str(tree / "other")]
    assert found["accounts"] == ["root"]
