"""The gateway on a node: HAProxy proven before it is told, reloaded instead of restarted."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, TypeAlias

from pyinfra import host, logger
from pyinfra.api import FunctionCommand, Host, State, StringCommand, deploy, operation
from pyinfra.context import ctx_host, ctx_state

from gpufleet.converge.desired import (
    UNIT_DIRECTORY,
    Absent,
    Directory,
    File,
    Link,
    NoOtherFiles,
    Package,
    Unit,
    UnitGone,
    Wanted,
)
from gpufleet.errors import FleetError
from gpufleet.monitoring import prometheus, targets
from gpufleet.monitoring.targets import Watching
from gpufleet.network import haproxy, keepalived
from gpufleet.network.haproxy import (
    CONFIGURATION,
    HOME,
    PROGRAM,
    RUN,
    SOCKETS,
    STATE,
    UNIT,
    Configuration,
    GatewayState,
)
from gpufleet.operations.converge import Converge, refuse
from gpufleet.remote import payload
from gpufleet.remote.query import ask
from gpufleet.sanitize import printable
from gpufleet.serving import unit as units
from gpufleet.settings.gateway_settings import Gateway
from roles.proven import Configured, proven

Commands: TypeAlias = Generator[StringCommand | FunctionCommand]

# A distribution's package starts its own unit as soon as it is there, with a configuration that is
# not ours.
PACKAGES_UNIT = f"{UNIT_DIRECTORY}/haproxy.service"
HAPROXY = "/usr/sbin/haproxy"
LOOK_SECONDS = 30
# A reload takes a second; on a node that is busy, some.
LOAD_SECONDS = 60
STOP_SECONDS = 30


@dataclass(frozen=True)
class Wishes:
    """What a gateway is to have, in the parts that operations take."""

    gateway: Gateway
    files: Converge
    running: Converge
    configured: Configured
    fingerprint: str


@deploy("gateway")
def gateway(node: Watching) -> None:
    """Converge program, configuration and unit; see the configuration loaded."""
    wanted = wishes(node)
    if wanted is None:
        return
    before = Converge(Wanted(), watch=(HAPROXY, PACKAGES_UNIT))
    program = File(PROGRAM, payload.archive("network/gateway_drains"), mode=0o755)
    unit = _unit(wanted.gateway)
    values = [Directory("/usr/local/libexec/gpufleet"), program, unit.file]
    if not before.snapshot().file(HAPROXY).exists or _masked(before):
        values.append(Link(PACKAGES_UNIT, "/dev/null"))
    Converge(Wanted(*values)).files(name="program and unit")
    packages = [Package("haproxy")]
    if wanted.gateway.virtual_address:
        packages += [Package("curl"), Package("keepalived")]
        shared = _shared(node, wanted.gateway)
        shared.files(name="virtual address")
    Converge(Wanted(*packages)).packages(name="package")
    proven(wanted.files, wanted.configured, name="proof of the configuration")
    wanted.files.files(name="configuration")
    wanted.running.units(name="service")
    loaded(wanted.running, wanted.fingerprint, name="configuration in force")
    if wanted.gateway.virtual_address:
        shared.units(name="virtual address in force")
    else:
        # Only where it was ours: the check goes last.
        ours = keepalived.CHECK
        secret = f"{keepalived.HOME}/{keepalived.CONFIGURATION}"
        gone = Converge(
            Wanted(UnitGone(keepalived.UNIT), Absent(secret), Absent(ours)), watch=(ours,)
        )
        if gone.snapshot().file(ours).exists:
            gone.units(name="no virtual address")
            gone.files(name="no check for one")


@deploy("gateway")
def servers_of(node: Watching, *, if_nothing_failed: bool = False) -> None:
    """
    Converge the configuration alone, where there is a gateway of ours.

    With `if_nothing_failed` only when no node of the run has failed until then: what was not
    replaced goes on being served.
    """
    wanted = wishes(node)
    if wanted is None:
        return
    there = Converge(Wanted(), watch=(f"{HOME}/{CONFIGURATION}",))
    if not there.snapshot().file(f"{HOME}/{CONFIGURATION}").exists:
        return
    also: dict[str, Any] = {"_if": _nothing_failed} if if_nothing_failed else {}
    proven(wanted.files, wanted.configured, name="proof of the configuration", **also)
    wanted.files.files(name="servers", **also)
    loaded(wanted.running, wanted.fingerprint, if_it_runs=True, name="servers in force", **also)


@operation()
def nodes_are_done() -> Commands:
    """Let what follows on a gateway wait for all nodes: each of them has this operation."""
    host.noop("the next step waits for the other nodes")
    yield from ()


def wishes(node: Watching) -> Wishes | None:
    """
    Return what the gateway is to have; None: the node is none.

    Raises `FleetError` for files that cannot be read and servers that it could not reach.
    """
    wanted = node.settings.gateway
    if wanted is None:
        return None
    if problems := [
        *haproxy.problems(node.nodes, node.name),
        *keepalived.problems(node.nodes, node.name),
    ]:
        raise FleetError(*problems)
    for remark in prometheus.unreachable(node.nodes, node.servers, node.name):
        logger.warning("%s%s", host.print_prefix, remark.replace("watched", "reached by clients"))
    found = configuration(node, wanted)
    files = Converge(
        Wanted(
            Directory("/etc/gpufleet"),
            Directory(HOME, mode=0o700),
            Directory(STATE),
            *(File(f"{HOME}/{path}", content) for path, content in found.files.items()),
            *(
                File(f"{HOME}/{path}", content, mode=0o600, secret=True)
                for path, content in found.secrets.items()
            ),
            NoOtherFiles(f"{HOME}/*.map"),
            NoOtherFiles(f"{HOME}/*.pem"),
        )
    )
    unit = _unit(wanted)
    return Wishes(
        wanted,
        files,
        Converge(
            Wanted(
                unit.file, Unit(UNIT, fingerprint=unit.fingerprint, stop_seconds=STOP_SECONDS + 30)
            )
        ),
        Configured(
            unit=UNIT,
            url="",
            name="haproxy",
            directory=HOME,
            check=(HAPROXY, "-c", "-C", ".", "-f", CONFIGURATION),
            watched=(),
            files=found.files,
            secrets=found.secrets,
        ),
        found.fingerprint,
    )


def configuration(node: Watching, wanted: Gateway) -> Configuration:
    """Return what the gateway is to read; of nodes that did not answer, what it has now."""
    keys = {
        file: content.decode().strip()
        for file, content in targets.secrets(
            {file: file for file in haproxy.key_files(node.nodes)}, "vllm.api_key_file"
        ).items()
    }
    backends = haproxy.backends(node.nodes, node.servers, node.name, keys)
    if node.silent:
        backends = haproxy.kept(backends, _state("show").configured, node.silent, node.nodes)
    pem = b"\n".join(
        targets.secrets(
            {file: file for file in haproxy.certificate_files(wanted, node.name)}, "gateway.tls"
        ).values()
    )
    return haproxy.config(
        wanted,
        backends,
        metrics_address=str(node.settings.exporters.listen or ""),
        certificate=pem,
    )


def _unit(wanted: Gateway) -> units.UnitFile:
    return units.whole(
        "gpufleet-gateway.service.j2",
        UNIT,
        started_with={},
        home=HOME,
        run=RUN,
        state=STATE,
        program=PROGRAM,
        gone=keepalived.GONE if wanted.virtual_address else "",
        stop_seconds=STOP_SECONDS,
        files=SOCKETS,
    )


def _masked(node: Converge) -> bool:
    """Say whether the package's own unit was kept from starting, which only we do."""
    return node.snapshot().file(PACKAGES_UNIT).target == "/dev/null"


