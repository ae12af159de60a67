"""The fleets in examples/ are right, fit the hardware that they name, and none is live by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from gpufleet.fleet.inventory_check import validate
from gpufleet.inventory.loader import read
from tests.support.checkout import ROOT
from tests.support.fleet_folder import write_example_models
from tests.support.rows import each_row

EXAMPLES = ROOT / "examples"
FLEETS = sorted(EXAMPLES.glob("*/inventories/*.py"))
# Those of examples/explained have none of their own.
EXPLAINED = {"gpu_h100": "h100x8", "gpu_a100": "a100x4-pcie"}


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    return write_example_models(tmp_path_factory.mktemp("models"))


@each_row("inventory", FLEETS, ids=lambda path: path.parts[-3])
def test_an_example_has_no_mistake_and_its_models_fit_its_hardware(inventory, models):
    hardware = EXPLAINED if "explained" in inventory.parts else None

    found = validate(read(inventory), hardware=hardware, models_folder=models, secret_files=False)

    assert found.problems == ()
    assert found.totals
    assert found.totals.planned


def test_three_models_share_one_gpu(models):
    """The flags that vLLM gets leave each its share, and the plan names what is left."""
    fleet = read(EXAMPLES / "shared-gpu/inventories/box.py")
    [node] = fleet.nodes.values()
    found = validate(fleet, models_folder=models, secret_files=False)

    assert found.problems == ()
    assert found.totals
    assert found.totals.planned == 1
    assert sum(each.gpu_share or 0 for each in node.settings.serving.values()) <= 0.95


def test_fourteen_mixed_nodes_with_seven_models_are_declared_in_forty_lines(models):
    folder = EXAMPLES / "mixed-14"
    files = [path for path in folder.rglob("*") if path.is_file()]
    fleet = read(folder / "inventories/prod.py")

    assert sum(len(path.read_text().splitlines()) for path in files) <= 40
    assert len(fleet.nodes) == 14
    assert {len(node.settings.serving) for node in fleet.nodes.values()} == {7}
    planned = validate(fleet, models_folder=models, secret_files=False)
    assert planned.totals
    assert planned.totals.gpus == 112


def test_every_example_is_in_the_table():
    table = re.findall(r"^\| \[([a-z0-9-]+)\]", (EXAMPLES / "README.md").read_text(), re.MULTILINE)

    assert sorted(table) == sorted({path.parts[-3] for path in FLEETS})


def test_nothing_that_is_shipped_is_live_by_its_files_name():
    """But for the lab's files, and those that have defaults alone."""
    assert {path.name for path in (ROOT / "inventories").glob("*.py")} == {"lab.py", "local.py"}
    shipped = {path.name for path in (ROOT / "group_vars").glob("*.yml")}
    assert shipped == {"all.yml", "lab.yml", "local.yml", "monitoring.yml"}
    assert list((ROOT / "host_vars").glob("*.yml")) == []
