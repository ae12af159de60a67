"""
Fill a folder with everything that nodes download.

Border: the module reads from archives, package indexes and the Hub.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

from gpufleet.artifacts import operator_files
from gpufleet.bundle import apt, models, serve, wheels
from gpufleet.bundle.download import MANIFEST, Digest, Folder, Remote
from gpufleet.bundle.models import Model
from gpufleet.bundle.requirements import Locked, Needs, Packages
from gpufleet.errors import FleetError
from gpufleet.gpu_software.repository import VENDOR_PACKAGES
from gpufleet.settings.cuda_settings import Repository
from gpufleet.settings.mirror_rewrite import KEYS, PACKAGES, PROGRAMS, WHEELS, bundle_path
from gpufleet.settings.mirror_settings import Archive
from gpufleet.templates import read_template

README = "README.md"
SERVER = "serve.py"


@dataclass
class Collected:
    """The paths of the bundle's files, by kind."""

    folder: Folder
    say: Callable[[str], None]
    packages: set[str] = field(default_factory=set)
    wheels: set[str] = field(default_factory=set)
    models: set[str] = field(default_factory=set)
    programs: set[str] = field(default_factory=set)
    others: set[str] = field(default_factory=set)

    @property
    def paths(self) -> set[str]:
        """The paths of all collected files."""
        return self.packages | self.wheels | self.models | self.programs | self.others

    def bring(self, remotes: Iterable[Remote]) -> set[str]:
        """Fetch these files, and return their paths."""
        found = tuple(remotes)
        self.folder.bring(found, self.say)
        return {remote.path for remote in found}


def collect(folder: Folder, needs: Needs, say: Callable[[str], None]) -> Collected:
    """
    Fetch all downloads, and write the files of the mirror. The manifest is written last.

    Raises FleetError after the first kind of download that is incomplete. Completed files stay, and
    another run continues with the missing files.
    """
    done = Collected(folder, say)
    for wanted in needs.packages:
        _packages(done, wanted)
    for locked in needs.locks:
        _wheels(done, locked)
    if done.wheels:
        folder.write(WHEELS, wheels.page_of_links(folder, done.wheels))
        done.wheels.add(WHEELS)
    for model in needs.models:
        _model(done, model)
    done.programs |= done.bring(
        Remote(each.url, bundle_path(each.url, PROGRAMS), (Digest("sha256", each.sha256),))
        for each in needs.programs
    )
    for name, content in {
        README: read_template("bundle/bundle.md").encode(),
        SERVER: Path(serve.__file__).read_bytes(),
    }.items():
        folder.write(name, content)
        done.others.add(name)
    folder.write(MANIFEST, manifest(folder, done.paths))
    return done


def manifest(folder: Folder, paths: Iterable[str]) -> bytes:
    """Return the hashes of files in the format that `sha256sum --check` reads."""
    return "".join(f"{folder.sha256(path)}  {path}\n" for path in sorted(paths)).encode()


def stale_files(folder: Folder, paths: set[str]) -> tuple[str, ...]:
    """Return the files of earlier runs that are not in `paths`."""
    there = (path for path in folder.root.rglob("*") if path.is_file())
    named = (str(path.relative_to(folder.root)) for path in there)
    return tuple(
        sorted(name for name in named if name not in {*paths, MANIFEST} and name[0] != ".")
    )


def _packages(done: Collected, wanted: Packages) -> None:
    sources = _sources(done, wanted)
    mark = hashlib.sha256(repr([source.url for source in sources]).encode()).hexdigest()[:10]
    home = done.folder.state / "apt" / f"{wanted.architecture}-{mark}"
    archives = apt.Archives(home, sources, wanted.architecture)
    done.say(f"packages of {wanted.system}: querying {len(sources)} archives")
    archives.update()
    done.packages |= done.bring(archives.packages(wanted.words))
    done.packages |= set(archives.keep_indexes(done.folder))
    name = f"{PACKAGES}/{wanted.system.id}-{wanted.system.version}.sources"
    done.folder.write(name, nodes_sources(wanted).encode())
    done.packages.add(name)


def nodes_sources(wanted: Packages) -> str:
    """
    Return the apt source file for nodes that install the distribution's packages from the bundle.

    `Targets` limits the indexes that apt requests. Otherwise, apt would fail because a bundle has
    no translations.
    """
    stanzas = [
        f"Types: deb\nURIs: @MIRROR@/{bundle_path(archive.url)}/\n"
        f"Suites: {' '.join(archive.suites)}\n"
        f"{_components(archive)}Targets: Packages\nSigned-By: {archive.key_file}\n"
        for archive in wanted.archives
    ]
    head = (
        "# Replace @MIRROR@ by the mirror's address, and put this file into "
        "/etc/apt/sources.list.d/.\n"
    )
    return head + "\n".join(stanzas)


def _components(archive: Archive) -> str:
    return f"Components: {' '.join(archive.sections)}\n" if archive.sections else ""


def _sources(done: Collected, wanted: Packages) -> list[apt.Source]:
    """
    Return the archives with their key files.

    The key of the vendor is taken from its keyring package.
    """
    sources = [
        apt.Source(each.url, each.suites, each.sections, _key_file(each.key_file, each.url))
        for each in wanted.archives
    ]
    if wanted.repository:
        key = _vendors_key(done, wanted.repository)
        sources.append(apt.Source(wanted.repository.url, ("/",), (), key, VENDOR_PACKAGES))
    if wanted.containers:
        url, key_file = wanted.containers
        sources.append(apt.Source(url, ("/",), (), _key_file(key_file, url)))
    for source in sources:
        path = f"{KEYS}/{source.key.name}"
        done.folder.write(path, source.key.read_bytes())
        done.packages.add(path)
    return sources


def _key_file(name: str, url: str) -> Path:
    path = Path(name).expanduser().resolve()
    if not path.is_file():
        raise FleetError(
            f"{name}: does not exist: write the public keys of {url} into this file (`key_file` in "
            "group_vars)"
        )
    return path


def _vendors_key(done: Collected, repository: Repository) -> Path:
    """
    Return the path of the vendor's key file.

    The key is in the vendor's keyring package. The settings contain the hash of this package.
    """
    keyring = Remote(
        f"{repository.url}/{repository.keyring}",
        f"{bundle_path(repository.url)}/{repository.keyring}",
        (Digest("sha256", repository.keyring_sha256),),
    )
    done.packages |= done.bring((keyring,))
    name = bundle_path(repository.url).removeprefix(f"{PACKAGES}/").replace("/", "_")
    came = done.folder.root / keyring.path
    package = came.suffix == ".deb"
    # apt distinguishes armoured keys from binary keys by the name of the file.
    path = done.folder.state / "keys" / f"{name}{'.gpg' if package else came.suffix}"
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(apt.key_of(came) if package else came.read_bytes())
    return path


def _wheels(done: Collected, locked: Locked) -> None:
    lock = wheels.Lock(
        locked.path,
        operator_files.read(locked.path).decode("utf-8", "replace"),
        locked.index_url,
        locked.find_links,
    )
    done.say(f"wheels of {locked.path}")
    done.wheels |= done.bring(wheels.find(lock, locked.target))


def _model(done: Collected, model: Model) -> None:
    token = None
    if model.token_file:
        token = operator_files.read(model.token_file).decode().strip()
    done.say(f"model {model.repository} at {model.revision}")
    found = models.find(model, token)
    done.models |= {*done.bring(found), *models.describe(done.folder, model, found)}
