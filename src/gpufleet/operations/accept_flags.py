"""Let the release on a node check the flags of the node's stages before the stages start.

Border: the module queries the node through pyinfra. `serving/flag_check.py` evaluates the
answer. The Python of the release runs `on_node/flags/schema.py`, which checks the flags with the
release's own files. The check takes two seconds and needs neither torch nor a GPU. It runs once for
each set of arguments and variables. Accepted sets are recorded beside the release, so a later run
only compares files. If the release on one node refuses the flags, the run restarts nothing on any
node. `accept_flags` checks the flags, and `require_all_accepted` lets a node continue only if no
release has refused flags.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from pyinfra import host, logger
from pyinfra.api import FunctionCommand, State, StringCommand, operation
from pyinfra.context import ctx_state

from gpufleet.artifacts.release import Release
from gpufleet.converge.desired import DesiredState, Directory, File, NoOtherFiles
from gpufleet.engines.engine import engine
from gpufleet.errors import FleetError
from gpufleet.flags import extract, schema
from gpufleet.flags.schema import Schema
from gpufleet.operations.converge import Converge, files, log_dry_run, refuse
from gpufleet.remote.answer_forms import refuse_malformed
from gpufleet.remote.facts import ReleaseFlags
from gpufleet.serving import flag_check
from gpufleet.serving.flag_check import FlagFindings, LaunchCommand, Origins

READ_SECONDS = 60.0
"""
The time limit to read the flags of a release.

Reading takes 2 s on an idle core, and longer on busy nodes.
"""

Commands = Generator[StringCommand | FunctionCommand]


class NoAnswerError(FleetError):
    """The node did not answer. Only this node fails, because its release has not refused flags."""


@dataclass(frozen=True)
class Proof:
    """
    The launch commands of a node's stages, and the files that record that the release accepts them.
    """

    release: Release
    stages: Sequence[LaunchCommand]
    origins: Origins = field(default_factory=dict, repr=False)
    _read: list[Schema] = field(default_factory=list, repr=False, compare=False)

    @property
    def desired_state(self) -> DesiredState:
        """
        Return one file for each stage, beside the release.

        Files of stages that are not planned are removed.
        """
        directory = f"{self.release.directory}/.accepts"
        return DesiredState(
            Directory(directory, mode=0o755),
            NoOtherFiles(f"{directory}/*"),
            *(File(f"{directory}/{each.stage.id}.json", content(each)) for each in self.stages),
        )

    def judge(self) -> FlagFindings:
        """
        Check the flags of every stage with the release on the current node.

        The release is queried once in a run. Raises `NoAnswerError` if the node did not answer.
        """
        try:
            if not self._read:
                self._read.append(_ask(self.release))
        except NoAnswerError:
            raise
        except FleetError as error:
            return FlagFindings(refused=error.problems)
        found = FlagFindings()
        for each in self.stages:
            found += flag_check.check_stage(self._read[0], each, self.origins)
        return found


def content(begun: LaunchCommand) -> bytes:
    """Return the text of the file that records the acceptance, in a form that people can read."""
    said = {
        "accepted_by": "this release's own files",
        "judged_by": flag_check.check_fingerprint(),
        "arguments": list(begun.argv),
        "environment": dict(begun.environment),
    }
    return (json.dumps(said, indent=1, sort_keys=True) + "\n").encode()


def _ask(release: Release) -> Schema:
    """
    Return the flags that the current node's release accepts. Raises `FleetError` if that fails.
    """
    name = release.program.package
    document = host.get_fact(
        ReleaseFlags,
        python=f"{release.directory}/bin/python",
        seconds=READ_SECONDS + 10,
        _stdin=extract.program(engine=name, seconds=READ_SECONDS),
        _timeout=int(READ_SECONDS) + 20,
    )
    unread = f"{release.directory}: the release's flags could not be read"
    if not document:
        raise NoAnswerError(f"{unread}, because the node did not answer: run the deploy again")
    if "refused" in document:
        raise FleetError(
            f"{unread} ({document['refused']}), so the release has accepted no flags: remove this "
            "folder and deploy again, or use a different release and report the error to gpufleet"
        )
    try:
        with refuse_malformed(host.name):
            return schema.from_document(document, name)
    except FleetError as error:
        raise FleetError(f"{unread}: {error}") from error


@dataclass
class _Run:
    """The state of one run of pyinfra, for all of its nodes."""

    refused: list[str] = field(default_factory=list)
    remarked: set[str] = field(default_factory=set)


_RUNS: WeakKeyDictionary[State, _Run] = WeakKeyDictionary()


def _run() -> _Run:
    return _RUNS.setdefault(ctx_state.get(), _Run())


@operation()
def accept_flags(node: Converge, proof: Proof) -> Commands:
    """
    Check the command line of each stage with the parser of the node's release.

    If the release has already accepted the flags, nothing changes. If the release refuses flags,
    this node fails, and `require_all_accepted` then fails all other nodes. With --dry, or without
    -y, pyinfra first collects the changes. If the release already exists then, a refusal ends the
    run before its first operation.
    """
    if not proof.stages:
        host.noop("no stages")
        return
    if not node.snapshot().file(proof.release.mark).exists:
        yield from _foretell(proof)
        return
    part = node.difference().files
    if part.problems:
        yield from refuse(part.problems)
        return
    if not part.changes:
        host.noop(f"release {proof.release.id} has already accepted the flags of its stages")
        return
    try:
        found = proof.judge()
    except NoAnswerError as error:
        yield from refuse(error.problems)
        return
    if found.refused and not ctx_state.get().is_executing:
        raise FleetError(*(f"{host.name}: {sentence}" for sentence in found.refused))
    if found.refused:
        _run().refused.append(host.name)
        yield from refuse(found.refused)
        return
    _remark(proof, found)
    yield from files._inner(node)  # noqa: SLF001  # as pyinfra documents operations in operations


def _foretell(proof: Proof) -> Commands:
    """
    Announce the check in the prepare phase. During execution, refuse a release that is incomplete.
    """
    if ctx_state.get().is_executing:
        yield from refuse((f"{proof.release.directory} is incomplete: run the deploy again",))
        return
    log_dry_run(
        f"check whether release {proof.release.id}, when it is built, accepts the flags of "
        f"{len(proof.stages)} stages"
    )
    yield FunctionCommand(lambda *_: True, (), {})


def _remark(proof: Proof, found: FlagFindings) -> None:
    """
    Log the remarks of a release once in a run.

    For versions whose schema is in gpufleet's package, the plan has already logged the remarks.
    """
    versions = engine(proof.release.program.package).flags.versions()
    if schema.release_name(proof.release.source.version) in versions:
        return
    said = _run().remarked
    for sentence in found.remarks:
        if sentence not in said:
            said.add(sentence)
            logger.warning("    %s", sentence)


@operation()
def require_all_accepted() -> Commands:
    """Fail this node if the release on any node has refused flags in this run."""
    others = [name for name in _run().refused if name != host.name]
    if not ctx_state.get().is_executing or not _run().refused:
        host.noop("no release has refused flags")
        return
    yield from refuse(
        (
            "gpufleet changes no stage, because the release refused flags on "
            f"{', '.join(others) or host.name}",
        )
    )
