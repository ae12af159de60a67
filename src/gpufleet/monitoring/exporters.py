"""
Prepare the access to a node's exporters: TLS and a password. Reads the operator's files.

A node gets its own certificate and key, a hash of the password, and a web configuration in the
format of Prometheus' exporters (github.com/prometheus/exporter-toolkit, docs/web-configuration.md).
The exporters' units load these files as credentials. gpufleet checks all of them before it changes
a node. Otherwise only the alerts on an exporter's metrics would show that its certificate is
invalid.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import bcrypt
import yaml

from gpufleet.converge.desired import Directory, File, NoOtherFiles, Value
from gpufleet.errors import FleetError
from gpufleet.monitoring import certificate_ends
from gpufleet.settings.monitoring_settings import BasicAuth, Exporters

WEB_CONFIG = "web-config.yml"
CERTIFICATE = "certificate.pem"
KEY = "key.pem"
# bcrypt's cost: 2^10 rounds, about 50 ms on one core. An exporter computes the hash once for each
# new password and caches it. A higher cost would noticeably delay every deploy of a fleet.
COST = 10
# In bytes. bcrypt ignores the rest of a longer password.
LONGEST_PASSWORD = 72

_STANDARD = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_BCRYPT = b"./ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


@dataclass(frozen=True)
class Access:
    """
    The access to the exporters of one node.

    Attributes:
        credentials: the credentials of the exporters' units, by name. Empty for plain HTTP without
            a login.
        listen: the address that the exporters bind. "" binds all addresses.
        username, password: the login, or None without a login.
        certificate_sha256: the SHA-256 hash of the certificate, or None for plain HTTP.
        certificate_end: when the certificate expires, in seconds since 1970, or None for plain HTTP.
        remarks: remarks for the operator.
    """

    credentials: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    listen: str = ""
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    certificate_sha256: str | None = None
    certificate_end: int | None = None
    remarks: tuple[str, ...] = ()

    def files(self, directory: str) -> tuple[Value, ...]:
        """
        Return the credentials as files in a directory, readable only by root.

        The expiry of the certificate is in a separate metrics file, which every user can read.
        """
        if not self.credentials:
            return ()
        return (
            Directory(directory, mode=0o700),
            *(
                File(f"{directory}/{name}", content, mode=0o600, secret=True)
                for name, content in self.credentials.items()
            ),
            *(self._end(directory) if self.certificate_end is not None else ()),
        )

    def only_these(self, directory: str) -> tuple[Value, ...]:
        """
        Return the desired state that also removes all other credentials from the directory.

        Apply it after all units have stopped using the other credentials.
        """
        gone = self._end(directory) if self.certificate_end is None else ()
        return (*self.files(directory), NoOtherFiles(f"{directory}/*"), *gone)

    def _end(self, directory: str) -> tuple[Value, ...]:
        return certificate_ends.end_values(
            directory, CERTIFICATE, certificate_ends.EXPORTER, self.certificate_end
        )

    def started_with(self) -> dict[str, str]:
        """Return the hashes of the credentials. If a hash changes, the unit is restarted."""
        return {
            f"credential {name}": hashlib.sha256(content).hexdigest()
            for name, content in self.credentials.items()
        }

    def address(self, port: int) -> str:
        """
        Return the address that an exporter binds, in the form of its flag.

        >>> Access(listen="192.0.2.7").address(9100)
        '192.0.2.7:9100'
        """
        return f"{_bracketed(self.listen)}:{port}"

    def url(self, port: int) -> str:
        """Return the URL of an exporter's metrics for a client on the node itself."""
        scheme = "https" if self.certificate_sha256 else "http"
        return f"{scheme}://{_bracketed(self.listen or '127.0.0.1')}:{port}/metrics"


