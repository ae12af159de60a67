"""What the documents of a proof mean: whatever is wrong names both sides, and nothing is missed."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from gpufleet.cli.reach_command import reach_table
from gpufleet.console import display
from gpufleet.node.cluster_network import Network
from gpufleet.planning.multinode.reachability import (
    EXCHANGE_SECONDS,
    LOOK_SECONDS,
    WAY_SECONDS,
    Member,
    Replica,
    compare,
    exchange_parameters,
    preflight_parameters,
)
from tests.support.rows import each_row

NODES = ("gpu-01", "gpu-02", "gpu-03")
PORTS = 16 + 1


def member(number: int) -> Member:
    return Member(
        node=f"gpu-0{number}",
        network=Network("eth1", f"10.1.0.{number}", mtu=9000),
        release="0.33.0-1f2e",
        release_directory="/opt/vllm/releases/0.33.0-1f2e",
        vllm="0.33.0",
        revision="9d1f62ac",
        model_directory="/srv/llama",
        user="vllm",
    )


REPLICA = Replica("llama-0", tuple(map(member, (1, 2, 3))), port=29500, ray=False)


def look(**different: Any) -> dict[str, Any]:
    return {
        "schema": 1,
        "address": None,
        "mtu": 9000,
        "routes": dict.fromkeys(NODES, "eth1"),
        "free": list(range(29500, 29516)),
        "used": {},
        "udp": 29500,
        "udp_user": None,
        "spares": [41000],
        "release": {"whole": True, "vllm": "0.33.0", "ray": None},
        "files": {"config.json": [2, "44136fa3"]},
        **different,
    }


def seen(**different: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Looks of nodes that are alike but for what is `different` of gpu_02 and gpu_03."""
    return {node: look(**different.get(node.replace("-", "_"), {})) for node in NODES}


def heard(size: int) -> dict[str, Any]:
    return {"bytes": size, "datagrams": 5, "of": 5, "address": ""}


def talk(**different: Any) -> dict[str, dict[str, Any]]:
    """An exchange in which all came about, but for what is said of `gpu_02`."""
    documents: dict[str, dict[str, Any]] = {}
    for node in NODES:
        others = [other for other in NODES if other != node]
        documents[node] = {
            "schema": 1,
            "unbound": {},
            "connected": {each: {str(29500 + n): None for n in range(PORTS)} for each in others},
            "clocks": {each: {"ahead": 0.001, "within": 0.0005} for each in others},
            "heard": {
                each: {"bytes": 9000, "datagrams": 5, "of": 5, "address": ""} for each in others
            },
            "seconds": 0.4,
        }
    documents["gpu-02"] |= different
    return documents


def problems(
    looks: dict[str, Any] | None = None, talks: dict[str, Any] | None = None
) -> tuple[str, ...]:
    return compare(REPLICA, looks or seen(), talks or talk()).problems


def test_a_replica_whose_nodes_are_alike_and_reach_each_other_may_start():
    found = compare(REPLICA, seen(), talk())

    assert found.problems == ()
    assert len(found.ways) == 6
    assert all(way["good"] for way in found.as_json()["ways"])


def test_all_of_it_is_done_in_twenty_seconds():
    """Of each asking, one second goes to those that do not answer (survey.ask)."""
    assert LOOK_SECONDS + 1 + EXCHANGE_SECONDS + WAY_SECONDS + 1 <= 20


def test_each_node_is_told_of_the_others_and_of_ports_that_are_free_there():
    """What listens there is not spoken to: it may be a rank that serves."""
    given = exchange_parameters(REPLICA, seen(gpu_02={"free": [29503], "udp": 29515}), "t")

    assert set(given) == set(NODES)
    assert given["gpu-01"]["peers"]["gpu-02"] == {
        "address": "10.1.0.2",
        "ports": [29503, 41000],
        "udp": 29515,
        "mtu": 9000,
    }
    assert "gpu-01" not in given["gpu-01"]["peers"]


def test_ports_of_rays_workers_are_tried_where_ray_joins_the_nodes():
    assert preflight_parameters(REPLICA)["gpu-01"]["samples"] == []
    assert preflight_parameters(replace(REPLICA, ray=True))["gpu-01"]["samples"] == [[10002, 19999]]


@pytest.mark.parametrize(
    ("ahead", "within", "refused"),
    [(0.9, 0.01, False), (1.2, 0.01, True), (-1.2, 0.01, True), (1.2, 0.3, False)],
)
def test_clocks_may_be_a_second_apart_as_far_as_that_could_be_measured(ahead, within, refused):
    """A message that took long says little: what is not certain is not refused."""
    clocks = {"gpu-01": {"ahead": ahead, "within": within}}

    found = problems(talks=talk(clocks=clocks))

    first, last = ("gpu-01", "gpu-02") if ahead > 0 else ("gpu-02", "gpu-01")
    sentence = f"llama-0: {first}'s clock is {abs(ahead):.1f} s ahead of {last}'s"
    assert [each.startswith(sentence) for each in found] == ([True] if refused else [])


def test_a_clock_that_is_off_is_said_once_though_every_node_sees_it():
    talks = talk(clocks={node: {"ahead": -7.0, "within": 0.01} for node in ("gpu-01", "gpu-03")})
    for node in ("gpu-01", "gpu-03"):
        talks[node]["clocks"]["gpu-02"] = {"ahead": 7.0, "within": 0.01}

    assert len(problems(talks=talks)) == 1


