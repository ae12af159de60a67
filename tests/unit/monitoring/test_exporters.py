"""How exporters are reached: what of the operator's files goes to a node, and what is refused."""

from __future__ import annotations

import datetime as dt
import re
from collections.abc import Callable
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

import bcrypt
import pytest
import yaml
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from gpufleet.errors import FleetError
from gpufleet.monitoring import exporters
from gpufleet.monitoring.exporters import Access
from gpufleet.settings.monitoring_settings import Exporters
from gpufleet.settings.parse import SettingsError, parse_settings
from tests.support.rows import each_row

NOW = dt.datetime(2026, 11, 22, 12, tzinfo=dt.UTC)
ADDRESS = "192.0.2.21"
PASSWORD = "correct-horse-battery-staple"


@dataclass
class Authority:
    """A CA for a moment, and what it signs."""

    name: str = "ca"

    def __post_init__(self) -> None:
        self.key = ec.generate_private_key(ec.SECP256R1())
        self.certificate = self._signed(self.name, self.key, self.key, self.name, ca=True)

    def sign(self, *names: str, days: int = 365, since: dt.datetime = NOW) -> tuple[Any, Any]:
        """Return (certificate, key), for DNS names and addresses."""
        key = ec.generate_private_key(ec.SECP256R1())
        signed = self._signed("node", key, self.key, self.name, names=names, days=days, since=since)
        return signed, key

    def _signed(
        self,
        subject: str,
        key: Any,
        signer: Any,
        issuer: str,
        *,
        names: tuple[str, ...] = (),
        days: int = 3650,
        since: dt.datetime = NOW,
        ca: bool = False,
    ) -> x509.Certificate:
        def called(name: str) -> x509.Name:
            return x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])

        builder = (
            x509.CertificateBuilder()
            .subject_name(called(subject))
            .issuer_name(called(issuer))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(since - dt.timedelta(days=1))
            .not_valid_after(since + dt.timedelta(days=days))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
        )
        if names:
            builder = builder.add_extension(
                x509.SubjectAlternativeName([_general(name) for name in names]), critical=False
            )
        return builder.sign(signer, hashes.SHA256())


def _general(name: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ip_address(name))
    except ValueError:
        return x509.DNSName(name)


def pem(value: Any, password: bytes | None = None) -> bytes:
    if isinstance(value, x509.Certificate):
        return value.public_bytes(serialization.Encoding.PEM)
    how = (
        serialization.BestAvailableEncryption(password)
        if password
        else serialization.NoEncryption()
    )
    return value.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, how)


@pytest.fixture(scope="module")
def authority() -> Authority:
    return Authority()


@pytest.fixture
def wanted(tmp_path: Path, authority: Authority) -> Callable[..., Exporters]:
    """Settings whose files are right; `wanted(key=bytes)` writes another content, None no file."""
    certificate, key = authority.sign("gpu-01", ADDRESS)
    files = {
        "certificate": pem(certificate),
        "key": pem(key),
        "ca": pem(authority.certificate),
        "password": f"{PASSWORD}\n".encode(),
    }

    def made(**changed: bytes | None) -> Exporters:
        for name, content in {**files, **changed}.items():
            path = tmp_path / f"gpu-01.{name}"
            path.unlink(missing_ok=True)
            if content is not None:
                path.write_bytes(content)
        return Exporters.model_validate(
            {
                "tls": {
                    "certificate_file": f"{tmp_path}/{{node}}.certificate",
                    "key_file": f"{tmp_path}/{{node}}.key",
                    "ca_file": f"{tmp_path}/{{node}}.ca",
                },
                "basic_auth": {"password_file": f"{tmp_path}/gpu-01.password"},
            }
        )

    return made


def access(settings: Exporters, node: str = "gpu-01", address: str = ADDRESS) -> Access:
    return exporters.access(settings, node, address, now=NOW)


def refused(settings: Exporters) -> tuple[str, ...]:
    with pytest.raises(FleetError) as caught:
        access(settings)
    return caught.value.problems


# What goes to a node


