"""
Find all packages that nodes need in apt archives. The search uses apt itself, in a separate folder.

apt checks the signatures, and resolves the dependencies for an empty system. So the result is
complete for any node. The signed indexes are copied into the bundle unchanged, so nodes verify them
with the same keys.
"""

from __future__ import annotations

import io
import os
import re
import shutil
import subprocess
import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from gpufleet.bundle.download import Digest, Folder, MissingFileError, Remote
from gpufleet.errors import FleetError
from gpufleet.settings.mirror_rewrite import bundle_path

TOOLS = {"apt-get": "apt", "dpkg-deb": "dpkg"}
UPDATE_SECONDS = 900
RESOLVE_SECONDS = 300

# apt(8) requests one of these, in its own order. An archive may not have all the files that it
# lists.
_COMPRESSIONS = ("", ".xz", ".gz", ".bz2", ".zst", ".lz4", ".lzma")
_URI = re.compile(r"'([^']+)' (\S+) (\d+) (\w+):([0-9a-f]+)$")


@dataclass(frozen=True)
class Source:
    """
    One apt archive.

    An archive has suites and components, or it is flat. A flat archive has no components, and a
    single suite that ends in /.

    Attributes:
        key: the file with the public keys that may sign the archive.
        packages: patterns of the names of the packages that may come from this archive. Empty: all
            packages.
    """

    url: str
    suites: tuple[str, ...]
    components: tuple[str, ...]
    key: Path
    packages: tuple[str, ...] = ()

    def release(self, suite: str) -> str:
        """Return the URL of the suite's folder with its signed Release file."""
        if suite.endswith("/"):
            return f"{self.url}/{suite.strip('/')}".rstrip("/")
        return f"{self.url}/dists/{suite}"


def require_tools() -> None:
    """Raise FleetError if this machine lacks apt's tools."""
    if missing := sorted({name for tool, name in TOOLS.items() if not shutil.which(tool)}):
        raise FleetError(
            f"this machine does not have {' and '.join(missing)}, but gpufleet needs "
            f"{'this program' if len(missing) == 1 else 'these programs'} to read apt archives: "
            "create the bundle on Debian or Ubuntu"
        )


