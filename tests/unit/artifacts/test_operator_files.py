"""Files that settings name, read where the command runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpufleet.artifacts import operator_files
from gpufleet.errors import FleetError


def test_a_relative_path_starts_at_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lock.txt").write_bytes(b"here")
    monkeypatch.chdir(tmp_path)

    assert operator_files.read("lock.txt") == b"here"


def test_a_file_that_is_not_there_is_named_with_where_it_was_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)

    with pytest.raises(FleetError, match=r"lock\.txt cannot be read") as relative:
        operator_files.read("lock.txt")
    with pytest.raises(FleetError) as absolute:
        operator_files.read(f"{tmp_path}/lock.txt")

    assert f"in {tmp_path} (No such file" in str(relative.value)
    assert "relative path" not in str(absolute.value)