def test_a_node_gets_its_certificate_its_key_and_a_hash(wanted: Callable[..., Exporters]):
    """bcrypt itself, not we, says that the hash is the password's."""
    found = access(wanted())

    assert set(found.credentials) == {"web-config.yml", "certificate.pem", "key.pem"}
    config = yaml.safe_load(found.credentials["web-config.yml"])
    assert config["tls_server_config"]["cert_file"] == "certificate.pem"
    assert config["tls_server_config"]["key_file"] == "key.pem"
    (hashed,) = config["basic_auth_users"].values()
    assert bcrypt.checkpw(PASSWORD.encode(), hashed.encode())
    assert not bcrypt.checkpw(b"another", hashed.encode())
    assert found.remarks == ()


def test_the_password_is_in_nothing_that_reaches_a_node_or_a_log(
    wanted: Callable[..., Exporters],
):
    found = access(wanted())

    assert PASSWORD not in repr(found)
    for value in found.files("/etc/gpufleet/x"):
        assert PASSWORD.encode() not in getattr(value, "content", b"")
        assert PASSWORD not in repr(value)


def test_a_second_deploy_finds_the_same_hash_and_no_two_nodes_have_one():
    """Nothing random is in it: another process, and another day, make the same one."""
    exporters.password_hash.cache_clear()
    first = exporters.password_hash(PASSWORD, "prometheus", "gpu-01")
    exporters.password_hash.cache_clear()

    assert exporters.password_hash(PASSWORD, "prometheus", "gpu-01") == first
    assert exporters.password_hash(PASSWORD, "prometheus", "gpu-02")[:29] != first[:29]
    assert exporters.password_hash(PASSWORD, "grafana", "gpu-01")[:29] != first[:29]


def test_the_salt_says_nothing_about_the_password():
    """It is readable in the hash: one made of the password would let guesses skip bcrypt's cost."""
    salts = {exporters.password_hash(word, "prometheus", "gpu-01")[:29] for word in ("one", "two")}

    assert len(salts) == 1


def test_without_settings_nothing_is_written_and_everybody_is_answered():
    found = access(Exporters())

    assert found == Access()
    assert found.files("/etc/gpufleet/x") == ()
    assert found.url(9100) == "http://127.0.0.1:9100/metrics"
    assert found.address(9100) == ":9100"


@pytest.mark.parametrize(
    ("listen", "flag", "url"),
    [
        ("10.0.0.11", "10.0.0.11:9100", "http://10.0.0.11:9100/metrics"),
        ("2001:db8::1", "[2001:db8::1]:9100", "http://[2001:db8::1]:9100/metrics"),
    ],
)
def test_one_address_may_be_bound_and_is_the_one_that_is_asked(listen: str, flag: str, url: str):
    found = access(Exporters.model_validate({"listen": listen}))

    assert (found.address(9100), found.url(9100)) == (flag, url)


# What is refused before a node is touched


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("certificate", "exporters.tls.certificate_file"),
        ("key", "exporters.tls.key_file"),
        ("ca", "exporters.tls.ca_file"),
        ("password", "exporters.basic_auth.password_file"),
    ],
)
def test_a_missing_file_is_named_with_its_key(
    wanted: Callable[..., Exporters], tmp_path: Path, name: str, key: str
):
    (problem,) = refused(wanted(**{name: None}))

    assert problem == f"{key}: {tmp_path}/gpu-01.{name} cannot be read (No such file or directory)"


def test_everything_that_is_missing_is_named_at_once(wanted: Callable[..., Exporters]):
    assert len(refused(wanted(certificate=None, key=None, password=None))) == 3


def test_an_expired_certificate_is_refused(wanted: Callable[..., Exporters], authority: Authority):
    certificate, key = authority.sign(ADDRESS, days=10, since=NOW - dt.timedelta(days=11))
    (problem,) = refused(wanted(certificate=pem(certificate), key=pem(key)))

    assert "has expired on 2026-11-21: renew it" in problem


def test_a_certificate_of_tomorrow_is_refused(
    wanted: Callable[..., Exporters], authority: Authority
):
    certificate, key = authority.sign(ADDRESS, since=NOW + dt.timedelta(days=2))
    (problem,) = refused(wanted(certificate=pem(certificate), key=pem(key)))

    assert "is not valid before 2026-11-23 12:00 UTC" in problem


def test_the_key_of_another_certificate_is_refused(
    wanted: Callable[..., Exporters], authority: Authority
):
    _, other = authority.sign(ADDRESS)
    (problem,) = refused(wanted(key=pem(other)))

    assert problem.startswith("exporters.tls.key_file: ")
    assert "is not the key of the certificate in" in problem


