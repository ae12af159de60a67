"""Work in threads that nothing waits for: results, errors, what an interrupted block leaves."""

import signal
import subprocess
import sys
import time

import pytest

from gpufleet.remote.daemon_pool import DaemonPool

INTERRUPTED = """
{first}
import time
from gpufleet.remote.daemon_pool import DaemonPool

with DaemonPool(2) as pool:
    print("begun", flush=True)
    list(pool.map(time.sleep, [60] * 5))
"""


def test_results_come_in_the_order_of_what_was_asked():
    with DaemonPool(3) as pool:
        assert list(pool.map(lambda each: each * 2, range(20))) == [2 * each for each in range(20)]


def test_an_error_is_raised_where_the_result_is_asked_for():
    with DaemonPool(1) as pool, pytest.raises(ZeroDivisionError):
        pool.submit(lambda: 1 / 0).result(timeout=10)


def test_a_block_that_ends_early_waits_for_nothing_and_begins_nothing_more():
    begun = []

    def work(number):
        begun.append(number)
        time.sleep(2)

    before = time.monotonic()
    with DaemonPool(2) as pool:
        futures = [pool.submit(work, number) for number in range(4)]
        while len(begun) < 2:
            time.sleep(0.01)

    assert time.monotonic() - before < 1
    assert [future.cancelled() for future in futures] == [False, False, True, True]
    time.sleep(2.2)
    assert sorted(begun) == [0, 1]


@pytest.mark.parametrize(
    "first", ["", "from gevent import monkey; monkey.patch_all()"], ids=["threads", "gevent"]
)
def test_a_process_that_is_interrupted_ends_at_once(first):
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED.format(first=first)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),  # noqa: PLW1509
    ) as run:
        assert run.stdout.readline() == "begun\n"
        time.sleep(0.5)
        before = time.monotonic()
        run.send_signal(signal.SIGINT)
        run.wait(timeout=60)

    assert time.monotonic() - before < 5
