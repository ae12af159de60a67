"""Run `gpufleet ...`, `pyinfra ...` and programs in a process that has imported already.

A command that is started imports for half a second, one of pyinfra for more than a second, and the
tests run hundreds of them. Here a server, one for each process of pytest, imports once. Each
command is a fork of it, with arguments, directory, environment, files and exit status of its own.

Tests of imports, signals, terminals and streams start a process, and so do these where a variable
of Python's own differs. tests/lab and tests/unit/cli/test_import_time.py start commands cold.
"""

from __future__ import annotations

import atexit
import functools
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from gevent import monkey

from gpufleet.cli.main import COMMANDS
from tests.support.checkout import ROOT

GPUFLEET = str(Path(sys.executable).with_name("gpufleet"))
PYINFRA = str(Path(sys.executable).with_name("pyinfra"))
MESSAGE_BYTES = 1 << 20
PYTHONS_OWN = ("PYTHON", "LANG", "LC_")
"""How variables begin that Python reads when it starts."""
PYINFRAS = (
    "gpufleet.fleet.dry_run",
    "gpufleet.fleet.run",
    "gpufleet.operations.converge",
    "pyinfra.operations.files",
    "pyinfra.operations.server",
    "pyinfra_cli.main",
)
"""What deploys and programs import most of."""
IMPORTED = (
    *(where.partition(":")[0] for where, _ in COMMANDS.values()),
    "gpufleet.checks.table",
    "gpufleet.fleet.assessment",
    "gpufleet.fleet.declared_hardware",
    "gpufleet.fleet.inventory_check",
    "gpufleet.inventory.loader",
    "gpufleet.monitoring.output_folder",
    "gpufleet.node.topology_svg",
    "gpufleet.node.topology_text",
    "gpufleet.planning.explanation",
    "gpufleet.settings.lookup",
    "gpufleet.sizing.checkpoint_reader",
)
"""What commands that connect to no node import most of."""


def run(
    words: Sequence[object],
    *,
    cwd: Path | str | None = None,
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
    timeout: float = 60,
    connects: bool = False,
) -> subprocess.CompletedProcess[str]:
    """
    Run `gpufleet WORDS`, and return what `subprocess.run` returns of a command with text.

    `connects`: to nodes, with sockets that gevent has patched before they were imported.
    """
    command = [GPUFLEET, *map(str, words)]
    server = _server("pyinfra" if connects else "gpufleet")
    return _run(server, command, cwd, timeout, env=env, stdin=stdin)


def run_pyinfra(
    words: Sequence[object], *, cwd: Path | str | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run `pyinfra WORDS`, on this machine itself."""
    command = [PYINFRA, *map(str, words)]
    return _run(_server("pyinfra"), command, cwd, timeout)


def run_program(
    program: str, words: Sequence[object], *, cwd: Path | str | None = None, timeout: float = 120
) -> subprocess.CompletedProcess[str]:
    """Run `python -c PROGRAM WORDS`, a program that has gevent patch sockets."""
    command = [sys.executable, "-c", program, *map(str, words)]
    return _run(_server("pyinfra"), command, cwd, timeout, program=program)


def _run(
    server: _Server,
    command: list[str],
    cwd: Path | str | None,
    timeout: float,
    *,
    program: str = "",
    env: Mapping[str, str] | None = None,
    stdin: bytes = b"",
) -> subprocess.CompletedProcess[str]:
    environment = dict(os.environ if env is None else env)
    with (
        tempfile.TemporaryFile() as given,
        tempfile.TemporaryFile() as out,
        tempfile.TemporaryFile() as err,
    ):
        given.write(stdin)
        given.seek(0)
        if server.started_with == _pythons_own(environment):
            request = {
                "command": command,
                "program": program,
                "cwd": str(cwd or Path.cwd()),
                "env": environment,
            }
            status = server.run(request, (given, out, err), timeout)
        else:
            status = subprocess.run(
                command,
                cwd=cwd,
                env=environment,
                stdin=given,
                stdout=out,
                stderr=err,
                timeout=timeout,
                check=False,
            ).returncode
        return subprocess.CompletedProcess(command, status, _read(out), _read(err))


def _read(file: IO[bytes]) -> str:
    file.seek(0)
    return file.read().decode()


def _pythons_own(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if name.startswith(PYTHONS_OWN)}


class _Server:
    """The process that has imported, and the socket to it. It ends with the process of pytest."""

    def __init__(self, imports: str) -> None:
        self.channel, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.started_with = _pythons_own(os.environ)
        with theirs:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.warm_command", imports, str(theirs.fileno())],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # as of a pipe or file: no terminal
                pass_fds=[theirs.fileno()],
            )
        atexit.register(self.close)

    def run(self, request: Mapping[str, Any], files: Sequence[IO[bytes]], timeout: float) -> int:
        """Return the exit status of a command; -N: signal N ended it."""
        message = json.dumps(request).encode()
        socket.send_fds(self.channel, [message], [file.fileno() for file in files])
        pid = self._number()
        self.channel.settimeout(timeout)
        ended = False
        try:
            status = self._number()
            ended = True
        except TimeoutError:
            raise subprocess.TimeoutExpired(request["command"], timeout) from None
        finally:
            self.channel.settimeout(None)
            if not ended:
                os.kill(pid, signal.SIGKILL)
                self._number()  # its status, which is not the next command's
        return status

    def close(self) -> None:
        """End the server."""
        self.channel.close()
        self.process.wait(timeout=10)

    def _number(self) -> int:
        return int(self.channel.recv(MESSAGE_BYTES))


@functools.cache
def _server(imports: str) -> _Server:
    return _Server(imports)


def _next_command(file: int) -> str:
    """Answer requests; return in a fork that is set up as the next command, with its program."""
    # Those that gevent has not patched: they begin no loop of events that a fork would share.
    channel = monkey.get_original("socket", "socket")(fileno=file)
    wait = monkey.get_original("os", "waitpid")
    while True:
        message, files, _flags, _address = socket.recv_fds(channel, MESSAGE_BYTES, 3)
        if not message:
            sys.exit()  # pytest has ended
        if not (pid := os.fork()):
            break
        for each in files:
            os.close(each)
        channel.send(str(pid).encode())
        channel.send(str(os.waitstatus_to_exitcode(wait(pid, 0)[1])).encode())
    request = json.loads(message)
    for stream, each in enumerate(files):
        os.dup2(each, stream)
        os.close(each)
    channel.close()
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    program: str = request["program"]
    sys.argv = ["-c", *request["command"][3:]] if program else request["command"]
    sys.path[0] = "" if program else str(Path(GPUFLEET).parent)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    return program


def _serve(imports: str, file: int) -> int | None:
    """Import what commands need, then run the command of each request in a fork."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # pytest's own
    if imports == "pyinfra":
        monkey.patch_all()
    modules = PYINFRAS if imports == "pyinfra" else IMPORTED
    for name in modules:
        importlib.import_module(name)
    gc.freeze()
    program = _next_command(file)
    if program:
        exec(program, {"__name__": "__main__"})
        return 0
    name = "pyinfra_cli.main" if sys.argv[0] == PYINFRA else "gpufleet.cli.main"
    status: int | None = importlib.import_module(name).main()
    return status


if __name__ == "__main__":
    ended = _serve(sys.argv[1], int(sys.argv[2])) or 0
    # Without taking apart what was imported: the fork would copy all of it first.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    os._exit(ended)
