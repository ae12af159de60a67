"""Asking every node at once: what one of them does costs the others nothing."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import paramiko
import pytest
from pyinfra.api import Config, Inventory, State
from pyinfra.connectors.ssh import SSHConnector
from pyinfra.context import ctx_state

from gpufleet.remote import session
from gpufleet.remote.channel import is_lost
from gpufleet.remote.query import probe_all
from lab import nvml

pytestmark = pytest.mark.slow

GPUFLEET = Path(sys.executable).with_name("gpufleet")


@pytest.fixture(scope="session")
def library(tmp_path_factory):
    """The directory of the simulated NVML."""
    return nvml.build(tmp_path_factory.mktemp("nvml")).parent


@pytest.fixture
def ask():
    """`ask(data, seconds)`: survey this machine, with that data of the node."""

    def asked(data, seconds=30):
        inventory = Inventory((["@local"], data))
        state = State(inventory, Config())
        with ctx_state.use(state):
            return probe_all(state, inventory, seconds)["@local"]

    return asked


@pytest.fixture
def python3(tmp_path):
    """`python3(script)`: the data of a node whose python3 is that shell script."""

    def made(script):
        program = tmp_path / "bin/python3"
        program.parent.mkdir()
        program.write_text(f"#!/bin/sh\n{script}\n")
        program.chmod(0o755)
        return {"_env": {"PATH": f"{program.parent}:{os.environ['PATH']}"}}

    return made


@pytest.fixture
def played(ask, python3):
    """`played(script, seconds)`: survey this machine with that script as its python3."""
    return lambda script, seconds=30: ask(python3(script), seconds)


@pytest.fixture
def silent():
    """The port of a machine that accepts connections and never says a word."""
    with socket.create_server(("127.0.0.1", 0), backlog=8) as server:
        yield server.getsockname()[1]


class AnySession(paramiko.ServerInterface):
    """Lets everybody in and runs every command in a shell of this machine, as sshd does."""

    most = 10
    """As `MaxSessions` of sshd."""

    def __init__(self):
        self.channels = []

    def get_allowed_auths(self, *_):
        return "publickey"

    def check_auth_publickey(self, *_):
        return paramiko.AUTH_SUCCESSFUL

    def check_channel_request(self, *_):
        if sum(not each.closed for each in self.channels) >= self.most:
            return paramiko.OPEN_FAILED_RESOURCE_SHORTAGE
        return paramiko.OPEN_SUCCEEDED

    def check_channel_exec_request(self, channel, command):
        self.channels.append(channel)
        threading.Thread(target=serve, args=(channel, command), daemon=True).start()
        return True


def serve(channel, command):
    """Connect a command with the channel that asked for it; kill it when the channel is closed."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(["/bin/sh", "-c", command], bufsize=0, **pipes) as program:

        def pump(read, write, end=lambda: None):
            with suppress(OSError):
                while data := read(65536):
                    write(data)
            end()

        outputs = [
            threading.Thread(target=pump, args=(program.stdout.read, channel.sendall)),
            threading.Thread(target=pump, args=(program.stderr.read, channel.sendall_stderr)),
        ]
        threading.Thread(
            target=pump, args=(channel.recv, program.stdin.write, program.stdin.close), daemon=True
        ).start()
        for output in outputs:
            output.start()
        while program.poll() is None and not channel.closed:
            time.sleep(0.02)
        if channel.closed:
            subprocess.run(["pkill", "-9", "-P", str(program.pid)], check=False)
            program.kill()
        for output in outputs:
            output.join()
        channel.send_exit_status(program.wait() % 256)  # negative when it was killed
        channel.close()


@pytest.fixture
def sshd(tmp_path):
    """The data of a node that is this machine, reached by SSH."""
    key = paramiko.ECDSAKey.generate()
    key.write_private_key_file(str(tmp_path / "key"))
    transports = []

    def accept():
        with suppress(OSError):
            while True:
                transport = paramiko.Transport(server.accept()[0])
                transports.append(transport)
                transport.add_server_key(key)
                transport.start_server(server=AnySession())

    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        known = f"[127.0.0.1]:{port} {key.get_name()} {key.get_base64()}\n"
        (tmp_path / "known_hosts").write_text(known)
        threading.Thread(target=accept, daemon=True).start()
        yield {
            "ssh_hostname": "127.0.0.1",
            "ssh_port": port,
            "ssh_user": "anybody",
            "ssh_key": str(tmp_path / "key"),
            "ssh_allow_agent": False,
            "ssh_look_for_keys": False,
            "ssh_known_hosts_file": str(tmp_path / "known_hosts"),
        }
        server.shutdown(socket.SHUT_RDWR)
    for transport in transports:
        transport.close()


