"""Rows that test runs write into tables of docs/: each ends with the run that it is of.

A row is written only while `make test-long` runs (`WRITE` is set). Only rows change: what a person
wrote around the table stays, and so do the rows of what this run leaves out.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime

from tests.support.checkout import ROOT, commit

WRITE = "GPUFLEET_WRITE_MEASURED"
"""The environment variable with which a run writes its rows."""

RUN = "run"
"""The heading of the last column, which makes a table one that is written."""


def note(page: str, *cells: str, key: int = 1) -> None:
    """
    Put one row into the table of `page`, a path below docs/.

    The row whose first `key` cells are the same is replaced; without one the new row comes last.
    """
    if os.environ.get(WRITE):
        file = ROOT / "docs" / page
        file.write_text(with_rows(file.read_text(), [[*cells, of_this_run()]], key=key))


def of_this_run() -> str:
    """Return the last cell of a row: the day and the commit."""
    return f"{datetime.now(UTC):%Y-%m-%d}, {commit()}"


def with_rows(text: str, rows: Iterable[Sequence[str]], *, key: int) -> str:
    """
    Return a page with these rows in its table, the one whose last column is `run`.

    A row with the same first `key` cells is replaced. Raises ValueError if the page has no such
    table, or if a row has another number of cells than its heading.
    """
    lines = text.splitlines()
    headings = [at for at, line in enumerate(lines) if line.endswith(f"| {RUN} |")]
    if len(headings) != 1:
        raise ValueError(f"{len(headings)} tables with a last column `{RUN}`: one is needed")
    first = headings[0] + 2
    end = next(at for at in range(first, len(lines) + 1) if not [*lines, ""][at].startswith("|"))
    table = {tuple(cells_of(line)[:key]): line for line in lines[first:end]}
    wanted = len(cells_of(lines[headings[0]]))
    for row in rows:
        cells = [" ".join(cell.replace("|", ":").split()) for cell in row]
        if len(cells) != wanted:
            raise ValueError(f"{len(cells)} cells and {wanted} columns: {cells}")
        table[tuple(cells[:key])] = f"| {' | '.join(cells)} |"
    return "\n".join([*lines[:first], *table.values(), *lines[end:]]) + "\n"


def cells_of(line: str) -> list[str]:
    """Return the cells of a table's line."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]
