"""A file comes whole and as announced, or not at all; what has come is not fetched again."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gpufleet.bundle import download
from gpufleet.bundle.download import Digest, Folder, MissingFileError, Remote, open_folder
from gpufleet.errors import FleetError

CONTENT = bytes(range(256)) * 4096
SHA256 = hashlib.sha256(CONTENT).hexdigest()


@dataclass
class Origin:
    """A server that does as it is told, and remembers what it was asked."""

    url: str = ""
    status: int = 200
    busy: int = 0
    """So many of the next answers are 503."""
    away: int = 0
    """So many of the next connections are closed without an answer."""
    cuts: list[int] = field(default_factory=list)
    """After so many bytes each of the next answers ends."""
    asked: list[dict[str, str]] = field(default_factory=list)
    redirect: str = ""
    pauses: float = 0
    """Seconds in the middle of each answer."""


@pytest.fixture
def origin(monkeypatch: pytest.MonkeyPatch) -> Iterator[Origin]:
    told = Origin()
    monkeypatch.setattr(download, "PAUSES", (0, 0, 0))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            told.asked.append(dict(self.headers))
            if told.away:
                told.away -= 1
                return
            if told.busy:
                told.busy -= 1
                self.send_error(503)
                return
            first = int(self.headers.get("Range", "bytes=0-")[6:-1])
            self.send_response(302 if told.redirect else 206 if first else told.status)
            if told.redirect:
                self.send_header("Location", told.redirect)
            self.send_header("Content-Length", str(len(CONTENT) - first))
            self.end_headers()
            end = told.cuts.pop(0) if told.cuts else len(CONTENT)
            if told.pauses:
                self.wfile.write(CONTENT[first:][: end // 2])
                time.sleep(told.pauses)
                first, end = first + end // 2, end - end // 2
            self.wfile.write(CONTENT[first:][:end])

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """A client that has read enough closes the connection: no stack is printed."""

    server = Server(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    told.url = f"http://127.0.0.1:{server.server_address[1]}"
    yield told
    server.shutdown()
    server.server_close()


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Folder]:
    with open_folder(tmp_path / "bundle") as bundle:
        yield bundle


def remote(origin: Origin, digest: str = SHA256, **more) -> Remote:
    algorithm = {64: "sha256", 40: "git", 128: "sha512"}[len(digest)]
    return Remote(f"{origin.url}/a/b", "a/b", (Digest(algorithm, digest),), **more)


@pytest.mark.parametrize(
    "digest",
    [
        SHA256,
        hashlib.sha512(CONTENT).hexdigest(),
        hashlib.sha1(b"blob %d\0" % len(CONTENT) + CONTENT).hexdigest(),
    ],
    ids=["sha256", "sha512", "git"],
)
def test_a_file_is_held_to_its_hash(folder: Folder, origin: Origin, digest: str):
    assert folder.fetch(remote(origin, digest))
    assert (folder.root / "a/b").read_bytes() == CONTENT
    assert not folder.fetch(remote(origin, digest))
    assert len(origin.asked) == 1


def test_another_content_is_thrown_away(folder: Folder, origin: Origin):
    with pytest.raises(FleetError, match="does not match the hash that the source lists"):
        folder.fetch(remote(origin, "0" * 64))

    names = {path.name for path in folder.root.rglob("*") if path.is_file()}
    assert names <= {"lock"}


@pytest.mark.parametrize("size", [len(CONTENT), None], ids=["size-known", "size-unknown"])
def test_a_download_that_is_cut_goes_on(folder: Folder, origin: Origin, size: int | None):
    """Only what is missing is asked for, and the whole is what was announced."""
    origin.cuts = [1000, 5000]

    assert folder.fetch(remote(origin, size=size))

    assert [each.get("Range") for each in origin.asked] == [None, "bytes=1000-", "bytes=6000-"]
    assert (folder.root / "a/b").read_bytes() == CONTENT


def test_what_a_killed_run_left_is_gone_on_from(folder: Folder, origin: Origin):
    left = folder.state / "partial/a/b"
    left.parent.mkdir(parents=True)
    left.write_bytes(CONTENT[:7])

    folder.fetch(remote(origin, size=len(CONTENT)))

    assert [each.get("Range") for each in origin.asked] == ["bytes=7-"]


def test_what_a_killed_run_left_of_another_file_is_not_believed(folder: Folder, origin: Origin):
    """The second try begins anew: a file of the same name had changed meanwhile."""
    left = folder.state / "partial/a/b"
    left.parent.mkdir(parents=True)
    left.write_bytes(b"another")

    with pytest.raises(FleetError, match="does not match the hash that the source lists"):
        folder.fetch(remote(origin, size=len(CONTENT)))

    assert folder.fetch(remote(origin, size=len(CONTENT)))


def test_an_end_that_never_comes_is_an_error(folder: Folder, origin: Origin):
    origin.cuts = [10, 10, 10]

    with pytest.raises(FleetError, match=r"cut off|ends before"):
        folder.fetch(remote(origin, size=len(CONTENT)))

    assert not (folder.root / "a/b").exists()


@pytest.mark.parametrize(
    ("status", "kind", "times"),
    [
        (403, FleetError, 1),
        (404, MissingFileError, 1),
        (410, MissingFileError, 1),
        *((status, FleetError, 4) for status in (429, 500, 502, 503, 504)),
    ],
)
def test_an_error_page_is_no_file_and_only_one_that_may_pass_is_asked_for_again(
    folder: Folder, origin: Origin, status: int, kind: type, times: int
):
    origin.status = status

    with pytest.raises(kind, match=r"/a/b"):
        folder.fetch(remote(origin))

    assert len(origin.asked) == times


@pytest.mark.parametrize(
    ("busy", "away", "problem"),
    [(3, 0, None), (4, 0, "HTTP status 503"), (0, 3, None), (0, 4, "cannot be reached")],
)
def test_a_server_that_may_answer_later_is_asked_again_after_each_pause(
    folder: Folder, origin: Origin, busy: int, away: int, problem: str | None
):
    origin.busy, origin.away = busy, away

    with pytest.raises(FleetError, match=problem) if problem else nullcontext():
        folder.fetch(remote(origin))

    assert len(origin.asked) == 4
    assert (folder.root / "a/b").exists() is not bool(problem)


def test_a_token_stays_with_the_server_it_is_for(folder: Folder, origin: Origin):
    """The Hub redirects to a store of somebody else's, which must not see it."""
    store = f"{origin.url.replace('127.0.0.1', 'localhost')}/stored"

    origin.redirect = store
    with pytest.raises(FleetError):  # it redirects for ever
        folder.fetch(remote(origin, headers={"Authorization": "Bearer hf_secret"}))

    sent = [each.get("Authorization") for each in origin.asked]
    assert sent[0] == "Bearer hf_secret"
    assert len(sent) > 1
    assert set(sent[1:]) == {None}


