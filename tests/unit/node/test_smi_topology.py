"""`nvidia-smi topo -m` as it is pasted: read whole, or refused with the line; never something else.

Truths are drawn, printed here in every layout that drivers and terminals make of them, and read
back; then one thing is broken, and what is read must still be the truth, or be refused.
"""

from __future__ import annotations

import re
from contextlib import suppress
from dataclasses import dataclass
from itertools import chain, combinations

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from gpufleet.errors import FleetError
from gpufleet.node.smi_topology import TopoMatrix, parse
from tests.support.checkout import ROOT
from tests.support.rows import each_row

TOPO = ROOT / "tests/data/topo"

# The machine may do other things at the same time.
ANY_PACE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])

PCIE = ("PIX", "PXB", "PHB", "NODE", "SYS")

LEGEND = [
    "",
    "Legend:",
    "",
    "  X    = Self",
    *(f"  {name:<4} = Connection traversing something" for name in reversed(PCIE)),
    "  NV#  = Connection traversing a bonded set of # NVLinks",
]


@dataclass(frozen=True)
class Layout:
    """How a text looks that says the same."""

    tabs: bool
    coloured: str
    legend: bool
    end: str
    aside: int  # how many of the columns right of the matrix
    numbered_nics: bool
    nic_rows: bool
    around: bool
    indent: str


LAYOUTS = st.builds(
    Layout,
    tabs=st.booleans(),
    coloured=st.sampled_from(["", "\x1b[4m", "[4m", "\x1b[1;32m"]),
    legend=st.booleans(),
    end=st.sampled_from(["\n", "\r\n", "\r\r\n"]),
    aside=st.integers(0, 3),
    numbered_nics=st.booleans(),
    nic_rows=st.booleans(),
    around=st.booleans(),
    indent=st.sampled_from(["", "    ", "> ", "# "]),
)


