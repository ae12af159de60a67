"""`gpufleet check` as an operator and a program meet it: on recorded nodes, without a network."""

from __future__ import annotations

import json
import re

import jsonschema
import pytest

from gpufleet.catalog.checks import CHECKS
from tests.support import warm_command
from tests.support.checkout import ROOT
from tests.support.rows import each_row

NODES = ROOT / "src/gpufleet/catalog/data/nodes"
SCHEMA = json.loads((ROOT / "docs/reference/check-report.schema.json").read_text())


def check(*arguments):
    return warm_command.run(["check", *arguments], cwd=ROOT)


@pytest.fixture
def recorded(tmp_path):
    """`recorded(profile, change=...)`: a file with one node's probe, changed in place."""

    def write(profile, change=None, name="gpu-01"):
        document = json.loads((NODES / f"{profile}.json").read_text())
        if change:
            change(document)
        file = tmp_path / f"{name}.json"
        file.write_text(json.dumps(document))
        return file

    return write


@pytest.fixture
def fleet(tmp_path):
    """64 healthy nodes in one file, as `gpufleet probe --json` prints them."""
    recorded = (NODES / "h100x8.json").read_text()
    file = tmp_path / "fleet.json"
    nodes = (f'"gpu-{n:02}": {recorded.replace("GPU-", f"GPU-{n:02}")}' for n in range(1, 65))
    file.write_text(f"{{{', '.join(nodes)}}}")
    return file


def lose_ecc(document):
    document["gpus"][3]["ecc_uncorrected_volatile"] = 2


def test_a_healthy_fleet_of_64_fits_one_screen_and_exits_0(fleet):
    run = check("--from", fleet)

    assert run.returncode == 0, run.stdout + run.stderr
    assert len(run.stdout.splitlines()) <= 24
    assert "fit" in run.stdout
    assert "64 nodes" in run.stdout
    assert "gpu-[01-64]" in run.stdout
    assert "8 x NVIDIA H100 80GB HBM3" in run.stdout


def test_a_blocked_gpu_is_the_first_line_and_exits_1(recorded):
    run = check("--from", recorded("h100x8", lose_ecc))

    assert run.returncode == 1
    line, identity = run.stdout.splitlines()[1:3]
    gpu = json.loads((NODES / "h100x8.json").read_text())["gpus"][3]
    for word in ("BLOCK", "gpu-01 GPU 3", "ecc-uncorrected"):
        assert word in line
    assert identity.strip() == f"PCI {gpu['pci']['bus_id']}, serial {gpu['serial']}"
    assert run.stdout.splitlines()[-1].split()[0] == "blocked"


def test_equal_findings_share_a_line(recorded):
    def all_of_them(document):
        for gpu in document["gpus"]:
            gpu["persistence_mode"] = 0

    lines = check("--from", recorded("h100x8", all_of_them)).stdout.splitlines()

    assert len([line for line in lines if "persistence" in line and "WARN" in line]) == 1
    assert any("GPU 0-7" in line for line in lines)


@pytest.mark.parametrize("change", [None, lose_ecc])
def test_the_json_is_what_its_schema_says(recorded, change):
    run = check("--from", recorded("h100x8", change), "--json")
    report = json.loads(run.stdout)

    jsonschema.validate(report, SCHEMA)
    assert run.returncode == int(not report["fit"]) == int(change is not None)
    assert {finding["check"] for finding in report["findings"]} == set(CHECKS)


def test_a_report_can_be_judged_again(recorded, tmp_path):
    """The facts lie beside the verdicts: tomorrow's checks, or other settings, judge them anew."""
    first = check("--from", recorded("h100x8", lose_ecc), "--json")
    (tmp_path / "report.json").write_text(first.stdout)
    (tmp_path / "vars.yml").write_text(
        "checks: {accept: [{check: ecc-uncorrected, node: gpu-01, until: 2999-01-01}]}\n"
    )

    again = check("--from", tmp_path / "report.json", "--json")
    accepted = check("--from", tmp_path / "report.json", "--vars", tmp_path / "vars.yml")

    assert json.loads(again.stdout)["findings"] == json.loads(first.stdout)["findings"]
    assert accepted.returncode == 0
    assert re.search(r"accepted +gpu-01 GPU 3 +ecc-uncorrected", accepted.stdout)


