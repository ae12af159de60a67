"""Find the changes that deploys would make, without a pyinfra command: for drift detection.

Border: this module executes the deploy files for every node as pyinfra does in its prepare phase,
and ends there. The operations therefore compare the node as in a deploy. The changes that they
record ("write /etc/x: it is missing") are collected with the operation's name. If an operation
fails on a node, its result counts as unknown, and the node's other operations still report their
changes.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType
from typing import Any

import gevent
from click import unstyle
from gevent import Timeout
from paramiko import SSHException
from pyinfra import logger
from pyinfra.api import Host, State
from pyinfra.api.exceptions import PyinfraError
from pyinfra.api.state import StateOperationHostData, StateStage
from pyinfra.context import ctx_config, ctx_host, ctx_state

from gpufleet.errors import FleetError
from gpufleet.fleet import live, run
from gpufleet.fleet.drift import Deviation, NodeDrift, Unread, urgency_of
from gpufleet.inventory.refusal import Refusal
from gpufleet.remote.query import Answer, await_jobs, say_on_stderr
from gpufleet.sanitize import printable

# A deploy sends a node some tens of queries, each with its own deadline; a node on which several
# time out is abandoned.
SECONDS = 300


@dataclass(frozen=True)
class DryRun:
    """
    The changes on each node, the nodes' probes, and the reasons why a deploy is refused.

    A node without an answer has an empty entry in `nodes`. A node without GPUs is not probed and
    has no answer.
    """

    nodes: Mapping[str, NodeDrift]
    answers: Mapping[str, Answer]
    refused: tuple[str, ...] = ()


def dry_run(
    inventory_file: str,
    deploys: Mapping[str, Sequence[str]],
    limit: tuple[str, ...] = (),
    seconds: float = SECONDS,
) -> DryRun:
    """
    Execute each node's `deploys` without changes, and return the changes that they would make.

    `deploys` is {node: deploy files}. `limit` are the nodes and groups to compare. If it is empty,
    all nodes are compared. The plan always covers the whole inventory.

    All nodes are compared at the same time. This takes at most `seconds` after the probe.
    `fleet.live.probe` describes the requirements on the process, and the exceptions.
    """
    codes = {file: _compile(file) for files in deploys.values() for file in files}
    state = _DryRunState()
    with live.open_run(state, inventory_file, limit) as wanted:
        refused = run.mark_dry_run(state)
        state.set_stage(StateStage.Prepare)
        answers = run.documents(state)
        # A node without a probe would not answer other queries either. Nodes without GPUs were not
        # probed.
        asked = [each for each in wanted if not isinstance(answers.get(each.name), str)]
        with _capture_errors(state):
            jobs = {
                each.name: gevent.spawn(
                    _run_node,
                    state,
                    each,
                    {file: codes[file] for file in deploys.get(each.name, ())},
                    seconds,
                )
                for each in asked
            }
            # Each job has its own deadline.
            await_jobs(jobs, math.inf, "the comparison", say_on_stderr)
            gevent.joinall(list(jobs.values()), raise_error=True)
        nodes = {each.name: state.looks[each].drift() for each in wanted}
    named = {each.name: answers[each.name] for each in wanted if each.name in answers}
    return DryRun(nodes, named, tuple(dict.fromkeys(refused)))


@dataclass
class _NodeDryRun:
    """
    One node's changes and errors so far.

    `changes` and `errors` belong to the current operation.
    """

    file: str = ""
    changes: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    moved: list[Deviation] = field(default_factory=list)
    unread: list[Unread] = field(default_factory=list)

    def end_operation(self, operation: str, *, changes: bool) -> None:
        """
        Store the changes that an operation recorded.

        If an operation changes the node but has recorded nothing, its name is stored.
        """
        source = f"{self.file}: {operation}"
        recorded, errors = self._take()
        self.unread += [Unread(source, each) for each in errors]
        if changes:
            remedy = f"gpufleet deploy {Path(self.file).stem} INVENTORY"
            found = recorded or [operation.rpartition(" | ")[2]]
            self.moved += [Deviation(source, each, urgency_of(each), remedy) for each in found]

    def end_file(self, problems: Sequence[str]) -> None:
        """Record why a deploy file did not finish."""
        _, errors = self._take()
        self.unread += [Unread(self.file, each) for each in (*errors, *problems)]

    def _take(self) -> tuple[list[str], list[str]]:
        """Return and clear the changes and errors of the current operation."""
        found = self.changes, self.errors
        self.changes, self.errors = [], []
        return found

    def drift(self) -> NodeDrift:
        """Return all changes, each only once, because several roles may record the same change."""
        moved: dict[str, Deviation] = {}
        for each in self.moved:
            moved.setdefault(each.what, each)
        return NodeDrift(tuple(moved.values()), tuple(dict.fromkeys(self.unread)))


class _DryRunState(State):
    """A pyinfra state that records the changes that each operation reports."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.looks: dict[Host, _NodeDryRun] = {}
        super().__init__(*args, **kwargs)

    def init(self, inventory: Any, config: Any, initial_limit: Any = None) -> None:
        """Initialize the run with an empty record for each node."""
        super().init(inventory, config, initial_limit)
        self.looks = {each: _NodeDryRun() for each in inventory}

    def fail_hosts(self, hosts_to_fail: set[Host], activated_count: int | None = None) -> None:  # noqa: ARG002
        """Record failed nodes. The run continues, because nothing is executed."""
        self.failed_hosts.update(hosts_to_fail)

    def set_op_data_for_host(
        self, host: Host, op_hash: str, op_data: StateOperationHostData
    ) -> None:
        """Record an operation, once pyinfra has all of its commands."""
        super().set_op_data_for_host(host, op_hash, op_data)
        name = op_data.global_arguments.get("name") or op_hash
        role = host.current_deploy_name
        self.looks[host].end_operation(
            f"{role} | {name}" if role else str(name), changes=op_data.operation_meta.will_change
        )


