"""A real vLLM of the fleet that freezes: said and counted within its bound, and left alone.

What the watchdog does beyond that, and for how long each takes, is in test_watchdog.py.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Iterator

import pytest

from tests.lab.conftest import Fleet
from tests.lab.group_faults import Replica, wait
from tests.lab.test_watchdog import SLACK, Health, asked, metric, said

NODE = "gpu-01"
SECONDS, IDLE_SECONDS = 10, 5
CONFIGURATION = "/etc/gpufleet/watchdog.json"


@pytest.fixture
def impatient(deployed: Fleet) -> Iterator[Fleet]:
    """The fleet with a watchdog that waits seconds where operators wait minutes."""
    text = deployed.ssh(NODE, f"cat {CONFIGURATION}")
    told = json.loads(text)
    for stage in told["stages"]:
        assert stage["mode"] == "warn"  # which is the default
        stage |= {"seconds": SECONDS, "idle_seconds": IDLE_SECONDS}
    restart = f"cat > {CONFIGURATION} && systemctl restart gpufleet-watchdog"
    deployed.ssh(NODE, restart, stdin=json.dumps(told))
    yield deployed
    deployed.ssh(NODE, restart, stdin=text)


def test_a_frozen_worker_is_found_while_health_says_200_and_mode_warn_leaves_it(
    impatient: Fleet,
) -> None:
    replica = Replica(impatient, "mp")
    replica.nodes = [NODE]
    assert asked(impatient)
    old, stalls = replica.all_processes(), metric(impatient, "stalls_total")
    frozen = replica.below(NODE, "VLLM::Worker")
    begun = time.time()
    with Health(impatient) as health:
        os.kill(frozen, signal.SIGSTOP)
        try:
            bound = SECONDS + 2 * IDLE_SECONDS + SLACK
            found = wait(lambda: said(impatient, begun, "is stalled since"), bound, "it is found")
        finally:
            os.kill(frozen, signal.SIGCONT)
    lied = [status for when, status in health.said if begun + 1 < when < found - 1]
    assert len(lied) > SECONDS / 2
    assert set(lied) == {200}
    wait(lambda: said(impatient, begun, "it moves again"), 30, "it is over")
    assert asked(impatient)
    assert metric(impatient, "stalls_total") == stalls + 1
    assert metric(impatient, "restarts_total") == 0
    assert old <= replica.all_processes()
