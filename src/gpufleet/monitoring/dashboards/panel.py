"""
Define the parts of a dashboard: panels, queries and the meanings of colours. Pure.

`monitoring/dashboards/grafana.py` converts them to Grafana's JSON. The ids of units and colours are
those of Grafana (@grafana/data 13.2.3, valueFormats/categories and
themes/createVisualizationColors).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from gpufleet.errors import FleetError

COLUMNS = 24  # of Grafana's grid, whose rows are 30 pixels high, with 8 pixels between them


class Unit(StrEnum):
    """The unit of a panel's numbers."""

    COUNT = "short"
    RATIO = "percentunit"  # from 0 to 1, displayed in percent
    SECONDS = "s"
    BYTES = "bytes"  # displayed with factors of 1024
    BYTES_PER_SECOND = "Bps"
    CELSIUS = "celsius"
    WATTS = "watt"
    HERTZ = "hertz"
    PER_SECOND = "cps"
    REQUESTS_PER_SECOND = "reqps"
    TOKENS_PER_SECOND = "suffix: tok/s"
    AGO = "dateTimeFromNow"  # takes milliseconds since 1970
    STATE = "none"  # each number is displayed as a word


class Kind(StrEnum):
    """The types of Grafana's panels that gpufleet uses. None of them needs Angular."""

    LINES = "timeseries"
    STAT = "stat"
    TABLE = "table"
    HEATMAP = "heatmap"
    TIMELINE = "state-timeline"


class Colour(StrEnum):
    """The meanings of colours, which are the same on all dashboards."""

    GOOD = "green"
    LOOK = "orange"
    BAD = "red"
    NEUTRAL = "blue"
    QUIET = "super-light-green"  # good, but pale: a strong colour would hide the few bad values
    NONE = "transparent"
    PLAIN = "text"


@dataclass(frozen=True)
class Step:
    """A colour, and the value from which it applies. The first step has no lower limit."""

    at: float | None
    colour: Colour


@dataclass(frozen=True)
class ValueDisplay:
    """How a value is displayed: a number as a word, or the value of a label in a colour."""

    value: float | str
    text: str
    colour: Colour


@dataclass(frozen=True)
class Query:
    """
    One query of a panel.

    Attributes:
        expr: the expression in PromQL, with the dashboard's variables such as `$instance`.
        legend: the name of a series, with its labels such as `{{gpu}}`.
        limit: whether the query is a limit for the other queries. A limit is drawn dashed and red.
    """

    expr: str
    legend: str = ""
    limit: bool = False


@dataclass(frozen=True)
class Column:
    """
    One column of a table. It shows either a label or the value of a query.

    Attributes:
        heading: the title, which must be unique in the table.
        label: the label to show, or "".
        value: the expression of the value to show, or "".
        unit, steps, shown: how the value is displayed. `steps` colour the background of a cell.
        link: the uid of the dashboard that a cell opens. It has a variable with the name `label`.
        width: the width in pixels. None uses the remaining space.
    """

    heading: str
    value: str = ""
    label: str = ""
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
        queries: those of a table are for its labels, and its columns have the others.
        what_to_do: advice for the reader. The description has it before the meaning of the metrics.
        empty: what an empty answer means. "" if a healthy fleet always has values.
        steps, shown: colours and words for values.
        lines: whether the steps are drawn as lines.
        minimum, maximum: the ends of the axis. None: the ends follow the values.
        stacked: whether the series are stacked, so that the panel shows their sum.
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

    @property
    def all_queries(self) -> tuple[Query, ...]:
        """Return the panel's queries and those of its columns, in Grafana's order."""
        return self.queries + tuple(Query(each.value) for each in self.columns if each.value)


@dataclass(frozen=True)
class Row:
    """A heading and the panels below it. Each line of panels fills the whole width."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Variable:
    """
    A selection at the top of a dashboard, from the values of a label.

    Attributes:
        name: the name of the variable, used as `$name`.
        label: the label that is displayed.
        values: the query for the values: label_values(...).
        many: whether several values may be selected. If so, all are selected at first. Otherwise
            the first value is selected.
    """

    name: str
    label: str
    values: str
    many: bool = False


@dataclass(frozen=True)
class Mark:
    """A mark in every panel, at each time at which `expr` is 1."""

    name: str
    expr: str
    text: str
    colour: Colour = Colour.NEUTRAL


@dataclass(frozen=True)
class Dashboard:
    """
    One dashboard.

    Attributes:
        uid: Grafana's id in URLs and links. It never changes.
        question: the question that the dashboard answers.
        hours: the time range in hours when the dashboard is opened.
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
    """A position and size in the grid, in columns and rows."""

    x: int
    y: int
    w: int
    h: int


def place_panels(rows: tuple[Row, ...]) -> tuple[tuple[Row | Panel, Place], ...]:
    """
    Return every heading and panel with its place, from top to bottom.

    Raises `FleetError` if the panels of a line do not fill the line or have different heights.
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
