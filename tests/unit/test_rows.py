"""One test walks a table, and its failure names every row that failed."""

from __future__ import annotations

import inspect

import pytest
import pytest_timeout

from tests.support.rows import TIMEOUT, each_row


def failure(test, **fixtures) -> str:
    """Return what a test that walks rows fails with."""
    with pytest.raises(AssertionError) as caught:
        test(**fixtures)
    return str(caught.value)


def test_every_row_runs_and_every_failed_one_is_named_with_its_error():
    rows = [(1, "a"), (2, "b"), pytest.param(3, "c", id="the third"), (4, "d")]

    @each_row(("n", "word"), rows)
    def small(n, limit, word):
        assert n < limit, word
        if n == 1:
            raise ValueError("not one")

    lines = failure(small, limit=3).splitlines()

    assert lines[0] == "3 of 4 rows failed:"
    assert [line.split()[0] for line in lines[1:] if line.startswith("    [")] == [
        "[1-a]",
        "[the",
        "[4-d]",
    ]
    assert "ValueError: not one" in lines[1]
    assert "test_rows.py:" in lines[1]
    assert "AssertionError: c" in lines[2]
    assert "[2-b]" not in "".join(lines)


@each_row("n", [0, 1, 2])
def test_fixtures_are_given_beside_the_row(tmp_path, n):
    assert tmp_path.is_dir()
    (tmp_path / f"{n}").touch()
    assert len([*tmp_path.iterdir()]) == n + 1


def test_pytest_is_told_of_fixtures_only():
    walk = inspect.signature(test_fixtures_are_given_beside_the_row)

    assert [*walk.parameters] == ["tmp_path"]


def test_a_table_without_rows_fails():
    def row(n):
        assert n

    assert failure(each_row("n", [])(row)) == "row has no rows"


def test_two_tables_give_every_pair():
    @each_row("a", [1, 2])
    @each_row("b", [10, 20])
    def total(a, b):
        assert a + b in (11, 22)

    found = failure(total)

    assert found.startswith("2 of 2 rows failed")
    assert found.count("1 of 2 rows failed") == 2


def test_a_row_that_fails_by_pytest_is_named_and_one_that_is_skipped_is_no_failure():
    @each_row("n", ["fails", "raises nothing", "skips"])
    def row(n):
        if n == "fails":
            pytest.fail("by hand")
        if n == "raises nothing":
            with pytest.raises(ValueError, match="never"):
                pass
        pytest.skip("not here")

    found = failure(row)

    assert found.startswith("2 of 3 rows failed")
    assert "by hand" in found
    assert "[raises nothing]" in found


def test_rows_that_are_all_skipped_skip_the_test():
    @each_row("n", [1, 2])
    def row(n):
        pytest.skip("not here")

    with pytest.raises(pytest.skip.Exception, match="all 2 rows"):
        row()


def test_a_row_that_runs_out_of_time_is_named_and_ends_the_walk():
    assert TIMEOUT in pytest_timeout.PYTEST_FAILURE_MESSAGE

    @each_row("n", ["quick", "hangs", "after"])
    def row(n):
        assert n != "after"
        if n == "hangs":
            pytest.fail(pytest_timeout.PYTEST_FAILURE_MESSAGE % 60)

    found = failure(row)

    assert "[hangs] " in found
    assert "[after]" not in found


def test_a_row_with_a_mark_and_a_row_of_another_length_are_refused():
    with pytest.raises(AssertionError, match="has a mark"):
        each_row("n", [pytest.param(1, marks=pytest.mark.slow)])
    with pytest.raises(AssertionError, match="2 columns, and a row of 1"):
        each_row("a, b", [(1,)])


def test_a_table_of_names_that_the_test_lacks_is_refused():
    with pytest.raises(AssertionError, match="other"):
        each_row("other", [1])(lambda: None)
