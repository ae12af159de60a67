"""
How the exporters of a node are reached: over TLS, with a password.  Reads what settings name.

A node gets a web configuration as Prometheus' exporters take it (github.com/prometheus/
exporter-toolkit, docs/web-configuration.md), its own certificate and key, and a hash of the
password; units load them as credentials. Everything is read and judged here, before a node is
touched: an exporter that dies of its certificate is noticed by nobody but the alerts that it feeds.
"""

from __future__ import annotations

import base64
import datetime as dt
import hashlib
import ipaddress
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from functools import cache
from pathlib import Path

import bcrypt
import yaml
from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from gpufleet.errors import FleetError
from gpufleet.monitoring_settings import BasicAuth, Exporters, Tls
from gpufleet.quick_dataclass import dataclass
from gpufleet.wanted import Directory, File, NoOtherFiles, Value

WEB_CONFIG = "web-config.yml"
CERTIFICATE = "certificate.pem"
KEY = "key.pem"
# bcrypt's cost: 2^10 rounds, some 50 ms of one core. An exporter asks once for each new password
# and remembers; more would be felt at every start of a fleet's deploy.
COST = 10
# bcrypt takes no more of a password.
LONGEST_PASSWORD = 72
# A certificate is usually renewed a month ahead; with two weeks left that has not happened.
REMARK_DAYS = 14

_STANDARD = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/"
_BCRYPT = b"./ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


@dataclass(frozen=True)
class Access:
    """
    How one node's exporters are reached.

    Attributes:
        credentials: what their units load, by name; empty: plain HTTP for whoever reaches them.
        listen: the address that they bind; "": all.
        username, password: who may ask; None: anybody.
        certificate_sha256: of the certificate that they show; None: they speak plain HTTP.
        remarks: what an operator may want to know.
    """

    credentials: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    listen: str = ""
    username: str | None = None
    password: str | None = field(default=None, repr=False)
    certificate_sha256: str | None = None
    remarks: tuple[str, ...] = ()

    def files(self, directory: str) -> tuple[Value, ...]:
        """Return the credentials as files of root's, below a directory of root's own."""
        if not self.credentials:
            return ()
        return (
            Directory(directory, mode=0o700),
            *(
                File(f"{directory}/{name}", content, mode=0o600, secret=True)
                for name, content in self.credentials.items()
            ),
        )

    def only_these(self, directory: str) -> tuple[Value, ...]:
        """Return that no other credentials lie there, for when nothing runs with them any more."""
        return (*self.files(directory), NoOtherFiles(f"{directory}/*"))

    def started_with(self) -> dict[str, str]:
        """Return the hashes of the credentials: another one means a restart."""
        return {
            f"credential {name}": hashlib.sha256(content).hexdigest()
            for name, content in self.credentials.items()
        }

    def address(self, port: int) -> str:
        """
        Return what an exporter listens on, as its flag has it.

        >>> Access(listen="192.0.2.7").address(9100)
        '192.0.2.7:9100'
        """
        return f"{_bracketed(self.listen)}:{port}"

    def url(self, port: int) -> str:
        """Return the address of an exporter's metrics as the node itself reaches them."""
        scheme = "https" if self.certificate_sha256 else "http"
        return f"{scheme}://{_bracketed(self.listen or '127.0.0.1')}:{port}/metrics"


def access(exporters: Exporters, node: str, address: str, *, now: dt.datetime) -> Access:
    """
    Return how the exporters of `node` are reached.

    `address` is what Prometheus asks the node at. Raises `FleetError` with everything that is wrong
    with the files that settings name, each with its key.
    """
    problems: list[str] = []
    credentials: dict[str, bytes] = {}
    config: dict[str, object] = {}
    remarks: list[str] = []
    username = password = shown = None
    if (tls := exporters.tls) is not None:
        read = {
            key: _read(f"exporters.tls.{key}", named(path, node), problems)
            for key, path in (
                ("certificate_file", tls.certificate_file),
                ("key_file", tls.key_file),
                ("ca_file", tls.ca_file),
            )
            if path is not None
        }
        if len(read) == sum(content is not None for content in read.values()):
            certificate, key = read["certificate_file"] or b"", read["key_file"] or b""
            found = _judged(tls, node, (certificate, key, read.get("ca_file")), now)
            problems += found
            if not found:
                leaf = x509.load_pem_x509_certificates(certificate)[0]
                shown = leaf.fingerprint(hashes.SHA256()).hex()
                remarks += _remarks(tls, node, leaf, address, now)
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
            config["basic_auth_users"] = {username: hashed(password, username, node)}
            if tls is None:
                remarks.append(
                    "exporters.basic_auth is set without exporters.tls: Prometheus sends the "
                    "password in plain text with every scrape; set `tls`, too"
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
        remarks=tuple(remarks),
    )


def named(path: str, node: str) -> str:
    """
    Return a file's name for one node.

    >>> named("secrets/tls/{node}.pem", "gpu-01")
    'secrets/tls/gpu-01.pem'
    """
    return path.replace("{node}", node)


@cache
def hashed(password: str, username: str, node: str) -> str:
    """
    Return the bcrypt hash of a password, always the same one for a user on a node.

    The salt comes from both names, and from nothing secret: it stands in the hash for everybody to
    read, and one that came from the password would let guesses be tried without bcrypt's cost.
    """
    names = f"gpufleet exporters\0{node}\0{username}".encode()
    digest = hashlib.sha256(names).digest()[:16]
    # bcrypt's own alphabet for the same bits (openbsd: lib/libc/crypt/bcrypt.c).
    salt = base64.b64encode(digest).rstrip(b"=").translate(bytes.maketrans(_STANDARD, _BCRYPT))
    return bcrypt.hashpw(password.encode(), b"$2b$%02d$" % COST + salt).decode()


