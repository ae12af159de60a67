"""What counts as a good end of a program on a node, and how much of its words is kept."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import paramiko
import pytest
from pyinfra.api import Config, Host, Inventory, State, StringCommand
from pyinfra.connectors.util import make_unix_command_for_host

from gpufleet.remote import query
from gpufleet.remote.query import MOST_BESIDE, MOST_MIB
from gpufleet.remote.session import COMMAND, Session
from tests.unit.remote.test_session import Pipes

LEAVES_WITH_97 = "import sys; print('said'); sys.exit(97)"
Outcome = tuple[bool, list[str], list[str]] | None


@contextmanager
def a_node(name: str, data: dict[str, Any]) -> Iterator[tuple[State, Host]]:
    inventory = Inventory(([name], data))
    state = State(inventory, Config())
    yield state, inventory.get_host(name)


@pytest.fixture
def in_session() -> Iterator[Callable[..., Outcome]]:
    """`in_session(program, **data)`: ask a node with that data over a session that is open."""
    with ExitStack() as stack:

        def ask(program: str, *, seconds: float = 9, busy: bool = False, **data: Any) -> Outcome:
            state, host = stack.enter_context(a_node("gpu-01", data))
            host.connector.client = paramiko.SSHClient()
            pipes = Pipes()
            stack.callback(pipes.process.wait, 10)
            stack.callback(pipes.close)
            session = Session(pipes, pipes.close)
            session.busy = busy
            _, ours = query._arguments(state, host)
            for mine in ("_get_pty", "_success_exit_codes"):
                ours.pop(mine, None)
            command = make_unix_command_for_host(state, host, StringCommand(COMMAND), **ours)
            query._SESSIONS[host] = query._Open(session, command.get_raw_value(), None)
            return query._in_session(state, host, program, seconds, opens=False)

        yield ask


def locally(program: str, **data: Any) -> Outcome:
    """Ask this machine."""
    with a_node("@local", data) as (state, host):
        return query._run(state, host, program, 9, None)


@pytest.fixture(params=["over a session", "by itself"])
def ask(request: pytest.FixtureRequest, in_session: Callable[..., Outcome]) -> Callable[..., Any]:
    return in_session if request.param == "over a session" else locally


@pytest.mark.parametrize(
    ("good", "well"), [(None, False), ([0], False), ([0, 97], True), ([97], True)]
)
def test_a_program_ends_well_with_the_statuses_that_the_node_s_data_names(
    ask: Callable[..., Any], good: list[int] | None, well: bool
) -> None:
    data = {} if good is None else {"_success_exit_codes": good}

    assert ask(LEAVES_WITH_97, **data)[:2] == (well, ["said"])
    assert ask("print('said')", **data)[:2] == (good != [97], ["said"])


def test_of_what_is_said_beside_the_answer_the_end_is_kept(ask: Callable[..., Any]) -> None:
    talks = f"import sys; sys.stderr.write('a' * {MOST_BESIDE} + 'the end'); print('answer')"

    well, out, error = ask(talks)

    assert (well, out) == (True, ["answer"])
    assert len(error[0]) == MOST_BESIDE
    assert error[0].endswith("aathe end")


def test_an_answer_is_kept_from_its_beginning(ask: Callable[..., Any]) -> None:
    well, out, _ = ask(f"print('a' + 'b' * {4 * MOST_BESIDE})")

    assert well
    assert out == ["a" + "b" * 4 * MOST_BESIDE]


def test_a_session_is_passed_over_where_another_one_is_needed(
    in_session: Callable[..., Outcome],
) -> None:
    """One that is busy, and one that a terminal is wanted for."""
    assert in_session("print('said')", busy=True) is None
    assert in_session("print('said')", _get_pty=True) is None


def test_a_program_that_does_not_end_is_late_and_one_that_says_too_much_is_not_looked_at(
    in_session: Callable[..., Outcome],
) -> None:
    with pytest.raises(TimeoutError):
        in_session("import time; time.sleep(60)", seconds=0.2)
    with pytest.raises(query._TooMuchError):
        in_session(f"print('a' * {(MOST_MIB << 20) + 1})")


def test_a_session_that_breaks_is_given_up() -> None:
    with a_node("gpu-01", {}) as (state, host):
        host.connector.client = paramiko.SSHClient()
        broken = subprocess.Popen(["true"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert broken.stdin
        assert broken.stdout
        closed: list[bool] = []

        class Ends:
            write = staticmethod(broken.stdin.write)
            read = staticmethod(broken.stdout.read1)

        session = Session(Ends(), partial(closed.append, True))
        command = make_unix_command_for_host(state, host, StringCommand(COMMAND))
        query._SESSIONS[host] = query._Open(session, command.get_raw_value(), None)

        assert query._in_session(state, host, "print(1)", 9, opens=False) is None

        assert closed == [True]
        assert query._SESSIONS[host] is None
        assert query._in_session(state, host, "print(1)", 9, opens=False) is None
        broken.communicate(timeout=10)
