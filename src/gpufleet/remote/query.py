"""Query all nodes at once, and collect the answers within the deadline.

A node that is unreachable, has no python3, hangs or prints garbage affects only itself: its answer
is a sentence with the reason instead of a document.

This module reads a node's output itself, because pyinfra's readers split text into lines. An
endless line would keep them, and with them every other node, busy past any deadline. Endless lines
would fill the memory, and a byte that is not UTF-8 would end them. pyinfra does the rest:
connections, a node's `_sudo`, `_su_user`, `_env` ..., and the prompt for a sudo password. pyinfra
still reads nodes that are reached neither by SSH nor locally (its container connectors).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import click
import gevent
from gevent import Timeout
from paramiko import SSHException
from pyinfra import logger
from pyinfra.api import Host, State, StringCommand
from pyinfra.api.arguments import CONNECTOR_ARGUMENT_KEYS, pop_global_arguments
from pyinfra.api.exceptions import FactProcessError, PyinfraError
from pyinfra.api.facts import FactBase
from pyinfra.connectors.local import LocalConnector
from pyinfra.connectors.ssh import SSHConnector
from pyinfra.connectors.util import (
    CommandOutput,
    OutputLine,
    execute_command_with_sudo_retry,
    make_unix_command_for_host,
)
from pyinfra.context import ctx_host, ctx_state

from gpufleet.progress import Pace, wait_text
from gpufleet.remote.channel import (
    Streams,
    accepts_more,
    close,
    local_command,
    remote_command,
    start_command,
)
from gpufleet.remote.facts import PYTHON, document
from gpufleet.remote.probe_paths import ProbePaths, probe_program
from gpufleet.remote.session import COMMAND, BrokenError, Session
from gpufleet.sanitize import LINES, last_lines, printable

Answer: TypeAlias = dict[str, Any] | str
"""The document of a probe or another program, or the reason for a missing one."""

Hearing: TypeAlias = Callable[[str, bytes], None]
"""A function that receives a node's name and its latest output on standard error."""

# A probe's own deadlines end it after 50 s (on_node/probe/probe.py); ten more are for connecting.
SECONDS = 60

# Seconds between two checks for answers, so that progress lines are punctual to a second.
_LOOK_SECONDS = 1

# The largest document of catalog/data/nodes, of eight GPUs, is 90 KB; at most 2000 lines of the
# kernel's log (on_node/common/kernel_messages.py), of at most a kilobyte, may come to that.
MOST_MIB = 8
# Only the end of a node's other output is quoted.
MOST_BESIDE = 1 << 16
_CHUNK = 1 << 16


def probe_all(
    state: State,
    hosts: Iterable[Host],
    seconds: float = SECONDS,
    paths: Mapping[str, ProbePaths] | None = None,
) -> dict[str, Answer]:
    """
    Probe `hosts` and return {name: document or sentence} in the order of names.

    `paths` has the paths to read on each node's disks.

    The call takes at most `seconds` and one more, and connects to nodes that are not yet connected.
    """
    hosts = list(hosts)
    # One round trip: the program travels on stdin, and nothing is asked before it.
    asked = {each.name: (paths or {}).get(each.name, ProbePaths()) for each in hosts}
    programs = {found: probe_program(found) for found in set(asked.values())}
    return query(state, hosts, lambda name: programs[asked[name]], seconds, short=True)


def query(
    state: State,
    hosts: Iterable[Host],
    program: Callable[[str], str | None],
    seconds: float,
    what: str = "the probe",
    *,
    aloud: bool = True,
    hear: Hearing | None = None,
    short: bool = False,
) -> dict[str, Answer]:
    """
    Run a program on each of `hosts`, and return {name: document or sentence} by name.

    `program` returns for a node's name a Python text that prints one JSON document, or None to skip
    the node, which then has no answer. `what` names the programs in sentences. With `aloud`, a line
    names the awaited nodes after two seconds. `hear` receives a node's standard error as it
    arrives, and must not raise. `short` means that the programs are short and may run twice; all
    such programs of a run share one Python on each node (`session.py`). The call takes at most
    `seconds` and one more, and connects to nodes that are not yet connected.
    """
    # Plain greenlets: the deploy passes that wait for us fill pyinfra's own pool, and what is
    # spawned there would never run.
    jobs = {
        each.name: gevent.spawn(_ask, state, each, text, seconds, what, hear=hear, short=short)
        for each in sorted(hosts, key=lambda h: h.name)
        if (text := program(each.name)) is not None
    }
    try:
        await_jobs(jobs, seconds + 1, what, say if aloud else None)
    finally:
        # Stop waiting for unfinished queries.
        gevent.killall(list(jobs.values()), block=False)
    return {
        name: job.value if job.successful() and job.value else _late(seconds)
        for name, job in jobs.items()
    }