def _password(basic: BasicAuth, node: str) -> tuple[str, str | None]:
    """Return the password and "", or a sentence why there is none."""
    key, path = "exporters.basic_auth.password_file", named(basic.password_file, node)
    wrong: list[str] = []
    content = _read(key, path, wrong)
    if content is None:
        return "", wrong[0]
    try:
        password = content.decode().strip()
    except UnicodeDecodeError:
        return "", f"{key}: {path} is not text: put the password into it, one line"
    if not password:
        return "", f"{key}: {path} is empty: put the password into it"
    if any(character.isspace() or character == "\0" for character in password):
        return "", f"{key}: {path} has more than a password in it: one line, without spaces"
    if len(password.encode()) > LONGEST_PASSWORD:
        return "", (
            f"{key}: {path} has a password of more than {LONGEST_PASSWORD} bytes, of which bcrypt "
            "would see the first alone: `openssl rand -hex 32` makes one that fits"
        )
    return password, None


def _read(key: str, path: str, problems: list[str]) -> bytes | None:
    try:
        return Path(path).read_bytes()
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        problems.append(f"{key}: {path} cannot be read ({reason})")
        return None


def _judged(
    tls: Tls, node: str, read: tuple[bytes, bytes, bytes | None], now: dt.datetime
) -> list[str]:
    """Return what is wrong with a certificate, its key and its CA, in sentences."""
    certificate, key, ca = read
    path, key_path = named(tls.certificate_file, node), named(tls.key_file, node)
    try:
        chain = x509.load_pem_x509_certificates(certificate)
    except ValueError:
        return [f"exporters.tls.certificate_file: {path} has no certificate in PEM"]
    problems = list(_out_of_date(path, chain[0], now))
    try:
        private = load_pem_private_key(key, password=None)
    except TypeError:
        problems.append(
            f"exporters.tls.key_file: {key_path} is encrypted, and nobody is there to unlock it "
            f"when an exporter starts: `openssl pkey -in {key_path}` writes it without"
        )
    except ValueError:
        problems.append(f"exporters.tls.key_file: {key_path} has no private key in PEM")
    else:
        if _public(private.public_key()) != _public(chain[0].public_key()):
            problems.append(
                f"exporters.tls.key_file: {key_path} is not the key of the certificate in {path}"
            )
    if ca is not None and tls.ca_file is not None:
        problems += _unsigned(path, chain, named(tls.ca_file, node), ca)
    return problems


def _out_of_date(path: str, leaf: x509.Certificate, now: dt.datetime) -> Iterator[str]:
    begins, ends = leaf.not_valid_before_utc, leaf.not_valid_after_utc
    if now > ends:
        yield f"exporters.tls.certificate_file: {path} has expired on {ends:%Y-%m-%d}: renew it"
    elif now < begins:
        yield (
            f"exporters.tls.certificate_file: {path} is not valid before {begins:%Y-%m-%d %H:%M} "
            "UTC: wait, or look at this machine's clock"
        )


def _unsigned(
    path: str, chain: Sequence[x509.Certificate], ca_path: str, ca: bytes
) -> Iterator[str]:
    try:
        roots = x509.load_pem_x509_certificates(ca)
    except ValueError:
        yield f"exporters.tls.ca_file: {ca_path} has no certificate in PEM"
        return
    known = [*chain[1:], *roots]
    at = chain[0]
    for _ in range(len(known) + 1):
        if at in roots or any(_signs(root, at) for root in roots):
            return
        issuer = next((each for each in chain[1:] if each != at and _signs(each, at)), None)
        if issuer is None:
            break
        at = issuer
    yield (
        f"exporters.tls.certificate_file: {path} is signed by nothing in {ca_path} "
        "(exporters.tls.ca_file), so Prometheus would not believe it"
    )


def _signs(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def _remarks(
    tls: Tls, node: str, leaf: x509.Certificate, address: str, now: dt.datetime
) -> Iterator[str]:
    path = named(tls.certificate_file, node)
    left = (leaf.not_valid_after_utc - now).days
    if left < REMARK_DAYS:
        yield f"{path} (exporters.tls.certificate_file) expires in {left} days: renew it"
    if not _names(leaf, address):
        yield (
            f"{path} (exporters.tls.certificate_file) does not name {address}, at which Prometheus "
            "asks the node: it needs that as a subject alternative name, or Prometheus refuses it"
        )


def _names(leaf: x509.Certificate, address: str) -> bool:
    """Say whether a certificate is for an address, as Go compares them (crypto/x509)."""
    try:
        found = leaf.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    except x509.ExtensionNotFound:
        return False
    try:
        return ipaddress.ip_address(address) in found.get_values_for_type(x509.IPAddress)
    except ValueError:
        wanted = address.lower().split(".")
        names = (each.lower().split(".") for each in found.get_values_for_type(x509.DNSName))
        return any(
            wanted == have or (have[0] == "*" and len(have) > 1 and wanted[1:] == have[1:])
            for have in names
        )


def _public(key: object) -> bytes:
    return key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)  # type: ignore[attr-defined,no-any-return]


def _bracketed(address: str) -> str:
    return f"[{address}]" if ":" in address else address
