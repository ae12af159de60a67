"""Build releases and download models on one node, and copy them to other nodes.

Border: the module queries all nodes of a copy at once through pyinfra, and shows their
progress. `distribution.py` plans the sources and targets of copies. `on_node/transfer/transfer.py`
runs on the nodes. An operation that makes an artifact first calls `is_copied`, and skips nodes that
will copy the artifact. Then `copy` runs. After that, a node that has received nothing makes the
artifact itself. So every node gets the artifact.

Nodes that pyinfra changes at the same time take part in one copy. With --serial, only the current
node receives the artifact, from a node that already has it. Nodes outside of --limit may send the
artifact, but are not changed.
"""

from __future__ import annotations

import secrets
from collections.abc import Generator, Mapping, Sequence
from time import monotonic
from typing import Any

from pyinfra import host, logger
from pyinfra.api import FunctionCommand, Host, State, operation
from pyinfra.context import ctx_state

from gpufleet.artifacts import built_releases, distribution
from gpufleet.artifacts.distribution import DistributionPlan, Kind, Share, TreeState
from gpufleet.errors import FleetError
from gpufleet.fleet.live import Answers
from gpufleet.fleet.run import documents
from gpufleet.inventory import loader
from gpufleet.node import cluster_network
from gpufleet.operations.artifact import (
    MANIFESTS,
    Artifact,
    artifact_run,
    once,
    sharing_nodes,
    tree_parameters,
)
from gpufleet.operations.converge import Converge, log_dry_run
from gpufleet.progress import Amount, Pace
from gpufleet.remote import payload
from gpufleet.remote.query import query
from gpufleet.sanitize import printable

# The query only starts an interpreter. The rest of the time is for connecting.
LOOK_SECONDS = 30


def is_copied(artifact: Artifact | None) -> bool:
    """
    Return whether the current node will copy a missing artifact from a different node.

    Otherwise, the current node makes the artifact. In the prepare phase, this is logged with the
    nodes that need the artifact.
    """
    if artifact is None or not artifact.has_other_nodes:
        return False
    found = _course(artifact, "make")
    if found.copies(host.name):
        return True
    if why := found.alone.get(host.name):
        logger.warning(
            "%s%s is not copied from another node: %s",
            host.print_prefix,
            artifact.what,
            printable(why),
        )
    own = found.makes(host.name) or Share(host.name, there=False, others=())
    if not ctx_state.get().is_executing:
        log_dry_run(distribution.describe_action(artifact.what, artifact.verb, own, host.name))
    return False


def _course(artifact: Artifact, phase: str) -> DistributionPlan:
    """
    Return the plan to distribute an artifact, from the state of the nodes before a phase.

    The nodes are queried once for each phase.
    """
    state = ctx_state.get()
    typed = loader.current().typed
    alone = state.is_executing and typed is not None and typed.serial
    key = (artifact.directory, phase, state.is_executing, host.name if alone else "")
    turn = (host.name,) if alone else tuple(_in_run(state, artifact.wanting))
    return once(state, key, lambda: _looked(state, artifact, turn))


def _in_run(state: State, names: Sequence[str]) -> list[str]:
    """Return those of the named nodes that are in this run and have not failed."""
    lost = {each.name for each in state.failed_hosts}
    there = {each.name for each in state.inventory if state.is_host_in_limit(each)}
    return [name for name in names if name in there - lost]


def _looked(state: State, artifact: Artifact, turn: tuple[str, ...]) -> DistributionPlan:
    lost = {each.name for each in state.failed_hosts}
    asked = [each for each in state.inventory if each.name in set(artifact.sharing) - lost]
    program = payload.program(
        "transfer/transfer",
        action="look",
        directory=artifact.directory,
        mark=artifact.mark,
        manifests=MANIFESTS if artifact.release else "",
        python=artifact.python,
        seconds=LOOK_SECONDS - 5,
    )
    answers = query(state, asked, lambda _: program, LOOK_SECONDS, "the search for existing copies")
    looks: dict[str, TreeState | str] = {
        name: distribution.parse_look(said) for name, said in answers.items()
    }
    found = distribution.plan_distribution(turn, looks, _right(state, artifact))
    _tell_unknown(state, artifact, found)
    return found


def _right(state: State, artifact: Artifact) -> dict[Kind, frozenset[str]] | None:
    """
    Return the allowed digests of an artifact by kind of node, or None if any digest is allowed.

    For models, any digest is allowed. In the prepare phase, the function raises `FleetError` if the
    recorded digests cannot be read.
    """
    if artifact.release is None:
        return None
    found: dict[Kind, frozenset[str]] = {}
    try:
        found = built_releases.read_note(artifact.release)
    except FleetError as error:
        if not state.is_executing:
            raise
        logger.warning("%s", error)
    for kind, digests in artifact_run(state).built.get(artifact.directory, {}).items():
        found[kind] = found.get(kind, frozenset()) | digests
    return found


