"""Groups of nodes, and groups of groups."""

from __future__ import annotations

import pytest

from gpufleet.errors import FleetError
from gpufleet.settings.node_groups import resolve_groups


def test_groups_hold_their_childrens_hosts_parents_first() -> None:
    groups = resolve_groups(
        {"h100": ["n1", "n2"], "a100": ["n3"], "lb": ["n1"]}, {"gpu": ["h100", "a100"]}
    )

    assert list(groups.members.items()) == [
        ("gpu", ("n1", "n2", "n3")),
        ("lb", ("n1",)),
        ("a100", ("n3",)),
        ("h100", ("n1", "n2")),
    ]
    assert groups.groups_of("n1") == ("gpu", "lb", "h100")


def test_every_mistake_about_children_is_said_at_once() -> None:
    with pytest.raises(FleetError) as refused:
        resolve_groups({"h100": ["n1"], "a": [], "b": []}, {"a": ["b", "h10"], "b": ["a"]})

    unknown, circle = refused.value.problems
    assert unknown == "children of a: there is no group 'h10'; did you mean 'h100'?"
    assert circle.startswith("groups contain each other ")
