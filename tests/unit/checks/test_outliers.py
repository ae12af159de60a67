"""The checks of outliers find a number that differs, and never block a harmless difference."""

from __future__ import annotations

import re
from collections.abc import Iterator
from copy import deepcopy

import pytest

from gpufleet.catalog.checks import CHECKS
from gpufleet.checks.finding import Severity
from gpufleet.checks.other_facts import ELSEWHERE, UNJUDGED
from gpufleet.checks.outlier_facts import JUDGED_OF_GPU, JUDGED_OF_NODE
from tests.support.checkout import ROOT
from tests.support.measured import note
from tests.support.rows import each_row

from .conftest import PROFILES

MISSING = {"missing": "unknown", "code": 999}
GPU = 3
JUDGED = {fact.path for fact in (*JUDGED_OF_GPU, *JUDGED_OF_NODE)}


def numbers(value, path=()):
    """Yield the path of every number in a document."""
    if isinstance(value, dict) and "missing" not in value:
        for key, item in value.items():
            yield from numbers(item, (*path, key))
    elif isinstance(value, list):
        for place, item in enumerate(value):
            yield from numbers(item, (*path, place))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path


def pattern(path):
    """Return a path as the table writes it: "gpus.*.memory.total"."""
    text = ".".join("*" if isinstance(part, int) else str(part) for part in path)
    text = re.sub(r"^system\.disks\..*\.(\w+)$", r"system.disks.*.\1", text)
    return re.sub(r"^nics\.\w+\.\*\.pci\.numa_node$", "nics.*.pci.numa_node", text)


def verdict(path):
    """Return how the tables judge a path: the longest name that it begins with."""
    if path in JUDGED:
        return "judged"
    table = {**UNJUDGED, **ELSEWHERE}
    names = sorted((name for name in table if path.startswith(name)), key=len, reverse=True)
    return table[names[0]] if names else None


def put(document, path, value):
    place = document
    for part in path[:-1]:
        place = place[part]
    place[path[-1]] = value


def at(document, path):
    for part in path:
        document = document[part]
    return document


@each_row("profile", PROFILES)
def test_every_number_of_a_probe_is_judged_or_has_a_reason(document, profile):
    left = {pattern(path) for path in numbers(document(profile))}

    assert {path for path in left if verdict(path) is None} == set()


def test_the_table_names_checks_that_exist():
    assert set(ELSEWHERE.values()) <= set(CHECKS)
    asked_by = {fact.asked_by for fact in (*JUDGED_OF_GPU, *JUDGED_OF_NODE)}
    assert asked_by - {None} <= set(CHECKS)
    assert all(fact.source and fact.against for fact in (*JUDGED_OF_GPU, *JUDGED_OF_NODE))


# --- one GPU among those of its node

ONE_GPU = [
    ("h200x8", "memory.total", 130 << 30, "warn"),
    ("h200x8", "memory.total", 70 << 30, "block"),
    ("h200x8", "memory.total", 160 << 30, "info"),
    ("h200x8", "pcie_generation", 3, "warn"),
    ("h200x8", "pcie_generation_max", 4, "warn"),
    ("h200x8", "pcie_width_max", 8, "warn"),
    ("h200x8", "temperature_celsius", 39, "info"),
    ("h200x8", "temperature_celsius", 60, "warn"),
    ("h200x8", "temperature_celsius", 20, "info"),
    ("h200x8", "temperature_memory_celsius", 70, "warn"),
    ("h200x8", "power_draw_milliwatts", 100_000, "info"),
    ("h200x8", "power_draw_milliwatts", 160_000, "warn"),
    ("h200x8", "power_draw_milliwatts", MISSING, "warn"),
    ("h200x8", "power_default_limit_milliwatts", 600_000, "warn"),
    ("h200x8", "power_limits_milliwatts.max", 600_000, "warn"),
    ("h200x8", "temperature_slowdown_celsius", 80, "info"),
    ("h200x8", "../nvlink/count", 12, "warn"),
    ("gb200x4", "c2c_links", 4, "warn"),
    ("gb200x4", "c2c_links", MISSING, "warn"),
    ("gb200x4", "addressing_mode", 0, "info"),
]