def _tell_unknown(state: State, artifact: Artifact, found: DistributionPlan) -> None:
    """
    Log the nodes that have an artifact but cannot be its source. A node is logged once in a run.
    """
    if artifact.release is None:
        return
    note = built_releases.note_path(artifact.release)
    told = artifact_run(state).told
    names = sorted(set(found.unknown) - told)
    told.update(names)
    if names:
        logger.warning(
            "%s: %s exists with files that %s does not list, so gpufleet does not copy from this "
            "node. If none of your deploys has built these files, remove %s there and deploy again",
            ", ".join(names),
            artifact.what,
            note,
            artifact.directory,
        )


def note_build(state: State, host: Host, artifact: Artifact) -> bool:
    """
    Record the files of a new build on a node, because other nodes accept only recorded builds.
    """
    if artifact.release is None:
        return True
    found = _read(state, host, artifact)
    why = found if isinstance(found, str) else "the node reported no digest"
    if isinstance(found, TreeState) and found.digest:
        noted = artifact_run(state).built.setdefault(artifact.directory, {})
        noted[found.kind] = noted.get(found.kind, frozenset()) | {found.digest}
        try:
            built_releases.note_build(artifact.release, found.kind, found.digest, host.name)
        except FleetError as error:
            why = str(error)
        else:
            return True
    logger.warning(
        "%s%s could not be recorded, so later runs do not copy it from this node: %s",
        host.print_prefix,
        artifact.what,
        printable(why),
    )
    return True


def read_build(state: State, host: Host, artifact: Artifact) -> bool:
    """
    Have the node read the files of its own build, so that later runs know their digest.

    Builds of one lock are equal, so later runs may copy them. If the node cannot read them, they
    are not copied.
    """
    if isinstance(found := _read(state, host, artifact), str):
        logger.warning(
            "%s%s could not be read, so later runs do not copy it from this node: %s",
            host.print_prefix,
            artifact.what,
            printable(found),
        )
    return True


def _read(state: State, host: Host, artifact: Artifact) -> TreeState | str:
    """Return what a node reads of a complete artifact, or why it cannot read it."""
    program = payload.program("transfer/transfer", action="describe", **tree_parameters(artifact))
    said = query(
        state,
        [host],
        lambda _: program,
        artifact.seconds,
        f"the reading of {artifact.what}",
        aloud=False,
        hear=_Shown({host.name: host}, f"reads {artifact.what}"),
    )[host.name]
    if isinstance(said, str):
        return said
    if why := said.get("error"):
        return str(why)
    return distribution.parse_look({"whole": True, **said})


@operation()
def copy(node: Converge, artifact: Artifact) -> Generator[FunctionCommand]:
    """
    Copy the artifact to this node from a node that has the artifact.

    A failed copy does not fail the node. If nothing has arrived, the next operation makes the
    artifact.
    """
    if node.snapshot().file(artifact.mark).exists:
        host.noop(f"{artifact.what} exists")
        return
    executing = ctx_state.get().is_executing
    found = _course(artifact, "copy" if executing else "make")
    own = found.copies(host.name)
    if own is None and executing and not found.makes(host.name):
        why = found.alone.get(host.name, "no node has a copy")
        logger.warning(
            "%s%s is not copied to this node: %s", host.print_prefix, artifact.what, printable(why)
        )
    if own is None or (executing and not own.there):
        host.noop(f"no other node has {artifact.what} for this node")
        return
    if not executing:
        log_dry_run(distribution.describe_action(artifact.what, artifact.verb, own, host.name))
    yield FunctionCommand(_copy, (artifact, own), {})
    node.forget()


def _copy(state: State, host: Host, artifact: Artifact, own: Share) -> bool:
    """Wait for the copy to this node, and log its result. A failed copy does not fail the node."""
    key = (artifact.directory, "copies", own.source, own.others)
    answers = once(state, key, lambda: _copies(state, artifact, own))
    said = answers.get(host.name, "the node was not queried")
    why = said if isinstance(said, str) else str(said.get("error") or "")
    if why:
        logger.warning(
            "%s%s could not be copied from %s (%s), so this node downloads or builds it",
            host.print_prefix,
            artifact.what,
            own.source,
            printable(why),
        )
        return True
    if isinstance(said, str):
        return True
    logger.info(
        "%scopied %s in %.1f s: %s",
        host.print_prefix,
        artifact.what,
        float(said.get("seconds") or 0),
        printable(distribution.describe_sources(said)),
    )
    for remark in said.get("remarks", ()):
        logger.debug("%s%s: %s", host.print_prefix, artifact.what, printable(str(remark)))
    return True


