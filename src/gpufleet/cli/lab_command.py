"""`gpufleet lab`: run the lab of a checkout, which is not part of the installed package."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpufleet.paths import import_from_project

if TYPE_CHECKING:
    import click

lab: click.Command = import_from_project("lab.cli", needed_by="gpufleet lab", run="`make lab`").lab
