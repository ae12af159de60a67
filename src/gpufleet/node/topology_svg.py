"""Draw a node's interconnect as SVG, for tickets and documents.

`svg` returns the text of the file. It is plain SVG 1.1 without scripts, fonts or links. The
background is white, so that the drawing is readable on a dark page. Each NVLink island has a frame
with its GPUs in two rows. The GPUs of a NUMA node have a common background. The links are drawn as
follows:

* GPUs on NVSwitches (`interconnect_warnings.switch_links`): a bar between the rows, with a line to
  each GPU. The line is red if the GPU has fewer links than others.
* Directly wired GPUs: one line for each pair. Lines between islands are dashed.
* GPUs without NVLink: brackets below a row. The nearest PCIe class comes first.

Every line is labelled with its number of links, and every bracket with its PCIe class.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from textwrap import wrap
from xml.etree import ElementTree as ET

from gpufleet.formatting import ranges
from gpufleet.node.interconnect import Interconnect, Pair
from gpufleet.node.interconnect_warnings import switch_links
from gpufleet.node.topology_text import describe_gpus, island_heading
from gpufleet.sanitize import xml_text

# Pixels.
BOX = (140, 62)
GAP = (56, 84)  # between boxes: space for links and their labels
PAD = 26
TITLE = 30
FOOT = 24  # for the brackets below the last row
PAGE = 1000  # frames beyond this width go below

COLUMNS = 4
WARNING_LETTERS = 118

INK, PALE, LINK, RED = "#1a1a1a", "#5f6368", "#2e7d32", "#b3261e"

Point = tuple[float, float]


@dataclass
class _Frame:
    """
    The frame of an island, or of the GPUs without NVLink.

    It has rows of GPUs and the corner of each GPU's box.
    """

    title: str
    rows: list[list[int]]
    at: dict[int, Point] = field(default_factory=dict)

    @property
    def gpus(self) -> tuple[int, ...]:
        return tuple(sorted(gpu for row in self.rows for gpu in row))

    @property
    def size(self) -> Point:
        columns = max(map(len, self.rows))
        width = columns * BOX[0] + (columns - 1) * GAP[0] + 2 * PAD
        height = len(self.rows) * BOX[1] + (len(self.rows) - 1) * GAP[1] + 2 * PAD + TITLE + FOOT
        return width, height

    def place(self, corner: Point) -> None:
        x, y = corner
        for number, row in enumerate(self.rows):
            for column, gpu in enumerate(row):
                self.at[gpu] = (
                    x + PAD + column * (BOX[0] + GAP[0]),
                    y + TITLE + PAD + number * (BOX[1] + GAP[1]),
                )


def svg(node: Interconnect) -> str:
    """Return the drawing as the text of an SVG file."""
    frames = list(_frames(node))
    corners, size = _flow([frame.size for frame in frames])
    notes = [
        line
        for warning in node.warnings
        for line in wrap(f"\u26a0 {warning}", WARNING_LETTERS, subsequent_indent="   ")
    ]
    width, height = max(size[0], 900), 76 + size[1] + 18 * len(notes) + PAD
    page = ET.Element(
        "svg",
        xmlns="http://www.w3.org/2000/svg",
        viewBox=f"0 0 {width:g} {height:g}",
        width=f"{width:g}",
        height=f"{height:g}",
        role="img",
    )
    page.set("font-family", "sans-serif")
    ET.SubElement(page, "title").text = xml_text(f"{node.name}: {describe_gpus(node)}")
    _box(page, (0, 0), (width, height), fill="#ffffff", rounded=0)
    _text(page, (PAD, 32), f"{node.name}: {describe_gpus(node)}", size=18, weight="bold")
    _text(page, (PAD, 54), f"tensor parallel up to {node.max_tp}: {node.why}")
    for frame, (x, y) in zip(frames, corners, strict=True):
        frame.place((x, y + 76))
        _draw_frame(page, node, frame, (x, y + 76))
    _draw_between(page, node, frames)
    for frame in frames:
        for gpu, corner in frame.at.items():
            _draw_gpu(page, node, gpu, corner)
    for number, line in enumerate(notes):
        _text(page, (PAD, 76 + size[1] + 18 * (number + 1)), line, fill=RED)
    ET.indent(page)
    return ET.tostring(page, encoding="unicode") + "\n"


# -- layout ------------------------------------------------------------------------------


def _frames(node: Interconnect) -> Iterator[_Frame]:
    for island in node.islands:
        if len(island) > 1:
            yield _Frame(island_heading(node, island), _two_rows(island))
    alone = sorted(gpu for island in node.islands if len(island) == 1 for gpu in island)
    if alone:
        groups = [list(group) for _, group in groupby(alone, key=node.numa.get)]
        rows = [
            group[at : at + COLUMNS] for group in groups for at in range(0, len(group), COLUMNS)
        ]
        yield _Frame(f"without NVLink: {ranges(alone)}", rows)


def _two_rows(gpus: tuple[int, ...]) -> list[list[int]]:
    if len(gpus) == 2:
        return [list(gpus)]
    half = (len(gpus) + 1) // 2
    return [list(gpus[:half]), list(gpus[half:])]


def _flow(sizes: Iterable[Point]) -> tuple[list[Point], Point]:
    """Place frames from left to right, and then below. Return their corners and the total size."""
    corners: list[Point] = []
    x, y, below, widest = float(PAD), 0.0, 0.0, 0.0
    for width, height in sizes:
        if x > PAD and x + width > PAGE:
            x, y = float(PAD), below
        corners.append((x, y))
        x += width + PAD
        below = max(below, y + height + PAD)
        widest = max(widest, x)
    return corners, (widest, below)


def _middle(corner: Point) -> Point:
    return corner[0] + BOX[0] / 2, corner[1] + BOX[1] / 2


# -- drawing ---------------------------------------------------------------------------------------


def _draw_frame(page: ET.Element, node: Interconnect, frame: _Frame, corner: Point) -> None:
    _box(page, corner, frame.size, fill="#fafafa", stroke=PALE)
    _text(page, (corner[0] + PAD, corner[1] + 22), frame.title, size=14, weight="bold")
    for row in frame.rows:
        for numa, group in groupby(row, key=node.numa.get):
            if numa is not None:
                _draw_ground(page, [frame.at[gpu] for gpu in group], f"NUMA {numa}")
    widths = node.widths(frame.gpus)
    if not any(widths.values()):
        _draw_tiers(page, node, frame)
    elif len(frame.gpus) > 2 and (links := switch_links(widths)) is not None:
        _draw_switch(page, frame, links)
    else:
        for pair, width in widths.items():
            _draw_link(page, frame, pair, width)


def _draw_ground(page: ET.Element, corners: list[Point], title: str) -> None:
    left, top = corners[0][0] - 10, corners[0][1] - 16
    width = corners[-1][0] + BOX[0] + 10 - left
    _box(page, (left, top), (width, BOX[1] + 24), fill="#e8eef7")
    _text(page, (left + 10, top + 12), title, size=10, fill=PALE)


def _draw_switch(page: ET.Element, frame: _Frame, links: dict[int, int]) -> None:
    """Draw the bar between the two rows, and a line from each GPU to the bar."""
    middles = {gpu: _middle(corner) for gpu, corner in frame.at.items()}
    above, below = (middles[row[0]][1] for row in frame.rows)
    bar = (above + below) / 2
    left = min(x for x, _ in middles.values())
    right = max(x for x, _ in middles.values())
    widest = max(links.values())
    for gpu, (x, y) in middles.items():
        colour = LINK if links[gpu] == widest else RED
        _line(page, (x, y), (x, bar), colour)
        edge = y + (BOX[1] / 2 if y < bar else -BOX[1] / 2)
        _label(page, (x, (edge + bar) / 2), f"NV{links[gpu]}", colour)
    _box(page, (left - 12, bar - 7), (right - left + 24, 14), fill=LINK, rounded=7)
    _text(page, (left, bar + 4), "NVLink, every pair", size=10, fill="#ffffff")


def _draw_link(page: ET.Element, frame: _Frame, pair: Pair, width: int) -> None:
    """Draw the line of a directly wired pair. The label is nearer to the first GPU."""
    (x, y), (to_x, to_y) = (_middle(frame.at[gpu]) for gpu in pair)
    rows = {gpu: number for number, row in enumerate(frame.rows) for gpu in row}
    columns = {gpu: at for row in frame.rows for at, gpu in enumerate(row)}
    if rows[pair[0]] == rows[pair[1]] and abs(columns[pair[0]] - columns[pair[1]]) > 1:
        _arc(page, (x, y), (to_x, to_y), f"NV{width}", LINK)
        return
    _line(page, (x, y), (to_x, to_y), LINK)
    straight = x == to_x or y == to_y
    part = 0.5 if straight else 0.4
    _label(page, (x + (to_x - x) * part, y + (to_y - y) * part), f"NV{width}", LINK)


def _draw_between(page: ET.Element, node: Interconnect, frames: list[_Frame]) -> None:
    """Draw the NVLinks between islands, which exist in a mesh of eight GPUs."""
    home = {gpu: frame for frame in frames for gpu in frame.gpus}
    for (one, other), width in node.nvlink.items():
        if home[one] is not home[other]:
            start, end = home[one].at[one], home[other].at[other]
            _arc(page, _middle(start), _middle(end), f"NV{width}", PALE)


def _draw_tiers(page: ET.Element, node: Interconnect, frame: _Frame) -> None:
    """Draw brackets below a row for the PCIe classes of its GPUs. The nearest class comes first."""
    for row in frame.rows:
        top = frame.at[row[0]][1] + BOX[1] + 14
        seen: set[tuple[int, ...]] = set()
        for tier, groups in node.tiers.items():
            inside = [tuple(gpu for gpu in row if gpu in group) for group in groups]
            new = [gpus for gpus in inside if len(gpus) > 1 and gpus not in seen]
            for gpus in new:
                left, right = (_middle(frame.at[gpu])[0] for gpu in (gpus[0], gpus[-1]))
                _line(page, (left, top), (right, top), PALE)
                _label(page, ((left + right) / 2, top), tier, PALE)
            seen.update(new)
            top += 15 if new else 0


def _draw_gpu(page: ET.Element, node: Interconnect, gpu: int, corner: Point) -> None:
    near = node.nearest_nics.get(gpu, [])
    lines = [f"{nic} {name}" for nic, name in near[:2]]
    if len(near) > 2:
        lines[1] = f"+{len(near) - 1} more {near[0][1]}"
    _box(page, corner, BOX, fill="#ffffff", stroke=INK)
    x, y = corner
    _text(page, (x + 10, y + 20), f"GPU {gpu}", weight="bold")
    for number, line in enumerate(lines):
        _text(page, (x + 10, y + 37 + 15 * number), line, size=11, fill=PALE)


# -- shapes ----------------------------------------------------------------------------------------


def _box(
    page: ET.Element,
    corner: Point,
    size: Point,
    *,
    fill: str,
    stroke: str = "none",
    rounded: int = 6,
) -> None:
    ET.SubElement(
        page,
        "rect",
        x=f"{corner[0]:g}",
        y=f"{corner[1]:g}",
        width=f"{size[0]:g}",
        height=f"{size[1]:g}",
        rx=f"{rounded}",
        fill=fill,
        stroke=stroke,
    )


def _line(page: ET.Element, start: Point, end: Point, colour: str) -> None:
    shape = ET.SubElement(
        page,
        "line",
        x1=f"{start[0]:g}",
        y1=f"{start[1]:g}",
        x2=f"{end[0]:g}",
        y2=f"{end[1]:g}",
        stroke=colour,
    )
    shape.set("stroke-width", "2")


def _arc(page: ET.Element, start: Point, end: Point, label: str, colour: str) -> None:
    """Draw a curve around the boxes in between, with its label at the top."""
    (x, y), (to_x, to_y) = start, end
    # Sideways by a quarter of the way: enough to pass the boxes in between.
    bend = (x + to_x) / 2 + (to_y - y) / 4, (y + to_y) / 2 - abs(to_x - x) / 4
    path = f"M {x:g} {y:g} Q {bend[0]:g} {bend[1]:g} {to_x:g} {to_y:g}"
    shape = ET.SubElement(page, "path", d=path, fill="none", stroke=colour)
    shape.set("stroke-width", "2")
    shape.set("stroke-dasharray", "6 4")
    top = (x + 2 * bend[0] + to_x) / 4, (y + 2 * bend[1] + to_y) / 4
    _label(page, top, label, colour)


def _label(page: ET.Element, middle: Point, words: str, colour: str) -> None:
    """Draw a label on a line, with its own background."""
    width = 8 * len(words) + 6
    _box(page, (middle[0] - width / 2, middle[1] - 8), (width, 16), fill="#ffffff", rounded=3)
    shape = _text(page, (middle[0], middle[1] + 4), words, size=11, fill=colour, weight="bold")
    shape.set("text-anchor", "middle")


def _text(
    page: ET.Element,
    start: Point,
    words: str,
    *,
    size: int = 13,
    fill: str = INK,
    weight: str = "normal",
) -> ET.Element:
    shape = ET.SubElement(page, "text", x=f"{start[0]:g}", y=f"{start[1]:g}", fill=fill)
    shape.set("font-size", str(size))
    shape.set("font-weight", weight)
    shape.text = xml_text(words)
    return shape
