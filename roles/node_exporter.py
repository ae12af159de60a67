"""The Prometheus node exporter, as the distribution packages it, on the port that we say."""

from __future__ import annotations

from pyinfra.api import deploy

from gpufleet import units
from gpufleet.converge import Converge
from gpufleet.serving import Metrics
from gpufleet.settings import NodeExporter
from gpufleet.wanted import Package, Unit, Wanted

PACKAGE = "prometheus-node-exporter"
UNIT = f"{PACKAGE}.service"


@deploy("node exporter")
def node_exporter(wanted: NodeExporter) -> None:
    """Converge the package, its unit's drop-in and the running process."""
    drop_in = units.drop_in(
        "node_exporter.conf.j2", UNIT, port=wanted.port, started_with={"package": PACKAGE}
    )
    node = Converge(
        Wanted(Package(PACKAGE), drop_in.file, Unit(UNIT, fingerprint=drop_in.fingerprint))
    )
    node.packages(name="package")
    node.files(name="drop-in")
    node.units(name="service")


def metrics(wanted: NodeExporter) -> Metrics:
    """Return what the exporter must serve, one family from each collector that alerts rest on."""
    return Metrics(
        id="node_exporter",
        unit=UNIT,
        url=f"http://127.0.0.1:{wanted.port}/metrics",
        families=(
            "node_boot_time_seconds",
            "node_cpu_seconds_total",
            "node_filesystem_avail_bytes",
            "node_load1",
            "node_memory_MemAvailable_bytes",
            "node_network_receive_bytes_total",
        ),
    )
