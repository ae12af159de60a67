"""When a guest stops: by the servers' queue and KV cache, by others' latencies, by silence."""

from __future__ import annotations

import pytest

from gpufleet.cli.load_watch import STALE_SECONDS, GuestWatch, LoadWatch, Look
from gpufleet.errors import FleetError
from gpufleet.load_test.client_process import Beat, LevelRun
from gpufleet.load_test.guest import ServerLoad
from gpufleet.load_test.outcomes import Contract
from tests.unit.load_test.test_other_clients import PAGE, own, page
from tests.unit.upgrade.plan.test_replica_load import finished

CONTRACT = Contract(ttft_seconds=2.5)
IDLE = ServerLoad("tiny-0", 3, 0, 0.1, 8)


class Servers:
    """What a look sees, and the clock."""

    def __init__(self) -> None:
        self.now = 0.0
        self.loads: list[ServerLoad | str] = [IDLE]
        self.page = PAGE
        self.recorded: list[list[ServerLoad | str]] = []

    def __call__(self) -> Look:
        return Look(self.loads, {"gpu-01:8000": self.page})

    def watch(self, contract: Contract = CONTRACT) -> GuestWatch:
        found = GuestWatch(self, self.recorded.append, contract, 4, 0.8, clock=lambda: self.now)
        found.began(1.0)
        return found


def look(watch: GuestWatch, servers: Servers, seconds: float = 3.0) -> str:
    """Return the reason after a look, once the client has said what it saw until then."""
    servers.now += seconds
    watch.beat(Beat(servers.now, (), 0.0, 0.0))
    watch._reason = watch.look_once()
    watch.beat(Beat(servers.now + 3.0, (), 0.0, 0.0))
    return watch.reason(1)


def test_it_goes_on_while_others_get_what_they_were_promised() -> None:
    servers = Servers()
    watch = servers.watch()
    for n in range(1, 5):
        servers.page = page(ttft=[0.3] * 20 * n)
        assert look(watch, servers) == ""
    assert len(servers.recorded) == 4
    assert watch.reason(4) == ""
    assert watch.reason(5) == (
        "stopped as a guest: 5 requests are due, but the share of the idle capacity allows only 4"
    )


def test_its_share_is_of_what_is_idle_now_and_its_own_requests_take_nothing_away() -> None:
    servers = Servers()
    servers.loads = [ServerLoad("tiny-0", 7, 0, 0.1, 8)]
    watch = servers.watch()
    watch.beat(Beat(1.0, (0.1, 0.2, 0.3, 0.4), 0.0, 0.0))
    assert watch.look_once() == ""
    watch.beat(Beat(3.0, (2.1, 2.2, 2.3), 0.0, 0.0))
    assert watch.look_once() == "", "3 of others, so 0.8 of 5 are its share; then 4 of others"
    assert watch.reason(4) == ""

    servers.loads = [ServerLoad("tiny-0", 7, 0, 0.1, 8)]
    watch.beat(Beat(6.0, (5.5,), 0.0, 0.0))
    assert watch.look_once() == ""
    assert watch.reason(4) == (
        "stopped as a guest: 4 requests are due, but the share of the idle capacity allows only 3"
    )


def test_it_stops_when_others_requests_are_late_though_none_waits() -> None:
    servers = Servers()
    watch = servers.watch()
    for _ in range(40):
        watch.outcome(own())
    servers.page = page(ttft=[0.1] * 40 + [3.0] * 2)

    said = look(watch, servers)

    assert said.startswith(
        "stopped as a guest: of about 2 values of other clients, 2 requests waited"
    )


def test_requests_that_were_dropped_at_a_levels_end_are_its_own() -> None:
    servers = Servers()
    watch = servers.watch()
    watch.ended(LevelRun("decided", 5.0, (1.0, 2.0), (), 0.0))
    watch.began(2.0)
    servers.page = page(ttft=[3.0] * 2 + [0.2] * 198)

    assert look(watch, servers) == ""


@pytest.mark.parametrize(
    ("loads", "text", "words"),
    [
        ([ServerLoad("tiny-0", 8, 2, 0.1, 8)], PAGE, "2 requests wait for tiny-0"),
        ([ServerLoad("tiny-0", 8, 0, 0.95, 8)], PAGE, "95% of tiny-0's KV cache"),
        (["tiny-0: no answer"], PAGE, "no longer knows the load of a replica (tiny-0: no answer)"),
        (
            [IDLE],
            "",
            "or vllm:time_to_first_token_seconds, with which gpufleet watches the requests of"
            " other clients",
        ),
        ([IDLE], PAGE.replace(" 15.0", " 3.0"), "gpu-01:8000 was restarted"),
    ],
    ids=["queue", "cache", "silence", "no histogram", "restart"],
)
def test_it_stops_for_a_queue_a_full_cache_and_what_is_not_known(loads, text, words) -> None:
    servers = Servers()
    watch = servers.watch()
    servers.loads, servers.page = loads, text

    assert words in look(watch, servers)


def test_a_look_that_never_ends_stops_it_too() -> None:
    servers = Servers()
    watch = servers.watch()
    servers.now = STALE_SECONDS
    assert watch.reason(0) == ""
    servers.now = STALE_SECONDS + 1
    assert "has not been known for 60 s" in watch.reason(0)


def test_a_server_that_was_restarted_ends_a_load_test_that_has_it_alone() -> None:
    servers = Servers()
    watch = LoadWatch(servers, servers.recorded.append)
    for text, said in (
        (finished(100, 0)[0], ""),
        (finished(120, 0)[0], ""),
        ("no page of vLLM's", ""),
        (finished(3, 0)[0], "gpu-01:8000 was restarted during the measurement: measure again"),
    ):
        servers.page = text
        watch.look_once()
        assert watch.reason(9) == said
    assert len(servers.recorded) == 4


def test_servers_whose_latencies_cannot_be_watched_are_refused_before_any_load() -> None:
    servers = Servers()
    servers.page = "vllm:num_requests_running 0\n"

    with pytest.raises(
        FleetError, match="with which gpufleet watches the requests of other clients"
    ):
        servers.watch()
