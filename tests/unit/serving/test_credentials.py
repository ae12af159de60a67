"""Which secrets go to a node, and which of them a unit loads."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from gpufleet.planning.multinode.launch import RAY_TOKEN, ray_token
from gpufleet.serving.credentials import (
    API_KEY,
    CLUSTER_KEY,
    HF_TOKEN,
    node_credentials,
    secret_files,
    unit_hashes,
)
from gpufleet.settings.serving_settings import Vllm
from tests.unit.serving.test_rank_units import HEAD, SERVED, WORKER

CONTENTS = {API_KEY: b"key\n", CLUSTER_KEY: b"cluster\n", HF_TOKEN: b"token\n"}
BY_RAY = SERVED.model_copy(update={"distributed_executor_backend": "ray"})


def test_files_are_those_that_settings_name() -> None:
    vllm = Vllm(version="0.32.0", lock="locks/vllm.txt", api_key_file="secrets/key")
    assert secret_files(vllm, {}) == {API_KEY: "secrets/key"}


def test_rays_token_is_made_for_nodes_that_a_stage_of_ray_is_on() -> None:
    alone = node_credentials(CONTENTS, [HEAD], {HEAD.model: SERVED})
    assert alone == {API_KEY: b"key", CLUSTER_KEY: b"cluster", HF_TOKEN: b"token"}
    joined = node_credentials(CONTENTS, [HEAD], {HEAD.model: BY_RAY})
    assert joined == {**alone, RAY_TOKEN: ray_token(b"cluster")}


def test_a_variable_goes_to_the_stages_whose_settings_name_it() -> None:
    """A model's own file, or its value in the open, counts more than the file of all models."""
    alone = replace(HEAD, group=None)
    files = {f"{each}": f"secrets/{each}" for each in ("A_KEY", "B_KEY", "C_KEY")}
    vllm = Vllm(version="0.32.0", lock="a", listen="127.0.0.1", environment_files=files)
    own = SERVED.model_copy(
        update={"environment_files": {"B_KEY": "secrets/b"}, "environment": {"C_KEY": "open"}}
    )
    named = secret_files(vllm, {HEAD.model: own, "other": own})
    assert named[f"variable.B_KEY.{HEAD.model}"] == "secrets/b"

    contents = {name: name.encode() for name in named}
    secrets = node_credentials(contents, [alone], {HEAD.model: own, "other": own})

    loaded = {"variable.A_KEY", f"variable.B_KEY.{HEAD.model}"}
    assert set(secrets) == loaded
    assert set(unit_hashes(alone, own, secrets)) == loaded


def test_a_unit_loads_what_it_needs_and_the_node_has() -> None:
    secrets = node_credentials(CONTENTS, [HEAD], {HEAD.model: SERVED})
    hashes = {name: hashlib.sha256(each).hexdigest() for name, each in secrets.items()}
    assert unit_hashes(HEAD, SERVED, secrets) == {
        name: hashes[name] for name in (API_KEY, CLUSTER_KEY)
    }
    assert unit_hashes(WORKER, SERVED, secrets) == {CLUSTER_KEY: hashes[CLUSTER_KEY]}
    assert unit_hashes(replace(HEAD, group=None), SERVED, {}) == {}
