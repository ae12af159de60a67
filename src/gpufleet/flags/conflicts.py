"""Find flags that are valid separately, but that vLLM refuses together at its start.  Pure.

Contract: this module finds only conflicts that follow from the flags themselves. Rules that depend
on the model, the GPUs or the node are in other modules, because they need more than a command line.
Each rule states where vLLM's source raises the error, and applies from the first release whose
source has this code.
"""

from __future__ import annotations

from collections.abc import Iterator

from gpufleet.flags.conflict_rule import Conflict, Settings
from gpufleet.flags.option_conflicts import OPTIONS
from gpufleet.flags.parallel_conflicts import PARALLEL
from gpufleet.flags.schema import sort_key
from gpufleet.flags.server_conflicts import SERVER

RULES = (*PARALLEL, *OPTIONS, *SERVER)
"""All rules on flags. The plan and the node check conflicts that depend on a model or a GPU."""


def conflicts(settings: Settings) -> Iterator[Conflict]:
    """Yield the rules that the settings break."""
    at = sort_key(settings.version)
    for rule in RULES:
        in_force = sort_key(rule.since) <= at and (rule.until is None or at < sort_key(rule.until))
        if in_force and settings.has(*rule.flags) and rule.broken(settings):
            yield rule
