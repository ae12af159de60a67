"""Fetch the key of NVIDIA's repository to a node."""

from __future__ import annotations

from collections.abc import Generator

from pyinfra import host
from pyinfra.api import StringCommand, operation
from pyinfra.context import ctx_state

from gpufleet.gpu_software.repository import fingerprint, key_path, stored_key_path
from gpufleet.operations.converge import Converge, announce
from gpufleet.remote import payload
from gpufleet.remote.facts import PYTHON
from gpufleet.settings.cuda_settings import Repository

# The program on_node/converge/repository_key.py ends itself after 120 s.
KEY_SECONDS = 180


@operation()
def trust_repository_key(node: Converge, repository: Repository) -> Generator[StringCommand]:
    """
    Fetch the key, unless the installed key comes from the file whose hash is in the settings.

    The node stores that file after it has written the key. If both exist, nothing is fetched.
    """
    seen = node.snapshot()
    if (
        seen.file(stored_key_path(repository)).sha256 == repository.keyring_sha256
        and seen.file(key_path(repository)).sha256
    ):
        host.noop("the repository's key is trusted")
        return
    url = f"{repository.url}/{repository.keyring}"
    announce(f"trust the key of {url}")
    if ctx_state.get().is_executing:
        node.forget()
    program = payload.program(
        "converge/repository_key",
        url=url,
        sha256=repository.keyring_sha256,
        fingerprint=fingerprint(repository.keyring),
        key=key_path(repository),
        kept=stored_key_path(repository),
        setting="cuda.repository.keyring_sha256",
        sysroot="",
    )
    yield StringCommand(PYTHON, _stdin=program)
