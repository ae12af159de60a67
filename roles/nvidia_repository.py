"""NVIDIA's repository: its key, where only our own package runs look."""

from __future__ import annotations

from collections.abc import Generator

from pyinfra import host, logger
from pyinfra.api import StringCommand, deploy, operation
from pyinfra.context import ctx_state

from gpufleet.converge.desired import Absent, Directory, NoOtherFiles, Package, Wanted
from gpufleet.gpu_software.repository import KEYS, fingerprint, kept_path, key_path
from gpufleet.operations.converge import Converge
from gpufleet.remote import payload
from gpufleet.remote.facts import PYTHON
from gpufleet.settings.node_settings import Repository

# Where the node's own apt and dnf look. What earlier releases of gpufleet had put there, and the
# source and the pin of the vendor's keyring package: apt refuses two keys for one address.
FORMER = (
    "/etc/apt/sources.list.d/gpufleet-cuda.sources",
    "/etc/apt/preferences.d/00-gpufleet-cuda.pref",
    "/etc/apt/preferences.d/cuda-repository-pin-600",
    "/var/lib/gpufleet/cuda-keyring.deb",
)
PACKAGED = ("/etc/apt/sources.list.d/cuda-*.list", "/etc/yum.repos.d/cuda-*.repo")

# on_node/converge/repository_key.py ends itself after 120 s.
KEY_SECONDS = 180


@deploy("NVIDIA's repository")
def nvidia_repository(repository: Repository) -> None:
    """
    Converge the repository's key; the roles that install from it want its `PackageSource`.

    The vendor's keyring package is not installed: it would put the vendor's repository, with a pin
    that outranks the distribution's own packages, before everything that the node's apt does.
    """
    former = Converge(Wanted(*map(Absent, FORMER), *map(NoOtherFiles, PACKAGED)))
    former.files(name="nothing of the vendor's in the node's own package manager")
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
        "converge/repository_key",
        url=url,
        sha256=repository.keyring_sha256,
        fingerprint=fingerprint(repository.keyring),
        key=key_path(repository),
        kept=kept_path(repository),
        setting="cuda.repository.keyring_sha256",
        sysroot="",
    )
    yield StringCommand(PYTHON, _stdin=program)
