"""
Print tables on a terminal.

rich takes 20 ms to load, so it is imported only for printing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Collection
from typing import TYPE_CHECKING, Any

from gpufleet.sanitize import printable

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table
    from rich.text import Text

# Wide enough for every line without a terminal: a program that reads a table wants no folds.
UNFOLDED = 1000


def display(what: RenderableType) -> None:
    """Print to standard output, wrapped at the terminal's width if it is a terminal."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else UNFOLDED, highlight=False).print(what)


def new_table(*columns: str, whole: Collection[str] = ()) -> Table:
    """
    Return an empty table in gpufleet's style.

    Columns in `whole` are never wrapped, because people copy their values, such as flags.
    """
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold", no_wrap=column in whole)
    return table


def add_row(table: Table, *cells: str | Text, style: str = "") -> None:
    """Add cells as plain text, which neither rich nor the terminal interprets."""
    from rich.text import Text

    # Text: what operators write may look like rich's own markup. Printable: what nodes say may be
    # an order to the terminal.
    table.add_row(
        *(Text(printable(cell)) if isinstance(cell, str) else cell for cell in cells), style=style
    )


def show_value(value: Any) -> str:
    """Return a setting's value as the text of a table cell."""
    return value if isinstance(value, str) else json.dumps(value, default=str)
