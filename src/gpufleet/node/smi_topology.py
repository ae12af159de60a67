"""Parse the text of `nvidia-smi topo -m` that users have pasted. Pure.

A matrix is returned complete and unchanged, or not at all. If a paste was cut, wrapped or edited,
the module refuses it with the number of the line, and never repairs it. The following is accepted:
tabs or spaces; colour codes; prompts, code fences and other output around the matrix; any line
ends; rows without the columns to the right of the matrix; and a matrix without rows for NICs (`...
| grep GPU`).

The format was taken from outputs of the drivers 375 to 580:

    \x1b[4m\tGPU0\tGPU1\tNIC0\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m
    GPU0\t X \tNV18\tPIX\t0-55,112-167\t0\t\tN/A
    GPU1\tNV18\t X \tSYS\t56-111,168-223\t1\t\tN/A
    NIC0\tPIX\tSYS\t X

The tabs of a row do not match the tabs of the header, and any cell to the right of the matrix may
be blank (WSL). So cells are identified by their content and count, never by their position.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations, takewhile

from gpufleet.errors import FleetError

SELF = "X"

# The PCIe classes in nvidia-smi's legend, the nearest first.
PCIE = ("PIX", "PXB", "PHB", "NODE", "SYS")

# Drivers before R384 have SOC ("a socket-level link (e.g. QPI)") instead of SYS. DCGM's legend has
# PSB for a switch on the board of the GPUs, which NVML calls internal. This is as near as PIX.
OTHER_WORDS = {"SOC": "SYS", "PSB": "PIX"}

_NVLINK = re.compile(r"NV[1-9][0-9]?")
_GPU = re.compile(r"GPU([0-9]+)")
_NIC = re.compile(r"NIC[0-9]+")
_CPUS = re.compile(r"[0-9][0-9,-]*|N/A")

# Columns to the right of the matrix, in this order, if the driver has them.
_ASIDE = {"CPU Affinity": "cpus", "NUMA Affinity": "numa", "GPU NUMA ID": "gpu_memory"}

# Colour and clearing codes of terminals. Text that was copied from a web console has the codes
# without the escape character.
_CODES = re.compile(r"(?:\x1b|\^\[)\[[0-9;?]*[A-Za-z]|\[[0-9;]*m|\x1b\([A-Z]|[\ufeff\u200b]")
_QUOTED = re.compile(r"^[\s>#]+")

# Two or more names or cells of NICs that have run together because the paste has lost its tabs.
_PASTED = re.compile(
    r"(?:NIC[0-9]+|[a-z]+[0-9]*_(?:[a-z]+_)?[0-9]+){2,}|(?:X|PIX|PXB|PHB|NODE|SYS|SOC|PSB){2,}"
)

# Messages of nvidia-smi and shells without a matrix.
_ERRORS = re.compile(
    r"NVIDIA-SMI has failed|Failed to initialize NVML|Unable to determine the device handle"
    r"|No devices were found|couldn't communicate with the NVIDIA driver|Failed to properly"
    r" shut down NVML|nvidia-smi: (?:command )?not found|GPU is lost",
    re.IGNORECASE,
)

_SHOWN = 8  # at most so many problems are shown, because one cause often affects all rows

_REMEDY = (
    "gpufleet used nothing of this matrix. A terminal can wrap or cut the matrix, so write it to "
    "a file on the node (`nvidia-smi topo -m > topo.txt`) and give that file"
)


@dataclass(frozen=True)
class TopoMatrix:
    """
    The output of `nvidia-smi topo -m`.

    `classes` maps every pair of GPUs (i < j) to "NV18", "PIX", "PXB", "PHB", "NODE" or "SYS".
    `nics` has the same classes from each NIC to each GPU. A NIC has its device's name if the legend
    contains it. `numa` has the NUMA node of the CPUs next to a GPU, and `cpus` has these CPUs.
    `gpu_memory` has the NUMA node that is the GPU's own memory (Grace). GPUs for which the text has
    no such value, or several, are missing in these three. If the text contains the output of
    `nvidia-smi -L`, `names` has the GPUs' models, and `mig` has the GPUs with MIG instances.
    `remarks` are sentences about parts of the text that were not used.
    """

    gpus: tuple[int, ...]
    classes: Mapping[tuple[int, int], str]
    nics: Mapping[str, Mapping[int, str]] = field(default_factory=dict)
    numa: Mapping[int, int] = field(default_factory=dict)
    cpus: Mapping[int, str] = field(default_factory=dict)
    gpu_memory: Mapping[int, int] = field(default_factory=dict)
    names: Mapping[int, str] = field(default_factory=dict)
    mig: frozenset[int] = frozenset()
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Header:
    line: int
    columns: tuple[str, ...]
    aside: tuple[str, ...] | None
    """The keys of the columns to the right of the matrix, or None if a title was cut off."""


@dataclass(frozen=True)
class _Row:
    line: int
    cells: tuple[str, ...]
    aside: tuple[str, ...]


def parse(text: str, where: str = "the text") -> TopoMatrix:
    """
    Return the matrix in `text`. `where` is the name of the source in messages.

    Raises `FleetError` with every reason why the matrix cannot be trusted, each with its line
    number.
    """
    lines = [
        (number, _QUOTED.sub("", _CODES.sub("", line)).split())
        for number, line in enumerate(re.split(r"\r*\n|\r", text), start=1)
    ]
    if problems := list(_other_outputs(lines)):
        raise FleetError(*(f"{where}{problem}" for problem in problems))
    header = next((found for number, words in lines if (found := _header(number, words))), None)
    if header is None:
        if problem := _error_of_smi(lines):
            raise FleetError(f"{where}{problem}")
        raise FleetError(
            f"{where}: has no line with the columns `GPU0 GPU1 ...`, so the meaning of the rows "
            "is unknown: give the output of `nvidia-smi topo -m` including its first line, or a "
            "recorded probe (`gpufleet probe INVENTORY --json`)"
        )
    rows: dict[str, _Row] = {}
    problems = [
        *_unusable_columns(header),
        *_read_rows(lines, header, rows),
        *_missing_rows(header, rows),
    ]
    legend = _legend(lines)
    problems += _unlisted_nics(header, legend)
    if not problems:
        problems = list(_contradictions(header, rows))
    if problems and (block := _block_of_gpus(header, lines)):
        remark = (
            f"{where}:{header.line}: the columns of NICs have run together, so gpufleet used only "
            "the part with the GPUs. That part is consistent: X is on the diagonal, and both ends "
            "of each pair agree. To see the NICs, write the matrix with `nvidia-smi topo -m > "
            "topo.txt`"
        )
        return replace(_matrix(*block, {}, lines), remarks=(remark,))
    if problems:
        shown = [f"{where}{problem}" for problem in problems[:_SHOWN]]
        if hidden := len(problems) - len(shown):
            shown.append(f"{where}: {hidden} more lines are invalid")
        raise FleetError(*shown, f"{where}: {_REMEDY}")
    return _matrix(header, rows, legend, lines)


# -- kinds of lines ---------------------------------------------------------------------------


def _other_outputs(lines: Iterable[tuple[int, list[str]]]) -> Iterator[str]:
    """
    Yield a problem if the text is the output of `topo -mp` or `topo -p2p`.

    These outputs do not show NVLink. The function recognises such an output by its command line, or
    by a legend that has every class except NV#.
    """
    legend = {}
    for number, words in lines:
        line = " ".join(words)
        if found := re.search(r"nvidia-smi topo (-mp|--matrix_pci|-p2p|--p2p)\b", line):
            yield (
                f":{number}: is the output of `nvidia-smi topo {found[1]}`, which does not show "
                "NVLink: run `nvidia-smi topo -m`"
            )
            return
        if len(words) > 2 and words[1] == "=":
            legend[words[0]] = number
    if legend.keys() >= set(PCIE) and "NV#" not in legend:
        yield (
            f":{min(legend.values())}: the legend has no NV#, so this is the output of `nvidia-smi "
            "topo -mp`, which does not show NVLink: run `nvidia-smi topo -m`"
        )


def _header(number: int, words: list[str]) -> _Header | None:
    """
    Return the header if this line is the header of a matrix, or None.

    A header begins with GPU0, and has no class of the legend in it.
    """
    if not words or not _GPU.fullmatch(words[0]) or any(map(_is_class, words)):
        return None
    columns = tuple(takewhile(lambda word: word not in {"CPU", "NUMA", "GPU"}, words))
    rest = " ".join(words[len(columns) :])
    # `GPU0 is hot` is not a header. `GPU0 mlx5_0`, `GPU0 CPU Affinity` and a single `GPU0` are
    # headers.
    if not all(any(map(str.isdigit, column)) for column in columns):
        return None
    if any(map(_CPUS.fullmatch, columns)) or (rest and not rest.startswith(("CPU", "NUMA", "GPU"))):
        return None
    return _Header(number, columns, _aside(rest))


def _aside(titles: str) -> tuple[str, ...] | None:
    found = [key for title, key in _ASIDE.items() if title in titles]
    whole = " ".join(title for title, key in _ASIDE.items() if key in found)
    return tuple(found) if whole == titles else None


def _is_class(word: str) -> bool:
    return word in {SELF, *PCIE, *OTHER_WORDS} or _NVLINK.fullmatch(word) is not None


def _is_cell(word: str) -> bool:
    return _is_class(word) or _CPUS.fullmatch(word) is not None


def _is_row(words: list[str], columns: Collection[str]) -> bool:
    """
    Return whether a line is a row of the matrix.

    A row has a label, and after it only cells or nothing.
    """
    label, *cells = words
    if label not in columns and not _GPU.fullmatch(label) and not _NIC.fullmatch(label):
        # The row of a NIC whose column was cut.
        return all(map(_is_cell, cells)) and any(map(_is_class, cells)) and not _is_cell(label)
    return not cells or any(map(_is_class, cells)) or _is_cell(cells[0])


def _read_rows(
    lines: Iterable[tuple[int, list[str]]], header: _Header, rows: dict[str, _Row]
) -> Iterator[str]:
    """Fill `rows` from the lines below the header, and yield the problems of single lines."""
    between: list[int] = []
    for number, words in lines:
        if not words or number == header.line:
            continue
        label = words[0]
        if number > header.line and _is_row(words, header.columns):
            for stray in between:
                yield (
                    f":{stray}: this line is between the rows of the matrix but is not a row: the "
                    "terminal has wrapped a row, or a row was broken"
                )
            between = []
            if label in rows:
                yield f":{number}: {label} already has a row in line {rows[label].line}"
                continue
            cells = tuple(takewhile(_is_class, words[1:]))
            row = _Row(number, cells, tuple(words[1 + len(cells) :]))
            yield from _miscounted(label, row, header)
            rows[label] = row
        elif number > header.line and _header(number, words):
            yield (
                f":{number}: a second matrix begins here, and the first begins in line "
                f"{header.line}: keep only one of them"
            )
            return
        elif all(map(_is_cell, words)) and any(map(_is_class, words)):
            yield (
                f":{number}: this line has cells but no label ({' '.join(words[:4])}): the "
                "terminal has wrapped a row, or the label of the row is missing"
            )
        elif number < header.line and _is_row(words, header.columns):
            yield f":{number}: this row of {label} is above the header in line {header.line}"
        elif number > header.line:
            between.append(number)


# -- inconsistencies ------------------------------------------------------------------------


def _unusable_columns(header: _Header) -> Iterator[str]:
    at = f":{header.line}:"
    twice = {name for name in header.columns if header.columns.count(name) > 1}
    for name in sorted(twice):
        yield f"{at} the header has {name} twice: a name was cut, or a column was copied"
    gpus = [int(found[1]) for name in header.columns if (found := _GPU.fullmatch(name))]
    if not twice and (gaps := sorted(set(range(max(gpus) + 1)) - set(gpus))):
        missing = ", ".join(f"GPU{gpu}" for gpu in gaps)
        yield f"{at} the header lacks {missing}: nvidia-smi numbers the GPUs of a node without gaps"
    nics = [name for name in header.columns if not _GPU.fullmatch(name)]
    named = [name for name in nics if not _NIC.fullmatch(name)]
    if named and len(named) < len(nics):
        yield (
            f"{at} the header has some NICs by number and {named[0]!r} by name, but a driver "
            "prints "
            "all NICs in the same way: a name was cut"
        )


def _miscounted(label: str, row: _Row, header: _Header) -> Iterator[str]:
    wanted, found = len(header.columns), len(row.cells)
    if label not in header.columns:
        yield (
            f":{row.line}: {label} has a row but no column: the header in line {header.line} was "
            "cut"
        )
        return
    if found == wanted:
        if header.aside is not None and len(row.aside) > len(header.aside):
            yield (
                f":{row.line}: {label} has {_cells(len(row.aside))} to the right of the matrix, "
                "but "
                f"the header in line {header.line} has {len(header.aside)}: it is unknown which "
                "cells are too many"
            )
        elif any(map(_is_class, row.aside)):
            yield f":{row.line}: {label} has cells of the matrix after the cells of its CPUs"
        return
    odd = next(iter(row.aside), "")
    if found < wanted and odd and not _CPUS.fullmatch(odd):
        yield (
            f":{row.line}: {label}: {odd!r} in column {header.columns[found]} is not in "
            f"nvidia-smi's legend (X, NV#, {', '.join(PCIE)}): the cell was cut, or two cells have "
            "run together"
        )
        return
    yield (
        f":{row.line}: {label} has {_cells(found)}, but the header in line {header.line} has "
        f"{wanted} columns ({header.columns[0]} to {header.columns[-1]}): it is unknown which "
        f"cells are {'missing' if found < wanted else 'too many'}"
    )


def _cells(count: int) -> str:
    return f"{count} cell" if count == 1 else f"{count} cells"


def _missing_rows(header: _Header, rows: Mapping[str, _Row]) -> Iterator[str]:
    """
    Yield a problem for each column whose row is missing, because the text was cut.

    Every GPU must have a row. NICs must have rows only if at least one NIC has a row.
    """
    nics_have_rows = any(not _GPU.fullmatch(label) for label in rows)
    for label in dict.fromkeys(header.columns):
        if label not in rows and (nics_have_rows or _GPU.fullmatch(label)):
            yield f":{header.line}: {label} has a column but no row: the text was cut"


def _unlisted_nics(header: _Header, legend: Mapping[str, tuple[int, str]]) -> Iterator[str]:
    for label, (line, name) in legend.items():
        if label not in header.columns:
            yield (
                f":{line}: the legend contains {label} ({name}), but the header in line "
                f"{header.line} has no column {label}: the header was cut"
            )


def _contradictions(header: _Header, rows: Mapping[str, _Row]) -> Iterator[str]:
    """Yield contradictions between rows. Each pair has two cells, which must be equal."""
    for label, row in rows.items():
        for column, cell in zip(header.columns, row.cells, strict=True):
            if (cell == SELF) != (label == column):
                yield (
                    f":{row.line}: {label} has {cell} in column {column}, but X stands only where "
                    "the row and the column are the same device: the row is shifted"
                )
                break
            if _NVLINK.fullmatch(cell) and not (_GPU.fullmatch(label) and _GPU.fullmatch(column)):
                yield (
                    f":{row.line}: {label} has {cell} in column {column}, but a NIC has no "
                    "NVLink: the row is shifted"
                )
                break
    for one, other in combinations(rows, 2):
        here = rows[one].cells[header.columns.index(other)]
        there = rows[other].cells[header.columns.index(one)]
        if here != there:
            yield (
                f":{rows[one].line}: {one} has {here} to {other}, but {other} has {there} to {one} "
                f"(line {rows[other].line}): one of the two cells is wrong"
            )


def _error_of_smi(lines: Iterable[tuple[int, list[str]]]) -> str | None:
    """Return a problem with nvidia-smi's error message if the text contains one, or None."""
    for number, words in lines:
        line = " ".join(words)
        if _ERRORS.search(line):
            return (
                f":{number}: this is a driver error and not a matrix ({line[:100]}). `gpufleet "
                "check INVENTORY` shows what is wrong and how to repair it. When `nvidia-smi` "
                "works again, run `nvidia-smi topo -m` again"
            )
    return None


