"""Represent the observed state of a node, with the queries to the node and its answers.

Pure. `questions(wanted)` lists the facts that are needed. `on_node/converge/snapshot.py` reads
these facts on the node, and a `Snapshot` contains the answers. An answer is a value, None for "does
not exist", or `Unknown` for "could not be read". Callers must treat None and `Unknown` differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

from gpufleet.converge.desired import (
    Absent,
    DesiredState,
    Directory,
    File,
    Group,
    Line,
    Link,
    Listing,
    Lockstep,
    ModuleStream,
    NoOtherFiles,
    NoOtherUnits,
    NoPackage,
    Package,
    Unit,
    UnitGone,
    User,
    unit_of,
)

SCHEMA = 1
# The dnf plugin that implements holds. dnf itself has no holds.
VERSIONLOCK = "python3-dnf-plugin-versionlock"

Question: TypeAlias = tuple[str, ...]
"""
A kind of query of on_node/converge/snapshot.py, with its arguments, such as ("file", "/etc/hosts").
"""


@dataclass(frozen=True)
class Unknown:
    """A value that could not be read, with the reason that the node reported."""

    reason: str


@dataclass(frozen=True)
class FileState:
    """
    The file, directory or link at a path.

    Attributes:
        kind: "file", "directory", "link", "special file", "absent", or "unknown" if it could not be
            read.
        user, group: the names of the owner, or the numbers if the node has no names for them.
        mode: the permission bits.
        sha256: the hash of the file's content. For a secret, it is known only if it equals a hash
            in the query.
        target: the target of a link.
        error: why the state is unknown.
    """

    kind: str = "absent"
    user: str = ""
    group: str = ""
    mode: int = 0
    sha256: str = ""
    target: str = ""
    error: str = ""

    @property
    def exists(self) -> bool:
        """
        Return whether the path exists.

        An unknown path counts as existing, so that it is not overwritten.
        """
        return self.kind != "absent"


@dataclass(frozen=True)
class PackageState:
    """
    A package of which at least some files are on the node.

    `installed` is True if the package is completely installed and configured. `held` is True if
    apt's hold or dnf's versionlock is set.
    """

    version: str
    installed: bool
    held: bool


@dataclass(frozen=True)
class UserState:
    """An account. `group` is the primary group, and `groups` has all groups."""

    home: str
    shell: str
    group: str
    groups: frozenset[str]


@dataclass(frozen=True)
class UnitState:
    """
    A unit's state in systemd (org.freedesktop.systemd1(5)) and on disk.

    Attributes:
        load: LoadState: "loaded", "not-found", "masked", "bad-setting" ...
        active, sub: ActiveState and SubState.
        file_state: UnitFileState: "enabled", "disabled", "static" ..., "" without a unit file.
        needs_reload: the definition on disk is newer than the definition that systemd has loaded.
        fragment: the path of the unit file that systemd has loaded, or "".
        restarts: how often systemd has restarted the unit by itself.
        has_file: there is a unit file in /etc/systemd/system.
        on_disk: there is a unit file or a drop-in directory in /etc/systemd/system.
        started: the fingerprint with which the process was started, or None if none was recorded.
    """

    load: str = "not-found"
    active: str = "inactive"
    sub: str = "dead"
    file_state: str = ""
    needs_reload: bool = False
    fragment: str = ""
    restarts: int = 0
    has_file: bool = False
    on_disk: bool = False
    started: str | None = None

    @property
    def is_up(self) -> bool:
        """
        Return whether the unit runs or is starting.

        A unit in "auto-restart" has ended and waits for its next start, so it is not running.
        """
        if self.active == "activating":
            return self.sub not in {"auto-restart", "auto-restart-queued"}
        return self.active in {"active", "reloading", "refreshing"}


@dataclass(frozen=True)
class Snapshot:
    """The state of one node at one moment. Facts that were not queried are `Unknown`."""

    files: Mapping[str, FileState | None] = field(default_factory=dict)
    lines: Mapping[str, frozenset[str] | Unknown] = field(default_factory=dict)
    users: Mapping[str, UserState | Unknown | None] = field(default_factory=dict)
    groups: Mapping[str, int | Unknown | None] = field(default_factory=dict)
    packages: Mapping[str, PackageState | Unknown | None] = field(default_factory=dict)
    units: Mapping[str, UnitState | Unknown] = field(default_factory=dict)
    units_like: Mapping[str, frozenset[str] | Unknown] = field(default_factory=dict)
    files_like: Mapping[str, frozenset[str] | Unknown] = field(default_factory=dict)
    listings: Mapping[str, frozenset[str] | Unknown | None] = field(default_factory=dict)
    package_manager: Literal["apt", "dnf"] | Unknown = "apt"
    packages_like: Mapping[str, frozenset[str] | Unknown] = field(default_factory=dict)
    streams: Mapping[str, str | Unknown | None] = field(default_factory=dict)
    dpkg_unfinished: frozenset[str] | Unknown = frozenset()
    leftovers: frozenset[str] | Unknown = frozenset()
    missed: str = "this part was not queried"

    def file(self, path: str) -> FileState:
        """Return the state of a path."""
        found = self.files.get(path, FileState("unknown", error=self.missed))
        return found or FileState()

    def package(self, name: str) -> PackageState | None:
        """
        Return a package that is fully installed, or None if it is missing, unfinished or unknown.
        """
        found = self.packages.get(name)
        return found if isinstance(found, PackageState) and found.installed else None

    def unit(self, name: str) -> UnitState | Unknown:
        """Return a unit's state. It is `Unknown` if the unit was not queried."""
        return self.units.get(name, Unknown(self.missed))

    def listing(self, path: str) -> frozenset[str]:
        """
        Return the names in a queried directory.

        The result is empty if the directory does not exist.
        """
        found = self.listings.get(path)
        return found if isinstance(found, frozenset) else frozenset()


