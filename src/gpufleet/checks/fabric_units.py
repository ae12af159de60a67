"""
Check the units of the NVLink fabric other than the fabric manager: IMEX, and the subnet manager of
NVLink 5. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from gpufleet.checks.finding import Action, Problem, Severity, Step
from gpufleet.checks.nvlink_facts import DRAIN, NVLINK_5, RESTART_MANAGER, is_grace, known_links
from gpufleet.checks.probe_facts import DoesNotApply, Reading, lookup

IMEX = "nvidia-imex.service"
SUBNET_MANAGER = "nvlsm.service"
FAILED, NOT_RUNNING = "failed", "enabled but not running"
BROKEN = {FAILED, NOT_RUNNING}


def fabric_units(node: Reading) -> Iterator[Problem]:
    """
    Check that nodes which share NVLink run IMEX, and that the subnet manager of NVLink 5 has not
    failed.

    IMEX shares memory between nodes, so a failed IMEX is `block` if replicas may span nodes. If the
    subnet manager has no enabled unit, the fabric manager starts it.
    """
    needs_imex, needs_subnets = _is_in_cluster(node), _has_switches_of_nvlink_5(node)
    if not needs_imex and not needs_subnets and not _has_failed(node):
        raise DoesNotApply("these GPUs share no NVLink with other nodes and have no NVLink 5")
    imex, subnets = _state(node, IMEX), _state(node, SUBNET_MANAGER)
    if needs_imex and imex != "active":
        spanning = any(model.span_nodes for model in node.settings.serving.values())
        bad = Severity.BLOCK if spanning else Severity.WARN
        yield _not_running(
            IMEX,
            imex,
            bad if imex in BROKEN else Severity.WARN if spanning else Severity.INFO,
            "GPUs of different nodes cannot access each other's memory over NVLink",
            Step(
                Action.RESTART_SERVICE,
                "write the same nodes into /etc/nvidia-imex/nodes_config.cfg on every node of "
                "the NVLink domain, then run `systemctl restart nvidia-imex` on each; "
                "`nvidia-imex-ctl -N` shows the result",
            ),
        )
    if needs_subnets and subnets in BROKEN:
        yield _not_running(
            SUBNET_MANAGER,
            subnets,
            Severity.BLOCK if subnets == FAILED else Severity.WARN,
            "the fabric manager cannot configure NVLink 5",
            DRAIN,
            RESTART_MANAGER,
        )
    for unit, needed in ((IMEX, needs_imex), (SUBNET_MANAGER, needs_subnets)):
        if not needed and _state(node, unit) == FAILED:
            yield _not_running(unit, FAILED, Severity.INFO, "nothing on this node needs it")


def _has_failed(node: Reading) -> bool:
    """
    Return whether one of the units has failed. If units cannot be read, fabric-manager reports it.
    """
    return any(
        node.known("system", "units", unit, "active") == FAILED for unit in (IMEX, SUBNET_MANAGER)
    )


def _not_running(
    unit: str, state: str, severity: Severity, consequence: str, *then: Step
) -> Problem:
    look = Step(Action.LOOK, f"`systemctl status {unit}`; `journalctl -u {unit} -b | tail -30`")
    return Problem(
        severity,
        f"{unit} is {state}: {consequence}",
        "active",
        "NVIDIA's guides to IMEX and to the fabric manager",
        () if severity is Severity.INFO else (look, *then),
    )


def _state(node: Reading, unit: str) -> str:
    """
    Return the unit's state: "active", "failed", "masked", "stopped" and so on.

    Raises `Unread` if the state cannot be read.
    """
    units: Any = node.get("system", "units", absent=None)
    if units is None:
        return "not installed"
    load = node.get("system", "units", unit, "load", absent="not-found")
    if load != "loaded":
        return "not installed" if load == "not-found" else str(load)
    active = str(node.get("system", "units", unit, "active", absent="inactive"))
    if active in {"activating", "reloading"}:
        return "active"
    enabled = node.known("system", "units", unit, "enabled", default="")
    return {"inactive": NOT_RUNNING if enabled == "enabled" else "stopped"}.get(active, active)


def _is_in_cluster(node: Reading) -> bool:
    """Return whether a GPU is a member of an NVLink cluster. A cluster spans nodes."""
    uuids = (
        lookup(node.document["fabric"][gpu.at], ("cluster_uuid",), None, None) for gpu in node.gpus
    )
    return any(str(uuid).strip("0-") for uuid in uuids if uuid is not None)


def _has_switches_of_nvlink_5(node: Reading) -> bool:
    """Return whether the node's own fabric manager has to manage NVLink 5."""
    return any(
        links.version >= NVLINK_5 and len(node.gpus) > 1 and not is_grace(gpu)
        for gpu in node.gpus
        if (links := known_links(gpu)) is not None
    )


WITHOUT_DRIVER: dict[str, Callable[[Reading], Iterator[Problem]]] = {"fabric-units": fabric_units}