def await_jobs(
    jobs: Mapping[str, gevent.Greenlet],
    seconds: float,
    what: str,
    say: Callable[[str], None] | None,
) -> None:
    """
    Wait for the nodes' jobs, at most `seconds`; `say` prints the awaited nodes meanwhile.

    It prints after two seconds, then every five, and after a minute every thirty. `what` describes
    the jobs.
    """
    began = time.monotonic()
    pace = Pace(began)
    while True:
        left = {name: job for name, job in jobs.items() if not job.ready()}
        spent = time.monotonic() - began
        if not left or spent >= seconds:
            return
        if say is not None and pace.is_due(began + spent):
            say(f"{what.removeprefix('the ')}: {wait_text('node', len(jobs), left, spent)}")
        gevent.joinall(list(left.values()), timeout=min(_LOOK_SECONDS, seconds - spent))


def say(text: str) -> None:
    """Log a line in pyinfra's command, or print it in a gpufleet command, which has no log."""
    if logger.handlers:
        logger.info("    %s", text)
    else:
        say_on_stderr(text)


def say_on_stderr(text: str) -> None:
    """Print a line on stderr, because stdout may be JSON."""
    click.echo(text, err=True)


@dataclass
class _Printed:
    """A command's output: the kept part, and its total size."""

    out: bytearray = field(default_factory=bytearray)
    error: bytearray = field(default_factory=bytearray)
    total: int = 0

    @property
    def too_much(self) -> bool:
        return self.total > MOST_MIB << 20


class _TooMuchError(Exception):
    """A node printed more than `MOST_MIB`; its output is discarded."""


def _ask(
    state: State,
    host: Host,
    program: str,
    seconds: float,
    what: str,
    *,
    hear: Hearing | None,
    short: bool,
) -> Answer:
    """Return one node's answer without raising, because gevent would print a traceback."""
    try:
        with Timeout(seconds), ctx_state.use(state), ctx_host.use(host):
            if not host.connected:
                host.connect(show_errors=False, raise_exceptions=True)
            heard = partial(hear, host.name) if hear else None
            found = _in_session(state, host, program, seconds, opens=True) if short else None
            ended_well, out, error = found or _run(state, host, program, seconds, heard)
            if ended_well:
                return document(out, what, getattr(program, "name", ""))
            return f"{what} ended without an answer; the node said: {last_lines([*error, *out])}"
    except (Timeout, TimeoutError):
        return _late(seconds)
    except _TooMuchError:
        return f"the node printed more than {MOST_MIB} MiB, which is too much for {what}"
    except FactProcessError as problem:
        return str(problem)
    except (PyinfraError, SSHException, OSError, EOFError) as problem:
        return f"cannot be reached: {printable(str(problem)) or type(problem).__name__}"
    # What a node sends passes through code of others (paramiko's reader of packets, codecs) that
    # may raise anything; it must not cost the other nodes their answer.
    except Exception as problem:  # noqa: BLE001
        return f"cannot be queried: {type(problem).__name__}: {printable(str(problem))}"


def _run(
    state: State,
    host: Host,
    program: str,
    seconds: float,
    hear: Callable[[bytes], None] | None,
) -> tuple[bool, list[str], list[str]]:
    """
    Run `program` on a node; return its success and the last lines of both outputs.

    Raises `_TooMuchError` if the node prints more than any probe does.
    """
    arguments, ours = _arguments(state, host)
    connector = host.connector
    if not isinstance(connector, SSHConnector | LocalConnector):  # a container's
        ended_well, output = host.run_shell_command(
            StringCommand(PYTHON), **ours, _stdin=program, _timeout=int(seconds)
        )
        return ended_well, output.stdout_lines, output.stderr_lines
    pty = ours.pop("_get_pty", False)
    good = ours.pop("_success_exit_codes", None) or [0]
    out: list[str] = []
    error: list[str] = []

    def execute() -> tuple[int, CommandOutput]:
        command = make_unix_command_for_host(state, host, StringCommand(PYTHON), **ours)
        text = command.get_raw_value()
        running = (
            remote_command(connector, text, pty=pty)
            if isinstance(connector, SSHConnector)
            else local_command(text)
        )
        with running as streams:
            code, printed = _exchange(streams, program.encode(), hear)
        out[:], error[:] = _end(printed.out), _end(printed.error)
        return code, CommandOutput([OutputLine("stderr", line) for line in error])

    # pyinfra asks the operator for a password when sudo wants one. Only where sudo was asked for:
    # a node's output must not be able to bring that question up.
    if ours.get("_sudo"):
        status, _ = execute_command_with_sudo_retry(host, arguments, execute)
    else:
        status, _ = execute()
    return status in good, out, error


