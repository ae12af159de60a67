"""Nodes that are asked again while they do not answer well, over connections that stay open."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from paramiko import ChannelException, SSHException
from pyinfra.api import Config, Inventory, State
from pyinfra.context import ctx_state

from gpufleet.errors import FleetError
from gpufleet.upgrade.run import node_questions
from gpufleet.upgrade.run.connections import Nodes, command_error
from gpufleet.upgrade.run.node_answers import NodeLook
from tests.support.rows import each_row

MALFORMED = (
    '{"schema": 1, "problem": null, "clock": "abc"}',
    '{"schema": 1, "problem": null, "lock": [3]}',
    '{"schema": 1, "problem": null, "units": [{"unit": "x"}]}',
    "[]",
)


@pytest.mark.slow
@pytest.mark.parametrize("answer", MALFORMED)
def test_a_malformed_answer_is_a_failure_of_its_node_until_it_answers_well(
    tmp_path: Path, answer: str
) -> None:
    """As long as it fails its group, which `--resume` goes on with once the node answers."""
    python = tmp_path / "python3"
    ill = tmp_path / "ill"
    ill.touch()
    python.write_text(
        f'#!/bin/sh\n[ -e {ill} ] || exec /usr/bin/python3 "$@"\ncat >{os.devnull}\n'
        f"echo '{answer}'\n"
    )
    python.chmod(0o755)
    data = {"_env": {"PATH": f"{tmp_path}:{os.environ['PATH']}"}}
    inventory = Inventory((["@local"], data))
    state = State(inventory, Config())
    wanted = {"@local": node_questions.look()}
    with ctx_state.use(state):
        nodes = Nodes(state, list(inventory))
        nodes.is_any_reachable = lambda: True  # type: ignore[method-assign]  # other nodes are
        with pytest.raises(FleetError, match="@local: "):
            nodes.ask_until(wanted, NodeLook.read, 0)
        ill.unlink()
        assert nodes.ask_until(wanted, NodeLook.read, 0)["@local"].node == "@local"


def test_a_command_stays_open_beside_questions_as_the_connections_own_user() -> None:
    """`_sudo` is not for it: what runs there needs no root."""
    inventory = Inventory((["@local"], {"_sudo": True, "_sudo_user": "nobody-such"}))
    state = State(inventory, Config())
    with ctx_state.use(state):
        host = inventory.get_host("@local")
        host.connect()
        nodes = Nodes(state, [host])
        with nodes.command("@local", "id -u; cat") as streams:
            streams.write(b"said\n")
            printed = b""
            while not printed.endswith(b"said\n"):
                printed += streams.read(100)
    assert printed.split() == [str(os.getuid()).encode(), b"said"]


@each_row(
    ("problem", "said"),
    [
        (
            ChannelException(2, "Connect failed"),
            "the node's sshd refuses one more session (Connect failed)",
        ),
        (
            ChannelException(4, "Resource shortage"),
            "set MaxSessions in its configuration to 3 or more",
        ),
        (
            ChannelException(1, "Administratively prohibited"),
            "the command was not started: Administratively prohibited",
        ),
        (
            EOFError("the connection is closed"),
            "the command was not started: the connection is closed",
        ),
        (OSError(32, "Broken pipe"), "the command was not started: [Errno 32] Broken pipe"),
        (SSHException(), "the command was not started: SSHException"),
    ],
)
def test_only_a_refused_session_is_said_to_be_sshds_limit(problem: Exception, said: str) -> None:
    found = command_error(problem)
    assert said in found
    refused = isinstance(problem, ChannelException) and problem.code != 1
    assert ("MaxSessions" in found) is refused
