"""Questions in processes of their own, as their parent finds them."""

from __future__ import annotations

import faulthandler
import os
import signal
import time
from pathlib import Path

import pytest

from gpufleet.on_node.common.commands import run
from gpufleet.on_node.common.forked import ANSWER_BYTES, ForkedCall, Watch


def test_a_question_that_ended_itself_before_its_parent_looked_ran_out_of_time():
    """A parent that is kept waiting by a busy node must not call the deadline a crash."""
    question = ForkedCall(lambda: time.sleep(60), 0.1)
    process = Path(f"/proc/{question.pid}")
    while lives(process):  # its own alarm comes after 1 s
        time.sleep(0.05)
    while question.receive():
        pass
    assert question.result() == {"missing": "timeout", "seconds": 0.1}
    question.stop()


def crash():
    """End by a segmentation fault; nobody wants the stack of it."""
    faulthandler.disable()
    os.kill(os.getpid(), signal.SIGSEGV)


def test_a_question_that_dies_of_something_else_crashed():
    question = ForkedCall(crash, 5)
    while question.receive():
        pass
    assert question.result() == {"missing": "crashed", "signal": 11}
    question.stop()


def test_a_question_that_ends_itself_ends_the_program_that_it_waits_for():
    """Its parent may be gone by then, and nobody else knows of the program."""
    question = ForkedCall(lambda: run("sleep", "77", seconds=LONG), 5)
    program = running(question.pid, b"/usr/bin/sleep\x0077\x00")

    while question.receive():
        pass

    assert question.result() == {"missing": "timeout", "seconds": 5}
    soon = time.monotonic() + LONG / 2  # by itself it would sleep longer
    while lives(program) and time.monotonic() < soon:
        time.sleep(0.05)
    assert not lives(program)
    question.stop()


def running(parent: int, command: bytes) -> Path:
    """Return the directory in /proc of a process's only child, once it runs this."""
    children = Path(f"/proc/{parent}/task/{parent}/children")
    ended = Path(f"/proc/{parent}/stat")  # a zombie still has a directory
    while children.exists() and ") Z " not in ended.read_text():
        for child in children.read_text().split():
            if Path("/proc", child, "cmdline").read_bytes() == command:
                return Path("/proc", child)
        time.sleep(0.01)
    raise AssertionError("it has ended before")


def lives(process: Path) -> bool:
    """Say whether a process is there and more than a zombie."""
    try:
        return ") Z " not in (process / "stat").read_text()
    except OSError:
        return False


# For what is to be answered, however busy the machine is.
LONG = 60


def asked_in_turn(*questions, seconds=LONG):
    """Ask (function, seconds) in turn; return the answers, and how often any was asked alone."""
    watch, alone = Watch(), []
    ask = watch.ask
    watch.ask = lambda *about: (ask(*about), alone.append(about))
    watch.ask_in_turn(dict(enumerate(questions)), seconds)
    try:
        found = watch.answers(*range(len(questions)))
    finally:
        watch.stop()
    return [found[n] for n in range(len(questions))], len(alone)


def test_questions_in_turn_are_answered_by_one_process():
    asked = [(os.getpid, LONG), (os.getpid, LONG), (lambda: "x" * 200_000, LONG)]
    answers, alone = asked_in_turn(*asked)
    assert answers[0] == answers[1] != os.getpid()
    assert answers[2] == "x" * 200_000
    assert alone == 0


@pytest.mark.parametrize(
    ("question", "turn", "reason"),
    [
        ((lambda: time.sleep(600), 1), 1, "timeout"),
        ((lambda: os.kill(os.getpid(), signal.SIGKILL), LONG), LONG, "crashed"),
        ((lambda: "x" * (ANSWER_BYTES + 1), LONG), LONG, "implausible"),
    ],
    ids=["hangs", "crashes", "has no end"],
)
def test_what_hangs_or_crashes_in_its_turn_costs_itself_only(question, turn, reason):
    """It and those behind it are asked again, each by itself; what was answered is kept."""
    asked = [(lambda: 1, LONG), question, (lambda: 3, LONG)]
    (first, second, third), alone = asked_in_turn(*asked, seconds=turn)
    assert (first, second["missing"], third) == (1, reason, 3)
    assert alone in {2, 3}  # on a busy machine the first has not come to its turn's end


def test_an_error_is_an_answer_in_its_turn():
    def fails():
        raise FileNotFoundError(2, "there is none")

    answers, alone = asked_in_turn((fails, LONG), (lambda: 2, LONG))
    assert answers == [{"missing": "absent"}, 2]
    assert alone == 0


def test_those_in_turn_do_not_wait_for_whoever_else_is_waited_for():
    """A turn that hangs ends while a driver is waited for: this one waits for what is behind it."""
    ours, theirs = os.pipe()
    watch = Watch()
    try:
        watch.ask("driver", lambda: os.read(ours, 1), LONG)
        stuck, behind = (lambda: time.sleep(600), 1), (lambda: os.write(theirs, b"x"), LONG)
        watch.ask_in_turn({"stuck": stuck, "behind": behind}, 0.2)
        assert watch.answers("driver") == {"driver": "x"}
        assert watch.answers("stuck")["stuck"]["missing"] == "timeout"
    finally:
        watch.stop()
        os.close(ours)
        os.close(theirs)


def test_a_node_that_cannot_fork_says_so_for_each_in_turn(monkeypatch):
    watch = Watch()
    monkeypatch.setattr(os, "fork", lambda: (_ for _ in ()).throw(OSError(11, "no room")))
    watch.ask_in_turn({"a": (dict, 1), "b": (dict, 1)}, 1)
    assert {each["missing"] for each in watch.answers("a", "b").values()} == {"error"}
