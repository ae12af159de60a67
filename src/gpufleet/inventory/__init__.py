"""Load the nodes of a fleet with all their variables.

An inventory file contains `from gpufleet import inventory` and calls `inventory.load(__file__,
...)`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gpufleet.inventory.loader import Fleet, InventoryError, current, load, read

__all__ = ["Fleet", "InventoryError", "current", "load", "read"]


def __getattr__(name: str) -> Any:
    # Imported when used: config.py loads `inventory.invocation` before anything else, and quickly.
    if name in __all__:
        from gpufleet.inventory import loader

        return getattr(loader, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