class Archives:
    """The archives of one kind of node, which are read by apt with a separate root folder."""

    def __init__(self, home: Path, sources: Sequence[Source], architecture: str) -> None:
        self._home = home
        self._sources = sources
        self._architecture = architecture

    def update(self) -> None:
        """
        Fetch the indexes. Raises FleetError for an archive that cannot be reached or is not signed.
        """
        self._prepare()
        ran = self._apt("update", seconds=UPDATE_SECONDS)
        said = _said(ran.stderr)
        # Older releases of apt exit with 0 even if an archive could not be fetched.
        if ran.returncode or any(line.startswith(("E:", "W:")) for line in said):
            raise FleetError("apt does not accept an archive: " + "; ".join(said[-6:]))

    def packages(self, words: Sequence[str]) -> tuple[Remote, ...]:
        """
        Return the files of these packages and of all their dependencies.

        A package is written as `name` or `name=version`. Raises FleetError if the packages cannot
        be installed together.
        """
        ran = self._apt("install", "-q", "--print-uris", "-y", "--", *words)
        if ran.returncode:
            raise FleetError(
                "these packages cannot be installed together from these archives: "
                + "; ".join(_unmet(ran.stdout + ran.stderr)[-12:])
            )
        found = [_URI.match(line) for line in ran.stdout.splitlines()]
        return tuple(
            Remote(
                match[1],
                bundle_path(match[1]),
                (Digest(match[4].lower(), match[5]),),
                int(match[3]),
            )
            for match in found
            if match
        )

    def keep_indexes(self, folder: Folder) -> tuple[str, ...]:
        """Copy the signed indexes that apt has accepted into the bundle, and return their paths."""
        paths: list[str] = []
        for source in self._sources:
            for suite in source.suites:
                paths += self._keep_suite(folder, source, suite)
        return tuple(paths)

    def _keep_suite(self, folder: Folder, source: Source, suite: str) -> Iterator[str]:
        at = source.release(suite)
        release, names = self._signed(at)
        hashes = dict(_hashes(release))
        by_hash = re.search(r"^Acquire-By-Hash: yes", release, re.MULTILINE | re.IGNORECASE)
        for stem in self._stems(source, suite, release):
            kept = 0
            for name in (f"{stem}{suffix}" for suffix in _COMPRESSIONS):
                if name not in hashes:
                    continue
                digest, size = hashes[name]
                path = f"{bundle_path(at)}/{name}"
                url = f"{at}/{name}"
                aside = f"{name.rpartition('/')[0]}/by-hash/SHA256/{digest}".lstrip("/")
                if by_hash:  # the content at such an address never changes
                    url = f"{at}/{aside}"
                try:
                    folder.fetch(Remote(url, path, (Digest("sha256", digest),), size))
                except MissingFileError:
                    continue
                kept += 1
                yield path
                if by_hash:
                    beside = f"{bundle_path(at)}/{aside}"
                    folder.write(beside, (folder.root / path).read_bytes())
                    yield beside
            if not kept and f"{stem}" in hashes:
                raise FleetError(f"{at}: lists {stem}, but not in a format that apt reads")
        # The Release files are written last, because they make the new indexes valid.
        for name, content in names.items():
            folder.write(f"{bundle_path(at)}/{name}", content)
            yield f"{bundle_path(at)}/{name}"

    def _stems(self, source: Source, suite: str, release: str) -> Iterator[str]:
        """Yield the names of the indexes that nodes request, without compression suffixes."""
        if suite.endswith("/"):
            yield from ("Packages", "./Packages")
            return
        apart = re.search(r"^Architectures:.*\ball\b", release, re.MULTILINE)
        within = re.search(r"^No-Support-for-Architecture-all:", release, re.MULTILINE)
        for component in source.components:
            for architecture in (self._architecture, *(("all",) if apart and not within else ())):
                yield f"{component}/binary-{architecture}/Packages"

    def _signed(self, at: str) -> tuple[str, dict[str, bytes]]:
        """
        Return the text of a suite's Release file, and the contents of all Release files by name.
        """
        parts = urlsplit(at)
        stem = f"{parts.netloc}{parts.path}".replace("_", "%5f").replace("/", "_")
        lists = self._home / "lists"
        found = {
            name: (lists / f"{stem}_{name}").read_bytes()
            for name in ("InRelease", "Release", "Release.gpg")
            if (lists / f"{stem}_{name}").is_file()
        }
        text = found.get("InRelease") or found.get("Release")
        if text is None or ("InRelease" not in found and "Release.gpg" not in found):
            raise FleetError(f"{at}: the archive has no signed Release file")
        return text.decode("utf-8", "replace"), found

    def _prepare(self) -> None:
        home = self._home
        for name in ("lists/partial", "archives/partial", "state", "parts"):
            (home / name).mkdir(parents=True, exist_ok=True)
        (home / "state/status").write_text("")
        (home / "apt.conf").write_text(self._settings())
        (home / "archives.sources").write_text("\n".join(map(_stanza, self._sources)))
        (home / "preferences").write_text("\n".join(_pins(self._sources)))

    def _settings(self) -> str:
        home = self._home
        settings = {
            "Dir": f"{home}/",
            "Dir::State": f"{home}/state",
            "Dir::State::Lists": f"{home}/lists",
            "Dir::State::Status": f"{home}/state/status",
            "Dir::Cache": f"{home}/cache",
            "Dir::Cache::Archives": f"{home}/archives",
            "Dir::Etc::Main": "/dev/null",
            "Dir::Etc::Parts": f"{home}/parts",
            "Dir::Etc::SourceList": f"{home}/archives.sources",
            "Dir::Etc::SourceParts": f"{home}/parts",
            "Dir::Etc::Preferences": f"{home}/preferences",
            "Dir::Etc::PreferencesParts": f"{home}/parts",
            "Dir::Etc::Trusted": "/dev/null",
            "Dir::Etc::TrustedParts": f"{home}/parts",
            "APT::Architecture": self._architecture,
            "APT::Architectures": self._architecture,
            "APT::Install-Recommends": "false",  # as on the nodes
            "APT::Sandbox::User": "",  # the folder is the operator's own
            "Acquire::Languages": "none",
            "Acquire::AllowInsecureRepositories": "false",
            "Acquire::AllowWeakRepositories": "false",
            "Acquire::ForceHash": "SHA256",  # which hash --print-uris prints
            "Acquire::Retries": "2",
            "APT::Get::AllowUnauthenticated": "false",
        }
        return "".join(f'{key} "{value}";\n' for key, value in settings.items())

    def _apt(
        self, *arguments: str, seconds: float = RESOLVE_SECONDS
    ) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "APT_CONFIG": str(self._home / "apt.conf"), "LC_ALL": "C"}
        try:
            return subprocess.run(
                ["apt-get", *arguments],
                env=environment,
                capture_output=True,
                text=True,
                check=False,
                timeout=seconds,
            )
        except subprocess.TimeoutExpired:
            raise FleetError(
                f"`apt-get {arguments[0]}` did not finish within {seconds:g} s, perhaps because an "
                "archive is slow. Run the command again: the download continues where it stopped"
            ) from None


