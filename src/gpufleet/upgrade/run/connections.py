"""Query a fleet's nodes during an upgrade, over connections that stay open.  Border.

`Nodes` differs from `fleet.live.connect` in three points: each node may get its own query, several
groups query at the same time, and a node that does not answer is queried again for a while, because
it may be rebooting. Every query of `node_questions` may be repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TypeVar

import gevent
from gevent.lock import BoundedSemaphore
from paramiko import ChannelException, SSHException
from pyinfra.api import Host, State
from pyinfra.api.exceptions import PyinfraError

from gpufleet.errors import FleetError
from gpufleet.fleet import live
from gpufleet.remote import query
from gpufleet.remote.channel import Streams
from gpufleet.remote.open_command import open_command
from gpufleet.remote.query import Answer
from gpufleet.sanitize import printable
from gpufleet.upgrade.run import node_questions
from gpufleet.upgrade.run.node_questions import NodeQuestion
from gpufleet.upgrade.run.state_machine import LostError

T = TypeVar("T")

# The kernel calls a silent connection dead after 30 s (remote/ssh.py).
CONNECT_SECONDS = 40
# Between two questions to a node that does not answer.
AGAIN_SECONDS = 3
_NO_SESSION = (2, 4)
"""
Failure codes of RFC 4254 for a session beyond sshd's MaxSessions: "connect failed", which OpenSSH
sends, and "resource shortage", the intended code.
"""
_NOTHING = """print('{"schema": 1}')"""


class Nodes:
    """All nodes of an inventory, with their connections."""

    def __init__(self, state: State, hosts: Iterable[Host]) -> None:
        self._state = state
        self._hosts = {each.name: each for each in hosts}
        # Two groups on one node must not connect to it at the same time.
        self._doors = {name: BoundedSemaphore() for name in self._hosts}

    @property
    def names(self) -> tuple[str, ...]:
        """Return the names of all nodes."""
        return tuple(sorted(self._hosts))

    def connect(self) -> None:
        """Open every connection, so that later steps need not wait for it."""
        jobs = [gevent.spawn(self._connect, name) for name in self._hosts]
        gevent.joinall(jobs, timeout=CONNECT_SECONDS + 2)

    def reach(self, name: str, seconds: float) -> str:
        """Connect to a node within `seconds`; return a sentence if that fails, else ""."""
        said = self._connect(name, seconds)
        return said if isinstance(said, str) else ""

    def ask(self, wanted: Mapping[str, NodeQuestion]) -> dict[str, Answer]:
        """Query each node; return {node: document or sentence}."""
        jobs = {
            name: gevent.spawn(self._ask_one, name, each) for name, each in sorted(wanted.items())
        }
        longest = max((each.seconds for each in wanted.values()), default=0)
        gevent.joinall(list(jobs.values()), timeout=longest + CONNECT_SECONDS + 5)
        found: dict[str, Answer] = {}
        for name, job in jobs.items():
            if not job.ready():
                job.kill(block=False)
            found[name] = job.value if job.successful() and job.value else "no answer in time"
        return found

    def ask_each(
        self, program: Callable[[str], str | None], seconds: float, what: str
    ) -> live.Answers:
        """Query each node for which `program` returns a program, as `fleet.live.connect` does."""
        programs = {name: text for name in self._hosts if (text := program(name)) is not None}
        return self.ask(
            {
                name: NodeQuestion(text, seconds, what)  # type: ignore[arg-type]
                for name, text in programs.items()
            }
        )

    def ask_until(
        self,
        wanted: Mapping[str, NodeQuestion],
        read: Callable[[str, Answer], T],
        seconds: float,
    ) -> dict[str, T]:
        """
        Query each node; retry nodes without an answer for at most `seconds` more.

        Raises `FleetError` with the nodes that gave no answer, `LostError` if no node of the whole
        inventory answers.
        """
        end = time.monotonic() + seconds
        left = dict(wanted)
        found: dict[str, T] = {}
        while True:
            answers = self.ask(left)
            for name, said in answers.items():
                if not isinstance(said, str):
                    found[name] = read(name, said)
                    del left[name]
            if not left:
                return found
            if time.monotonic() > end:
                break
            gevent.sleep(AGAIN_SECONDS)
        problems = tuple(f"{name}: {answers[name]}" for name in sorted(left))
        if not self.is_any_reachable():
            raise LostError(*problems, "no node answers: check the network of this machine")
        raise FleetError(*problems)

    @contextmanager
    def command(self, name: str, command: str) -> Iterator[Streams]:
        """
        Run a command on a node during the block, in parallel with queries; see `open_command`.

        Raises `FleetError` if the node cannot be reached or does not start the command.
        """
        if isinstance(said := self._connect(name), str):
            self._drop(name)
            raise FleetError(f"{name}: {said}")
        with ExitStack() as opened:
            try:
                streams = opened.enter_context(
                    open_command(self._state, self._hosts[name], command)
                )
            except (PyinfraError, SSHException, OSError, EOFError) as problem:
                raise FleetError(f"{name}: {command_error(problem)}") from None
            yield streams

    def is_any_reachable(self) -> bool:
        """Return whether any node answers."""
        look = node_questions.look()
        answers = self.ask(dict.fromkeys(self._hosts, look))
        return any(not isinstance(said, str) for said in answers.values())

    def _connect(self, name: str, seconds: float = CONNECT_SECONDS) -> Answer:
        with self._doors[name]:
            if self._hosts[name].connected:
                return {}
            host = self._hosts[name]
            return query.query(
                self._state,
                [host],
                lambda _: _NOTHING,
                seconds,
                "the connection",
                aloud=False,
            )[name]

    def _ask_one(self, name: str, asked: NodeQuestion) -> Answer:
        if isinstance(said := self._connect(name), str):
            self._drop(name)
            return said
        host = self._hosts[name]
        found = query.query(
            self._state,
            [host],
            lambda _: asked.program,
            asked.seconds,
            asked.what,
            aloud=False,
        )[name]
        if isinstance(found, str):  # it is not asked again over a connection that may be dead
            self._drop(name)
        return found

    def _drop(self, name: str) -> None:
        if self._hosts[name].connected:
            gevent.spawn(self._hosts[name].disconnect).join(timeout=2)


def command_error(problem: Exception) -> str:
    """Return why a command on a connected node was not started, and the fix if known."""
    if isinstance(problem, ChannelException) and problem.code in _NO_SESSION:
        return (
            f"the node's sshd refuses one more session ({printable(problem.text)}): set "
            "MaxSessions in its configuration to 3 or more"
        )
    text = problem.text if isinstance(problem, ChannelException) else str(problem)
    return f"the command was not started: {printable(text) or type(problem).__name__}"


@contextmanager
def open_nodes(inventory_file: str) -> Generator[Nodes]:
    """Yield all nodes of an inventory file; the process and exceptions are as in `fleet.run`."""
    state = State()
    with live.open_run(state, inventory_file, ()) as hosts:
        yield Nodes(state, hosts)
