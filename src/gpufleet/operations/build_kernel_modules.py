"""Make sure that every kernel of a node boots with the driver's modules and without nouveau."""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Mapping
from typing import Any, TypeAlias

from pyinfra import host, logger
from pyinfra.api import FunctionCommand, Host, QuoteString, State, StringCommand, operation
from pyinfra.context import ctx_host, ctx_state

from gpufleet.converge.desired import File
from gpufleet.gpu_software import kernel_modules
from gpufleet.gpu_software.driver_configuration import INITRAMFS, MODPROBE
from gpufleet.operations.converge import Converge, announce, refuse
from gpufleet.remote import payload
from gpufleet.remote.query import query
from gpufleet.sanitize import printable

Commands: TypeAlias = Generator[StringCommand | FunctionCommand]

# modinfo unpacks a module of each kernel, which takes seconds. A node that swaps needs more time.
LOOK_SECONDS = 120

# on_node/gpu_software/kernel_modules.py lets DKMS run up to 1800 s for each kernel. A node may have
# several old kernels.
BUILD_SECONDS = 4 * 1800

# Building one image takes 10 to 30 s.
INITRAMFS_SECONDS = 600


@operation()
def rebuild_initramfs(settings: Converge) -> Commands:
    """
    Rebuild every initramfs once, without nouveau.

    An initramfs with nouveau would load it before the root file system is mounted.
    """
    wanted_file = next(file for file in settings.wanted.values_of(File) if file.path == MODPROBE)
    done = wanted_file.sha256
    if settings.snapshot().file(INITRAMFS).sha256 == hashlib.sha256(done.encode()).hexdigest():
        host.noop("no initramfs contains nouveau")
        return
    announce(printable("rebuild every initramfs without nouveau"))
    if ctx_state.get().is_executing:
        settings.forget()
    yield StringCommand(
        "sh",
        "-c",
        QuoteString(
            "set -e; if command -v update-initramfs >/dev/null; then update-initramfs -u -k all; "
            "elif command -v dracut >/dev/null; then dracut --regenerate-all --force; "
            # If neither tool exists, the kernel boots without an initramfs.
            "fi >&2; "
            f"mkdir -p {INITRAMFS.rpartition('/')[0]}; printf %s {done} > {INITRAMFS}"
        ),
    )


@operation()
def build_kernel_modules(driver: str) -> Commands:
    """
    Let DKMS build missing modules after package changes.

    Whether this succeeded is judged by the files on disk.
    """
    seen = _ask("look")
    if seen["error"]:
        yield from refuse((seen["error"],))
        return
    lacks = kernel_modules.kernels_without_module(seen, driver)
    if lacks:
        announce(printable(f"build driver {driver} for kernel {', '.join(lacks)}"))
        yield FunctionCommand(_build, (driver, lacks), {})
    elif found := kernel_modules.module_problems(seen, driver):
        yield from refuse(found)
    else:
        host.noop(f"every kernel has a module of driver {driver}")


def _build(state: State, host: Host, driver: str, kernels: tuple[str, ...]) -> bool:  # noqa: ARG001
    seen = _ask("build", kernels=list(kernels), version=driver)
    found = (seen["error"],) if seen["error"] else kernel_modules.module_problems(seen, driver)
    for problem in found:
        logger.error("%s%s", host.print_prefix, printable(problem))
    return not found


def _ask(action: str, **parameters: Any) -> Mapping[str, Any]:
    """
    Return the document of on_node/gpu_software/kernel_modules.py.

    If there is no document, `error` has the reason.
    """
    program = payload.program(
        "gpu_software/kernel_modules", action=action, sysroot="", **parameters
    )
    limit = LOOK_SECONDS if action == "look" else BUILD_SECONDS
    node = ctx_host.get()
    answer = query(ctx_state.get(), [node], lambda _: program, limit, "the query of its modules")
    found = answer[node.name]
    return {"error": found} if isinstance(found, str) else found
