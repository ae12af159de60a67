"""Services answer only those who may ask, and alerts have a receiver that takes them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from gpufleet.errors import FleetError
from gpufleet.preflight import alert_lines, service_lines
from gpufleet.preflight.alert_lines import Counts, Receipt, read_receipt
from gpufleet.preflight.line import Status, Verdict
from gpufleet.serving.rank_status import Health, RankStatus
from gpufleet.serving.status import FleetStatus, ReplicaStatus
from gpufleet.settings.node_settings import NodeSettings
from tests.unit.preflight import sound_fleet as fleet
from tests.unit.preflight.sound_fleet import FRONT, GPU_NODES, INVENTORY

OK, WARN, FAIL, UNKNOWN = Status.OK, Status.WARN, Status.FAIL, Status.UNKNOWN
ONE = GPU_NODES[0]


def front(settings: NodeSettings | None = None, **changed: Any) -> Verdict:
    """Return the verdict on the services of the gateway's node."""
    here = {FRONT: settings or fleet.front_settings()}
    looks = {FRONT: fleet.look(FRONT, **changed)}
    (found,) = service_lines.service_lines(looks, here, INVENTORY)
    return found.verdict


def test_a_service_that_does_not_answer_fails_and_is_named():
    assert front().status is OK
    for page, why in (
        ({"error": "Connection refused"}, "Connection refused"),
        ({"missing": "timeout"}, ""),
        ({"status": 503}, "answers 503"),
    ):
        found = front(pages={"monitoring.alertmanager.port": page})
        assert found.status is FAIL
        assert f"monitoring.alertmanager.port: {why}" in found.proof


def test_a_gateway_that_answers_without_a_key_fails():
    found = front(pages={"gateway.port": {"status": 200}})
    assert found.status is FAIL
    assert "without a key" in found.proof


def test_an_exporter_with_a_password_has_to_refuse_a_request_without():
    settings = fleet.front_settings(exporters={"basic_auth": {"password_file": "secrets/p"}})
    assert front(settings).status is FAIL, "it answers 200"
    assert front(settings, pages={"node_exporter.port": {"status": 401}}).status is OK


def test_without_a_firewall_what_has_no_password_is_open():
    assert front(firewall=False).status is WARN
    assert front(firewall={"missing": "no_program"}).status is WARN
    assert front(firewall={"missing": "timeout"}).status is UNKNOWN


def test_a_node_without_gpus_has_no_dcgm_whatever_its_group_sets():
    lock = {"driver": "580.95.06"}
    versions = {"version": "1:4.6.0-1", "exporter_version": "4.8.2-1"}
    dcgm = {"gpu_lock": lock, "dcgm": versions}
    keys = {each.key for each in service_lines.services(fleet.gpu_settings(**dcgm))}
    assert keys == {"node_exporter.port", "dcgm.port"}
    assert front(fleet.front_settings(**dcgm)).status is OK


def test_a_silent_node_is_unknown():
    lines = service_lines.service_lines({}, {ONE: fleet.gpu_settings()}, INVENTORY)
    assert [each.status for each in lines] == [UNKNOWN]


def servers(found: FleetStatus, settings: NodeSettings | None = None) -> set[Status]:
    here = {ONE: settings or fleet.gpu_settings()}
    return {each.status for each in service_lines.server_lines(found, here, INVENTORY)}


def replica(health: Health) -> ReplicaStatus:
    return ReplicaStatus("qwen", 0, (), health, () if health.is_good else ("it says why",))


def test_a_replica_that_does_not_serve_fails():
    assert servers(FleetStatus((replica(Health.SERVES),), {})) == {OK}
    assert servers(FleetStatus((replica(Health.DOWN),), {})) == {FAIL}
    assert servers(FleetStatus((replica(Health.WRONG),), {})) == {FAIL}
    assert servers(FleetStatus((replica(Health.STARTS),), {})) == {WARN}
    assert servers(FleetStatus((), {ONE: "no answer"})) == {UNKNOWN}
    assert servers(FleetStatus((), {}, ("qwen: 2 replicas declared, none found",))) == {FAIL}


def test_servers_without_key_and_firewall_warn():
    vllm = {"version": "0.32.0", "lock": "l", "allow_unauthenticated": True}
    found = FleetStatus((replica(Health.SERVES),), {})
    assert servers(found, fleet.gpu_settings(vllm=vllm)) == {OK}, "the firewall guards them"
    assert servers(found, fleet.gpu_settings(vllm=vllm, firewall=None)) == {OK, WARN}


