"""Build a release on a node, or copy it from a different node, and remove old releases."""

from __future__ import annotations

from collections.abc import Generator

from pyinfra import host
from pyinfra.api import FunctionCommand, QuoteString, StringCommand, operation
from pyinfra.context import ctx_state

from gpufleet.artifacts.release import BUILD_SECONDS, WAIT_SECONDS, Release, build_script
from gpufleet.operations import progress_watch
from gpufleet.operations.artifact import Artifact, release_artifact
from gpufleet.operations.converge import Converge, announce
from gpufleet.operations.distribute import copy, is_copied, note_build, read_build


def provide_release(ground: Converge, build: Release) -> None:
    """
    Provide the release on the node.

    The release is built on one node of each kind, and copied to the other nodes.
    """
    artifact = release_artifact(build)
    build_release(
        ground,
        build,
        artifact,
        name=f"build release {build.id}",
        _timeout=BUILD_SECONDS + WAIT_SECONDS,
    )
    if artifact and artifact.has_other_nodes:
        copy(ground, artifact, name=f"copy release {build.id}")
        build_missing_release(
            ground,
            build,
            artifact,
            name=f"build release {build.id} where it was not copied",
            _timeout=BUILD_SECONDS + WAIT_SECONDS,
        )


@operation()
def build_release(
    node: Converge, wanted: Release, artifact: Artifact | None = None
) -> Generator[StringCommand | FunctionCommand]:
    """
    Build the release, unless it is complete or will be copied from a different node.

    When the release is complete, its files are recorded (`distribute.note_build`).
    """
    if node.snapshot().file(wanted.mark).exists:
        host.noop(f"release {wanted.id} exists")
        return
    if is_copied(artifact):
        host.noop(f"release {wanted.id} is copied from another node")
        return
    yield from _build(node, wanted)
    if artifact and artifact.has_other_nodes:
        yield FunctionCommand(note_build, (artifact,), {})


@operation()
def build_missing_release(
    node: Converge, wanted: Release, artifact: Artifact
) -> Generator[StringCommand | FunctionCommand]:
    """
    Build the release if the copy from a different node failed.

    The build is not recorded, but later runs copy it if its files are those of the recorded build.
    """
    if not ctx_state.get().is_executing or node.snapshot().file(wanted.mark).exists:
        host.noop(f"release {wanted.id} exists")
        return
    yield from _build(node, wanted)
    yield StringCommand("rm", "-rf", QuoteString(artifact.coming))
    yield FunctionCommand(read_build, (artifact,), {})


def _build(node: Converge, wanted: Release) -> Generator[StringCommand]:
    with progress_watch.show_build(wanted):
        yield StringCommand("sh", "-c", QuoteString(build_script(wanted)))
    node.forget()


@operation()
def remove_old_releases(node: Converge, build: Release, keep: int) -> Generator[StringCommand]:
    """
    Remove the oldest releases, and keep this one and `keep` others.

    Use it after the unit runs this release.
    """
    others = sorted(node.snapshot().listing(build.program.releases) - {build.id})
    if len(others) <= keep:
        host.noop(f"{len(others)} older releases")
        return
    older = f"{len(others) - keep} of {len(others)} older releases"
    announce(f"remove {older} below {build.program.releases}")
    # The date of a release's directory is when the release was completed. uv's cache is removed as
    # well. Releases share the cache's files by hard links, so otherwise no space would become free.
    script = f"""set -eu
cd {build.program.releases}
ls -1dt -- {" ".join(others)} | tail -n +{keep + 1} | while read -r old; do
    rm -rf -- "$old" "../locks/$old.txt"
done
rm -rf {build.program.cache}
"""
    yield StringCommand("sh", "-c", QuoteString(script))
    node.forget()