def _block_of_gpus(
    header: _Header, lines: Iterable[tuple[int, list[str]]]
) -> tuple[_Header, dict[str, _Row]] | None:
    """
    Return only the columns and rows of GPUs if the columns of NICs have run together.

    The result is None if they have not, or if the remaining part is not consistent. In a consistent
    matrix, every GPU has a column and a row, X is on the diagonal, and both cells of each pair are
    equal.
    """
    gpus = tuple(takewhile(_GPU.fullmatch, header.columns))
    if len(gpus) < 2 or gpus != tuple(f"GPU{at}" for at in range(len(gpus))):
        return None
    rows: dict[str, _Row] = {}
    pasted = any(map(_PASTED.fullmatch, header.columns))
    for number, words in lines:
        if not words or number <= header.line:
            continue
        if _GPU.fullmatch(words[0]):
            if words[0] in rows or words[0] not in gpus:
                return None
            pasted = pasted or any(map(_PASTED.fullmatch, words[1 + len(gpus) :]))
            rows[words[0]] = _Row(number, tuple(words[1 : 1 + len(gpus)]), ())
    whole = rows.keys() == set(gpus) and all(
        len(row.cells) == len(gpus) and all(map(_is_class, row.cells)) for row in rows.values()
    )
    block = _Header(header.line, gpus, None)
    if not pasted or not whole or any(_contradictions(block, rows)):
        return None
    return block, rows


