"""Where the checkout lies, and how its folders outside the package are imported."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType

from gpufleet.errors import FleetError

CHECKOUT = Path(__file__).resolve().parents[2]
"""The project's directory; it does not depend on the working directory."""


def import_from_checkout(module: str, *, needed_by: str, run: str) -> ModuleType:
    """
    Import a module of a folder of the checkout that is not part of the installed package.

    `needed_by` is the command that needs it, and `run` what to run instead, for the sentence of the
    `FleetError` that is raised where there is no such folder.
    """
    folder = module.partition(".")[0]
    if not (CHECKOUT / folder).is_dir():
        raise FleetError(
            f"`{needed_by}` runs from a checkout of the project, whose directory {folder}/ is not "
            f"part of the installed package: clone it and run {run} there"
        )
    if str(CHECKOUT) not in sys.path:
        sys.path.insert(0, str(CHECKOUT))
    return import_module(module)