def test_a_node_that_would_send_by_another_interface_is_refused():
    """Its address is the chosen one, and its packets leave by the default route."""
    (problem,) = problems(seen(gpu_02={"routes": {"gpu-01": "eth0", "gpu-03": "eth1"}}))

    assert problem.startswith(
        "llama-0: gpu-02 (10.1.0.2, eth1) would send to gpu-01 over eth0: give gpu-02 a route "
        "over eth1"
    )


def test_different_mtus_are_worth_a_remark_and_no_refusal():
    """Connections agree on the smaller one; packets of that size are what has to pass."""
    talks = talk()
    for node in ("gpu-01", "gpu-03"):
        talks[node]["heard"]["gpu-02"]["bytes"] = 1500
    talks["gpu-02"]["heard"] = {
        node: {"bytes": 1500, "datagrams": 3, "of": 3, "address": ""}
        for node in ("gpu-01", "gpu-03")
    }

    found = compare(REPLICA, seen(gpu_02={"mtu": 1500}), talks)

    assert found.problems == ()
    assert found.remarks == (
        "llama-0: gpu-01, gpu-03 have an MTU of 9000, gpu-02 has an MTU of 1500: packets over 1500 "
        "bytes do not pass between all these nodes",
    )


def test_each_node_that_cannot_start_the_release_is_named_beside_one_that_did_not_answer():
    looks = seen(
        gpu_02={"release": {"whole": False, "vllm": None, "ray": None}},
        gpu_03={"release": {"missing": "absent"}},
    ) | {"gpu-01": "timed out"}

    found = "\n".join(compare(REPLICA, looks, {}).problems)

    assert "gpu-02 has no complete release" in found
    assert "gpu-03: /opt/vllm/releases/0.33.0-1f2e cannot be read" in found


def test_nodes_that_are_to_start_different_releases_or_revisions_are_refused():
    here, there, third = REPLICA.members
    other = replace(there, release="0.32.0-aaaa", revision="1b2c")
    replica = replace(REPLICA, members=(here, other, third))

    release, revision = compare(replica, seen(), talk()).problems

    assert "gpu-01, gpu-03 have 0.33.0-1f2e, gpu-02 has 0.32.0-aaaa" in release
    assert "gpu-01, gpu-03 have 9d1f62ac, gpu-02 has 1b2c" in revision


@pytest.mark.parametrize(
    ("came", "why", "said"),
    [
        (
            21,
            "no answer",
            "of packets between gpu-01 (10.1.0.1, eth1) and gpu-02 (10.1.0.2, eth1) "
            "about 30 % are lost",
        ),
        (30, "no answer", "cannot connect to gpu-01 (10.1.0.1, eth1) at port 29503 (no"),
        (21, "Connection refused", "port 29503 (Connection refused)"),
    ],
)
def test_a_line_that_loses_much_is_not_taken_for_a_firewall(came, why, said):
    """A port that did not answer on a line without loss, or that refuses, is closed."""
    talks = talk()
    talks["gpu-02"]["connected"]["gpu-01"]["29503"] = why
    talks["gpu-01"]["heard"]["gpu-02"] |= {"datagrams": came, "of": 30}

    (problem,) = problems(talks=talks)

    assert said in problem


@each_row(
    "answer",
    [
        {},
        {"schema": 2},
        look(free=None),
        look(routes=[]),
        look(used={"29500": 7}),
        look(files={"config.json": 7}),
        look(release={}),
        "cannot be reached: no route to host",
    ],
    ids=["empty", "another schema", "no ports", "a list", "numbers", "a file", "half", "silent"],
)
def test_a_node_that_says_nonsense_is_refused_in_words(answer):
    """It must not end the run for the nodes of other replicas."""
    looks = {**seen(), "gpu-02": answer}
    talks = {node: said for node, said in talk().items() if node != "gpu-02"}

    found = problems(looks, talks)

    assert found
    assert all(isinstance(each, str) for each in found)


def test_a_node_that_answers_the_look_and_not_the_others_is_named():
    talks: dict[str, Any] = {**talk(), "gpu-02": "no answer within 9 s"}

    assert "llama-0: gpu-02: no answer within 9 s" in problems(talks=talks)


def test_ports_that_are_ours_are_a_remark_and_those_of_strangers_matter_where_ranks_meet():
    used = {"29500": {"program": "vllm-rank", "pid": 7, "unit": "vllm-llama-0.service"}}
    found = compare(REPLICA, seen(gpu_02={"used": used}), talk())
    assert found.problems == ()
    assert found.remarks == (
        "llama-0: gpu-02: gpufleet did not test port 29500, because running programs use these "
        "ports",
    )

    used["29500"] = {"program": "nc", "pid": 7, "unit": "session-3.scope"}
    (problem,) = problems(seen(gpu_02={"used": used}))
    assert "meet at port 29500, but nc (PID 7 of session-3.scope) uses this port" in problem


def test_the_table_shows_every_way(capsys):
    display(reach_table(compare(REPLICA, seen(), talk())))

    said = capsys.readouterr().out
    assert said.count("17/17 ports, 9000 B, +0.001 s") == 6
    assert "the nodes of the replica reach each other" in said
