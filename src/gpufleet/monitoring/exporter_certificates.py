"""
Check that clients will accept the certificate of an exporter or a gateway. Pure.

This is a separate module because `cryptography.x509` takes 14 ms to load, and only fleets with
certificates need it.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from cryptography import x509
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
)

from gpufleet.errors import FleetError

# A certificate is usually renewed a month before it expires. If only three weeks are left, the
# renewal has probably failed.
REMARK_DAYS = 21
# Servers accept a key file that also contains other parts: the certificate, or the parameters of
# the curve.
_PRIVATE_KEY = re.compile(
    rb"-----BEGIN ([A-Z ]*)PRIVATE KEY-----.*?-----END \1PRIVATE KEY-----", re.DOTALL
)


class CertificateFiles(NamedTuple):
    """The files of a certificate, each as a pair of path and content."""

    certificate: tuple[str, bytes]
    key: tuple[str, bytes]
    ca: tuple[str, bytes] | None
    setting: str = "exporters.tls"
    """The setting that contains the paths of the files."""


def certificate_problems(named: CertificateFiles, now: dt.datetime) -> list[str]:
    """Return the problems of a certificate, its key and its CA, one sentence each."""
    (path, certificate), (key_path, key) = named.certificate, named.key
    try:
        chain = x509.load_pem_x509_certificates(certificate)
    except ValueError:
        return [f"{named.setting}.certificate_file: {path} has no certificate in PEM"]
    problems = [f"{named.setting}.{each}" for each in _out_of_date(path, chain[0], now)]
    try:
        found = _PRIVATE_KEY.search(key)
        private = load_pem_private_key(found[0] if found else b"", password=None)
    except TypeError:
        problems.append(
            f"{named.setting}.key_file: {key_path} is encrypted, so the server cannot read it "
            f"when it starts: `openssl pkey -in {key_path}` writes it without encryption"
        )
    except ValueError:
        problems.append(f"{named.setting}.key_file: {key_path} has no private key in PEM")
    else:
        if _public(private.public_key()) != _public(chain[0].public_key()):
            problems.append(
                f"{named.setting}.key_file: {key_path} is not the key of the certificate in {path}"
            )
    if named.ca is not None:
        problems += _unsigned(path, chain, *named.ca)
    return problems


def _out_of_date(path: str, leaf: x509.Certificate, now: dt.datetime) -> Iterator[str]:
    begins, ends = leaf.not_valid_before_utc, leaf.not_valid_after_utc
    if now > ends:
        yield f"certificate_file: {path} has expired on {ends:%Y-%m-%d}: renew it"
    elif now < begins:
        yield (
            f"certificate_file: {path} is not valid before {begins:%Y-%m-%d %H:%M} "
            "UTC: wait until then, or check this machine's clock"
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
        f"exporters.tls.certificate_file: {path} is not signed by a certificate in {ca_path} "
        "(exporters.tls.ca_file), so Prometheus would reject it"
    )


def _signs(issuer: x509.Certificate, certificate: x509.Certificate) -> bool:
    try:
        certificate.verify_directly_issued_by(issuer)
    except (ValueError, TypeError, InvalidSignature):
        return False
    return True


def fingerprint(named: CertificateFiles) -> str:
    """Return the SHA-256 hash of a certificate. The certificate must have been parsed before."""
    return _leaf(named).fingerprint(hashes.SHA256()).hex()


def end(setting: str, pem: bytes) -> dt.datetime:
    """
    Return when the first certificate in a PEM file expires.

    Raises `FleetError` with the setting's name if the file has no certificate.
    """
    try:
        return x509.load_pem_x509_certificates(pem)[0].not_valid_after_utc
    except ValueError:
        raise FleetError(f"{setting}.certificate_file: it has no certificate in PEM") from None


def _leaf(named: CertificateFiles) -> x509.Certificate:
    return x509.load_pem_x509_certificates(named.certificate[1])[0]


def end_remarks(named: CertificateFiles, now: dt.datetime) -> Iterator[str]:
    """Yield a remark if a certificate expires soon."""
    left = (_leaf(named).not_valid_after_utc - now).days
    if left < REMARK_DAYS:
        path = named.certificate[0]
        yield f"{path} ({named.setting}.certificate_file) expires in {left} days: renew it"


def certificate_remarks(named: CertificateFiles, address: str, now: dt.datetime) -> Iterator[str]:
    """
    Yield a remark if the certificate expires soon, and one if it is not valid for the address that
    clients use.
    """
    path, leaf = named.certificate[0], _leaf(named)
    yield from end_remarks(named, now)
    if not _names(leaf, address):
        yield (
            f"{path} (exporters.tls.certificate_file) does not name {address}, which Prometheus "
            f"uses to reach the node. Add {address} to the certificate as a subject alternative "
            f"name; otherwise Prometheus rejects the certificate"
        )


def _names(leaf: x509.Certificate, address: str) -> bool:
    """Return whether a certificate is valid for an address, by the rules of Go (crypto/x509)."""
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
