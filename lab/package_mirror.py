"""Serve all downloads of lab nodes over HTTP: /vendor, /kernels, /wheels and /hub.

Contract: this is a foreground program, which lab/services.py starts and ends. It serves only these
four trees, read-only. For each request, it logs the client, the path and the result to stderr. It
logs no headers, because they contain tokens.

    python -m lab.package_mirror --state DIR --listen ADDRESS:PORT [--cache DIR]
"""

from __future__ import annotations

import html
import json
import signal
import sys
from functools import partial
from http import HTTPStatus
from http.server import ThreadingHTTPServer
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

import click

from gpufleet.bundle.serve import FileHandler, FileServer
from lab import fake_hub
from lab.state import CACHE
from lab.vendor import kernels, states
from lab.wheelhouse import MANIFEST

VENDOR = "vendor/repository"  # below the state: what lab.vendor builds
MODELS = "models"  # below the state: <owner>/<name>/, what lab.tiny_model writes
TOKEN = "secrets/hf-token"

_SLOW_B = 1024  # bytes per second of a slow vendor


def server(state: Path, listen: tuple[str, int], cache: Path = CACHE) -> ThreadingHTTPServer:
    """Bind the mirror's server to `listen` (port 0: any) without serving yet."""
    handler = partial(_Handler, state=state, cache=cache)
    return FileServer(listen, handler)


class _Handler(FileHandler):
    """One connection; strictly private."""

    server_version = "gpufleet-lab"

    def __init__(self, *connection: object, state: Path, cache: Path) -> None:
        self.state = state
        self.cache = cache
        super().__init__(*connection)  # type: ignore[arg-type]  # socketserver's own three

    def do_GET(self) -> None:  # noqa: N802  # http.server's name
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
            self._answer(fake_hub.answer(self.state / MODELS, rest, sent, _token(self.state)))
        else:
            self._answer(fake_hub.Answer(HTTPStatus.NOT_FOUND))

    def _vendor(self, rest: str) -> None:
        """Answer from the vendor's repository in its current state."""
        folder = (self.state / VENDOR).parent
        state = states.current(folder)
        if state == states.GONE:
            self._answer(fake_hub.Answer(HTTPStatus.NOT_FOUND))
        else:
            self._answer(_file(states.served(folder), rest), slowly=state == states.SLOW)

    def _answer(self, answer: fake_hub.Answer, *, slowly: bool = False) -> None:
        if answer.path is None:
            self.begin_answer(
                answer.status, {**answer.headers, "Content-Length": str(len(answer.body))}
            )
            if self.command != "HEAD":
                self.wfile.write(answer.body)
            return
        self.send(
            answer.path, dict(answer.headers), answer.status, rate=_SLOW_B if slowly else None
        )


def _file(root: Path, inner: str) -> fake_hub.Answer:
    """Return a regular file below `root`; links and dots cannot lead outside."""
    path = (root / unquote(inner)).resolve()
    if not path.is_relative_to(root.resolve()) or not path.is_file():
        return fake_hub.Answer(HTTPStatus.NOT_FOUND)
    return fake_hub.Answer(HTTPStatus.OK, {"Content-Type": "application/octet-stream"}, path=path)


def _links(wheels: Path) -> fake_hub.Answer:
    """Return the wheelhouse as a page of links with hashes, for `--find-links URL`."""
    try:
        files = json.loads((wheels / MANIFEST).read_text())["files"]
    except FileNotFoundError:
        return fake_hub.Answer(
            HTTPStatus.SERVICE_UNAVAILABLE, body=b"the wheelhouse is not complete\n"
        )
    links = "".join(
        f'<a href="{quote(name)}#sha256={entry["sha256"]}">{html.escape(name)}</a><br>\n'
        for name, entry in sorted(files.items())
    )
    page = f"<!DOCTYPE html>\n<html><body>\n{links}</body></html>\n".encode()
    return fake_hub.Answer(HTTPStatus.OK, {"Content-Type": "text/html; charset=utf-8"}, page)


def _token(state: Path) -> str:
    """Return the hub's current token, or "", with which the hub refuses all requests."""
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