@st.composite
def matrices(draw, least=1, most=9):
    count = draw(st.integers(least, most))
    gpus = tuple(range(count))
    near = st.sampled_from(PCIE)
    links = st.one_of(near, st.integers(1, 36).map("NV{}".format))
    nics = [f"mlx5_{number}" for number in range(draw(st.integers(0, 4)))]
    return TopoMatrix(
        gpus=gpus,
        classes={pair: draw(links) for pair in combinations(gpus, 2)},
        nics={nic: {gpu: draw(near) for gpu in gpus} for nic in nics},
        numa={gpu: gpu // 4 for gpu in gpus},
        cpus={gpu: f"{gpu * 8}-{gpu * 8 + 7},{gpu + 200}" for gpu in gpus},
        gpu_memory={gpu: 2 + 8 * gpu for gpu in gpus},
    )


def rows_of(matrix: TopoMatrix, layout: Layout) -> list[list[str]]:
    """Return the header and the rows as cells; the header's first cell is empty."""
    nics = list(matrix.nics)
    labels = [
        *(f"GPU{gpu}" for gpu in matrix.gpus),
        *(f"NIC{at}" if layout.numbered_nics else nic for at, nic in enumerate(nics)),
    ]
    titles = ["CPU Affinity", "NUMA Affinity", "GPU NUMA ID"][: layout.aside]
    rows = [["", *labels, *titles]]
    for gpu in matrix.gpus:
        cells = [
            "X" if gpu == other else matrix.classes[min(gpu, other), max(gpu, other)]
            for other in matrix.gpus
        ]
        aside = [matrix.cpus[gpu], str(matrix.numa[gpu]), str(matrix.gpu_memory[gpu])]
        rows.append(
            [f"GPU{gpu}", *cells, *(matrix.nics[nic][gpu] for nic in nics), *aside[: layout.aside]]
        )
    if layout.nic_rows:
        for at, nic in enumerate(nics):
            others = ["X" if other == nic else "SYS" for other in nics]
            rows.append([labels[len(matrix.gpus) + at], *matrix.nics[nic].values(), *others])
    return rows


def printed(rows: list[list[str]], layout: Layout, matrix: TopoMatrix) -> list[str]:
    """Return the lines of a text with these cells."""
    if layout.tabs:
        lines = ["\t".join(f" {cell} " if cell == "X" else cell for cell in row) for row in rows]
    else:
        lines = [
            "".join(f"{cell:<8}" if len(cell) < 8 else cell + "  " for cell in r) for r in rows
        ]
    lines[0] = layout.coloured + lines[0] + ("\x1b[0m" if layout.coloured else "")
    if layout.legend:
        lines += LEGEND
    if layout.legend and layout.numbered_nics and matrix.nics:
        lines += ["", "NIC Legend:", ""]
        lines += [f"  NIC{at}: {nic}" for at, nic in enumerate(matrix.nics)]
    if layout.around:
        lines = ["```", "root@gpu-01:~# nvidia-smi topo -m", *lines, "", "```", "thanks!"]
    return [layout.indent + line for line in lines]


def named(matrix: TopoMatrix, layout: Layout) -> dict[str, dict[int, str]]:
    """Return the NICs as the text names them."""
    if layout.numbered_nics and not layout.legend:
        return {f"NIC{at}": gpus for at, gpus in enumerate(matrix.nics.values())}
    return dict(matrix.nics)


def read(lines: list[str], layout: Layout) -> TopoMatrix | None:
    """Return what is read, or None if it is refused; a refusal says where and what to do."""
    try:
        return parse(layout.end.join(lines), "topo.txt")
    except FleetError as refused:
        problems = refused.problems
    assert all(problem.startswith("topo.txt:") for problem in problems)
    assert "nvidia-smi topo -m" in problems[-1]
    return None


def is_the_truth_or_refused(found: TopoMatrix | None, matrix: TopoMatrix, layout: Layout) -> None:
    if found is not None:
        assert found.gpus == matrix.gpus
        assert found.classes == matrix.classes
        assert found.nics == named(matrix, layout)
        assert found.numa.items() <= matrix.numa.items()
        assert found.cpus.items() <= matrix.cpus.items()
        assert found.gpu_memory.items() <= matrix.gpu_memory.items()


# --- what is printed is read


@ANY_PACE
@given(matrices(most=16), LAYOUTS)
def test_every_layout_says_the_same(matrix, layout):
    found = read(printed(rows_of(matrix, layout), layout, matrix), layout)

    assert found == TopoMatrix(
        gpus=matrix.gpus,
        classes=matrix.classes,
        nics=named(matrix, layout),
        cpus=matrix.cpus if layout.aside > 0 else {},
        numa=matrix.numa if layout.aside > 1 else {},
        gpu_memory=matrix.gpu_memory if layout.aside > 2 else {},
    )


# --- what is broken is refused, or harmless


@ANY_PACE
@given(matrices(), LAYOUTS, st.data())
def test_a_lost_cell_never_gives_another_matrix(matrix, layout, data):
    rows = rows_of(matrix, layout)
    row = data.draw(st.sampled_from(rows))
    words = " ".join(row).split()
    del words[data.draw(st.integers(0, len(words) - 1))]
    row[:] = words

    is_the_truth_or_refused(read(printed(rows, layout, matrix), layout), matrix, layout)


@ANY_PACE
@given(matrices(least=2), LAYOUTS, st.data())
def test_a_lost_cell_of_the_matrix_itself_is_refused(matrix, layout, data):
    """Not only harmless: nothing tells which one is missing."""
    rows = rows_of(matrix, layout)
    row = data.draw(st.sampled_from(rows[1 : 1 + len(matrix.gpus)]))
    del row[data.draw(st.integers(1, len(matrix.gpus)))]

    assert read(printed(rows, layout, matrix), layout) is None


@ANY_PACE
@given(matrices(), LAYOUTS, st.data())
def test_a_lost_line_never_gives_another_matrix(matrix, layout, data):
    rows = rows_of(matrix, layout)
    gone = data.draw(st.integers(0, len(rows) - 1))
    del rows[gone]
    if gone == 0 and layout.coloured:  # the colour was the header's
        layout = Layout(**{**vars(layout), "coloured": ""})

    found = read(printed(rows, layout, matrix), layout)

    is_the_truth_or_refused(found, matrix, layout)
    if gone <= len(matrix.gpus):
        assert found is None


@ANY_PACE
@given(matrices(), LAYOUTS, st.data())
def test_a_cell_too_many_never_gives_another_matrix(matrix, layout, data):
    rows = rows_of(matrix, layout)
    row = data.draw(st.sampled_from(rows))
    extra = data.draw(st.sampled_from(["X", "NV18", "SYS", "PIX", "GPU0", "0-7", "N/A"]))
    row.insert(data.draw(st.integers(0, len(row))), extra)

    is_the_truth_or_refused(read(printed(rows, layout, matrix), layout), matrix, layout)


@ANY_PACE
@given(matrices(least=2), LAYOUTS, st.data())
def test_a_changed_cell_between_gpus_is_refused(matrix, layout, data):
    """Every pair stands there twice, and must agree with itself."""
    rows = rows_of(matrix, layout)
    row = data.draw(st.sampled_from(rows[1 : 1 + len(matrix.gpus)]))
    column = data.draw(st.integers(1, len(matrix.gpus)))
    new = data.draw(st.sampled_from(["X", "NV1", "NV18", "SYS", "PIX", "NVX", "NODESYS"]))
    assume(new != row[column])
    row[column] = new

    assert read(printed(rows, layout, matrix), layout) is None


@ANY_PACE
@given(matrices(), LAYOUTS, st.data())
def test_two_rows_that_changed_places_are_told_by_their_labels(matrix, layout, data):
    rows = rows_of(matrix, layout)
    body = data.draw(st.permutations(rows[1:]))

    found = read(printed([rows[0], *body], layout, matrix), layout)

    assert found is not None
    is_the_truth_or_refused(found, matrix, layout)


def has_its_nics_twice(matrix: TopoMatrix, layout: Layout) -> bool:
    """Cut off without a row or a legend that names them, NICs leave no trace."""
    return layout.nic_rows or not matrix.nics


@ANY_PACE
@given(matrices(), LAYOUTS, st.integers(1, 160))
def test_a_text_that_was_cut_at_the_right_never_gives_another_matrix(matrix, layout, width):
    assume(has_its_nics_twice(matrix, layout))
    lines = [line[:width] for line in printed(rows_of(matrix, layout), layout, matrix)]
    # Names cut in the legend's text are another thing than a cut matrix.
    legend = next((at for at, line in enumerate(lines) if line.endswith("NIC Legend:")), None)
    assume(legend is None or width > 20)

    is_the_truth_or_refused(read(lines, layout), matrix, layout)


@ANY_PACE
@given(matrices(), LAYOUTS, st.integers(20, 160))
def test_a_text_that_a_terminal_wrapped_never_gives_another_matrix(matrix, layout, width):
    assume(has_its_nics_twice(matrix, layout))
    lines = printed(rows_of(matrix, layout), layout, matrix)
    wrapped = list(
        chain.from_iterable(
            [line[at : at + width] for at in range(0, max(len(line), 1), width)]
            for line in (each.expandtabs() for each in lines)
        )
    )

    is_the_truth_or_refused(read(wrapped, layout), matrix, layout)


@ANY_PACE
@given(st.text())
def test_any_text_is_read_or_refused(text):
    with suppress(FleetError):
        parse(text)


# --- what a refusal says

PAIR = """\
$ nvidia-smi topo -m
\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID
GPU0\t X \tNV18\tPIX\t0-55\t0\t\tN/A
GPU1\tNV18\t X \tSYS\t56-111\t1\t\tN/A
NIC0\tPIX\tSYS\t X\t\t\t

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks

NIC Legend:

  NIC0: mlx5_0
"""


def test_the_text_that_is_broken_below_is_fine():
    assert parse(PAIR) == TopoMatrix(
        gpus=(0, 1),
        classes={(0, 1): "NV18"},
        nics={"mlx5_0": {0: "PIX", 1: "SYS"}},
        numa={0: 0, 1: 1},
        cpus={0: "0-55", 1: "56-111"},
    )


@each_row(
    ("old", "new", "says"),
    [
        ("GPU1\tNV18\t X \tSYS\t", "GPU1\tNV18\tSYS\t", ":4: GPU1 has 2 cells, but the header in"),
        ("GPU1\tNV18\t X \tSYS\t", "GPU1\tNV18\t X \tSYS\tSYS\t", ":4: GPU1 has 4 cells"),
        (
            "NV18\t X \tSYS",
            "NV18X\tSYS",
            ":4: GPU1: 'NV18X' in column GPU0 is not in nvidia-smi's legend",
        ),
        ("GPU1\tNV18\t", "GPU1\tNV17\t", ":3: GPU0 has NV18 to GPU1, but GPU1 has NV17"),
        ("NIC0\tPIX\t", "NIC0\tPXB\t", ":3: GPU0 has PIX to NIC0, but NIC0 has PXB to GPU0"),
        ("GPU1\tNV18\t X ", "GPU1\t X \tNV18", ":4: GPU1 has X in column GPU0"),
        ("GPU0\t X \tNV18\tPIX", "GPU0\t X \tNV18\tNV18", ":3: GPU0 has NV18 in column NIC0"),
        ("GPU1\tNV18\t", "GPU0\tNV18\t", ":4: GPU0 already has a row in line 3"),
        ("\tGPU0\tGPU1\t", "\tGPU0\tGPU0\t", ":2: the header has GPU0 twice"),
        ("\tGPU0\tGPU1\t", "\tGPU0\tGPU2\t", ":2: the header lacks GPU1"),
        ("GPU1\tNV18\t X \tSYS\t56-111\t1\t\tN/A\n", "", ":2: GPU1 has a column but no row"),
        ("NIC0\tPIX", "NIC1\tPIX", ":5: NIC1 has a row but no column"),
        ("NIC0: mlx5_0\n", "NIC0: mlx5_0\n  NIC1: mlx5_1\n", ":15: the legend contains NIC1"),
        (
            "56-111\t1\t\tN/A",
            "56-111\t1\t\tN/A\t0",
            ":4: GPU1 has 4 cells to the right of the matrix",
        ),
        ("\nGPU1\tNV18", "\n\n   NV18", ":5: this line has cells but no label"),
        ("GPU1\tNV18", "something\nGPU1\tNV18", ":4: this line is between the rows"),
        ("\nLegend:", "\tGPU0\tGPU1\tCPU Affinity\n", ":6: a second matrix begins"),
        (
            "56-111\t1\t\tN/A",
            "56-111\tPIX",
            ":4: GPU1 has cells of the matrix after the cells of its",
        ),
        (
            "$ nvidia",
            "GPU3\t X \tNV18\n$ nvidia",
            ":1: this row of GPU3 is above the header in line 3",
        ),
        ("\nLegend:", "mlx5_1\tPIX\tSYS\n\nLegend:", ":6: mlx5_1 has a row but no column"),
        ("\tNIC0\tCPU", "\tNIC0\tNIC1\tCPU", ":2: NIC1 has a column but no row"),
        ("topo -m\n", "topo -mp\n", ":1: is the output of `nvidia-smi topo -mp`"),
        ("\tGPU0\tGPU1\tNIC0\tCPU", "\tCPU", ": has no line with the columns"),
        (
            "NIC0\tCPU",
            "mlx5_0\tNIC1\tCPU",
            ":2: the header has some NICs by number and 'mlx5_0' by",
        ),
    ],
)
def test_a_refusal_names_the_line_and_what_it_found(old, new, says):
    assert old in PAIR

    with pytest.raises(FleetError) as refused:
        parse(PAIR.replace(old, new, 1), "topo.txt")

    assert any(problem.startswith(f"topo.txt{says}") for problem in refused.value.problems), str(
        refused.value
    )


@each_row(
    "text",
    [
        "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. Make sure "
        "that the latest NVIDIA driver is installed and running.\n",
        "$ nvidia-smi topo -m\nFailed to initialize NVML: Driver/library version mismatch\n",
        "Unable to determine the device handle for GPU0000:65:00.0: Unknown Error\n",
        "No devices were found\n",
        "bash: nvidia-smi: command not found\n",
    ],
)
def test_an_error_in_place_of_a_matrix_is_called_one(text):
    with pytest.raises(FleetError) as refused:
        parse(text, "topo.txt")

    (problem,) = refused.value.problems
    line = text.splitlines()[-1]
    assert problem.startswith(f"topo.txt:{len(text.splitlines())}: this is a driver error and not")
    assert line[:60] in problem


PASTED = """\
GPU0 GPU1 mlx5_0mlx5_1 CPU Affinity
GPU0 X NV18 PIX SYS 0-55
GPU1 NV18 X SYS PIX 56-111
mlx5_0 PIX SYS X SYS
"""


@each_row("nics", ["mlx5_0mlx5_1", "NIC0NIC1", "mlx5_bond_0mlx5_1"])
def test_gpus_are_read_where_columns_of_nics_have_run_together(nics):
    found = parse(PASTED.replace("mlx5_0mlx5_1", nics), "topo.txt")

    assert (found.gpus, found.classes, found.nics) == ((0, 1), {(0, 1): "NV18"}, {})
    (remark,) = found.remarks
    assert remark.startswith("topo.txt:1: the columns of NICs have run together")


def test_gpus_are_read_where_cells_of_nics_have_run_together():
    assert parse(PAIR.replace("X \tSYS\t", "X \tSYSPIX\t")).classes == {(0, 1): "NV18"}


@each_row(
    ("old", "new"),
    [
        ("GPU1 NV18 X", "GPU1 NV12 X"),
        ("GPU1 NV18 X", "GPU1 X NV18"),
        ("GPU1 NV18 X SYS PIX 56-111\n", ""),
        ("GPU0 GPU1 mlx", "GPU0 mlx"),
        ("GPU0 X NV18", "GPU0 XNV18"),
        ("GPU0 GPU1 mlx", "GPU0 GPU2 mlx"),
        ("GPU1 NV18 X SYS PIX 56-111\n", "GPU1 NV18 X SYS\nGPU1 NV18 X SYS\n"),
        # Other columns that are no names of NICs: what was cut is not known.
        ("mlx5_0mlx5_1", "mlx5_0 mlx5_1 mlx5_2"),
    ],
)
def test_gpus_that_do_not_prove_themselves_are_refused(old, new):
    assert old in PASTED

    with pytest.raises(FleetError):
        parse(PASTED.replace(old, new), "topo.txt")


def test_the_legend_of_a_matrix_without_nvlink_gives_it_away():
    """`topo -mp` prints the same matrix, PCIe alone: eight NVLinked GPUs would be eight islands."""
    text = (TOPO / "hgx-h100.txt").read_text()
    text = re.sub(r"NV18", "SYS", text).replace("  NV#  =", "  none =")

    with pytest.raises(FleetError, match=r"the legend has no NV#.*run `nvidia-smi topo -m`"):
        parse(text)


def test_many_broken_rows_are_not_all_listed():
    text = "\n".join(line[:60] for line in (TOPO / "hgx-h100.txt").read_text().splitlines())

    with pytest.raises(FleetError) as refused:
        parse(text)

    assert len(refused.value.problems) < 12
    assert re.search(r"\d+ more lines", str(refused.value))


# --- words of other drivers


def test_old_words_mean_what_their_legends_said():
    """SOC was renamed to SYS in R384; PSB is a switch on the board, which NVML calls internal."""
    text = "\tGPU0\tGPU1\tGPU2\nGPU0\tX\tSOC\tPSB\nGPU1\tSOC\tX\tSOC\nGPU2\tPSB\tSOC\tX\n"

    assert parse(text).classes == {(0, 1): "SYS", (0, 2): "PIX", (1, 2): "SYS"}


def test_cells_that_are_blank_right_of_the_matrix_are_unknown_and_not_moved():
    """WSL prints one N/A under three titles; a number there could be any of them."""
    text = "\tGPU0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\nGPU0\t X \t\t\t\t1\n"

    found = parse(text)

    assert (found.gpus, found.numa, found.cpus, found.gpu_memory) == ((0,), {}, {}, {})


def test_titles_that_were_cut_leave_the_matrix_as_it_is():
    """What stands below them is then of unknown meaning, and only that."""
    found = parse(PAIR.replace("NUMA Affinity\tGPU NUMA ID", "NUMA Aff"))

    assert (found.classes, found.numa, found.cpus) == ({(0, 1): "NV18"}, {}, {})


def test_several_numa_nodes_are_none():
    text = "\tGPU0\tCPU Affinity\tNUMA Affinity\nGPU0\t X \t0-63\t0-1\n"

    assert parse(text).numa == {}


# --- texts of whole machines


@each_row("path", sorted(TOPO.glob("*.txt")), ids=lambda path: path.stem)
def test_the_samples_are_read_whole(path):
    """Counted by another route: each pair's word occurs in the rows as often as in the result."""
    found = parse(path.read_text(), path.name)

    rows = [line.split() for line in path.read_text().splitlines() if line.startswith("GPU")]
    words = [word for row in rows for word in row[1 : 1 + len(found.gpus)]]
    rows = [row for row in rows if "X" in row]
    assert len(found.gpus) == len(rows)
    for word in set(found.classes.values()):
        assert words.count(word) == 2 * list(found.classes.values()).count(word)


def test_models_are_taken_from_nvidia_smi_l():
    assert parse((TOPO / "rtx4090.txt").read_text()).names == dict.fromkeys(
        range(8), "NVIDIA GeForce RTX 4090"
    )


def test_a_gb200s_own_memory_is_not_the_numa_node_of_its_cpus():
    found = parse((TOPO / "gb200.txt").read_text())

    assert found.numa == {0: 0, 1: 0, 2: 1, 3: 1}
    assert found.gpu_memory == {0: 2, 1: 10, 2: 18, 3: 26}
