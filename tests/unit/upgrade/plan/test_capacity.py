"""What a wave may take away: the numbers, and the sentences that say them."""

from __future__ import annotations

import pytest

from gpufleet.errors import FleetError
from gpufleet.settings.upgrade_settings import Upgrade
from gpufleet.upgrade.plan.capacity import recheck, refusals, remaining_capacity, required_replicas
from gpufleet.upgrade.plan.wave import Group, Wave
from gpufleet.upgrade.plan.wave_plan import plan_waves
from gpufleet.upgrade.plan.waves import waves
from tests.support.rows import each_row
from tests.unit.upgrade.fleets import group, load, replicas


def refused(groups, loads, settings=None, **more):
    settings = settings or Upgrade()
    made = waves(groups, settings, loads, more.get("accept_outage", ()))
    return refusals(made, loads, settings, **more)


@each_row(
    ("shares", "headroom", "keep", "needs"),
    [
        ([0.55, 0.6, 0.5, 0.6], 0.85, 1, 3),  # 2.25 / 0.85 = 2.65
        ([0.85, 0.85], 0.85, 1, 2),  # exactly full: no third because of rounding
        ([0.1] * 17, 0.85, 1, 2),
        ([0.86], 0.85, 1, 2),
        ([0, 0, 0], 0.85, 1, 1),  # nobody asks: one serves all the same
        ([0, 0, 0], 0.85, 2, 2),
        ([1.5, 0.5], 1.0, 1, 2),  # a queue is load
    ],
)
def test_so_many_replicas_are_needed_as_carry_the_load(shares, headroom, keep, needs):
    loads = [load(f"tiny-{n}", s) for n, s in enumerate(shares)]
    found = required_replicas(loads, headroom, keep)["tiny"]
    assert (found.serving, found.needed) == (len(shares), needs)


def test_under_a_load_that_three_of_four_need_they_go_one_by_one():
    groups, loads = replicas("tiny", 4, 0.5625)

    plan = plan_waves(groups, loads, Upgrade(canary=1, waves=(1,)))

    assert [[each.id for each in wave.groups] for wave in plan.waves] == [
        ["tiny-0"],
        ["tiny-1"],
        ["tiny-2"],
        ["tiny-3"],
    ]
    assert [(each.left, each.needed) for each in plan.left] == [(3, 3)] * 4


def test_and_a_wave_of_two_is_refused_with_the_numbers_the_key_and_what_to_write():
    groups, loads = replicas("tiny", 4, 0.5625)

    with pytest.raises(FleetError) as error:
        plan_waves(groups, loads, Upgrade(canary=1, waves=(2,)))

    assert error.value.problems == (
        "upgrade.waves: wave 2 drains 2 of the 4 replicas of tiny that serve, so 2 would be left, "
        "but the load of 2.25 replicas needs 3 replicas at a headroom of 0.85 "
        "(`upgrade.headroom`): write `waves: [1]`, or wait for a load of at most 1.70 replicas, "
        "or add 1 more replica (`serving.tiny.replicas`)",
    )


def test_what_a_refusal_says_to_write_is_not_refused():
    groups, loads = replicas("tiny", 10, 0.5)  # 5 / 0.85: six are needed, four may go
    (said,) = refused(groups, loads, Upgrade(canary=6, waves=("50%",)))
    assert "`canary: 4` and `waves: [4]`" in said
    assert refused(groups, loads, Upgrade(canary=4, waves=(4,))) == ()


def test_a_canary_that_is_too_large_is_refused_as_any_wave():
    groups, loads = replicas("tiny", 4, 0.5625)
    assert "`canary: 1` and `waves: [1]`" in refused(groups, loads, Upgrade(canary=2))[0]


def test_a_model_with_one_replica_is_not_changed_without_its_outage_being_accepted_by_name():
    groups, loads = replicas("tiny", 1, 0.1)

    (said,) = refused(groups, loads, load_seconds={"tiny": 83.2})

    assert "the only replica of tiny" in said
    assert "83 s the last time" in said
    assert "`--accept-outage tiny`" in said
    assert refused(groups, loads, accept_outage=["tiny"]) == ()
    assert "for an unknown time" in refused(groups, loads)[0]


def test_an_accepted_outage_takes_one_group_at_a_time_all_the_same():
    """Two full replicas: accepted is that one carries what two did, not that both are gone."""
    groups, loads = replicas("tiny", 2, 0.9)
    settings = Upgrade(canary=0, waves=(2,))

    assert refused(groups, loads, settings, accept_outage=["tiny"])
    assert refused(groups, loads, Upgrade(canary=1), accept_outage=["tiny"]) == ()


def test_what_it_costs_is_said_where_an_outage_is_accepted():
    groups, loads = replicas("tiny", 1, 0.1)
    plan = plan_waves(groups, loads, Upgrade(), accept_outage=["tiny"])
    assert any("tiny does not answer while it loads" in each for each in plan.remarks)


def test_two_replicas_that_are_full_cannot_go_one_by_one_and_it_is_said_what_can_be_done():
    (said,) = refused(*replicas("tiny", 2, 0.9))
    assert "wait for a load of at most 0.85 replicas" in said
    assert "add 2 more replicas" in said
    assert "`--accept-outage tiny`" in said
    assert "waves: [" not in said


def test_a_queue_is_not_answered_with_a_number_of_replicas():
    (said,) = refused(*replicas("tiny", 4, 14.0))
    assert "exceeds the capacity of all serving replicas, even before this wave" in said
    assert "find the cause of the load (`gpufleet doctor`), or add replicas" in said
    assert "more replica" not in said


