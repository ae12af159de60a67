"""NVIDIA's repository: its key, where only our own package runs look."""

from __future__ import annotations

from collections.abc import Generator

from pyinfra import host, logger
from pyinfra.api import StringCommand, deploy, operation
from pyinfra.context import ctx_state

from gpufleet import payload
from gpufleet.converge import Converge
from gpufleet.facts import PYTHON
from gpufleet.settings import Repository
from gpufleet.vendor_repository import KEYS, fingerprint, kept_path, key_path
from gpufleet.wanted import Directory, Package, Wanted

# on_node/vendor_key.py ends itself after 120 s.
KEY_SECONDS = 180


@deploy("NVIDIA's repository")
def nvidia_repository(repository: Repository) -> None:
    """
    Converge the repository's key; the roles that install from it want its `PackageSource`.

    The vendor's keyring package is not installed: it would put the vendor's repository, with a pin
    that outranks the distribution's own packages, before everything that the node's apt does.
    """
    tools = Converge(Wanted(Package("ca-certificates")))
    tools.packages(name="certificates of authorities")
    folders = Converge(
        Wanted(
            Directory("/etc/gpufleet"),
            Directory(KEYS),
            Directory("/var/lib/gpufleet/keys"),
        ),
        watch=(key_path(repository), kept_path(repository)),
    )
    folders.files(name="folder of keys")
    trusted(folders, repository, name="key", _timeout=KEY_SECONDS)


@operation()
def trusted(node: Converge, repository: Repository) -> Generator[StringCommand]:
    """
    Fetch the key, unless the one that is there came from the file that settings name by its hash.

    That file is kept, and put there after the key: with both, nothing is fetched.
    """
    seen = node.snapshot()
    if (
        seen.file(kept_path(repository)).sha256 == repository.keyring_sha256
        and seen.file(key_path(repository)).sha256
    ):
        host.noop("the repository's key is trusted")
        return
    url = f"{repository.url}/{repository.keyring}"
    executing = ctx_state.get().is_executing
    logger.info("%s%strust the key of %s", host.print_prefix, "" if executing else "would ", url)
    if executing:
        node.forget()
    program = payload.program(
        "vendor_key",
        url=url,
        sha256=repository.keyring_sha256,
        fingerprint=fingerprint(repository.keyring),
        key=key_path(repository),
        kept=kept_path(repository),
        setting="cuda.repository.keyring_sha256",
        sysroot="",
    )
    yield StringCommand(PYTHON, _stdin=program)
