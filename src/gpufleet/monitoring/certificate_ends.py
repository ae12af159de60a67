"""
Publish when a node's certificates expire, as textfiles for the node exporter. Pure.

Roles that place a certificate on a node also place this file, so alerts are about the certificate
that is on the node. The expiry is read on this machine, so nodes need no additional program.
"""

from __future__ import annotations

from gpufleet import node_paths
from gpufleet.converge.desired import Absent, File, Value
from gpufleet.monitoring.metrics.gpufleet_metrics import CERTIFICATE_END
from gpufleet.on_node.common.textfile import format_labels

EXPORTER, GATEWAY, LITELLM = "exporter", "gateway", "litellm"
"""What a certificate is used for (label `use`). It shows which setting has the file's path."""


def metrics_file(folder: str) -> str:
    """
    Return the path of the metrics file for the certificate in a folder of the node.

    >>> metrics_file("/etc/gpufleet/gateway")
    '/var/lib/gpufleet/textfile/certificate-gateway.prom'
    """
    return f"{node_paths.TEXTFILES}/certificate-{folder.rpartition('/')[2]}.prom"


def end_values(folder: str, name: str, use: str, end: int | None) -> tuple[Value, ...]:
    """
    Return the desired state of the metrics file with the expiry of the certificate `folder/name`.

    `end` is in seconds since 1970. If there is no certificate, `end` is None and the file is
    removed.
    """
    path = metrics_file(folder)
    if end is None:
        return (Absent(path),)
    return (File(path, end_text(f"{folder}/{name}", use, end).encode()),)


def end_text(path: str, use: str, end: int) -> str:
    """Return the metrics for the node exporter's textfile collector."""
    metric = CERTIFICATE_END
    # All files have the same help text, because the collector rejects a metric with two texts.
    return (
        f"# HELP {metric.name} {metric.help}\n# TYPE {metric.name} {metric.type}\n"
        f"{metric.name}{format_labels({'path': path, 'use': use})} {end}\n"
    )


def certificate_end(setting: str, pem: bytes) -> int:
    """
    Return when the first certificate in a PEM file expires, in seconds since 1970.

    Further certificates in the file are ignored. Raises `FleetError` with the setting's name if the
    file has no certificate.
    """
    from gpufleet.monitoring import exporter_certificates

    return int(exporter_certificates.end(setting, pem).timestamp())
