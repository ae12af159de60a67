"""Groups of nodes and their nesting. Pure.

A group has hosts and child groups. The hosts of a child group also belong to its parent. The
variables of a deeper, more specific group take precedence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter

from gpufleet.errors import FleetError
from gpufleet.formatting import suggestion


@dataclass(frozen=True)
class Groups:
    """
    Groups and their hosts.

    `members` maps each group to its own hosts and the hosts of its children, with parents before
    children. The order is Ansible's order of precedence, with the least specific group first: by
    depth, then by name.
    """

    members: Mapping[str, tuple[str, ...]]

    def groups_of(self, host: str) -> tuple[str, ...]:
        """Return the groups of a host, with the least specific group first."""
        return tuple(group for group, hosts in self.members.items() if host in hosts)


def resolve_groups(
    hosts: Mapping[str, Sequence[str]], children: Mapping[str, Sequence[str]]
) -> Groups:
    """
    Return the groups with all hosts that belong to them.

    `hosts` maps each group to its own hosts, and `children` to its child groups. Raises FleetError
    for children that do not exist and for groups that contain themselves.
    """
    names = [*hosts, *(name for name in children if name not in hosts)]
    problems = [
        f"children of {parent}: there is no group {child!r}{suggestion(child, names)}"
        for parent, below in children.items()
        for child in below
        if child not in names
    ]
    parents = {
        name: [parent for parent, below in children.items() if name in below] for name in names
    }
    try:
        top_down = tuple(TopologicalSorter(parents).static_order())
    except CycleError as error:
        chain = " -> ".join(error.args[1])
        problems.append(
            f"groups contain each other ({chain}): remove one of these groups from the children "
            "of the other"
        )
    if problems:
        raise FleetError(*problems)

    depth: dict[str, int] = {}
    for name in top_down:
        depth[name] = 1 + max((depth[parent] for parent in parents[name]), default=0)
    members: dict[str, tuple[str, ...]] = {}
    for name in reversed(top_down):
        below = (host for child in children.get(name, ()) for host in members[child])
        members[name] = tuple(dict.fromkeys([*hosts.get(name, ()), *below]))
    return Groups({name: members[name] for name in sorted(names, key=lambda n: (depth[n], n))})
