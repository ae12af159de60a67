"""Define the values that describe the desired state of a node.

Roles return these values, and `converge/diff.py` compares them with the node's state. Pure: the
module neither reads a node nor imports pyinfra. Every value is validated when it is created, so
that only well-formed text reaches a node's shell or file system. For an invalid value, the
constructor raises a `FleetError` that names the value. The content of a file is never in a `repr`,
because debug logs print values.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import KW_ONLY, dataclass, field
from typing import TypeAlias, TypeVar

from gpufleet import node_paths
from gpufleet.converge.desired_packages import (
    Lockstep,
    ModuleStream,
    NoPackage,
    Package,
    PackageSource,
    upstream,
)
from gpufleet.converge.validation import CONTROL, must_be_path, must_match
from gpufleet.errors import FleetError

__all__ = [
    "DEFAULT_UNIT_SECONDS",
    "STARTED_DIRECTORY",
    "UNIT_DIRECTORY",
    "Absent",
    "DesiredState",
    "Directory",
    "File",
    "Group",
    "Line",
    "Link",
    "Listing",
    "Lockstep",
    "ModuleStream",
    "NoOtherFiles",
    "NoOtherUnits",
    "NoPackage",
    "Package",
    "PackageSource",
    "Unit",
    "UnitGone",
    "User",
    "Value",
    "started_line",
    "unit_of",
    "upstream",
]

# The directory for units of the administrator (systemd.unit(5), "Unit File Load Path"). gpufleet's
# units belong there too.
UNIT_DIRECTORY = "/etc/systemd/system"
# The directory with the fingerprints with which running units were started. It is in /run, because
# a reboot stops every process.
STARTED_DIRECTORY = node_paths.STARTED
# systemd's default time limit to stop and to start a unit: DefaultTimeoutStopSec= and
# DefaultTimeoutStartSec= (systemd-system.conf(5)).
DEFAULT_UNIT_SECONDS = 90

# useradd(8), "CAVEATS", as Debian's shadow accepts it.
_ACCOUNT = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
# The characters that a unit name may have (systemd.unit(5)). Wildcards are not allowed.
_UNIT = re.compile(
    r"[A-Za-z0-9:_.\\@-]+\.(service|socket|timer|target|path|mount|automount|swap|slice)"
)
_UNIT_PATTERN = re.compile(r"[A-Za-z0-9:_.\\@*?\[\]-]+")
_FINGERPRINT = re.compile(r"[0-9A-Za-z]{1,64}")


@dataclass(frozen=True)
class Group:
    """
    A group. `system` applies only if the group is created. An existing group keeps its number.
    """

    name: str
    system: bool = True

    def __post_init__(self) -> None:
        must_match(_ACCOUNT, self.name, "a group name")


@dataclass(frozen=True)
class User:
    """
    An account without a password. The home directory is not created: declare a `Directory` for it.

    Attributes:
        name: the login name.
        group: the primary group.
        home: the home directory.
        shell: the login shell. For services it is /usr/sbin/nologin.
        system: a new account gets a number for system accounts. An existing account keeps its
            number.
        groups: further groups to which the account is added. It also stays in all its other groups.
    """

    name: str
    group: str
    home: str
    shell: str = "/usr/sbin/nologin"
    system: bool = True
    groups: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        must_match(_ACCOUNT, self.name, "a user name")
        for group in (self.group, *self.groups):
            must_match(_ACCOUNT, group, f"a group of user {self.name}")
        for path in (self.home, self.shell):
            must_be_path(path, f"of user {self.name}")


@dataclass(frozen=True, repr=False)
class File:
    """
    A regular file with exactly this content, owner and mode.

    Missing parent directories are created with owner root and mode 0755. If a parent directory
    needs a different owner or mode, declare a `Directory`.

    Attributes:
        path: the absolute path.
        content: the whole content.
        user, group: the owner. The same run may create these accounts.
        mode: the permission bits.
        secret: the content and its hash are never logged, and are never sent from the node.
    """

    path: str
    content: bytes
    user: str = "root"
    group: str = "root"
    mode: int = 0o644
    secret: bool = False

    def __post_init__(self) -> None:
        must_be_path(self.path, "of a file")
        _must_be_owned(self)
        if self.secret and self.mode & 0o007:
            raise FleetError(
                f"{self.path} is a secret, but with mode {self.mode:04o} all users of the node "
                "could read or write it: set a mode whose last digit is 0, for example 0600 or 0640"
            )

    @property
    def sha256(self) -> str:
        """Return the content's hash in hexadecimal."""
        return hashlib.sha256(self.content).hexdigest()

    def __repr__(self) -> str:
        known = "secret" if self.secret else f"sha256 {self.sha256}"
        return (
            f"File({self.path!r}, {len(self.content)} bytes, {known}, "
            f"{self.user}:{self.group} {self.mode:04o})"
        )