def test_all_shows_what_passed(recorded):
    shown = check("--from", recorded("t4x1"), "--all").stdout

    assert all(name in shown for name in CHECKS)


def test_list_names_every_check_and_needs_no_node():
    run = check("--list")

    assert run.returncode == 0
    assert {line.split()[0] for line in run.stdout.splitlines()[1:]} == set(CHECKS)


@each_row(
    ("arguments", "says"),
    [
        ((), "INVENTORY is missing, and there are inventories/lab.py"),
        (("inventories/prd.py",), "no such inventory file"),
        (("--from", "nope.json"), "nope.json: cannot be read"),
        (("--from", "pyproject.toml"), "is not JSON"),
        (
            ("--from", NODES / "t4x1.json", "inventories/prod.py"),
            "INVENTORY and --from exclude each other: give one INVENTORY,",
        ),
        (("--from", NODES / "t4x1.json", "--limit", "t4"), "did you mean 't4x1'"),
        (("--from", NODES / "t4x1.json", "--vars", "nope.yml"), "nope.yml: cannot be read"),
        (("inventories/prod.py", "--vars", "x.yml"), "--vars works only with --from, because"),
    ],
)
def test_a_mistake_ends_in_a_sentence_and_2(arguments, says):
    run = check(*arguments)

    assert run.returncode == 2
    assert says in run.stderr
    assert "Traceback" not in run.stderr


def test_a_report_keeps_the_nodes_that_did_not_answer(recorded, tmp_path):
    document = json.loads((NODES / "t4x1.json").read_text())
    (tmp_path / "two.json").write_text(json.dumps({"gpu-01": document, "gpu-02": "no answer"}))
    first = check("--from", tmp_path / "two.json", "--json")
    (tmp_path / "report.json").write_text(first.stdout)

    again = check("--from", tmp_path / "report.json", "--json")

    assert first.returncode == again.returncode == 1
    assert json.loads(again.stdout)["nodes"]["gpu-02"]["verdict"] == "unknown"


def test_recorded_nodes_are_judged_by_what_is_to_be_installed(recorded, tmp_path):
    """A driver for CUDA 12.4 does not run wheels that carry CUDA 13."""

    def old(document):
        document["driver"]["cuda"] = 12040

    (tmp_path / "vars.yml").write_text(
        "vllm: {version: 0.32.0, lock: locks/vllm-0.32.0.txt, listen: 127.0.0.1}\n"
    )
    run = check("--from", recorded("h100x8", old), "--vars", tmp_path / "vars.yml")

    assert run.returncode == 1
    assert re.search(r"BLOCK +gpu-01 +driver-minimum", run.stdout)


def test_a_gpu_that_is_gone_is_in_the_json(recorded):
    def lose(document):
        for section in ("gpus", "nvlink", "numa", "fabric"):
            document[section].pop()
        for matrix in (*document["p2p"].values(), document["pcie"]):
            matrix.pop()
            for row in matrix:
                row.pop()
        document["driver"]["gpu_count"] = 7

    lost = json.loads((NODES / "h100x8.json").read_text())["gpus"][7]["pci"]["bus_id"]
    report = json.loads(check("--from", recorded("h100x8", lose), "--json").stdout)

    assert report["nodes"]["gpu-01"]["gone_gpus"] == [lost]


@pytest.mark.parametrize(
    "text", ["{}", "[1]", '{"gpu-01": [1]}', '{"gpu-01": null}', '{"a": NaN}', '{"facts": {}}',
             "[" * 100_000, '{"a": ' + "9" * 5000 + "}", '{"findings": []}'],
    ids=lambda text: text[:20],
)  # fmt: skip
def test_what_is_no_recording_is_refused_with_2(tmp_path, text):
    (tmp_path / "x.json").write_text(text)

    run = check("--from", tmp_path / "x.json")

    assert run.returncode == 2
    assert run.stderr.startswith("error: ")
    assert "Traceback" not in run.stderr
