"""A table that one test walks: every row runs, and a failure names each row that failed."""

from __future__ import annotations

import functools
import inspect
import traceback
from collections.abc import Callable, Iterable
from typing import Any

import pytest
from _pytest.mark.structures import ParameterSet

Test = Callable[..., None]
LONGEST_NAME = 100
TIMEOUT = "from pytest-timeout"
"""Is in what pytest-timeout raises."""


def each_row(
    names: str | Iterable[str],
    rows: Iterable[Any],
    ids: Iterable[str] | Callable[[Any], Any] | None = None,
) -> Callable[[Test], Test]:
    """Run a test for each row, as one test. Takes what `pytest.mark.parametrize` takes, and stacks
    like it.

    For tables that need nothing set up anew for a row: the test's fixtures are made once. A table
    without a row fails. A skipped row is not a failure; rows that are all skipped skip the test.
    """
    columns = [name.strip() for name in names.split(",")] if isinstance(names, str) else [*names]
    table = [_row(row, len(columns)) for row in rows]
    given = None if ids is None or callable(ids) else [*ids]
    named = [
        (row_id or (given[at] if given else _name(values, ids)), values)
        for at, (row_id, values) in enumerate(table)
    ]

    def decorate(test: Test) -> Test:
        @functools.wraps(test)
        def walk(*args: Any, **fixtures: Any) -> None:
            assert named, f"{test.__name__} has no rows"
            failed: list[str] = []
            first: BaseException | None = None
            skipped = 0
            for name, values in named:
                try:
                    test(*args, **fixtures, **dict(zip(columns, values, strict=True)))
                except pytest.skip.Exception:
                    skipped += 1
                except (Exception, pytest.fail.Exception) as error:  # noqa: BLE001  # named below
                    failed.append(f"[{name}] {_told(error)}")
                    first = first or error
                    if TIMEOUT in str(error):
                        failed.append("the rows after it did not run")
                        break
            if skipped == len(named):
                pytest.skip(f"all {skipped} rows are skipped")
            if failed:
                lines = "\n".join(failed).replace("\n", "\n    ")
                # A report travels as UTF-8.
                lines = lines.encode(errors="backslashreplace").decode()
                raise AssertionError(
                    f"{len(failed)} of {len(named)} rows failed:\n    {lines}"
                ) from first

        signature = inspect.signature(test)
        others = [each for name, each in signature.parameters.items() if name not in columns]
        assert len(others) == len(signature.parameters) - len(columns), (test.__name__, columns)
        walk.__signature__ = signature.replace(parameters=others)  # type: ignore[attr-defined]
        return walk

    return decorate


def _row(row: Any, columns: int) -> tuple[str, tuple[Any, ...]]:
    """Return a row's own name, or "", and its values."""
    if isinstance(row, ParameterSet):
        assert not row.marks, "a row that has a mark is a test of its own: use parametrize"
        return str(row.id or ""), tuple(row.values)
    values = (row,) if columns == 1 else tuple(row)
    assert len(values) == columns, f"{columns} columns, and a row of {len(values)}: {row!r:.100}"
    return "", values


def _name(values: tuple[Any, ...], how: Any) -> str:
    return "-".join(
        str((how(value) if how else None) or getattr(value, "__name__", None) or value)
        for value in values
    )[:LONGEST_NAME]


def _told(error: BaseException) -> str:
    """Return where a row failed, and the error."""
    frames = traceback.extract_tb(error.__traceback__)
    at = next(frame for frame in reversed(frames) if "site-packages" not in frame.filename)
    return f"{at.filename.rsplit('/', 1)[-1]}:{at.lineno}: {type(error).__name__}: {error}"
