"""Remove gpufleet from a node: the files and units of each part, except kept ones."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from pyinfra import host
from pyinfra.api import deploy
from pyinfra.context import ctx_state

from gpufleet import node_paths
from gpufleet.converge.desired import UNIT_DIRECTORY
from gpufleet.fleet import deploy_lock
from gpufleet.fleet.facts_timer import UNITS as FACTS
from gpufleet.fleet.run import undeclared_nodes
from gpufleet.gpu_software import container_toolkit, driver_configuration, kernel_tuning, rdma
from gpufleet.gpu_software.repository import VENDOR_PACKAGES
from gpufleet.inventory import loader
from gpufleet.monitoring import dcgm, node_exporter, prometheus_node
from gpufleet.network import firewall, gateway_node, haproxy, keepalived, litellm
from gpufleet.operations.reload_haproxy import nothing_failed, wait_for_nodes
from gpufleet.operations.remove_parts import (
    REMOVE_SECONDS,
    Part,
    ask_remains,
    look_program,
    remove_part,
)
from gpufleet.serving import watchdog_unit
from gpufleet.settings.node_settings import NodeSettings


def parts(settings: NodeSettings) -> list[tuple[str, Part]]:
    """Return each part's files and units on a node, in the order of removal."""
    exporter = node_exporter.UNIT
    found = [
        (
            "litellm",
            Part(
                marks=(litellm.HOME, node_paths.LITELLM_RELEASES),
                units=(litellm.UNIT,),
                paths=(litellm.HOME, node_paths.LITELLM_RELEASES, litellm.STATE, litellm.SERVE),
                accounts=(litellm.ACCOUNT,),
            ),
        ),
        # The virtual address is removed first, because keepalived checks the gateway.
        (
            "gateway",
            Part(
                marks=(keepalived.CHECK,),
                units=(keepalived.UNIT,),
                packages=("keepalived",),
                paths=(
                    f"{keepalived.HOME}/{keepalived.CONFIGURATION}",
                    f"{UNIT_DIRECTORY}/{keepalived.UNIT}.d/gpufleet.conf",
                    keepalived.CHECK,
                ),
                empty=(f"{UNIT_DIRECTORY}/{keepalived.UNIT}.d",),
            ),
        ),
        (
            "gateway",
            Part(
                marks=(haproxy.HOME,),
                units=(haproxy.UNIT,),
                packages=("haproxy",),
                paths=(
                    haproxy.HOME,
                    haproxy.STATE,
                    haproxy.PROGRAM,
                    haproxy.RUN,
                    gateway_node.PACKAGES_UNIT,
                ),
            ),
        ),
        (
            "monitoring",
            Part(
                marks=(node_paths.PROMETHEUS, node_paths.ALERTMANAGER),
                units=(prometheus_node.UNIT, "prometheus-alertmanager.service"),
                packages=("prometheus", "prometheus-alertmanager"),
                paths=(node_paths.PROMETHEUS, node_paths.ALERTMANAGER, node_paths.DASHBOARDS),
            ),
        ),
        (
            "dcgm",
            Part(
                marks=(str(dcgm.COUNTERS), f"{UNIT_DIRECTORY}/{dcgm.ENGINE}.d/gpufleet.conf"),
                packages=("datacenter-gpu-manager*",),
                paths=(
                    f"{UNIT_DIRECTORY}/nvidia-dcgm*.service.d/gpufleet.conf",
                    dcgm.CREDENTIALS,
                    str(dcgm.COUNTERS),
                ),
                empty=(f"{UNIT_DIRECTORY}/{dcgm.ENGINE}.d", f"{UNIT_DIRECTORY}/{dcgm.EXPORTER}.d"),
            ),
        ),
        ("serving", _serving(settings)),
        (
            "exporters",
            Part(
                marks=tuple(f"{UNIT_DIRECTORY}/{unit}" for unit in (*FACTS, exporter)),
                units=(*FACTS, exporter),
                packages=(node_exporter.PACKAGE,),
                paths=(node_exporter.CREDENTIALS,),
                accounts=(node_exporter.ARCHIVED_USER,),
            ),
        ),
        (
            "drivers",
            Part(
                marks=(driver_configuration.MODPROBE,),
                packages=VENDOR_PACKAGES,
                paths=(
                    "/etc/modprobe.d/gpufleet-*.conf",
                    "/etc/modules-load.d/gpufleet-*.conf",
                    f"{UNIT_DIRECTORY}/nvidia-*.service.d/gpufleet.conf",
                    rdma.LIMITS,
                    driver_configuration.UNATTENDED,
                    container_toolkit.RULE,
                ),
            ),
        ),
        (
            "rest",
            Part(
                paths=(
                    node_paths.CONFIGURATION,
                    node_paths.STATE,
                    node_paths.CACHE,
                    node_paths.PROGRAMS,
                    node_paths.RUN,
                    node_paths.ARCHIVES,
                ),
            ),
        ),
    ]
    named = settings.absent.parts
    return [
        (name, part)
        for name, part in found
        if (not named or name in named) and (name != "drivers" or settings.absent.drivers)
    ]


