"""Serve the folder of this file, read-only. The bundle's README explains its use.

    python3 serve.py [ADDRESS:PORT]          (default 0.0.0.0:8080)

The program uses only the standard library. Any web server can serve packages and wheels. The Hub's
client also needs two headers, which contain the commit and the ETag of a file. Requests and their
status are logged to stderr.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from email.utils import formatdate, parsedate_to_datetime
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

LISTEN = "0.0.0.0:8080"  # nodes have to reach it
_IDLE_SECONDS = 120.0  # a client that says nothing for so long is gone
_RESOLVED = re.compile(r"hub/[^/]+/[^/]+/resolve/([0-9a-f]{40})/")
_TYPES = {".html": "text/html; charset=utf-8", ".json": "application/json"}


def bind_server(root: Path, listen: tuple[str, int]) -> ThreadingHTTPServer:
    """Return a server for the folder `root` that listens on an address but does not serve yet.

    If the port is 0, the system chooses a free port.
    """
    return FileServer(listen, partial(_Handler, root=root.resolve()))


class FileServer(ThreadingHTTPServer):
    """A server that answers clients in parallel."""

    daemon_threads = True
    request_queue_size = 128  # a whole fleet asks at once


class FileHandler(BaseHTTPRequestHandler):
    """
    Handle one connection, with the parts of HTTP that apt, uv and the Hub's client use.

    The `do_GET` of a subclass chooses the file. `send` answers with a file, and `begin_answer`
    sends only the headers.
    """

    protocol_version = "HTTP/1.1"
    timeout = _IDLE_SECONDS

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        """Answer a request. Each subclass must implement this method."""
        raise NotImplementedError

    def send(
        self,
        path: Path,
        headers: dict[str, str],
        status: HTTPStatus = HTTPStatus.OK,
        *,
        rate: int | None = None,
    ) -> None:
        """Answer with a file or with the requested range. `rate` is in bytes a second."""
        with path.open("rb") as file:
            stat = os.fstat(file.fileno())
            headers = {"Last-Modified": formatdate(stat.st_mtime, usegmt=True), **headers}
            if self._has_it(stat.st_mtime):
                self.begin_answer(HTTPStatus.NOT_MODIFIED, headers)
                return
            first = self._first_byte(stat.st_size)
            headers["Accept-Ranges"] = "bytes"
            headers["Content-Length"] = str(stat.st_size - first)
            if first:
                headers["Content-Range"] = f"bytes {first}-{stat.st_size - 1}/{stat.st_size}"
                file.seek(first)
            self.begin_answer(HTTPStatus.PARTIAL_CONTENT if first else status, headers)
            if self.command != "HEAD" and rate is None:
                shutil.copyfileobj(file, self.wfile, 1 << 20)
            while rate and self.command != "HEAD" and (block := file.read(rate)):
                self.wfile.write(block)
                time.sleep(1)

    def begin_answer(self, status: HTTPStatus, headers: dict[str, str]) -> None:
        """Send the status line and the headers."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _has_it(self, modified: float) -> bool:
        """Return whether the client's copy is current. apt asks for this at every update."""
        since = self.headers.get("If-Modified-Since", "")
        try:
            return bool(since) and int(modified) <= parsedate_to_datetime(since).timestamp()
        except ValueError:
            return False

    def _first_byte(self, size: int) -> int:
        """
        Return the first byte of a resumed download.

        Only ranges of the form `bytes=N-` are supported.
        """
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(match[1]) if match else 0
        return first if first < size else 0

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # http.server's name
        # The request line and the status only: no headers, and so no tokens. Control characters
        # must not forge lines.
        text = (format % args).translate(dict.fromkeys(range(32), "?"))
        sys.stderr.write(f"{self.log_date_time_string()} {self.client_address[0]} {text}\n")


class _Handler(FileHandler):
    server_version = "gpufleet-bundle"

    def __init__(self, *connection: object, root: Path) -> None:
        self.root = root
        super().__init__(*connection)  # type: ignore[arg-type]  # socketserver's own three

    def do_GET(self) -> None:
        asked = unquote(urlsplit(self.path).path).lstrip("/")
        path = (self.root / asked).resolve()
        if not path.is_relative_to(self.root) or _is_hidden(path.relative_to(self.root)):
            path = self.root  # as what is not there
        if not path.is_file():
            self.begin_answer(HTTPStatus.NOT_FOUND, {"Content-Length": "0"})
            return
        stat = path.stat()
        headers = {"ETag": f'"{stat.st_mtime_ns:x}-{stat.st_size:x}"', "Content-Type": _type(asked)}
        if commit := _RESOLVED.match(asked):
            headers["X-Repo-Commit"] = commit[1]
        self.send(path, headers)


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _type(asked: str) -> str:
    if asked.startswith("hub/api/"):
        return _TYPES[".json"]
    return _TYPES.get(Path(asked).suffix, "application/octet-stream")


def main() -> None:
    """Serve until interrupted."""
    given = sys.argv[1] if len(sys.argv) == 2 else LISTEN
    host, _, port = given.rpartition(":")
    if len(sys.argv) > 2 or not port.isdecimal():
        sys.exit(f"usage: {sys.argv[0]} [ADDRESS:PORT]")
    with bind_server(Path(__file__).parent, (host or "0.0.0.0", int(port))) as bound:  # noqa: S104
        try:
            bound.serve_forever()
        except KeyboardInterrupt:
            sys.exit(130)


if __name__ == "__main__":
    main()
