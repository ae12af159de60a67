"""What a node says of its journals and of what was changed on it."""

from __future__ import annotations

import json
import os
import shlex
import socket
import time

import pytest

from gpufleet.monitoring import certificate_ends
from gpufleet.on_node.common import linux_facts
from gpufleet.on_node.doctor import failure_evidence, try_ports
from gpufleet.on_node.serving import status

KEY = "f3a9c1d2e4b5a697"


@pytest.fixture
def node(tmp_path, monkeypatch, capfd):
    """A node; `node(entries)` returns what the program prints, with these in its journal."""
    monkeypatch.setattr(linux_facts, "ROOT", str(tmp_path))
    for folder in ("etc/systemd/system", "etc/vllm", "usr/bin", "proc", "var/log"):
        (tmp_path / folder).mkdir(parents=True)
    (tmp_path / "proc/stat").write_text("cpu 1 2\nbtime 1795290000\n")
    (tmp_path / "etc/vllm/key").write_text(KEY)
    (tmp_path / "etc/systemd/system/vllm-llama-0.service").write_text(
        "[Service]\nLoadCredential=api-key:/etc/vllm/key\n"
    )

    program = tmp_path / "usr/bin/systemctl"
    program.write_text("#!/bin/sh\necho DropInPaths=\n")
    program.chmod(0o755)

    def look(entries, **parameters):
        program = tmp_path / "usr/bin/journalctl"
        # journalctl prints the newest first, as it is asked to.
        lines = "\n".join(json.dumps(each) for each in entries[::-1])
        program.write_text(f"#!/bin/sh\nprintf '%s\\n' {shlex.quote(lines)}\n")
        program.chmod(0o755)
        monkeypatch.setattr(
            failure_evidence, "PARAMETERS", {"stages": ["llama-0"], "lines": 9, **parameters}
        )
        failure_evidence.main()
        return json.loads(capfd.readouterr().out)

    look.root = tmp_path
    return look


def entry(text, at=1_795_290_100, priority="6"):
    return {"__REALTIME_TIMESTAMP": str(at * 10**6), "MESSAGE": text, "PRIORITY": priority}


