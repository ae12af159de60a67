"""Query all nodes at once, and collect the answers within a time limit.

A problem of one node does not affect other nodes. If a node is unreachable, has no python3, hangs
or prints garbage, its answer is a sentence with the reason instead of a document.

This module reads the output of a node itself, because pyinfra's readers split text into lines. An
endless line would keep pyinfra's readers, and so all other nodes, busy after every deadline.
Endless output would fill the memory, and a byte that is not UTF-8 would stop the readers. pyinfra
does everything else: connections, a node's `_sudo`, `_su_user`, `_env` and similar arguments, and
the prompt for a sudo password. pyinfra also reads nodes that are reached neither by SSH nor
locally, which are those of its container connectors.
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
"""The document that a probe or a different program printed, or the reason why it is missing."""

Hearing: TypeAlias = Callable[[str, bytes], None]
"""A function that receives a node's name and its latest output on standard error."""

# A probe ends itself after 50 s (on_node/probe/probe.py). Ten more seconds are for connecting.
SECONDS = 60

# Seconds between two checks for answers. With one second, progress lines are punctual.
_LOOK_SECONDS = 1

# The largest document in catalog/data/nodes, of a node with eight GPUs, has 90 KB. At most 2000
# lines of the kernel's log (on_node/common/kernel_messages.py), with at most a kilobyte each, may
# be added.
MOST_MIB = 8
# The maximum number of bytes of a node's stderr that are stored. Errors quote only its end.
MOST_BESIDE = 1 << 16
_CHUNK = 1 << 16


def probe_all(
    state: State,
    hosts: Iterable[Host],
    seconds: float = SECONDS,
    paths: Mapping[str, ProbePaths] | None = None,
) -> dict[str, Answer]:
    """
    Probe `hosts` and return {name: document or sentence}, sorted by name.

    `paths` has the paths that the probe of each node reads. The call takes at most `seconds` + 1.
    It connects to nodes that are not connected yet.
    """
    hosts = list(hosts)
    # This takes one round trip, because the program is sent on stdin and there is no other query
    # before it.
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

    `program` takes the name of a node. It returns a Python text that prints one JSON document, or
    None to skip the node, which then has no answer. `what` is the name of the programs in
    sentences. With `aloud`, a line with the nodes that have not answered is printed after two
    seconds. `hear` receives the standard error of a node as it arrives, and must not raise. With
    `short`, the programs must be short, because they may run twice. All short programs of a run
    share one Python process on each node (`session.py`). The call takes at most `seconds` + 1. It
    connects to nodes that are not connected yet.
    """
    # Plain greenlets are used, because deploys that wait for this call fill pyinfra's own pool.
    # Greenlets in this pool would never run.
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
    Wait for the nodes' jobs, at most `seconds`.

    Meanwhile, `say` is called with a line about the nodes that have not answered. The first line
    comes after two seconds. Then a line comes every five seconds, and after a minute every thirty
    seconds. `what` describes the jobs.
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
    """
    Log a line if pyinfra's command runs. In a gpufleet command, which has no log, print the line.
    """
    if logger.handlers:
        logger.info("    %s", text)
    else:
        say_on_stderr(text)


def say_on_stderr(text: str) -> None:
    """Print a line on stderr, because stdout may be JSON."""
    click.echo(text, err=True)


@dataclass
class _Printed:
    """The output of a command: the part that is stored, and the total size."""

    out: bytearray = field(default_factory=bytearray)
    error: bytearray = field(default_factory=bytearray)
    total: int = 0

    @property
    def too_much(self) -> bool:
        return self.total > MOST_MIB << 20


class _TooMuchError(Exception):
    """A node printed more than `MOST_MIB`. Its output is discarded."""


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
    """
    Return the answer of one node.

    The function never raises, because gevent would print a traceback.
    """
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
    # The data of a node passes through code of other projects (paramiko's packet reader, codecs)
    # that may raise any exception. The other nodes must still get their answers.
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
    Run `program` on a node.

    Return whether it succeeded, and the last lines of both outputs. Raises `_TooMuchError` if the
    node prints more than `MOST_MIB`.
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

    # pyinfra asks the operator for a password if sudo requires one. This is allowed only if `_sudo`
    # is set, so that the output of a node cannot cause this question.
    if ours.get("_sudo"):
        status, _ = execute_command_with_sudo_retry(host, arguments, execute)
    else:
        status, _ = execute()
    return status in good, out, error


def _arguments(state: State, host: Host, of: Mapping[str, Any] | None = None) -> tuple[Any, Any]:
    """Return pyinfra's global arguments for a node, and those of them that connectors use."""
    arguments, _ = pop_global_arguments(state, host, dict(of or {}))
    ours: dict[str, Any] = {
        key: value for key, value in arguments.items() if key in CONNECTOR_ARGUMENT_KEYS
    }
    for key in ("_stdin", "_timeout"):
        ours.pop(key, None)
    return arguments, ours


@dataclass
class _Open:
    """The session on a node, and the command that started it. The command differs for each user."""

    session: Session
    command: str
    transport: Any


# The keys are pyinfra's host objects, which are new in each run. None: the session of this node did
# not work correctly.
_SESSIONS: WeakKeyDictionary[Host, _Open | None] = WeakKeyDictionary()


def read(fact: type[FactBase[Any]], program: str, seconds: int, **arguments: Any) -> Any:
    """
    Return the result of a fact for the current node.

    The fact's program runs in the node's open session. Use this only for short programs that may
    run twice. If there is no session, if the session belongs to a different user, or after any
    error, pyinfra reads the fact with `arguments`. pyinfra then also reports errors and fails the
    node.
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
    Run a program as `_run` does, but in the node's session.

    Return None if this is not possible. With `opens`, a missing session is opened.
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
        # The answer of the abandoned program would be read as the answer to the next request.
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
    Send a program to a command and read both outputs at the same time.

    Return the status and the outputs. Three greenlets are needed, because it is unknown which pipe
    a node fills first. Raises `_TooMuchError`, and the exceptions of `streams`.
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
    """Write the program. Errors are ignored, because the node may report the reason on stderr."""
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
    Read an output to its end, or until both outputs together are too long.

    Only the last `most` bytes are stored. An exception is returned and not raised, because gevent
    would print it.
    """
    try:
        while not printed.too_much and (chunk := read(_CHUNK)):
            printed.total += len(chunk)
            kept += chunk
            if hear:
                hear(chunk)
            del kept[:-most]
            # Data that has arrived is read without waiting. Other greenlets, for example the
            # deadline's, run only while a greenlet waits.
            gevent.sleep(0)
    except Exception as problem:  # noqa: BLE001
        return problem
    return None


def _end(printed: bytes | bytearray) -> list[str]:
    """
    Return the last lines.

    Bytes that are not UTF-8, as in a banner in Latin-1, become replacement characters.
    """
    return [
        line.decode("utf-8", "replace") for line in bytes(printed).rstrip().rsplit(b"\n", LINES)
    ][-LINES:]


def _late(seconds: float) -> str:
    return f"no answer within {seconds:.0f} s"