def questions(wanted: DesiredState) -> frozenset[Question]:
    """Return all queries that are needed to compare a node with `wanted`."""
    asked: set[Question] = set()
    for value in wanted:
        match value:
            case Package() | NoPackage() | Lockstep() | ModuleStream():
                asked |= _package_questions(value)
            case Group(name):
                asked.add(("group", name))
            case User(name):
                asked.add(("user", name))
            case File(path, secret=True):
                # The hash is sent to the node, and the node only answers whether the file has this
                # hash.
                asked.add(("secret", path, value.sha256))
            case File(path) | Directory(path) | Link(path) | Absent(path):
                asked.add(("file", path))
            case NoOtherFiles(pattern):
                asked.add(("files like", pattern))
            case Listing(path):
                asked.add(("listing", path))
            case Line(path, line):
                asked.add(("line", path, line))
            case Unit(name) | UnitGone(name):
                asked.add(("unit", name))
            case NoOtherUnits(pattern):
                asked.add(("units like", pattern))
        if isinstance(value, File | Link | Absent) and (unit := unit_of(value.path)):
            asked.add(("unit", unit))
    return frozenset(asked)


def _package_questions(value: Package | NoPackage | Lockstep | ModuleStream) -> set[Question]:
    match value:
        case Package(name):
            return {("package", name)} | ({("package", VERSIONLOCK)} if value.hold else set())
        case NoPackage(pattern):
            return {("packages like", pattern)}
        case Lockstep(names):
            return {("package", name) for name in names}
        case ModuleStream(name):
            return {("stream", name)}


def path_questions(paths: Iterable[str]) -> frozenset[Question]:
    """Return the queries for paths that a role does not declare but needs for a decision."""
    return frozenset(("file", path) for path in paths)


def from_document(document: Mapping[str, Any], asked: Iterable[Question]) -> Snapshot:
    """
    Return the snapshot from the document of on_node/converge/snapshot.py.

    If the document does not have the right schema, everything in the snapshot is unknown.
    """
    if document.get("schema") != SCHEMA:
        reason = "the node returned no snapshot"
        unknown = Unknown(reason)
        return Snapshot(
            missed=reason, package_manager=unknown, dpkg_unfinished=unknown, leftovers=unknown
        )
    files = document["files"]
    return Snapshot(
        files={path: _file_state(path, found, asked) for path, found in files.items()},
        lines=_each(document["lines"], frozenset),
        users=_each(
            document["users"],
            lambda found: UserState(**{**found, "groups": frozenset(found["groups"])}),
        ),
        groups=_each(document["groups"], int),
        packages=_each(document["packages"], lambda found: PackageState(**found)),
        units=_each(document["units"], lambda found: UnitState(**found)),
        units_like=_each(document["units_like"], frozenset),
        files_like=_each(document["files_like"], frozenset),
        listings=_each(document["listings"], frozenset),
        package_manager=_one(document["package_manager"], lambda found: found),
        packages_like=_each(document["packages_like"], frozenset),
        streams=_each(document["streams"], str),
        dpkg_unfinished=_one(document["dpkg_unfinished"], frozenset),
        leftovers=_one(document["leftovers"], frozenset),
    )


def _file_state(
    path: str, found: dict[str, Any] | None, asked: Iterable[Question]
) -> FileState | None:
    if found is None:
        return None
    known = dict(found)
    if "error" in known:
        return FileState("unknown", error=known["error"])
    if "secret" in known:
        # The node did not print the hash. It printed the index of the hash among the requested
        # hashes.
        hashes = sorted(question[2] for question in asked if question[:2] == ("secret", path))
        place = known.pop("secret")
        if place >= len(hashes):
            return FileState("unknown", error="the node returned a hash that was not requested")
        known["sha256"] = hashes[place]
    return FileState(**known)


def _one(found: Any, make: Callable[[Any], Any]) -> Any:
    if found is None:
        return None
    if isinstance(found, dict) and "error" in found:
        return Unknown(found["error"])
    return make(found)


def _each(found: Mapping[str, Any], make: Callable[[Any], Any]) -> dict[str, Any]:
    return {name: _one(one, make) for name, one in found.items()}
