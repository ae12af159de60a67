"""Activate the installed driver, and let the node serve again after its check."""

from __future__ import annotations

import sys
import time
from collections.abc import Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import gevent
from gevent.lock import Semaphore
from pyinfra import host, logger
from pyinfra.api import FunctionCommand, Host, State, StringCommand, operation
from pyinfra.context import ctx_host, ctx_state

from gpufleet.checks.fabric import REGISTRATION_SECONDS
from gpufleet.fleet import deploy_lock
from gpufleet.fleet.assessment import check_nodes
from gpufleet.gpu_software import quarantine
from gpufleet.gpu_software.driver_activation import (
    STOP_ORDER,
    UNLOAD_ORDER,
    Blocked,
    Decision,
    DriverState,
    NeedsReboot,
    NeedsReload,
    decide,
    driver_state,
)
from gpufleet.gpu_software.provisioning import BareNode
from gpufleet.inventory import loader
from gpufleet.operations.converge import Converge, announce, refuse
from gpufleet.operations.reboot import Rebooting, reboot_node
from gpufleet.remote import payload
from gpufleet.remote.query import probe_all, query
from gpufleet.sanitize import printable
from gpufleet.serving.unit import stop_seconds

Commands: TypeAlias = Generator[StringCommand | FunctionCommand]

# Reading modinfo of each kernel and the open files of all processes takes seconds. A node that
# swaps needs more time.
LOOK_SECONDS = 120

# The maximum time of on_node/gpu_software/driver_reload.py: its lock, stopping and starting five
# services, and unloading and loading five modules, with 180 s each. The time to stop stages is
# added, several times because of a concurrent run.
ACT_SECONDS = 60 + 2 * 5 * 180 + 2 * 5 * 180

CHECK_APART_SECONDS = 5

_terminal = Semaphore()  # one question at a time


@dataclass(frozen=True)
class DriverPolicy:
    """The driver settings of a node."""

    wanted: str | None
    flavour: str | None
    reboot: Any
    reboot_seconds: int
    stop_seconds: int


def driver_policy(node: BareNode) -> DriverPolicy:
    settings = node.settings
    if settings.gpu_lock is None:
        raise ValueError(f"{node.name} has no gpu_lock")
    return DriverPolicy(
        wanted=settings.gpu_lock.driver,
        flavour=settings.gpu_lock.modules,
        reboot=settings.gpu.reboot,
        reboot_seconds=settings.gpu.reboot_seconds,
        stop_seconds=max(map(stop_seconds, settings.serving.values()), default=90),
    )


@operation()
def refuse_unchecked_node(node: Converge) -> Commands:
    """Fail a node that is marked as unchecked. `node` must watch the mark."""
    there = node.snapshot().file(quarantine.MARK)
    if not there.exists:
        host.noop("the node's driver was checked")
        return
    reason = _look().get("mark") or there.error or f"see {quarantine.MARK}"
    yield from refuse(
        (f"the node is out of service: {printable(reason)}. deploys/node.py checks it again",)
    )


# Before packages change


@operation()
def mark_unchecked(packages: Converge, reason: str) -> Commands:
    """Mark the node as unchecked if these packages will change. Otherwise, change nothing."""
    if not packages.difference().packages.commands:
        host.noop("no driver package changes")
        return
    announce(printable("mark the node as unchecked"))
    if ctx_state.get().is_executing:
        packages.forget()
    yield FunctionCommand(_mark, (reason,), {})


def _mark(state: State, host: Host, reason: str) -> bool:  # noqa: ARG001  # pyinfra's signature
    return _succeeded(host, _act("mark", reason=reason))


@operation()
def settle_driver_packages(packages: Converge, node: BareNode) -> Commands:
    """
    Fail the node if its packages did not change as declared.

    After a check, the node may still serve. The operation that changes the packages runs with
    `_ignore_errors`. If the vendor's index is broken, nothing changes. If a transaction fails, it
    is undone. In both cases, the node is checked with its present driver.
    """
    if ctx_state.get().is_executing:
        found = packages.difference().packages
        if found.commands or found.problems:
            yield FunctionCommand(
                _settle, (replace(driver_policy(node), wanted=None, flavour=None),), {}
            )
            return
    host.noop("the driver's packages are up to date")