def test_a_floor_that_somebody_wrote_is_named_as_the_reason():
    (said,) = refused(*replicas("tiny", 2, 0.1), Upgrade(keep=2))
    assert "`upgrade.keep` is 2" in said
    assert "headroom" not in said


def test_a_load_that_nobody_knows_is_refused_with_the_way_to_go_on():
    groups, loads = replicas("tiny", 3, 0.1)
    loads[1] = load("tiny-1", running=None, waiting=None, kv_usage=None, unknown="refused")

    (said,) = refused(groups, loads)

    assert "tiny-1 on on-tiny-1: refused" in said
    assert "`--accept-unknown-load tiny`" in said
    # It then counts as full: 1.2 replicas need two of three.
    assert refused(groups, loads, accept_unknown_load=["tiny"]) == ()
    assert refused(groups, loads, Upgrade(canary=2), accept_unknown_load=["tiny"])


def test_all_models_are_refused_at_once():
    chat, chat_loads = replicas("chat", 1, 0.1)
    code, code_loads = replicas("code", 2, 0.9)
    assert len(refused([*chat, *code], [*chat_loads, *code_loads])) == 2


def test_a_model_that_is_not_changed_is_no_reason_to_refuse():
    chat, chat_loads = replicas("chat", 3, 0.1)
    unknown = load("code-0", running=None, waiting=None, kv_usage=None, unknown="refused")
    assert refused(chat, [*chat_loads, unknown, load("full-0", 5.0)]) == ()


def test_a_replica_that_serves_nobody_may_go_whatever_the_load():
    groups, loads = replicas("tiny", 2, 0.8)
    loads.append(load("tiny-2", serves=False, unknown="failed"))
    assert refused([group("tiny-2")], loads) == ()
    assert refused(groups[:1], loads)


def test_what_does_not_come_back_is_missing_in_the_waves_that_follow():
    """Of three, one goes for good: of the two that are left the next wave takes one."""
    _, loads = replicas("tiny", 3, 0.25)
    found = [Wave(1, (group("tiny-2", goes=("tiny-2",)),)), Wave(2, (group("tiny-0"),))]

    assert [(each.serving, each.left) for each in remaining_capacity(found, loads, Upgrade())] == [
        (3, 2),
        (2, 1),
    ]
    assert refusals(found, loads, Upgrade()) == ()
    (said,) = refusals(found, loads, Upgrade(keep=2))
    assert "wave 2 drains 1 of the 2 replicas" in said


def test_a_node_with_several_replicas_takes_all_of_them():
    loads = [load(f"tiny-{n}", 0.1) for n in range(4)]
    nodes = [
        Group(n, "node", (n,), (f"tiny-{i}", f"tiny-{i + 1}")) for i, n in ((0, "a"), (2, "b"))
    ]
    assert refused(nodes, loads) == ()
    (said,) = refused(nodes, loads, Upgrade(keep=3))
    assert "drains 2 of the 4 replicas" in said


def test_an_option_with_a_name_that_no_model_has_is_refused():
    with pytest.raises(
        FleetError,
        match="tyni: no replica of this model runs; models with running replicas: tiny",
    ):
        plan_waves(*replicas("tiny", 2), Upgrade(), accept_outage=["tyni"])


# -- once more before each wave --------------------------------------------------------------------


def test_a_wave_waits_while_the_load_is_too_high_and_goes_on_when_it_falls():
    groups, _ = replicas("tiny", 4)
    wave = Wave(3, tuple(groups[2:3]))

    high = recheck(wave, [load(f"tiny-{n}", 0.9) for n in range(4)], Upgrade())
    low = recheck(wave, [load(f"tiny-{n}", 0.5) for n in range(4)], Upgrade())

    assert high.verdict == "wait"
    assert (
        "tiny: 3 of 4 replicas are left, 5 replicas are needed for a load of 3.60 replicas"
        in high.why
    )
    assert low.proceeds


def test_a_sentence_about_a_load_by_a_measured_rate_has_its_age():
    groups, _ = replicas("tiny", 4)
    busy = [
        load(f"tiny-{n}", 0.1, finished_per_second=2.7, carries_per_second=3.0,
             measured="on 2026-11-20 (8 days ago, fingerprint 0a1b2c3d)")
        for n in range(4)
    ]  # fmt: skip
    said = recheck(Wave(3, tuple(groups[2:3])), busy, Upgrade()).why
    with pytest.raises(FleetError) as refused:
        plan_waves(groups, busy, Upgrade())

    assert "3.60 replicas, as measured on 2026-11-20 (8 days ago," in said
    assert "that was measured on 2026-11-20 (8 days ago," in str(refused.value)


def test_a_wave_waits_while_a_replica_of_its_model_is_out_whose_place_is_needed():
    loads = [load(f"tiny-{n}", 0.7) for n in range(3)] + [load("tiny-3", serves=False)]
    assert recheck(Wave(2, (group("tiny-0"),)), loads, Upgrade()).verdict == "wait"
    assert recheck(Wave(2, (group("tiny-3"),)), loads, Upgrade()).proceeds


def test_a_wave_waits_while_nobody_knows_the_load():
    loads = [load("tiny-0"), load("tiny-1"), load("tiny-2", running=None, unknown="timed out")]
    wave = Wave(2, (group("tiny-0"),))

    assert "timed out" in recheck(wave, loads, Upgrade()).why
    assert not recheck(wave, loads, Upgrade()).proceeds
    assert recheck(wave, loads, Upgrade(), accept_unknown_load=["tiny"]).proceeds
