"""What a node has to have before it serves: who owns it, and who may read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpufleet.artifacts.release import Release
from gpufleet.converge.desired import Directory, File
from gpufleet.planning.stage import Stage
from gpufleet.serving.credentials import NOT_FOR_UNITS
from gpufleet.serving.unit import UnitFile
from gpufleet.serving.vllm_node import (
    CREDENTIALS,
    endpoints,
    file_problems,
    required_state,
    restart_files,
    wait_seconds,
)
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.serving_settings import Vllm

VLLM = Vllm.model_validate({"version": "0.32.0", "lock": "a.txt", "listen": "127.0.0.1"})
BUILD = Release("0.32.0-0123456789", b"lock", b"uv lock", VLLM)
SECRETS = {"api-key": b"mellon", "hf-token": b"mellon"}


@pytest.mark.parametrize("apart", [False, True])
def test_secrets_are_hidden_and_for_root_alone(apart: bool) -> None:
    state = required_state(VLLM, [BUILD], SECRETS, apart=apart)

    found = {each.path: each for each in state.values_of(File) if each.content == b"mellon"}
    names = set(NOT_FOR_UNITS) & set(SECRETS) if apart else set(SECRETS)
    assert set(found) == {f"{CREDENTIALS}/{name}" for name in names}
    assert {(each.secret, each.mode, each.user) for each in found.values()} <= {
        (True, 0o600, "root")
    }
    modes = {each.path: each.mode for each in state.values_of(Directory)}
    assert modes.pop(CREDENTIALS) == 0o700
    assert set(modes.values()) == {0o755}


def test_what_units_read_when_they_start_is_placed_with_them() -> None:
    names = {each.path.rpartition("/")[2]: each for each in restart_files(SECRETS, ["vllm"])}

    assert {"api-key", "vllm-serve", "vllm-rank", "vllm-gpu-turn"} <= names.keys()
    assert not set(NOT_FOR_UNITS) & set(names)
    modes = {name: each.mode for name, each in names.items() if not each.secret}
    assert modes.pop("gpufleet_guard.py") == 0o644  # the server imports it
    assert set(modes.values()) == {0o755}


def test_a_lock_and_a_secret_that_are_missing_are_named_together(tmp_path: Path) -> None:
    lock, key = str(tmp_path / "lock.txt"), str(tmp_path / "key")
    vllm = {"version": "0.32.0", "lock": lock, "api_key_file": key}
    serving = {"tiny": {"model": "/srv/tiny"}}
    settings = NodeSettings.model_validate({"vllm": vllm, "serving": serving})

    of_lock, of_key = file_problems(settings)
    assert of_lock.startswith(lock)
    assert of_key.startswith(key)
    assert file_problems(settings, secrets=False) == (of_lock,)


def test_a_server_that_may_be_the_last_of_its_gpu_has_the_time_of_all() -> None:
    seconds = {"chat": 300, "embed": 100, "alone": 50, "whole": 500}
    served = {
        name: {"model": "/srv/m", "start_seconds": each, "gpu_share": 0.3}
        for name, each in seconds.items()
    }
    served["whole"]["gpu_share"] = None
    settings = NodeSettings.model_validate({"vllm": VLLM.model_dump(), "serving": served})
    gpus = {"chat": 0, "embed": 0, "alone": 1, "whole": 2}
    stages = [
        Stage(
            name,
            0,
            "gpu-01",
            (gpu,),
            (f"GPU-{gpu}",),
            8000 + at,
            1,
            gpu_share=settings.serving[name].gpu_share,
        )
        for at, (name, gpu) in enumerate(gpus.items())
    ]
    rendered = {stage: UnitFile(stage.unit, "", "", "") for stage in stages}

    found = {each.id: each.start_seconds for each in endpoints(rendered, settings)}

    assert found == {"chat-0": 400, "embed-0": 400, "alone-0": 50, "whole-0": 500}
    assert wait_seconds(stages, settings) == 800
