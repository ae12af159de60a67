"""
Return the access data (TLS, password) of the current node's exporters, and print remarks once.
"""

from __future__ import annotations

import datetime as dt

from pyinfra import host, logger
from pyinfra.context import ctx_state

from gpufleet.inventory import loader
from gpufleet.monitoring import exporters
from gpufleet.monitoring.exporters import Access
from gpufleet.settings.node_settings import NodeSettings

_said: set[tuple[int, str]] = set()


def access_to_exporters(settings: NodeSettings) -> Access:
    """
    Return the access data of this node's exporters, from the files that settings name.

    Roles call this function while they prepare, so that a wrong file ends the run before a node is
    changed. Raises `FleetError` with all mistakes.
    """
    address = loader.current().nodes[host.name].address
    found = exporters.access(settings.exporters, host.name, address, now=dt.datetime.now(dt.UTC))
    for remark in found.remarks:
        if (key := (id(ctx_state.get()), f"{host.name}: {remark}")) not in _said:
            _said.add(key)
            logger.warning("%s%s", host.print_prefix, remark)
    return found
