"""Show the progress of a long-running remote command with a line from time to time.

Border: the module queries the node over the command's connection, and logs the progress.
pyinfra runs the command as usual. Output, status and time limit are unchanged.

An operation yields its commands inside one of the module's context managers:

    with progress_watch.show_download(wanted, vllm):
        yield StringCommand("sh", "-c", QuoteString(model_files.download_script(wanted, ...)))

pyinfra runs the command while the generator waits in the block. If the command fails, pyinfra
closes the generator. In both cases, the block and the queries end with the command. The function of
a `FunctionCommand` uses the context manager around `host.run_shell_command` in the same way. In
pyinfra's prepare phase (--dry), nothing is queried or printed.

A query that fails prints nothing. Queries start one short process on the node every five seconds.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import gevent
from pyinfra import logger
from pyinfra.api import Host, State
from pyinfra.context import ctx_host, ctx_state

from gpufleet.artifacts.model_files import DOWNLOAD_SECONDS, TOKEN, Checkpoint, listing_url
from gpufleet.artifacts.release import BUILD_SECONDS, Release
from gpufleet.formatting import format_duration
from gpufleet.progress import FIRST_SECONDS, OFTEN_SECONDS, Amount, Pace, download_text
from gpufleet.remote import payload
from gpufleet.remote.query import query
from gpufleet.sanitize import printable
from gpufleet.settings.serving_settings import EngineSettings

# The time limit of a query, which reads some files. on_node/transfer/folder_size.py and
# on_node/packages/transaction_progress.py end themselves after this time.
# on_node/transfer/build_progress.py reads only a single file.
LOOK_SECONDS = 10
# After so many attempts, the Hub is no longer queried for the list of files.
_ASKED_TIMES = 3
# The maximum number of characters that are shown of a package manager's line.
_LINE = 100


@contextmanager
def show_download(wanted: Checkpoint, servers: EngineSettings) -> Generator[None]:
    """
    Log the progress of the model download in the block. The Hub is queried for the model's size.
    """
    with show_growth(
        f"download of {wanted.repository}",
        f"{wanted.download}/files",
        seconds=DOWNLOAD_SECONDS,
        tree=listing_url(wanted, servers),
        token_file=TOKEN if servers.hf_token_file else None,
    ):
        yield


@contextmanager
def show_growth(
    what: str,
    folder: str,
    *,
    seconds: float,
    total: int | None = None,
    tree: str | None = None,
    token_file: str | None = None,
) -> Generator[None]:
    """
    Log the growth of a folder on the current node while the block runs.

    A line is for example "stage lab/tiny: 1.2 of 5.3 GiB, 85 MiB/s, 48 s left". `total` is the
    final size in bytes. If the size is unknown, set `tree` to the address of the Hub's list of the
    model's files (`model_files.listing_url`). The node requests this list with the token in its
    `token_file`. The queries end with the block, but after `seconds` at the latest.
    """
    amount = Amount()
    known = total
    asked = 0

    def program() -> str:
        nonlocal asked
        hub = tree if known is None and asked < _ASKED_TIMES else None
        asked += 1
        return payload.program(
            "transfer/folder_size", folder=folder, tree=hub, token_file=token_file
        )

    def read(now: float, seen: Mapping[str, Any]) -> str:
        nonlocal known
        known = seen["total"] if known is None else known
        amount.record(now, seen["bytes"], known)
        return amount.text()

    with _show_beside(_Look(what, program, read), seconds):
        yield


@contextmanager
def show_transaction(seconds: float) -> Generator[None]:
    """Log the progress of the package transaction in the block on the current node."""
    amount = Amount()
    asked = payload.program("packages/transaction_progress", root="")

    def read(now: float, seen: Mapping[str, Any]) -> str:
        step = seen["step"]
        if not step:
            return ""
        if seen["bytes"] is not None:
            amount.record(now, seen["bytes"], seen["total"] or None)
            return f"{step}: {amount.text()}"
        line = str(seen["line"] or "")
        return f"{step}: {line[:_LINE]}" if line else str(step)

    with _show_beside(_Look("packages", lambda: asked, read), seconds):
        yield


@contextmanager
def show_build(wanted: Release) -> Generator[None]:
    """Log the progress of a release's build on the current node, while the block runs."""
    asked = payload.program("transfer/build_progress", said=wanted.build_log)

    def read(_now: float, seen: Mapping[str, Any]) -> str:
        step = str(seen["step"] or "")
        if not seen["total"]:
            return step
        return f"{step}: {download_text(seen['bytes'], seen['total'], seen['left'])}"

    with _show_beside(_Look(f"release {wanted.id}", lambda: asked, read), BUILD_SECONDS):
        yield


@contextmanager
def show_elapsed(what: str, seconds: float) -> Generator[None]:
    """
    Log the run time of the block. Use it for work without visible progress. No node is queried.
    """
    with _show_beside(_Look(what), seconds):
        yield


@dataclass(frozen=True)
class _Look:
    """
    A progress query. `read` converts the time and the document that `program` prints to a text.
    """

    what: str
    program: Callable[[], str] | None = None
    read: Callable[[float, Mapping[str, Any]], str] = lambda _now, _seen: ""

    def text(self, state: State, host: Host) -> str | None:
        """Query once. Return the progress line, or None if there is nothing to report."""
        if self.program is None:
            return self.what
        text = self.program()
        answer = query(
            state, [host], lambda _: text, LOOK_SECONDS, "the query of its progress", aloud=False
        )
        found = answer[host.name]
        if isinstance(found, str):
            return None
        said = self.read(time.monotonic(), found)
        return f"{self.what}: {said}" if said else None


@contextmanager
def _show_beside(look: _Look, seconds: float) -> Generator[None]:
    state, host = ctx_state.get(), ctx_host.get()
    if not state.is_executing:
        yield
        return
    job = gevent.spawn(_print_progress, state, host, look, time.monotonic() + seconds)
    try:
        yield
    finally:
        job.kill(block=False)


def _print_progress(state: State, host: Host, look: _Look, end: float) -> None:
    """Query and print until `end`. An error only means that one line is missing."""
    began = time.monotonic()
    pace = Pace(began)
    gevent.sleep(FIRST_SECONDS)
    while time.monotonic() < end and host.connected:
        # The node's answer is untrusted, and must not disturb the command.
        with suppress(Exception):
            said = look.text(state, host)
            now = time.monotonic()
            if said and pace.is_due(now):
                logger.info(
                    "%s%s (%s)", host.print_prefix, printable(said), format_duration(now - began)
                )
        gevent.sleep(OFTEN_SECONDS)