@pytest.fixture(params=["by SSH", "local"])
def beside_a_healthy_one(request, python3, check, sshd, library):
    """
    `asked(script)`: check a node whose python3 is that shell script, and a healthy one beside it.

    Returns the first one's findings of the check `probe`, its facts, and what was printed.
    """

    def asked(script, *arguments):
        bad = python3(script)
        good = simulated(library, "a100x4-pcie")
        nodes = [("gpu-01", {**sshd, **bad}), ("@local", good)]
        if request.param == "local":
            nodes = [("gpu-01", {**sshd, **good}), ("@local", bad)]
        name, other = ("@local", "gpu-01") if request.param == "local" else ("gpu-01", "@local")

        run = check(nodes, *arguments, "--json")

        assert "Traceback" not in run.stderr
        assert run.returncode == 1, run.stderr
        report = json.loads(run.stdout)
        assert len(report["facts"][other]["gpus"]) == 4
        (said,) = [
            each["found"]
            for each in report["findings"]
            if each["node"] == name and each["check"] == "probe"
        ]
        return said, report["facts"].get(name)

    return asked


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

    run = check([("gpu-01", node), ("gpu-02", node)], "--seconds", "3", "--json")

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


FLOODS = {
    "a line without end": "cat >/dev/null; cat /dev/zero",
    "lines without end": "cat >/dev/null; yes",
    "errors without end": "cat >/dev/null; yes >&2",
    "that reads nothing": "cat /dev/zero",
}


@pytest.mark.parametrize("script", FLOODS.values(), ids=FLOODS)
def test_a_node_that_prints_without_end_is_not_listened_to(beside_a_healthy_one, script):
    began = time.monotonic()
    said, facts = beside_a_healthy_one(script)

    assert said == "the node printed more than 8 MiB, which is too much for the probe"
    assert facts is None
    assert time.monotonic() - began < 25  # without a limit it would be the deadline: 60 s


@pytest.mark.parametrize(
    "script", ["exec sleep 50", "while :; do echo x; sleep 0.1; done"], ids=["mute", "trickle"]
)
def test_a_node_that_never_ends_costs_itself_the_deadline(beside_a_healthy_one, script):
    said, _ = beside_a_healthy_one(script, "--seconds", "5")

    assert said == "no answer within 5 s"


def test_a_node_that_talks_while_it_should_read_is_read(beside_a_healthy_one):
    """More than any pipe holds, in both directions at once."""
    said, facts = beside_a_healthy_one(
        f"yes 'Authorized users only.' | head -c 3000000; echo; exec {sys.executable} \"$@\""
    )

    assert facts["schema"] == 2, said


def test_by_ssh_a_node_is_asked_over_a_session(beside_a_healthy_one, tmp_path, request):
    """One Python for all that a run asks it; what is beside SSH has a Python for each."""
    said, facts = beside_a_healthy_one(
        f'echo "$@" >>{tmp_path}/started; exec {sys.executable} "$@"'
    )

    assert facts["schema"] == 2, said
    (started,) = (tmp_path / "started").read_text().splitlines()
    by_ssh = "by SSH" in request.node.name
    assert started == (f"-IS -c {session.LOADER}" if by_ssh else "-I -")


def test_a_node_that_takes_one_command_at_a_time_has_no_session(
    beside_a_healthy_one, tmp_path, monkeypatch
):
    """A session would leave no room for what the run does besides."""
    monkeypatch.setattr(AnySession, "most", 1)
    said, facts = beside_a_healthy_one(
        f'echo "$@" >>{tmp_path}/started; exec {sys.executable} "$@"'
    )

    assert facts["schema"] == 2, said
    assert (tmp_path / "started").read_text().splitlines()[-1] == "-I -"


