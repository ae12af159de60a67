"""The journal: nothing is begun that is not in it, and what it has is what the fleet is left in."""

from __future__ import annotations

import json
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpufleet.errors import FleetError
from gpufleet.upgrade.plan.wave import Group, Wave
from gpufleet.upgrade.run import upgrade_journal
from gpufleet.upgrade.run.journal_entry import Entry
from gpufleet.upgrade.run.upgrade_journal import Journal
from gpufleet.upgrade.run.upgrade_state import fold

UPGRADE = "20261122T134708Z-ab12"
TINY = Group("tiny-0", "stages", ("gpu-01",), ("tiny-0",), ("vLLM 0.31.1 -> 0.32.0",))


def planned(*waves: Wave) -> Entry:
    said = {
        "waves": [
            {
                "number": each.number,
                "canary": each.canary,
                "groups": [group.as_json() for group in each.groups],
            }
            for each in waves
        ]
    }
    return Entry(1, "planned", said=json.loads(json.dumps(said)))


def test_what_was_written_is_read_by_another_process(tmp_path: Path) -> None:
    """Each entry is one line of JSON in a file for its owner alone."""
    with Journal.create(tmp_path / "upgrades", UPGRADE) as ours:
        ours.append("started", id=UPGRADE, kind="upgrade")
        ours.append("draining", wave=1, group="tiny-0")
        found = upgrade_journal.read(ours.path)

    lines = [json.loads(line) for line in ours.path.read_text().splitlines()]
    assert [line["what"] for line in lines] == ["started", "draining"]
    assert [each.as_json() for each in found] == lines
    assert stat.S_IMODE(ours.path.stat().st_mode) == 0o600
    assert stat.S_IMODE(ours.path.parent.stat().st_mode) == 0o700


def test_a_second_writer_is_refused_and_a_reader_is_not(tmp_path: Path) -> None:
    """Also one in another process: flock tells them apart by the open file."""
    with Journal.create(tmp_path, UPGRADE) as ours:
        ours.append("started", id=UPGRADE)
        code = (
            "import sys; from pathlib import Path\n"
            "from gpufleet.upgrade.run.upgrade_journal import *\n"
            "path = Path(sys.argv[1]); assert is_written(path); assert len(read(path)) == 1\n"
            "Journal.reopen(path)"
        )
        other = subprocess.run(
            [sys.executable, "-c", code, str(ours.path)],
            capture_output=True,
            text=True,
            check=False,
        )

    assert "FleetError" in other.stderr
    assert "in use by another process on this machine" in other.stderr
    assert not upgrade_journal.is_written(ours.path)
    Journal.reopen(ours.path).close()


@pytest.mark.parametrize("cut", [1, 5, 30])
def test_a_line_without_its_end_announces_nothing(tmp_path: Path, cut: int) -> None:
    """The machine went down while it was written: reading passes over it, writing takes it off."""
    with Journal.create(tmp_path, UPGRADE) as ours:
        ours.append("started", id=UPGRADE)
        whole = ours.path.stat().st_size
        ours.append("wave", wave=1)
    os.truncate(ours.path, ours.path.stat().st_size - cut)

    assert [each.what for each in upgrade_journal.read(ours.path)] == ["started"]
    with Journal.reopen(ours.path) as again:
        assert again.path.stat().st_size == whole
        again.append("resumed", by="me@here")
    assert [each.what for each in upgrade_journal.read(ours.path)] == ["started", "resumed"]


def test_a_line_that_is_no_entry_is_named(tmp_path: Path) -> None:
    """A journal that somebody changed is not guessed at."""
    path = tmp_path / f"{UPGRADE}.jsonl"
    path.write_text('{"at": 1, "what": "started", "said": {}}\n{"at": 2, "what": "dancing"}\n')

    with pytest.raises(FleetError, match=r"jsonl:2: .* a journal \(unknown event 'dancing'\)"):
        upgrade_journal.read(path)


def test_an_entry_that_cannot_be_written_ends_the_run(tmp_path: Path) -> None:
    """A full disk: what the entry announces is not begun, and the sentence says how to go on."""
    ours = Journal(tmp_path / "full", os.open("/dev/full", os.O_RDWR), ())

    with pytest.raises(FleetError, match="so draining is not started"):
        ours.append("draining", wave=1, group="tiny-0")
    assert ours.entries == []


