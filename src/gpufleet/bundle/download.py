"""Download files into a bundle. A file in the bundle is always complete and has the right hash.

An interrupted download resumes at its last byte. Existing files are hashed only once. Their hashes
are stored with size and mtime in `.state/`, which is not part of the bundle.
"""

from __future__ import annotations

import fcntl
import hashlib
import http.client
import json
import os
import ssl
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from gpufleet.errors import FleetError
from gpufleet.progress import Amount, Pace
from gpufleet.remote.daemon_pool import DaemonPool

STATE = ".state"
MANIFEST = "MANIFEST"
# If no byte arrives for this time in seconds, a connection counts as dead.
SILENT_SECONDS = 60
ATTEMPTS = 3
# Seconds before each further request to a server that could not be reached or was too busy.
PAUSES = (1, 3, 9)
BUSY = {429, 500, 502, 503, 504}
AT_ONCE = 8
_CHUNK = 1 << 20
_ALGORITHMS = ("sha256", "sha512", "git")


@dataclass(frozen=True)
class Digest:
    """
    The required hash of a file's content.

    The algorithm `git` is the SHA-1 of git's header and the content. The Hugging Face Hub uses it
    for small files.
    """

    algorithm: str
    hexdigest: str

    def __post_init__(self) -> None:
        if self.algorithm not in _ALGORITHMS:
            raise FleetError(
                f"a source has only {self.algorithm} hashes, which are not secure: use a source "
                f"with hashes of one of these kinds: {', '.join(_ALGORITHMS)}"
            )


@dataclass(frozen=True)
class Remote:
    """One file to download, with its URL, its path in the bundle, and the accepted hashes."""

    url: str
    path: str
    digests: tuple[Digest, ...]
    size: int | None = None
    headers: Mapping[str, str] = field(default_factory=dict, hash=False, repr=False)


class MissingFileError(FleetError):  # the caller may be able to continue without this file
    """The server does not have this file."""