def access(exporters: Exporters, node: str, address: str, *, now: dt.datetime) -> Access:
    """
    Return the access to the exporters of `node`.

    `address` is the address that Prometheus uses for the node. Raises `FleetError` with all
    problems of the files that the settings name, each with the key of its setting.
    """
    problems: list[str] = []
    credentials: dict[str, bytes] = {}
    config: dict[str, object] = {}
    remarks: list[str] = []
    username = password = shown = end = None
    if (tls := exporters.tls) is not None:
        from gpufleet.monitoring import exporter_certificates

        read = {
            key: _read(f"exporters.tls.{key}", file_of_node(path, node), problems)
            for key, path in (
                ("certificate_file", tls.certificate_file),
                ("key_file", tls.key_file),
                ("ca_file", tls.ca_file),
            )
            if path is not None
        }
        if len(read) == sum(content is not None for content in read.values()):
            certificate, key = read["certificate_file"] or b"", read["key_file"] or b""
            files = exporter_certificates.CertificateFiles(
                (file_of_node(tls.certificate_file, node), certificate),
                (file_of_node(tls.key_file, node), key),
                (file_of_node(tls.ca_file, node), read["ca_file"] or b"") if tls.ca_file else None,
            )
            found = exporter_certificates.certificate_problems(files, now)
            problems += found
            if not found:
                shown = exporter_certificates.fingerprint(files)
                end = certificate_ends.certificate_end("exporters.tls", certificate)
                remarks += exporter_certificates.certificate_remarks(files, address, now)
            credentials |= {CERTIFICATE: certificate, KEY: key}
            config["tls_server_config"] = {
                "cert_file": CERTIFICATE,
                "key_file": KEY,
                "min_version": "TLS12",
            }
    if (basic := exporters.basic_auth) is not None:
        password, wrong = _password(basic, node)
        if wrong:
            problems.append(wrong)
        else:
            username = basic.username
            config["basic_auth_users"] = {username: password_hash(password, username, node)}
            if tls is None:
                remarks.append(
                    "exporters.basic_auth is set without exporters.tls: Prometheus sends the "
                    "password in plain text with every scrape. Also set `exporters.tls`"
                )
    if problems:
        raise FleetError(*problems)
    if config:
        head = f"# Written by gpufleet for the exporters of {node}.\n"
        credentials[WEB_CONFIG] = (head + yaml.safe_dump(config, sort_keys=True)).encode()
    return Access(
        credentials=dict(sorted(credentials.items())),
        listen=str(exporters.listen or ""),
        username=username,
        password=password or None,
        certificate_sha256=shown,
        certificate_end=end,
        remarks=tuple(remarks),
    )


def file_of_node(path: str, node: str) -> str:
    """
    Return the path of a file for one node: `{node}` in the path is replaced with the node's name.

    >>> file_of_node("secrets/tls/{node}.pem", "gpu-01")
    'secrets/tls/gpu-01.pem'
    """
    return path.replace("{node}", node)


@cache
def password_hash(password: str, username: str, node: str) -> str:
    """
    Return the bcrypt hash of a password. The hash is always the same for a user on a node.

    The salt is derived only from the names of the node and the user. The hash contains the salt, so
    a salt that is derived from the password would allow guesses without the cost of bcrypt.
    """
    names = f"gpufleet exporters\0{node}\0{username}".encode()
    digest = hashlib.sha256(names).digest()[:16]
    # bcrypt encodes the bits with a different alphabet (openbsd: lib/libc/crypt/bcrypt.c).
    salt = base64.b64encode(digest).rstrip(b"=").translate(bytes.maketrans(_STANDARD, _BCRYPT))
    return bcrypt.hashpw(password.encode(), b"$2b$%02d$" % COST + salt).decode()


def _password(basic: BasicAuth, node: str) -> tuple[str, str | None]:
    """Return the password and None, or "" and the reason why the password is unusable."""
    key, path = "exporters.basic_auth.password_file", file_of_node(basic.password_file, node)
    wrong: list[str] = []
    content = _read(key, path, wrong)
    if content is None:
        return "", wrong[0]
    try:
        password = content.decode().strip()
    except UnicodeDecodeError:
        return "", f"{key}: {path} is not text: write the password into it as one line"
    if not password:
        return "", f"{key}: {path} is empty: write the password into it"
    if any(character.isspace() or character == "\0" for character in password):
        return "", (
            f"{key}: {path} contains more than a password: write only the password, as one line "
            "without spaces"
        )
    if len(password.encode()) > LONGEST_PASSWORD:
        return "", (
            f"{key}: {path} has a password of more than {LONGEST_PASSWORD} bytes, but bcrypt "
            f"ignores the bytes after that. `openssl rand -hex 32` writes a password that is "
            f"short enough"
        )
    return password, None


def _read(key: str, path: str, problems: list[str]) -> bytes | None:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        problems.append(f"{key}: {path} cannot be read ({reason})")
        return None


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address


@dataclass(frozen=True)
class Metrics:
    """One exporter, and the metric families that it must serve."""

    id: str
    unit: str
    url: str
    families: tuple[str, ...]
    access: Access = field(default_factory=Access)
    """
    The access to the exporter. A query gets the password on standard input and never from a file.
    """
    loopback_port: int | None = None
    """
    The port from which the exporter reads its values, which is open only on loopback, or None.
    """

    def parameters(self) -> dict[str, Any]:
        """Return the exporter's part of the parameters of on_node/serving/endpoints.py."""
        return {
            "id": self.id,
            "unit": self.unit,
            "url": self.url,
            "families": list(self.families),
            "certificate_sha256": self.access.certificate_sha256,
            "username": self.access.username,
            "password": self.access.password,
            "loopback_port": self.loopback_port,
        }
