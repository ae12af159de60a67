"""Define the desired packages of a node, with the same values for apt and dnf.

`converge/desired.py` re-exports these values, and `package_plan.py` compares them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from gpufleet.converge.validation import must_be_path, must_match
from gpufleet.errors import FleetError

# The characters of the fields Package and Version in deb-control(5), and the additional characters
# that rpm allows (capitals, `_`, `^`). A name may end with an architecture, in the form that dpkg
# prints.
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9+._-]+(:[a-z0-9_-]+)?")
_PACKAGE_PATTERN = re.compile(r"[A-Za-z0-9*?][A-Za-z0-9+._*?-]*")
# A `*` at the end matches any further text.
_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+:~^_-]*\*?")
_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")
# An apt source and a dnf repository are lines of text: no blank, no quote, no comment.
_REPOSITORY = re.compile(r"(https?://|file:/)[^\s\"'#\[\]]+[^\s\"'#\[\]/]")
# nvidia-driver:580-open
_MODULE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Package:
    """
    A package of apt or dnf that must be fully installed.

    Attributes:
        name: the name in the package manager.
        version: the exact version, to which gpufleet also downgrades. With a `*` at the end, any
            version with this prefix is accepted: an installed version stays, and a new node gets
            the newest. None: any version.
        hold: True: the package is held (apt-mark hold, dnf versionlock), so that only gpufleet
            changes it. False: a hold is removed. None: gpufleet does not change the hold.
    """

    name: str
    version: str | None = None
    hold: bool | None = None

    def __post_init__(self) -> None:
        must_match(_PACKAGE, self.name, "a package name")
        if self.version is not None:
            must_match(_VERSION, self.version, f"a version of package {self.name}")

    def accepts(self, version: str) -> bool:
        """
        Return whether an installed version is acceptable.

        An epoch counts only if `version` has one.

        >>> Package("nvidia-open", "580.*").accepts("3:580.95.05-1.el9")
        True
        """
        if self.version is None:
            return True
        found = version if ":" in self.version else version.rpartition(":")[2]
        if self.version.endswith("*"):
            return found.startswith(self.version[:-1])
        return found == self.version


@dataclass(frozen=True)
class PackageSource:
    """
    A vendor's package repository that only gpufleet uses.

    The node's own apt or dnf does not read this repository. So the node's own upgrades work
    whatever the state of the repository is, and never change packages from it.

    Attributes:
        id: the name of the repository in files and messages, for example "nvidia-cuda".
        url: the URL of a flat apt repository (with the file "{url}/Packages"), or dnf's baseurl. It
            has no slash at its end.
        key: the path on the node of the repository's public key. Content that is not signed with
            this key is refused.
        packages: patterns of package names. Only matching packages may be installed from the
            repository.
    """

    id: str
    url: str
    key: str
    packages: tuple[str, ...]

    def __post_init__(self) -> None:
        must_match(_ID, self.id, "the id of a package source")
        must_match(_REPOSITORY, self.url, f"the address of package source {self.id}")
        must_be_path(self.key, f"of the key file of package source {self.id}")
        if not self.packages:
            raise FleetError(f"package source {self.id} lists no packages to install from it")
        for pattern in self.packages:
            must_match(_PACKAGE_PATTERN, pattern, f"a pattern of packages of {self.id}")


@dataclass(frozen=True)
class NoPackage:
    """
    A pattern of packages to remove, except packages that match one of `but`.

    They are removed in the same transaction that installs the wanted packages. If a different
    branch of the driver were removed first, the packages that need a driver would be removed too.
    """

    pattern: str
    but: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for pattern in (self.pattern, *self.but):
            must_match(_PACKAGE_PATTERN, pattern, "a pattern of package names")
        if not re.match(r"[A-Za-z0-9]{3}", self.pattern):
            raise FleetError(
                f"{self.pattern}: this pattern would match system packages: begin it with the "
                "prefix of your packages, for example nvidia-dkms-*"
            )

    def matches(self, name: str) -> bool:
        """Return whether a package must be removed. `name` may include an architecture."""
        name = name.partition(":")[0]
        return fnmatchcase(name, self.pattern) and not any(
            fnmatchcase(name, kept) for kept in self.but
        )


@dataclass(frozen=True)
class Lockstep:
    """
    Packages that work together only in one version.

    All installed packages among them must have the same upstream version. A transaction that would
    leave two versions is refused before any change.
    """

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.names:
            raise FleetError("a lockstep without packages has no effect: list its packages")
        for name in self.names:
            must_match(_PACKAGE, name, "a package name")


@dataclass(frozen=True)
class ModuleStream:
    """The stream that must be enabled for a dnf module. Only nodes with dnf can have it."""

    name: str
    stream: str

    def __post_init__(self) -> None:
        must_match(_MODULE, self.name, "the name of a dnf module")
        must_match(_MODULE, self.stream, f"a stream of the dnf module {self.name}")


def upstream(version: str) -> str:
    """
    Return a package's upstream version, without epoch and packaging revision.

    >>> upstream("3:580.95.05-1ubuntu1")
    '580.95.05'
    """
    return version.rpartition(":")[2].partition("-")[0]
