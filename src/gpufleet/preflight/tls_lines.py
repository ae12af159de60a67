"""Report whether certificates are trusted, and when they expire. Pure."""

from __future__ import annotations

import base64
import datetime as dt
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from gpufleet.formatting import count_of, join_names
from gpufleet.monitoring.exporter_certificates import REMARK_DAYS
from gpufleet.preflight.line import Line, Status, Verdict, by_node, reason, unknown
from gpufleet.remote.query import Answer
from gpufleet.settings.node_settings import NodeSettings


@dataclass(frozen=True)
class TlsServer:
    """A TLS server, and the node that checks its certificate."""

    asked_from: str
    """
    The node that connects to the server. For an exporter, this is the monitoring node, if there is
    one.
    """
    node: str
    """The node on which the server runs."""
    key: str
    """The setting that declares the server, for example `gateway.port`."""
    host: str
    port: int
    authorities: str | None
    """
    The certificate authorities in PEM format. None: the authorities of the node that connects.
    """
    trusts: str
    """The name of the file with the authorities, which the proof mentions."""
    by_name: bool
    """Whether the certificate must contain the host name that is requested."""

    @property
    def id(self) -> str:
        """Return the key of the server in the answer of node_look.py."""
        return f"{self.node} {self.key}"

    def parameters(self) -> dict[str, Any]:
        """Return the parameters of node_look.py for this server."""
        return {
            "host": self.host,
            "port": self.port,
            "authorities": self.authorities,
            "name": self.by_name,
        }


def tls_lines(
    looks: Mapping[str, Answer],
    servers: tuple[TlsServer, ...],
    settings: Mapping[str, NodeSettings],
    now: dt.datetime,
) -> tuple[Line, ...]:
    """
    Return lines on certificates: whether the clients trust each certificate, and whether it expires
    soon.
    """
    lines: list[Line] = []
    for key in sorted({each.key for each in servers}):
        mine = {each.node: each for each in servers if each.key == key}
        found = {
            node: certificate_verdict(
                each, looks.get(each.asked_from, "the node was not queried"), now
            )
            for node, each in mine.items()
        }
        lines += [
            Line(line.check, f"{key} on {line.subject}", line.verdict)
            for line in by_node("tls", found)
        ]
    plain = {
        node: Verdict(
            Status.WARN, "sends keys and prompts unencrypted", "`gateway.tls` is not set",
            "`gateway.tls` (docs/traffic/gateway.md)",
        )
        for node, here in settings.items()
        if here.gateway and not here.gateway.tls
    }  # fmt: skip
    plain |= {
        node: Verdict(
            Status.WARN, "sends exporters' passwords unencrypted", "`exporters.tls` is not set",
            "`exporters.tls` (docs/monitor/monitoring.md)",
        )
        for node, here in settings.items()
        if here.exporters.basic_auth and not here.exporters.tls and node not in plain
    }  # fmt: skip
    lines += by_node("tls", plain)
    if lines:
        return tuple(lines)
    if not any(here.gateway for here in settings.values()):
        proof = "no node has `gateway`, and no exporter `tls`: gpufleet deploys no certificate"
        return (unknown("tls", proof, "openssl s_client -connect HOST:PORT, at your balancer"),)
    return ()


def certificate_verdict(server: TlsServer, look: Answer, now: dt.datetime) -> Verdict:
    """
    Return the verdict on a certificate that a node received: whether it is trusted, and when it
    expires.
    """
    remedy = f"openssl s_client -connect {server.host}:{server.port}, on {server.asked_from}"
    if isinstance(look, str):
        return Verdict(
            Status.UNKNOWN, "could not be checked", f"{server.asked_from}: {look}", remedy
        )
    said = look["tls"].get(server.id, {"missing": "the node was not queried"})
    if "missing" in said:
        return Verdict(Status.UNKNOWN, "could not be checked", reason(said), remedy)
    end, names = read_certificate(said["certificate"])
    trust = f"tested from {server.asked_from} with trust in {server.trusts}"
    renew = "renew the certificate, then run the deploy of the service that uses it"
    if end is None and not said["verified"]:
        return Verdict(Status.FAIL, "presents no certificate", f"{said['why']}; {trust}", remedy)
    if end is None:
        return Verdict(
            Status.UNKNOWN, "could not be checked", "the certificate cannot be parsed", remedy
        )
    shown = f"expires on {end:%Y-%m-%d}, names in the certificate: {join_names(names) or 'none'}"
    if end < now:
        return Verdict(Status.FAIL, "its certificate has expired", f"{shown}; {trust}", renew)
    if not said["verified"]:
        proof = f"{said['why']}; {shown}; {trust}"
        return Verdict(Status.FAIL, "its certificate is not trusted", proof, renew)
    if (left := (end - now).days) < REMARK_DAYS:
        what = f"its certificate expires in {count_of(left, 'day')}"
        return Verdict(Status.WARN, what, f"{shown}; {trust}", renew)
    return Verdict(Status.OK, "its certificate is trusted", f"{shown}; {trust}")


def read_certificate(certificate: str) -> tuple[dt.datetime | None, tuple[str, ...]]:
    """
    Return when a certificate expires, and the names in it. The time is None if the certificate
    cannot be parsed.
    """
    from cryptography import x509

    try:
        found = x509.load_der_x509_certificate(base64.b64decode(certificate, validate=True))
        end = found.not_valid_after_utc
    except ValueError:
        return None, ()
    try:
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return end, tuple(str(each.value) for each in names)
    except (x509.ExtensionNotFound, ValueError):
        return end, ()
