"""Protect a node's ports with an nftables table, and a unit that loads it at boot."""

from __future__ import annotations

from collections.abc import Iterable

from pyinfra.api import deploy

from gpufleet import node_paths
from gpufleet.converge.desired import (
    UNIT_DIRECTORY,
    Absent,
    DesiredState,
    Directory,
    File,
    Group,
    Package,
    Unit,
    UnitGone,
    User,
)
from gpufleet.fleet.run import NodePlan
from gpufleet.network.firewall import DIRECTORY, RULES, SERVICE, render_service
from gpufleet.operations.apply_firewall import (
    CONNECT_SECONDS,
    LOOK_SECONDS,
    apply_firewall,
    node_rules,
    remove_firewall,
)
from gpufleet.operations.converge import Converge
from gpufleet.planning.stage import Running


@deploy("firewall")
def firewall(here: NodePlan, running: Iterable[Running] = ()) -> None:
    """
    Converge the node's table to the needs of its stages, or remove it.

    With `running`, the ports of these running stages also stay open. So the first half of a deploy
    opens the new ports, and the second half closes the ports that are no longer needed.
    """
    if here.settings.firewall is None:
        gone = Converge(DesiredState(UnitGone(SERVICE), Absent(RULES)), watch=(RULES,))
        remove_firewall(gone, name="no rules")
        gone.units(name="no service")
        gone.files(name="no file")
        return
    text = node_rules(here, running)
    node = Converge(
        DesiredState(
            Package("nftables"),
            *_account(here),
            Directory(DIRECTORY, mode=0o755),
            File(f"{UNIT_DIRECTORY}/{SERVICE}", render_service().encode()),
            Unit(SERVICE),
        )
    )
    node.packages(name="package")
    node.accounts(name="service account")
    node.files(name="service")
    apply_firewall(
        node,
        text,
        here.settings.firewall.confirm_seconds,
        name="rules",
        _timeout=LOOK_SECONDS * 3 + CONNECT_SECONDS,
    )
    node.units(name="load the rules at boot")


def _account(here: NodePlan) -> tuple[Group | User, ...]:
    """
    Return the user of vLLM for the table, because nft must know it, as in `serving.vllm_node`.
    """
    if here.settings.servers is None:
        return ()
    user = here.settings.servers.user
    return Group(user), User(user, group=user, home=node_paths.VLLM_STATE)
