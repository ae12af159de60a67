"""Every long test belongs to a part, and what a run writes changes its own rows alone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.checkout import ROOT
from tests.support.long_tests import PARTS, REGISTER, listing, long_tests, part_of, verdict
from tests.support.measured import with_rows

PAGE = """# A page

Before.

| fault | took | run |
| --- | --- | --- |
| one | 1 s | 2026-01-01, aaaaaaa |
| two | 2 s | 2026-01-01, aaaaaaa |

After.

| another | table |
| --- | --- |
| one | untouched |
"""


def test_every_long_test_belongs_to_a_part_and_no_part_is_empty() -> None:
    parts = {test: part_of(test) for test in long_tests()}

    assert [test for test, part in parts.items() if part is None] == []
    assert set(parts.values()) == set(PARTS.values())


def test_the_register_has_rows_of_parts_alone() -> None:
    listed = {line.split()[0] for line in listing(REGISTER.read_text()).splitlines()}
    rows = [line for line in REGISTER.read_text().splitlines() if line.startswith("| ")][2:]

    assert {row.split("|")[1].strip() for row in rows} <= listed == set(PARTS.values())


def test_a_row_replaces_its_own_and_all_other_text_stays() -> None:
    changed = with_rows(PAGE, [["two", "a|b", "now"], ["three", "3 s", "now"]], key=1)

    before, after = PAGE.splitlines(), changed.splitlines()
    assert [line for line in before if line not in after] == [before[7]]
    assert [line for line in after if line not in before] == [
        "| two | a:b | now |",
        "| three | 3 s | now |",
    ]
    assert after.index("| three | 3 s | now |") == 8


@pytest.mark.parametrize(
    ("page", "row", "says"),
    [("no table", ["a"], "0 tables"), (PAGE, ["a", "b"], "2 cells and 3 columns")],
)
def test_a_row_that_fits_no_table_is_an_error(page: str, row: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        with_rows(page, [row], key=1)


def test_every_page_that_tests_write_takes_rows() -> None:
    """A page that lost its table would fail a run of an hour at its end."""
    pages = [*(ROOT / "docs/measured").glob("*.md"), ROOT / "docs/monitor/watchdog.md"]
    written = [page.name for page in pages if "| run |" in page.read_text()]

    assert sorted(written) == [
        "alert-faults.md",
        "batch.md",
        "check-matrix.md",
        "doctor.md",
        "driver-upgrade-faults.md",
        "environment-faults.md",
        "flag-start-rules.md",
        "group-faults.md",
        "hostile-inputs.md",
        "interrupted-deploys.md",
        "long-tests.md",
        "measure-client.md",
        "measure-fleet.md",
        "mutants.md",
        "outlier-matrix.md",
        "upgrade-faults.md",
        "upgrade-under-load.md",
        "watchdog.md",
        "written-faults.md",
    ]


@pytest.mark.parametrize(
    ("cases", "says"),
    [
        ('<testcase name="a"/><testcase name="b"/>', "passed: 2 of 2 passed"),
        ('<testcase name="a"/><testcase name="b"><failure/></testcase>', "failed: 1 of 2 passed"),
        ('<testcase name="a"><skipped/></testcase>', "failed: 0 of 1 passed; not: a"),
        ("", "failed: 0 of 0 passed"),
    ],
)
def test_a_part_passed_only_if_every_test_ran_and_passed(
    tmp_path: Path, cases: str, says: str
) -> None:
    report = tmp_path / "report.xml"
    report.write_text(f"<testsuites><testsuite>{cases}</testsuite></testsuites>")

    asked = [f"tests/test_a.py::{name}" for name in re.findall('name="(.)"', cases)]
    assert verdict(report, asked).startswith(says)
    assert verdict(tmp_path / "none", asked).startswith("failed: ")


def test_a_part_that_its_time_limit_cut_off_names_the_tests_that_never_ran(tmp_path: Path) -> None:
    """pytest leaves them out of its report, which then has no failure."""
    report = tmp_path / "report.xml"
    report.write_text('<testsuites><testsuite><testcase name="a[x::1]"/></testsuite></testsuites>')
    asked = ["tests/test_a.py::a[x::1]", "tests/test_a.py::a[x::2]", "tests/test_b.py::Class::b"]

    assert verdict(report, asked) == "failed: 1 of 3 passed; not run: a[x::2], b"