# -- contents ----------------------------------------------------------------------------------


def _legend(lines: Iterable[tuple[int, list[str]]]) -> dict[str, tuple[int, str]]:
    """Return the legend of NICs, such as {"NIC0": (line, "mlx5_0")}."""
    return {
        words[0][:-1]: (number, words[1])
        for number, words in lines
        if len(words) == 2 and words[0].endswith(":") and _NIC.fullmatch(words[0][:-1])
    }


def _listed(lines: Iterable[tuple[int, list[str]]]) -> tuple[dict[int, str], set[int]]:
    """
    Return the GPUs' models and the GPUs with MIG instances, as `nvidia-smi -L` prints them.

    A line for a GPU is `GPU 0: NVIDIA L40S (UUID: GPU-...)`. Lines for its MIG instances follow,
    such as `MIG 1g.10gb Device 0: (UUID: MIG-...)`.
    """
    names: dict[int, str] = {}
    mig: set[int] = set()
    last = -1
    for _, words in lines:
        line = " ".join(words)
        if found := re.match(r"GPU ([0-9]+): (.+?)(?: \(UUID: .*)?$", line):
            last = int(found[1])
            names.setdefault(last, found[2])
        elif re.match(r"MIG \S+ Device [0-9]+:", line):
            mig.add(last)
    return names, mig


