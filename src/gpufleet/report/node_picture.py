"""Draw the GPUs of a node as a small SVG picture: their links, their neighbours, their replicas.

Pure. A frame is an NVLink island, or it has the GPUs without NVLink. It has rows of at most four
GPUs, with one background for each NUMA node. Below a row is a bar for NVLink, or brackets with the
nearest PCIe class. The picture is not wider than a phone's screen. It uses the page's colours, and
everything that a colour shows is also in a text. `gpufleet topology --svg` draws a larger picture
with every pair of GPUs.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from xml.etree import ElementTree as ET

from gpufleet.formatting import ranges
from gpufleet.report.fleet_document import Gpu, Island, Node
from gpufleet.report.node_parts import gpu_names
from gpufleet.sanitize import xml_text

# Pixels.
WIDTH = 376
_LEFT, _BOX, _HIGH, _STEP = 18, 81, 66, 87
_HEAD, _GROUND, _FOOT, _GAP = 20, 16, 24, 8
COLUMNS = 4
LETTERS = 13
"""Maximum number of letters in a line of a box, with the font size that is used."""

STYLE = """
.nodes svg { display: block; width: 100%; max-width: 376px; height: auto; }
.nodes svg text { fill: var(--ink); font-size: 12px; }
.nodes svg .small { font-size: 11px; } .nodes svg .bold { font-weight: bold; }
.nodes svg .pale { fill: var(--pale); font-size: 11px; }
.frame { fill: none; stroke: var(--line); } .island { fill: none; stroke: var(--ok); }
.ground { fill: var(--shade); } .gpu { fill: var(--ground); stroke: var(--pale); }
.busy { stroke: var(--ink); stroke-width: 2; } .unfit { stroke-dasharray: 4 3; }
.link { stroke: var(--ok); stroke-width: 2; } .pcie { stroke: var(--pale); }
"""


def node_picture(node: Node) -> str:
    """Return the SVG picture of a node with GPUs."""
    page = ET.Element("svg", role="img")
    ET.SubElement(page, "title").text = xml_text(picture_text(node))
    top = 1.0
    for island, gpus in _frames(node):
        top = _frame(page, node, island, gpus, top) + _GAP
    page.set("viewBox", f"0 0 {WIDTH} {top:g}")
    return ET.tostring(page, encoding="unicode")


def picture_text(node: Node) -> str:
    """Return the picture's content as text."""
    parts = [f"{node.name}: {gpu_names(node.gpus)}"]
    parts += [f"NVLink connects GPUs {ranges(e.gpus)} ({e.links})" for e in node.islands]
    if not node.islands and len(node.gpus) > 1:
        parts.append("no NVLink")
    numa: dict[int, list[int]] = {}
    for gpu in node.gpus:
        if gpu.numa is not None:
            numa.setdefault(gpu.numa, []).append(gpu.index)
    parts += [f"NUMA {number}: GPUs {ranges(gpus)}" for number, gpus in sorted(numa.items())]
    return "; ".join([*parts, *uses(node)])


def uses(node: Node) -> list[str]:
    """
    Return a line for the GPUs of each replica, one for each unfit GPU, and one for all free GPUs.

    Examples are `GPUs 0-3: llama-0` and `GPUs 4-7: free`.
    """
    on: dict[str, list[int]] = {}
    for gpu in node.gpus:
        for name in gpu.replicas:
            on.setdefault(name, []).append(gpu.index)
    free = [gpu.index for gpu in node.gpus if not gpu.replicas and not gpu.unfit]
    found = [f"GPUs {ranges(gpus)}: {name}" for name, gpus in on.items()]
    found += [f"GPU {gpu.index}: unfit: {gpu.unfit}" for gpu in node.gpus if gpu.unfit]
    return [*found, *([f"GPUs {ranges(free)}: free"] if free else [])]


def _frames(node: Node) -> Iterator[tuple[Island | None, list[Gpu]]]:
    by_index = {gpu.index: gpu for gpu in node.gpus}
    placed: set[int] = set()
    for island in node.islands:
        gpus = [by_index[each] for each in island.gpus if each in by_index and each not in placed]
        placed.update(gpu.index for gpu in gpus)
        if gpus:
            yield island, gpus
    if alone := [gpu for gpu in node.gpus if gpu.index not in placed]:
        yield None, alone


def _rows(gpus: Sequence[Gpu]) -> list[list[Gpu]]:
    """Return GPUs in rows. The GPUs of a NUMA node share a row if the row has space for all."""
    rows: list[list[Gpu]] = []
    for _, group in groupby(gpus, key=lambda gpu: gpu.numa):
        left = list(group)
        if rows and len(rows[-1]) + len(left) <= COLUMNS:
            rows[-1] += left
            continue
        rows += [left[at : at + COLUMNS] for at in range(0, len(left), COLUMNS)]
    return rows


