"""A guest sees in the servers' histograms that others wait too long, its own requests taken out."""

from __future__ import annotations

import re
from collections.abc import Iterable

import pytest

from gpufleet.engines.metrics_page import expected_name
from gpufleet.load_test.other_clients import (
    PROMISES,
    WINDOW_SECONDS,
    OtherClients,
    bound_remarks,
    line_beginnings,
    read_counts,
    shared_bounds,
)
from gpufleet.load_test.outcomes import Contract, Outcome
from gpufleet.monitoring.rules import objective_rules
from tests.support.checkout import ROOT
from tests.support.rows import each_row

RECORDED = ROOT / "tests/unit/monitoring/recorded"
PAGE = (RECORDED / "vllm-0.32.0.txt").read_text()
CONTRACT = Contract(ttft_seconds=2.5, itl_seconds=0.1, e2e_seconds=10.0)
FAMILY = {
    "ttft": "vllm:time_to_first_token_seconds",
    "itl": "vllm:inter_token_latency_seconds",
    "e2e": "vllm:e2e_request_latency_seconds",
}


def page(**observed: Iterable[float]) -> str:
    """Return the recorded page after a server has observed more: seconds, by latency."""
    text = PAGE
    for name, values in observed.items():
        seconds = list(values)

        def grown(found: re.Match[str], seconds: list[float] = seconds) -> str:
            below = sum(each <= float(found[2]) for each in seconds)
            return f"{found[1]}{float(found[3]) + below}"

        text = re.sub(rf'({FAMILY[name]}_bucket{{[^}}]*le="([^"]+)"[^}}]*}} )(\S+)', grown, text)
    return text


def own(ttft: float = 0.1, *, due: float = 0.0, gaps: tuple[float, ...] = (0.01,)) -> Outcome:
    """Return a request of the guest itself."""
    first = due + ttft
    return Outcome(due, due, first, first + sum(gaps), 8, 1 + len(gaps), gaps, "")


class Guest:
    """A guest's watch over one server, by pages; its level is as old as the clock."""

    def __init__(self, contract: Contract = CONTRACT) -> None:
        self.contract, self.now = contract, 0.0
        first = self.counts(page())
        self.others = OtherClients(shared_bounds(first.values()))
        assert self.others.look(0.0, first) == ""
        self.others.begin_level()

    def counts(self, text: str):
        found = read_counts(text, self.contract)
        assert not isinstance(found, str), found
        return {"gpu-01:8000": found}

    def after(self, seconds: float, text: str, ended: Iterable[Outcome] = (), in_flight=()) -> str:
        """Return the reason to stop once a page, and what had ended by then, are known."""
        for each in ended:
            self.others.add(each)
        self.now += seconds
        self.others.beat(self.now, in_flight)
        said = self.others.look(self.now, self.counts(text))
        self.now += 3.0
        self.others.beat(self.now, in_flight)
        return said or self.others.late_reason()


def test_a_recorded_page_has_the_counts_of_each_promise_and_its_own_bound() -> None:
    found = read_counts(PAGE, CONTRACT)
    more = read_counts(page(ttft=[0.1, 2.6, 9.0], e2e=[11.0]), CONTRACT)

    assert not isinstance(found, str)
    assert not isinstance(more, str)
    assert [more[name].total - found[name].total for name in found] == [3, 0, 1]
    assert [more[name].late - found[name].late for name in found] == [2, 0, 1]
    assert {name: each.bound for name, each in found.items()} == {
        "ttft": 2.5, "itl": 0.1, "e2e": 10.0,
    }  # fmt: skip
    lines = [line for line in PAGE.splitlines() if line.startswith(line_beginnings())]
    assert read_counts("\n".join(lines), CONTRACT) == found, "a look brings these lines alone"


def test_a_page_that_cannot_show_it_is_a_reason_not_a_pass() -> None:
    for text, contract, words in (
        ("", CONTRACT, "or vllm:time_to_first_token_seconds"),
        ("no page {", CONTRACT, "cannot be read"),
        (PAGE, Contract(ttft_seconds=1e6), "has no bucket bound of 1e+06 s or more"),
    ):
        found = read_counts(text, contract)
        assert isinstance(found, str), text[:20]
        assert words in found


def test_an_objective_between_two_bounds_is_watched_from_the_next_bound_and_that_is_said() -> None:
    contract = Contract(ttft_seconds=2.0, e2e_seconds=10.0)
    found = read_counts(PAGE, contract)
    assert not isinstance(found, str)

    assert bound_remarks(contract, shared_bounds([found])) == (
        "TTFT of other clients count as late only above 2.5 s, because this is the first bucket "
        "bound of vLLM's histogram that is not below the objective of 2 s",
    )


