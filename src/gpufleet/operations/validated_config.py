"""Validate the configuration of a server before it is written, and let the server reload it."""

from __future__ import annotations

import base64
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from pyinfra import host, logger
from pyinfra.api import FunctionCommand, Host, State, StringCommand, operation
from pyinfra.context import ctx_host, ctx_state

from gpufleet.operations.converge import Converge, announce, refuse
from gpufleet.remote import payload
from gpufleet.remote.query import query
from gpufleet.sanitize import printable

Commands: TypeAlias = Generator[StringCommand | FunctionCommand]

# promtool and amtool take less than a second. Prometheus reads a large log before it answers.
VALIDATION_SECONDS = 60

ANSWER_SECONDS = 60


@dataclass(frozen=True)
class ServerConfig:
    """
    A server and its desired configuration.

    Attributes:
        unit: the server's systemd unit.
        url: the server's address on its own node.
        name: the prefix of the server's metrics.
        directory: the directory of the configuration. The paths in `files` are relative to it.
        check: the command that validates the configuration. It runs in a directory with these
            files.
        watched: patterns of the files that the server reads on a reload, relative to the directory.
        seconds: the time limit of `check`.
    """

    unit: str
    url: str
    name: str
    directory: str
    check: tuple[str, ...]
    watched: tuple[str, ...]
    files: Mapping[str, bytes] = field(repr=False)
    secrets: Mapping[str, bytes] = field(default_factory=dict, repr=False)
    seconds: int = VALIDATION_SECONDS


@operation()
def validate_config(node: Converge, wanted: ServerConfig) -> Commands:
    """Validate a configuration with the server's own program before it is written."""
    if not node.difference().files.commands:
        host.noop(f"the configuration of {wanted.unit} does not change")
        return
    announce(f"validate the configuration of {wanted.unit}")
    yield FunctionCommand(_validate, (wanted,), {})


def _validate(state: State, host: Host, wanted: ServerConfig) -> bool:  # noqa: ARG001  # pyinfra's
    files = {**wanted.files, **wanted.secrets}
    program = payload.program(
        "converge/validate_config",
        files={path: _encode(content) for path, content in files.items()},
        argv=list(wanted.check),
        hidden=[_encode(content) for content in wanted.secrets.values()],
        seconds=wanted.seconds,
    )
    error = _ask(program, wanted.seconds + 30, "the proof")["error"]
    if error:
        logger.error(
            "%s%s is refused, so gpufleet changed nothing:", host.print_prefix, wanted.directory
        )
        for line in error.splitlines():
            logger.error("%s  %s", host.print_prefix, printable(line))
    return not error


@operation()
def reload_config(files: Converge, running: Converge, wanted: ServerConfig) -> Commands:
    """
    Make the server reload its configuration if it has not done so. Fail the node if this fails.
    """
    executing = ctx_state.get().is_executing
    if not executing and running.difference().units.commands:
        host.noop(f"{wanted.unit} starts with the written configuration")
        return
    if executing or not files.difference().files.commands:
        found = _ask_server("look", wanted)
        if found["error"]:
            yield from refuse((f"{wanted.unit}: {found['error']}",))
            return
        if found["in_force"] or not (found["active"] or executing):
            host.noop(f"{wanted.unit} runs with the written configuration")
            return
    announce(f"reload {wanted.unit}")
    yield FunctionCommand(_reload, (wanted,), {})


def _reload(state: State, host: Host, wanted: ServerConfig) -> bool:  # noqa: ARG001
    found = _ask_server("reload", wanted)
    error = found["error"] or ("" if found["active"] else f"{wanted.unit} does not run")
    for line in error.splitlines():
        logger.error("%s%s", host.print_prefix, printable(line))
    return not error


def _ask_server(action: str, wanted: ServerConfig) -> dict[str, Any]:
    program = payload.program(
        "converge/reload_config",
        action=action,
        unit=wanted.unit,
        url=f"{wanted.url}/metrics",
        server=wanted.name,
        watched=[f"{wanted.directory}/{each}" for each in wanted.watched],
        seconds=ANSWER_SECONDS,
    )
    return {"active": False, **_ask(program, 3 * ANSWER_SECONDS, f"`{action}`")}


def _ask(program: str, seconds: float, what: str) -> dict[str, Any]:
    node = ctx_host.get()
    answer = query(ctx_state.get(), [node], lambda _: program, seconds, what)[node.name]
    return {"error": answer} if isinstance(answer, str) else answer


def _encode(content: bytes) -> str:
    return base64.b64encode(content).decode()