def test_an_encrypted_key_is_refused(wanted: Callable[..., Exporters], authority: Authority):
    certificate, key = authority.sign(ADDRESS)
    (problem,) = refused(wanted(certificate=pem(certificate), key=pem(key, b"secret")))

    assert "is encrypted" in problem


def test_a_certificate_that_prometheus_would_not_believe_is_refused(
    wanted: Callable[..., Exporters],
):
    """The CA's name alone proves nothing: another CA of the same name has not signed it."""
    (problem,) = refused(wanted(ca=pem(Authority().certificate)))

    assert "is not signed by a certificate in" in problem
    assert "exporters.tls.ca_file" in problem


def test_a_certificate_may_bring_the_one_between_it_and_the_ca(
    wanted: Callable[..., Exporters], authority: Authority
):
    between = Authority("between")
    crossed = authority._signed("between", between.key, authority.key, authority.name, ca=True)
    certificate, key = between.sign(ADDRESS)
    both = pem(certificate) + pem(crossed)

    assert access(wanted(certificate=both, key=pem(key))).certificate_sha256
    assert refused(wanted(certificate=pem(certificate), key=pem(key)))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"\n", "is empty"),
        (b"one\ntwo\n", "contains more than a password"),
        (b"x" * 73, "more than 72 bytes"),
        (b"\xff\xfe", "is not text"),
    ],
)
def test_a_password_that_would_not_work_is_refused(
    wanted: Callable[..., Exporters], content: bytes, said: str
):
    (problem,) = refused(wanted(password=content))

    assert said in problem
    assert problem.startswith("exporters.basic_auth.password_file: ")


@pytest.mark.parametrize("content", [b"", b"not a certificate"])
@pytest.mark.parametrize("name", ["certificate", "key", "ca"])
def test_what_is_no_pem_is_refused_in_words(
    wanted: Callable[..., Exporters], name: str, content: bytes
):
    (problem,) = refused(wanted(**{name: content}))

    assert "in PEM" in problem


# What an operator is told


def test_a_certificate_that_ends_soon_is_remarked_on(
    wanted: Callable[..., Exporters], authority: Authority
):
    certificate, key = authority.sign(ADDRESS, days=3)
    found = access(wanted(certificate=pem(certificate), key=pem(key)))

    assert len(found.remarks) == 1
    assert "expires in 3 days" in found.remarks[0]


@pytest.mark.parametrize(
    ("names", "address", "fits"),
    [
        (("gpu-01",), "gpu-01", True),
        (("gpu-01",), "GPU-01", True),
        (("*.gpus.example.net",), "a.gpus.example.net", True),
        (("*.gpus.example.net",), "a.b.gpus.example.net", False),
        (("192.0.2.21",), "192.0.2.21", True),
        (("192.0.2.21",), "192.0.2.22", False),
        (("gpu-01",), "192.0.2.21", False),
        ((), "gpu-01", False),
    ],
)
def test_a_certificate_that_does_not_name_where_it_is_asked_is_remarked_on(
    wanted: Callable[..., Exporters],
    authority: Authority,
    names: tuple[str, ...],
    address: str,
    fits: bool,
):
    certificate, key = authority.sign(*names)
    found = access(wanted(certificate=pem(certificate), key=pem(key)), address=address)

    assert [address in remark for remark in found.remarks] == [True] * (not fits)


def test_a_password_without_tls_is_remarked_on(tmp_path: Path):
    (tmp_path / "password").write_text(PASSWORD)
    found = access(
        Exporters.model_validate({"basic_auth": {"password_file": f"{tmp_path}/password"}})
    )

    assert "plain text" in found.remarks[0]
    assert re.match("http:", found.url(9100))


# Settings


def test_two_programs_of_ours_never_share_a_port():
    with pytest.raises(SettingsError) as caught:
        parse_settings({"node_exporter": {"port": 9090}, "monitoring": {}})

    assert "`node_exporter.port` and `monitoring.prometheus.port` are both 9090" in str(
        caught.value
    )


@each_row("name", ["", "a b", "--web.listen-address", "cpu=1", "CPU"])
def test_only_a_collector_s_name_becomes_a_flag(name: str):
    with pytest.raises(SettingsError):
        parse_settings({"node_exporter": {"collectors": [name]}})
