"""Work that is done once for all nodes of a run, and not once for all runs."""

from __future__ import annotations

import gc

from pyinfra.api import State

from gpufleet.fleet import run


def test_each_run_gets_its_own_result() -> None:
    """A run that has ended leaves its address in memory to the next: that is no name of it."""
    results = iter(range(100))

    def work(_: State) -> int:
        return next(results)

    found = []
    gc.freeze()  # what other tests have left is not gone through twenty times
    for _ in range(20):
        state = State()
        found += [run._single_flight(state, work), run._single_flight(state, work)]
        del state
        gc.collect()
    gc.unfreeze()

    assert found == [number for number in range(20) for _ in range(2)]
