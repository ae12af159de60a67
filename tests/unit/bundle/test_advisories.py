"""An advisory source is asked for every package, and what it does not say is not "none"."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from uv import find_uv_bin

from gpufleet.bundle import advisories, download
from gpufleet.bundle.advisories import Advisory
from gpufleet.cli.packages_command import packages
from gpufleet.errors import FleetError

# In OSV's form (ossf.github.io/osv-schema), written for this test.
SAID = {
    "GHSA-aaaa-bbbb-cccc": {
        "id": "GHSA-aaaa-bbbb-cccc",
        "modified": "2026-01-01T00:00:00Z",
        "published": "2026-01-01T00:00:00Z",
        "summary": "A template reads any file",
        "aliases": ["CVE-2026-1"],
        "affected": [
            {
                "package": {"name": "Jinja_2", "ecosystem": "PyPI"},
                "ranges": [
                    {"type": "GIT", "repo": "x", "events": [{"introduced": "0"}, {"fixed": "abc"}]},
                    {
                        "type": "ECOSYSTEM",
                        "events": [{"introduced": "0"}, {"fixed": "3.1.6"}, {"fixed": "2.11.3"}],
                    },
                ],
            },
            {
                "package": {"name": "jinja-2", "ecosystem": "npm"},
                "ranges": [{"type": "ECOSYSTEM", "events": [{"fixed": "9.9"}]}],
            },
        ],
    },
    "PYSEC-2026-2": {
        "id": "PYSEC-2026-2",
        "modified": "2026-01-01T00:00:00Z",
        "affected": [{"package": {"name": "torch", "ecosystem": "PyPI"}}],
    },
    "PYSEC-2026-3": {
        "id": "PYSEC-2026-3",
        "modified": "2026-01-01T00:00:00Z",
        "withdrawn": "2026-02-01T00:00:00Z",
    },
}
NAMED = {
    ("jinja-2", "3.1.4"): ["GHSA-aaaa-bbbb-cccc"],
    ("torch", "2.9.0"): ["PYSEC-2026-2"],
    ("click", "8.1.7"): ["PYSEC-2026-3"],
}
LOCK = "".join(
    f"{pin} \\\n    --hash=sha256:{'0' * 64}\n"
    for pin in (
        "click==8.1.7",
        "jinja_2==3.1.4",
        "rich==14.0 ; os_name == 'nt'",
        "torch==2.9.0+cu130",
    )
)


@dataclass
class Source:
    """A source whose answers a test may change; `asked` are the queries that it got."""

    url: str = ""
    named: dict[tuple[str, str], list[str]] = field(default_factory=lambda: dict(NAMED))
    said: dict[str, Any] = field(default_factory=lambda: dict(SAID))
    batch: bytes | None = None
    status: int = 200
    pages: bool = False
    asked: list[dict[str, Any]] = field(default_factory=list)

    def results(self, queries: list[dict[str, Any]]) -> list[dict[str, Any]]:
        self.asked += queries
        found = []
        for each in queries:
            ids = self.named.get((each["package"]["name"], each["version"]), [])
            if self.pages and ids and "page_token" not in each:
                found.append({"next_page_token": "more"})
            else:
                found.append(
                    {"vulns": [{"id": one, "modified": "x"} for one in ids]} if ids else {}
                )
        return found


@contextmanager
def running(source: Source) -> Iterator[Source]:
    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *_: object) -> None:
            """Say nothing."""

        def do_POST(self) -> None:
            content = self.rfile.read(int(self.headers["Content-Length"]))
            assert self.path == "/v1/querybatch"
            made = json.dumps({"results": source.results(json.loads(content)["queries"])}).encode()
            self._answer(source.status, made if source.batch is None else source.batch)

        def do_GET(self) -> None:
            found = source.said.get(self.path.removeprefix("/v1/vulns/"))
            self._answer(200 if found else 404, json.dumps(found).encode())

        def _answer(self, status: int, content: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        source.url = f"http://127.0.0.1:{server.server_port}"
        yield source
        server.shutdown()


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch) -> Iterator[Source]:
    monkeypatch.setattr(download, "PAUSES", (0,))
    with running(Source()) as found:
        yield found


def audit(folder: Path, url: str, text: str = LOCK) -> Result:
    (folder / "lock.txt").write_text(text)
    words = ["audit", str(folder / "lock.txt"), "--advisories", url]
    return CliRunner().invoke(packages, words, standalone_mode=False)


def refused(folder: Path, url: str, text: str = LOCK) -> tuple[str, ...]:
    """Return the sentences; the command line ends with status 2 for these."""
    result = audit(folder, url, text)
    assert isinstance(result.exception, FleetError), result.output
    assert result.stdout == ""
    return result.exception.problems


@pytest.mark.parametrize("pages", [False, True])
def test_each_advisory_is_named_with_what_mends_it(
    source: Source, tmp_path: Path, pages: bool
) -> None:
    source.pages = pages
    result = audit(tmp_path, f"{source.url}/")

    assert result.return_value == 1
    assert result.stdout.splitlines() == [
        "jinja_2 3.1.4: GHSA-aaaa-bbbb-cccc (CVE-2026-1), fixed in 3.1.6",
        "torch 2.9.0+cu130: PYSEC-2026-2, no fix is known",
    ]
    assert "4 packages looked up, 2 advisories" in result.stderr


def test_every_package_is_asked_about_by_its_plain_name_and_public_version(
    source: Source, tmp_path: Path
) -> None:
    """Also those of other systems: which a node installs is not known here."""
    audit(tmp_path, source.url)
    assert {(each["package"]["name"], each["version"]) for each in source.asked} == {
        ("click", "8.1.7"),
        ("jinja-2", "3.1.4"),
        ("rich", "14.0"),
        ("torch", "2.9.0"),
    }
    assert {each["package"]["ecosystem"] for each in source.asked} == {"PyPI"}


def test_a_lock_without_any_passes(source: Source, tmp_path: Path) -> None:
    source.named.clear()
    result = audit(tmp_path, source.url)
    assert (result.return_value, result.stdout) == (0, "")


def test_more_than_a_batch_is_asked_in_several(
    source: Source, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(advisories, "_BATCH", 2)
    pins = [("a", "1"), ("b", "1"), ("jinja_2", "3.1.4"), ("z", "1")]
    found = advisories.find(source.url, pins)
    assert found == (
        Advisory("jinja_2", "3.1.4", "GHSA-aaaa-bbbb-cccc", ("CVE-2026-1",), ("3.1.6",)),
    )
    assert len(source.asked) == 4


def test_a_source_that_is_not_reached_is_no_pass(source: Source, tmp_path: Path) -> None:
    (problem,) = refused(tmp_path, "http://127.0.0.1:9")
    assert "cannot be reached" in problem
    source.status = 503
    (problem,) = refused(tmp_path, source.url)
    assert "503" in problem
    (problem,) = refused(tmp_path, str(tmp_path))
    assert "is not a URL: write an address that begins with http://" in problem


@pytest.mark.parametrize(
    "answer",
    [
        b"",
        b"<html>",
        b"[]",
        b"{}",
        b'{"results": []}',
        b'{"results": [{}, {}, {}]}',
        b'{"results": [{"vulns": [{}]}, {}, {}, {}]}',
        b'{"results": [1, {}, {}, {}]}',
    ],
)
def test_an_answer_that_is_none_is_no_pass(source: Source, tmp_path: Path, answer: bytes) -> None:
    source.batch = answer
    (problem,) = refused(tmp_path, source.url)
    assert "the lock was not checked" in problem


def test_an_advisory_that_cannot_be_read_is_no_pass(source: Source, tmp_path: Path) -> None:
    del source.said["PYSEC-2026-2"]
    (problem,) = refused(tmp_path, source.url)
    assert "PYSEC-2026-2" in problem
    source.said["PYSEC-2026-2"] = {"id": "PYSEC-1"}
    (problem,) = refused(tmp_path, source.url)
    assert "the answer is about 'PYSEC-1'" in problem


def test_pages_without_an_end_are_no_pass(source: Source, tmp_path: Path) -> None:
    row = {"next_page_token": "again"}
    source.batch = json.dumps({"results": [row]}).encode()
    (problem,) = refused(tmp_path, source.url, "click==8.1.7 --hash=sha256:00\n")
    assert "has too many pages" in problem


def test_what_it_says_of_versions_may_be_wrong_and_the_advisory_stands(
    source: Source, tmp_path: Path
) -> None:
    source.said["PYSEC-2026-2"] = {"id": "PYSEC-2026-2", "affected": [{"ranges": 7}]}
    result = audit(tmp_path, source.url)
    assert result.return_value == 1
    assert "torch 2.9.0+cu130: PYSEC-2026-2, no fix is known" in result.stdout


def test_a_lock_that_cannot_be_asked_about_is_no_pass(source: Source, tmp_path: Path) -> None:
    text = "deep @ git+https://x.example.net/deep\n"
    (problem,) = refused(tmp_path, source.url, text)
    assert problem.startswith("deep: is locked as a URL without a version")
    (problem,) = refused(tmp_path, source.url, "")
    assert "has no packages" in problem
    assert source.asked == []


def test_uv_reads_the_same_source_in_the_same_way(source: Source, tmp_path: Path) -> None:
    """So the answers of this test are in the form that uv takes for OSV's."""
    (tmp_path / "pyproject.toml").write_text(
        '[project]\nname = "x"\nversion = "0"\nrequires-python = ">=3.11"\n'
        'dependencies = ["jinja-2==3.1.4"]\n'
    )
    (tmp_path / "uv.lock").write_text(
        'version = 1\nrevision = 3\nrequires-python = ">=3.11"\n'
        '[[package]]\nname = "x"\nversion = "0"\nsource = { virtual = "." }\n'
        'dependencies = [{ name = "jinja-2" }]\n'
        '[package.metadata]\nrequires-dist = [{ name = "jinja-2", specifier = "==3.1.4" }]\n'
        '[[package]]\nname = "jinja-2"\nversion = "3.1.4"\n'
        'source = { registry = "https://index.example.net/simple" }\n'
        f'wheels = [{{ url = "https://index.example.net/jinja_2-3.1.4-py3-none-any.whl", '
        f'hash = "sha256:{"0" * 64}" }}]\n'
    )
    words = ["audit", "--frozen", "--no-config", "--no-cache", "--service-url", source.url]
    done = subprocess.run(
        [find_uv_bin(), *words], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "GHSA-aaaa-bbbb-cccc" in done.stdout + done.stderr
    assert "3.1.6" in done.stdout + done.stderr
