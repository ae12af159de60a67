"""A vendor's key is taken from what it came in, proven, and nothing else of it reaches the node."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from gpufleet.remote import payload

KEY, KEPT = "/etc/gpufleet/keys/nvidia-cuda.gpg", "/var/lib/gpufleet/keys/nvidia-cuda.deb"
SECONDS = 60


class Vendor:
    """A web server's folder, and a key that gpg has made."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder / "www", folder / "gnupg"
        self.folder.mkdir()
        self.home.mkdir(mode=0o700)
        self.make_key("Vendor")

    def make_key(self, name: str) -> None:
        options = ("--batch", "--passphrase", "", "--quick-gen-key", name, "rsa2048", "sign", "1y")
        self.gpg(*options)

    def gpg(self, *arguments: str) -> bytes:
        words = ["gpg", "--homedir", str(self.home), *arguments]
        done = subprocess.run(words, check=True, capture_output=True, timeout=SECONDS)
        return done.stdout

    def fingerprints(self) -> list[str]:
        """As gpg says them: the other route to what our own reader computes."""
        rows = self.gpg("--with-colons", "--fingerprint").decode().splitlines()
        primary = [i for i, row in enumerate(rows) if row.startswith("pub:")]
        return [rows[i + 1].split(":")[9] for i in primary]

    def package(self, *keys: tuple[str, bytes]) -> Path:
        """A keyring package that would also bring the vendor's source, as NVIDIA's does."""
        root = self.folder / "deb"
        files = {f"usr/share/keyrings/{name}": content for name, content in keys}
        files["etc/apt/sources.list.d/cuda.list"] = b"deb https://vendor.example /\n"
        files["DEBIAN/control"] = (
            b"Package: cuda-keyring\nVersion: 1.1-1\nArchitecture: all\n"
            b"Maintainer: Vendor <v@example.invalid>\nDescription: keys\n"
        )
        for name, content in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_bytes(content)
        path = self.folder / "keyring.deb"
        build = ["dpkg-deb", "--root-owner-group", "-b", str(root), str(path)]
        subprocess.run(build, check=True, capture_output=True, timeout=SECONDS)
        return path


@pytest.fixture(scope="module")
def vendor(tmp_path_factory: pytest.TempPathFactory) -> Vendor:
    # gpg's agent listens on a socket, whose path must be short.
    return Vendor(tmp_path_factory.mktemp("v"))


@pytest.fixture(scope="module")
def address(vendor: Vendor) -> Iterator[str]:
    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *_: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(vendor.folder)))
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def fetched(
    root: Path,
    url: str,
    sha256: str | None = None,
    fingerprint: str | None = None,
    path: str = os.environ["PATH"],
) -> subprocess.CompletedProcess[str]:
    """Run the program as a node does: its text on the standard input of an isolated Python."""
    program = payload.program(
        "converge/repository_key", url=url, sha256=sha256, fingerprint=fingerprint, key=KEY,
        kept=KEPT, setting="cuda.repository.keyring_sha256", sysroot=str(root),
    )  # fmt: skip
    return subprocess.run(
        [sys.executable, "-I", "-"], input=program, capture_output=True, text=True,
        timeout=SECONDS, check=False, env={"PATH": path},
    )  # fmt: skip


def sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_only_the_key_is_taken_out_of_a_keyring_package(
    vendor: Vendor, address: str, tmp_path: Path
) -> None:
    """Its source and pin would stand before everything that the node's own apt does."""
    key = vendor.gpg("--export", vendor.fingerprints()[0])
    package = vendor.package(("vendor.gpg", key))

    done = fetched(tmp_path, f"{address}/keyring.deb", sha256(package))

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["fingerprint"] == vendor.fingerprints()[0]
    assert tree(tmp_path) == {KEY[1:], KEPT[1:]}
    assert (tmp_path / KEY[1:]).read_bytes() == key
    assert (tmp_path / KEY[1:]).stat().st_mode & 0o777 == 0o644  # apt reads it as _apt
    assert sha256(tmp_path / KEPT[1:]) == sha256(package)


