"""What holds for every unit test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from gpufleet.on_node.common import linux_facts


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