def _settle(state: State, host: Host, driver: DriverPolicy) -> bool:
    _act("start", driver)  # packages may have stopped it; the check reports whether it runs
    if _judge(state, host, driver):
        _fail(
            host,
            "the driver's packages differ from the declared ones, and the node keeps serving with "
            "the installed packages",
        )
    return False


# The driver


@operation()
def activate_driver(driver: DriverPolicy) -> Commands:
    """
    Activate the installed driver.

    How this is done is decided during execution, after packages have changed.
    """
    seen = _look()
    if seen["error"]:
        yield from refuse((seen["error"],))
        return
    state = driver_state(seen, driver.wanted, driver.flavour)
    found = decide(state, driver.reboot, terminal=sys.stdin.isatty())
    waiting = seen["kept"]["modules"] or set(seen["kept"]["units"]) & set(STOP_ORDER)
    if found.way == "nothing" and not waiting:
        for remark in getattr(state, "remarks", ()):
            logger.warning("%s%s", host.print_prefix, printable(remark))
        host.noop(found.said)
        return
    if not ctx_state.get().is_executing:
        announce(printable(_description(state, found)))
        yield FunctionCommand(lambda *_: True, (), {})
        return
    yield FunctionCommand(_activate, (driver,), {})


def _description(state: DriverState, found: Decision) -> str:
    match found.way:
        case "fail" if isinstance(state, Blocked):
            return "activate the driver when its packages are installed"
        case "fail":
            return f"fail: {found.said}"
        case "nothing":
            return "finish loading modules and starting units, which an earlier run did not finish"
        case way:
            verb = {"reload": "unload and load the driver", "ask": "ask for a reboot"}
            return f"{verb.get(way, 'reboot')}: {found.said}"


def _activate(state: State, host: Host, driver: DriverPolicy) -> bool:  # noqa: ARG001
    """Mark the node, then activate its driver."""
    marked = _act("mark", reason="the driver is being changed")
    return _succeeded(host, marked) and _bring_into_force(host, driver)


def _bring_into_force(host: Host, driver: DriverPolicy) -> bool:
    """
    Reload the driver or reboot the node. Return whether the driver is active.

    Even after a reboot, a reload may be needed because of an old initramfs.
    """
    booted = False
    while True:
        seen = _look()
        if seen["error"]:
            return _succeeded(host, seen)
        found = driver_state(seen, driver.wanted, driver.flavour)
        chosen = decide(found, driver.reboot, terminal=sys.stdin.isatty())
        if chosen.way == "nothing":
            return _succeeded(host, _act("start", driver))
        if isinstance(found, NeedsReload):
            said = _reload(host, driver, found)
            if not said.get("busy"):
                return _succeeded(host, said)
            found = NeedsReboot(said["error"], found.version)
            chosen = decide(found, driver.reboot, terminal=sys.stdin.isatty())
        if booted and chosen.way != "fail":
            return _fail(host, f"{chosen.said}, although the node was just rebooted")
        if chosen.way == "fail":
            return _fail(host, chosen.said)
        if not _may_reboot(host, chosen):
            return _fail(
                host,
                f"{chosen.said}: the operator declined a reboot, so the node stays marked as "
                "unchecked",
            )
        if problem := _reboot(host, driver, seen, chosen):
            return _fail(host, problem)
        booted = True


def _reload(host: Host, driver: DriverPolicy, wanted: NeedsReload) -> dict[str, Any]:
    logger.info("%s%s: unload and load the driver", host.print_prefix, wanted.reason)
    return _act("reload", driver, version=wanted.version, load=list(wanted.load))


def _may_reboot(host: Host, found: Decision) -> bool:
    """Return whether the node may reboot. If the settings require it, ask the operator."""
    if found.way != "ask":
        return True
    with _terminal:
        sys.stderr.write(f"{host.name}: {printable(found.said)}. Reboot the node now? [y/N] ")
        sys.stderr.flush()
        # In a thread, so that the other nodes continue.
        answer: str = gevent.get_hub().threadpool.apply(sys.stdin.readline)
    return answer.strip().lower() in {"y", "yes"}


