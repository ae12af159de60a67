"""Questions in processes of their own, as their parent finds them."""

from __future__ import annotations

import os
import signal
import time

from gpufleet.on_node.watched import Watched


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
