"""What holds for every unit test."""

from __future__ import annotations

import os
from collections.abc import Generator, Iterator

import pytest

from gpufleet.on_node.common import linux_facts

SECONDS = 60
"""The longest that a unit test may take on a machine that has a core for each process that runs;
the load of others makes it longer. A test that needs more has a `timeout` of its own, and beside it
the reason; tests that are slow or long have pytest's own."""


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Give a unit test its deadline, just before pytest-timeout reads it."""
    if not any(item.get_closest_marker(name) for name in ("timeout", "slow", "long")):
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        item.add_marker(pytest.mark.timeout(SECONDS * max(1.0, load)))
    return (yield)


@pytest.fixture(autouse=True)
def _root_is_given_back() -> Iterator[None]:
    """
    Fail a test that leaves a node's root set in this process.

    A program for nodes that runs inside a test sets it, and every later test of the same worker
    would then look for programs and files below a directory that is gone.
    """
    yield
    left, linux_facts.ROOT = linux_facts.ROOT, ""
    assert left == "", "the test has set linux_facts.ROOT, and not given it back"