def key_of(keyring: Path) -> bytes:
    """
    Return the public key that a vendor's keyring package installs.

    Raises FleetError unless the package contains exactly one key.
    """
    listed = subprocess.run(
        ["dpkg-deb", "--fsys-tarfile", str(keyring)], capture_output=True, check=False, timeout=60
    )
    if listed.returncode:
        raise FleetError(
            f"{keyring.name}: is not a Debian package: {listed.stderr.decode().strip()}"
        )
    with tarfile.open(fileobj=io.BytesIO(listed.stdout)) as files:
        keys = [
            member
            for member in files
            if member.isfile() and re.search(r"usr/share/keyrings/[^/]+\.(gpg|asc)$", member.name)
        ]
        if len(keys) != 1:
            raise FleetError(
                f"{keyring.name}: has {len(keys)} keys below /usr/share/keyrings; exactly one "
                "is expected"
            )
        content = files.extractfile(keys[0])
        return content.read() if content else b""


def _stanza(source: Source) -> str:
    components = f"Components: {' '.join(source.components)}\n" if source.components else ""
    suites = " ".join(source.suites)
    return (
        f"Types: deb\nURIs: {source.url}/\nSuites: {suites}\n{components}Signed-By: {source.key}\n"
    )


def _pins(sources: Sequence[Source]) -> Iterator[str]:
    """
    Yield apt preferences so that only the intended packages come from a vendor's archive.

    Preferences select an archive by its host. Two archives on one host cannot be distinguished, so
    they get no preferences.
    """
    hosts = [urlsplit(source.url).hostname for source in sources]
    for source, host in zip(sources, hosts, strict=True):
        if source.packages and hosts.count(host) == 1:
            # apt uses the first record that matches.
            names = " ".join(source.packages)
            yield f'Package: {names}\nPin: origin "{host}"\nPin-Priority: 500\n'
            yield f'Package: *\nPin: origin "{host}"\nPin-Priority: -1\n'


def _hashes(release: str) -> Iterator[tuple[str, tuple[str, int]]]:
    """Yield (name, (SHA-256, size)) for every index that a Release file lists."""
    section = re.search(r"^SHA256:[ \t]*\n((?:[ \t]+.*\n?)+)", release, re.MULTILINE)
    for line in section[1].splitlines() if section else ():
        digest, size, name = line.split()
        yield name, (digest, int(size))


def _unmet(output: str) -> list[str]:
    """Return apt's message about unmet dependencies, without its other output."""
    start = "The following packages have unmet dependencies:"
    return _said(output.partition(start)[2] or output)


def _said(output: str) -> list[str]:
    lines = [line.strip() for line in output.splitlines()]
    return [line for line in lines if line and not line.startswith(("Get:", "Hit:", "Ign:"))]