def absent(settings: NodeSettings) -> None:
    """Remove every installed part; a node without any is neither changed nor marked."""
    wanted = parts(settings)
    remains = (ask_remains(part) for _, part in wanted)
    if any(found is None or any(found.values()) for found in remains):
        _hold("deploys/absent.py")
    remove_parts(wanted)


def undeclared(setting: str) -> frozenset[str]:
    """
    Return the nodes of this run that have a part which their variables no longer declare.

    All nodes that do not declare the part are queried at once. Raises `Refusal` if it may not be
    removed.
    """
    return undeclared_nodes(setting, look_program(_undeclared_parts(setting)))


def remove_undeclared(setting: str, nodes: frozenset[str], *, last: bool = False) -> None:
    """
    Remove a part from nodes that no longer declare it, except Prometheus' recorded data.

    With `last`, this happens after all nodes that declare it are done, and only if no node of the
    run failed.
    """
    declares = getattr(loader.current().nodes[host.name].settings, setting)
    if last and nodes and (declares or host.name in nodes):
        wait_for_nodes(name=f"wait for the nodes with {setting}")
    if host.name in nodes:
        _hold(f"the removal of {setting}")
        title = f"{setting}, not declared any more"
        also: dict[str, Any] = {"_if": nothing_failed} if last else {}
        remove_parts([(title, each) for each in _undeclared_parts(setting)], **also)


def _undeclared_parts(setting: str) -> tuple[Part, ...]:
    named = NodeSettings.model_validate({"absent": {"parts": [setting]}})
    return tuple(replace(part, purge=setting != "monitoring") for _, part in parts(named))


def _hold(what: str) -> None:
    """Lock the current node for this run; with --dry, only report its holder."""
    typed = loader.current().typed
    deploy_lock.hold(ctx_state.get(), [host], what, dry=bool(typed and typed.dry))


@deploy("absent")
def remove_parts(wanted: Iterable[tuple[str, Part]]) -> None:
    """Add the operations that remove the parts."""
    for name, part in wanted:
        remove_part(part, name=name, _timeout=REMOVE_SECONDS)


def _serving(settings: NodeSettings) -> Part:
    """
    Return the stages with their releases, and the node's settings for them; models stay by default.
    """
    models = () if settings.absent.models else (node_paths.MODELS,)
    return Part(
        marks=(
            node_paths.VLLM,
            node_paths.VLLM_CONFIGURATION,
            node_paths.VLLM_CACHE,
            f"{UNIT_DIRECTORY}/vllm-*",
            kernel_tuning.SYSCTL,
            node_paths.VLLM_STATE,
        ),
        units=("vllm-*.service", watchdog_unit.SERVICE, kernel_tuning.DEVICES, firewall.SERVICE),
        tables=("inet gpufleet",),
        paths=(
            f"{UNIT_DIRECTORY}/vllm-.service.d",
            node_paths.VLLM,
            node_paths.VLLM_CACHE,
            node_paths.VLLM_STATE,
            node_paths.VLLM_RUN,
            node_paths.VLLM_CONFIGURATION,
            kernel_tuning.SYSCTL,
            firewall.RULES,
        ),
        keep=models,
        accounts=(settings.servers.user if settings.servers else "vllm",),
    )
