"""Programs of their publishers' own archives: brought before they run, old ones removed after."""

from __future__ import annotations

from collections.abc import Generator

from pyinfra import host, logger
from pyinfra.api import QuoteString, StringCommand, operation
from pyinfra.context import ctx_state

from gpufleet.artifacts.program_archive import Archived, bring_script
from gpufleet.converge.desired import Listing, Wanted
from gpufleet.operations.converge import Converge


@operation()
def brought(node: Converge, wanted: Archived) -> Generator[StringCommand]:
    """
    Download the program, unless it is there.

    `node` watches `wanted.directory`; give `_timeout=archived.DOWNLOAD_SECONDS`.
    """
    if node.snapshot().file(wanted.directory).exists:
        host.noop(f"{wanted.name} {wanted.version} is there")
        return
    if not ctx_state.get().is_executing:
        logger.info("%swould download %s", host.print_prefix, wanted.archive.url)
    yield StringCommand("sh", "-c", QuoteString(bring_script(wanted)))
    node.forget()


def versions(wanted: Archived) -> Converge:
    """Return what `only_this` takes: the versions of a program that are on the node."""
    return Converge(Wanted(Listing(wanted.all_versions)))


@operation()
def only_this(node: Converge, wanted: Archived) -> Generator[StringCommand]:
    """Remove other versions of the program, once its unit runs this one."""
    old = wanted.others(node.snapshot().listing(wanted.all_versions))
    if not old:
        host.noop(f"no other version of {wanted.name}")
        return
    executing = ctx_state.get().is_executing
    for name in old:
        logger.info(
            "%s%sremove %s/%s",
            host.print_prefix,
            "" if executing else "would ",
            wanted.all_versions,
            name,
        )
    paths = (QuoteString(f"{wanted.all_versions}/{name}") for name in old)
    yield StringCommand("rm", "-rf", "--", *paths)
    node.forget()
