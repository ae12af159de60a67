"""`gpufleet topology` as operators run it: what it takes, what it prints, how it says no."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from gpufleet.cli.topology_command import inventory_of
from gpufleet.node.probe_document import SCHEMA
from tests.support import warm_command
from tests.support.checkout import ROOT
from tests.support.rows import each_row

NODES = ROOT / "src/gpufleet/catalog/data/nodes"
PROD = "examples/explained/inventories/prod.py"
TOPO = ROOT / "tests/data/topo"
GPUFLEET = Path(sys.executable).with_name("gpufleet")


def topology(*arguments: object, stdin: bytes = b"", cwd: Path = ROOT):
    run = warm_command.run(["topology", *arguments], cwd=cwd, stdin=stdin)
    assert "Traceback" not in run.stderr
    return run


def told(*arguments: object, stdin: bytes = b""):
    run = topology(*arguments, "--json", stdin=stdin)
    assert run.returncode == 0, run.stderr
    return json.loads(run.stdout)


def refused(*arguments: object, stdin: bytes = b"", cwd: Path = ROOT) -> str:
    run = topology(*arguments, stdin=stdin, cwd=cwd)
    assert run.returncode == 2, run.stderr
    assert run.stdout == ""
    return run.stderr


@pytest.fixture
def probes(tmp_path):
    """Two nodes in one file, as `gpufleet probe --json` prints them."""
    path = tmp_path / "probes.json"
    documents = {
        name: json.loads((NODES / f"{profile}.json").read_text()) | {"schema": SCHEMA}
        for name, profile in {"gpu-01": "h100x8", "gpu-02": "a100x4-pcie"}.items()
    }
    path.write_text(json.dumps({**documents, "gpu-03": "did not answer within 60 s"}))
    return path


# --- what it takes


def test_a_pasted_matrix_from_a_file_and_from_stdin():
    text = (TOPO / "dgx-1v.txt").read_bytes()

    from_file, from_stdin = told(TOPO / "dgx-1v.txt"), told("-", stdin=text)

    assert (from_file.pop("node"), from_stdin.pop("node")) == ("dgx-1v", "stdin")
    assert from_file == from_stdin
    assert (from_file["islands"], from_file["max_tp"]) == ([[0, 1, 2, 3], [4, 5, 6, 7]], 4)


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_file_that_windows_wrote(tmp_path, encoding):
    text = (TOPO / "hgx-h100.txt").read_text().replace("\n", "\r\n")
    (tmp_path / "topo.txt").write_text(text, encoding=encoding)

    assert told(tmp_path / "topo.txt")["max_tp"] == 8


def test_a_node_of_recorded_probes(probes):
    assert told(probes, "gpu-02")["islands"] == [[0, 1], [2, 3]]


def test_a_recorded_probe_of_one_node_needs_no_name(probes, tmp_path):
    one = json.loads(probes.read_text())["gpu-01"]
    (tmp_path / "bare.json").write_text(json.dumps(one))
    (tmp_path / "named.json").write_text(json.dumps({"gpu-01": one}))

    assert told(tmp_path / "bare.json")["node"] == "bare"
    assert told(tmp_path / "named.json")["node"] == "gpu-01"


@each_row(
    ("source", "wanted"),
    [
        ("inventories/prod.py", ("inventories/prod.py", None)),
        ("inventories/prod.py:gpu-01", ("inventories/prod.py", "gpu-01")),
        ("topo.txt", None),
        ("C:topo.txt", None),
        ("-", None),
    ],
)
def test_an_inventory_is_told_by_its_name(source, wanted):
    assert inventory_of(source) == wanted


# --- what it prints


def test_the_picture_is_for_people_and_the_drawing_is_beside_it(tmp_path):
    run = topology(TOPO / "hgx-h100.txt", "--svg", tmp_path / "node.svg")

    assert run.returncode == 0
    assert "NVLink island 0-7: 8 GPUs, NV18" in run.stdout
    assert "\x1b" not in run.stdout
    assert ET.parse(tmp_path / "node.svg").getroot().tag == "{http://www.w3.org/2000/svg}svg"


def test_the_promised_keys_are_there():
    assert {"gpus", "islands", "max_tp", "pairs", "warnings"} <= told(TOPO / "t4-single.txt").keys()


# --- how it says no


@each_row(
    ("arguments", "says"),
    [
        (("nope.txt",), "nope.txt: cannot be read: No such file or directory: give"),
        (("tests",), "tests: cannot be read: Is a directory"),
        (("README.md",), "README.md: has no line with the columns"),
        (("uv.lock",), "uv.lock: has no line with the columns"),
        ((PROD,), f"{PROD} has several nodes: write one of gpu-"),
        ((PROD, "gpu-a100-1"), "did you mean 'gpu-a100-01'"),
        ((f"{PROD}:gpu-a100-1",), "did you mean 'gpu-a100-01'"),
        (("inventories/prd.py", "x"), "no such inventory file"),
        ((TOPO / "t4-single.txt", "--svg", "/nowhere/x.svg"), "/nowhere/x.svg: cannot be written"),
    ],
)
def test_a_mistake_ends_in_a_sentence(arguments, says):
    assert says in refused(*arguments)


@each_row(
    ("text", "says"),
    [
        (b"", "stdin: is empty"),
        (b" \n\n", "stdin: is empty"),
        (b"\x7fELF\xff\xfe", "stdin: is not UTF-8 text"),
        (b"\xff\xfe\x00", "stdin: is not UTF-8 text"),
        (b'{"a": ', "stdin:1: is not JSON"),
        (b"{}", "stdin: is JSON, but not a probe"),
        (b'{"a": {"b": 1}}', "a: the probe is not the document of a probe"),
        (b'{"a": {"schema": 2}, "b": 1}', "stdin: is JSON, but not a probe"),
        (b'{"schema": 0}', "stdin: the probe has schema 0"),
        (b'{"schema": %d}' % SCHEMA, "stdin: the probe is incomplete"),
        (b'{"schema": %d, "driver": 7, "gpus": 7}' % SCHEMA, "stdin: the probe is incomplete"),
        (b'{"a":' * 100_000, "stdin: is not a probe"),
    ],
)
def test_a_text_that_is_nothing_of_it_ends_in_a_sentence(text, says):
    assert says in refused("-", stdin=text)


def test_a_broken_paste_is_refused_with_its_line(tmp_path):
    text = (TOPO / "hgx-a100.txt").read_text().replace("NV12\t X \t", "NV12\t", 1)
    (tmp_path / "topo.txt").write_text(text)

    said = refused("topo.txt", cwd=tmp_path)

    assert said.startswith("error: topo.txt:3: GPU1 has 15 cells")


def test_several_nodes_need_a_name(probes):
    assert "has several nodes: write one of gpu-01, gpu-02, gpu-03" in refused(probes)
    assert "did you mean" in refused(probes, "gpu-1")


def test_a_node_that_gave_no_probe_says_why(probes):
    assert refused(probes, "gpu-03") == "error: gpu-03: did not answer within 60 s\n"