class Folder:
    """
    The folder of a bundle, with methods to download files into it.

    Create it with `open_folder`, which allows one process at a time.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.state = root / STATE
        self._known: dict[str, list[Any]] = {}  # path: [size, time of change in ns, sha256]
        self._lock = threading.Lock()
        self.downloaded = 0
        """The number of bytes that this run has downloaded."""
        self._arrived = 0
        self._spared = 0

    def bring(self, wanted: Iterable[Remote], say: Callable[[str], None]) -> None:
        """
        Fetch all these files in parallel.

        `say` receives the path of each downloaded file, and the progress if the downloads take
        longer than two seconds. Raises FleetError with every failed download. Completed files stay.
        """

        def one(remote: Remote) -> str | None:
            try:
                return remote.path if self.fetch(remote) else None
            except FleetError as error:
                problems.extend(error.problems)
                return None

        problems: list[str] = []
        files = list(wanted)
        with self._watched(files, say), DaemonPool(AT_ONCE) as pool:
            for path in filter(None, pool.map(one, files)):
                say(path)
        if problems:
            raise FleetError(*sorted(problems))

    def fetch(self, remote: Remote) -> bool:
        """
        Download one file unless the bundle has it. Return whether the file was downloaded.

        Raises `FleetError`, or `MissingFileError` if the server does not have the file.
        """
        target = self.root / remote.path
        if target.is_file():
            if self._has(target, remote):
                self._count(spared=remote.size or 0)
                return False
            target.unlink()
        partial = self.state / "partial" / remote.path
        partial.parent.mkdir(parents=True, exist_ok=True)
        if partial.exists():
            self._count(spared=partial.stat().st_size)
        _download(remote, partial, lambda count: self._count(arrived=count))
        if not any(_matches(partial, digest) for digest in remote.digests):
            partial.unlink()
            expected = " or ".join(digest.hexdigest for digest in remote.digests)
            raise FleetError(
                f"{without_password(remote.url)}: the content does not match the hash that the "
                f"source lists ({expected[:200]}), so it was discarded. If the source has just "
                "changed, run the command again"
            )
        with self._lock:
            self.downloaded += partial.stat().st_size
        self._place(partial, target)
        return True

    def write(self, path: str, content: bytes) -> None:
        """Write a generated file atomically if its content differs from the existing file."""
        target = self.root / path
        if not target.is_file() or target.read_bytes() != content:
            partial = self.state / "partial" / path
            partial.parent.mkdir(parents=True, exist_ok=True)
            partial.write_bytes(content)
            self._place(partial, target)

    def sha256(self, path: str) -> str:
        """
        Return the SHA-256 of a file.

        The hash is cached while the file's size and mtime do not change.
        """
        target = self.root / path
        stat = target.stat()
        known = self._known.get(path)
        if known is None or known[:2] != [stat.st_size, stat.st_mtime_ns]:
            known = [stat.st_size, stat.st_mtime_ns, _hash(target, hashlib.sha256())]
            with self._lock:
                self._known[path] = known
        return str(known[2])

    def load(self) -> None:
        """
        Load the cached hashes.

        If the cache cannot be read, it is ignored, and hashes are computed again.
        """
        try:
            known = json.loads((self.state / "hashes.json").read_text())
        except (OSError, ValueError):
            known = {}
        self._known = known if isinstance(known, dict) else {}

    def save(self) -> None:
        """Save the hashes for the next run."""
        partial = self.state / "hashes.json.new"
        with self._lock:  # after Ctrl-C downloads still run
            known = dict(self._known)
        partial.write_text(json.dumps(known, indent=0, sort_keys=True))
        partial.replace(self.state / "hashes.json")

    @contextmanager
    def _watched(self, files: list[Remote], say: Callable[[str], None]) -> Iterator[None]:
        """Report the progress of the downloads of these files while the block runs."""
        self._arrived = self._spared = 0
        sizes = [each.size for each in files if each.size is not None]
        total = sum(sizes) if len(sizes) == len(files) else None
        ended = threading.Event()

        def watch() -> None:
            amount, pace = Amount(), Pace(time.monotonic())
            while not ended.wait(1):
                now = time.monotonic()
                amount.record(now, self._arrived, None if total is None else total - self._spared)
                if pace.is_due(now):
                    say(f"downloads: {amount.text()}")

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            yield
        finally:
            ended.set()
            watcher.join(timeout=2)

    def _count(self, arrived: int = 0, spared: int = 0) -> None:
        """Count bytes that were downloaded, and bytes that do not have to be downloaded."""
        with self._lock:
            self._arrived += arrived
            self._spared += spared

    def _has(self, target: Path, remote: Remote) -> bool:
        size = target.stat().st_size
        if remote.size is not None and size != remote.size:
            return False
        ours = Digest("sha256", self.sha256(remote.path))
        return ours in remote.digests or any(
            _matches(target, digest) for digest in remote.digests if digest.algorithm != "sha256"
        )

    def _place(self, partial: Path, target: Path) -> None:
        with partial.open("rb") as file:
            os.fsync(file.fileno())
        # Remove the manifest, because a bundle that is being changed is not complete until its
        # manifest is written again.
        (self.root / MANIFEST).unlink(missing_ok=True)
        target.parent.mkdir(parents=True, exist_ok=True)
        partial.chmod(0o644)
        partial.replace(target)


@contextmanager
def open_folder(root: Path) -> Iterator[Folder]:
    """
    Open the folder of a bundle, and create it if it is missing.

    Raises FleetError if the folder has files that are not a bundle's, if it cannot be written, or
    if another process uses it.
    """
    folder = Folder(root)
    try:
        if root.is_dir() and any(root.iterdir()) and not folder.state.is_dir():
            raise FleetError(
                f"{root}: has files that do not belong to a bundle: use an empty directory"
            )
        folder.state.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise FleetError(f"{root}: gpufleet cannot write a bundle here: {error.strerror}") from None
    with (folder.state / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise FleetError(
                f"{root}: another run is writing this directory: wait until that run ends"
            ) from None
        folder.load()
        try:
            yield folder
        finally:
            folder.save()


def read(
    url: str, headers: Mapping[str, str] | None = None, data: bytes | None = None
) -> tuple[bytes, str]:
    """
    Return a page's content and media type. If `data` is given, it is sent in a POST request.

    Raises FleetError, or `MissingFileError` if the page does not exist.
    """
    with _answer(url, headers or {}, data) as answer:
        try:
            return answer.read(), answer.headers.get_content_type()
        except (OSError, http.client.HTTPException) as error:
            raise FleetError(
                f"{without_password(url)}: the download was cut off: {error}"
            ) from None


def without_password(url: str) -> str:
    """Return a URL without its user and password, to show it in messages."""
    parts = urlsplit(url)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2]).geturl()


def _download(remote: Remote, partial: Path, arrived: Callable[[int], None]) -> None:
    """
    Download a file, or continue an earlier attempt. `arrived` is called with the size of each part.
    """
    for attempt in range(ATTEMPTS):
        there = partial.stat().st_size if partial.exists() else 0
        if remote.size is not None and there >= remote.size:
            if there == remote.size:
                return
            partial.unlink()
            there = 0
        headers = {**remote.headers, **({"Range": f"bytes={there}-"} if there else {})}
        try:
            with _answer(remote.url, headers) as answer:
                mode = "ab" if answer.status == http.HTTPStatus.PARTIAL_CONTENT else "wb"
                with partial.open(mode) as file:
                    while chunk := answer.read(_CHUNK):
                        file.write(chunk)
                        arrived(len(chunk))
                if answer.length:  # bytes of the announced size that did not arrive
                    raise http.client.IncompleteRead(b"", answer.length)
            if remote.size is None or partial.stat().st_size >= remote.size:
                return
        except _RangeRefused:
            partial.unlink()
        except (OSError, http.client.HTTPException) as error:
            if attempt == ATTEMPTS - 1:
                raise FleetError(
                    f"{without_password(remote.url)}: the download was cut off: {error}"
                ) from None
    raise FleetError(
        f"{without_password(remote.url)}: the file is shorter than its listed size of "
        f"{remote.size} bytes"
    )


class _RangeRefused(Exception):  # noqa: N818
    """The local file is at least as long as the file on the server."""


def _answer(url: str, headers: Mapping[str, str], data: bytes | None = None) -> Any:
    """Send a request to a server. While the server is busy or unreachable, retry after pauses."""
    for pause in PAUSES:
        with suppress(_BusyServerError):
            return _answer_at_once(url, headers, data)
        time.sleep(pause)
    return _answer_at_once(url, headers, data)


class _BusyServerError(FleetError):
    """The server is busy or unreachable, but may answer later."""


def _answer_at_once(url: str, headers: Mapping[str, str], data: bytes | None) -> Any:
    # Settings allow http and https alone.
    request = urllib.request.Request(url, data, {"User-Agent": "gpufleet"})  # noqa: S310
    for name, value in headers.items():
        if name == "Authorization":  # never sent to a server to which this one redirects
            request.add_unredirected_header(name, value)
        else:
            request.add_header(name, value)
    try:
        return urllib.request.urlopen(request, timeout=SILENT_SECONDS)  # noqa: S310
    except urllib.error.HTTPError as error:
        if error.code in {404, 410}:
            raise MissingFileError(f"{without_password(url)}: there is no such file") from None
        if error.code == 416:
            raise _RangeRefused from None
        kind = _BusyServerError if error.code in BUSY else FleetError
        raise kind(f"{without_password(url)}: HTTP status {error.code} {error.reason}") from None
    except OSError as error:
        # After a minute of silence, or for an invalid certificate, the request is not repeated.
        final = isinstance(getattr(error, "reason", error), TimeoutError | ssl.SSLError)
        kind = FleetError if final else _BusyServerError
        raise kind(f"{without_password(url)}: cannot be reached: {error}") from None


def _matches(path: Path, digest: Digest) -> bool:
    if digest.algorithm == "git":
        start = hashlib.sha1(b"blob %d\0" % path.stat().st_size, usedforsecurity=False)
    else:
        start = hashlib.new(digest.algorithm)
    return _hash(path, start) == digest.hexdigest


def _hash(path: Path, hashing: Any) -> str:
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hashing.update(chunk)
    return str(hashing.hexdigest())
