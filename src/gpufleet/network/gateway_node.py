"""Define the desired state of a gateway's node: units, configuration and virtual address. Pure."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable

from gpufleet import node_paths
from gpufleet.converge.desired import (
    UNIT_DIRECTORY,
    DesiredState,
    Directory,
    File,
    NoOtherFiles,
    Unit,
)
from gpufleet.errors import FleetError
from gpufleet.monitoring import certificate_ends, targets
from gpufleet.monitoring.targets import MonitoringTargets
from gpufleet.network import haproxy, keepalived
from gpufleet.network.haproxy import (
    HOME,
    PROGRAM,
    RUN,
    STATE,
    UNIT,
    Configuration,
    GatewayState,
)
from gpufleet.serving.unit import UnitFile, drop_in, whole_unit
from gpufleet.settings.gateway_settings import Gateway

# The unit of the distribution's package. It starts with its own configuration when the package is
# installed.
PACKAGES_UNIT = f"{UNIT_DIRECTORY}/haproxy.service"

HAPROXY = "/usr/sbin/haproxy"

STOP_SECONDS = 30

# Additional open files for listeners, for checks, and for reloads that pass sockets on. The number
# of connections of HAProxy is limited by the unit's limit of open files, or by the machine's if it
# is lower.
SPARE_SOCKETS = 8000


def configuration(
    node: MonitoringTargets, wanted: Gateway, loaded: Callable[[], GatewayState]
) -> Configuration:
    """
    Return the gateway's configuration.

    The servers of nodes that do not answer are taken from the configuration that the gateway has
    loaded (`loaded`).
    """
    keys = {
        file: content.decode().strip()
        for file, content in targets.secrets(
            {file: file for file in haproxy.key_files(node.nodes)}, "vllm.api_key_file"
        ).items()
    }
    backends = haproxy.backends(node.nodes, node.servers, node.name, keys)
    if node.silent:
        backends = haproxy.keep_silent_servers(
            backends, loaded().configured, node.silent, node.nodes
        )
    pem = b"\n".join(
        targets.secrets(
            {file: file for file in haproxy.certificate_files(wanted, node.name)}, "gateway.tls"
        ).values()
    )
    return haproxy.config(
        wanted,
        backends,
        metrics_address=str(node.settings.exporters.listen or ""),
        certificate=pem,
    )


def gateway_unit(wanted: Gateway) -> UnitFile:
    return whole_unit(
        "gateway/gpufleet-gateway.service.j2",
        UNIT,
        started_with={},
        home=HOME,
        run=RUN,
        state=STATE,
        program=PROGRAM,
        gone=keepalived.GONE if wanted.virtual_address else "",
        stop_seconds=STOP_SECONDS,
        files=2 * wanted.connections + SPARE_SOCKETS,
        memory_mib=wanted.memory_mib,
    )


def virtual_address(node: MonitoringTargets, wanted: Gateway) -> DesiredState:
    address = wanted.virtual_address
    if address is None:
        raise ValueError(f"{node.name} has no virtual address")
    read = targets.secrets({"it": address.password_file}, "gateway.virtual_address.password_file")
    text = keepalived.keepalived(address, read["it"].strip())
    check = keepalived.check(str(node.settings.exporters.listen or ""), wanted.metrics_port)
    override = drop_in(
        "gateway/keepalived-gateway.conf.j2",
        keepalived.UNIT,
        started_with={"configuration": keepalived.slow_hash(text), "check": check},
    )
    return DesiredState(
        File(
            f"{keepalived.HOME}/{keepalived.CONFIGURATION}",
            text,
            mode=0o600,
            secret=True,
        ),
        File(keepalived.CHECK, check, mode=0o755),
        override.file,
        Unit(keepalived.UNIT, fingerprint=override.fingerprint),
    )


def gateway_files(found: Configuration) -> DesiredState:
    """
    Return the gateway's files.

    Other maps and certificates in the gateway's directory are removed. If there is a certificate, a
    file with its expiry is placed beside it.
    """
    pem = found.secrets.get(haproxy.CERTIFICATE)
    end = None if pem is None else certificate_ends.certificate_end("gateway.tls", pem)
    return DesiredState(
        Directory(node_paths.CONFIGURATION),
        Directory(HOME, mode=0o700),
        Directory(STATE),
        *(File(f"{HOME}/{path}", content) for path, content in found.files.items()),
        *(
            File(f"{HOME}/{path}", content, mode=0o600, secret=True)
            for path, content in found.secrets.items()
        ),
        NoOtherFiles(f"{HOME}/*.map"),
        NoOtherFiles(f"{HOME}/*.pem"),
        *certificate_ends.end_values(HOME, haproxy.CERTIFICATE, certificate_ends.GATEWAY, end),
    )


def certificate_remarks(wanted: Gateway, node: str, now: dt.datetime) -> tuple[str, ...]:
    """
    Return remarks on a gateway's certificate that expires soon.

    Raises `FleetError` for files that cannot be read, and for a certificate that clients would
    reject. Such a certificate has expired, is not yet valid, or does not belong to the key.
    """
    named = haproxy.certificate_files(wanted, node)
    if not named:
        return ()
    from gpufleet.monitoring import exporter_certificates

    read = targets.secrets({file: file for file in named}, "gateway.tls")
    certificate, key = ((file, read[file]) for file in named)
    files = exporter_certificates.CertificateFiles(certificate, key, None, "gateway.tls")
    if problems := exporter_certificates.certificate_problems(files, now):
        raise FleetError(*problems)
    return tuple(exporter_certificates.end_remarks(files, now))


def gateway_problems(node: MonitoringTargets) -> tuple[str, ...]:
    """Return the reasons why the node cannot be a gateway, as sentences."""
    return (
        *haproxy.problems(node.nodes, node.name),
        *keepalived.problems(node.nodes, node.name),
    )
