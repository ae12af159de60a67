"""Fixtures that tests of several modules share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from gpufleet.topology import Node, node_from_probe

NODES = Path(__file__).parent / "nodes"

# Drawn examples are the same in every run, and no run fails because the machine was busy. To look
# for others: HYPOTHESIS_PROFILE=search.
ANY_PACE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", ANY_PACE, derandomize=True)
settings.register_profile("search", ANY_PACE)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))


@pytest.fixture
def recorded() -> Callable[..., Node]:
    """`recorded("h100x8", "gpu-01")`: the node that the probe found on that hardware profile."""

    def node(profile: str, name: str = "gpu-01") -> Node:
        return node_from_probe(name, json.loads((NODES / f"{profile}.json").read_text()))

    return node
