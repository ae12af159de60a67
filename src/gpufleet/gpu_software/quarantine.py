"""Mark a node as unchecked from a change of its driver until a check passes. Pure.

The mark is a file whose text is the reason. It is created before the driver is changed, and removed
when a check passes. So the mark remains if a run is interrupted or the node reboots. While the mark
exists, systemd starts no stage: not at boot, not after a crash, and not for a deploy.
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

# Findings that are normal while a GPU registers with the NVLink fabric. This takes a minute after
# the driver was loaded.
SETTLING = {"fabric-state", "fabric-manager"}


def stage_guard() -> DesiredState:
    """Return the unit condition that prevents stages on a marked node from starting."""
    content = f"# Written by gpufleet.\n[Unit]\nConditionPathExists=!{MARK}\n"
    return DesiredState(Directory(STATE), File(GUARD, content.encode()))


def problems(
    report: Report, node: str, settings: NodeSettings, standing: DriverState | None
) -> tuple[str, ...]:
    """
    Return the reasons why a node must not serve yet. Facts that could not be read are reasons too.

    `standing` is the driver's state in the same probe. It is None if there is no probe, which the
    report says then. With `checks.degraded`, single GPUs may be unfit, as in a deploy.
    """
    found = [finding_sentence(each) for each in _stopping(report, node, settings)]
    if standing is not None and not isinstance(standing, Active):
        found.append(f"{node}: {decide(standing, 'never', terminal=False).said}")
    return tuple(found)


def is_fabric_pending(report: Report, node: str, settings: NodeSettings) -> bool:
    """Return whether the only problem is that GPUs may still be joining the fabric."""
    return {each.check for each in _stopping(report, node, settings)} <= SETTLING


def _stopping(report: Report, node: str, settings: NodeSettings) -> Iterator[Finding]:
    """Yield the problems of a node, without the findings that follow from other problems."""
    reserved = set(settings.gpus.reserved)
    for each in report.node_findings[node]:
        index = each.gpu.index if each.gpu else None
        tolerated = each.gpu is not None and (settings.checks.degraded or index in reserved)
        if each.stops and each.cause is None and not tolerated:
            yield each
