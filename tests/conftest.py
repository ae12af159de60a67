"""Fixtures that tests of several modules share."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from gpufleet.topology import Node, node_from_probe

NODES = Path(__file__).parent / "nodes"


@pytest.fixture
def recorded() -> Callable[..., Node]:
    """`recorded("h100x8", "gpu-01")`: the node that the probe found on that hardware profile."""

    def node(profile: str, name: str = "gpu-01") -> Node:
        return node_from_probe(name, json.loads((NODES / f"{profile}.json").read_text()))

    return node
