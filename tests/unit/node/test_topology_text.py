"""The pictures: what they must show, how wide they may be, and that an SVG is one."""

from __future__ import annotations

import re
from itertools import combinations
from xml.etree import ElementTree as ET

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rich.console import Console

from gpufleet.node.interconnect import Interconnect, from_matrix
from gpufleet.node.smi_topology import PCIE, parse
from gpufleet.node.topology_svg import LINK, PALE, RED, svg
from gpufleet.node.topology_text import describe_gpus, island_heading, render_topology
from tests.support.checkout import ROOT
from tests.support.rows import each_row

TOPO = ROOT / "tests/data/topo"

# The machine may do other things at the same time.
ANY_PACE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
SAMPLES = sorted(path.stem for path in TOPO.glob("*.txt"))
SVG = "{http://www.w3.org/2000/svg}"


def sample(name: str) -> Interconnect:
    return from_matrix(name, parse((TOPO / f"{name}.txt").read_text()))


def printed(node: Interconnect, width: int = 100) -> list[str]:
    """Return the lines of the terminal picture, without colours."""
    console = Console(width=width, no_color=True, highlight=False)
    with console.capture() as captured:
        console.print(render_topology(node))
    return captured.get().splitlines()


def drawn(node: Interconnect) -> ET.Element:
    return ET.fromstring(svg(node))


def words(page: ET.Element, colour: str | None = None) -> list[str]:
    return [
        each.text or "" for each in page.iter(f"{SVG}text") if colour in {None, each.get("fill")}
    ]


# --- in a terminal


@each_row("name", SAMPLES)
def test_eight_gpus_fit_80_columns(name):
    """Rather, all that does not fold: sentences may."""
    whole = render_topology(sample(name)).plain.splitlines()

    sentences = ("warning: ", "tensor parallel up to ")
    assert max(len(line) for line in whole if not line.startswith(sentences)) <= 80


def test_sixteen_gpus_fit_100_columns():
    gpus = tuple(range(16))
    nics = {f"mlx5_bond_{nic}": dict.fromkeys(gpus, "NODE") for nic in range(9)}
    node = Interconnect("dgx-2", gpus, dict.fromkeys(combinations(gpus, 2), "NV6"), {}, {}, nics)

    assert max(map(len, printed(node))) <= 100
    assert printed(node) == render_topology(node).plain.splitlines()


@each_row("name", SAMPLES)
def test_the_matrix_is_the_one_that_was_pasted(name):
    """Read back from the picture by its columns."""
    node = sample(name)
    lines = [re.findall(r"\S+", line) for line in printed(node)]
    rows = {int(line[0]): line[1:] for line in lines if line[:1] and line[0].isdecimal()}

    for (i, j), word in node.classes.items():
        assert rows[i][j] == rows[j][i] == word


def test_a_gpu_stands_in_the_row_of_its_numa_node_above_its_nearest_nic():
    lines = printed(sample("hgx-h100"))

    (row,) = (at for at, line in enumerate(lines) if line.startswith("  NUMA 1 "))
    assert lines[row].split()[2:] == ["GPU", "4", "GPU", "5", "GPU", "6", "GPU", "7"]
    assert lines[row + 1].split() == [
        *("mlx5_6", "PIX", "mlx5_7", "PIX"),
        *("mlx5_8", "PIX", "mlx5_9", "PIX"),
    ]


def test_many_equally_near_nics_are_counted():
    nics = {f"mlx5_{nic}": {0: "NODE"} for nic in range(5)}

    assert any("+3 more NODE" in line for line in printed(Interconnect("n", (0,), {}, nics=nics)))


@each_row(
    ("name", "line"),
    [
        ("hgx-h100", "NVLink island 0-7: 8 GPUs, NV18"),
        ("h100-dead-link", "NVLink island 0-7: 8 GPUs, NV17 to NV18"),
        ("l40s-pcie", "without NVLink: GPUs 0-7"),
        ("l40s-pcie", "  PCIe, PIX or nearer: 0-1 | 2-3 | 4-5 | 6-7"),
        ("t4-single", "without NVLink: GPU 0"),
        ("rtx4090", "rtx4090: 8 x NVIDIA GeForce RTX 4090"),
        ("gb200", "gb200: 4 GPUs"),
    ],
)
def test_lines_an_operator_looks_for(name, line):
    assert line in printed(sample(name))


def test_every_warning_is_there():
    node = sample("dgx-1v")

    assert [line for line in printed(node, 1000) if line.startswith("warning: ")] == [
        f"warning: {warning}" for warning in node.warnings
    ]


def test_a_node_without_gpus_has_a_picture():
    node = Interconnect("n", (), {})

    assert "n: no GPU" in printed(node)
    assert "n: no GPU" in words(drawn(node))