def test_a_banner_in_another_encoding_does_no_harm(beside_a_healthy_one):
    said, facts = beside_a_healthy_one(
        f"printf 'Zugang nur f\\374r Befugte\\n'; exec {sys.executable} \"$@\""
    )

    assert facts["schema"] == 2, said


@pytest.mark.parametrize(
    ("script", "quoted"),
    [
        ("cat >/dev/null; head -c 200000 /dev/zero | tr '\\0' '['", "[[[ ..."),
        ("cat >/dev/null; printf '\\377\\376 nonsense\\n'", "\ufffd\ufffd nonsense"),
        ("cat >/dev/null; printf 'one\\ntwo\\n\\n'", "the node said: one / two"),
        ("cat >/dev/null", "the node said: nothing"),
        (
            "cat >/dev/null; printf '\\033]0;owned\\007\\n' >&2; exit 3",
            r"the probe ended without an answer; the node said: \x1b]0;owned\x07",
        ),
    ],
    ids=["nested", "bytes", "words", "nothing", "orders to the terminal"],
)
def test_what_a_node_says_instead_of_an_answer_is_quoted(played, script, quoted, capfd):
    assert played(script).endswith(quoted)
    assert capfd.readouterr().err == ""


def test_a_command_ends_when_nobody_waits_for_it(played, tmp_path):
    """A node that hangs is not left with a process more for every check."""
    said = played(f"echo $$ >{tmp_path}/pid; exec sleep 300", 2)

    assert said == "no answer within 2 s"
    pid = (tmp_path / "pid").read_text().strip()
    # It was told to end: a busy kernel takes a moment over it.
    deadline = time.monotonic() + 10
    while lives(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not lives(pid)


def test_who_is_waited_for_is_said_beside_the_answer(check, silent, library):
    """In one line after two seconds, then every five; what is printed stays JSON."""
    node = {"ssh_hostname": "127.0.0.1", "ssh_port": silent}
    nodes = [("gpu-01", node), ("gpu-02", node), ("@local", simulated(library, "a100x4-pcie"))]

    run = check(nodes, "--seconds", "9", "--json")

    assert len(json.loads(run.stdout)["facts"]) == 1
    assert re.findall(r"^probe: .*$", run.stderr, re.MULTILINE) == [
        "probe: 1 of 3 nodes after 2 s, 2 left: gpu-01, gpu-02",
        "probe: 1 of 3 nodes after 7 s, 2 left: gpu-01, gpu-02",
    ]


def lives(pid):
    """Whether a process exists and is more than a zombie."""
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_connection_that_is_over_is_told_from_one_that_is_there(sshd):
    """What waits for a node does not wait for one that this run cannot hear any more."""
    connector = SSHConnector.__new__(SSHConnector)
    connector.client = None
    assert not is_lost(connector)
    with paramiko.SSHClient() as client:
        client.load_host_keys(sshd["ssh_known_hosts_file"])
        client.connect(
            sshd["ssh_hostname"],
            sshd["ssh_port"],
            sshd["ssh_user"],
            key_filename=sshd["ssh_key"],
            allow_agent=False,
            look_for_keys=False,
        )
        connector.client = client
        assert not is_lost(connector)
        client.get_transport().close()
        assert is_lost(connector)
    assert not is_lost(object())


def test_doctor_names_dead_nodes_of_fourteen_and_looks_at_the_others(
    sshd, silent, library, tmp_path
):
    good = {**sshd, **simulated(library, "h100x8")}
    gone = {"gpu-05", "gpu-09"}
    names = [f"gpu-{number:02}" for number in range(1, 15)]
    nodes = [(name, {**good, "ssh_port": silent} if name in gone else good) for name in names]
    (tmp_path / "inventories").mkdir()
    (tmp_path / "inventories/x.py").write_text(
        "from gpufleet import inventory\n"
        f"globals().update(inventory.load(__file__, groups={{'gpu': {nodes!r}}}))\n"
    )
    run = subprocess.run(
        [GPUFLEET, "doctor", "inventories/x.py", "--json"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 1, run.stderr
    said = {each["subject"]: each["what"] for each in json.loads(run.stdout)["problems"]}
    # Of the 20 s that it waits for answers, 6 are for connections.
    assert {name: said[name] for name in names if name in said} == {
        name: f"{name} cannot be queried: not reached: no answer within 6 s" for name in gone
    }
