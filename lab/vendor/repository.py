"""Build a signed flat apt repository like NVIDIA's, with suite "/" and no components.

Contract: the signing key is created once per lab and stays in `folder`/signing-key.asc, which only
its owner can read. The keyring package contains the public key, which is beside this file. GnuPG's
home is a temporary folder, because the socket of its agent needs a short path, and no agent may
keep running.
"""

from __future__ import annotations

import gzip
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

_GPG_S = 120.0  # a key needs entropy, which a small machine may gather slowly
_SCAN_S = 120.0


def public_key(folder: Path) -> bytes:
    """Return the public key in `folder` in apt's binary form, creating a key on first use."""
    secret, public = folder / "signing-key.asc", folder / "signing-key.gpg"
    if not (secret.exists() and public.exists()):
        folder.mkdir(parents=True, exist_ok=True)
        with _gnupg() as home:
            user = "gpufleet lab mirror <lab@example.invalid>"
            # RSA like the vendor's keys, so every apt that can read these can read this key
            _gpg(home, "--passphrase=", "--quick-gen-key", user, "rsa3072", "sign", "never")
            public.write_bytes(_gpg(home, "--export"))
            partial = folder / "signing-key.partial"
            partial.touch(mode=0o600)
            partial.write_bytes(_gpg(home, "--armor", "--export-secret-keys"))
            partial.replace(secret)
    return public.read_bytes()


def index(
    pool: Path,
    folder: Path,
    edit: Callable[[str], str] = str,
    *,
    origin: str = "NVIDIA",
    label: str = "NVIDIA CUDA",
) -> None:
    """
    Write Packages and Release for the packages in `pool`, signed with the key in `folder`.

    `edit` may change what Packages says before it is hashed and signed. The keyring package's pin
    of 600 selects the vendor's `label`.
    """
    scanned = subprocess.run(
        ["dpkg-scanpackages", "--multiversion", "."],
        cwd=pool,
        check=True,
        capture_output=True,
        timeout=_SCAN_S,
    ).stdout
    scanned = edit(scanned.decode()).encode()
    indexes = {"Packages": scanned, "Packages.gz": gzip.compress(scanned, mtime=0)}
    for name, content in indexes.items():
        (pool / name).write_bytes(content)
    release = _release(indexes, origin, label)
    (pool / "Release").write_text(release)
    with _gnupg() as home:
        _gpg(home, "--import", str(folder / "signing-key.asc"))
        (pool / "InRelease").write_bytes(_gpg(home, "--clearsign", stdin=release))
        detached = _gpg(home, "--armor", "--detach-sign", stdin=release)
        (pool / "Release.gpg").write_bytes(detached)


def _release(indexes: Mapping[str, bytes], origin: str, label: str) -> str:
    lines = [
        f"Origin: {origin}",
        f"Label: {label}",
        "Architecture: x86_64",
        f"Date: {datetime.now(UTC):%a, %d %b %Y %H:%M:%S UTC}",
        "SHA256:",
    ]
    for name, content in indexes.items():
        lines.append(f" {hashlib.sha256(content).hexdigest()} {len(content)} {name}")
    return "\n".join(lines) + "\n"


@contextmanager
def _gnupg() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="gpg-") as home:
        try:
            yield Path(home)
        finally:
            command = ["gpgconf", "--homedir", home, "--kill", "all"]
            subprocess.run(command, check=False, capture_output=True, timeout=_GPG_S)


def _gpg(home: Path, *arguments: str, stdin: str = "") -> bytes:
    command: Sequence[str] = ["gpg", "--batch", "--quiet", "--no-tty", *arguments]
    environment = {**os.environ, "GNUPGHOME": str(home), "LC_ALL": "C"}
    return subprocess.run(
        command,
        input=stdin.encode(),
        env=environment,
        check=True,
        capture_output=True,
        timeout=_GPG_S,
    ).stdout