@each_row(("profile", "fact", "value", "severity"), ONE_GPU)
def test_a_gpu_that_differs_from_those_beside_it_stands_out(  # noqa: PLR0917
    document, judged, profile, fact, value, severity
):
    found = document(profile)
    if fact.startswith("../"):
        _, section, key = fact.split("/")
        found[section][GPU][key] = value
    else:
        put(found["gpus"][GPU], fact.split("."), value)

    said = judged(found)

    assert said.worst("gpu-outlier").severity.word == severity
    assert said.worst("gpu-outlier").gpu.index == GPU
    others = {each.gpu.index for each in said.of("gpu-outlier") if each.severity > Severity.OK}
    assert others == {GPU}


def test_all_that_stands_out_of_a_gpu_is_one_finding(document, judged):
    found = document("h200x8")
    found["gpus"][GPU]["memory"]["total"] = 130 << 30
    found["gpus"][GPU]["temperature_celsius"] = 40

    (said,) = [each for each in judged(found).of("gpu-outlier") if each.severity > Severity.OK]

    assert said.found == "130.0 GiB of memory; 40 °C while the GPU idles"
    assert said.expected == "140.4 GiB of memory; 34 °C while the GPU idles"
    assert said.source == "the node's other GPUs of its model"


BENIGN = [
    ("temperature_celsius", 38),
    ("power_draw_milliwatts", 78_000),
    ("memory.total", 150_000_000_000),
]


@each_row(("fact", "value"), BENIGN)
def test_what_sound_gpus_differ_by_is_nothing(document, judged, fact, value):
    found = document("h200x8")
    put(found["gpus"][GPU], fact.split("."), value)

    assert judged(found).worst("gpu-outlier").severity is Severity.OK


def test_two_rows_of_gpus_in_one_stream_of_air_are_nothing(document, judged):
    found = document("h200x8")
    for place in range(4, 8):
        found["gpus"][place]["temperature_celsius"] = 43

    assert judged(found).worst("gpu-outlier").severity is Severity.OK


def test_a_gpu_that_computes_may_be_warm(document, judged):
    found = document("h200x8")
    found["gpus"][GPU] |= {
        "temperature_celsius": 70,
        "power_draw_milliwatts": 600_000,
        "processes": [
            {"pid": 9, "usedGpuMemory": 1, "name": "VLLM", "unit": "vllm-a-0.service", "uid": 9}
        ],
    }

    assert judged(found).worst("gpu-outlier").severity is Severity.OK


def test_another_model_or_ecc_mode_is_another_kind(document, judged):
    found = document("l40sx8")
    found["gpus"][2] |= {"name": "NVIDIA L4"}
    found["gpus"][2]["memory"]["total"] = 24 << 30
    found["gpus"][3]["ecc_mode"] = {"current": 0, "pending": 0}
    found["gpus"][3]["memory"]["total"] = 48 << 30

    assert judged(found).worst("gpu-outlier").severity is Severity.OK


def test_of_two_gpus_the_worse_is_named_and_never_blocked(document, judged):
    found = document("a100x2-pcie")
    found["gpus"][1]["memory"]["total"] = 40 << 30

    said = judged(found)

    assert [(each.gpu.index, each.severity.word) for each in said.of("gpu-outlier")] == [
        (1, "warn"),
        (0, "ok"),
    ]


def test_one_gpu_alone_is_compared_with_nothing_and_that_is_said(document, judged):
    said = judged(document("t4x1"))

    assert "does not apply: no other GPU of the same model" in said.worst("gpu-outlier").found
    assert "does not apply: no sibling" in said.worst("node-outlier").found


def test_a_gpu_alone_with_half_of_its_products_memory_is_a_warning(document, judged):
    found = document("t4x1")
    found["gpus"][0]["memory"] |= {"total": 8 << 30, "free": 7 << 30}

    said = judged(found)

    assert said.troubles == {("gpu-outlier", "warn", 0)}
    assert said.worst("gpu-outlier").source == "the value that CUDA reports for this product"


def test_two_gpus_with_one_uuid_block(document, judged):
    found = document("h200x8")
    found["gpus"][5]["uuid"] = found["gpus"][2]["uuid"]

    assert judged(found).troubles == {("gpu-answers", "block", 5)}


# --- a node among its siblings

ONE_NODE = [
    (("cpus",), 112, "warn"),
    (("cpus",), 256, "info"),
    (("cpus",), MISSING, "warn"),
    (("memory_mib",), 1_990_000, "warn"),
    (("memory_mib",), 2_130_000, "info"),
    (("nics", "net", 0, "speed"), 1000, "warn"),
    (("nics", "net", 0, "speed"), 100_000, "info"),
    (("nics", "net", 0, "mtu"), 1280, "warn"),
    (("nics", "net", 0, "pci", "numa_node"), 1, "info"),
    (("pcie", 0, 1), 50, "warn"),
    (("pcie", 0, 1), 10, "info"),
    (("system", "disks", "/", "size_mib"), 400_000, "info"),
    (("gpus", 0, "pci", "bus_id"), "0000:17:00.0", "info"),
]


