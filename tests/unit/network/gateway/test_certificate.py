"""A gateway's certificate is looked at on this machine, before any node is."""

from __future__ import annotations

import datetime as dt
from pathlib import Path
from typing import Any

import pytest

from gpufleet.errors import FleetError
from gpufleet.network.gateway_node import certificate_remarks
from gpufleet.settings.gateway_settings import Gateway
from tests.unit.monitoring.test_exporters import NOW, Authority, pem

NAME = "gw-01"


def gateway(folder: Path, certificate: Any, key: Any, *, joined: bool = False) -> Gateway:
    """Return settings with these files, whose names have the node's."""
    (folder / f"{NAME}.pem").write_bytes(pem(certificate))
    (folder / f"{NAME}.key").write_bytes((pem(certificate) if joined else b"") + pem(key))
    tls = {
        "certificate_file": str(folder / "{node}.pem"),
        "key_file": str(folder / "{node}.key"),
    }
    return Gateway.model_validate({"tls": tls, "allow_unauthenticated": True})


def test_one_that_clients_would_not_believe_is_refused(tmp_path: Path) -> None:
    wanted = gateway(tmp_path, *Authority().sign(NAME, days=30))
    for now, says in (
        (NOW + dt.timedelta(days=31), "has expired on 2026-12-22: renew it"),
        (NOW - dt.timedelta(days=2), "is not valid before 2026-11-21"),
    ):
        with pytest.raises(FleetError) as refused:
            certificate_remarks(wanted, NAME, now)
        (problem,) = refused.value.problems
        assert problem.startswith("gateway.tls.certificate_file: ")
        assert f"{NAME}.pem {says}" in problem


def test_anothers_key_is_refused(tmp_path: Path) -> None:
    certificate, _ = Authority().sign(NAME)
    _, other = Authority().sign(NAME)
    with pytest.raises(FleetError, match="is not the key of"):
        certificate_remarks(gateway(tmp_path, certificate, other), NAME, NOW)


def test_one_that_ends_within_three_weeks_is_remarked_on(tmp_path: Path) -> None:
    for days, remarks in ((20, 1), (22, 0)):
        wanted = gateway(tmp_path, *Authority().sign(NAME, days=days))
        found = certificate_remarks(wanted, NAME, NOW)
        assert len(found) == remarks, days
        assert all("expires in 20 days: renew it" in each for each in found)


def test_a_key_file_that_has_the_certificate_in_it_too_is_taken(tmp_path: Path) -> None:
    wanted = gateway(tmp_path, *Authority().sign(NAME), joined=True)
    assert certificate_remarks(wanted, NAME, NOW) == ()


def test_plain_http_has_none() -> None:
    plain = Gateway(allow_unauthenticated=True, allow_plain_http=True)
    assert certificate_remarks(plain, NAME, NOW) == ()
