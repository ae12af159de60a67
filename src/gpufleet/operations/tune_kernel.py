"""Set parameters of the running kernel for serving."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any

from pyinfra import host, logger
from pyinfra.api import FunctionCommand, Host, State, StringCommand, operation
from pyinfra.context import ctx_state

from gpufleet.gpu_software import kernel_tuning
from gpufleet.gpu_software.kernel_tuning import KernelSetting
from gpufleet.operations.converge import announce, refuse
from gpufleet.remote import payload
from gpufleet.remote.facts import KernelSettings

# The program reads and writes a few files. If a node needs more time, it hangs.
SECONDS = 60

Commands = Generator[StringCommand | FunctionCommand]


@operation()
def tune_kernel(settings: tuple[KernelSetting, ...]) -> Commands:
    """Set the kernel parameters that differ, and read them again to check them."""
    seen = ask_kernel(settings)
    if not seen:
        yield from refuse(("the kernel's settings could not be read",))
        return
    if found := kernel_tuning.problems(settings, seen):
        yield from refuse(found)
        return
    if ctx_state.get().is_executing:
        for remark in kernel_tuning.remarks(settings, seen):
            logger.warning("%s%s", host.print_prefix, remark)
    changes = kernel_tuning.changes(settings, seen)
    if not changes:
        host.noop("the kernel already has these settings")
        return
    for change in changes:
        announce(change)
    yield FunctionCommand(_apply, (settings,), {})


def ask_kernel(settings: tuple[KernelSetting, ...], *, apply: bool = False) -> dict[str, Any]:
    """Return the document of `on_node/converge/sysctl.py`, or {} if there was no answer."""
    program = payload.program(
        "converge/sysctl",
        wanted={each.name: [each.value, each.least] for each in settings},
        file=kernel_tuning.SYSCTL,
        apply=apply,
    )
    found: dict[str, Any] = host.get_fact(KernelSettings, _stdin=program, _timeout=SECONDS)
    return found or {}


def _apply(state: State, host: Host, settings: tuple[KernelSetting, ...]) -> bool:  # noqa: ARG001
    seen = ask_kernel(settings, apply=True)
    found = kernel_tuning.problems(settings, seen) if seen else ("the node did not answer",)
    for problem in found:
        logger.error("%s%s", host.print_prefix, problem)
    return not found
