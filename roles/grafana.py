"""Provide gpufleet's dashboards in Grafana: data source, provider and dashboards."""

from __future__ import annotations

from pyinfra.api import deploy

from gpufleet.converge.desired import DesiredState, File, NoOtherFiles, Package, Unit
from gpufleet.monitoring import render
from gpufleet.monitoring.targets import MonitoringTargets
from gpufleet.operations.converge import Converge, require_path
from gpufleet.serving.unit import drop_in


@deploy("Grafana")
def grafana(node: MonitoringTargets) -> None:
    """Converge the package if one is named, Grafana's provisioning, and its process."""
    wanted = node.monitoring.grafana
    if wanted is None:
        return
    provisioning = render.grafana(node.monitoring)
    file = drop_in("grafana/grafana.conf.j2", wanted.unit, started_with=provisioning)
    files = Converge(
        DesiredState(
            *(File(f"{wanted.provisioning}/{path}", text) for path, text in provisioning.items()),
            *(
                File(f"{render.DASHBOARDS}/{name}", text)
                for name, text in render.dashboards().items()
            ),
            NoOtherFiles(f"{render.DASHBOARDS}/*.json"),
            file.file,
        )
    )
    if wanted.package:
        Converge(DesiredState(Package(wanted.package))).packages(name="package")
    else:
        otherwise = (
            f"{wanted.provisioning} does not exist, so no Grafana can load the dashboards: install "
            "Grafana, or set its package and its directory in `monitoring.grafana`"
        )
        folder = Converge(DesiredState(), watch=(wanted.provisioning,))
        require_path(folder, wanted.provisioning, otherwise, name="Grafana")
    files.files(name="provisioning and dashboards")
    running = Converge(
        DesiredState(file.file, Unit(wanted.unit, fingerprint=file.fingerprint, start_seconds=120))
    )
    running.units(name="service")