@each_row(("path", "value", "severity"), ONE_NODE)
def test_a_node_that_differs_from_its_siblings_stands_out(document, judged, path, value, severity):
    found = document("h200x8")
    put(found, path, value)

    alone = judged(found).worst("node-outlier").severity
    said = judged(found, siblings=[document("h200x8") for _ in range(3)]).worst("node-outlier")

    assert alone is Severity.OK
    assert said.severity.word == severity
    assert said.gpu is None


@each_row(
    ("fact", "value", "severity"),
    [("memory.total", 130 << 30, "warn"), ("c2c_links", 4, "warn")],
)
def test_gpus_that_all_differ_are_found_by_the_siblings(document, judged, fact, value, severity):
    profile = "gb200x4" if fact == "c2c_links" else "h200x8"
    found = document(profile)
    for gpu in found["gpus"]:
        put(gpu, fact.split("."), value)

    said = judged(found, siblings=[document(profile) for _ in range(3)])

    assert {each.severity.word for each in said.of("gpu-outlier")} == {severity}
    assert judged(found).worst("gpu-outlier").severity is Severity.OK


def test_a_gpu_on_another_numa_node_than_in_its_siblings_is_named(document, judged):
    found = document("h200x8")
    found["numa"][GPU]["node"] = 1

    said = judged(found, siblings=[document("h200x8") for _ in range(3)])

    assert said.troubles == {("gpu-outlier", "warn", GPU)}


def test_a_node_is_one_line_whatever_stands_out(document, judged):
    found = document("h200x8")
    found["cpus"], found["memory_mib"] = 112, 1_031_000

    said = judged(found, siblings=[document("h200x8") for _ in range(3)])

    (only,) = said.of("node-outlier")
    assert only.found == "112 CPUs; 1006.8 GiB of memory"
    assert only.expected == "224 CPUs; 2015.6 GiB of memory"
    assert only.source == "3 sibling nodes with the same hardware"


def test_siblings_that_do_not_agree_say_nothing(document, judged):
    siblings = [document("h200x8") for _ in range(4)]
    siblings[0]["memory_mib"] = siblings[1]["memory_mib"] = 1_031_000

    found = document("h200x8")
    found["memory_mib"] = 3_000_000

    assert judged(found, siblings=siblings).worst("node-outlier").severity is Severity.OK


def test_a_node_with_fewer_gpus_is_another_machine(document, judged):
    found = document("gb200x4")
    siblings = [document("gb200x4") for _ in range(3)]
    found["cpus"] = 72
    for section in ("gpus", "nvlink", "numa", "fabric"):
        found[section] = found[section][:2]
    found["pcie"] = [row[:2] for row in found["pcie"][:2]]
    found["p2p"] = {key: [row[:2] for row in rows[:2]] for key, rows in found["p2p"].items()}
    found["driver"]["gpu_count"] = 2

    assert judged(found, siblings=siblings).worst("node-outlier").severity is Severity.OK


@each_row(("microseconds", "severity"), [(900_000, "ok"), (1_200_000, "info"), (5_000_000, "warn")])
def test_a_clock_that_may_be_far_off_is_found_on_a_node_alone(
    document, judged, microseconds, severity
):
    found = document("t4x1")
    found["system"]["clock"]["max_error_us"] = microseconds

    assert judged(found).worst("node-outlier").severity.word == severity


def test_no_difference_that_has_other_causes_blocks():
    """Only memory that a GPU lost does."""
    blocking = {
        fact.path
        for fact in (*JUDGED_OF_GPU, *JUDGED_OF_NODE)
        for step in (*fact.low, *fact.high)
        if step.severity >= Severity.UNKNOWN
    }

    assert blocking == {"gpus.*.memory.total"}


# --- the pages


def row_of(fact):
    """Return a fact's line of the tables in docs/checks."""

    def side(steps):
        said = []
        for step in steps:
            share = [f"{step.share:.0%}"] if step.share else []
            least = [fact.show(step.least)] if step.least else []
            beyond = " and ".join(share + least)
            said.append(step.severity.word + (f" beyond {beyond}" if beyond else ""))
        return ", ".join(said) or "-"

    low, high = side(fact.low), side(fact.high)
    sides = [f"any other: {low}", ""] if fact.names else [low, high]
    against = "; ".join(each.value for each in fact.against)
    return f"| {' | '.join([f'`{fact.path}`', against, *sides, fact.source])} |"


