"""Connect to nodes outside a deploy, for commands of `gpufleet`."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TypeAlias

import gevent
from pyinfra.api import Host, State
from pyinfra.api.exceptions import PyinfraError
from pyinfra.context import ctx_state

from gpufleet.errors import FleetError
from gpufleet.inventory import loader
from gpufleet.remote.probe_paths import ProbePaths
from gpufleet.remote.query import SECONDS, Answer, probe_all, query

Answers: TypeAlias = dict[str, Answer]
Ask: TypeAlias = Callable[[Callable[[str], str | None], float, str], Answers]
"""
A function that queries nodes.

Its arguments are a function from a node's name to the node's program, the deadline in seconds, and
the program's name in messages. It returns {node: document, or a sentence why there is none}.
"""


def probe(
    path: str,
    limit: tuple[str, ...] = (),
    seconds: float = SECONDS,
    paths: Mapping[str, ProbePaths] | None = None,
) -> dict[str, Answer]:
    """
    Probe the GPU nodes of an inventory file, outside a deploy. Return the answer of each node.

    `paths` has the paths to look up on each node's disks.

    The probe takes at most `seconds`, and a few more seconds to close connections. The process must
    have gevent's monkey patches in place, as the pyinfra command has. Raises `FleetError` for
    problems that the operator can correct.
    """
    state = State()
    with open_run(state, path, limit) as wanted:
        return probe_all(state, gpu_hosts(wanted), seconds, paths)


@contextmanager
def connect(path: str, limit: tuple[str, ...] = ()) -> Generator[Ask]:
    """
    Yield a function that queries an inventory's nodes and keeps connections between calls.

        with connect("inventories/prod.py") as ask:
            answers = ask(lambda node: payload.program("serving/status"), 40, "the look")

    The yielded function takes three arguments: a function from a node's name to the node's program
    (None: skip this node), a deadline in seconds, and the programs' name in messages. It returns
    {node: document, or why there is none}. `probe` describes the requirements on the process, and
    the exceptions.
    """
    state = State()
    with open_run(state, path, limit) as wanted:

        def asked(program: Callable[[str], str | None], seconds: float, what: str) -> Answers:
            answers = query(state, wanted, program, seconds, what)
            # A lost or stuck connection is not used again.
            _disconnect(each for each in wanted if isinstance(answers.get(each.name), str))
            return answers

        yield asked


@contextmanager
def open_run(state: State, path: str, limit: tuple[str, ...]) -> Generator[list[Host]]:
    """
    Begin a run over an inventory file and yield its nodes. Close the connections afterwards.

    `probe` describes the requirements on the process, and the exceptions.
    """
    from pyinfra.api import Config
    from pyinfra_cli.inventory import make_inventory

    state.cwd = str(Path.cwd())
    try:
        with ctx_state.use(state):
            nodes = make_inventory(path)
            wanted = [each for each in nodes if not limit or {each.name, *each.groups} & set(limit)]
            if not wanted:
                raise FleetError(f"--limit {', '.join(limit)} matches no node or group of {path}")
            state.init(nodes, Config(), initial_limit=wanted)
            try:
                yield wanted
            finally:
                _disconnect(wanted)
    except PyinfraError as error:
        raise FleetError(str(error)) from error


def _disconnect(hosts: Iterable[Host]) -> None:
    """Close open connections without waiting long for dead ones."""
    jobs = [gevent.spawn(each.disconnect) for each in hosts if each.connected]
    gevent.joinall(jobs, timeout=2)


def gpu_hosts(nodes: Iterable[Host]) -> list[Host]:
    """Return the nodes with GPUs, which are probed. Raises `FleetError` if there are none."""
    known = loader.current().gpu_nodes
    if found := [each for each in nodes if each.name in known]:
        return found
    raise FleetError(
        "none of these nodes has GPUs: `gpu_node: false` is set for all of these nodes"
    )