def test_problems_are_named_all_at_once(folder: Folder, origin: Origin):
    wanted = [
        Remote(f"{origin.url}/{name}", name, (Digest("sha256", digest),))
        for name, digest in (("good", SHA256), ("bad", "0" * 64), ("worse", "1" * 64))
    ]

    with pytest.raises(FleetError) as caught:
        folder.bring(wanted, lambda _: None)

    assert len(caught.value.problems) == 2
    assert (folder.root / "good").read_bytes() == CONTENT


def test_two_runs_do_not_share_a_folder(folder: Folder):
    with pytest.raises(FleetError, match="another run"), open_folder(folder.root):
        pass


def test_a_hash_is_remembered_while_the_file_is_the_same(folder: Folder):
    """Hundreds of gigabytes are read once; a file that was written to is read again."""
    path = folder.root / "model"
    path.write_bytes(b"one")
    assert folder.sha256("model") == hashlib.sha256(b"one").hexdigest()

    path.write_bytes(b"two!")

    assert folder.sha256("model") == hashlib.sha256(b"two!").hexdigest()


def test_weak_hashes_prove_nothing():
    with pytest.raises(FleetError, match="md5sum"):
        Digest("md5sum", "0" * 32)


def test_a_download_of_over_two_seconds_says_how_far_it_is(folder: Folder, origin: Origin):
    """Of what has to come: what is there already is no progress."""
    (folder.root / "there").write_bytes(CONTENT)
    wanted = [
        Remote(origin.url, path, (Digest("sha256", SHA256),), len(CONTENT))
        for path in ("there", "comes")
    ]
    origin.pauses = 4
    said: list[str] = []

    folder.bring(wanted, said.append)

    assert said == ["downloads: 0.0 of 1.0 MiB", "comes"]
    assert (folder.root / "comes").read_bytes() == CONTENT
