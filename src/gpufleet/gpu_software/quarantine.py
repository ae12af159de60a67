"""Mark a node as unchecked from a driver change until a check passes. Pure.

The mark is a file with the reason as its text. It is set before the driver is changed and removed
by a check that passes, so that it outlives an interrupted run and a reboot. While the mark exists,
systemd starts no stage, neither at boot nor after a crash nor by a deploy.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpufleet import node_paths
from gpufleet.checks.admission import finding_sentence
from gpufleet.checks.finding import Finding, Report
from gpufleet.converge.desired import UNIT_DIRECTORY, DesiredState, Directory, File
from gpufleet.gpu_software.driver_activation import Active, DriverState, decide
from gpufleet.settings.node_settings import NodeSettings

STATE = node_paths.STATE
MARK = f"{STATE}/unchecked"
# A drop-in in "vllm-.service.d/" applies to every unit whose name begins with "vllm-"
# (systemd.unit(5), since 239). systemd does not check ConditionPathExists= of a running unit again.
GUARD = f"{UNIT_DIRECTORY}/vllm-.service.d/gpufleet-unchecked.conf"

# Findings while a GPU registers with the NVLink fabric, which takes a minute after the driver is
# loaded.
SETTLING = {"fabric-state", "fabric-manager"}


def stage_guard() -> DesiredState:
    """Return the unit condition that keeps a marked node's stages from starting."""
    content = f"# Written by gpufleet.\n[Unit]\nConditionPathExists=!{MARK}\n"
    return DesiredState(Directory(STATE), File(GUARD, content.encode()))


def problems(
    report: Report, node: str, settings: NodeSettings, standing: DriverState | None
) -> tuple[str, ...]:
    """
    Return why a node must not serve yet, including unreadable facts.

    `standing` is the driver's state in the same probe, or None without a probe, which the report
    states. With `checks.degraded` single GPUs may be unfit, as for a deploy.
    """
    found = [finding_sentence(each) for each in _stopping(report, node, settings)]
    if standing is not None and not isinstance(standing, Active):
        found.append(f"{node}: {decide(standing, 'never', terminal=False).said}")
    return tuple(found)


def is_fabric_pending(report: Report, node: str, settings: NodeSettings) -> bool:
    """Return whether the only problem is a fabric that may still be joining."""
    return {each.check for each in _stopping(report, node, settings)} <= SETTLING


def _stopping(report: Report, node: str, settings: NodeSettings) -> Iterator[Finding]:
    """Yield the problems of a node, without their consequences."""
    reserved = set(settings.gpus.reserved)
    for each in report.node_findings[node]:
        index = each.gpu.index if each.gpu else None
        tolerated = each.gpu is not None and (settings.checks.degraded or index in reserved)
        if each.stops and each.cause is None and not tolerated:
            yield each
