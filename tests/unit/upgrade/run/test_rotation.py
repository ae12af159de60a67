"""Which replicas get requests, HAProxy says; marks on nodes explain it."""

from __future__ import annotations

import pytest

from gpufleet.network.haproxy import GatewayState, ServerState
from gpufleet.upgrade.run.rotation import model_rotation
from tests.unit.upgrade.fleets import runs

RUNNING = (
    runs("tiny-0", "a", "GPU-0"),
    runs("tiny-1", "b", "GPU-1"),
    runs("tiny-2", "c", "GPU-2"),
    runs("other-0", "c", "GPU-3", port=8001),
)


def server(node: str, replica: str, status: str = "UP", *, drained: bool = False) -> ServerState:
    return ServerState(replica.rpartition("-")[0], f"{node}.{replica}", status, 0, 0, drained)


def gateway(*servers: ServerState) -> GatewayState:
    return GatewayState(runs=True, servers=servers)


WHOLE = (server("a", "tiny-0"), server("b", "tiny-1"), server("c", "tiny-2"))


def test_all_that_are_up_or_not_checked_serve() -> None:
    state = gateway(server("a", "tiny-0", "UP 1/3"), server("b", "tiny-1", "no check"), WHOLE[2])

    found = model_rotation("tiny", "lb", state, RUNNING, {})

    assert (found.serving, found.out, found.remarks) == ({"tiny-0", "tiny-1", "tiny-2"}, {}, ())


@pytest.mark.parametrize(
    ("there", "why"),
    [
        (server("b", "tiny-1", drained=True), "lb has drained this server"),
        (server("b", "tiny-1", "DOWN 1/2"), "lb reports this server as DOWN 1/2"),
        (server("b", "tiny-1", "MAINT"), "lb reports this server as MAINT"),
        (server("x", "tiny-1"), "lb does not have this server: run the gateway's deploy"),
    ],
)
def test_a_replica_without_requests_does_not_serve_and_it_is_said_why(
    there: ServerState, why: str
) -> None:
    found = model_rotation("tiny", "lb", gateway(WHOLE[0], there, WHOLE[2]), RUNNING, {})

    assert found.serving == {"tiny-0", "tiny-2"}
    assert found.lines() == (f"tiny-1 got no requests: {why}",)


def test_a_mark_explains_what_the_gateway_says() -> None:
    state = gateway(server("a", "tiny-0", drained=True), *WHOLE[1:])
    marked = {"tiny-0": "drained by ada"}

    assert model_rotation("tiny", "lb", state, RUNNING, marked).out == {"tiny-0": "drained by ada"}


def test_a_mark_that_the_gateway_does_not_follow_takes_no_requests_away() -> None:
    found = model_rotation("tiny", "lb", gateway(*WHOLE), RUNNING, {"tiny-0": "drained by ada"})

    assert len(found.serving) == 3
    assert found.remarks == ("lb still sends requests to tiny-0: drained by ada",)


def test_servers_of_which_no_node_answered_are_not_known_unless_they_get_nothing() -> None:
    others = (server("d", "tiny-3"), server("e", "tiny-4", drained=True), server("d", "other-1"))

    found = model_rotation("tiny", "lb", gateway(*WHOLE, *others), RUNNING, {})

    assert found.unknown == ("tiny/d.tiny-3",)
    assert len(found.serving) == 3
