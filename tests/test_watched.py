"""Questions in processes of their own, as their parent finds them."""

from __future__ import annotations

import os
import signal
import time

import pytest

from gpufleet.on_node.watched import ANSWER_BYTES, Watch, Watched


def test_a_question_that_ended_itself_before_its_parent_looked_ran_out_of_time():
    """A parent that is kept waiting by a busy node must not call the deadline a crash."""
    question = Watched(lambda: time.sleep(60), 0.1)
    time.sleep(1.8)  # its own alarm comes after 1 s
    while question.receive():
        pass
    assert question.result() == {"missing": "timeout", "seconds": 0.1}
    question.stop()


def test_a_question_that_dies_of_something_else_crashed():
    question = Watched(lambda: os.kill(os.getpid(), signal.SIGSEGV), 5)
    while question.receive():
        pass
    assert question.result() == {"missing": "crashed", "signal": 11}
    question.stop()


def asked_in_turn(*questions, seconds=0.5, own=1.0):
    """Ask them in turn; return the answers, and how many processes that took."""
    watch = Watch()
    watch.ask_in_turn({n: (each, own) for n, each in enumerate(questions)}, seconds)
    began = [watch.turns[0].pid]
    ask = watch.ask
    watch.ask = lambda *about: (ask(*about), began.append(about[0]))
    try:
        found = watch.answers(*range(len(questions)))
    finally:
        watch.stop()
    return [found[n] for n in range(len(questions))], len(began)


def test_questions_in_turn_are_answered_by_one_process():
    answers, processes = asked_in_turn(os.getpid, os.getpid, lambda: "x" * 200_000)
    assert answers[0] == answers[1] != os.getpid()
    assert answers[2] == "x" * 200_000
    assert processes == 1


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        (lambda: time.sleep(60), {"missing": "timeout", "seconds": 1.0}),
        (lambda: os.kill(os.getpid(), signal.SIGSEGV), {"missing": "crashed", "signal": 11}),
        (lambda: "x" * (ANSWER_BYTES + 1), None),
    ],
)
def test_what_hangs_or_crashes_in_its_turn_costs_itself_only(ends, why):
    """It and those behind it are asked again, each by itself; what was answered is kept."""
    first, second, third = asked_in_turn(lambda: 1, ends, lambda: 3)[0]
    assert (first, third) == (1, 3)
    assert second == why if why else second["missing"] == "implausible"


def test_an_error_is_an_answer_in_its_turn():
    def fails():
        raise FileNotFoundError(2, "there is none")

    answers, processes = asked_in_turn(fails, lambda: 2)
    assert answers == [{"missing": "absent"}, 2]
    assert processes == 1


def test_those_in_turn_do_not_wait_for_whoever_else_is_waited_for():
    """What hangs in its turn is found out while a slow driver is waited for."""
    watch = Watch()
    watch.ask("driver", lambda: time.sleep(1.2), 5)
    watch.ask_in_turn({"stuck": (lambda: time.sleep(60), 5), "other": (lambda: 2, 5)}, 0.2)
    began = time.monotonic()
    watch.answers("driver")
    assert watch.known["other"] == 2
    assert watch.answers("stuck")["stuck"]["missing"] == "timeout"
    watch.stop()
    assert time.monotonic() - began < 6.1


def test_a_node_that_cannot_fork_says_so_for_each_in_turn(monkeypatch):
    watch = Watch()
    monkeypatch.setattr(os, "fork", lambda: (_ for _ in ()).throw(OSError(11, "no room")))
    watch.ask_in_turn({"a": (dict, 1), "b": (dict, 1)}, 1)
    assert {each["missing"] for each in watch.answers("a", "b").values()} == {"error"}
