"""What keeps a node out of service until a check has passed, and what such a check lets by."""

from __future__ import annotations

import datetime as dt
import json

import pytest

from gpufleet.checks.evaluate import evaluate
from gpufleet.converge.desired import File
from gpufleet.gpu_software import quarantine
from gpufleet.gpu_software.driver_activation import Active, Blocked
from gpufleet.on_node.gpu_software import driver_reload
from gpufleet.settings.parse import parse_settings
from tests.support.checkout import ROOT

NODE = "gpu-01"
STANDS = Active("570.124.06")


@pytest.fixture
def document():
    return json.loads((ROOT / "src/gpufleet/catalog/data/nodes/h100x8.json").read_text())


def report(document):
    """Judge alone, on a day on which nothing is accepted."""
    return evaluate({NODE: document}, {}, dt.date(2026, 1, 1))


def problems(document, standing=STANDS, **checks):
    settings = parse_settings({"checks": checks})
    return quarantine.problems(report(document), NODE, settings, standing)


def test_a_healthy_node_serves(document):
    assert problems(document) == ()


def test_a_node_whose_driver_is_not_in_force_does_not_whatever_else_is_well(document):
    said = problems(document, Blocked(("the disk has no module",)))
    assert said == (f"{NODE}: the disk has no module",)


def test_a_node_that_does_not_answer_does_not_serve():
    said = quarantine.problems(
        report("no answer within 60 s"), NODE, parse_settings({}), None
    )  # fmt: skip
    assert "no answer within 60 s" in said[0]


def test_one_unfit_gpu_is_for_the_operator_to_accept(document):
    document["gpus"][3]["remapped_rows"]["failed"] = 1
    assert "row-remap-failed" in problems(document)[0]
    assert problems(document, degraded=True) == ()


def test_a_fabric_on_its_way_is_waited_for_and_nothing_else_is(document):
    settings = parse_settings({})
    for fabric in document["fabric"]:
        fabric["state"] = 2  # in progress
    assert problems(document)
    assert quarantine.is_fabric_pending(report(document), NODE, settings)
    document["gpus"][3]["remapped_rows"]["failed"] = 1
    assert not quarantine.is_fabric_pending(report(document), NODE, settings)


def test_the_guard_looks_for_the_mark_that_the_program_sets():
    (guard,) = quarantine.stage_guard().values_of(File)
    assert f"ConditionPathExists=!{driver_reload.MARK}" in guard.content.decode()
    assert quarantine.MARK == driver_reload.MARK
