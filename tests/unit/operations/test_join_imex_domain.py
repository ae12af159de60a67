"""What joining an IMEX domain keeps of a run."""

from __future__ import annotations

import gc
from weakref import ref

import gevent
import pytest
from pyinfra.api import Inventory, State

from gpufleet.operations import join_imex_domain


def test_what_a_run_asked_ends_with_it() -> None:
    """Another run may get the address of one that has ended: it must not get its probes."""
    state = State()
    state.inventory = Inventory(([], {}))
    documents = join_imex_domain._documents(state)
    assert documents == {}
    assert join_imex_domain._documents(state) is documents

    kept = ref(state)
    del state
    gc.collect()

    assert kept() is None


def test_a_probe_that_fails_fails_for_every_node_that_waits_for_it() -> None:
    state = State()  # without an inventory nothing can be probed

    for _ in range(2):
        with gevent.Timeout(5), pytest.raises(AttributeError):
            join_imex_domain._documents(state)