@dataclass(frozen=True)
class Directory:
    """A directory with this owner and mode. The files in it do not change."""

    path: str
    user: str = "root"
    group: str = "root"
    mode: int = 0o755

    def __post_init__(self) -> None:
        must_be_path(self.path, "of a directory")
        _must_be_owned(self)


@dataclass(frozen=True)
class Link:
    """A symbolic link with exactly this target. The target does not have to exist."""

    path: str
    target: str

    def __post_init__(self) -> None:
        must_be_path(self.path, "of a link")
        if not self.target or CONTROL.search(self.target):
            raise FleetError(f"{self.target!r}, the target of link {self.path}, is not a path")


@dataclass(frozen=True)
class Absent:
    """
    A path at which no file or link may exist.

    If there is a directory, gpufleet reports a problem and does not remove it.
    """

    path: str

    def __post_init__(self) -> None:
        must_be_path(self.path, "of a file to remove")


@dataclass(frozen=True)
class NoOtherFiles:
    """
    Remove the files and links that match a pattern, except those in the desired state.

    Only the pattern's last part may have wildcards: `/etc/vllm/stages/*.env`.
    """

    pattern: str

    def __post_init__(self) -> None:
        must_be_path(self.pattern, "of files")
        if any(wildcard in self.directory for wildcard in "*?["):
            raise FleetError(
                f"{self.pattern}: the name of a directory has a wildcard, but only the last part "
                "of the path may have one"
            )

    @property
    def directory(self) -> str:
        """Return the directory of the pattern."""
        return self.pattern.rpartition("/")[0]


@dataclass(frozen=True)
class Listing:
    """
    A query for the names in a directory, which a role needs for a decision. It changes nothing.
    """

    path: str

    def __post_init__(self) -> None:
        must_be_path(self.path, "of a directory to list")


@dataclass(frozen=True)
class Line:
    """
    A line in a file. A missing line is appended. Other lines, the owner and the mode do not change.
    """

    path: str
    line: str

    def __post_init__(self) -> None:
        must_be_path(self.path, "of a line")
        if not self.line or CONTROL.search(self.line):
            raise FleetError(f"{self.line!r}, to be added to {self.path}, is not one line of text")


@dataclass(frozen=True)
class Unit:
    """
    A systemd unit, with the state that it must have.

    Attributes:
        name: the name with its suffix, for example vllm-llama-0.service.
        fingerprint: the fingerprint of everything that the process reads when it starts. A unit
            that was started with a different fingerprint is restarted. The unit file or a drop-in
            must contain `started_line(fingerprint)`. None: the unit is started only if it is not
            active.
        enabled: whether the unit starts at boot. None: gpufleet does not change this.
        running: whether the unit is active now. None: gpufleet does not change this.
        stop_seconds: how long the unit may take to stop (TimeoutStopSec= of the unit).
        start_seconds: how long the unit may take until it is active for systemd.
    """

    name: str
    fingerprint: str | None = None
    enabled: bool | None = True
    running: bool | None = True
    _: KW_ONLY
    stop_seconds: int = DEFAULT_UNIT_SECONDS
    start_seconds: int = DEFAULT_UNIT_SECONDS

    def __post_init__(self) -> None:
        _must_be_unit(self.name)
        if self.fingerprint is not None:
            must_match(_FINGERPRINT, self.fingerprint, f"the fingerprint of {self.name}")
        if min(self.stop_seconds, self.start_seconds) < 0:
            raise FleetError(f"{self.name}: stop_seconds and start_seconds cannot be negative")


