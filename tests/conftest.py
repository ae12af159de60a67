"""Fixtures that tests of several modules share."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from xdist import is_xdist_worker
from xdist.scheduler import LoadFileScheduling

from gpufleet.node.topology import Node, node_from_probe
from tests.support.checkout import ROOT

NODES = ROOT / "src/gpufleet/catalog/data/nodes"

# Drawn examples are the same in every run, and no run fails because the machine was busy. To look
# for others: HYPOTHESIS_PROFILE=search.
ANY_PACE = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("same", ANY_PACE, derandomize=True)
settings.register_profile("search", ANY_PACE)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "same"))

# Files that work on one standing lab, in the order in which they do: one worker has them all.
SHARED = {
    "the fleet": (
        # It begins with bare nodes.
        "tests/lab/test_main_job.py",
        "tests/lab/test_argument_proof.py",
        "tests/lab/test_flag_schemas.py",
        "tests/lab/test_flags.py",
        "tests/lab/test_interruptions.py",
        "tests/lab/test_monitoring.py",
        "tests/lab/test_node_check.py",
        "tests/lab/test_sizing.py",
        "tests/lab/test_stalled.py",
        "tests/lab/test_systemd_quoting.py",
    ),
    "the walk": (
        "tests/lab/test_walkthrough.py",
        "tests/lab/test_commands.py",
        "tests/lab/roles/",
    ),
}


def lab_of(test: str) -> tuple[str, int]:
    """Return the lab that a test shares, by its id, and its file's turn there; ("", 0): none."""
    return next(
        (
            (lab, turn)
            for lab, files in SHARED.items()
            for turn, file in enumerate(files)
            if test.startswith(file)
        ),
        ("", 0),
    )


class OneLabOneWorker(LoadFileScheduling):
    """A file's tests stay on one worker, and so do all files of a shared lab."""

    def _split_scope(self, nodeid: str) -> str:
        file: str = super()._split_scope(nodeid)
        return lab_of(file)[0] or file


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneLabOneWorker:
    """Hand out tests by what they share."""
    return OneLabOneWorker(config, log)


GIVES_WAY = Path("/proc/self/autogroup")
"""Where Linux has the weight of a session's processes: -20 to 19, as nice has it."""


@cache
def give_way() -> None:
    """Have this worker's processes take what the walk and its nodes leave of the CPUs.

    `make test` runs the walk beside the unit tests. Its steps wait for each other: what the unit
    tests take from a step makes all later ones late.
    """
    os.setsid()
    with suppress(OSError):  # a kernel without it
        GIVES_WAY.write_text("10")


def pytest_runtest_setup(item: pytest.Item) -> None:
    quick = "not slow" in item.config.getoption("markexpr")
    if quick and is_xdist_worker(item.session) and not lab_of(item.nodeid)[0]:
        give_way()


@pytest.fixture
def recorded() -> Callable[..., Node]:
    """`recorded("h100x8", "gpu-01")`: the node that the probe found on that hardware profile."""

    def node(profile: str, name: str = "gpu-01") -> Node:
        return node_from_probe(name, json.loads((NODES / f"{profile}.json").read_text()))

    return node
