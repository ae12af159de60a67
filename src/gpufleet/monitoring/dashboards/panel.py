"""Parts of a dashboard as values: panels, their queries, and the colours' meanings. Pure.

`monitoring/dashboards/grafana.py` makes Grafana's JSON of them. Ids of units and colours are
Grafana's own (@grafana/data 13.2.3, valueFormats/categories and
themes/createVisualizationColors).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gpufleet.errors import FleetError

COLUMNS = 24  # of Grafana's grid; a grid row is 30 pixels high, with 8 between


class Unit(StrEnum):
    """The unit of a panel's numbers."""

    COUNT = "short"
    RATIO = "percentunit"  # 0..1, written as percent
    SECONDS = "s"
    BYTES = "bytes"  # of 1024
    BYTES_PER_SECOND = "Bps"
    CELSIUS = "celsius"
    WATTS = "watt"
    HERTZ = "hertz"
    PER_SECOND = "cps"
    REQUESTS_PER_SECOND = "reqps"
    TOKENS_PER_SECOND = "suffix: tok/s"
    AGO = "dateTimeFromNow"  # takes milliseconds since 1970
    STATE = "none"  # the mappings give each number a word


class Kind(StrEnum):
    """The panel types of Grafana that are used here; none of them needs Angular."""

    LINES = "timeseries"
    STAT = "stat"
    TABLE = "table"
    HEATMAP = "heatmap"
    TIMELINE = "state-timeline"


class Colour(StrEnum):
    """The meaning of colours, equal on all dashboards."""

    GOOD = "green"
    LOOK = "orange"
    BAD = "red"
    NEUTRAL = "blue"
    QUIET = "super-light-green"  # good, but pale: a strong colour would hide the few bad values
    NONE = "transparent"
    PLAIN = "text"


@dataclass(frozen=True)
class Step:
    """A colour and the value from which it applies; the first step has no lower bound."""

    at: float | None
    colour: Colour


@dataclass(frozen=True)
class ValueDisplay:
    """A number shown as a word, or a label's value shown in a colour."""

    value: float | str
    text: str
    colour: Colour


@dataclass(frozen=True)
class Query:
    """
    One query of a panel.

    Attributes:
        expr: PromQL, with the dashboard's variables as `$instance`.
        legend: a series' name, with its labels as `{{gpu}}`.
        limit: whether this query is a limit for the others; drawn dashed and red.
    """

    expr: str
    legend: str = ""
    limit: bool = False


@dataclass(frozen=True)
class Column:
    """
    One column of a table.

    Attributes:
        heading: its title, unique in the table.
        label: the label to show; or
        query: the number of the query whose value to show, from 0.
        unit, steps, shown: of that value; `steps` colour a cell's background.
        link: the dashboard that a cell opens: the uid of one with a variable of the name `label`.
        width: in pixels; None: the remaining space.
    """

    heading: str
    label: str = ""
    query: int | None = None
    unit: Unit = Unit.COUNT
    steps: tuple[Step, ...] = ()
    shown: tuple[ValueDisplay, ...] = ()
    link: str = ""
    width: int | None = None


@dataclass(frozen=True)
class Panel:
    """
    One panel.

    Attributes:
        what_to_do: comes in its description after the meaning of its metrics.
        empty: the meaning of an empty answer; "": it is never empty on a healthy fleet.
        steps, shown: colours and words of values; `lines` draws the steps as lines.
        minimum, maximum: of the axis; None: from the values.
        stacked: draw series on top of each other, for their sum.
    """

    kind: Kind
    title: str
    unit: Unit
    queries: tuple[Query, ...]
    what_to_do: str
    width: int
    height: int
    steps: tuple[Step, ...] = ()
    shown: tuple[ValueDisplay, ...] = ()
    columns: tuple[Column, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    decimals: int | None = None
    lines: bool = False
    stacked: bool = False
    empty: str = ""


@dataclass(frozen=True)
class Row:
    """A heading and the panels below it; each line of panels fills the width."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Variable:
    """
    A choice at the top of a dashboard, from the values of a label.

    Attributes:
        name: as in `$name`.
        label: what stands before it.
        values: the query of its values: label_values(...).
        many: several may be chosen, and all are at first; else the first one is.
    """

    name: str
    label: str
    values: str
    many: bool = False


@dataclass(frozen=True)
class Mark:
    """A moment that is marked in every panel: when `expr` is 1."""

    name: str
    expr: str
    text: str
    colour: Colour = Colour.NEUTRAL


@dataclass(frozen=True)
class Dashboard:
    """
    One dashboard.

    Attributes:
        uid: Grafana's name for it in addresses and links, never changed.
        question: the question that it answers.
        hours: the initial time range.
    """

    uid: str
    title: str
    question: str
    rows: tuple[Row, ...]
    variables: tuple[Variable, ...] = ()
    marks: tuple[Mark, ...] = ()
    hours: int = 3


@dataclass(frozen=True)
class Place:
    """A position in the grid, in its columns and rows."""

    x: int
    y: int
    w: int
    h: int


def place_panels(rows: tuple[Row, ...]) -> tuple[tuple[Row | Panel, Place], ...]:
    """
    Return every heading and panel with its place, from top to bottom.

    Raises `FleetError` if panels of one line do not fill it or differ in height.
    """
    result: list[tuple[Row | Panel, Place]] = []
    y = 0
    for row in rows:
        result.append((row, Place(0, y, COLUMNS, 1)))
        y += 1
        x = 0
        for panel in row.panels:
            if (x and panel.height != result[-1][1].h) or x + panel.width > COLUMNS:
                raise FleetError(f"{row.title}: {panel.title!r} does not fit into its line")
            result.append((panel, Place(x, y, panel.width, panel.height)))
            x += panel.width
            if x == COLUMNS:
                x, y = 0, y + panel.height
        if x:
            raise FleetError(f"{row.title}: its last line ends at column {x} of {COLUMNS}")
    return tuple(result)
