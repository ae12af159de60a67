"""What a node's watchdog is told of its stages, and the unit that it runs as."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpufleet.artifacts.release import Release
from gpufleet.planning.stage import Stage
from gpufleet.remote import payload
from gpufleet.serving import watchdog_unit
from gpufleet.serving.unit import render_unit
from gpufleet.settings.serving_settings import Served
from tests.unit.serving.test_rank_units import HEAD, KEYS, SERVED, VLLM, WORKER

ALONE = replace(HEAD, nodes=(), group=None, pipeline_parallel=1)


def document(*stages: Stage, version: str = "0.33.0", key: bool = True, **given: Any) -> Any:
    place = {"listen": given.pop("listen", "0.0.0.0"), "port": given.pop("port", 8406)}
    serving = {"llama": Served.model_validate({"model": "/srv/llama", "watchdog": given})}
    source = VLLM.model_copy(update={"version": version})
    release = Release("0.33.0-1a2b3c4d5e", b"lock", b"uv lock", source)
    text = watchdog_unit.configuration(
        stages,
        serving,
        address="127.0.0.1",
        key_file="/etc/vllm/credentials/api-key" if key else None,
        releases={"vllm": release},
        **place,
    )
    return json.loads(text)


def told(*stages: Stage, **given: Any) -> Any:
    return document(*stages, **given)["stages"]


def test_it_is_told_where_a_stage_answers_and_what_was_asked_for() -> None:
    (stage,) = told(ALONE, mode="act", seconds=60, idle_seconds=0)
    assert stage["servers"] == ["http://127.0.0.1:8000"]
    assert (stage["mode"], stage["seconds"], stage["idle_seconds"]) == ("act", 60, 0)
    assert (stage["group"], stage["rank"]) == (False, 0)
    assert stage["unit"] == "vllm-llama-0.service"
    assert stage["served_name"] == "llama"
    assert stage["key_file"] == "/etc/vllm/credentials/api-key"


def test_gateways_ask_it_where_vllm_listens_and_a_change_of_that_restarts_it_alone() -> None:
    first, second = (document(ALONE, port=port) for port in (8406, 9500))
    assert first["listen"] == {"address": "0.0.0.0", "port": 8406}
    assert document(ALONE, port=None)["listen"] is None
    assert first["stages"] == second["stages"]
    assert watchdog_unit.service(json.dumps(first)).fingerprint != (
        watchdog_unit.service(json.dumps(second)).fingerprint
    )
    stages = (
        render_unit(
            ALONE,
            SERVED,
            VLLM.model_copy(update={"watchdog_port": port}),
            release="0.33.0-1a2b3c4d5e",
            credentials=KEYS,
        )
        for port in (8406, 9500, None)
    )
    assert len({each.fingerprint for each in stages}) == 1


def test_without_settings_it_only_warns() -> None:
    assert told(ALONE)[0]["mode"] == "warn"


def test_of_a_replica_over_nodes_only_ranks_that_serve_are_watched() -> None:
    (head,) = told(HEAD)
    assert (head["group"], head["rank"]) == (True, 0)
    assert told(WORKER) == []
    assert not watchdog_unit.is_needed([WORKER], {"llama": Served(model="/srv/llama")})
    hybrid = replace(WORKER, pipeline_parallel=1, data_parallel=2, balancing="hybrid")
    (worker,) = told(hybrid)
    assert (worker["group"], worker["rank"]) == (True, 1)


def test_a_server_for_each_engine_is_watched_for_each_but_not_the_port_that_only_tells() -> None:
    external = replace(
        HEAD, tensor_parallel=1, pipeline_parallel=1, data_parallel=16, balancing="external"
    )
    (stage,) = told(external)
    assert len(stage["servers"]) == 8
    assert stage["servers"][-1] == "http://127.0.0.1:8007"


def test_a_node_where_all_is_off_needs_none() -> None:
    off = Served.model_validate({"model": "/srv/llama", "watchdog": {"mode": "off"}})
    assert not watchdog_unit.is_needed([ALONE], {"llama": off})
    assert watchdog_unit.is_needed([ALONE], {"llama": Served(model="/srv/llama")})
    assert not watchdog_unit.is_needed([], {})


@pytest.mark.parametrize(("version", "pins"), [("0.11.2", False), ("0.12.0", True)])
def test_it_knows_whether_a_canary_reaches_the_engine_that_it_is_for(
    version: str, pins: bool
) -> None:
    assert told(ALONE, version=version)[0]["pins"] is pins


def test_another_configuration_or_program_restarts_it() -> None:
    one, other = (watchdog_unit.service(json.dumps(each)).fingerprint for each in ("a", "b"))
    assert one != other


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_systemd_takes_every_line_of_the_unit(tmp_path: Path) -> None:
    unit = tmp_path / watchdog_unit.SERVICE
    text = watchdog_unit.service("{}").content.replace(watchdog_unit.PROGRAM, "/bin/true")
    unit.write_text(text)
    done = subprocess.run(
        ["systemd-analyze", "verify", "--man=no", unit],
        capture_output=True,
        text=True,
        check=False,
    )
    assert [line for line in done.stderr.splitlines() if watchdog_unit.SERVICE in line] == []


def test_what_dumping_takes_is_not_taken_from_it() -> None:
    """@debug has process_vm_readv and ptrace; ProtectProc and PrivateDevices hide what is asked."""
    text = watchdog_unit.service("{}").content
    for line in ("ProtectProc", "PrivateDevices", "PrivateUsers", "PrivatePIDs", "DevicePolicy"):
        assert f"\n{line}=" not in text
    assert "@debug" not in "".join(re.findall("(?m)^SystemCallFilter=.*", text))
    assert {"CAP_KILL", "CAP_SYS_PTRACE"} <= set(text.split("CapabilityBoundingSet=")[1].split())


def test_it_is_one_file_that_refuses_a_configuration_that_is_none(tmp_path: Path) -> None:
    """With 2, after which systemd does not start it again."""
    file, configuration = tmp_path / "gpufleet-watchdog", tmp_path / "watchdog.json"
    file.write_bytes(payload.archive("watchdog/watchdog"))
    for text in (None, "{", '{"schema": 7}'):
        if text:
            configuration.write_text(text)
        done = subprocess.run(
            [sys.executable, "-IB", file, configuration],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 2
        assert str(configuration) in done.stderr
        assert "Traceback" not in done.stderr