def test_each_word_of_a_group_leaves_it_in_what_it_says() -> None:
    """Marks last from before the drain on; units count as new from before a switch on."""
    entries = [Entry(0, "started", said={"id": UPGRADE}), planned(Wave(1, (TINY,), canary=True))]
    seen = []
    for number, (what, said) in enumerate(
        [
            ("draining", {}),
            ("drained", {"left": 2}),
            ("switching", {}),
            ("switched", {}),
            ("ready", {}),
            ("judged", {"gate": "golden", "passed": True}),
            ("undraining", {}),
            ("undrained", {}),
            ("judged", {"gate": "traffic", "passed": None, "reasons": ["too few"]}),
            ("failed", {"why": ["traffic: too few"]}),
            ("draining", {}),
            ("drained", {"left": 1}),
            ("restoring", {}),
            ("restored", {}),
            ("undrained", {}),
            ("returned", {}),
        ]
    ):
        entries.append(Entry(2 + number, what, 1, "tiny-0", None, said))
        now = fold(entries).groups["tiny-0"]
        seen.append((what, now.marked, now.replaced, now.undoing))

    assert seen == [
        ("draining", True, False, False),
        ("drained", True, False, False),
        ("switching", True, True, False),
        ("switched", True, True, False),
        ("ready", True, True, False),
        ("judged", True, True, False),
        ("undraining", True, True, False),
        ("undrained", False, True, False),
        ("judged", False, True, False),
        ("failed", False, True, True),
        ("draining", True, True, True),
        ("drained", True, True, True),
        ("restoring", True, True, True),
        ("restored", True, False, True),
        ("undrained", False, False, True),
        ("returned", False, False, True),
    ]
    last = fold(entries).groups["tiny-0"]
    assert (last.left, last.alone, last.is_over) == (3, True, True)
    assert last.passed == {"golden": True, "traffic": None}


def test_what_is_about_one_node_of_a_group_moves_no_group() -> None:
    """A replica over nodes is switched when all of its nodes are."""
    entries = [
        planned(Wave(1, (TINY,))),
        Entry(2, "switching", 1, "tiny-0"),
        Entry(3, "switched", 1, "tiny-0", "gpu-01", {"seconds": 1.5}),
    ]

    assert fold(entries).groups["tiny-0"].phase == "switching"


def test_a_stuck_group_is_tried_again_when_somebody_resumes() -> None:
    """Its marks stay meanwhile, so that nothing is sent to it."""
    entries = [
        planned(Wave(1, (TINY,))),
        *(Entry(2, what, 1, "tiny-0") for what in ("draining", "drained", "switching")),
        Entry(3, "failed", 1, "tiny-0", said={"why": ["no power"]}),
        Entry(4, "stuck", 1, "tiny-0", said={"why": ["no answer"]}),
    ]
    before = fold(entries)
    after = fold([*entries, Entry(5, "resumed", said={"by": "me"})])

    assert before.groups["tiny-0"].is_over
    assert before.marked == ("tiny-0",)
    assert before.marks_on("gpu-01") == ("tiny-0",)
    assert before.marks_on("gpu-02") == ()
    assert after.groups["tiny-0"].phase == "failed"
    assert after.groups["tiny-0"].replaced


def test_no_lock_is_left_of_an_upgrade_that_is_over() -> None:
    """It is over when it has finished or stopped, and every node was unlocked."""
    entries = [
        Entry(1, "locking", said={"nodes": ["gpu-01", "gpu-02"]}),
        Entry(2, "finished"),
    ]

    assert fold(entries).locked == ("gpu-01", "gpu-02")
    assert not fold(entries).is_over
    assert fold([*entries, Entry(3, "unlocked")]).is_over


@contextmanager
def disk_of(size: int) -> Iterator[None]:
    """Let no file of this process grow beyond so many bytes: a write stops there, then fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_a_journal_survives_a_full_disk(tmp_path: Path) -> None:
    """No half line stays: what comes once there is room again is whole, and all of it is read."""
    with Journal.create(tmp_path, UPGRADE) as ours:
        ours.append("started", id=UPGRADE)
        for room in (1, 20):
            with (
                disk_of(ours.path.stat().st_size + room),
                pytest.raises(FleetError, match="free space"),
            ):
                ours.append("draining", wave=1, group="tiny-0")
            assert len(upgrade_journal.read(ours.path)) == 1
            assert ours.path.read_bytes().endswith(b"}\n")
        ours.append("failed", wave=1, group="tiny-0", why=["no room"])
    with Journal.reopen(ours.path) as again:
        assert [each.what for each in again.entries] == ["started", "failed"]


def test_half_a_line_that_could_not_be_taken_off_at_once_is_before_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Journal.create(tmp_path, UPGRADE) as ours:
        ours.append("started", id=UPGRADE)
        with monkeypatch.context() as broken:
            broken.setattr(os, "ftruncate", _fail)
            with disk_of(ours.path.stat().st_size + 20), pytest.raises(FleetError):
                ours.append("draining", wave=1, group="tiny-0")
        assert not ours.path.read_bytes().endswith(b"}\n")
        ours.append("failed", wave=1, group="tiny-0", why=["no room"])
    assert [each.what for each in upgrade_journal.read(ours.path)] == ["started", "failed"]


def _fail(*_: object) -> None:
    raise OSError(5, "Input/output error")
