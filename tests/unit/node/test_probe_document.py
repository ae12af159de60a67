"""A probe's document is held to its form: pairs of GPUs are a square, whatever else is there."""

from __future__ import annotations

import json
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest

from gpufleet.errors import FleetError
from gpufleet.node.machine import Machine, _secure_boot
from gpufleet.node.topology import node_from_probe
from tests.support.checkout import ROOT

PROBE = json.loads((ROOT / "src/gpufleet/catalog/data/nodes/a100x4-pcie.json").read_text())


def too_long(matrix: list[list[Any]]) -> None:
    for row in matrix:
        row.append(None)


def too_short(matrix: list[list[Any]]) -> None:
    matrix[1].pop()


def too_few(matrix: list[list[Any]]) -> None:
    matrix.pop()


@pytest.mark.parametrize("break_it", [too_long, too_short, too_few])
@pytest.mark.parametrize("name", ["pcie", "p2p.read", "p2p.write", "p2p.nvlink"])
def test_pairs_that_are_no_square_of_the_gpus_are_refused_by_name(
    name: str, break_it: Callable[[list[list[Any]]], None]
) -> None:
    found = deepcopy(PROBE)
    matrix = found
    for part in name.split("."):
        matrix = matrix[part]
    break_it(matrix)

    with pytest.raises(FleetError, match=name.replace(".", r"\.")):
        node_from_probe("gpu-01", found)


def test_the_whole_document_is_taken() -> None:
    assert len(node_from_probe("gpu-01", deepcopy(PROBE)).gpus) == 4


def test_a_machine_has_nothing_that_it_was_not_seen_to_have() -> None:
    plain = Machine(())

    assert (plain.nvswitch, plain.nvlink5, plain.imex, plain.grace) == (False,) * 4
    assert (plain.secure_boot, plain.modules, plain.kernels) == (None, None, ())


@pytest.mark.parametrize(
    ("value", "secure"),
    [
        (True, True),
        (False, False),
        ({"missing": "absent"}, False),
        ({"missing": "no permission"}, None),
        (None, None),
    ],
)
def test_secure_boot_is_off_without_efi_and_unknown_where_it_cannot_be_read(
    value: object, secure: bool | None
) -> None:
    assert _secure_boot(value) is secure
