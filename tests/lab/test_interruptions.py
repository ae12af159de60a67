"""The fault table: deploys interrupted at moments nobody chose, and what the next one makes of it.

Long: `make test-long`. The last result is docs/fault-table.md.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import pytest

from tests.lab.conftest import Fleet
from tests.lab.faults import converged, deploy_killed_after, power_cut_after

pytestmark = [pytest.mark.long, pytest.mark.timeout(1800)]

# The moments are drawn once and written down by the seed, so that a failure can be repeated. A
# deploy of a changed value takes some 40 s on two cores: look, write, restart (drain), load.
DRAW = random.Random(20261121)
KILLS = [round(DRAW.uniform(0.5, 40), 1) for _ in range(10)]
CUTS = [round(DRAW.uniform(0.5, 40), 1) for _ in range(5)]
FIRST_KILLS = [8.0, 15.0, 20.0, 30.0, 40.0]


def test_a_first_deploy_killed_five_times_over_converges(
    nodes: Fleet, record: Callable[..., None]
) -> None:
    """Packages, accounts, the release and the model's files, each cut short where it stands."""
    reached = [deploy_killed_after(nodes, seconds, seqs=8) for seconds in FIRST_KILLS]
    began = time.monotonic()
    converged(nodes, seqs=8)
    for seconds, operation in zip(FIRST_KILLS, reached, strict=True):
        record("kill -9 of a first deploy", seconds, operation, time.monotonic() - began)


@pytest.mark.parametrize(("number", "seconds"), enumerate(KILLS, 1))
def test_a_killed_deploy_converges(
    deployed: Fleet, record: Callable[..., None], number: int, seconds: float
) -> None:
    seqs = 8 + number
    operation = deploy_killed_after(deployed, seconds, seqs)
    began = time.monotonic()
    converged(deployed, seqs)
    record("kill -9 of pyinfra", seconds, operation, time.monotonic() - began)


@pytest.mark.parametrize(("number", "seconds"), enumerate(CUTS, 1))
def test_a_node_without_power_converges(
    deployed: Fleet, record: Callable[..., None], number: int, seconds: float
) -> None:
    seqs = 20 + number
    node = ("gpu-01", "gpu-02")[number % 2]
    operation = power_cut_after(deployed, node, seconds, seqs)
    began = time.monotonic()
    converged(deployed, seqs)
    record(f"power cut of {node}", seconds, operation, time.monotonic() - began)