def test_what_is_pasted_is_no_markup():
    """Square brackets in a file's name are not rich's colours."""
    node = Interconnect("[red]x[/red]", (0,), {}, {0: "[bold]"})

    assert printed(node)[0] == "[red]x[/red]: 1 x [bold]"


def test_models_that_differ_are_counted_each():
    node = Interconnect("n", (0, 1, 2), {}, {0: "A", 1: "B", 2: "A"})

    assert describe_gpus(node) == "2 x A, 1 x B"


# --- as SVG


def wide():
    """Sixteen GPUs on switches, as a DGX-2 has them."""
    gpus = tuple(range(16))
    return Interconnect("wide", gpus, dict.fromkeys(combinations(gpus, 2), "NV6"))


def many():
    """Six bridged pairs."""
    gpus = tuple(range(12))
    words = {
        pair: "NV4" if pair[0] // 2 == pair[1] // 2 else "SYS" for pair in combinations(gpus, 2)
    }
    return Interconnect("many", gpus, words)


def test_many_frames_are_stacked():
    """A ticket shows a drawing as wide as its text, and not six frames beside each other."""
    assert float(drawn(many()).get("width")) < 1100


@each_row("node", [*map(sample, SAMPLES), wide(), many()], ids=lambda node: node.name)
def test_the_drawing_has_every_gpu_once_and_inside_its_page(node):
    page = drawn(node)

    assert page.tag == f"{SVG}svg"
    gpus = [word for word in words(page) if re.fullmatch(r"GPU \d+", word)]
    assert sorted(gpus) == sorted(f"GPU {gpu}" for gpu in node.gpus)
    width, height = (float(each) for each in page.get("viewBox", "").split()[2:])
    for shape in page.iter(f"{SVG}rect"):
        assert (
            0
            <= float(shape.get("x"))
            <= float(shape.get("x")) + float(shape.get("width"))
            <= (width)
        )
        assert float(shape.get("y")) + float(shape.get("height")) <= height


def test_it_has_a_white_ground_of_its_own():
    """So that it is read on dark pages as on light ones."""
    page = drawn(sample("hgx-h100"))
    first = next(page.iter(f"{SVG}rect"))

    assert first.get("fill") == "#ffffff"
    assert f"0 0 {first.get('width')} {first.get('height')}" == page.get("viewBox")


def test_it_needs_nothing_from_elsewhere():
    text = svg(sample("hgx-h100"))

    assert "href" not in text
    assert "<script" not in text
    assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]


def test_gpus_on_switches_have_a_line_each_and_the_short_one_is_red():
    page = drawn(sample("h100-dead-link"))

    assert words(page, RED)[0] == "NV17"
    assert words(page, LINK).count("NV18") == 7


def test_gpus_that_are_wired_have_a_line_for_each_pair():
    node = sample("dgx-1v")
    page = drawn(node)

    inside = [node.nvlink[pair] for pair in node.nvlink if pair[0] // 4 == pair[1] // 4]
    across = [node.nvlink[pair] for pair in node.nvlink if pair[0] // 4 != pair[1] // 4]
    assert sorted(words(page, LINK)) == sorted(f"NV{width}" for width in inside)
    assert sorted(each for each in words(page, PALE) if each.startswith("NV")) == sorted(
        f"NV{width}" for width in across
    )


def test_every_warning_is_drawn():
    text = " ".join(words(drawn(sample("dgx-1v")), RED))

    assert [" ".join(each.split()) for each in text.split("\u26a0 ")[1:]] == list(
        sample("dgx-1v").warnings
    )


@ANY_PACE
@given(st.text(), st.text())
def test_any_name_makes_valid_xml(name, nic):
    page = drawn(Interconnect(name, (0,), {}, {0: name}, nics={nic: {0: "PIX"}}))

    assert len(list(page.iter(f"{SVG}text"))) > 3


@ANY_PACE
@given(st.data(), st.integers(0, 10))
def test_any_node_can_be_drawn_and_printed(data, count):
    word = st.one_of(st.sampled_from(PCIE), st.integers(1, 3).map("NV{}".format))
    gpus = tuple(range(count))
    node = Interconnect(
        "n",
        gpus,
        {pair: data.draw(word) for pair in combinations(gpus, 2)},
        numa={gpu: data.draw(st.integers(0, 2)) for gpu in gpus if data.draw(st.booleans())},
    )

    assert sum(bool(re.fullmatch(r"GPU \d+", each)) for each in words(drawn(node))) == count
    for island in node.islands:
        if len(island) > 1:
            assert island_heading(node, island) in printed(node, 1000)