def record(change: str) -> None:
    """Record a pending change of the current operation on its node, if a `dry_run` is active."""
    state = ctx_state.get()
    if isinstance(state, _DryRunState):
        state.looks[ctx_host.get()].changes.append(printable(change).strip())


@contextmanager
def _capture_errors(state: _DryRunState) -> Iterator[None]:
    """Collect the errors that operations log, without printing them."""
    before = logger.handlers[:], logger.level, logger.propagate
    logger.handlers[:] = [_ErrorHandler(state)]
    logger.setLevel(logging.ERROR)
    logger.propagate = False
    try:
        yield
    finally:
        logger.handlers[:], logger.level, logger.propagate = before


class _ErrorHandler(logging.Handler):
    """Stores each error for the node in whose greenlet the error is logged."""

    def __init__(self, state: _DryRunState) -> None:
        super().__init__()
        self._state = state

    def emit(self, record: logging.LogRecord) -> None:
        """Record an error without pyinfra's prefix."""
        if not ctx_host.isset():
            return
        host = ctx_host.get()
        text = unstyle(record.getMessage()).strip()
        text = text.removeprefix(f"[{host.name}]").strip()
        self._state.looks[host].errors.append(printable(text))


def _compile(file: str) -> CodeType:
    try:
        return compile(Path(file).read_bytes(), file, "exec", dont_inherit=True)
    except OSError as error:
        raise FleetError(
            f"{file}: cannot be read: {error.strerror}; run this command in the project's directory"
        ) from None


def _run_node(
    state: _DryRunState, host: Host, codes: Mapping[str, CodeType], seconds: float
) -> None:
    """Execute deploy files for one node, as pyinfra does in its prepare phase."""
    look = state.looks[host]
    with ctx_state.use(state), ctx_host.use(host), ctx_config.use(state.config.copy()):
        try:
            with Timeout(seconds):
                for file, code in codes.items():
                    look.file = file
                    look.end_file(_execute(file, code))
        except Timeout:
            look.end_file((f"the comparison did not finish within {seconds:.0f} s",))


def _execute(file: str, code: CodeType) -> tuple[str, ...]:
    """Execute a deploy file. Return the errors that stopped it, or () if it finished."""
    try:
        exec(code, {"__file__": file})  # noqa: S102  # it is what pyinfra does with a deploy file
    except (Refusal, FleetError) as error:
        return error.problems
    except (PyinfraError, SSHException, OSError, EOFError) as error:
        return (printable(str(error)) or type(error).__name__,)
    # A mistake in a role is no drift, and must not affect other nodes or deploy files.
    except Exception as error:  # noqa: BLE001
        said = f"{type(error).__name__}: {printable(str(error))}"
        typed = f"gpufleet deploy {Path(file).stem} INVENTORY --dry"
        return (f"the comparison fails with {said}; run `{typed}` to see where it fails",)
    return ()