def adapters(wanted: tuple[str, ...], *replicas: ReplicaStatus, **more: Any) -> set[Status]:
    own = {name: {"source": f"/srv/{name}"} for name in wanted}
    served = {"qwen": {"model": "/srv/qwen", "adapters": own, "flags": more.get("flags", {})}}
    vllm = {"version": "0.32.0", "lock": "l", "allow_unauthenticated": True}
    settings = fleet.gpu_settings(vllm=vllm, serving=served)
    declared: Any = {ONE: SimpleNamespace(settings=settings)}
    found = FleetStatus(replicas, more.get("silent", {}))
    return {each.status for each in service_lines.adapter_lines(found, declared, INVENTORY)}


def loads(number: int, *names: str, health: Health = Health.SERVES) -> ReplicaStatus:
    rank = RankStatus(ONE, 0, health, adapters=names)
    return ReplicaStatus("qwen", number, (rank,), health, ())


def test_each_replica_loads_exactly_the_declared_adapters():
    assert adapters((), loads(0)) == {OK}
    assert adapters(("a", "b"), loads(0, "a", "b"), loads(1, "a", "b")) == {OK}
    assert adapters(("a", "b"), loads(0, "a", "b"), loads(1, "a")) == {FAIL}
    assert adapters((), loads(0, "a")) == {FAIL}
    assert adapters((), loads(0, "a"), flags={"lora-modules": "a=/srv/a"}) == {OK}
    assert adapters(("a",), loads(0, "a", health=Health.WRONG)) == {UNKNOWN}
    assert adapters(("a",)) == {UNKNOWN}
    assert adapters(("a",), loads(0, "a"), silent={"gpu-2": "no answer"}) == {UNKNOWN}


# -- alerts


def alerts(
    settings: NodeSettings | None = None, receipt: Receipt | str | None = None, **changed: Any
) -> Verdict:
    here = {FRONT: settings or fleet.front_settings()}
    receipts = {} if receipt is None else {FRONT: receipt}
    looks = {FRONT: fleet.look(FRONT, **changed)}
    (found,) = alert_lines.alert_lines(looks, here, receipts, INVENTORY)
    return found.verdict


def page(text: str) -> dict[str, Any]:
    return {alert_lines.METRICS: {"status": 200, "body": text}}


def watching(**receivers: Any) -> NodeSettings:
    return fleet.front_settings(monitoring={"alertmanager": receivers})


PAGER = {"pagerduty_key_file": "secrets/pagerduty"}


def test_alerts_without_a_receiver_reach_no_person():
    assert alerts().status is OK
    found = alerts(watching())
    assert found.status is FAIL
    assert "alertmanager.page" in found.proof


def test_an_alertmanager_that_does_not_answer_or_gets_no_alerts_fails():
    assert alerts(pages={alert_lines.METRICS: {"error": "refused"}}).status is FAIL
    nothing = {"status": 200, "body": '{"data": {"activeAlertmanagers": []}}'}
    assert alerts(pages={alert_lines.PROMETHEUS: nothing}).status is FAIL
    assert alerts(pages={alert_lines.PROMETHEUS: {"error": "refused"}}).status is FAIL


def test_failed_notifications_warn_and_none_at_all_is_unknown():
    failed = alerts(pages=page(fleet.counts(3, failed=1)))
    assert failed.status is WARN
    assert "3 delivered, 1 failed" in failed.proof, "Alertmanager's total counts both"
    none = alerts(pages=page(fleet.counts(0)))
    assert none.status is UNKNOWN
    assert "--test-alert" in none.remedy


def test_a_count_that_a_heartbeat_shares_is_no_receipt():
    settings = watching(page=PAGER, heartbeat=PAGER)
    assert alerts(settings).status is UNKNOWN
    receipt = Receipt({"pagerduty": Counts(3)}, {"pagerduty": Counts(4)})
    assert alerts(settings, receipt).status is UNKNOWN
    confirmed = Receipt(receipt.before, receipt.after, confirmed=True)
    assert alerts(settings, confirmed).status is OK


@pytest.mark.parametrize(
    ("after", "confirmed", "status"),
    [
        (Counts(4), None, OK),
        (Counts(3), None, UNKNOWN),
        (Counts(4, failed=1), None, FAIL),
        (Counts(3), True, OK),
        (Counts(4), False, FAIL),
    ],
)
def test_a_test_alert_is_delivered_by_alertmanagers_count_or_the_operators_word(
    after: Counts, confirmed: bool | None, status: Status
) -> None:
    receipt = Receipt({"pagerduty": Counts(3)}, {"pagerduty": after}, confirmed)
    assert alerts(receipt=receipt).status is status


def test_a_test_alert_that_was_not_taken_fails():
    assert alerts(receipt="Alertmanager refused it").status is FAIL
    with pytest.raises(FleetError, match=FRONT):
        read_receipt(FRONT, {"error": "refused", "before": "", "after": ""})


def test_a_fleet_that_watches_elsewhere_is_unknown():
    (found,) = alert_lines.alert_lines({}, {ONE: fleet.gpu_settings()}, {}, INVENTORY)
    assert found.status is UNKNOWN
