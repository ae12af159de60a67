"""Build the pyinfra command line of a deploy: deploy file, `config.py`, inventory.

If the current directory has its own `deploys/` and `config.py`, for example in a checkout, these
are used. Otherwise gpufleet's own files are used. This module does not import pyinfra at load time.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from gpufleet.errors import FleetError
from gpufleet.formatting import suggestion
from gpufleet.paths import PROJECT, shipped_deploys

VARIABLE = "GPUFLEET_INVENTORY"
"""Environment variable with the default inventory file."""


def deploy_names() -> list[str]:
    """Return the names of all deploys, in this directory and shipped with gpufleet."""
    return sorted({*(path.stem for path in _here().glob("*.py")), *shipped_deploys()})


def deploy_file(name: str) -> str:
    """
    Return the file of a deploy: `deploys/NAME.py` of this directory if it exists, or else
    gpufleet's.

    Raises `FleetError` for an unknown name. The message lists the known names.
    """
    for folder in (_here(), _shipped()):
        if (found := folder / f"{name}.py").is_file():
            return str(found)
    known = deploy_names()
    raise FleetError(
        f"there is no deploy {name!r}; the deploys are {', '.join(known)}{suggestion(name, known)}"
    )


def pyinfra_command(deploy: str, *words: str) -> list[str]:
    """
    Return the command that runs pyinfra for a deploy.

    `words` are pyinfra's options and the inventory, as typed. The inventory is the first argument.
    """
    own = Path("config.py").is_file()
    config = () if own else ("--config", str(PROJECT / "config.py"))
    return [sys.executable, "-m", "pyinfra", *config, *words, deploy_file(deploy)]


def is_inventory(word: str) -> bool:
    """Return whether a word names an inventory file, not a node, a replica or a deploy."""
    return word.endswith(".py") or "/" in word or Path(word).is_file()


def names_inventory(words: Sequence[str]) -> bool:
    """Return whether pyinfra's arguments name an inventory. Values of options do not count."""
    if all(word.startswith("-") for word in words):
        return False
    if not words[0].startswith("-"):
        return True
    # An option may take the next word as its value, so use pyinfra's own parser.
    from click import Context
    from pyinfra_cli.cli import cli

    typed, _, _ = cli.make_parser(Context(cli)).parse_args(list(words))
    return isinstance(typed.get("inventory"), str)


def default_inventory() -> str:
    """
    Return the default inventory file.

    This is the value of `GPUFLEET_INVENTORY`, or else the only file in `inventories/`. Raises
    `FleetError` if `inventories/` has no file or more than one.
    """
    if named := os.environ.get(VARIABLE):
        return named
    found = sorted(str(path) for path in Path("inventories").glob("*.py"))
    if len(found) == 1:
        return found[0]
    there = (
        f"there are {', '.join(found)}"
        if found
        else "the current directory has no inventories/*.py"
    )
    raise FleetError(
        f"INVENTORY is missing, and {there}: write the name of an inventory file, or set "
        f"{VARIABLE}" + ("" if found else "; `gpufleet init DIR HOST...` creates an inventory")
    )


def _here() -> Path:
    return Path("deploys")


def _shipped() -> Path:
    return PROJECT / "deploys"
