"""Five operations that change a node to a role's desired state. They share one snapshot.

Border: the module reads the node and runs commands through pyinfra. `converge/diff.py`
compares the states. A role declares its desired state once, and calls the operations in the order
that it needs:

    node = Converge(DesiredState(Package("nginx"), File("/etc/nginx/nginx.conf", content), ...))
    node.packages(name="package")
    node.files(name="configuration")
    node.units(name="service")

The operations guarantee the following:

  * While nothing changes, all operations on a node share one snapshot, which one remote command
    reads. The snapshot is read again when it is old, and after an operation of the run has changed
    the node.
  * A dry run takes the same steps as a run. It lists an operation for a host exactly if the
    operation would change the host, with one line for each change.
  * If reading the node fails, the node fails before this operation changes anything on it.
  * Every remote command has a time limit. Contents are sent on stdin and are not logged.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import click
from pyinfra import host, logger
from pyinfra.api import FunctionCommand, Host, QuoteString, State, StringCommand, operation
from pyinfra.api.operation import OperationMeta
from pyinfra.context import ctx_host, ctx_state

from gpufleet.converge import content_diff, package_commands, snapshot
from gpufleet.converge.desired import DesiredState, File, started_line
from gpufleet.converge.diff import Command, Difference, Part, Placement, Transaction, difference
from gpufleet.converge.snapshot import Question, Snapshot
from gpufleet.fleet import dry_run
from gpufleet.operations.progress_watch import show_transaction
from gpufleet.remote import payload, query
from gpufleet.remote.facts import PYTHON, Contents, NodeSnapshot

__all__ = [
    "Converge",
    "accounts",
    "announce",
    "files",
    "lines",
    "log_dry_run",
    "packages",
    "refuse",
    "require_path",
    "started_line",
    "units",
]

SNAPSHOT_SECONDS = 60
# A snapshot is valid only for this time, because a unit may die while other nodes are changed.
SNAPSHOT_LASTS_SECONDS = 30

Commands = Generator[StringCommand | FunctionCommand]


class Converge:
    """
    The desired state that one role has for the current node.

    `watch` are paths that have no desired state, but on which the role bases decisions
    (`snapshot().file(path)`). With `probed=False`, a probe does not read these files, accounts and
    units, so the probe stays valid when they change. A change of packages always makes the probe
    invalid. Create the object in pyinfra's prepare phase. The operations accept pyinfra's global
    arguments (name, _sudo and others).
    """

    def __init__(
        self, wanted: DesiredState, *, watch: Iterable[str] = (), probed: bool = True
    ) -> None:
        self.wanted = wanted
        self.probed = probed
        self._asked = snapshot.questions(wanted) | snapshot.path_questions(watch)
        _host_memory().asked |= self._asked

    def packages(self, **arguments: Any) -> OperationMeta:
        """Install packages, move them to exact versions, hold them."""
        return _call(packages, self, arguments)

    def accounts(self, **arguments: Any) -> OperationMeta:
        """Create groups and users, or correct them."""
        return _call(accounts, self, arguments)

    def files(self, **arguments: Any) -> OperationMeta:
        """Place directories, files and links, or remove them if they are declared absent."""
        return _call(files, self, arguments)

    def lines(self, **arguments: Any) -> OperationMeta:
        """Append missing lines."""
        return _call(lines, self, arguments)

    def units(self, **arguments: Any) -> OperationMeta:
        """Remove, reload, enable, stop and restart units."""
        return _call(units, self, arguments)

    def snapshot(self) -> Snapshot:
        """
        Return the actual state of everything on the node that this role declares or watches.

        If the state could not be read, the node has failed, and all of its state is unknown.
        """
        return _host_memory().recall(self._asked)

    def difference(self) -> Difference:
        """Return the present differences between the desired and the actual state."""
        return difference(self.wanted, self.snapshot())

    def forget(self) -> None:
        """
        Discard the node's snapshot. Use it after a change that no operation of pyinfra has made.
        """
        _host_memory().forget()

    def mark_read_only(self) -> None:
        """Mark the current operation as read-only, so that the snapshot stays valid."""
        if ctx_state.get().is_executing:
            _host_memory().asking += 1


def probed_changes() -> bool:
    """Return whether an operation of this run may have changed state that a probe reads."""
    memory = _host_memory()
    return _operations_that_ran() - memory.asking > memory.unseen


def _call(operation: Any, node: Converge, arguments: dict[str, Any]) -> OperationMeta:
    """Call an operation with a name, because without a name pyinfra would print the arguments."""
    found: OperationMeta = operation(node, **{"name": operation.__name__, **arguments})
    return found


@operation()
def packages(node: Converge | DesiredState) -> Commands:
    """Install packages, move them to exact versions, hold them."""
    yield from _converge(node, lambda found: found.packages)


@operation()
def accounts(node: Converge | DesiredState) -> Commands:
    """Create groups and users, or correct them."""
    yield from _converge(node, lambda found: found.accounts)


@operation()
def files(node: Converge | DesiredState) -> Commands:
    """Place directories, files and links, or remove them if they are declared absent."""
    yield from _converge(node, lambda found: found.files)


@operation()
def lines(node: Converge | DesiredState) -> Commands:
    """Append missing lines."""
    yield from _converge(node, lambda found: found.lines)


@operation()
def units(node: Converge | DesiredState) -> Commands:
    """Remove undesired units, and reload, enable, stop and restart desired units."""
    yield from _converge(node, lambda found: found.units)


@operation()
def require_path(node: Converge, path: str, otherwise: str) -> Commands:
    """
    Fail a node if `path` does not exist, with the message `otherwise`. `node` must watch the path.
    """
    if node.snapshot().file(path).exists:
        host.noop(f"{path} exists")
        return
    yield from refuse((otherwise,))


def _converge(node: Converge | DesiredState, choose: Callable[[Difference], Part]) -> Commands:
    node = node if isinstance(node, Converge) else Converge(node)
    part = choose(node.difference())
    executing = ctx_state.get().is_executing
    if part.problems:
        yield from refuse(part.problems)
        return
    if not part.commands:
        host.noop(part.noop)
        return
    for change in part.changes:
        announce(change)
    if executing and not node.probed and not any(isinstance(c, Transaction) for c in part.commands):
        _host_memory().unseen += 1
    if part.rewritten and ctx_state.get().config.DIFF:
        _show(part.rewritten)
    if executing:
        # The snapshot is discarded before the command, because a command that fails half-way has
        # also changed the node.
        node.forget()
    for command in part.commands:
        if isinstance(command, Transaction):
            with show_transaction(command.seconds):
                yield _remote(command)
        else:
            yield _remote(command)


def announce(change: str) -> None:
    """Log a change of the current operation. In the prepare phase, log it as a pending change."""
    if ctx_state.get().is_executing:
        logger.info("%s%s", host.print_prefix, change)
    else:
        log_dry_run(change)


def log_dry_run(change: str) -> None:
    """Log a pending change of the current operation, and record it for `fleet.dry_run`."""
    logger.info("%swould %s", host.print_prefix, change)
    dry_run.record(change)


def _show(files: tuple[File, ...]) -> None:
    """
    Log the differences between the old and the new contents of files, for --diff.

    If the node does not report the old content, a line with the reason is logged instead.
    """
    paths = [file.path for file in files if content_diff.is_readable(file)]
    program = payload.program("converge/read_files", paths=paths, most=content_diff.MOST_BYTES)
    seen = query.read(Contents, program, SNAPSHOT_SECONDS, _ignore_errors=True) if paths else {}
    found = (seen or {}).get("files")
    for file in files:
        there = found.get(file.path) if isinstance(found, dict) else "the node did not answer"
        for line in content_diff.lines(file, there):
            colour = {"+": "green", "-": "red"}.get(line[:1])
            logger.info("%s%s", host.print_prefix, click.style(line, colour))


def refuse(problems: tuple[str, ...]) -> Commands:
    """
    Fail only this node.

    In the prepare phase, this acts like a failed fact. During execution, it runs a command that
    fails, because an exception would end the run for every node.
    """
    state: State = ctx_state.get()
    if state.is_executing:
        yield FunctionCommand(_say_no, (problems,), {})
        return
    _say_no(state, ctx_host.get(), problems)
    state.fail_hosts({ctx_host.get()})


def _say_no(state: State, host: Host, problems: tuple[str, ...]) -> bool:  # noqa: ARG001
    for problem in problems:
        logger.error("%s%s", host.print_prefix, problem)
    return False


def _remote(command: Command | Placement | Transaction) -> StringCommand:
    if isinstance(command, Transaction):
        program = payload.program(
            "packages/transaction", **package_commands.parameters(command.plan)
        )
        return StringCommand(PYTHON, _stdin=program, _timeout=command.seconds)
    if isinstance(command, Placement):
        program = payload.program("converge/place_files", entries=list(command.entries))
        return StringCommand(PYTHON, _stdin=program, _timeout=command.seconds)
    words = (QuoteString(word) for word in command.argv)
    return StringCommand(*words, _timeout=command.seconds)


@dataclass
class _Memory:
    """
    The snapshot of one node during one run of pyinfra.

    `asked` collects the queries of all roles while they prepare, so that the first snapshot of the
    execution answers all of them.
    """

    asked: frozenset[Question] = frozenset()
    answered: frozenset[Question] = frozenset()
    seen: Snapshot = field(default_factory=Snapshot)
    stamp: tuple[bool, int] | None = None
    read_at: float = 0.0
    asking: int = 0
    """The number of operations that ran commands but changed nothing."""
    unseen: int = 0
    """The number of operations that changed only state that no probe reads."""

    def recall(self, asked: frozenset[Question]) -> Snapshot:
        """
        Return a snapshot with the answers to these queries. If necessary, read the node again.
        """
        self.asked |= asked
        stamp = (ctx_state.get().is_executing, _operations_that_ran() - self.asking)
        fresh = self.stamp == stamp and time.monotonic() - self.read_at < SNAPSHOT_LASTS_SECONDS
        if not fresh or not asked <= self.answered:
            self.seen = _read(self.asked)
            self.answered, self.stamp, self.read_at = self.asked, stamp, time.monotonic()
        return self.seen

    def forget(self) -> None:
        self.stamp = None


# The keys are pyinfra's host objects, which are new in each run.
_MEMORIES: WeakKeyDictionary[Host, _Memory] = WeakKeyDictionary()


def _host_memory() -> _Memory:
    return _MEMORIES.setdefault(ctx_host.get(), _Memory())


def _operations_that_ran() -> int:
    """
    Return the number of operations that have run a command on this node so far.

    Operations of pyinfra and of gpufleet count alike.
    """
    state: State = ctx_state.get()
    done = (data.operation_meta for data in state.ops.get(ctx_host.get(), {}).values())
    return sum(1 for meta in done if meta.is_complete() and meta.executed)


def _read(asked: frozenset[Question]) -> Snapshot:
    program = payload.program("converge/snapshot", asked=sorted(map(list, asked)))
    document = query.read(NodeSnapshot, program, SNAPSHOT_SECONDS)
    return snapshot.from_document(document, asked)
