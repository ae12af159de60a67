"""Our dashboards in a Grafana: its data source, its provider of dashboards, and they themselves."""

from __future__ import annotations

from collections.abc import Generator

from pyinfra import host
from pyinfra.api import FunctionCommand, StringCommand, deploy, operation

from gpufleet.converge.desired import File, NoOtherFiles, Package, Unit, Wanted
from gpufleet.monitoring import render
from gpufleet.monitoring.targets import Watching
from gpufleet.operations.converge import Converge, refuse
from gpufleet.serving import unit


@deploy("Grafana")
def grafana(node: Watching) -> None:
    """Converge the package if one is named, what Grafana is provisioned with, and its process."""
    wanted = node.monitoring.grafana
    if wanted is None:
        return
    provisioning = render.grafana(node.monitoring)
    drop_in = unit.drop_in("grafana.conf.j2", wanted.unit, started_with=provisioning)
    files = Converge(
        Wanted(
            *(File(f"{wanted.provisioning}/{path}", text) for path, text in provisioning.items()),
            *(
                File(f"{render.DASHBOARDS}/{name}", text)
                for name, text in render.dashboards().items()
            ),
            NoOtherFiles(f"{render.DASHBOARDS}/*.json"),
            drop_in.file,
        )
    )
    if wanted.package:
        Converge(Wanted(Package(wanted.package))).packages(name="package")
    else:
        there(Converge(Wanted(), watch=(wanted.provisioning,)), wanted.provisioning, name="Grafana")
    files.files(name="provisioning and dashboards")
    running = Converge(
        Wanted(drop_in.file, Unit(wanted.unit, fingerprint=drop_in.fingerprint, start_seconds=120))
    )
    running.units(name="service")


@operation()
def there(node: Converge, provisioning: str) -> Generator[StringCommand | FunctionCommand]:
    """Fail a node without Grafana before anything is written; `node` watches its directory."""
    if node.snapshot().file(provisioning).exists:
        host.noop("Grafana is there")
        return
    yield from refuse(
        (
            f"{provisioning} does not exist, so there is no Grafana to give dashboards to: install "
            "it, or name its package and its directory in `monitoring.grafana`",
        )
    )
