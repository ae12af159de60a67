"""Test that the nodes of a replica reach each other before one of the replica's ranks starts.

Border: the module queries all nodes of a replica at once through pyinfra. `reachability.py`
evaluates the answers. In each run, the test runs once for each replica, when pyinfra reaches the
replica's first node. With --limit and --serial, the test also queries nodes that pyinfra does not
change now. The result applies to every node of the replica. If the test fails, the replica's rank
restarts on none of these nodes in this run.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator, Mapping, Sequence
from functools import partial

from pyinfra import host, logger
from pyinfra.api import FunctionCommand, Host, State, operation
from pyinfra.context import ctx_state

from gpufleet.artifacts.model_files import model_directory
from gpufleet.artifacts.operator_files import release_of
from gpufleet.converge.diff import units_to_start
from gpufleet.errors import FleetError
from gpufleet.fleet.live import Ask
from gpufleet.inventory import loader
from gpufleet.operations.artifact import artifact_run, once
from gpufleet.operations.converge import Converge, log_dry_run
from gpufleet.planning.multinode import reachability
from gpufleet.planning.multinode.reachability import Member, ReachabilityResult, Replica
from gpufleet.planning.stage import Stage
from gpufleet.remote import payload
from gpufleet.remote.query import query
from gpufleet.sanitize import printable
from gpufleet.settings.node_settings import NodeSettings


def describe_replica(stage: Stage, settings: Mapping[str, NodeSettings]) -> Replica:
    """
    Return the multi-node replica of a stage, with the release and model that each node starts.

    Raises `FleetError` for locks that cannot be read.
    """
    if stage.group is None:
        raise ValueError(f"{stage.id} is on one node")
    members = []
    for node, network in stage.group.networks:
        vllm, model = settings[node].engine_of(stage.model), settings[node].serving[stage.model]
        build = release_of(vllm)
        members.append(
            Member(
                node=node,
                network=network,
                release=build.id,
                release_directory=build.directory,
                vllm=vllm.version,
                revision=model.revision or model.model,
                model_directory=model_directory(model),
                user=vllm.user,
            )
        )
    own = settings[stage.node].serving[stage.model]
    return Replica(
        id=stage.id,
        members=tuple(members),
        port=stage.group.cluster_port,
        ray=own.distributed_executor_backend == "ray",
    )


def probe_reachability(wanted: Replica, asking: Ask) -> ReachabilityResult:
    """Test that the nodes of a replica reach each other. The test takes at most 20 s."""
    began = time.monotonic()
    looks = reachability.preflight_parameters(wanted)

    def look(node: str) -> str | None:
        return payload.program("reach/preflight", **looks[node]) if node in looks else None

    seen = reachability.check_preflights(
        asking(look, reachability.LOOK_SECONDS, "the query of its network")
    )
    given = reachability.exchange_parameters(wanted, seen, secrets.token_hex(16))

    def exchange(node: str) -> str | None:
        return payload.program("reach/reach", **given[node]) if node in given else None

    limit = reachability.EXCHANGE_SECONDS + reachability.WAY_SECONDS
    exchanged = asking(exchange, limit, "the exchange with the others") if given else {}
    return reachability.compare(wanted, seen, exchanged, time.monotonic() - began)


@operation()
def check_reachability(node: Converge, stages: Sequence[Stage]) -> Generator[FunctionCommand]:
    """
    Test that the nodes of each multi-node replica can form a group, if a rank will start here.

    If no rank will start, nothing changes. `node` has the desired units of the stages. If the test
    fails, every node on which a rank of the replica would start fails, before anything of that rank
    is changed.
    """
    due = set(units_to_start(node.wanted, node.snapshot()))
    spanning = tuple(stage for stage in stages if stage.group and stage.unit in due)
    if not spanning:
        host.noop("no rank of a multi-node replica will start")
        return
    if not ctx_state.get().is_executing:
        for stage in spanning:
            nodes = " and ".join(stage.nodes)
            log_dry_run(f"first test for {stage.id} whether {nodes} reach each other")
    yield FunctionCommand(_prove, (spanning,), {})


def _prove(state: State, host: Host, stages: tuple[Stage, ...]) -> bool:
    """Return whether every replica of these stages may start, and log the problems."""
    return [_may_start(state, host, stage) for stage in stages].count(False) == 0


def _may_start(state: State, host: Host, stage: Stage) -> bool:
    key = ("proof", stage.id)
    first = key not in artifact_run(state).found
    found = once(state, key, lambda: _proof(state, stage))
    problems = found.problems
    if first:
        remarks = () if isinstance(found, FleetError) else found.remarks
        for sentence in remarks:
            logger.warning("    %s", printable(sentence))
        for problem in problems:
            logger.error("%s%s", host.print_prefix, printable(problem))
        if isinstance(found, ReachabilityResult) and not problems:
            logger.info(
                "%s%s: %d nodes reach each other (tested in %.1f s)",
                host.print_prefix,
                stage.id,
                len(stage.nodes),
                found.seconds,
            )
    if problems:
        logger.error(
            "%s%s stays unchanged on all its nodes (%s)",
            host.print_prefix,
            stage.id,
            ", ".join(stage.nodes),
        )
    return not problems


def _proof(state: State, stage: Stage) -> ReachabilityResult | FleetError:
    """Return the result of the test, or the error that prevented the test."""
    failed = sorted(each.name for each in state.failed_hosts if each.name in stage.nodes)
    if failed:
        return FleetError(
            f"{stage.id}: {', '.join(failed)} failed earlier in this run, so the rank there would "
            "start with settings that differ from the other ranks"
        )
    declared = loader.current().nodes
    try:
        wanted = describe_replica(stage, {name: each.settings for name, each in declared.items()})
        return probe_reachability(wanted, partial(query, state, state.inventory))
    except FleetError as error:
        return error
