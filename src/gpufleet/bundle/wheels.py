"""Choose the wheels in a lock that fit a node, and find their addresses.

For each package, the module chooses the wheel that pip and uv would choose on the node, by Python,
C library and processor. Every file is verified with the hashes in the lock.
"""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import quote, unquote, urldefrag, urljoin, urlsplit

from packaging.requirements import InvalidRequirement, Requirement
from packaging.tags import Tag, compatible_tags, cpython_tags
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename

from gpufleet.bundle.download import AT_ONCE, Digest, Folder, MissingFileError, Remote, read
from gpufleet.errors import FleetError
from gpufleet.remote.daemon_pool import DaemonPool
from gpufleet.settings.mirror_rewrite import WHEELS

PYPI = "https://pypi.org/simple"
FOLDER = WHEELS.partition("/")[0]

# Older names of manylinux tags, which do not contain the version of the C library (PEP 600).
_OLD_NAMES = {17: "manylinux2014", 12: "manylinux2010", 5: "manylinux1"}
_JSON = "application/vnd.pypi.simple.v1+json"
_ACCEPT = {"Accept": f"{_JSON}, text/html;q=0.5"}


@dataclass(frozen=True)
class Target:
    """
    The properties of a node by which its wheels are chosen.

    For example, `python` is (3, 12), `glibc` is (2, 39), and `machine` is x86_64 or aarch64.
    """

    python: tuple[int, int]
    glibc: tuple[int, int]
    machine: str

    @property
    def tags(self) -> list[Tag]:
        """The compatible wheel tags, the best first."""
        major, newest = self.glibc
        platforms = []
        for minor in range(newest, 4, -1):
            platforms.append(f"manylinux_{major}_{minor}_{self.machine}")
            if old := _OLD_NAMES.get(minor):
                platforms.append(f"{old}_{self.machine}")
        platforms.append(f"linux_{self.machine}")
        interpreter = f"cp{self.python[0]}{self.python[1]}"
        return [
            *cpython_tags(self.python, platforms=platforms),
            *compatible_tags(self.python, interpreter, platforms),
        ]

    @property
    def markers(self) -> dict[str, str]:
        """The values with which the markers in a lock are evaluated."""
        version = ".".join(map(str, self.python))
        return {
            "implementation_name": "cpython",
            "os_name": "posix",
            "platform_machine": self.machine,
            "platform_python_implementation": "CPython",
            "platform_system": "Linux",
            "python_full_version": f"{version}.0",
            "python_version": version,
            "sys_platform": "linux",
        }


@dataclass(frozen=True)
class Lock:
    """A lock file, which has requirements with hashes, and the sources of its wheels."""

    name: str
    text: str
    index_url: str | None
    find_links: tuple[str, ...]

    def pins(self, target: Target) -> Iterator[tuple[Requirement, frozenset[str]]]:
        """Yield each requirement that applies to a node, with its hashes.

        Raises FleetError for a line that is not a requirement.
        """
        for line in re.sub(r"\\\r?\n", " ", self.text).splitlines():
            text = re.sub(r"(^|\s)#.*", "", line).strip()
            if not text:
                continue
            hashes = frozenset(re.findall(r"--hash=sha256:([0-9a-f]{64})", text))
            try:
                wanted = Requirement(re.split(r"\s+--hash=", text)[0])
            except InvalidRequirement:
                raise FleetError(f"{self.name}: {text[:80]!r} is not a valid requirement") from None
            if wanted.marker is None or wanted.marker.evaluate(dict(target.markers)):
                yield wanted, hashes


def find(lock: Lock, target: Target) -> tuple[Remote, ...]:
    """
    Return one wheel for each package in a lock.

    Entries of `find_links` that are not URLs are skipped. Raises FleetError with every package that
    has no hash, or no wheel for this node.
    """
    ranks = {tag: rank for rank, tag in enumerate(target.tags)}
    pages = [link for link in lock.find_links if link.startswith(("http://", "https://"))]
    flat = [link for page in pages for link in _links(_page(page))]
    problems: list[str] = []

    def one(pin: tuple[Requirement, frozenset[str]]) -> Remote | None:
        try:
            return _choose(lock, *pin, ranks, flat)
        except FleetError as error:
            problems.extend(error.problems)
            return None

    pins = list(lock.pins(target))
    with DaemonPool(AT_ONCE) as pool:
        found = tuple(remote for remote in pool.map(one, pins) if remote)
    if problems:
        raise FleetError(*sorted(problems))
    return found


