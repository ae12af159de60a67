"""
Complete inventories, nodes, replicas and names of catalogues in a shell.

Each function has the parameters that click requires, and returns the names that begin with the
typed text. For an inventory with a mistake there are no completions, and the command itself reports
the mistake.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from gpufleet.errors import FleetError

if TYPE_CHECKING:
    from gpufleet.inventory.loader import Fleet


def _beginning(names: Iterable[str], incomplete: str) -> list[str]:
    return [name for name in names if name.startswith(incomplete)]


def inventories(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Return the inventories in `inventories/`, or the files and folders below the typed path."""
    typed = Path(incomplete)
    if "/" not in incomplete:
        return _beginning(sorted(map(str, Path("inventories").glob("*.py"))), incomplete)
    folder = typed if incomplete.endswith("/") else typed.parent
    found = [str(each) for each in folder.glob("*.py")]
    found += [f"{each}/" for each in folder.glob("*/") if not each.name.startswith((".", "__"))]
    return _beginning(sorted(found), incomplete)


def nodes(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Return the nodes of the typed inventory."""
    fleet = _fleet(ctx)
    return _beginning(fleet.nodes, incomplete) if fleet else []


def nodes_and_groups(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Return the values of --limit: nodes and groups."""
    fleet = _fleet(ctx)
    return _beginning([*fleet.groups.members, *fleet.nodes], incomplete) if fleet else []


def replicas(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    """Return the first replica of each declared model, for example `llama-0`."""
    return _beginning((f"{model}-0" for model in models(ctx, param, "")), incomplete)


def models(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Return the declared models, by their names in `serving`."""
    declared = fleet.nodes.values() if (fleet := _fleet(ctx)) else ()
    served = {model for node in declared for model in node.settings.serving}
    return _beginning(sorted(served), incomplete)


def deploys(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of the deploys in this directory, and of those that gpufleet ships."""
    from gpufleet.inventory.pyinfra_command import deploy_names

    return _beginning(deploy_names(), incomplete)


def presets(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of the presets."""
    from gpufleet.catalog import presets as catalogue

    return _beginning(catalogue.names(), incomplete)


def gpus(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Return the GPU names for --gpu."""
    from gpufleet.catalog import gpu_models

    return _beginning(gpu_models.names(), incomplete)


def hardware(ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Return the hardware names for --as. A typed `GROUP=` stays in front of the name."""
    from gpufleet.catalog import recorded_nodes

    before, equals, typed = incomplete.rpartition("=")
    kinds = [f"{before}{equals}{name}" for name in recorded_nodes.names() if name.startswith(typed)]
    fleet = None if equals else _fleet(ctx)
    groups = [f"{group}=" for group in fleet.groups.members] if fleet else []
    return [*kinds, *_beginning(groups, incomplete)]


def setting_keys(_ctx: click.Context, _param: click.Parameter, incomplete: str) -> list[str]:
    """Return the keys of settings."""
    from gpufleet.settings import lookup

    return _beginning(lookup.all_settings(), incomplete)


def _fleet(ctx: click.Context) -> Fleet | None:
    """
    Return the fleet of the typed or default inventory, or None if the inventory has a mistake.
    """
    from gpufleet.inventory.loader import read
    from gpufleet.inventory.pyinfra_command import default_inventory, is_inventory

    # While click completes the value of an option, words of no parameter are in `ctx.args`.
    words = (ctx.params.get("inventory_file"), *(ctx.params.get("targets") or ()), *ctx.args)
    typed = next((word for word in words if word and is_inventory(word)), None)
    try:
        return read(typed or default_inventory())
    except FleetError:
        return None