@dataclass(frozen=True)
class UnitGone:
    """
    A unit to remove.

    gpufleet stops and disables the unit, and removes its unit file and its drop-ins from
    /etc/systemd/system. If the unit belongs to a package, its unit file stays on disk.
    """

    name: str
    _: KW_ONLY
    stop_seconds: int = DEFAULT_UNIT_SECONDS

    def __post_init__(self) -> None:
        _must_be_unit(self.name)


@dataclass(frozen=True)
class NoOtherUnits:
    """
    Remove the units of gpufleet that match a pattern, except those in the desired state.

    The pattern is, for example, `vllm-*.service`. The units are removed as by `UnitGone`. A unit
    belongs to gpufleet if its file or a drop-in below /etc/systemd/system contains `started_line`,
    even if the unit was never started. It also belongs to gpufleet if it has no file, but its start
    was recorded. Other units with matching names are not changed, for example an operator's
    vllm-router.service or a unit of a package. A copy of a unit file of gpufleet counts as
    gpufleet's until that line is removed from the copy.
    """

    pattern: str
    _: KW_ONLY
    stop_seconds: int = DEFAULT_UNIT_SECONDS

    def __post_init__(self) -> None:
        must_match(_UNIT_PATTERN, self.pattern, "a pattern of unit names")
        if not re.match(r"[A-Za-z0-9]{2}", self.pattern) or "." not in self.pattern:
            raise FleetError(
                f"{self.pattern}: this pattern would match system units: begin it with the prefix "
                "of your units and end it with their suffix, for example vllm-*.service"
            )


Value: TypeAlias = (
    Package
    | PackageSource
    | NoPackage
    | Lockstep
    | ModuleStream
    | Group
    | User
    | File
    | Directory
    | Link
    | Absent
    | NoOtherFiles
    | Listing
    | Line
    | Unit
    | UnitGone
    | NoOtherUnits
)
_T = TypeVar("_T")


@dataclass(frozen=True, init=False)
class DesiredState:
    """
    The complete state of one node that a role wants.

    Create it with `DesiredState(*values)`, or join two with `one + another`. Duplicate values count
    once. If two values contradict each other, the constructor raises a `FleetError` that lists
    every contradiction. Examples are a path with two contents, and a unit that must run and must be
    removed.

    >>> len(DesiredState(Group("vllm"), Group("vllm"), Directory("/etc/vllm")))
    2
    """

    values: tuple[Value, ...] = field(default=())

    def __init__(self, *values: Value) -> None:
        object.__setattr__(self, "values", tuple(dict.fromkeys(values)))
        if problems := [*_contradictions(self.values), *_unrecorded_starts(self.values)]:
            raise FleetError(*problems)

    def __add__(self, other: DesiredState) -> DesiredState:
        return DesiredState(*self.values, *other.values)

    def __iter__(self) -> Iterator[Value]:
        return iter(self.values)

    def __len__(self) -> int:
        return len(self.values)

    def values_of(self, kind: type[_T]) -> tuple[_T, ...]:
        """Return the values of one type in their order."""
        return tuple(value for value in self.values if isinstance(value, kind))


def started_line(fingerprint: str) -> str:
    """
    Return a line for a unit file that records the fingerprint at each start of the unit.

    The line belongs in the section [Service]. The `+` runs the command as root, outside the unit's
    sandbox (systemd.service(5)). systemd records the fingerprint in the loaded unit file at every
    start. So a start by hand, at boot or after a crash is recorded like a start by gpufleet. Raises
    `FleetError` for a fingerprint that is not 1 to 64 letters and digits.

    >>> print(started_line("3c4d"))
    ExecStartPre=+/bin/sh -c 'mkdir -p /run/gpufleet/started && printf %%s 3c4d \
> /run/gpufleet/started/%n'
    """
    must_match(_FINGERPRINT, fingerprint, "a fingerprint")
    return (
        f"ExecStartPre=+/bin/sh -c 'mkdir -p {STARTED_DIRECTORY} && "
        f"printf %%s {fingerprint} > {STARTED_DIRECTORY}/%n'"
    )