@pytest.mark.parametrize("armour", [(), ("--armor",)], ids=["binary", "armoured"])
def test_a_key_file_is_known_by_its_fingerprint(
    vendor: Vendor, address: str, tmp_path: Path, armour: tuple[str, ...]
) -> None:
    """dnf has no keyring package; what our own reader computes is what gpg says."""
    fingerprint = vendor.fingerprints()[0]
    (vendor.folder / "key.pub").write_bytes(vendor.gpg(*armour, "--export", fingerprint))

    done = fetched(tmp_path, f"{address}/key.pub", None, fingerprint)

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["fingerprint"] == fingerprint


def test_a_file_that_is_not_the_named_one_leaves_the_key_that_was_there(
    vendor: Vendor, address: str, tmp_path: Path
) -> None:
    vendor.package(("vendor.gpg", vendor.gpg("--export")))
    (tmp_path / KEY[1:]).parent.mkdir(parents=True)
    (tmp_path / KEY[1:]).write_bytes(b"former")

    done = fetched(tmp_path, f"{address}/keyring.deb", "0" * 64)

    assert done.returncode == 1
    assert "does not have the hash in cuda.repository.keyring_sha256" in done.stderr
    assert "nothing was changed" in done.stderr
    assert (tmp_path / KEY[1:]).read_bytes() == b"former"
    assert tree(tmp_path) == {KEY[1:]}


def test_another_key_than_the_known_one_is_refused(
    vendor: Vendor, address: str, tmp_path: Path
) -> None:
    path = vendor.folder / "key.pub"
    path.write_bytes(vendor.gpg("--export", vendor.fingerprints()[0]))

    done = fetched(tmp_path, f"{address}/key.pub", sha256(path), "A" * 40)

    assert done.returncode == 1
    assert vendor.fingerprints()[0] in done.stderr
    assert tree(tmp_path) == set()


def test_a_second_key_in_the_file_is_refused(vendor: Vendor, address: str, tmp_path: Path) -> None:
    """A mirror that adds a key of its own to the vendor's would be trusted like the vendor."""
    vendor.make_key("Somebody")
    path = vendor.folder / "key.pub"
    path.write_bytes(vendor.gpg("--export"))

    done = fetched(tmp_path, f"{address}/key.pub", None, vendor.fingerprints()[0])

    assert done.returncode == 1
    assert all(each in done.stderr for each in vendor.fingerprints())


def test_a_package_with_two_keys_is_refused(vendor: Vendor, address: str, tmp_path: Path) -> None:
    key = vendor.gpg("--export")
    package = vendor.package(("vendor.gpg", key), ("other.gpg", key))

    done = fetched(tmp_path, f"{address}/keyring.deb", sha256(package))

    assert done.returncode == 1
    assert "contains 2 keys" in done.stderr
    (vendor.folder / "deb/usr/share/keyrings/other.gpg").unlink()


def test_a_node_that_cannot_read_a_package_names_the_setting_for_a_key_file(
    vendor: Vendor, address: str, tmp_path: Path
) -> None:
    package = vendor.package(("vendor.gpg", vendor.gpg("--export")))
    url = f"{address}/keyring.deb"

    done = fetched(tmp_path, url, sha256(package), path=str(tmp_path))

    assert done.returncode == 1
    assert done.stderr.startswith(f"{url} is a package for Debian and Ubuntu, which this node")
    assert "set cuda.repository.keyring to" in done.stderr
    assert tree(tmp_path) == set()


@pytest.mark.parametrize(
    "content",
    [b"", b"<html>log in first</html>", b"-----BEGIN PGP PUBLIC KEY BLOCK-----\n\nxx", b"\x99\x01"],
    ids=["empty", "a page", "half of an armour", "half of a packet"],
)
def test_what_is_no_key_is_refused(
    vendor: Vendor, address: str, tmp_path: Path, content: bytes
) -> None:
    """Also when its hash is the named one: somebody has hashed a proxy's page."""
    path = vendor.folder / "key.pub"
    path.write_bytes(content)

    done = fetched(tmp_path, f"{address}/key.pub", sha256(path))

    assert done.returncode == 1
    assert "no public key" in done.stderr
    assert tree(tmp_path) == set()


@pytest.mark.parametrize("url", ["http://127.0.0.1:9/key.pub", "{address}/nowhere.pub"])
def test_what_cannot_be_fetched_is_one_sentence(address: str, tmp_path: Path, url: str) -> None:
    done = fetched(tmp_path, url.format(address=address), "0" * 64)

    assert done.returncode == 1
    assert "cannot be fetched" in done.stderr
    assert len(done.stderr.splitlines()) == 1
