"""
Install programs from their publishers' archives, and remove old versions when the new one runs.
"""

from __future__ import annotations

from collections.abc import Generator

from pyinfra import host
from pyinfra.api import QuoteString, StringCommand, operation
from pyinfra.context import ctx_state

from gpufleet.artifacts.program_archive import ProgramArchive, install_script
from gpufleet.converge.desired import DesiredState, Listing
from gpufleet.operations.converge import Converge, announce, log_dry_run


@operation()
def install_archive(node: Converge, wanted: ProgramArchive) -> Generator[StringCommand]:
    """
    Download the program if it is missing.

    `node` must watch `wanted.directory`. Call it with `_timeout=program_archive.DOWNLOAD_SECONDS`.
    """
    if node.snapshot().file(wanted.directory).exists:
        host.noop(f"{wanted.name} {wanted.version} exists")
        return
    if not ctx_state.get().is_executing:
        log_dry_run(f"download {wanted.archive.url}")
    yield StringCommand("sh", "-c", QuoteString(install_script(wanted)))
    node.forget()


def installed_versions(wanted: ProgramArchive) -> Converge:
    """Return the versions of a program on the node, for `remove_other_versions`."""
    return Converge(DesiredState(Listing(wanted.all_versions)))


@operation()
def remove_other_versions(node: Converge, wanted: ProgramArchive) -> Generator[StringCommand]:
    """Remove other versions of the program. Use it after the program's unit runs this version."""
    old = wanted.other_versions(node.snapshot().listing(wanted.all_versions))
    if not old:
        host.noop(f"no other version of {wanted.name} exists")
        return
    for name in old:
        announce(f"remove {wanted.all_versions}/{name}")
    paths = (QuoteString(f"{wanted.all_versions}/{name}") for name in old)
    yield StringCommand("rm", "-rf", "--", *paths)
    node.forget()
