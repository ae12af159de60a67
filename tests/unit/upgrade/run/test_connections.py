"""Nodes that are asked again while they do not answer well, over connections that stay open."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from pyinfra.api import Config, Inventory, State
from pyinfra.context import ctx_state

from gpufleet.errors import FleetError
from gpufleet.upgrade.run import node_questions
from gpufleet.upgrade.run.connections import Nodes
from gpufleet.upgrade.run.node_answers import NodeLook

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
