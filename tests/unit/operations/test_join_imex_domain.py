"""What joining an IMEX domain keeps of a run."""

from __future__ import annotations

import gc

from pyinfra.api import Inventory, State

from gpufleet.operations import join_imex_domain


def test_what_a_run_asked_ends_with_it() -> None:
    """Another run may get the address of one that has ended: it must not get its probes."""
    state = State()
    state.inventory = Inventory(([], {}))
    assert join_imex_domain._documents(state) == {}
    assert len(join_imex_domain._PROBES) == 1

    del state
    gc.collect()

    assert len(join_imex_domain._PROBES) == 0
