"""What load is put on is named, or refused with what to write, before any load."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest

from gpufleet.errors import FleetError
from gpufleet.load_test.load_target import (
    TargetDeclaration,
    affinity_remarks,
    choose_gateway,
    choose_model,
    contract_of,
    gateway_target,
    key_problem,
    place_remarks,
    replica_target,
    with_drained,
)
from gpufleet.load_test.outcomes import Contract
from gpufleet.settings.node_settings import NodeSettings
from tests.unit.upgrade.fleets import runs

KEY = "a" * 64
VLLM = {"version": "0.32.0", "lock": "locks/x.txt", "api_key_file": "secrets/key"}
GATEWAY = {
    "clients": [{"name": "bench", "key_sha256": KEY}],
    "tls": {"certificate_file": "tls/{node}.pem", "key_file": "tls/key.pem"},
}


def node(objectives=None, gateway=None, **vllm) -> NodeSettings:
    served = {"model": "/srv/tiny", "replicas": 2, "objectives": objectives or {}}
    given = {"vllm": {**VLLM, **vllm}, "serving": {"tiny": served}}
    return NodeSettings.model_validate(given | ({"gateway": gateway} if gateway else {}))


def front(**more) -> NodeSettings:
    return NodeSettings.model_validate({"gpu_node": False, "gateway": {**GATEWAY, **more}})


FLEET = TargetDeclaration(
    addresses={"a": "10.0.0.1", "b": "10.0.0.2", "lb": "10.0.0.9"},
    settings={"a": node({"ttft_p99_seconds": 2.5}), "b": node({"ttft_p99_seconds": 2.5})},
    gateways={"lb": front()},
    running=(runs("tiny-0", "a", "GPU-0"), runs("tiny-1", "b", "GPU-1", port=8001)),
    out={},
)


def changed(**more) -> TargetDeclaration:
    return dataclasses.replace(FLEET, **more)


def test_a_replica_is_measured_at_its_own_server_with_the_fleets_key() -> None:
    found = replica_target("tiny", "tiny-1", FLEET)

    assert (found.url, found.key_file) == ("http://10.0.0.2:8001", "secrets/key")
    assert (found.name, found.replicas, found.nodes) == ("replica tiny-1", ("tiny-1",), ("b",))
    assert found.ca_file is None


def test_a_model_is_measured_behind_its_gateway_over_tls_with_a_clients_key() -> None:
    found = gateway_target("tiny", choose_gateway(None, FLEET), "bench-key", None, FLEET)

    assert (found.url, found.key_file) == ("https://10.0.0.9:8443", "bench-key")
    assert found.ca_file == "tls/lb.pem"
    assert (found.name, found.replicas) == ("gateway lb", ("tiny-0", "tiny-1"))


def test_conversations_get_the_header_of_the_gateways_affinity() -> None:
    for affinity, header in (
        ({}, ""),
        ({"by": "client"}, ""),
        ({"by": "session"}, "x-session-id"),
        ({"by": "session", "header": "x-talk"}, "x-talk"),
    ):
        fleet = changed(gateways={"lb": front(affinity=affinity)})
        assert gateway_target("tiny", "lb", "k", None, fleet).session_header == header
    assert replica_target("tiny", "tiny-0", FLEET).session_header == ""


def test_a_target_has_what_its_gateway_lets_through_to_a_server() -> None:
    for limits, most in (
        ({}, None),
        ({"per_server": 64}, 64),
        ({"per_server": 64, "limits": {"tiny": {"per_server": 16}}}, 16),
        ({"per_server": 64, "limits": {"other": {"per_server": 16}}}, 64),
    ):
        fleet = changed(gateways={"lb": front(**limits)})
        assert gateway_target("tiny", "lb", "k", None, fleet).per_server == most
    assert replica_target("tiny", "tiny-0", FLEET).per_server is None


def test_behind_affinity_by_client_the_load_is_noted_to_be_one_client() -> None:
    fleet = changed(gateways={"lb": front(affinity={"by": "client", "most_percent": 200})})
    (said,) = affinity_remarks("lb", fleet)
    assert said.startswith(
        "lb sends a client's requests to one replica until the replica has 200 % of"
    )
    assert affinity_remarks("lb", changed(gateways={"lb": front(affinity={"by": "session"})})) == ()


def test_clients_use_the_address_that_gateways_share() -> None:
    shared = {
        "address": "10.0.0.100/24",
        "interface": "eth0",
        "router_id": 7,
        "password_file": "secrets/vrrp",
    }
    fleet = changed(gateways={"lb": front(virtual_address=shared)})

    assert gateway_target("tiny", "lb", "k", None, fleet).url == "https://10.0.0.100:8443"


def test_replicas_that_get_no_requests_do_not_count() -> None:
    fleet = changed(out={"tiny-0": "drained by ada"})

    assert gateway_target("tiny", "lb", "k", None, fleet).replicas == ("tiny-1",)
    assert replica_target("tiny", None, fleet).replicas == ("tiny-1",)


def test_a_drained_replica_is_measured_where_it_is_named() -> None:
    """A setting is tried so: no client's request is beside the load."""
    fleet = changed(out={"tiny-0": "drained by ada", "tiny-1": "drained by ada"})

    assert replica_target("tiny", "tiny-0", with_drained(fleet, "tiny-0")).replicas == ("tiny-0",)
    for replica in ("tiny-0", "tiny-1"):
        with pytest.raises(FleetError, match="drained by ada"):
            replica_target("tiny", replica, with_drained(fleet, None))


