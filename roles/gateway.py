"""Run the gateway on a node; HAProxy's configuration is validated, then reloaded."""

from __future__ import annotations

from typing import Any

from pyinfra.api import deploy

from gpufleet import node_paths
from gpufleet.converge.desired import (
    Absent,
    DesiredState,
    Directory,
    File,
    Link,
    Package,
    UnitGone,
)
from gpufleet.monitoring.targets import MonitoringTargets
from gpufleet.network import keepalived
from gpufleet.network.gateway_node import (
    HAPROXY,
    PACKAGES_UNIT,
    gateway_unit,
    virtual_address,
)
from gpufleet.network.haproxy import CONFIGURATION, HOME, PROGRAM
from gpufleet.operations.converge import Converge
from gpufleet.operations.reload_haproxy import gateway_parts, nothing_failed, reload_haproxy
from gpufleet.operations.validated_config import validate_config
from gpufleet.remote import payload


@deploy("gateway")
def gateway(node: MonitoringTargets) -> None:
    """Converge program, configuration and unit, and verify that the configuration is loaded."""
    wanted = gateway_parts(node)
    if wanted is None:
        return
    before = Converge(DesiredState(), watch=(HAPROXY, PACKAGES_UNIT))
    program = File(PROGRAM, payload.archive("network/gateway_drains"), mode=0o755)
    unit = gateway_unit(wanted.gateway)
    values = [Directory(node_paths.PROGRAMS), program, unit.file]
    if not before.snapshot().file(HAPROXY).exists or _is_masked(before):
        values.append(Link(PACKAGES_UNIT, "/dev/null"))
    Converge(DesiredState(*values)).files(name="program and unit")
    packages = [Package("haproxy")]
    if wanted.gateway.virtual_address:
        packages += [Package("curl"), Package("keepalived")]
        shared = Converge(virtual_address(node, wanted.gateway))
        shared.files(name="virtual address")
    Converge(DesiredState(*packages)).packages(name="package")
    validate_config(wanted.files, wanted.configured, name="proof of the configuration")
    wanted.files.files(name="configuration")
    wanted.running.units(name="service")
    reload_haproxy(wanted.running, wanted.fingerprint, name="configuration in force")
    if wanted.gateway.virtual_address:
        shared.units(name="virtual address in force")
    else:
        # Only if gpufleet installed keepalived. The check proves this, so it is removed last.
        ours = keepalived.CHECK
        secret = f"{keepalived.HOME}/{keepalived.CONFIGURATION}"
        gone = Converge(
            DesiredState(UnitGone(keepalived.UNIT), Absent(secret), Absent(ours)), watch=(ours,)
        )
        if gone.snapshot().file(ours).exists:
            gone.units(name="remove the virtual address")
            gone.files(name="remove the check of the virtual address")


@deploy("gateway")
def gateway_servers(node: MonitoringTargets, *, if_nothing_failed: bool = False) -> None:
    """
    Converge only the configuration, on a node with a gpufleet gateway.

    With `if_nothing_failed`, this happens only if no node of the run has failed, so that stages
    that were not replaced remain served.
    """
    wanted = gateway_parts(node)
    if wanted is None:
        return
    there = Converge(DesiredState(), watch=(f"{HOME}/{CONFIGURATION}",))
    if not there.snapshot().file(f"{HOME}/{CONFIGURATION}").exists:
        return
    also: dict[str, Any] = {"_if": nothing_failed} if if_nothing_failed else {}
    validate_config(wanted.files, wanted.configured, name="proof of the configuration", **also)
    wanted.files.files(name="servers", **also)
    reload_haproxy(
        wanted.running, wanted.fingerprint, if_it_runs=True, name="servers in force", **also
    )


def _is_masked(node: Converge) -> bool:
    """Return whether the package's own unit is masked, which only gpufleet does."""
    return node.snapshot().file(PACKAGES_UNIT).target == "/dev/null"
