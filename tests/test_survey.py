"""Asking every node at once: what one of them does costs the others nothing."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pyinfra.api import Config, Inventory, State
from pyinfra.context import ctx_state

from gpufleet.survey import survey
from lab import nvml

GPUFLEET = Path(sys.executable).with_name("gpufleet")


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The directory of the simulated NVML."""
    return nvml.build(tmp_path_factory.mktemp("nvml")).parent


@pytest.fixture
def ask():
    """`ask(data)`: survey this machine, with that data of the node."""

    def asked(data):
        inventory = Inventory((["@local"], data))
        state = State(inventory, Config())
        with ctx_state.use(state):
            return survey(state, inventory, 30)["@local"]

    return asked


@pytest.fixture
def silent():
    """The port of a machine that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=8) as server:
        yield server.getsockname()[1]


@pytest.fixture
def check(tmp_path):
    """`check(nodes, *arguments)`: run `gpufleet check` on an inventory of these nodes."""

    def run(nodes, *arguments, **environment):
        (tmp_path / "inventories").mkdir()
        (tmp_path / "inventories/x.py").write_text(
            "from gpufleet import inventory\n"
            f"globals().update(inventory.load(__file__, groups={{'gpu': {nodes!r}}}))\n"
        )
        return subprocess.run(
            [GPUFLEET, "check", "inventories/x.py", *arguments],
            cwd=tmp_path,
            env={**os.environ, **environment},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


def simulated(library, profile):
    return {
        "_env": {
            "LD_LIBRARY_PATH": str(library),
            "GPUFLEET_NVML_PROFILE": str(nvml.profile(profile)),
        }
    }


def test_the_probe_is_one_command_away(ask, library):
    found = ask(simulated(library, "a100x4-pcie"))

    assert found["schema"] == 2
    assert [gpu["name"] for gpu in found["gpus"]] == ["NVIDIA A100 80GB PCIe"] * 4


def test_a_node_without_python_says_so_in_one_line(ask):
    said = ask({"_env": {"PATH": "/nonexistent"}})

    assert "no python3 on this node: install it" in said
    assert "\n" not in said


def test_silent_nodes_delay_nobody_and_are_unknown(check, silent):
    """The deadline holds for connecting, too: these accept the connection and say nothing."""
    node = {"ssh_hostname": "127.0.0.1", "ssh_port": silent}

    began = time.monotonic()
    run = check([("gpu-01", node), ("gpu-02", node)], "--seconds", "3", "--json")

    assert time.monotonic() - began < 3 + 9  # python's own start included
    assert run.returncode == 1, run.stderr
    findings = json.loads(run.stdout)["findings"]
    assert [(each["node"], each["check"], each["severity"]) for each in findings] == [
        ("gpu-01", "probe", "unknown"),
        ("gpu-02", "probe", "unknown"),
    ]
    assert {each["found"] for each in findings} == {"no answer within 3 s"}
    assert "Traceback" not in run.stderr


def test_a_refused_connection_is_a_sentence_and_no_traceback(check):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]

    run = check([("gpu-01", {"ssh_hostname": "127.0.0.1", "ssh_port": port})])

    assert run.returncode == 1
    assert "gpu-01" in run.stdout
    assert "cannot be reached: " in run.stdout
    assert "Traceback" not in run.stdout + run.stderr
