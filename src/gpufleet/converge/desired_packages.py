"""Define the desired packages of a node, with the same values for apt and dnf.

`converge/desired.py` re-exports these values, and `package_plan.py` compares them.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fnmatch import fnmatchcase

from gpufleet.converge.validation import must_be_path, must_match
from gpufleet.errors import FleetError

# deb-control(5), fields Package and Version, and what rpm has beyond them (capitals, `_`, `^`); an
# architecture as dpkg appends it.
_PACKAGE = re.compile(r"[A-Za-z0-9][A-Za-z0-9+._-]+(:[a-z0-9_-]+)?")
_PACKAGE_PATTERN = re.compile(r"[A-Za-z0-9*?][A-Za-z0-9+._*?-]*")
# A final `*` stands for whatever follows.
_VERSION = re.compile(r"[0-9A-Za-z][0-9A-Za-z.+:~^_-]*\*?")
_ID = re.compile(r"[a-z0-9][a-z0-9-]{0,40}")
# An apt source and a dnf repository are lines of text: no blank, no quote, no comment.
_REPOSITORY = re.compile(r"(https?://|file:/)[^\s\"'#\[\]]+[^\s\"'#\[\]/]")
# nvidia-driver:580-open
_MODULE = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


@dataclass(frozen=True)
class Package:
    """
    A package of the node's own package manager, apt's or dnf's, fully installed.

    Attributes:
        name: as the package manager knows it.
        version: exactly this one, also as a downgrade; with a final `*` any with this prefix: an
            installed one stays, a new node gets the newest; None: any.
        hold: True: only gpufleet changes it (apt-mark hold, dnf versionlock); False: no hold; None:
            as the operator left it.
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
        Return whether an installed version is acceptable; epochs count only if one is wanted.

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
    A vendor's repository that only gpufleet's package transactions use.

    The node's own apt or dnf does not use it, so the node's own upgrades work regardless of the
    repository's state, and never change its packages.

    Attributes:
        id: names it in files and messages, as in "nvidia-cuda".
        url: of a flat apt repository ("{url}/Packages"), or dnf's baseurl; without final slash.
        key: path on the node of its public key. Content without that key's signature is refused.
        packages: patterns of the names that may come from it; no others may.
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

    They are removed in the transaction that installs the wanted packages: removing a driver's other
    branch first would also remove the packages that need a driver.
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
        """Return whether a package must be removed; its name may include an architecture."""
        name = name.partition(":")[0]
        return fnmatchcase(name, self.pattern) and not any(
            fnmatchcase(name, kept) for kept in self.but
        )


@dataclass(frozen=True)
class Lockstep:
    """
    Packages that only work together, so all installed ones have the same upstream version.

    A transaction that would leave two versions is refused before any change.
    """

    names: tuple[str, ...]

    def __post_init__(self) -> None:
        if not self.names:
            raise FleetError("a lockstep without packages has no effect: list its packages")
        for name in self.names:
            must_match(_PACKAGE, name, "a package name")


@dataclass(frozen=True)
class ModuleStream:
    """The enabled stream of a dnf module; only for nodes with dnf."""

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