def _frame(
    page: ET.Element, node: Node, island: Island | None, gpus: Sequence[Gpu], top: float
) -> float:
    """Draw a frame, and return the y coordinate of its lower end."""
    rows = _rows(gpus)
    height = _HEAD + len(rows) * (_GROUND + _HIGH + _FOOT)
    _shape(page, "rect", "island" if island else "frame",
           x=1, y=top, width=WIDTH - 2, height=height, rx=6)  # fmt: skip
    title = f"NVLink {ranges(g.index for g in gpus)}: {island.links}" if island else "no NVLink"
    _words(page, 10, top + 15, title, "bold", letters=46)
    bars: list[float] = []
    for number, row in enumerate(rows):
        y = top + _HEAD + number * (_GROUND + _HIGH + _FOOT)
        _row(page, row, y)
        foot = y + _GROUND + _HIGH
        if island:
            bars.append(foot + 10)
            _bar(page, len(row), foot)
        else:
            _brackets(page, node, row, foot + 10)
    if len(bars) > 1:
        _shape(page, "line", "link", x1=9, y1=bars[0], x2=9, y2=bars[-1])
    return top + height


def _row(page: ET.Element, row: Sequence[Gpu], y: float) -> None:
    column = 0
    for numa, group in groupby(row, key=lambda gpu: gpu.numa):
        gpus = list(group)
        x, width = _LEFT + column * _STEP, (len(gpus) - 1) * _STEP + _BOX
        _shape(page, "rect", "ground",
               x=x - 2, y=y, width=width + 4, height=_GROUND + _HIGH + 4, rx=4)  # fmt: skip
        _words(page, x, y + 12, "NUMA ?" if numa is None else f"NUMA {numa}", "pale")
        for place, gpu in enumerate(gpus):
            _box(page, gpu, x + place * _STEP, y + _GROUND)
        column += len(gpus)


def _box(page: ET.Element, gpu: Gpu, x: float, y: float) -> None:
    kinds = ["gpu", *(["busy"] if gpu.replicas else []), *(["unfit"] if gpu.unfit else [])]
    _shape(page, "rect", " ".join(kinds), x=x, y=y, width=_BOX, height=_HIGH, rx=4)
    _words(page, x + 5, y + 15, f"GPU {gpu.index}", "bold")
    more = f" +{len(gpu.replicas) - 1}" if len(gpu.replicas) > 1 else ""
    use = gpu.replicas[0] if gpu.replicas else "unfit" if gpu.unfit else "free"
    _words(page, x + 5, y + 31, use, "small", letters=LETTERS - len(more), more=more)
    for number, (nic, near) in enumerate(gpu.nics[:2]):
        _words(page, x + 5, y + 46 + 13 * number, f"{nic} {near}", "pale", letters=LETTERS - 1)


def _bar(page: ET.Element, count: int, foot: float) -> None:
    """Draw the bar for NVLink below a row, and a line from each GPU to the bar."""
    for column in range(count):
        x = _LEFT + column * _STEP + _BOX / 2
        _shape(page, "line", "link", x1=x, y1=foot, x2=x, y2=foot + 10)
    end = _LEFT + (count - 1) * _STEP + _BOX / 2
    _shape(page, "line", "link", x1=9, y1=foot + 10, x2=end, y2=foot + 10)


def _brackets(page: ET.Element, node: Node, row: Sequence[Gpu], y: float) -> None:
    """Draw brackets with the nearest PCIe class between neighbours in a row."""
    places = {gpu.index: column for column, gpu in enumerate(row)}
    for tier in node.tiers:
        inside = [sorted(places[g] for g in group if g in places) for group in tier.groups]
        joined = [columns for columns in inside if len(columns) > 1]
        for columns in joined:
            left, right = (_LEFT + each * _STEP + _BOX / 2 for each in (columns[0], columns[-1]))
            _shape(page, "line", "pcie", x1=left, y1=y, x2=right, y2=y)
            _words(page, (left + right) / 2 - 10, y + 12, tier.name, "pale", letters=10)
        if joined:
            return


def _shape(page: ET.Element, tag: str, kind: str, **numbers: float) -> None:
    shape = ET.SubElement(page, tag, {key: f"{value:g}" for key, value in numbers.items()})
    shape.set("class", kind)


def _words(
    page: ET.Element, x: float, y: float, words: str, kind: str, *, letters: int = 40,
    more: str = "",
) -> None:  # fmt: skip
    shape = ET.SubElement(page, "text", {"x": f"{x:g}", "y": f"{y:g}", "class": kind})
    shape.text = xml_text(words if len(words) <= letters else f"{words[: letters - 1]}…") + more
