"""Provide the lab's nodes for an inventory: names, addresses, keys, groups by hardware.

This reads the lab's state without contacting nodes. `GPUFLEET_LAB` names the lab; the default is
`lab`.
"""

from __future__ import annotations

import os
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.inventory.loader import InventoryError
from lab.state import NO_GPUS, LabState

MONITORING = "monitoring"
"""The group of nodes without GPUs."""


def state() -> LabState:
    """Return the lab's stored state. Raises `InventoryError` if it has no nodes."""
    lab_id = os.environ.get("GPUFLEET_LAB", "lab")
    try:
        found = LabState.load(lab_id)
    except FleetError as error:
        raise InventoryError(*error.problems, what="the lab's inventory") from None
    except PermissionError as error:
        raise InventoryError(
            f"only root may read {error.filename}, the SSH key of the lab's nodes: use sudo",
            what="the lab's inventory",
        ) from None
    if not found.profiles:
        raise InventoryError(
            f"there is no lab {lab_id!r} on this machine: run: gpufleet lab up",
            what="the lab's inventory",
        )
    return found


def groups() -> dict[str, list[tuple[str, dict[str, Any]]]]:
    """
    Return the nodes by their simulated hardware, each with its SSH connection.

        {"gpu_h100x8": [("gpu-01", {"ssh_hostname": "10.201.7.11", ...})], ...}

    Raises InventoryError when there is no lab.
    """
    lab = state()
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for node in lab.nodes:
        connection = {
            "ssh_hostname": str(node.address),
            "ssh_user": "root",
            "ssh_key": str(lab.key),
            "ssh_known_hosts_file": str(lab.known_hosts),
            # The lab's own SSH configuration, so that the operator's (a ProxyJump for `*`) has no
            # effect here.
            "ssh_config_file": str(lab.ssh_config),
        }
        group = MONITORING if node.profile == NO_GPUS else f"gpu_{node.profile.replace('-', '_')}"
        found.setdefault(group, []).append((node.name, connection))
    return found
