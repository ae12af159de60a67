"""Signed apt archives in the two layouts that there are, small enough to make in a test."""

from __future__ import annotations

import gzip
import hashlib
import lzma
import subprocess
from collections.abc import Iterable
from pathlib import Path

from lab.vendor import repository
from lab.vendor.deb import Package


def distribution(
    root: Path, packages: Iterable[Package], keys: Path, *, suite: str = "bookworm"
) -> Path:
    """
    Write a distribution's archive below `root`, signed with the key in `keys`; return the key.

    Like Debian's: dists/ and pool/, by-hash names, no uncompressed index though one is listed, and
    translations that nobody needs.
    """
    public = keys / "distribution.gpg"
    keys.mkdir(parents=True, exist_ok=True)
    public.write_bytes(repository.public_key(keys))
    pool, indexes = root / "pool/main", root / f"dists/{suite}/main/binary-amd64"
    for folder in (pool, indexes):
        folder.mkdir(parents=True, exist_ok=True)
    for package in packages:
        package.build(pool)
    index = subprocess.run(
        ["dpkg-scanpackages", "--multiversion", "pool"], cwd=root, check=True, capture_output=True
    ).stdout
    forms = {
        "Packages": index,
        "Packages.gz": gzip.compress(index, mtime=0),
        "Packages.xz": lzma.compress(index),
    }
    for name, content in forms.items():
        if name != "Packages":
            (indexes / name).write_bytes(content)
            aside = indexes / "by-hash/SHA256" / hashlib.sha256(content).hexdigest()
            aside.parent.mkdir(parents=True, exist_ok=True)
            aside.write_bytes(content)
    listed = {f"binary-amd64/{name}": content for name, content in forms.items()}
    listed["i18n/Translation-en.xz"] = lzma.compress(b"")
    sign(root / f"dists/{suite}", keys, _release(suite, listed))
    return public


def sign(folder: Path, keys: Path, release: str) -> None:
    """Write and sign a Release."""
    (folder / "Release").write_text(release)
    with repository._gnupg() as home:
        repository._gpg(home, "--import", str(keys / "signing-key.asc"))
        (folder / "InRelease").write_bytes(repository._gpg(home, "--clearsign", stdin=release))


def _release(suite: str, forms: dict[str, bytes]) -> str:
    lines = [
        f"Suite: {suite}",
        f"Codename: {suite}",
        "Architectures: amd64",
        "Components: main",
        "Acquire-By-Hash: yes",
        "Date: Thu, 01 Jan 2026 00:00:00 UTC",
        "SHA256:",
    ]
    for name, content in forms.items():
        digest = hashlib.sha256(content).hexdigest()
        lines.append(f" {digest} {len(content)} main/{name}")
    return "\n".join(lines) + "\n"
