"""Files of ours in a folder of somebody else's: written, corrected, removed, never usurped."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpufleet.errors import FleetError
from gpufleet.monitoring import output_folder

FILES = {"a.yml": b"one", "rules/b.yml": b"two"}


def lying_in(place: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(place)): path.read_bytes()
        for path in place.rglob("*")
        if path.is_file() and path.name != output_folder.LIST
    }


def test_a_second_run_writes_nothing(tmp_path: Path) -> None:
    assert len(output_folder.write(tmp_path / "new", FILES)) == 2
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "new").rglob("*")}
    assert output_folder.write(tmp_path / "new", FILES) == []
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "new").rglob("*")} == before
    assert lying_in(tmp_path / "new") == FILES


def test_what_is_not_wanted_any_more_goes_and_what_is_not_ours_stays(tmp_path: Path) -> None:
    output_folder.write(tmp_path, FILES)
    (tmp_path / "rules/yours.yml").write_bytes(b"yours")
    done = output_folder.write(tmp_path, {"a.yml": b"three"})
    assert done == [f"wrote {tmp_path / 'a.yml'}", f"removed {tmp_path / 'rules/b.yml'}"]
    assert lying_in(tmp_path) == {"a.yml": b"three", "rules/yours.yml": b"yours"}


@pytest.mark.parametrize("ours", [False, True], ids=["of others", "ours, changed by hand"])
def test_nothing_is_written_where_one_file_is_not_ours_to_write(
    tmp_path: Path, *, ours: bool
) -> None:
    if ours:
        output_folder.write(tmp_path, FILES)
    (tmp_path / "a.yml").write_bytes(b"by hand")
    before = lying_in(tmp_path)
    with pytest.raises(FleetError, match=r"a\.yml"):
        output_folder.write(tmp_path, {"a.yml": b"new", "c.yml": b"c"})
    assert lying_in(tmp_path) == before


def test_a_file_that_happens_to_be_as_wanted_is_taken_over(tmp_path: Path) -> None:
    (tmp_path / "a.yml").write_bytes(FILES["a.yml"])
    assert output_folder.write(tmp_path, FILES) == [f"wrote {tmp_path / 'rules/b.yml'}"]
    output_folder.write(tmp_path, {})
    assert lying_in(tmp_path) == {}


def test_a_run_that_was_killed_is_finished_by_the_next_with_other_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed after each of its steps in turn: the next run takes none of its files for others'."""
    put = output_folder._put
    for steps in range(4):
        place = tmp_path / str(steps)
        output_folder.write(place, FILES)
        left = iter(range(steps))

        def dies(path: Path, content: bytes, left: object = left) -> None:
            if next(left, None) is None:  # type: ignore[call-overload]
                raise KeyboardInterrupt
            put(path, content)

        monkeypatch.setattr(output_folder, "_put", dies)
        with pytest.raises(KeyboardInterrupt):
            output_folder.write(place, {"a.yml": b"three", "c.yml": b"four"})
        monkeypatch.setattr(output_folder, "_put", put)
        output_folder.write(place, {"a.yml": b"five", "d.yml": b"six"})
        assert lying_in(place) == {"a.yml": b"five", "d.yml": b"six"}
