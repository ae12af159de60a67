"""RUNS ON THE NODE, as root: download the public key of a vendor's repository.

Takes (`PARAMETERS`):
  url          URL of a keyring package (.deb), or of the key's own file
  sha256       SHA-256 of that file; null: only the fingerprint is checked
  fingerprint  fingerprint of the key, 40 hexadecimal digits; null: only the hash is checked
  key          path of the installed key, for the configuration of apt or dnf
  kept         path of the downloaded file; if this file and `key` exist, nothing is done
  setting      key of the setting that has these values, for messages
  sysroot      prefix of all paths; "" on a real machine
Prints one JSON document {"schema": 1, "fingerprint": the fingerprint of the key in `key`}. On a
problem, it prints one sentence on stderr and exits with status 1. The previous key stays.

A keyring package is never installed, because it would add the vendor's repository with a higher pin
than the distribution's packages. Only the key is extracted. The program needs only Python 3.8 and
the standard library.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import urllib.error
import urllib.request
from typing import Any, Iterator, Tuple

PARAMETERS: dict[str, Any] = globals().get("PARAMETERS") or {}

# Size limit of the download. A keyring package has 4 KB.
MOST_BYTES = 1 << 20
ANSWER_SECONDS = 20
ALL_SECONDS = 120


class RefusedError(Exception):
    """Raised to refuse a key. Its text is one sentence for the operator."""


def main(asked: dict[str, Any]) -> str:
    """Fetch, verify and install the key, and return its fingerprint."""
    signal.alarm(ALL_SECONDS)
    root = asked["sysroot"]
    fetched = fetch(asked["url"])
    if asked["sha256"] and hashlib.sha256(fetched).hexdigest() != asked["sha256"]:
        raise RefusedError(
            "%s does not have the hash in %s (it has %s); nothing was changed. Compare the file's "
            "hash with the vendor's, then correct the setting"
            % (asked["url"], asked["setting"], hashlib.sha256(fetched).hexdigest())
        )
    is_package = fetched.startswith(b"!<arch>\n")
    key = from_package(asked["url"], fetched) if is_package else fetched
    found = fingerprints(key)
    if not found or (asked["fingerprint"] and found != [asked["fingerprint"]]):
        raise RefusedError(
            "%s has %s instead of the key %s in %s; nothing was changed. Compare the key with the "
            "vendor's, then correct the setting"
            % (
                asked["url"],
                "the key " + " and ".join(found) if found else "no public key",
                asked["fingerprint"] or "",
                asked["setting"],
            )
        )
    write_key(root + asked["key"], key)
    write_key(root + asked["kept"], fetched)
    return found[0]


def fetch(url: str) -> bytes:
    """Return the content of a URL."""
    try:
        with urllib.request.urlopen(url, timeout=ANSWER_SECONDS) as answer:
            found: bytes = answer.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise RefusedError(
            "%s cannot be fetched (%s): fix the connection, or set cuda.repository.url to a mirror "
            "that the node can reach" % (url, reason)
        ) from error
    if len(found) > MOST_BYTES:
        raise RefusedError("%s is too large to be a key: correct cuda.repository" % url)
    return found


def from_package(url: str, package: bytes) -> bytes:
    """Return the key that a keyring package would install. It must have exactly one key."""
    if not shutil.which("dpkg-deb"):
        raise RefusedError(
            "%s is a package for Debian and Ubuntu, which this node cannot read: set "
            "cuda.repository.keyring to the name of the repository's key file" % url
        )
    with tempfile.TemporaryDirectory(prefix="gpufleet-key-") as folder:
        path = os.path.join(folder, "keyring.deb")
        with open(path, "wb") as file:
            file.write(package)
        # dpkg-deb can read every compression that packages of its distribution use.
        said = subprocess.run(
            ["dpkg-deb", "--fsys-tarfile", path], capture_output=True, check=False,
            timeout=ANSWER_SECONDS,
        )  # fmt: skip
    if said.returncode:
        raise RefusedError(
            "%s is not a package that dpkg-deb can read: %s" % (url, said.stderr.decode().strip())
        )
    with tarfile.open(fileobj=io.BytesIO(said.stdout)) as files:
        keys = [
            member
            for member in files.getmembers()
            if member.isfile() and re.search(r"/keyrings/[^/]+\.(gpg|asc)$", member.name)
        ]
        if len(keys) != 1:
            raise RefusedError(
                "%s contains %d keys, but one key is expected: set cuda.repository.keyring to a "
                "different file" % (url, len(keys))
            )
        file_of_key = files.extractfile(keys[0])
        assert file_of_key is not None
        return file_of_key.read()


def fingerprints(key: bytes) -> list[str]:
    """Return the fingerprints of the primary keys in a file, which is binary or armoured."""
    try:
        return [
            # The fingerprint of a version 4 key (RFC 4880, 12.2). Tag 6 is a public key, tag 14 a
            # subkey.
            hashlib.sha1(b"\x99" + len(body).to_bytes(2, "big") + body).hexdigest().upper()
            for tag, body in packets(dearmor(key))
            if tag == 6 and body[:1] == b"\x04"
        ]
    except (IndexError, ValueError):
        return []


def dearmor(key: bytes) -> bytes:
    """Return the packets of an armoured key (RFC 4880, 6.2)."""
    armour = re.search(
        rb"-----BEGIN PGP PUBLIC KEY BLOCK-----\r?\n(?:[^\r\n]+\r?\n)*\r?\n(.*?)"
        rb"(?:\r?\n=[^\r\n]{4})?\r?\n-----END",
        key,
        re.DOTALL,
    )
    return base64.b64decode(armour[1], validate=False) if armour else key


def packets(data: bytes) -> Iterator[Tuple[int, bytes]]:
    """
    Yield each packet's tag and body (RFC 4880, 4.2).

    Raises an exception if `data` does not consist of packets.
    """
    at = 0
    while at < len(data):
        first = data[at]
        if not first & 0x80:
            raise ValueError("no packet")
        if first & 0x40:
            tag, (size, head) = first & 0x3F, new_format_length(data, at + 1)
        else:
            width = 1 << (first & 3)
            if width == 8:  # the packet extends until the end of the data
                raise ValueError("a packet without length")
            tag, size, head = (
                first >> 2 & 0xF,
                int.from_bytes(data[at + 1 : at + 1 + width], "big"),
                width,
            )
        at += 1 + head
        if at + size > len(data):
            raise ValueError("cut off")
        yield tag, data[at : at + size]
        at += size


def new_format_length(data: bytes, at: int) -> Tuple[int, int]:
    """Return the body length and the size of the length field (RFC 4880, 4.2.2)."""
    first = data[at]
    if first < 192:
        return first, 1
    if first < 224:
        return ((first - 192) << 8) + data[at + 1] + 192, 2
    if first == 255:
        return int.from_bytes(data[at + 1 : at + 5], "big"), 5
    raise ValueError("a packet in parts")


def write_key(path: str, content: bytes) -> None:
    """
    Write a file atomically. Every user can read it, because apt reads keys as its own user.
    """
    os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)
    handle, draft = tempfile.mkstemp(prefix=".gpufleet-", dir=os.path.dirname(path))
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            os.fchmod(file.fileno(), 0o644)
            file.flush()
            os.fsync(file.fileno())
        os.replace(draft, path)
    except BaseException:
        os.unlink(draft)
        raise
    folder = os.open(os.path.dirname(path), os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


if __name__ == "__main__":
    try:
        print(json.dumps({"schema": 1, "fingerprint": main(PARAMETERS)}))
    except (RefusedError, OSError, subprocess.SubprocessError) as problem:
        sys.exit(str(problem))