def test_of_how_many_replicas_some_serve_is_what_is_declared_or_has_units() -> None:
    """Two are declared and run. A third that a plan will remove still has its part of the load."""
    drained = changed(out={"tiny-0": "drained by ada"})
    third = changed(running=(*FLEET.running, runs("tiny-2", "b", "GPU-2", port=8002)))
    gone = changed(running=FLEET.running[:1])
    for fleet, served, of in ((FLEET, 2, 2), (drained, 1, 2), (third, 3, 3), (gone, 1, 2)):
        found = gateway_target("tiny", "lb", "k", None, fleet)
        assert (len(found.replicas), found.replicas_of) == (served, of)
    assert replica_target("tiny", "tiny-1", FLEET).replicas_of == 1


def test_what_listens_on_its_own_node_only_is_measured_from_there() -> None:
    alone = changed(
        settings={name: node(listen="127.0.0.1") for name in "ab"},
        gateways={"lb": front(listen="::1")},
    )

    assert replica_target("tiny", "tiny-1", alone, "b").url == "http://127.0.0.1:8001"
    assert gateway_target("tiny", "lb", "k", None, alone, place="lb").url == "https://[::1]:8443"
    with pytest.raises(FleetError, match=r"load would come from a. .* or use --from b"):
        replica_target("tiny", "tiny-1", alone, "a")


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (
            "a",
            ["which runs tiny-0: the load clients use processor time that the measured servers"],
        ),
        (
            "b",
            ["which also runs tiny-1: the load clients use processor time that these replicas"],
        ),
        ("lb", ["the gateway's own node"]),
        ("elsewhere", []),
    ],
)
def test_a_node_that_has_other_work_is_said(place: str, words: list[str]) -> None:
    target = gateway_target("tiny", "lb", "k", None, changed(out={"tiny-1": "drained by ada"}))

    found = place_remarks(place, target, FLEET)

    assert len(found) == len(words)
    assert all(word in each for word, each in zip(words, found, strict=True))


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: choose_model(FLEET, "tini"), "did you mean 'tiny'?"),
        (lambda: choose_model(changed(settings={}), None), "`serving` is empty"),
        (lambda: replica_target("tiny", "tiny-7", FLEET), "no replica 'tiny-7' that serves"),
        (lambda: replica_target("tiny", None, changed(running=())), "deploy the model first"),
        (
            lambda: replica_target("tiny", "tiny-0", changed(settings={"a": node(listen="::1")})),
            "`vllm.listen`",
        ),
        (lambda: gateway_target("tiny", "lb", None, None, FLEET), "--key-file FILE"),
        (lambda: choose_gateway(None, changed(gateways={})), "--replica"),
        (lambda: choose_gateway("lc", FLEET), "no gateway is declared on lc"),
        (
            lambda: gateway_target(
                "tiny", "lb", "k", None, changed(gateways={"lb": front(listen="127.0.0.1")})
            ),
            "`gateway.listen`",
        ),
        (
            lambda: contract_of("tiny", changed(settings={"a": node()}), 0.95),
            "serving.tiny.objectives has no latency",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused_with_what_to_write(ask, words) -> None:
    with pytest.raises(FleetError) as refused:
        ask()

    assert words in str(refused.value)


def test_the_contract_is_the_models_objectives() -> None:
    assert contract_of("tiny", FLEET, 0.9) == Contract(2.5, None, None, 0.9)


@pytest.mark.parametrize(
    ("key", "rate", "words"),
    [
        ("slow", 1.0, ""),
        ("slow", 1.1, "client slow may send 60 requests a minute"),
        ("fast", 900.0, ""),
        ("other", 1.0, "client other may not use tiny"),
        ("sesame", 1.0, "no client of the gateway has this key"),
    ],
)
def test_a_key_whose_requests_the_gateway_would_refuse_is_refused_first(
    key: str, rate: float, words: str
) -> None:
    limits = {"slow": {"requests_per_minute": 60}, "fast": {}, "other": {"models": ["large"]}}
    clients = [
        {"name": name, "key_sha256": hashlib.sha256(name.encode()).hexdigest(), **more}
        for name, more in limits.items()
    ]
    fleet = changed(gateways={"lb": front(clients=clients)})
    target = gateway_target("tiny", "lb", "k", None, fleet)

    found = key_problem(target, key, rate, fleet)

    assert words in found
    assert bool(words) == bool(found)
    assert not key_problem(replica_target("tiny", None, fleet), key, rate, fleet)
