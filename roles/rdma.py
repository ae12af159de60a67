"""Let GPUs and network adapters of a node reach each other's memory."""

from __future__ import annotations

from collections.abc import Generator

from pyinfra import host, logger
from pyinfra.api import FunctionCommand, Host, State, StringCommand, deploy, operation
from pyinfra.context import ctx_state

from gpufleet.converge.desired import Listing, Wanted
from gpufleet.gpu_software import rdma as ways
from gpufleet.operations.converge import Converge
from gpufleet.settings.gpu_settings import Rdma

MODULES = "/sys/module"
# A module and what it needs: a second; one that waits for an adapter's firmware, a minute.
SECONDS = 120


@deploy("RDMA")
def rdma(wanted: Rdma | None, distribution: str) -> None:
    """Converge packages and files, and load the modules; None: our files are gone."""
    node = Converge(ways.wanted(wanted, distribution))
    if wanted is None:
        node.files(name="no files")
        return
    node.packages(name="packages")
    node.files(name="modules at boot, limits")
    loaded(Converge(Wanted(Listing(MODULES))), wanted, name="modules", _timeout=SECONDS)


@operation()
def loaded(node: Converge, wanted: Rdma) -> Generator[StringCommand | FunctionCommand]:
    """Load the modules that the running kernel lacks."""
    missing = ways.missing(wanted, node.snapshot().listing(MODULES))
    if not missing:
        host.noop("the modules are loaded")
        return
    executing = ctx_state.get().is_executing
    for module in missing:
        logger.info("%s%sload %s", host.print_prefix, "" if executing else "would ", module)
    if executing:
        node.forget()
    yield FunctionCommand(_load, (missing,), {})


def _load(state: State, host: Host, modules: tuple[str, ...]) -> bool:  # noqa: ARG001
    """Load each; say of every one that could not be."""
    well = True
    for module in modules:
        done, output = host.run_shell_command(
            StringCommand("modprobe", "--", module), _timeout=SECONDS
        )
        if not done:
            well = False
            said = " ".join(output.stderr_lines) or "modprobe says nothing"
            logger.error("%s%s", host.print_prefix, ways.unloadable(module, said))
    return well
