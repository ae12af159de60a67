"""What a gateway, LiteLLM and their nodes are given in secret is for root, and in no difference."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from gpufleet.converge.desired import DesiredState, Directory, File, NoOtherFiles
from gpufleet.monitoring.targets import MonitoringTargets
from gpufleet.network import gateway_node, keepalived, litellm_node
from gpufleet.network.haproxy import HOME, Configuration
from gpufleet.settings.gateway_settings import Gateway
from gpufleet.settings.parse import parse_settings
from tests.unit.monitoring.test_exporters import Authority, pem
from tests.unit.network.gateway.test_config import OPEN

SECRET = b"mellon-mellon"


def secret_files(state: DesiredState) -> dict[str, tuple[bool, int, str]]:
    """Return the files with the secret: hidden or not, mode and group."""
    return {
        each.path: (each.secret, each.mode, each.group)
        for each in state.values_of(File)
        if SECRET[:8] in each.content
    }


def modes(state: DesiredState) -> dict[str, int]:
    return {each.path: each.mode for each in state.values_of(Directory)}


def test_a_gateway_s_keys_are_for_root_and_its_other_files_are_not_hidden() -> None:
    certificate, _ = Authority().sign("gw-01")
    both = pem(certificate) + SECRET
    found = Configuration({"haproxy.cfg": b"global"}, {"keys.map": SECRET, "tls.pem": both}, "1")

    state = gateway_node.gateway_files(found)

    assert secret_files(state) == {
        f"{HOME}/keys.map": (True, 0o600, "root"),
        f"{HOME}/tls.pem": (True, 0o600, "root"),
    }
    assert [each.path for each in state.values_of(File) if not each.secret] == [
        f"{HOME}/haproxy.cfg",
        "/var/lib/gpufleet/textfile/certificate-gateway.prom",
    ]
    assert modes(state)[HOME] == 0o700
    assert {each.pattern for each in state.values_of(NoOtherFiles)} == {
        f"{HOME}/*.map",
        f"{HOME}/*.pem",
    }


def test_litellm_s_keys_are_for_root_and_its_configuration_for_its_account() -> None:
    unit = gateway_node.gateway_unit(Gateway.model_validate(OPEN))

    state = litellm_node.litellm_files(unit, {"config.yaml": b"{}"}, {"upstream-key": SECRET})

    assert secret_files(state) == {
        f"{litellm_node.CREDENTIALS}/upstream-key": (True, 0o600, "root")
    }
    (open_file,) = [
        each for each in state.values_of(File) if each.path == f"{litellm_node.HOME}/config.yaml"
    ]
    assert (open_file.secret, open_file.mode, open_file.group) == (
        False,
        0o640,
        litellm_node.ACCOUNT,
    )
    assert modes(state) == {litellm_node.HOME: 0o750, litellm_node.CREDENTIALS: 0o700}


@pytest.fixture
def standby(tmp_path: Path) -> MonitoringTargets:
    """A gateway with a virtual address."""
    (tmp_path / "password").write_bytes(SECRET[:8] + b"\n")
    address = {
        "address": "192.0.2.100/24",
        "interface": "eth0",
        "router_id": 51,
        "password_file": str(tmp_path / "password"),
    }
    data: dict[str, Any] = {"gpu_node": False, "gateway": OPEN | {"virtual_address": address}}
    node = SimpleNamespace(name="gw-01", address="192.0.2.9", settings=parse_settings(data))
    return MonitoringTargets("gw-01", {"gw-01": node}, ())  # type: ignore[dict-item]


def test_the_password_of_a_virtual_address_is_for_root_and_its_check_is_run(
    standby: MonitoringTargets,
) -> None:
    wanted = standby.settings.gateway
    assert wanted is not None

    state = gateway_node.virtual_address(standby, wanted)

    assert secret_files(state) == {
        f"{keepalived.HOME}/{keepalived.CONFIGURATION}": (True, 0o600, "root")
    }
    (check,) = [each for each in state.values_of(File) if each.path == keepalived.CHECK]
    assert (check.secret, check.mode) == (False, 0o755)
    with pytest.raises(ValueError, match="gw-01 has no virtual address"):
        gateway_node.virtual_address(standby, Gateway.model_validate(OPEN))


@pytest.mark.parametrize("seconds", [0, 60])
def test_a_stop_of_litellm_may_take_its_drain_and_twenty_seconds(seconds: int) -> None:
    wanted = SimpleNamespace(drain_seconds=seconds)

    assert litellm_node.stop_seconds(wanted) == seconds + 20  # type: ignore[arg-type]