@each_row(
    "observed, ended, words",
    [
        # 60 requests of others, all in time; the guest's own are late and are none of others'.
        ({"ttft": [0.2] * 60}, [], ""),
        ({"ttft": [0.2] * 199 + [3.0]}, [own(3.0)], ""),
        # One late of few may be chance, two are not; of a thousand ten are the objective's.
        ({"ttft": [0.2] * 40 + [3.0]}, [], ""),
        ({"ttft": [0.2] * 40 + [3.0, 4.0]}, [], "of about 42 values of other "
         "clients, 2 requests waited longer than 2.5 s for their first token in 10 s"),
        ({"ttft": [0.2] * 990 + [3.0] * 10}, [], ""),
        ({"ttft": [0.2] * 989 + [3.0] * 11}, [],
         "of about 1000 values of other clients, 11 "),
        # The guest's many fast requests do not thin the others' late ones out.
        ({"ttft": [0.1] * 900 + [0.2] * 40 + [3.0] * 4}, [own()] * 900,
         "of about 44 values of other clients, 4 "),
        # Others share the queue in which the guest's own are late; and the alert counts all.
        ({"ttft": [3.0] * 7 + [0.2] * 193}, [own(3.0)] * 7,
         "of 200 values, including those of the load test, 7 requests waited longer than 2.5 s "
         "for their first token in 10 s: VllmTtftAboveObjective would "
         "fire"),
        ({"e2e": [12.0] * 3}, [],
         "of about 3 values of other clients, 3 requests took longer than 10 s"),
        # Pauses are counted as the alert does: 10 of fewer than 1000 may be late.
        ({"itl": [0.01] * 300 + [0.2] * 10}, [], ""),
        ({"itl": [0.01] * 300 + [0.2] * 11}, [],
         "of about 311 values of other clients, 11 pauses between tokens "
         "were longer than 0.1 s"),
        ({"itl": [0.01] * 2000 + [0.2] * 11}, [own(gaps=(0.01,) * 1000 + (0.2,) * 2)] * 2, ""),
    ],
    ids=str,
)  # fmt: skip
def test_it_stops_when_more_than_a_hundredth_is_late(observed, ended, words: str) -> None:
    found = Guest().after(10.0, page(**observed), ended)

    assert words in found
    assert bool(words) == bool(found)


def test_a_request_of_its_own_that_is_in_flight_or_was_dropped_may_be_the_late_one() -> None:
    late = page(ttft=[0.2] * 98 + [3.0, 3.0])
    assert "of about 100 values of other clients, 2 " in Guest().after(10.0, late)
    assert "including those of the load test" in Guest().after(10.0, late, in_flight=[1.0])

    guest = Guest()
    guest.others.end_level(unfinished=1)
    guest.others.begin_level()
    assert "including those of the load test" in guest.after(10.0, late)


def test_a_look_counts_only_once_the_guests_own_requests_of_that_time_are_known() -> None:
    guest = Guest()
    late = guest.counts(page(ttft=[3.0] * 2))
    guest.others.beat(5.0, [])
    assert guest.others.look(5.0, late) == ""
    assert guest.others.late_reason() == ""
    guest.others.beat(7.9, [])
    assert guest.others.late_reason() == ""
    guest.others.beat(8.0, [])
    assert "of about 2 values of other clients, 2 " in guest.others.late_reason()


def test_harm_of_an_hour_ago_does_not_count_and_a_quiet_hour_does_not_hide_harm() -> None:
    guest, before, busy = Guest(), [0.2] * 10_000, [0.2] * 10_000
    assert guest.after(10.0, page(ttft=before)) == ""
    for _ in range(3):
        assert guest.after(WINDOW_SECONDS, page(ttft=before)) == ""
    assert "of about 5 values of other clients, 5 " in guest.after(
        3.0, page(ttft=[*busy, *[3.0] * 5])
    )

    guest = Guest()
    late = [3.0]
    assert guest.after(10.0, page(ttft=late)) == ""
    for _ in range(3):
        assert guest.after(WINDOW_SECONDS, page(ttft=late)) == ""
    assert guest.after(3.0, page(ttft=[*late, 3.0])) == "", "one late request in the last minutes"


def test_counts_that_began_again_or_other_servers_end_it() -> None:
    guest = Guest()
    guest.after(5.0, page(ttft=[0.1] * 9))
    assert "gpu-01:8000 was restarted" in guest.after(5.0, page())
    assert guest.others.look(99.0, {}) == "the servers behind the target have changed"


@pytest.mark.parametrize("release", ["0.28.0", "0.30.0", "0.32.0"])
def test_every_recorded_release_has_what_a_guest_watches(release: str) -> None:
    found = read_counts((RECORDED / f"vllm-{release}.txt").read_text(), CONTRACT)
    assert set(found) == {"ttft", "itl", "e2e"}


@pytest.mark.parametrize("name", PROMISES)
def test_others_are_judged_as_the_alert_judges(name: str) -> None:
    """Its histogram, and the fewest observations that it needs: rooms beside each other."""
    promise = PROMISES[name]
    (rule,) = (alert for _, alert in objective_rules._HELD if alert.name == promise.alert)
    for each in expected_name(promise.measure).split(" or "):
        assert f"{each}_count" in rule.expr
    assert f">= {promise.fewest}" in rule.expr
