"""Guard the ports of a node: the table of nftables, and the unit that loads it at boot."""

from __future__ import annotations

from collections.abc import Iterable

from pyinfra import host
from pyinfra.api import deploy

from gpufleet import node_paths
from gpufleet.converge.desired import (
    UNIT_DIRECTORY,
    Absent,
    Directory,
    File,
    Group,
    Package,
    Unit,
    UnitGone,
    User,
    Wanted,
)
from gpufleet.fleet.run import NodePlan
from gpufleet.network import firewall as table
from gpufleet.network.firewall import DIRECTORY, RULES, SERVICE
from gpufleet.operations.apply_firewall import (
    CONNECT_SECONDS,
    LOOK_SECONDS,
    apply_firewall,
    remove_firewall,
)
from gpufleet.operations.converge import Converge
from gpufleet.planning.stage import Running


@deploy("firewall")
def firewall(here: NodePlan, running: Iterable[Running] = ()) -> None:
    """
    Converge the node's table to what its stages need, or to none.

    With `running` all that those stages need stays open, too. So the first half of a deploy opens
    what will be needed, and the second closes what is needed no more.
    """
    if here.settings.firewall is None:
        gone = Converge(Wanted(UnitGone(SERVICE), Absent(RULES)), watch=(RULES,))
        remove_firewall(gone, name="no rules")
        gone.units(name="no service")
        gone.files(name="no file")
        return
    text = rules(here, running)
    node = Converge(
        Wanted(
            Package("nftables"),
            *_account(here),
            Directory(DIRECTORY, mode=0o755),
            File(f"{UNIT_DIRECTORY}/{SERVICE}", table.service().encode()),
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


def rules(here: NodePlan, running: Iterable[Running] = ()) -> str:
    """Return the table that the node is to have."""
    return table.rules(
        here.stages,
        here.settings,
        ssh_port=int(host.data.get("ssh_port") or 22),
        running=running,
        fellows=here.fellows,
    )


def is_narrowed(here: NodePlan) -> bool:
    """Say whether something runs on the node that needs more open than what is planned does."""
    return here.settings.firewall is not None and rules(here, here.running) != rules(here)


def _account(here: NodePlan) -> tuple[Group | User, ...]:
    """The table names the user of vLLM, whom nft must know: as `serving.vllm_node` wants it."""
    if here.settings.vllm is None:
        return ()
    user = here.settings.vllm.user
    return Group(user), User(user, group=user, home=node_paths.VLLM_STATE)