def page_of_links(folder: Folder, paths: Iterable[str]) -> bytes:
    """Return an HTML page for pip and uv that lists the wheels of a bundle with their hashes."""
    lines = []
    for path in sorted(paths):
        name = Path(path).name
        hashed = f"{quote(name)}#sha256={folder.sha256(path)}"
        lines.append(f'<a href="{hashed}">{html.escape(name)}</a><br>\n')
    return f"<!DOCTYPE html>\n<html><body>\n{''.join(lines)}</body></html>\n".encode()


@dataclass(frozen=True)
class _Link:
    url: str
    name: str
    sha256: str | None


def _choose(
    lock: Lock,
    wanted: Requirement,
    hashes: frozenset[str],
    ranks: Mapping[Tag, int],
    flat: Iterable[_Link],
) -> Remote:
    """Return the best wheel with a hash in the lock."""
    called = str(wanted).partition(";")[0].strip()
    if not hashes:
        raise FleetError(
            f"{lock.name}: {called} has no hash: create the lock with `gpufleet packages lock`"
        )
    if wanted.url:
        raise FleetError(
            f"{lock.name}: {called} is a URL, so nodes would not download the package from the "
            "mirror: lock a version of the package, and set the page that lists its wheels in "
            "`vllm.find_links`"
        )
    links = [*flat]
    if lock.index_url:
        links += _of_index(lock.index_url, wanted.name)
    ranked = sorted(
        (rank, link.url, link)
        for link in links
        if (link.sha256 is None or link.sha256 in hashes)
        and (rank := _rank(link.name, wanted, ranks)) is not None
    )
    if not ranked:
        raise FleetError(
            f"{lock.name}: {called} has no wheel for these nodes with a hash of the lock at "
            f"{', '.join(filter(None, (*lock.find_links, lock.index_url)))}: check that the lock "
            "is for the Python and the processor of these nodes. Packages without wheels cannot "
            "be bundled"
        )
    best = ranked[0][2]
    digests = [best.sha256] if best.sha256 else sorted(hashes)
    return Remote(
        best.url,
        f"{FOLDER}/{best.name}",
        tuple(Digest("sha256", each) for each in digests),
    )


def _rank(name: str, wanted: Requirement, ranks: Mapping[Tag, int]) -> int | None:
    """
    Return the rank of a wheel for the node, or None if it is incompatible. A lower rank is better.
    """
    try:
        package, version, _, tags = parse_wheel_filename(name)
    except InvalidWheelFilename:
        return None
    if package != canonicalize_name(wanted.name):
        return None
    if not wanted.specifier.contains(version, prereleases=True):
        return None
    return min((ranks[tag] for tag in tags if tag in ranks), default=None)


def _of_index(index_url: str, name: str) -> list[_Link]:
    url = f"{index_url.rstrip('/')}/{canonicalize_name(name)}/"
    try:
        return list(_links(_page(url)))
    except MissingFileError:
        return []


def _page(url: str) -> tuple[str, bytes, str]:
    content, kind = read(url, _ACCEPT)
    return url, content, kind


def _links(page: tuple[str, bytes, str]) -> Iterator[_Link]:
    """
    Yield the files on an index page. The page has the format of PEP 503 (HTML) or PEP 691 (JSON).
    """
    base, content, kind = page
    if kind == _JSON:
        try:
            files = json.loads(content)["files"]
            for file in files:
                url = urljoin(base, file["url"])
                yield _Link(url, file["filename"], file.get("hashes", {}).get("sha256"))
        except (KeyError, TypeError, ValueError):
            raise FleetError(f"{base}: is not a package index page (PEP 691)") from None
        return
    parser = _Anchors()
    parser.feed(content.decode("utf-8", "replace"))
    for reference in parser.references:
        url, fragment = urldefrag(urljoin(base, reference))
        digest = re.match(r"sha256=([0-9a-f]{64})$", fragment)
        yield _Link(url, unquote(urlsplit(url).path.rpartition("/")[2]), digest and digest[1])


class _Anchors(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.references: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.references += [
            value for name, value in attrs if tag == "a" and name == "href" and value
        ]
