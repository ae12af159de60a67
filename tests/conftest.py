"""Fixtures that tests of several modules share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

from gpufleet.node.topology import Node, node_from_probe
from tests.support.checkout import ROOT

NODES = ROOT / "tests/data/nodes"

# Drawn examples are the same in every run, and no run fails because the machine was busy. To look
# for others: HYPOTHESIS_PROFILE=search.
ANY_PACE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", ANY_PACE, derandomize=True)
settings.register_profile("search", ANY_PACE)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# What works on the one fleet of tests/lab: it stands once, so one worker has them all.
FLEET = frozenset(
    {
        "test_argument_proof",
        "test_flag_schemas",
        "test_flags",
        "test_interruptions",
        "test_main_job",
        "test_monitoring",
        "test_node_check",
        "test_sizing",
        "test_stalled",
        "test_systemd_quoting",
    }
)


class OneLabOneWorker(LoadFileScheduling):
    """A file's tests stay on one worker, and so do all of the fleet."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return "the fleet" if Path(file).stem in FLEET else file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneLabOneWorker:
    """Hand out tests by what they share."""
    return OneLabOneWorker(config, log)


@pytest.fixture
def recorded() -> Callable[..., Node]:
    """`recorded("h100x8", "gpu-01")`: the node that the probe found on that hardware profile."""

    def node(profile: str, name: str = "gpu-01") -> Node:
        return node_from_probe(name, json.loads((NODES / f"{profile}.json").read_text()))

    return node
