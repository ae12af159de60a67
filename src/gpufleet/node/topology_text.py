"""Format a node's interconnect for a terminal: islands, NUMA nodes, NICs, a matrix and warnings.

Except for warnings, every line fits into 80 columns on nodes with up to 8 GPUs, and into 100
columns with 16 GPUs. The text has all information even without colours. The module converts an
`Interconnect` to text for `rich`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich.text import Text

from gpufleet.formatting import ranges
from gpufleet.node.interconnect import Interconnect

GPUS_A_LINE = 4
CELL = 17  # "mlx5_bond_0 NODE" and a space
MARGIN = 11  # "  NUMA 0   "

Cell = tuple[str, str]  # words, style

_FAR = {"PIX": "green", "PXB": "green", "PHB": "yellow", "NODE": "yellow", "SYS": "red"}


def render_topology(node: Interconnect) -> Text:
    """Return the topology as text."""
    lines = [*_head(node), Text(), *_boards(node)]
    if len(node.gpus) > 1:
        lines += [Text(), *_matrix(node)]
    if node.warnings:
        lines += [Text(), *(Text.assemble(("warning: ", "bold red"), w) for w in node.warnings)]
    return Text("\n").join(lines)


def island_heading(node: Interconnect, island: tuple[int, ...]) -> str:
    """
    Return a line that describes an island.

    >>> island_heading(Interconnect("n", (0, 1), {(0, 1): "NV12"}), (0, 1))
    'NVLink island 0-1: 2 GPUs, NV12'
    """
    widths = sorted(set(node.widths(island).values()))
    links = f"NV{widths[0]}" if len(widths) == 1 else f"NV{widths[0]} to NV{widths[-1]}"
    return f"NVLink island {ranges(island)}: {len(island)} GPUs, {links}"


def gpus_by_numa(node: Interconnect, gpus: Iterable[int]) -> dict[int | None, list[int]]:
    """
    Return `gpus` grouped by NUMA node, in the order of the GPUs.

    The key is None if the NUMA node is unknown.
    """
    found: dict[int | None, list[int]] = {}
    for gpu in gpus:
        found.setdefault(node.numa.get(gpu), []).append(gpu)
    return found


def describe_gpus(node: Interconnect) -> str:
    """
    Return a text with the number of GPUs of each model.

    >>> describe_gpus(Interconnect("n", (0, 1), {}, {0: "NVIDIA L40S", 1: "NVIDIA L40S"}))
    '2 x NVIDIA L40S'
    """
    if not node.models:
        return {0: "no GPU", 1: "1 GPU"}.get(len(node.gpus), f"{len(node.gpus)} GPUs")
    kinds: dict[str, int] = {}
    for gpu in node.gpus:
        kind = node.models.get(gpu, "of unknown model")
        kinds[kind] = kinds.get(kind, 0) + 1
    return ", ".join(f"{count} x {kind}" for kind, count in kinds.items())


def _head(node: Interconnect) -> Iterator[Text]:
    yield Text.assemble((node.name, "bold"), f": {describe_gpus(node)}")
    yield Text.assemble("tensor parallel up to ", (str(node.max_tp), "bold"), f": {node.why}")


def _boards(node: Interconnect) -> Iterator[Text]:
    joined = [island for island in node.islands if len(island) > 1]
    alone = sorted(gpu for island in node.islands if len(island) == 1 for gpu in island)
    for island in joined:
        yield Text(island_heading(node, island), "bold green")
        yield from _rows(node, island)
    if alone:
        yield Text(
            f"without NVLink: {'GPU' if len(alone) == 1 else 'GPUs'} {ranges(alone)}", "bold"
        )
        yield from _rows(node, alone)
    for tier, groups in node.tiers.items():
        near = [group for group in groups if len(group) > 1]
        if near and len(near[0]) < len(node.gpus):
            yield Text(f"  PCIe, {tier} or nearer: {' | '.join(map(ranges, near))}")


def _rows(node: Interconnect, gpus: Iterable[int]) -> Iterator[Text]:
    for numa, beside in gpus_by_numa(node, gpus).items():
        margin = "" if numa is None else f"  NUMA {numa}"
        for at in range(0, len(beside), GPUS_A_LINE):
            cells = [_gpu_cells(node, gpu) for gpu in beside[at : at + GPUS_A_LINE]]
            for line in range(max(map(len, cells))):
                text = Text(margin.ljust(MARGIN))
                for each in cells:
                    words, style = each[line] if line < len(each) else ("", "")
                    text.append(words.ljust(CELL), style)
                text.rstrip()
                yield text
                margin = ""


def _gpu_cells(node: Interconnect, gpu: int) -> list[Cell]:
    """Return the cells of a GPU: its name, and at most two of its nearest NICs."""
    near = node.nearest_nics.get(gpu, [])
    cells = [(f"GPU {gpu}", "bold")]
    cells += [(f"{nic[: CELL - 6]} {name}", _FAR[name]) for nic, name in near[:2]]
    if len(near) > 2:
        cells.append((f"+{len(near) - 2} more {near[0][1]}", _FAR[near[0][1]]))
    return cells


def _matrix(node: Interconnect) -> Iterator[Text]:
    yield Text("".join(["    ", *(f"{gpu:>5}" for gpu in node.gpus)]), "underline")
    widest = max(node.nvlink.values(), default=0)
    for gpu in node.gpus:
        line = Text(f"{gpu:>3} ", "bold")
        for other in node.gpus:
            name = "X" if gpu == other else node.classes[min(gpu, other), max(gpu, other)]
            line.append(f"{name:>5}", _style(name, widest))
        yield line


def _style(name: str, widest: int) -> str:
    if name.startswith("NV"):
        return "green" if int(name[2:]) == widest else "bold yellow"
    return _FAR.get(name, "dim")
