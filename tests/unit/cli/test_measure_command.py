"""`gpufleet measure`: what excludes what, and two results compared without an inventory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from gpufleet.cli.measure_command import measure
from gpufleet.cli.measure_output import (
    LevelLines,
    answer,
    closed_answer,
    print_result,
    write_result,
)
from gpufleet.cli.measure_wanted import MeasureOptions
from gpufleet.errors import FleetError
from gpufleet.load_test import result
from gpufleet.load_test.result import RateBracket
from tests.support import warm_command
from tests.unit.load_test.sample_results import CLOSED, LEVELS, measurement

TYPED = {
    "model": None,
    "replica": None,
    "gateway": None,
    "from_node": None,
    "key_file": None,
    "ca_file": None,
    "preset": "chat",
    "lengths": None,
    "prompts": None,
    "trace": None,
    "rate": None,
    "concurrency": None,
    "most": None,
    "share": 0.95,
    "seconds": 120,
    "guest": None,
    "processes": None,
    "seed": 1,
    "output": None,
    "as_json": False,
}


def test_all_that_exclude_each_other_are_named_at_once() -> None:
    with pytest.raises(FleetError) as refused:
        MeasureOptions(
            **{**TYPED, "replica": "a-0", "gateway": "lb", "rate": 1.0, "concurrency": 4}
        )

    assert refused.value.problems == (
        "--replica and --gateway exclude each other: remove one of the two",
        "--rate and --concurrency exclude each other: remove one of the two",
    )


def test_what_a_search_on_one_replica_has_not_is_refused_beside_tune() -> None:
    given: dict[str, Any] = {"tune": True, "gateway": "lb", "rate": 1.0, "trace": "t", "guest": 0.3}
    with pytest.raises(FleetError) as refused:
        MeasureOptions(**{**TYPED, **given})

    assert refused.value.problems == tuple(
        f"--tune and {option} exclude each other: remove one of the two"
        for option in ("--gateway", "--rate", "--trace", "--guest")
    )
    with pytest.raises(FleetError, match="--try works only with --tune:"):
        MeasureOptions(**{**TYPED, "tries": ("max-num-seqs=8",)})


@pytest.mark.parametrize(
    ("lengths", "most"), [("1000,200", 1200), ("256-1024,10", 1034), (None, 200 + 4 * 1536)]
)
def test_lengths_stand_in_place_of_the_preset(lengths: str | None, most: int) -> None:
    assert MeasureOptions(**{**TYPED, "lengths": lengths}).work("generate").most_tokens == most


@pytest.mark.parametrize("given", [{"rate": 2.0}, {"concurrency": 4}, {"trace": "trace.jsonl"}])
def test_one_level_is_no_search(given: dict[str, Any]) -> None:
    assert MeasureOptions(**TYPED).searches
    assert not MeasureOptions(**{**TYPED, **given}).searches


def test_lengths_without_an_answer_are_refused_with_what_to_write() -> None:
    with pytest.raises(FleetError, match="write PROMPT_TOKENS,ANSWER_TOKENS, for example"):
        MeasureOptions(**{**TYPED, "lengths": "1000"}).work("generate")


def test_two_results_are_compared_without_an_inventory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    one, other = (str(result.write(measurement(), tmp_path / each)) for each in ("a", "b"))

    said = CliRunner().invoke(measure, ["--compare", one, other], standalone_mode=False)
    plain = CliRunner().invoke(measure, ["--compare", one, other, "--json"], standalone_mode=False)

    assert said.exit_code == 0, said.output
    assert "these measurements show no difference" in said.output
    assert json.loads(plain.stdout)["differences"] == []


def test_a_file_that_is_no_result_is_named(tmp_path: Path) -> None:
    good = result.write(measurement(), tmp_path)
    bad = tmp_path / "other.json"
    bad.write_text('{"what": "else"}')

    said = CliRunner().invoke(measure, ["--compare", str(good), str(bad)])

    assert isinstance(said.exception, FleetError)
    assert str(bad) in str(said.exception)


def test_the_answer_says_which_part_of_the_replicas_served_and_what_one_of_them_carries() -> None:
    left = measurement(
        target="gateway lb", replicas=2, replicas_of=3, found=RateBracket(9.0, 10.0, "found", "why")
    )

    assert answer(left) == (
        "llama, gateway lb (2 of 3 replicas): meets its objectives at 9 requests/s, 4.5 "
        "a replica, does not meet them at 10 (found: why)"
    )


def test_the_files_of_a_result_say_which_part_of_the_replicas_served(tmp_path: Path) -> None:
    found = measurement(target="gateway lb", replicas=2, replicas_of=3)

    file, page, *reports = write_result(found, tmp_path)

    plain = json.loads(file.read_text())
    assert (plain["replicas"], plain["replicas_of"]) == (2, 3)
    assert "2 of 3 replicas" in page.read_text()
    assert reports
    assert all('"replicas_of": 3' in each.read_text() for each in reports)


def test_a_closed_loop_stands_beside_the_open_one_in_the_terminal_and_in_the_files(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = measurement(closed=CLOSED, notes=("users were there",))

    files = write_result(found, tmp_path)
    print_result(found, files)

    said = capsys.readouterr().out
    assert "concurrent" in said
    assert "meets its objectives at 4 requests/s" in said
    assert (
        "closed loop: meets its objectives with 8 concurrent requests, 8 answers/s, does "
        "not meet them with 12 (found). The clients of a closed loop wait for answers "
        "before they send more requests; users do not"
    ) in said
    assert "note: users were there" in said
    plain = json.loads(files[0].read_text())
    assert (plain["found"]["kept"], plain["closed"]["found"]["kept"]) == (4.0, 8.0)
    assert len(files) == 2 + len(found.levels) + len(CLOSED.levels)
    missed = replace(CLOSED, found=replace(CLOSED.found, kept=None, why="not even one"))
    assert closed_answer(missed) == "closed loop: not even one"


def test_a_table_grows_while_levels_are_measured(capsys: pytest.CaptureFixture[str]) -> None:
    grow = LevelLines()
    for each in (LEVELS[0], LEVELS[2], LEVELS[3], *CLOSED.levels):
        grow(each)

    rows = [line.split() for line in capsys.readouterr().err.splitlines()]

    assert [row[0] for row in rows] == [
        "requests/s", "2", "8", "6", LEVELS[3].why.split()[0], "concurrent", "8", "12",
    ]  # fmt: skip
    assert rows[1][1:4] == ["kept", "400", "100.0%"]
    assert " ".join(rows[4]) == LEVELS[3].why, "what is not known, and why"


def test_the_knee_and_where_itl_runs_away_are_named_in_the_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    itl = {1.0: 0.01, 2.0: 0.015, 4.0: 0.02, 8.0: 0.2}
    levels = tuple(replace(LEVELS[0], rate=rate, itl={"p99": p99}) for rate, p99 in itl.items())
    found = measurement(levels=levels)

    print_result(found, write_result(found, tmp_path))

    said = capsys.readouterr().out
    assert "Up to 8 requests/s, p99 ITL has grown by a larger factor than the load." in said


def test_what_a_search_in_a_closed_loop_has_not_is_refused_beside_it() -> None:
    given: dict[str, Any] = {"closed_loop": True, "rate": 1.0, "most": 2.0, "guest": 0.3}
    with pytest.raises(FleetError) as refused:
        MeasureOptions(**{**TYPED, **given})

    assert refused.value.problems == tuple(
        f"--closed-loop and {option} exclude each other: remove one of the two"
        for option in ("--rate", "--most", "--guest")
    )


INVENTORY = """
from gpufleet import inventory
from tests.support import warm_command

globals().update(inventory.load(__file__, groups={"gpu": ["gpu-01", "gpu-02"]}))
"""


def test_a_node_that_the_inventory_has_not_is_refused_before_any_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "inventories/prod.py"
    file.parent.mkdir()
    file.write_text(INVENTORY)

    run = warm_command.run(["measure", file, "--from", "gpu-1"], cwd=tmp_path)

    assert run.returncode == 2
    assert "--from gpu-1:" in run.stderr
    assert "did you mean 'gpu-01'" in run.stderr
