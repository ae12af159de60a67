"""How long waves take is said by what was seen, and not at all where nothing was."""

from __future__ import annotations

import pytest

from gpufleet.formatting import format_duration
from gpufleet.upgrade.plan.duration import Estimate, estimate, load_seconds
from gpufleet.upgrade.plan.wave import Group, Wave
from gpufleet.upgrade.run.journal_entry import Entry
from tests.support.rows import each_row
from tests.unit.upgrade.fleets import group


def journal(*entries, groups=("tiny-0", "tiny-1")):
    """Entries as (at, what, group, said), behind the plan that names the groups."""
    waves = [{"number": 1, "groups": [group(name).as_json() for name in groups]}]
    return [
        Entry(0, "planned", said={"waves": waves}),
        *(Entry(at, what, 1, name, None, said) for at, what, name, said in entries),
    ]


def took(name, seconds, at=100.0):
    return [(at, "draining", name, {}), (at + seconds, "done", name, {})]


def seconds_of(waves, *journals, **more):
    return [each.seconds for each in estimate(waves, journals, **more)]


ONE = Wave(1, (group("tiny-0"),))


def test_of_what_was_never_seen_nothing_is_said():
    assert seconds_of([ONE]) == [None]
    assert str(estimate([ONE])[0]) == "not known"


def test_a_group_takes_as_long_as_the_last_time():
    assert seconds_of([ONE], journal(*took("tiny-0", 50)), journal(*took("tiny-0", 70))) == [70]


def test_a_new_one_takes_as_long_as_others_of_its_model_and_none_of_another():
    before = journal(*took("tiny-0", 50), *took("tiny-1", 60), *took("tiny-2", 400),
                     groups=("tiny-0", "tiny-1", "tiny-2"))  # fmt: skip
    assert seconds_of([Wave(1, (group("tiny-7"),)), Wave(2, (group("big-0"),))], before) == [
        60,
        None,
    ]


def test_a_node_is_not_judged_by_its_units():
    node = Group("gpu-01", "node", ("gpu-01",), ("tiny-0",))
    assert seconds_of([Wave(1, (node,))], journal(*took("tiny-0", 50)), starts={"tiny-0": 9}) == [
        None
    ]


def test_a_wave_takes_as_long_as_its_longest_group_and_is_unknown_with_one_of_them():
    both = Wave(1, (group("tiny-0"), group("tiny-1")))
    assert seconds_of([both], journal(*took("tiny-0", 50), *took("tiny-1", 80))) == [80]
    with_new = Wave(1, (group("tiny-0"), group("big-0")))
    assert seconds_of([with_new], journal(*took("tiny-0", 50))) == [None]


@pytest.mark.parametrize("between", ["paused", "resumed"])
def test_a_night_between_two_entries_is_no_time_that_a_group_takes(between):
    entries = [
        (100, "draining", "tiny-0", {}),
        (200, between, None, {}),
        (40000, "done", "tiny-0", {}),
    ]
    assert seconds_of([ONE], journal(*entries)) == [None]


def test_a_group_that_failed_says_nothing_of_how_long_it_takes():
    entries = [
        (100, "draining", "tiny-0", {}),
        (200, "failed", "tiny-0", {}),
        (300, "done", "tiny-0", {}),
    ]
    assert seconds_of([ONE], journal(*entries)) == [None]


def test_a_start_that_was_seen_is_a_part_that_is_known():
    (found,) = estimate([Wave(1, (group("tiny-5"),))], (), {"tiny-0": 40}, soak_seconds=60)
    assert found == Estimate(1, 100, at_least=True)
    assert str(found) == "at least 1 min 40 s"


def test_how_long_a_model_loads_is_that_of_its_slowest_replica_of_the_last_time():
    first = journal((1, "ready", "tiny-0", {"seconds": 99, "load_seconds": 90}))
    last = journal((1, "ready", "tiny-0", {"seconds": 40}), (2, "ready", "tiny-1", {"seconds": 41}))
    assert load_seconds([first, last]) == {"tiny": 41}
    assert load_seconds([first]) == {"tiny": 90}


def test_of_a_group_with_several_replicas_each_model_has_its_own_time():
    """As the engine writes it: by replica."""
    said = {"seconds": 70, "load_seconds": {"tiny-0": 41.5, "tiny-1": 44.0, "wide-0": 60}}
    assert load_seconds([journal((1, "ready", "tiny-0", said))]) == {"tiny": 44.0, "wide": 60}


@each_row(
    ("seconds", "said"),
    [(0, "0 s"), (59.6, "1 min"), (61, "1 min 1 s"), (3600, "1 h"), (7260, "2 h 1 min")],
)
def test_durations_are_written_as_people_say_them(seconds, said):
    assert format_duration(seconds) == said