def _arguments(state: State, host: Host, of: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
    """Return pyinfra's global arguments for a node, and the ones for connectors."""
    arguments, _ = pop_global_arguments(state, host, dict(of or {}))
    ours: dict[str, Any] = {
        key: value for key, value in arguments.items() if key in CONNECTOR_ARGUMENT_KEYS
    }
    for key in ("_stdin", "_timeout"):
        ours.pop(key, None)
    return arguments, ours


@dataclass
class _Open:
    """A node's session and the command that started it, which differs by user."""

    session: Session
    command: str
    transport: Any


# Keyed by pyinfra's own host objects: a new run has new ones. None: it did not do as it should.
_SESSIONS: WeakKeyDictionary[Host, _Open | None] = WeakKeyDictionary()


def read(fact: type[FactBase[Any]], program: str, seconds: int, **arguments: Any) -> Any:
    """
    Return the answer of a fact's program on the current node, over its open session.

    This is only for short programs that may run twice. Without a session, with another user's
    session, and on any error, pyinfra reads the fact with `arguments`, reports the error and fails
    the node.
    """
    with suppress(Exception), Timeout(seconds, exception=False):
        found = _in_session(ctx_state.get(), ctx_host.get(), program, seconds, opens=False)
        if found and found[0]:
            return fact().process(found[1])
    return ctx_host.get().get_fact(fact, _stdin=program, _timeout=seconds, **arguments)


def _in_session(
    state: State, host: Host, program: str, seconds: float, *, opens: bool
) -> tuple[bool, list[str], list[str]] | None:
    """
    Run as `_run`, but over the node's session, or return None.

    With `opens`, a missing session is opened.
    """
    connector = host.connector
    if not isinstance(connector, SSHConnector) or not connector.client:
        return None
    transport = connector.client.get_transport()
    _, ours = _arguments(state, host, host.current_op_global_arguments)
    good = ours.pop("_success_exit_codes", None) or [0]
    if ours.pop("_get_pty", False):
        return None
    command = make_unix_command_for_host(state, host, StringCommand(COMMAND), **ours)
    text = command.get_raw_value()
    # Reconnect to a node that was rebooted meanwhile.
    if opens and (host not in _SESSIONS or _gone(_SESSIONS[host], transport)):
        streams, channel = start_command(connector, text, pty=False)
        session = Session(streams, partial(close, channel))
        _SESSIONS[host] = _Open(session, text, transport) if accepts_more(transport) else None
        if not _SESSIONS[host]:
            session.close()
    known = _SESSIONS.get(host)
    if known is None or known.session.busy or known.command != text:
        return None
    known.session.busy = True
    try:
        status, out, error = known.session.run(program, seconds)
    except (BrokenError, SSHException, OSError, EOFError):
        _SESSIONS[host] = None
        known.session.close()
        return None
    except BaseException:
        # An abandoned program would answer the next request.
        _SESSIONS[host] = None
        known.session.close()
        raise
    finally:
        known.session.busy = False
    if len(out) + len(error) > MOST_MIB << 20:
        raise _TooMuchError
    if status is None:
        raise TimeoutError
    return status in good, _end(out), _end(error[-MOST_BESIDE:])


def _gone(known: _Open | None, transport: Any) -> bool:
    return known is not None and known.transport is not transport


def _exchange(
    streams: Streams, program: bytes, hear: Callable[[bytes], None] | None = None
) -> tuple[int, _Printed]:
    """
    Send a program to a command while reading its outputs; return its status and outputs.

    It uses three greenlets, because it is unknown which pipe a node fills first. Raises
    `_TooMuchError`, and the exceptions of `streams`.
    """
    printed = _Printed()
    sender = gevent.spawn(_send, streams, program)
    readers = [
        gevent.spawn(_listen, streams.read, printed, printed.out, MOST_MIB << 20),
        gevent.spawn(_listen, streams.read_error, printed, printed.error, MOST_BESIDE, hear),
    ]
    try:
        for reader in gevent.iwait(readers):
            if reader.value is not None:
                raise reader.value
            if printed.too_much:
                raise _TooMuchError
        return streams.status(), printed
    finally:
        # Stop the greenlets before their streams are closed.
        gevent.killall([sender, *readers], timeout=1)


def _send(streams: Streams, program: bytes) -> None:
    """Write the program, ignoring errors, because a node may report the reason on other streams."""
    with suppress(Exception):
        for start in range(0, len(program), _CHUNK):
            streams.write(program[start : start + _CHUNK])
        streams.end()


def _listen(
    read: Callable[[int], bytes],
    printed: _Printed,
    kept: bytearray,
    most: int,
    hear: Callable[[bytes], None] | None = None,
) -> Exception | None:
    """
    Read to the end, or until both outputs are too long; keep the last `most` bytes.

    The error is returned, because gevent would print an exception of a greenlet.
    """
    try:
        while not printed.too_much and (chunk := read(_CHUNK)):
            printed.total += len(chunk)
            kept += chunk
            if hear:
                hear(chunk)
            del kept[:-most]
            # What has arrived is read without waiting, and others, the deadline among them, have
            # their turn only while a task waits.
            gevent.sleep(0)
    except Exception as problem:  # noqa: BLE001
        return problem
    return None


def _end(printed: bytes | bytearray) -> list[str]:
    """Return the last lines, with marks for bytes that are not UTF-8 (a banner in Latin-1)."""
    return [
        line.decode("utf-8", "replace") for line in bytes(printed).rstrip().rsplit(b"\n", LINES)
    ][-LINES:]


def _late(seconds: float) -> str:
    return f"no answer within {seconds:.0f} s"