def test_a_stages_lines_come_with_their_times_and_without_its_secrets(node):
    said = node([entry("one"), entry(f"two {KEY}", 1_795_290_101)])
    assert [(at // 10**6, text) for at, _, _, text in said["stages"]["llama-0"]] == [
        (1_795_290_100, "one"),
        (1_795_290_101, "two <api-key>"),
    ]
    assert said["boot"] == 1_795_290_000


def test_of_the_kernels_log_warnings_and_what_is_about_gpus_are_kept(node):
    said = node(
        [
            entry("usb 1-1: new device"),
            entry("NVRM: Xid (PCI:0000:18:00): 79, GPU has fallen off the bus."),
            entry("EXT4-fs error (device sda1)", priority="3"),
        ]
    )
    assert [text[:8] for *_, text in said["kernel"]] == ["NVRM: Xi", "EXT4-fs "]


def test_packages_of_one_minute_are_one_change_and_others_are_left_out(node):
    now = time.time() // 60 * 60 - 60
    moment = time.strftime("%Y-%m-%d %H:%M", time.localtime(now))
    (node.root / "var/log/dpkg.log").write_text(
        f"{moment}:01 upgrade libnvidia-compute-570:amd64 570.1 570.2\n"
        f"{moment}:02 status installed libnvidia-compute-570:amd64 570.2\n"
        f"{moment}:03 upgrade cowsay:all 1 2\n"
        f"{moment}:04 install linux-image-6.1:amd64 <none> 6.1.9\n"
        "broken\n"
    )
    folder = node.root / "var/lib/gpufleet/deploys"
    folder.mkdir(parents=True)
    (folder / "vllm").write_text(f"{now + 30:.0f}\n")
    (folder / "node.tmp").write_text("1")
    said = node([])
    assert said["changes"] == [
        [now, "packages: upgrade libnvidia-compute-570 570.2, install linux-image-6.1 6.1.9"],
        [now + 30, "deploy: vllm"],
    ]


def test_changes_before_the_wanted_time_are_not_shown(node):
    folder = node.root / "var/lib/gpufleet/deploys"
    folder.mkdir(parents=True)
    (folder / "vllm").write_text(f"{time.time() - 7200:.0f}\n")
    assert node([], seconds=3600)["changes"] == []
    assert len(node([], seconds=9000)["changes"]) == 1


def test_a_journal_that_cannot_be_read_is_no_empty_one(node):
    program = node.root / "usr/bin/journalctl"
    node([])
    program.write_text("#!/bin/sh\necho 'insufficient permissions' >&2; exit 1\n")
    said = read_again(node)
    assert said["stages"]["llama-0"]["missing"] == "no_permission"
    assert said["kernel"]["missing"] == "no_permission"


def read_again(node):
    """Look without a new journalctl."""
    failure_evidence.PARAMETERS["stages"] = ["llama-0"]
    return {
        "stages": {"llama-0": failure_evidence.read(failure_evidence.stage_lines, "llama-0")},
        "kernel": failure_evidence.read(failure_evidence.kernel_lines),
    }


def test_a_stage_of_a_strange_name_is_asked_of_no_program(node):
    name = "../x --root=/"
    said = node([entry("x")], stages=[name])
    assert (said["stages"][name]["missing"], said["units"][name]["missing"]) == ("absent", "absent")


def test_of_a_unit_what_gpufleet_did_not_write_and_what_ended_it_last(node):
    program = node.root / "usr/bin/systemctl"
    paths = "/etc/systemd/system/vllm-.service.d/gpufleet-gpu-devices.conf /run/x/50-mine.conf"
    program.write_text(f"#!/bin/sh\necho 'DropInPaths={paths}'\necho NeedDaemonReload=yes\n")
    program.chmod(0o755)
    exited = next(key for key, what in status.WHAT.items() if what == "exited")
    killed = {**entry("Main process exited"), "MESSAGE_ID": exited, "EXIT_CODE": "killed"}
    said = node([{**killed, "EXIT_STATUS": "9"}])["units"]["llama-0"]
    assert said == {"drop_ins": ["/run/x/50-mine.conf"], "reload": True, "signal": "KILL"}
    by_itself = {**killed, "EXIT_CODE": "exited", "EXIT_STATUS": "1"}
    assert node([killed, by_itself])["units"]["llama-0"]["signal"] == ""
    assert node([])["units"]["llama-0"]["signal"] is None


def test_a_secret_of_a_drop_in_leaves_the_node_no_more_than_one_of_the_unit(node):
    folder = node.root / "run/systemd/system/vllm-llama-0.service.d"
    folder.mkdir(parents=True)
    (folder / "mine.conf").write_text("[Service]\nEnvironment=DB_PASSWORD=canary-4711\n")
    said = node([entry("connecting with canary-4711")])
    assert [text for *_, text in said["stages"]["llama-0"]] == ["connecting with <DB_PASSWORD>"]


def test_the_ends_of_certificates_are_those_that_roles_wrote_down(node):
    folder = node.root / "var/lib/gpufleet/textfile"
    folder.mkdir(parents=True)
    text = certificate_ends.end_text("/etc/gpufleet/gateway/tls.pem", "gateway", 1_795_290_000)
    (folder / "certificate-gateway.prom").write_text(text)
    (folder / "facts.prom").write_text("x 1\n")
    assert node([])["certificates"] == [["/etc/gpufleet/gateway/tls.pem", "gateway", 1795290000]]


def test_files_of_a_model_that_are_missing_or_were_written_since_it_was_placed_are_named(node):
    folder = node.root / "models/m"
    folder.mkdir(parents=True)
    index = {"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in ("config.json", "1.safetensors", "2.safetensors", ".complete"):
        (folder / name).write_text("{}")

    def said():
        return node([], models={"llama-0": "/models/m", "qwen-0": "/models/none"})["models"]

    sound = {"directory": "/models/m", "complete": True, "missing": [], "changed": []}
    assert said() == {"llama-0": sound, "qwen-0": {"missing": "absent"}}
    os.utime(folder / "config.json", (time.time() + 60,) * 2)
    (folder / "2.safetensors").unlink()
    assert said()["llama-0"] == {**sound, "missing": ["2.safetensors"], "changed": ["config.json"]}
    (folder / ".complete").unlink()
    assert (said()["llama-0"]["complete"], said()["llama-0"]["changed"]) == (False, [])


RANK = """\
[Service]
ExecStart=/usr/local/libexec/gpufleet/vllm-rank \\
    --replica llama-0 \\
    --rank {rank} \\
    --node gpu-01=127.0.0.1 \\
    --node gpu-02=127.0.0.2 \\
    --port {port} \\
    -- /opt/vllm/releases/1/bin/vllm serve --port 8000
"""


def test_a_rank_connects_to_rank_0_of_its_replica_and_a_gateway_to_its_servers(node):
    unit = node.root / "etc/systemd/system/vllm-llama-0.service"
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as closed:
        port = listener.getsockname()[1]
        closed.bind(("127.0.0.1", 0))
        unit.write_text(RANK.format(rank=1, port=port))
        places = {"tiny/gpu-07.tiny-0": ["127.0.0.1", closed.getsockname()[1]]}
        said = node([], ranks=["llama-0", "gone-0"], places=places)["connections"]
        listener.settimeout(5)
        _, (source, _) = listener.accept()
    assert source == "127.0.0.2", "from its own address, as its rank connects"
    assert said["llama-0"] == {"address": "127.0.0.1", "port": port, "error": None}
    assert said["tiny/gpu-07.tiny-0"]["error"] == "Connection refused"
    assert "gone-0" not in said


def test_rank_0_and_a_replica_of_one_node_connect_nowhere(node):
    unit = node.root / "etc/systemd/system/vllm-llama-0.service"
    unit.write_text(RANK.format(rank=0, port=29500))
    assert node([], ranks=["llama-0"])["connections"] == {}
    unit.write_text("[Service]\nExecStart=/opt/vllm/releases/1/bin/vllm serve --port 8000\n")
    assert node([], ranks=["llama-0", "../x"])["connections"] == {}


def test_what_does_not_answer_costs_seconds_and_keeps_nothing_else_waiting(node):
    # A queue of connections that is full answers nothing (listen(2), Linux).
    full = socket.create_server(("127.0.0.1", 0), backlog=0)
    place = full.getsockname()
    fill = [socket.socket() for _ in range(3)]
    try:
        for each in fill:
            each.setblocking(False)
            each.connect_ex(place)
        began = time.monotonic()
        places = {f"llama/gpu-{n}": list(place) for n in range(9)}
        said = node([], places=places)["connections"]
    finally:
        for each in (full, *fill):
            each.close()
    assert time.monotonic() - began < 2 * try_ports.SECONDS
    assert {each["error"] for each in said.values()} == {"no answer within 2 s"}
