"""The fault table: deploys interrupted at moments nobody chose, and what the next one makes of it.

Long: `make test-long PART=interrupted-deploys` writes docs/measured/interrupted-deploys.md.
"""

from __future__ import annotations

import random
import time

import pytest

from tests.lab.conftest import Fleet
from tests.lab.faults import converged, deploy_killed_after, power_cut_after
from tests.support.measured import note

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

# The moments are drawn once and written down by the seed, so that a failure can be repeated. A
# deploy of a changed value takes some 40 s on two cores: look, write and restart in the first ten,
# then the model loads.
DRAW = random.Random(20261122)
KILLS = [round(DRAW.uniform(0.5, 20), 1) for _ in range(10)]
CUTS = [round(DRAW.uniform(0.5, 20), 1) for _ in range(5)]
FIRST_KILLS = [8.0, 15.0, 25.0, 35.0]
FIRST_CUTS = [("gpu-01", 20.0), ("gpu-02", 30.0)]


def test_a_first_deploy_interrupted_again_and_again_converges(
    nodes: Fleet,
) -> None:
    """Packages, accounts, the release and the model's files, each cut short where it stands."""
    kills = [(seconds, deploy_killed_after(nodes, seconds, seqs=8)) for seconds in FIRST_KILLS]
    cuts = [
        (node, seconds, power_cut_after(nodes, node, seconds, seqs=8))
        for node, seconds in FIRST_CUTS
    ]
    began = time.monotonic()
    converged(nodes, seqs=8)
    spent = time.monotonic() - began
    for seconds, operation in kills:
        record("kill -9 of a first deploy", seconds, operation, spent)
    for node, seconds, operation in cuts:
        record(f"power cut of {node} in a first deploy", seconds, operation, spent)


@pytest.mark.parametrize(("number", "seconds"), list(enumerate(KILLS, 1)))
def test_a_killed_deploy_converges(deployed: Fleet, number: int, seconds: float) -> None:
    seqs = 8 + number
    operation = deploy_killed_after(deployed, seconds, seqs)
    began = time.monotonic()
    converged(deployed, seqs)
    record("kill -9 of pyinfra", seconds, operation, time.monotonic() - began)


@pytest.mark.parametrize(("number", "seconds"), list(enumerate(CUTS, 1)))
def test_a_node_without_power_converges(deployed: Fleet, number: int, seconds: float) -> None:
    seqs = 20 + number
    node = ("gpu-01", "gpu-02")[number % 2]
    operation = power_cut_after(deployed, node, seconds, seqs)
    began = time.monotonic()
    converged(deployed, seqs)
    record(f"power cut of {node}", seconds, operation, time.monotonic() - began)


def record(fault: str, seconds: float, operation: str, spent: float) -> None:
    """Write a row: what was interrupted when, while what, and how long the next two runs took."""
    note(
        "measured/interrupted-deploys.md",
        fault,
        f"{seconds:.1f} s",
        operation,
        f"{spent:.0f} s",
        key=2,
    )
