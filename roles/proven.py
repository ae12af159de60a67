"""Servers that read their configuration again: it is proven first, and then seen to be in force."""

from __future__ import annotations

import base64
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pyinfra import host, logger
from pyinfra.api import FunctionCommand, Host, State, StringCommand, operation
from pyinfra.context import ctx_host, ctx_state

from gpufleet.operations.converge import Converge, refuse
from gpufleet.remote import payload
from gpufleet.remote.query import ask
from gpufleet.sanitize import printable

Commands: TypeAlias = Generator[StringCommand | FunctionCommand]

# promtool and amtool take well under a second; Prometheus reads a large log before it answers.
PROOF_SECONDS = 60
ANSWER_SECONDS = 60


@dataclass(frozen=True)
class Configured:
    """
    A server, the configuration that it is to have, and what tells both apart.

    Attributes:
        unit: its unit.
        url: where it answers on its node.
        name: what its metrics begin with.
        directory: where its configuration lies; `files` are relative to it.
        check: the program that proves it, started in a directory with these files.
        watched: patterns, relative to the directory, of what it reads when it is told to.
        seconds: how long `check` may take.
    """

    unit: str
    url: str
    name: str
    directory: str
    check: tuple[str, ...]
    watched: tuple[str, ...]
    files: Mapping[str, bytes] = field(repr=False)
    secrets: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    seconds: int = PROOF_SECONDS


@operation()
def proven(node: Converge, wanted: Configured) -> Commands:
    """Have the server's own program check a configuration that is about to be written."""
    if not node.difference().files.commands:
        host.noop("its configuration does not change")
        return
    _say(f"prove the configuration of {wanted.unit}")
    yield FunctionCommand(_prove, (wanted,), {})


def _prove(state: State, host: Host, wanted: Configured) -> bool:  # noqa: ARG001  # pyinfra's
    files = {**wanted.files, **wanted.secrets}
    program = payload.program(
        "converge/validate_config",
        files={path: _packed(content) for path, content in files.items()},
        argv=list(wanted.check),
        hidden=[_packed(content) for content in wanted.secrets.values()],
        seconds=wanted.seconds,
    )
    error = _asked(program, wanted.seconds + 30, "the proof")["error"]
    if error:
        logger.error("%s%s is refused, nothing was changed:", host.print_prefix, wanted.directory)
        for line in error.splitlines():
            logger.error("%s  %s", host.print_prefix, printable(line))
    return not error


@operation()
def in_force(files: Converge, running: Converge, wanted: Configured) -> Commands:
    """Have the server read its configuration again unless it has; fail the node if it does not."""
    executing = ctx_state.get().is_executing
    if not executing and running.difference().units.commands:
        host.noop("it starts with its configuration")
        return
    if executing or not files.difference().files.commands:
        found = _looked("look", wanted)
        if found["error"]:
            yield from refuse((f"{wanted.unit}: {found['error']}",))
            return
        if found["in_force"] or not (found["active"] or executing):
            host.noop("what it has read is what lies there")
            return
    _say(f"reload {wanted.unit}")
    yield FunctionCommand(_reload, (wanted,), {})


def _reload(state: State, host: Host, wanted: Configured) -> bool:  # noqa: ARG001
    found = _looked("reload", wanted)
    error = found["error"] or ("" if found["active"] else f"{wanted.unit} does not run")
    for line in error.splitlines():
        logger.error("%s%s", host.print_prefix, printable(line))
    return not error


def _looked(action: str, wanted: Configured) -> dict[str, Any]:
    program = payload.program(
        "converge/reload_config",
        action=action,
        unit=wanted.unit,
        url=f"{wanted.url}/metrics",
        server=wanted.name,
        watched=[f"{wanted.directory}/{each}" for each in wanted.watched],
        seconds=ANSWER_SECONDS,
    )
    return {"active": False, **_asked(program, 3 * ANSWER_SECONDS, f"`{action}`")}


def _asked(program: str, seconds: float, what: str) -> dict[str, Any]:
    node = ctx_host.get()
    answer = ask(ctx_state.get(), [node], lambda _: program, seconds, what)[node.name]
    return {"error": answer} if isinstance(answer, str) else answer


def _packed(content: bytes) -> str:
    return base64.b64encode(content).decode()


def _say(what: str) -> None:
    would = "" if ctx_state.get().is_executing else "would "
    logger.info("%s%s%s", host.print_prefix, would, what)