def _shared(node: Watching, wanted: Gateway) -> Converge:
    address = wanted.virtual_address
    if address is None:
        raise ValueError(f"{node.name} has no virtual address")
    read = targets.secrets({"it": address.password_file}, "gateway.virtual_address.password_file")
    text = keepalived.keepalived(address, read["it"].strip())
    check = keepalived.check(str(node.settings.exporters.listen or ""), wanted.metrics_port)
    override = units.drop_in(
        "keepalived-gateway.conf.j2",
        keepalived.UNIT,
        started_with={"configuration": keepalived.slow_hash(text), "check": check},
    )
    return Converge(
        Wanted(
            File(
                f"{keepalived.HOME}/{keepalived.CONFIGURATION}",
                text,
                mode=0o600,
                secret=True,
            ),
            File(keepalived.CHECK, check, mode=0o755),
            override.file,
            Unit(keepalived.UNIT, fingerprint=override.fingerprint),
        )
    )


# What it has loaded


@operation()
def loaded(running: Converge, fingerprint: str, *, if_it_runs: bool = False) -> Commands:
    """
    Have HAProxy load its configuration, unless it has; fail the node if it does not.

    With `if_it_runs` one that does not run is only named: it starts with what lies there.
    """
    executing = ctx_state.get().is_executing
    if not if_it_runs and not executing and running.difference().units.commands:
        host.noop("it starts with its configuration")
        return
    found = _state("show")
    if not found.runs and (if_it_runs or not executing):
        if executing:
            logger.warning("%s%s does not run: %s", host.print_prefix, UNIT, found.error)
        host.noop("it does not run")
        return
    if executing and found.error:
        yield from refuse((f"{UNIT}: {found.error}",))
        return
    if found.fingerprint == fingerprint:
        host.noop("what it has loaded is what lies there")
        return
    logger.info("%s%sreload %s", host.print_prefix, "" if executing else "would ", UNIT)
    yield FunctionCommand(_load, (fingerprint,), {})


def _load(state: State, host: Host, fingerprint: str) -> bool:  # noqa: ARG001  # pyinfra's
    found = _state("load", unit=UNIT, fingerprint=fingerprint, seconds=LOAD_SECONDS)
    for line in found.error.splitlines():
        logger.error("%s%s: %s", host.print_prefix, UNIT, printable(line))
    return not found.error


def _state(do: str, **parameters: Any) -> GatewayState:
    program = payload.program(
        "network/gateway_drains", do=do, home=HOME, run=RUN, state=STATE, **parameters
    )
    node = ctx_host.get()
    seconds = LOOK_SECONDS + 2 * parameters.get("seconds", 0)
    return haproxy.read(
        ask(ctx_state.get(), [node], lambda _: program, seconds, "the look at the gateway")[
            node.name
        ]
    )


def _nothing_failed() -> bool:
    return not ctx_state.get().failed_hosts
