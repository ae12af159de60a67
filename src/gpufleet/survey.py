"""Ask every node at once what it is, and take what comes within the deadline.

A node that cannot be reached, that has no python3, that hangs or that prints nonsense costs itself
only: what it gives is a sentence that says why, instead of a document.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, TypeAlias

import gevent
from gevent import Timeout
from paramiko import SSHException
from pyinfra.api import Host, State, StringCommand
from pyinfra.api.arguments import CONNECTOR_ARGUMENT_KEYS, pop_global_arguments
from pyinfra.api.exceptions import FactProcessError, PyinfraError
from pyinfra.context import ctx_host, ctx_state

from gpufleet import payload
from gpufleet.facts import PYTHON, document
from gpufleet.release import CACHE, RELEASES
from gpufleet.units import MODELS

Answer: TypeAlias = dict[str, Any] | str
"""A probe's document, or a sentence why there is none."""

# A probe's own deadlines end it after 50 s (on_node/probe.py); ten more are for connecting.
SECONDS = 60

DISKS = ("/", RELEASES, CACHE, MODELS)
"""Directories whose free space matters: the system's, the releases', their wheels', the models'."""


def survey(state: State, hosts: Iterable[Host], seconds: float = SECONDS) -> dict[str, Answer]:
    """
    Probe `hosts` and return {name: document or sentence}, in the order of names.

    Takes at most `seconds` and one more. Connects to those that are not connected yet.
    """
    # One round trip: the program travels on stdin, and nothing is asked before it.
    program = payload.program("probe", nvml=True, disks=DISKS)
    # Plain greenlets: the deploy passes that wait for us fill pyinfra's own pool, and what is
    # spawned there would never run.
    jobs = {
        each.name: gevent.spawn(_ask, state, each, program, seconds)
        for each in sorted(hosts, key=lambda h: h.name)
    }
    gevent.joinall(list(jobs.values()), timeout=seconds + 1)
    answers: dict[str, Answer] = {}
    for name, job in jobs.items():
        if not job.ready():
            job.kill(block=False)
        answers[name] = job.value if job.successful() and job.value else _late(seconds)
    return answers


def _ask(state: State, host: Host, program: str, seconds: float) -> Answer:
    """Probe one node. It raises nothing: gevent would print a traceback beside our sentences."""
    try:
        with Timeout(seconds), ctx_state.use(state), ctx_host.use(host):
            if not host.connected:
                host.connect(show_errors=False, raise_exceptions=True)
            arguments, _ = pop_global_arguments(state, host, {})
            status, output = host.run_shell_command(
                StringCommand(PYTHON),
                **_for_connector(arguments),
                _stdin=program,
                _timeout=int(seconds),
            )
            if status:
                return document(output.stdout_lines, "the probe")
            said = " / ".join([*output.stderr_lines, *output.stdout_lines][-3:])
            return f"the probe ended without an answer; the node said: {said or 'nothing'}"
    except (Timeout, TimeoutError):
        return _late(seconds)
    except FactProcessError as error:
        return str(error)
    except (PyinfraError, SSHException, OSError, EOFError) as error:
        return f"cannot be reached: {error or type(error).__name__}"


def _for_connector(arguments: Mapping[str, Any]) -> dict[str, Any]:
    ours = {"_stdin", "_timeout"}
    return {k: v for k, v in arguments.items() if k in CONNECTOR_ARGUMENT_KEYS and k not in ours}


def _late(seconds: float) -> str:
    return f"no answer within {seconds:.0f} s"