@each_row(("check", "facts"), [("gpu-outlier", JUDGED_OF_GPU), ("node-outlier", JUDGED_OF_NODE)])
def test_the_checks_page_has_the_table(check, facts):
    page = (ROOT / f"docs/checks/{check}.md").read_text()
    rows = [line for line in page.splitlines() if line.startswith("| `")]

    assert rows == [row_of(fact) for fact in facts]


@each_row("path", sorted(UNJUDGED))
def test_what_is_not_judged_is_on_the_page_with_its_reason(path):
    page = " ".join((ROOT / "docs/checks/node-outlier.md").read_text().split())

    assert f"`{path}`: {UNJUDGED[path]}" in page


SHORT = {Severity.BLOCK: "**B**", Severity.UNKNOWN: "**U**", Severity.WARN: "w",
         Severity.INFO: "i", Severity.OK: "."}  # fmt: skip


def changed(value, how):
    """Return a number as it would be wrong."""
    if how == "missing":
        return MISSING
    if how == "low":
        return value // 2 if value > 1 else value - 1
    return value * 2 if value else 1000


def said_of(judged, found, siblings) -> str:
    """Return the worst that is said, and by whom."""
    said = judged(found, siblings=siblings).findings
    asked = [each for each in said if each.cause is None]
    worst = max(each.severity for each in asked)
    by = sorted({each.check for each in asked if each.severity is worst})
    quiet = worst <= Severity.INFO and "not checked" in " ".join(
        each.found for each in asked if each.severity is worst
    )
    if worst is Severity.OK or quiet:
        return "."
    return f"{SHORT[worst]} {', '.join(by[:2])}" + (" ..." if len(by) > 2 else "")


def matrix(document, judged) -> Iterator[list[str]]:
    """Yield the rows of docs/measured/outlier-matrix.md: one for each number of a probe."""
    seen: set[str] = set()
    for profile in ("h200x8", "gb200x4", "l40sx8", "t4x1", "a100x2-pcie"):
        healthy = document(profile)
        siblings = [document(profile) for _ in range(3)]
        for path in numbers(healthy):
            name = pattern(path)
            of_gpu = GPU if len(healthy["gpus"]) > GPU else 0
            wanted = {part for part in path if isinstance(part, int)}
            in_gpus = path[0] in {"gpus", "numa", "nvlink", "fabric"}
            if name in seen or path[0] in {"schema", "pci"} or path[-1] in {"index", "link"}:
                continue
            if (in_gpus and path[1] != of_gpu) or (not in_gpus and wanted - {0, 1}):
                continue
            if path[0] in {"p2p", "pcie"} and path[-2:] != (0, 1):
                continue
            if path[:2] in {("p2p", "read"), ("p2p", "write")} and profile != "l40sx8":
                continue  # of GPUs that NVLink joins no check asks
            seen.add(name)
            cells = []
            for others in ([], siblings):
                for how in ("low", "high", "missing"):
                    found = deepcopy(healthy)
                    put(found, path, changed(at(healthy, path), how))
                    try:
                        cells.append(said_of(judged, found, others))
                    except KeyError:
                        cells.append("")
            yield [f"{name} ({profile})", *cells, how_judged(name)]


def how_judged(name: str) -> str:
    facts = {fact.path: fact for fact in (*JUDGED_OF_GPU, *JUDGED_OF_NODE)}
    if name in facts:
        against = ", ".join(each.value for each in facts[name].against)
        return f"{against}: {facts[name].source}"
    if verdict(name) not in CHECKS:
        return f"not judged: {verdict(name)}"
    return f"[{verdict(name)}](../checks/{verdict(name)}.md)"


@pytest.mark.long
def test_the_matrix_of_all_numbers_is_written(document, judged):
    rows = list(matrix(document, judged))

    assert len(rows) > 60
    # Declared needs of vLLM alone judge CUDA's version; bits of reasons and codes of P2P are no
    # quantities: half or twice of one is another one.
    silent = {row[0].split()[0] for row in rows if set(row[1:7]) == {"."} and "[" in row[7]}
    assert silent <= {
        "driver.cuda", "gpus.*.throttle_reasons", "gpus.*.throttle_samples.*",
        "p2p.read.*.*", "p2p.write.*.*",
    }  # fmt: skip
    for row in rows:
        note("measured/outlier-matrix.md", *row)
