"""`gpufleet import -o`: a file is written whole, never over another one without consent."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner, Result

from gpufleet.cli.import_command import import_
from gpufleet.errors import FleetError
from gpufleet.settings.variables import load_file
from tests.support.rows import each_row
from tests.unit.importer.test_import import KEY, SAMPLES, TOKEN, accepted

LINE = f"vllm serve org/m --served-model-name '#1: \"é\"' --api-key {KEY} --seed 7 -tp 2\n"


def run(*words: str | Path) -> Result:
    """Run the command; a refusal is raised."""
    return CliRunner().invoke(
        import_, [str(word) for word in words], catch_exceptions=False, standalone_mode=False
    )


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """Return a file to import."""
    file = tmp_path / "start.sh"
    file.write_text(LINE)
    return file


def test_the_file_has_what_standard_output_would_have(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "group_vars/gpu.yml"
    printed = run(source).stdout
    written = run(source, "-o", target)

    assert target.read_text() == printed
    assert printed
    assert written.stdout == ""
    assert f"{target} written" in written.stderr
    assert written.return_value == 1  # something is left to decide
    assert [each.name for each in target.parent.iterdir()] == ["gpu.yml"]


@each_row("name", SAMPLES)
def test_what_is_written_loads_as_group_vars(name: str, tmp_path: Path) -> None:
    source, target = tmp_path / name, tmp_path / f"group_vars/{name}.yml"
    source.write_text(SAMPLES[name])
    run(source, "-o", target)

    loaded = load_file(target, tmp_path)
    assert loaded is not None
    values = {key: value for key, (value, _) in loaded.items()}
    assert accepted(values).serving.keys() == values["serving"].keys()
    assert not any(secret in target.read_text() for secret in (KEY, TOKEN))


@pytest.mark.parametrize("kind", ["file", "dangling", "folder", "source"])
def test_what_is_there_is_refused_and_left_as_it_is(
    source: Path, tmp_path: Path, kind: str
) -> None:
    target = source if kind == "source" else tmp_path / "gpu.yml"
    if kind == "file":
        target.write_text("mine: 1\n")
    elif kind == "dangling":
        target.symlink_to(tmp_path / "elsewhere.yml")
    elif kind == "folder":
        target.mkdir()
    with pytest.raises(FleetError, match=str(target)) as refused:
        run(source, "-o", target)

    assert ("--force" in str(refused.value)) is (kind in {"file", "dangling"})
    assert not (tmp_path / "elsewhere.yml").exists()
    if kind == "file":
        assert target.read_text() == "mine: 1\n"
    assert source.read_text() == LINE


def test_with_consent_a_file_is_replaced(source: Path, tmp_path: Path) -> None:
    target = tmp_path / "gpu.yml"
    target.write_text("mine: 1\n")
    run(source, "-o", target, "--force")

    assert yaml.safe_load(target.read_text())["serving"]["start"]["flags"] == {"seed": 7}
    with pytest.raises(FleetError, match="is the file to import"):
        run(source, "-o", source, "--force")


def test_what_cannot_be_read_writes_nothing(tmp_path: Path) -> None:
    source, target = tmp_path / "a.sh", tmp_path / "gpu.yml"
    source.write_text("echo hello\n")
    with pytest.raises(FleetError, match="the file does not start vLLM"):
        run(source, "-o", target)

    assert not target.exists()


def test_a_file_without_end_ends_in_a_sentence() -> None:
    with pytest.raises(FleetError, match="/dev/zero: has 16,777,216 characters"):
        run("/dev/zero")


def test_a_folder_that_cannot_be_written_ends_in_a_sentence(source: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FleetError, match="cannot be written"):
        run(source, "-o", tmp_path / "file/gpu.yml")
