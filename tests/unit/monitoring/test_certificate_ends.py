"""A file beside each certificate says when it ends, and goes when the certificate does."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gpufleet.converge.desired import Absent, DesiredState, File, Value
from gpufleet.errors import FleetError
from gpufleet.monitoring import certificate_ends, exporter_certificates, exporters
from gpufleet.monitoring.exporters import Access
from gpufleet.monitoring.metrics.gpufleet_metrics import CERTIFICATE_END
from gpufleet.monitoring.rules import fleet_rules
from gpufleet.network import gateway_node, litellm_node
from gpufleet.network.haproxy import Configuration
from gpufleet.settings.gateway_settings import Gateway
from gpufleet.settings.monitoring_settings import Exporters
from tests.unit.monitoring.test_exporters import NOW, Authority, pem
from tests.unit.network.gateway.test_config import OPEN

FOLDER = "/var/lib/gpufleet/textfile"
ENDS = NOW + dt.timedelta(days=40)


@pytest.fixture(scope="module")
def signed() -> tuple[bytes, bytes]:
    """A certificate that ends in 40 days, with its CA's, which ends in ten years; its key."""
    authority = Authority()
    certificate, key = authority.sign("gpu-01", days=40)
    return pem(certificate) + pem(authority.certificate), pem(key)


def told(values: tuple[Value, ...] | DesiredState) -> dict[str, tuple[dict[str, str], float]]:
    """Return what the files say, as Prometheus' own reader has it: {file: (labels, value)}."""
    found: dict[str, tuple[dict[str, str], float]] = {}
    for each in values:
        if isinstance(each, File) and each.path.endswith(".prom"):
            assert (each.user, each.mode, each.secret) == ("root", 0o644, False)
            (family,) = text_string_to_metric_families(each.content.decode())
            assert (family.documentation, family.type) == (CERTIFICATE_END.help, "gauge")
            (sample,) = family.samples
            assert sample.name == CERTIFICATE_END.name
            assert set(sample.labels) == set(CERTIFICATE_END.labels)
            found[each.path] = (sample.labels, sample.value)
    return found


def gone(values: Any) -> set[str]:
    return {each.path for each in values if isinstance(each, Absent)}


def exporter_access(folder: Path, signed: tuple[bytes, bytes]) -> Access:
    for name, content in zip(("pem", "key"), signed, strict=True):
        (folder / f"gpu-01.{name}").write_bytes(content)
    tls = {"certificate_file": f"{folder}/gpu-01.pem", "key_file": f"{folder}/gpu-01.key"}
    settings = Exporters.model_validate({"tls": tls})
    return exporters.access(settings, "gpu-01", "gpu-01", now=NOW)


@pytest.mark.parametrize("name", ["node-exporter", "dcgm-exporter"])
def test_an_exporters(tmp_path: Path, signed: tuple[bytes, bytes], name: str) -> None:
    found = exporter_access(tmp_path, signed)
    folder, file = f"/etc/gpufleet/{name}", f"{FOLDER}/certificate-{name}.prom"
    labels = {"path": f"{folder}/certificate.pem", "use": "exporter"}

    assert told(found.files(folder)) == {file: (labels, ENDS.timestamp())}
    assert told(found.only_these(folder)) == {file: (labels, ENDS.timestamp())}
    assert gone(found.only_these(folder)) == set()
    # The certificate that is placed is the one that the label names.
    assert labels["path"] in {each.path for each in found.files(folder) if isinstance(each, File)}
    # Without TLS it goes, when nothing runs with the certificate any more.
    for other in (Access(), Access({"web-config.yml": b"x"}, username="prometheus")):
        assert gone(other.files(folder)) == set()
        assert told(other.only_these(folder)) == {}
        assert gone(other.only_these(folder)) == {file}


def test_a_gateways(signed: tuple[bytes, bytes]) -> None:
    both = b"\n".join(signed)
    file = f"{FOLDER}/certificate-gateway.prom"
    state = gateway_node.gateway_files(Configuration({}, {"tls.pem": both}, "1"))

    labels = {"path": "/etc/gpufleet/gateway/tls.pem", "use": "gateway"}
    assert told(state) == {file: (labels, ENDS.timestamp())}
    assert labels["path"] in {each.path for each in state.values_of(File)}
    assert gone(state) == set()
    assert gone(gateway_node.gateway_files(Configuration({}, {}, "1"))) == {file}


def test_litellms(signed: tuple[bytes, bytes]) -> None:
    unit = gateway_node.gateway_unit(Gateway.model_validate(OPEN))
    file = f"{FOLDER}/certificate-litellm.prom"
    state = litellm_node.litellm_files(unit, {"tls.pem": signed[0]}, {})

    labels = {"path": "/etc/gpufleet/litellm/tls.pem", "use": "litellm"}
    assert told(state) == {file: (labels, ENDS.timestamp())}
    assert labels["path"] in {each.path for each in state.values_of(File)}
    assert gone(litellm_node.litellm_files(unit, {}, {})) == {file}
    assert file in gone(litellm_node.absent_state())


def test_of_a_file_with_key_and_chain_the_servers_own_counts(signed: tuple[bytes, bytes]) -> None:
    """Whatever stands first, the key or the certificate."""
    for content in (b"".join(signed), signed[1] + signed[0]):
        assert certificate_ends.certificate_end("gateway.tls", content) == ENDS.timestamp()


@pytest.mark.parametrize("content", [b"", b"no certificate"])
def test_what_is_no_certificate_is_refused_in_words(content: bytes) -> None:
    with pytest.raises(FleetError) as refused:
        certificate_ends.certificate_end("litellm.tls", content)
    assert refused.value.problems == ("litellm.tls.certificate_file: it has no certificate in PEM",)


def test_a_path_may_have_any_character() -> None:
    written = certificate_ends.end_text('/etc/a "b"\\c', "exporter", 1).encode()
    (labels, _) = told((File("/x.prom", written),))["/x.prom"]
    assert labels["path"] == '/etc/a "b"\\c'


def test_a_deploy_remarks_from_the_day_on_from_which_the_alert_fires() -> None:
    assert exporter_certificates.REMARK_DAYS == fleet_rules.SOON_DAYS
