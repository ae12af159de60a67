"""RDMA ports where replicas span nodes: down or slow blocks; elsewhere it warns."""

from __future__ import annotations

import pytest

from tests.support.rows import each_row

SLOW = "100 Gb/sec (4X EDR)"
VLLM = {"version": "0.32.0", "lock": "l", "listen": "127.0.0.1"}


def served(**more):
    return {"vllm": VLLM, "serving": {"m": {"model": "/models/m", **more}}}


SPANS = served(span_nodes=True)
STAYS = served()
OVER_TCP = served(span_nodes=True, environment={"NCCL_IB_DISABLE": "1"})


def port(document, number):
    return document["nics"]["infiniband"][number]["ports"][0]


@pytest.fixture
def down(document):
    found = document("h100x8")
    port(found, 3)["state"] = "1: DOWN"
    return found


@pytest.fixture
def slow(document):
    found = document("h100x8")
    port(found, 3)["rate"] = SLOW
    return found


@each_row(
    ("settings", "siblings", "severity"),
    [
        (SPANS, 3, "block"),
        ({**SPANS, "gpus": {"rdma_ports": 8}}, 0, "block"),
        (SPANS, 1, "warn"),
        (SPANS, 0, "warn"),
        (STAYS, 3, "warn"),
        (STAYS, 0, "info"),
        (OVER_TCP, 3, "warn"),
    ],
)
def test_a_port_that_is_down_blocks_where_replicas_span_nodes(  # noqa: PLR0917
    document, judged, down, settings, siblings, severity
):
    said = judged(down, settings, siblings=[document("h100x8")] * siblings).worst("rdma")

    assert said.severity.word == severity
    assert "mlx5_3/1" in said.found
    assert ("replicas of m may use these ports between nodes" in said.found) == (
        settings not in (STAYS, OVER_TCP)
    )


@each_row(
    ("settings", "siblings", "severity"),
    [(SPANS, 3, "block"), (SPANS, 1, "warn"), (SPANS, 0, "warn"), (STAYS, 3, "warn")],
)
def test_a_slow_port_blocks_where_replicas_span_nodes(  # noqa: PLR0917
    document, judged, slow, settings, siblings, severity
):
    said = judged(slow, settings, siblings=[document("h100x8")] * siblings).worst("rdma")

    assert said.severity.word == severity
    assert "mlx5_3/1 at 100 Gbit/s" in said.found
    assert said.expected == "400 Gbit/s"


def test_a_port_that_is_slow_on_all_siblings_is_so_by_design(document, judged, slow):
    siblings = [document("h100x8") for _ in range(3)]
    for each in siblings:
        port(each, 3)["rate"] = SLOW

    assert judged(slow, SPANS, siblings=siblings).worst("rdma").severity.word == "ok"


def test_another_adapter_of_the_node_may_be_slower(judged, slow):
    slow["nics"]["infiniband"][3]["pci"]["device"] = "0x101d"

    assert judged(slow, SPANS).worst("rdma").severity.word == "ok"
