"""The HTTP server that lab nodes download everything from: /vendor, /kernels, /wheels and /hub.

Contract: a foreground program (lab/services.py starts and ends it) that serves four trees
read-only and nothing beside them.  On stderr it says who asked for which path with which result:
no headers, and so no tokens.

    python -m lab.mirror --state DIR --listen ADDRESS:PORT [--cache DIR]
"""

from __future__ import annotations

import html
import json
import os
import re
import shutil
import signal
import sys
import time
from email.utils import formatdate, parsedate_to_datetime
from functools import partial
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import click

from lab import hub
from lab.state import CACHE
from lab.vendor import kernels, states
from lab.wheels import MANIFEST

VENDOR = "vendor/repository"  # below the state: what lab.vendor builds
MODELS = "models"  # below the state: <owner>/<name>/, what lab.model writes
TOKEN = "secrets/hf-token"

_SLOW_B = 1024  # bytes a second of a vendor that is slow
_IDLE_S = 120.0  # a client that says nothing for so long is gone


def server(state: Path, listen: tuple[str, int], cache: Path = CACHE) -> ThreadingHTTPServer:
    """Bind the mirror's server to `listen` (port 0: any) without serving yet."""
    handler = partial(_Handler, state=state, cache=cache)
    return _Server(listen, handler)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 128  # a whole fleet asks at once


class _Handler(BaseHTTPRequestHandler):
    """One connection; strictly private."""

    protocol_version = "HTTP/1.1"
    server_version = "gpufleet-lab"
    timeout = _IDLE_S

    def __init__(self, *connection: object, state: Path, cache: Path) -> None:
        self.state = state
        self.cache = cache
        super().__init__(*connection)  # type: ignore[arg-type]  # socketserver's own three

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_GET(self) -> None:
        prefix, _, rest = urlsplit(self.path).path.lstrip("/").partition("/")
        if prefix == "vendor":
            self._vendor(rest)
        elif prefix == kernels.FOLDER:
            self._answer(_file(self.state / kernels.FOLDER, rest))
        elif prefix == "wheels":
            listing = not rest
            wheels = self.cache / "wheels"
            self._answer(_links(wheels) if listing else _file(wheels, rest))
        elif prefix == "hub":
            sent = self.headers.get("Authorization", "")
            self._answer(hub.answer(self.state / MODELS, rest, sent, _token(self.state)))
        else:
            self._answer(hub.Answer(HTTPStatus.NOT_FOUND))

    def _vendor(self, rest: str) -> None:
        """Answer from the vendor's repository, in whatever state it is."""
        folder = (self.state / VENDOR).parent
        state = states.current(folder)
        if state == states.GONE:
            self._answer(hub.Answer(HTTPStatus.NOT_FOUND))
        else:
            self._answer(_file(states.served(folder), rest), slowly=state == states.SLOW)

    def _answer(self, answer: hub.Answer, *, slowly: bool = False) -> None:
        if answer.path is None:
            self._head(answer.status, {**answer.headers, "Content-Length": str(len(answer.body))})
            if self.command != "HEAD":
                self.wfile.write(answer.body)
            return
        with answer.path.open("rb") as file:
            stat = os.fstat(file.fileno())
            modified = {"Last-Modified": formatdate(stat.st_mtime, usegmt=True)}
            if self._is_fresh(stat.st_mtime):
                self._head(HTTPStatus.NOT_MODIFIED, modified)
                return
            first = self._first_byte(stat.st_size)
            headers = {**modified, **answer.headers, "Accept-Ranges": "bytes"}
            headers["Content-Length"] = str(stat.st_size - first)
            if first:
                headers["Content-Range"] = f"bytes {first}-{stat.st_size - 1}/{stat.st_size}"
                file.seek(first)
            self._head(HTTPStatus.PARTIAL_CONTENT if first else answer.status, headers)
            if self.command != "HEAD" and not slowly:
                shutil.copyfileobj(file, self.wfile, 1 << 20)
            while slowly and self.command != "HEAD" and (block := file.read(_SLOW_B)):
                self.wfile.write(block)
                time.sleep(1)

    def _head(self, status: HTTPStatus, headers: dict[str, str]) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()

    def _is_fresh(self, modified: float) -> bool:
        """Whether the client's copy is as new: apt asks so at every update."""
        since = self.headers.get("If-Modified-Since", "")
        try:
            return bool(since) and int(modified) <= parsedate_to_datetime(since).timestamp()
        except ValueError:
            return False

    def _first_byte(self, size: int) -> int:
        """Where to resume; only `bytes=N-`, what a client sends to go on after a cut."""
        match = re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range", ""))
        first = int(match[1]) if match else 0
        return first if first < size else 0

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  # http.server's name
        # The request line and the status only.  Control characters must not forge lines.
        text = (format % args).translate(dict.fromkeys(range(32), "?"))
        sys.stderr.write(f"{self.log_date_time_string()} {self.client_address[0]} {text}\n")


def _file(root: Path, inner: str) -> hub.Answer:
    """A regular file below `root`; links and dots cannot lead out of it."""
    path = (root / unquote(inner)).resolve()
    if not path.is_relative_to(root.resolve()) or not path.is_file():
        return hub.Answer(HTTPStatus.NOT_FOUND)
    return hub.Answer(HTTPStatus.OK, {"Content-Type": "application/octet-stream"}, path=path)


def _links(wheels: Path) -> hub.Answer:
    """The wheelhouse as a page of links with hashes: what `--find-links URL` reads."""
    try:
        files = json.loads((wheels / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        return hub.Answer(HTTPStatus.SERVICE_UNAVAILABLE, body=b"the wheelhouse is not complete\n")
    links = "".join(
        f'<a href="{quote(name)}#sha256={entry["sha256"]}">{html.escape(name)}</a><br>\n'
        for name, entry in sorted(files.items())
    )
    page = f"<!DOCTYPE html>\n<html><body>\n{links}</body></html>\n".encode()
    return hub.Answer(HTTPStatus.OK, {"Content-Type": "text/html; charset=utf-8"}, page)


def _token(state: Path) -> str:
    """The hub's token as it is now; without one the hub lets nobody in."""
    try:
        return (state / TOKEN).read_text().strip()
    except FileNotFoundError:
        return ""


@click.command()
@click.option("--state", type=click.Path(path_type=Path, file_okay=False), required=True)
@click.option("--listen", required=True, help="ADDRESS:PORT")
@click.option("--cache", type=click.Path(path_type=Path, file_okay=False), default=CACHE)
def main(state: Path, listen: str, cache: Path) -> None:
    """Serve one lab's mirror until terminated."""
    host, _, port = listen.rpartition(":")
    with server(state, (host, int(port)), cache) as bound:
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
        bound.serve_forever()


if __name__ == "__main__":
    main()
