"""Load modules into the running kernel. Files declare the modules that are loaded at boot."""

from __future__ import annotations

from collections.abc import Generator, Sequence

from pyinfra import host, logger
from pyinfra.api import FunctionCommand, Host, QuoteString, State, StringCommand, operation
from pyinfra.context import ctx_state
from pyinfra.facts.server import KernelModules

from gpufleet.gpu_software import rdma
from gpufleet.operations.converge import Converge, announce
from gpufleet.settings.gpu_settings import Rdma

# Loading a module and its dependencies takes a second. A module that waits for the firmware of an
# adapter needs a minute.
LOADED = "/sys/module"
MODPROBE_SECONDS = 120


@operation()
def load_rdma_modules(node: Converge, wanted: Rdma) -> Generator[StringCommand | FunctionCommand]:
    """Load the modules that the running kernel lacks."""
    missing = rdma.missing_modules(wanted, node.snapshot().listing(LOADED))
    if not missing:
        host.noop("the modules are loaded")
        return
    for module in missing:
        announce(f"load {module}")
    if ctx_state.get().is_executing:
        node.forget()
    yield FunctionCommand(_load, (missing,), {})


def _load(state: State, host: Host, modules: tuple[str, ...]) -> bool:  # noqa: ARG001
    """Load each module and log failures. Return whether all modules were loaded."""
    well = True
    for module in modules:
        done, output = host.run_shell_command(
            StringCommand("modprobe", "--", module), _timeout=MODPROBE_SECONDS
        )
        if not done:
            well = False
            said = " ".join(output.stderr_lines) or "modprobe printed nothing"
            logger.error("%s%s", host.print_prefix, rdma.load_error(module, said))
    return well


@operation()
def load_modules(modules: Sequence[str]) -> Generator[StringCommand]:
    """Load the modules that are needed to reach NVSwitches. They are also loaded at each boot."""
    found = host.get_fact(KernelModules)
    if missing := [name for name in modules if name not in found]:
        announce(f"load {' '.join(missing)}")
        yield StringCommand("modprobe", "--all", *(QuoteString(name) for name in missing))
        return
    host.noop("the modules are loaded")