def _reboot(host: Host, driver: DriverPolicy, seen: Mapping[str, Any], found: Decision) -> str:
    """Reboot the node and wait for it. Return the problem, or "" if there is none."""
    logger.info("%s%s: reboot", host.print_prefix, printable(found.said))

    def boot_id() -> str | None:
        answer = _look(aloud=False)
        return None if answer["error"] else str(answer["boot_id"])

    def begin() -> str:
        answer = _act("reboot", driver)
        # The node may go down before it answers. The boot id then shows that the node has rebooted.
        return "" if answer.get("silent") else str(answer["error"])

    wanted = Rebooting(str(seen["boot_id"]), driver.reboot_seconds)
    # The reboot has ended the connection that held the node's lock for this run.
    return reboot_node(host, wanted, begin, boot_id) or deploy_lock.hold_again(
        ctx_state.get(), host
    )


# The check


@operation()
def check_node(driver: DriverPolicy) -> Commands:
    """
    Check the node if it is marked. If it passes, remove the mark and start the units that wait.
    """
    seen = _look()
    if seen["error"]:
        yield from refuse((seen["error"],))
        return
    state = driver_state(seen, driver.wanted, driver.flavour)
    found = decide(state, driver.reboot, terminal=sys.stdin.isatty())
    executing = ctx_state.get().is_executing
    untouched = seen["mark"] is None and not seen["kept"]["units"]
    if untouched and (executing or found.way == "nothing"):
        host.noop("the driver has not changed since the node was checked")
        return
    waiting = ", ".join([*seen["kept"]["units"], *seen["barred"]])
    start = f"start {waiting}" if waiting else "let units start"
    announce(printable(f"check the node and, if it passes, {start}"))
    yield FunctionCommand(_judge, (driver,), {})


def _judge(state: State, host: Host, driver: DriverPolicy) -> bool:
    """
    Check the node, and return whether it is fit.

    A fit node serves again. For a node that is not fit, the mark gets the reason.
    """
    found = _problems(state, host, driver)
    if found:
        for problem in found:
            logger.error("%s%s", host.print_prefix, problem)
        _act("fail", reason="; ".join(found)[:2000])
        return _fail(
            host, f"the node stays out of service: {quarantine.MARK} on the node has the reason"
        )
    return _succeeded(host, _act("clear", driver))


def _problems(state: State, host: Host, driver: DriverPolicy) -> tuple[str, ...]:
    """
    Return the node's problems.

    If its only problem is that the NVLink fabric is not ready yet, the node is probed again until a
    time limit.
    """
    deadline = time.monotonic() + REGISTRATION_SECONDS
    declared = loader.current().nodes
    while True:
        answer = probe_all(state, [host])[host.name]
        report = check_nodes({host.name: answer}, declared)
        standing = (
            driver_state(answer, driver.wanted, driver.flavour)
            if isinstance(answer, dict)
            else None
        )
        settings = declared[host.name].settings
        found = quarantine.problems(report, host.name, settings, standing)
        passing = quarantine.is_fabric_pending(report, host.name, settings)
        if not found or not passing or time.monotonic() > deadline:
            return found
        gevent.sleep(CHECK_APART_SECONDS)


# Queries


def _look(*, aloud: bool = True) -> dict[str, Any]:
    return _act("look", aloud=aloud)


def _act(
    action: str, driver: DriverPolicy | None = None, *, aloud: bool = True, **parameters: Any
) -> dict[str, Any]:
    """Return the document of on_node/gpu_software/driver_reload.py.

    If there is no document, the result has `silent` and `error`.
    """
    patience = driver.stop_seconds if driver else 0
    program = payload.program(
        "gpu_software/driver_reload",
        action=action,
        order={"unload": UNLOAD_ORDER, "services": STOP_ORDER},
        stop_seconds=patience,
        **parameters,
    )
    limit = LOOK_SECONDS if action == "look" else ACT_SECONDS + 3 * patience
    node = ctx_host.get()
    answer = query(
        ctx_state.get(),
        [node],
        lambda _: program,
        limit,
        f"`{action}` of the driver",
        aloud=aloud,
    )
    found = answer[node.name]
    return {"error": found, "silent": True} if isinstance(found, str) else found


def _succeeded(host: Host, said: Mapping[str, Any]) -> bool:
    return _fail(host, said["error"]) if said["error"] else True


def _fail(host: Host, problem: str) -> bool:
    logger.error("%s%s", host.print_prefix, printable(problem))
    return False
