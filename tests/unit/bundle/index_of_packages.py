"""A package index of a test's own, on the loopback, with wheels and source distributions."""

from __future__ import annotations

import hashlib
import io
import tarfile
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path


class Index:
    """Files below `root`, as PEP 503 has them; each has its hash on its package's page."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.hashes: dict[str, str] = {}

    def wheel(self, name: str, version: str, *needs: str, tags: str = "py3-none-any") -> str:
        """Put a wheel there; return its file name."""
        about = f"{name}-{version}.dist-info"
        metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        metadata += "".join(f"Requires-Dist: {each}\n" for each in needs)
        files = {
            f"{name}.py": "",
            f"{about}/METADATA": metadata,
            f"{about}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: {tags}\n",
        }
        files[f"{about}/RECORD"] = "".join(f"{each},,\n" for each in (*files, f"{about}/RECORD"))
        content = io.BytesIO()
        with zipfile.ZipFile(content, "w") as archive:
            for path, text in files.items():
                archive.writestr(zipfile.ZipInfo(path), text)
        return self._put(name, f"{name}-{version}-{tags}.whl", content.getvalue())

    def sdist(self, name: str, version: str) -> str:
        """Put a source distribution there; return its file name."""
        content = io.BytesIO()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n".encode()
        with tarfile.open(fileobj=content, mode="w:gz") as archive:
            entry = tarfile.TarInfo(f"{name}-{version}/PKG-INFO")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))
        return self._put(name, f"{name}-{version}.tar.gz", content.getvalue())

    def _put(self, name: str, file: str, content: bytes) -> str:
        folder = self.root / "simple" / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / file).write_bytes(content)
        self.hashes[file] = hashlib.sha256(content).hexdigest()
        links = (
            f'<a href="{each.name}#sha256={self.hashes[each.name]}">{each.name}</a>\n'
            for each in sorted(folder.iterdir())
            if each.name != "index.html"
        )
        (folder / "index.html").write_text("".join(links))
        return file


class _Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *_: object) -> None:
        """Say nothing."""


@contextmanager
def served(root: Path) -> Iterator[str]:
    """Serve a folder on the loopback; the address ends without a slash."""
    handler = partial(_Quiet, directory=str(root))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
