"""Describe the artifacts that nodes may copy from each other, and their state in one run.

Border: pyinfra determines the current node and the other nodes of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from gevent.event import AsyncResult
from gevent.lock import BoundedSemaphore
from pyinfra import host
from pyinfra.api import State
from pyinfra.context import ctx_state

from gpufleet import node_paths
from gpufleet.artifacts.distribution import Kind
from gpufleet.artifacts.model_files import DOWNLOAD_SECONDS, Checkpoint, checkpoints
from gpufleet.artifacts.model_lock import Files
from gpufleet.artifacts.operator_files import release_of
from gpufleet.artifacts.release import BUILD_SECONDS, Release
from gpufleet.inventory import loader
from gpufleet.planning.stage import Stage
from gpufleet.settings.serving_settings import Distribution

T = TypeVar("T")

MANIFESTS = node_paths.MANIFESTS
"""The path on nodes of the cached manifests of trees whose files were hashed."""
COMING = ".gpufleet-coming-"
"""The prefix of the names of folders that on_node/transfer/store.py fills."""


@dataclass(frozen=True)
class Artifact:
    """
    A release, a model or a program that nodes need and can copy from each other.

    Attributes:
        what: the name in messages, such as "release 0.32.0-ab".
        verb: what a node does to make it, such as "build".
        directory: the tree of files on the nodes.
        mark: the file in the tree that marks the tree as complete.
        wanting: the nodes of the inventory that should have it, in the inventory's order.
        sharing: the nodes that may have it and may copy it to other nodes.
        seconds: the time limit of a copy.
        python: the version of Python for which it is built. "": it works with any version.
        leave_out: names at the top level of the tree that differ on each node and are not copied.
        lock: a file that is locked while the tree is read or copied. "": no file is locked.
        remove: files on nodes that are removed when the tree is complete.
        files: the hashes that a model's files must have (artifacts/model_lock.py). None: the hashes
            are not checked.
        release: the release of which it is a build. The files of a build are recorded
            (artifacts/built_releases.py).
    """

    what: str
    verb: str
    directory: str
    mark: str
    wanting: tuple[str, ...]
    sharing: tuple[str, ...]
    seconds: int
    python: str = ""
    leave_out: tuple[str, ...] = (".complete",)
    lock: str = ""
    remove: tuple[str, ...] = ()
    files: Files | None = None
    release: Release | None = None

    @property
    def has_other_nodes(self) -> bool:
        """Return whether any node other than the current node may have or need the artifact."""
        return len(self.sharing) > 1

    @property
    def coming(self) -> str:
        """Return the directory on a node in which the artifact is assembled."""
        parent, _, name = self.directory.rpartition("/")
        return f"{parent}/{COMING}{name}"


def release_artifact(wanted: Release) -> Artifact | None:
    """Return a release as an artifact, or None if this node does not share artifacts."""
    sharing = sharing_nodes()
    if host.name not in sharing:
        return None
    directories = once(ctx_state.get(), "releases", _releases)
    wanting = [name for name in sharing if wanted.directory in directories[name]]
    return Artifact(
        what=f"release {wanted.id}",
        verb="build",
        directory=wanted.directory,
        mark=wanted.mark,
        wanting=tuple(wanting),
        sharing=tuple(sharing),
        seconds=BUILD_SECONDS,
        python=wanted.source.python,
        # The records of accepted flags (operations/accept_flags.py) do not apply to other nodes.
        leave_out=(".complete", ".accepts"),
        lock=f"{wanted.program.home}/.building",
        release=wanted,
    )


def _releases() -> dict[str, set[str]]:
    """Return the release directories of each serving node."""
    return {
        name: {release_of(engine).directory for engine in each.settings.used_engines}
        for name, each in loader.current().gpu_nodes.items()
    }


def model_artifact(wanted: Checkpoint, stages: Iterable[Stage]) -> Artifact | None:
    """
    Return a model's files as an artifact, or None if this node does not share artifacts.

    `stages` are the stages of the whole plan.
    """
    sharing = sharing_nodes()
    if host.name not in sharing:
        return None
    settings = {name: each.settings for name, each in loader.current().gpu_nodes.items()}
    needing = {
        each.node
        for each in stages
        if wanted in checkpoints(settings[each.node].serving[each.model])
    }
    return Artifact(
        what=wanted.repository,
        verb="download",
        directory=wanted.directory,
        mark=wanted.mark,
        wanting=tuple(name for name in sharing if name in needing),
        sharing=tuple(sharing),
        seconds=DOWNLOAD_SECONDS,
        remove=(f"{wanted.directory}.boot", wanted.download),
    )


def sharing_nodes() -> dict[str, Distribution]:
    """Return the nodes that share artifacts, with their settings."""
    return {
        name: servers.distribution
        for name, each in loader.current().gpu_nodes.items()
        if (servers := each.settings.servers) and servers.distribution.enabled
    }


@dataclass
class ArtifactRun:
    """The state of one run of pyinfra, for all of its nodes."""

    found: dict[object, AsyncResult] = field(default_factory=dict)
    built: dict[str, dict[Kind, frozenset[str]]] = field(default_factory=dict)
    """The digests of the artifacts that this run has built, by directory and kind of node."""
    told: set[str] = field(default_factory=set)
    one_at_a_time: BoundedSemaphore = field(default_factory=BoundedSemaphore)


_RUNS: WeakKeyDictionary[State, ArtifactRun] = WeakKeyDictionary()


def artifact_run(state: State) -> ArtifactRun:
    return _RUNS.setdefault(state, ArtifactRun())


def once(state: State, key: object, work: Callable[[], T]) -> T:
    """
    Call `work` for the first caller with a key. Later callers with this key get the same result.
    """
    run = artifact_run(state)
    found = run.found.get(key)
    if found is None:
        # No other greenlet runs between the look-up and the assignment, so this is atomic.
        found = run.found[key] = AsyncResult()
        try:
            found.set(work())
        except BaseException as error:
            found.set_exception(error)
            raise
    result: T = found.get()
    return result


def tree_parameters(artifact: Artifact) -> dict[str, Any]:
    """Return the parameters that describe an artifact to the programs on nodes."""
    return {
        "directory": artifact.directory,
        "mark": artifact.mark,
        "leave_out": artifact.leave_out,
        "lock": artifact.lock,
        "manifests": MANIFESTS,
        "python": artifact.python,
        "seconds": artifact.seconds,
    }
