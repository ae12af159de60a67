"""Every group has its turn once, canary first, and no wave takes what the load needs."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from gpufleet.settings.upgrade_settings import Upgrade
from gpufleet.upgrade.plan import capacity
from gpufleet.upgrade.plan.wave import Group
from gpufleet.upgrade.plan.waves import size_of, waves
from tests.support.rows import each_row
from tests.unit.upgrade.fleets import group, load, replicas


def ids(found):
    return [[each.id for each in wave.groups] for wave in found]


def test_canary_then_sizes_of_which_the_last_is_repeated():
    groups, _ = replicas("tiny", 10)

    found = waves(groups, Upgrade(canary=1, waves=(2, 3)))

    assert [len(wave.groups) for wave in found] == [1, 2, 3, 3, 1]
    assert [wave.number for wave in found] == [1, 2, 3, 4, 5]
    assert [wave.canary for wave in found] == [True, False, False, False, False]
    assert [name for wave in ids(found) for name in wave] == [f"tiny-{n}" for n in range(10)]


def test_without_a_canary_the_first_wave_is_of_the_first_size():
    groups, _ = replicas("tiny", 4)
    found = waves(groups, Upgrade(canary=0, waves=(3,)))
    assert ids(found) == [["tiny-0", "tiny-1", "tiny-2"], ["tiny-3"]]
    assert not found[0].canary


@each_row(
    ("size", "groups", "is_"),
    [("25%", 10, 2), ("5%", 10, 1), ("100%", 7, 7), ("33%", 3, 1), (4, 2, 4)],
)
def test_a_share_is_of_all_groups_rounded_down_and_at_least_one(size, groups, is_):
    assert size_of(size, groups) == is_


def test_models_are_mixed_so_that_none_loses_more_than_it_can_spare():
    """Each model can spare one of four: waves of two take one of each."""
    chat, chat_loads = replicas("chat", 4, 0.6)
    code, code_loads = replicas("code", 4, 0.6)

    found = waves([*chat, *code], Upgrade(canary=0, waves=(2,)), [*chat_loads, *code_loads])

    assert len(found) == 4
    assert all(len({each.models for each in wave.groups}) == 2 for wave in found)


def test_the_model_with_the_most_waves_before_it_is_never_left_for_the_end():
    """Five of big, which can spare one: taken by name, big alone would fill the last waves."""
    parts = [replicas("a", 2, 0.4), replicas("b", 2, 0.4), replicas("big", 5, 0.65)]
    groups = [each for part in parts for each in part[0]]
    loads = [each for part in parts for each in part[1]]

    found = waves(groups, Upgrade(canary=0, waves=(2,)), loads)

    assert capacity.refusals(found, loads, Upgrade()) == ()


def test_the_canary_is_a_replica_that_serves_of_the_model_that_has_the_most():
    """One that is out has no numbers of before to be judged by; one of two is half a model."""
    many, many_loads = replicas("many", 3, 0.1)
    few, few_loads = replicas("few", 2, 0.1)
    many_loads[0] = load("many-0", serves=False, unknown="drained by ann")

    found = waves([*few, *many], Upgrade(), [*few_loads, *many_loads])

    assert ids(found)[0] == ["many-1"]


def test_a_new_replica_comes_first_where_the_others_cannot_be_spared_before_it():
    """Two that are busy, and a third that the plan adds: with it one at a time can go."""
    groups, loads = replicas("tiny", 2, 0.8)
    groups.append(group("tiny-2", comes=("tiny-2",)))

    found = waves(groups, Upgrade(), loads)

    assert ids(found) == [["tiny-2"], ["tiny-0"], ["tiny-1"]]
    assert capacity.refusals(found, loads, Upgrade()) == ()


def test_how_busy_replicas_are_does_not_change_the_order():
    """A plan that was looked at is the one that is carried out some seconds later."""
    groups, quiet = replicas("tiny", 5, 0.1)
    other = [load(each.replica, 0.05 * n) for n, each in enumerate(quiet)]
    assert waves(groups, Upgrade(), quiet) == waves(groups, Upgrade(), other)


# -- whatever the fleet ----------------------------------------------------------------------------

SIZES = st.one_of(st.integers(1, 6), st.integers(1, 100).map(lambda share: f"{share}%"))


@st.composite
def fleets(draw):
    """Groups of one replica or of a whole node, of up to three models; some are new, some go."""
    groups, loads = [], []
    for model in ("a", "b", "c")[: draw(st.integers(1, 3))]:
        for number in range(draw(st.integers(1, 6))):
            name = f"{model}-{number}"
            state = draw(st.sampled_from(("serves", "serves", "serves", "out", "new", "goes")))
            comes, goes = (name,) * (state == "new"), (name,) * (state == "goes")
            groups.append(group(name, comes=comes, goes=goes))
            if state != "new":
                share = draw(st.floats(0, 1.3))
                loads.append(load(name, share, serves=state != "out", unknown="out"))
    joined = draw(st.integers(0, min(3, len(groups))))
    if joined > 1:  # a node with several replicas, of whichever models
        parts, groups = groups[:joined], groups[joined:]
        groups.append(
            Group(
                "node",
                "node",
                ("node",),
                tuple(name for each in parts for name in each.replicas),
                (),
                tuple(name for each in parts for name in each.comes),
                tuple(name for each in parts for name in each.goes),
            )
        )
    return draw(st.permutations(groups)), loads


ASKED = st.builds(
    Upgrade,
    canary=st.integers(0, 3),
    waves=st.lists(SIZES, min_size=1, max_size=3).map(tuple),
    headroom=st.floats(0.3, 1),
    keep=st.integers(1, 2),
)


@given(fleets(), ASKED)
@settings(max_examples=60, deadline=None)
def test_every_group_has_its_turn_once_in_waves_of_the_sizes_asked_for(fleet, asked):
    groups, loads = fleet

    found = waves(groups, asked, loads)

    assert sorted(each.id for wave in found for each in wave.groups) == sorted(
        each.id for each in groups
    )
    sizes = [asked.canary] * (asked.canary > 0)
    sizes += [size_of(each, len(groups)) for each in asked.waves]
    sizes += [sizes[-1]] * len(groups)
    left = len(groups)
    for wave, size in zip(found, sizes, strict=False):
        assert len(wave.groups) == min(size, left)
        left -= len(wave.groups)
    assert [wave.canary for wave in found] == [
        asked.canary > 0 and wave.number == 1 for wave in found
    ]


@given(fleets(), ASKED, st.sets(st.sampled_from("abc")))
@settings(max_examples=150, deadline=None)
def test_what_is_not_refused_never_leaves_less_than_is_needed(fleet, asked, accepted):
    """Counted here by hand, replica by replica, as the waves are carried out."""
    groups, loads = fleet
    found = waves(groups, asked, loads, accepted)
    if capacity.refusals(found, loads, asked, accept_outage=accepted):
        return
    serve = {each.replica for each in loads if each.serves}
    for wave in found:
        stopped = serve & set(wave.replicas)
        for model in {name[0] for name in stopped} - accepted:
            full = sum(each.share for each in loads if each.model == model)
            remain = sum(name[0] == model for name in serve - stopped)
            assert remain >= asked.keep
            assert full <= remain * asked.headroom + 1e-6
        for each in wave.groups:
            serve = (serve - set(each.goes)) | set(each.comes)


@given(fleets(), ASKED)
@settings(max_examples=30, deadline=None)
def test_the_order_in_which_groups_are_found_does_not_matter(fleet, asked):
    groups, loads = fleet
    assert waves(groups, asked, loads) == waves(sorted(groups, key=lambda g: g.id), asked, loads)
