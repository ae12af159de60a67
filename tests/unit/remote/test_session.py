"""One Python on a node runs program after program: each by itself, none holds another up."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpufleet.on_node.remote.session import READY, fork_program, read_output
from gpufleet.remote import payload
from gpufleet.remote.session import COMMAND, BrokenError, Session


class Pipes:
    """A command's ends, as a connection to a node gives them."""

    def __init__(self, before: str = "") -> None:
        self.process = subprocess.Popen(
            ["sh", "-c", f"{before}{COMMAND}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        self.sent: list[int] = []
        """The sizes of what was written."""

    def write(self, data: bytes) -> None:
        assert self.process.stdin
        self.sent.append(len(data))
        self.process.stdin.write(data)
        self.process.stdin.flush()

    def read(self, size: int) -> bytes:
        assert self.process.stdout
        return os.read(self.process.stdout.fileno(), size)

    def close(self) -> None:
        assert self.process.stdin
        assert self.process.stdout
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture
def pipes() -> Iterator[Pipes]:
    made = Pipes()
    yield made
    made.close()
    assert made.process.wait(10) == 0


def gone(group: int) -> bool:
    """Whether no process of a group runs, within five seconds; init may reap them later."""
    for _ in range(100):
        if not running(group):
            return True
        time.sleep(0.05)
    return False


def running(group: int) -> bool:
    """Whether a process of a group has not ended."""
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, its_group = stat.read_text().rpartition(")")[2].split()[:3]
        except OSError:  # it has ended meanwhile
            continue
        if int(its_group) == group and state not in "ZX":
            return True
    return False


def session(pipes: Pipes) -> Session:
    return Session(pipes, pipes.close)


def test_programs_run_one_after_the_other_and_know_nothing_of_each_other(pipes: Pipes) -> None:
    asked = session(pipes)
    assert asked.run("import json\nx = 1\nprint('one')", 9) == (0, b"one\n", b"")
    assert asked.run("print('x' in globals(), __name__)", 9) == (0, b"False __main__\n", b"")


def test_a_real_program_answers_as_it_does_alone(pipes: Pipes) -> None:
    program = payload.program(
        "converge/snapshot", asked=[["file", "/etc/hostname"], ["group", "root"]]
    )
    status, out, _ = session(pipes).run(program, 30)
    alone = subprocess.run(
        ["python3", "-I", "-"], input=program.encode(), capture_output=True, check=True
    ).stdout
    assert status == 0
    assert json.loads(out) == json.loads(alone)


@pytest.mark.parametrize(
    ("program", "status", "said"),
    [
        ("import sys; sys.exit('no json here')", 1, b"no json here\n"),
        ("import sys; sys.exit(97)", 97, b""),
        ("import os; os._exit(3)", 3, b""),
        ("raise OSError('torn')", 1, b"torn"),
        ("this is no Python", 1, b"SyntaxError"),
        ("import os; os.kill(os.getpid(), 9)", 137, b""),
    ],
)
def test_a_program_that_ends_badly_says_so_and_the_next_one_runs(
    pipes: Pipes, program: str, status: int, said: bytes
) -> None:
    asked = session(pipes)
    ended, out, error = asked.run(program, 9)
    assert (ended, out) == (status, b"")
    assert said in error
    assert asked.run("print(2)", 9) == (0, b"2\n", b"")


@pytest.mark.parametrize("keeps", [True, False])
def test_source_is_sent_to_those_that_lack_it(
    pipes: Pipes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keeps: bool
) -> None:
    """Once to a node that keeps what it has compiled, each time to one that does not."""
    code = tmp_path / "code"
    if keeps:
        code.mkdir(mode=0o700)
    monkeypatch.setattr(payload, "CODE", str(code))
    program = payload.program("converge/snapshot", asked=[["group", "root"]])
    assert program.brief is not None
    asked = session(pipes)
    answers, sizes = [], []
    for _ in range(3):
        pipes.sent.clear()
        answers.append(asked.run(program, 9))
        sizes.append([*pipes.sent])
    status, out, error = answers[0]
    assert (status, json.loads(out)["groups"], error) == (0, {"root": 0}, b"")
    assert answers == [answers[0]] * 3
    assert [len(each) for each in sizes] == [2, 1, 1]
    assert (sizes[1][0] < len(program.brief) + 100) == keeps


def test_a_program_that_hangs_is_ended_with_all_that_it_started(
    pipes: Pipes, tmp_path: Path
) -> None:
    asked, mark = session(pipes), tmp_path / "pid"
    hangs = (
        "import os, time\n"
        f"if os.fork(): open({str(mark)!r}, 'w').write(str(os.getpid()))\n"
        "time.sleep(600)"
    )
    assert asked.run(hangs, 1)[0] is None
    assert asked.run("print(2)", 9) == (0, b"2\n", b"")
    assert gone(int(mark.read_text()))


def test_what_a_program_leaves_behind_is_not_waited_for(pipes: Pipes) -> None:
    """A process that is stuck holds its outputs open; all that was printed is there."""
    asked = session(pipes)
    left = "import os, time\nif not os.fork(): time.sleep(60)\nprint('x' * 100_000)"
    status, out, _ = asked.run(left, 30)
    assert (status, len(out)) == (0, 100_001)


class Behind:
    """A poll of whoever is not scheduled again until the program has printed, and ended."""

    def __init__(self, child: int) -> None:
        self.polled = select.poll()
        self.register, self.unregister = self.polled.register, self.polled.unregister
        self.child: int | None = child

    def poll(self, milliseconds: int) -> list[tuple[int, int]]:
        if self.child is None:
            return self.polled.poll(milliseconds)
        os.waitid(os.P_PID, self.child, os.WEXITED | os.WNOWAIT)
        self.child = None
        return []


def test_what_is_printed_just_before_the_end_is_not_lost() -> None:
    """A busy node: nothing was there to be read, and then both the answer and the end."""
    child, out, error = fork_program(b"import os; os.write(1, b'the answer'); os._exit(0)")
    asker, nobody = os.pipe()
    reading = Behind(child)
    for descriptor in (out, error):
        reading.register(descriptor, select.POLLIN)
    printed: dict[int, list[bytes]] = {out: [], error: []}
    status = read_output(reading, printed, child, time.monotonic() + 60, asker)
    for descriptor in (out, error, asker, nobody):
        os.close(descriptor)
    assert (status, b"".join(printed[out])) == (0, b"the answer")


def test_what_prints_without_end_is_ended(pipes: Pipes) -> None:
    asked = session(pipes)
    status, out, _ = asked.run("while True: print('x' * 65536)", 60)
    assert status is None
    assert 9 << 20 <= len(out) < 10 << 20
    assert asked.run("print(2)", 9) == (0, b"2\n", b"")


def test_a_program_does_not_hold_what_the_session_is_asked_by(pipes: Pipes) -> None:
    """It reads nothing of what is asked next."""
    asked = session(pipes)
    assert asked.run("import sys; print(len(sys.stdin.read()))", 9) == (0, b"0\n", b"")
    assert asked.run("print(2)", 9) == (0, b"2\n", b"")


def test_a_login_that_prints_is_passed_over() -> None:
    pipes = Pipes("echo Welcome; printf 'no end of line'; ")
    assert session(pipes).run("print(1)", 9) == (0, b"1\n", b"")
    pipes.close()


def test_a_node_without_python_breaks_the_session() -> None:
    """Who wanted it asks in the ordinary way, where that is found and said."""
    pipes = Pipes("PATH=/nonexistent; ")
    with pytest.raises((BrokenError, OSError)):
        session(pipes).run("print(1)", 9)
    pipes.process.wait(10)


def test_a_session_ends_with_its_connection_in_the_middle_of_a_program(tmp_path: Path) -> None:
    pipes, mark = Pipes(), tmp_path / "pid"
    hangs = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    own = payload.program("remote/session").encode()
    pipes.write(b"%d\n%b%d 600\n%b" % (len(own), own, len(hangs), hangs.encode()))
    while not mark.exists() or not mark.read_text():
        time.sleep(0.05)
    pipes.close()
    assert pipes.process.wait(10) == 0
    assert gone(int(mark.read_text()))


def test_a_session_that_nobody_asks_any_more_ends() -> None:
    """Its connection may look open for hours after the other end has lost power."""
    idle = "from gpufleet.on_node.remote import session; session.IDLE_SECONDS = 1; session.main()"
    left = subprocess.Popen(
        [sys.executable, "-c", idle], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert left.stdout
    assert left.wait(20) == -signal.SIGALRM
    assert left.stdout.read().strip() == READY.encode()
