"""Define the parts of a dashboard: panels, queries and the meanings of colours. Pure.

`monitoring/dashboards/grafana.py` converts them to Grafana's JSON. The ids of units and colours are
Grafana's own (@grafana/data 13.2.3, valueFormats/categories and themes/createVisualizationColors).
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
    """The panel types of Grafana in use; none of them needs Angular."""

    LINES = "timeseries"
    STAT = "stat"
    TABLE = "table"
    HEATMAP = "heatmap"
    TIMELINE = "state-timeline"


class Colour(StrEnum):
    """The meanings of colours, equal on all dashboards."""

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
        expr: PromQL, with the dashboard's variables such as `$instance`.
        legend: a series' name, with its labels such as `{{gpu}}`.
        limit: whether the query is a limit for the others, drawn dashed and red.
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
        query: the number, from 0, of the query whose value is shown.
        unit, steps, shown: the display of this value; `steps` colour a cell's background.
        link: the uid of the dashboard that a cell opens, which has a variable named `label`.
        width: in pixels; None takes the remaining space.
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
        what_to_do: advice, written in the description before the meaning of the metrics.
        empty: the meaning of an empty answer; "" if a healthy fleet always has values.
        steps, shown: colours and words of values; `lines` draws the steps as lines.
        minimum, maximum: the ends of the axis; None fits the values.
        stacked: whether series are stacked to show their sum.
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
    """A heading with the panels below it. Each line of panels fills the width."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Variable:
    """
    A choice at the top of a dashboard, from the values of a label.

    Attributes:
        name: the variable's name in `$name`.
        label: its displayed label.
        values: the query for its values: label_values(...).
        many: whether several may be selected; initially all are selected, otherwise the first.
    """

    name: str
    label: str
    values: str
    many: bool = False


@dataclass(frozen=True)
class Mark:
    """A moment marked in every panel, when `expr` is 1."""

    name: str
    expr: str
    text: str
    colour: Colour = Colour.NEUTRAL


@dataclass(frozen=True)
class Dashboard:
    """
    One dashboard.

    Attributes:
        uid: Grafana's id in URLs and links, never changed.
        question: the question that the dashboard answers.
        hours: the initial time range in hours.
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
