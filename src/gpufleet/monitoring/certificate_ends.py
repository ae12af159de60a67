"""Publish the expiry of a node's certificates as textfiles of the node exporter. Pure.

Roles that place a certificate also place this file, so alerts are about the certificate on the
node. The expiry is read on this machine, so nodes run no additional program.
"""

from __future__ import annotations

from gpufleet import node_paths
from gpufleet.converge.desired import Absent, File, Value
from gpufleet.monitoring.metrics.gpufleet_metrics import CERTIFICATE_END
from gpufleet.on_node.common.textfile import format_labels

EXPORTER, GATEWAY, LITELLM = "exporter", "gateway", "litellm"
"""Uses of a certificate, the label `use`. They identify the setting that names the file."""


def metrics_file(folder: str) -> str:
    """
    Return the metrics file of the certificate in a folder of the node.

    >>> metrics_file("/etc/gpufleet/gateway")
    '/var/lib/gpufleet/textfile/certificate-gateway.prom'
    """
    return f"{node_paths.TEXTFILES}/certificate-{folder.rpartition('/')[2]}.prom"


def end_values(folder: str, name: str, use: str, end: int | None) -> tuple[Value, ...]:
    """
    Return the metrics file with the expiry of `folder/name`.

    `end` is in seconds since 1970. Without a certificate, it is None, and the file is removed.
    """
    path = metrics_file(folder)
    if end is None:
        return (Absent(path),)
    return (File(path, end_text(f"{folder}/{name}", use, end).encode()),)


def end_text(path: str, use: str, end: int) -> str:
    """Return the metrics for the node exporter's textfile collector."""
    metric = CERTIFICATE_END
    # The same help in each file: the collector refuses a name with two.
    return (
        f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.type}\n"
        f"{metric.name}{format_labels({'path': path, 'use': use})} {end}\n"
    )


def certificate_end(setting: str, pem: bytes) -> int:
    """
    Return the expiry of the first certificate in a PEM, in seconds since 1970.

    Further certificates are ignored. Raises `FleetError` with the setting's name if there is none.
    """
    from gpufleet.monitoring import exporter_certificates

    return int(exporter_certificates.end(setting, pem).timestamp())