def unit_of(path: str) -> str | None:
    """
    Return the unit to whose definition the file at a path belongs, or None.

    >>> unit_of("/etc/systemd/system/ssh.service.d/limits.conf")
    'ssh.service'
    """
    if not path.startswith(f"{UNIT_DIRECTORY}/"):
        return None
    name = path.removeprefix(f"{UNIT_DIRECTORY}/").split("/")[0]
    name = name.removesuffix(".d")
    # A template has no state of its own, only its instances have.
    return name if _UNIT.fullmatch(name) and "@." not in name else None


def _must_be_unit(name: str) -> None:
    must_match(_UNIT, name, "a unit name")
    if "@." in name:
        raise FleetError(
            f"{name} is a template of units, and only its instances can run: write an instance, "
            "for example name@1.service"
        )


def _must_be_owned(value: File | Directory) -> None:
    must_match(_ACCOUNT, value.user, f"the owner of {value.path}")
    must_match(_ACCOUNT, value.group, f"the group of {value.path}")
    if not 0 <= value.mode <= 0o7777:
        raise FleetError(f"{value.path}: {value.mode:#o} is not a mode: write 0 to 0o7777")


def _subject(value: Value) -> str:
    """
    Return a key for what a value describes. A desired state may have only one value with each key.
    """
    match value:
        case Package() | Group() | User():
            return f"{type(value).__name__.lower()} {value.name}"
        case PackageSource():
            return f"package source {value.id}"
        case ModuleStream():
            return f"dnf module {value.name}"
        case Unit() | UnitGone():
            return f"unit {value.name}"
        case File() | Directory() | Link() | Absent():
            return f"path {value.path}"
        case _:  # several lines in a file, a pattern or a question beside anything
            return repr(value)


def _contradictions(values: Iterable[Value]) -> Iterator[str]:
    seen: dict[str, Value] = {}
    for value in values:
        other = seen.setdefault(_subject(value), value)
        if other != value:
            yield (
                f"{_subject(value)} is declared twice, as {other} and as {value}: keep only one of "
                "the two"
            )
    for unwanted in (value for value in values if isinstance(value, NoPackage)):
        for package in (value for value in values if isinstance(value, Package)):
            if unwanted.matches(package.name):
                yield (
                    f"{package} is declared, but {unwanted} would remove it: keep only one of the "
                    "two"
                )
    for value in values:
        if isinstance(value, Line) and (whole := seen.get(f"path {value.path}")):
            yield (
                f"a line is declared in {value.path}, but the whole file is also declared as "
                f"{whole}: keep only one of the two"
            )
        if isinstance(value, File | Link) and (unit := unit_of(value.path)):
            gone = seen.get(f"unit {unit}")
            if isinstance(gone, UnitGone):
                yield (
                    f"{value.path} is declared, but {gone} would remove it: keep only one of the "
                    "two"
                )


def _unrecorded_starts(values: Iterable[Value]) -> Iterator[str]:
    """
    Yield a problem for each unit whose start records no fingerprint.

    Every run would restart such a unit.
    """
    values = tuple(values)
    for unit in (value for value in values if isinstance(value, Unit) and value.fingerprint):
        files = [v for v in values if isinstance(v, File) and unit_of(v.path) == unit.name]
        line = started_line(unit.fingerprint or "").encode()
        if files and not any(line in file.content.splitlines() for file in files):
            yield (
                f"{unit.name} is declared with fingerprint {unit.fingerprint}, but no file of the "
                "unit records this fingerprint: put wanted.started_line(fingerprint) into its "
                "[Service] section"
            )