def _matrix(
    header: _Header,
    rows: Mapping[str, _Row],
    legend: Mapping[str, tuple[int, str]],
    lines: Iterable[tuple[int, list[str]]],
) -> TopoMatrix:
    names, mig = _listed(lines)
    gpus = {int(found[1]): label for label in rows if (found := _GPU.fullmatch(label))}
    cells = {
        index: {
            column: OTHER_WORDS.get(cell, cell)
            for column, cell in zip(header.columns, rows[label].cells, strict=True)
        }
        for index, label in gpus.items()
    }
    aside = {
        index: dict(zip(header.aside, rows[label].aside, strict=True))
        for index, label in gpus.items()
        if header.aside and len(header.aside) == len(rows[label].aside)
    }
    return TopoMatrix(
        gpus=tuple(sorted(gpus)),
        classes={(i, j): cells[i][gpus[j]] for i, j in combinations(sorted(gpus), 2)},
        nics={
            legend[column][1] if column in legend else column: {
                index: cells[index][column] for index in sorted(gpus)
            }
            for column in header.columns
            if not _GPU.fullmatch(column)
        },
        numa=_numbers(aside, "numa"),
        cpus={
            index: found["cpus"]
            for index, found in sorted(aside.items())
            if found.get("cpus", "N/A") != "N/A"
        },
        gpu_memory=_numbers(aside, "gpu_memory"),
        names={index: name for index, name in sorted(names.items()) if index in gpus},
        mig=frozenset(mig & gpus.keys()),
    )


def _numbers(aside: Mapping[int, Mapping[str, str]], key: str) -> dict[int, int]:
    return {
        index: int(found[key])
        for index, found in sorted(aside.items())
        if found.get(key, "").isdecimal()
    }