def _copies(state: State, artifact: Artifact, own: Share) -> Answers:
    """
    Copy the artifact to all nodes of a share, and return their answers.

    Only one share is copied at a time.
    """
    # A node has only one port for copies, so it sends one artifact at a time.
    with artifact_run(state).one_at_a_time:
        hosts = {each.name: each for each in state.inventory}
        source = hosts[own.source]
        tree = tree_parameters(artifact)
        reading = payload.program("transfer/transfer", action="describe", **tree)
        described = query(
            state,
            [source],
            lambda _: reading,
            artifact.seconds,
            f"the reading of {artifact.what}",
            aloud=False,
            hear=_Shown(hosts, f"reads {artifact.what}"),
        )[own.source]
        why = described if isinstance(described, str) else described.get("error")
        if isinstance(described, str) or why or not isinstance(described.get("digest"), str):
            return dict.fromkeys(own.others, f"{own.source} cannot read it: {why or 'no name'}")
        right = _right(state, artifact)
        if right is not None and described["digest"] not in frozenset().union(*right.values()):
            return dict.fromkeys(
                own.others, f"{own.source} has files that differ from the recorded build"
            )
        programs = _programs(state, artifact, own, {**tree, "digest": described["digest"]})
        answers = query(
            state,
            [hosts[name] for name in programs],
            programs.__getitem__,
            artifact.seconds,
            f"the copy of {artifact.what}",
            aloud=False,
            hear=_Shown(hosts, f"copies {artifact.what}", but=own.source),
        )
        served = answers[own.source]
        if why := served if isinstance(served, str) else served.get("error"):
            prefix = source.print_prefix
            logger.warning(
                "%s%s was not sent to other nodes: %s", prefix, artifact.what, printable(str(why))
            )
        return answers


def _programs(
    state: State, artifact: Artifact, own: Share, tree: Mapping[str, Any]
) -> dict[str, str]:
    names = (own.source, *own.others)
    ways = distribution.sources(own.source, own.others)
    expected = distribution.expected_halves(ways)
    addresses, sharing = _addresses(state, names), sharing_nodes()
    token = secrets.token_hex(32)
    programs: dict[str, str] = {}
    for name in names:
        halves = [
            [(each, addresses[each], sharing[each].port) for each in half]
            for half in ways.get(name, ())
        ]
        programs[name] = payload.program(
            "transfer/transfer",
            action="fetch" if halves else "serve",
            **tree,
            own=name,
            token=token,
            address=addresses[name],
            port=sharing[name].port,
            rate_mbit=sharing[name].rate_mbit,
            expected=expected.get(name, ()),
            halves=halves,
            remove=artifact.remove,
            files=artifact.files,
        )
    return programs


def _addresses(state: State, names: Sequence[str]) -> dict[str, str]:
    """
    Return the addresses by which nodes reach each other.

    These are addresses in the cluster network, or else the addresses for SSH.
    """
    declared = loader.current().gpu_nodes
    answers = documents(state)
    as_ssh = {name: declared[name].address for name in names}
    probes = {name: said for name in names if not isinstance(said := answers[name], str)}
    if len(probes) < len(names):
        return as_ssh
    try:
        found = cluster_network.networks(
            "distribution",
            probes,
            dict.fromkeys(names, ()),
            {name: declared[name].settings.cluster_network for name in names},
        )
        return {name: each.address for name, each in found.items()}
    except FleetError:
        return as_ssh


class _Shown:
    """
    Log the progress of nodes.

    Their programs print lines of the form `<bytes> <total bytes>`.
    """

    def __init__(self, hosts: Mapping[str, Host], doing: str, but: str = "") -> None:
        self._hosts, self._doing, self._but = hosts, doing, but
        self._nodes: dict[str, tuple[Amount, Pace]] = {}
        began = monotonic()
        self._began = began

    def __call__(self, name: str, said: bytes) -> None:
        """Record the progress line of a node. The line is untrusted input."""
        words = said.splitlines()[-1].split()
        if name == self._but or len(words) != 2 or not all(each.isdigit() for each in words):
            return
        amount, pace = self._nodes.setdefault(name, (Amount(), Pace(self._began)))
        now = monotonic()
        amount.record(now, int(words[0][:18]), int(words[1][:18]))
        if pace.is_due(now):
            prefix = self._hosts[name].print_prefix
            logger.info("%s%s: %s", prefix, self._doing, amount.text())
