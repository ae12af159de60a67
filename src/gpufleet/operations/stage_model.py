"""Download the files of a model to a node, or copy them from a different node."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass, replace

from pyinfra import host
from pyinfra.api import QuoteString, StringCommand, operation
from pyinfra.context import ctx_state

from gpufleet.artifacts import model_files, model_lock
from gpufleet.artifacts.model_files import MODELS, AdapterCopy, Checkpoint
from gpufleet.artifacts.model_lock import Files
from gpufleet.artifacts.operator_files import release_of
from gpufleet.operations import progress_watch
from gpufleet.operations.artifact import Artifact
from gpufleet.operations.converge import Converge, announce
from gpufleet.operations.distribute import copy, is_copied
from gpufleet.remote import payload
from gpufleet.remote.facts import PYTHON
from gpufleet.settings.serving_settings import EngineSettings


@dataclass(frozen=True)
class Download:
    """
    The download of a model's files from outside the fleet.

    Attributes:
        wanted: the model.
        servers: the settings of the node.
        release_directory: the directory of the release whose Hub client downloads the files.
        files: the required hashes of the files. None: no lock file has these hashes.
    """

    wanted: Checkpoint
    servers: EngineSettings
    release_directory: str
    files: Files | None


def provide_model(
    ground: Converge, wanted: Checkpoint, servers: EngineSettings, artifact: Artifact | None
) -> None:
    """
    Provide the files of a model on the node.

    They are downloaded once, and copied to the other nodes. If the lock file of models has hashes
    of the files, the hashes must match.
    """
    files = model_lock.locked_files(wanted, servers)
    artifact = artifact and replace(artifact, files=files)
    download = Download(wanted, servers, release_of(servers).directory, files)
    stage_model(
        ground,
        download,
        artifact,
        name=f"stage {wanted.repository}",
        _timeout=model_files.DOWNLOAD_SECONDS,
    )
    if artifact and artifact.has_other_nodes:
        copy(ground, artifact, name=f"copy {wanted.repository}")
        stage_missing_model(
            ground,
            download,
            artifact,
            name=f"stage {wanted.repository} where it was not copied",
            _timeout=model_files.DOWNLOAD_SECONDS,
        )


@operation()
def stage_model(
    node: Converge, download: Download, artifact: Artifact | None = None
) -> Generator[StringCommand]:
    """
    Download the files of a model, unless the node has them or will copy them from a different node.
    """
    wanted = download.wanted
    if node.snapshot().file(wanted.mark).exists:
        host.noop(f"{wanted.repository} exists")
        return
    if is_copied(artifact):
        host.noop(f"{wanted.repository} is copied from another node")
        return
    yield from _download(node, download)


@operation()
def stage_missing_model(
    node: Converge, download: Download, artifact: Artifact
) -> Generator[StringCommand]:
    """Download the files of a model if the copy from a different node failed."""
    wanted = download.wanted
    if not ctx_state.get().is_executing or node.snapshot().file(wanted.mark).exists:
        host.noop(f"{wanted.repository} exists")
        return
    yield from _download(node, download)
    yield StringCommand("rm", "-rf", QuoteString(artifact.coming))


@operation()
def copy_adapter(node: Converge, wanted: AdapterCopy) -> Generator[StringCommand]:
    """Copy an adapter from a path on the node if its weights have the hash in the settings."""
    if node.snapshot().file(wanted.mark).exists:
        host.noop(f"{wanted.source} is copied")
        return
    announce(f"copy the adapter {wanted.source} to {wanted.directory}")
    yield _placing(
        "copy",
        source=wanted.source,
        sha256=wanted.sha256,
        directory=wanted.directory,
        mark=wanted.mark,
    )
    node.forget()


@operation()
def chown_models(node: Converge, servers: EngineSettings) -> Generator[StringCommand]:
    """
    Make root the owner of models that the service user owns. `node` must watch the models' folder.
    """
    found = node.snapshot().file(MODELS)
    if not found.exists or (found.user, found.group) == ("root", "root"):
        host.noop(f"{MODELS} belongs to root")
        return
    announce(f"make root the owner of {MODELS} and its contents, instead of {servers.user}")
    yield _placing("own", directory=MODELS)
    node.forget()


def _placing(action: str, **given: object) -> StringCommand:
    program = payload.program("transfer/place_model", action=action, **given)
    return StringCommand(PYTHON, _stdin=program, _timeout=model_files.PLACE_SECONDS)


def _download(node: Converge, download: Download) -> Generator[StringCommand]:
    wanted, servers = download.wanted, download.servers
    script = model_files.download_script(wanted, servers, download.release_directory)
    place = {"directory": wanted.directory, "mark": wanted.mark, "files": download.files}
    yield _placing("begin", user=servers.user, **place)
    with progress_watch.show_download(wanted, servers):
        yield StringCommand("sh", "-c", QuoteString(script))
    yield _placing("place", **place)
    node.forget()
