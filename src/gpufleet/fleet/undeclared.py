"""Decide whether parts of a node that its variables no longer declare may be removed.  Pure."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from gpufleet.formatting import node_ranges
from gpufleet.settings.node_variables import NodeVars

# The consequence for a serving fleet, if no node has the part. Such a part is removed from the last
# node only on explicit request.
_LAST = {
    "gateway": "clients would have no address for their requests",
    "monitoring": "the fleet would not be monitored, and no alert would be sent",
}


def removal_problem(
    setting: str, nodes: Collection[str], declared: Mapping[str, NodeVars]
) -> str | None:
    """
    Return why the parts of a setting must not be removed from `nodes`, or None if they may be.

    `nodes` are nodes that no longer declare the setting.

    A misspelt group or file removes the setting from all nodes at once. In that case the parts
    stay, unless `absent.parts` of each node names the setting.
    """
    serves = any(each.settings.serving for each in declared.values())
    has_other = any(
        getattr(each.settings, setting) or (setting == "gateway" and each.settings.balancer)
        for each in declared.values()
    )
    unsaid = [name for name in nodes if setting not in declared[name].settings.absent.parts]
    if setting not in _LAST or not serves or has_other or not unsaid:
        return None
    here = "this node" if len(unsaid) == 1 else "these nodes"
    return (
        f"{node_ranges(unsaid)}: `{setting}` runs on {here}, but it is not set for any "
        f"node of the inventory, and models are served. Without `{setting}`, "
        f"{_LAST[setting]}. Set `{setting}` in the variables again (the name of a group or "
        f"of a file in group_vars may be misspelt). To remove `{setting}`, write `absent: "
        f"{{parts: [{setting}]}}` in the variables of {here}"
    )
