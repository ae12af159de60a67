"""Check the GPUs of nodes, and their requirements for serving, without changes."""

from __future__ import annotations

from weakref import WeakSet

from pyinfra.api import State
from pyinfra.context import ctx_state

from gpufleet.checks.table import report_table
from gpufleet.console import display
from gpufleet.errors import FleetError
from gpufleet.fleet.run import check

_SHOWN: WeakSet[State] = WeakSet()


def gpu_check() -> None:
    """
    Print the checks' findings on the nodes of this run, once for all nodes.

    Raises `FleetError` if a node is blocked or could not be checked, so that the run ends with
    status 1.
    """
    report = check()
    state = ctx_state.get()
    if state not in _SHOWN:
        _SHOWN.add(state)
        display(report_table(report))
    if report.verdict().stops:
        raise FleetError(
            "at least one node is not fit: see the findings above; docs/checks/ explains each check"
        )
