"""The unit of a stage of SGLang: what its process is started with, and what it never has."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from gpufleet.engines.engine import engine
from gpufleet.errors import FleetError
from gpufleet.node.cluster_network import Network
from gpufleet.node_paths import LAUNCHER, SGLANG_LAUNCHER
from gpufleet.on_node.common.stages import started_release
from gpufleet.on_node.serving import unit_command
from gpufleet.planning.flag_layers import LayeredFlag
from gpufleet.planning.stage import Group, Stage
from gpufleet.serving.flag_check import check_stage, launch_command
from gpufleet.serving.unit import render_unit, replica_fingerprint
from gpufleet.settings.serving_settings import Served, Sglang
from tests.support.checkout import ROOT

GOLDEN = ROOT / "tests/data/sglang.service"
RELEASE = "sglang-0.5.23-1a2b3c4d5e"
STAGE = Stage(
    model="llama",
    replica=0,
    node="gpu-01",
    gpus=(2, 3),
    gpu_uuids=("GPU-5f1c", "GPU-9a2e"),
    port=8000,
    tensor_parallel=2,
    engine="sglang",
    flags=(LayeredFlag("context-length", 8192, "context"),),
)
KEY = {"api-key": "7d" * 32}


def sglang(**changes: Any) -> Sglang:
    given = {"version": "0.5.23", "lock": "locks/sglang.txt", "api_key_file": "secrets/key"}
    return Sglang.model_validate(given | changes)


def model(**changes: Any) -> Served:
    given = {"model": "/srv/llama", "engine": "sglang", "context": 8192}
    return Served.model_validate(given | changes)


def render(served: Served | None = None, settings: Sglang | None = None) -> str:
    return render_unit(
        STAGE,
        served or model(),
        settings or sglang(),
        release=RELEASE,
        toolkit="13-0",
        credentials=KEY,
    ).content


def test_the_unit_file_is_the_reviewed_one() -> None:
    """Write it with `UPDATE_GOLDEN=1 pytest` of this file, and review its diff."""
    rendered = render(
        model(
            flags={"mem-fraction-static": 0.8, "trust-remote-code": True},
            environment={"NCCL_DEBUG": "WARN"},
        )
    )
    if os.environ.get("UPDATE_GOLDEN"):
        GOLDEN.write_text(rendered)
    assert rendered == GOLDEN.read_text()


def test_readers_of_units_find_release_port_and_name_as_in_those_of_vllm() -> None:
    text = render()
    assert started_release(text)["release"] == RELEASE
    words = unit_command.serve(unit_command.command(text))
    assert unit_command.value(words, "--port") == "8000"
    assert unit_command.value(words, "--served-model-name") == "llama"


def test_the_launcher_is_run_by_the_releases_python() -> None:
    text = render()
    assert f"ExecStart=/opt/vllm/releases/{RELEASE}/bin/python {SGLANG_LAUNCHER} \\" in text
    assert LAUNCHER not in text


def test_a_changed_launcher_restarts_servers(monkeypatch: pytest.MonkeyPatch) -> None:
    before = render()
    monkeypatch.setattr("gpufleet.remote.payload.source", lambda _: "another text")
    assert render() != before


def test_a_cpu_build_is_told_so_and_sees_no_gpu() -> None:
    text = render(settings=sglang(device="cpu"))
    assert "\n    --device cpu" in text
    assert "CUDA_VISIBLE_DEVICES" not in text


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (
            {"max-model-len": 512},
            "serving.llama.flags.max-model-len: this release has no option",
        ),
        ({"attention-backend": "fastest"}, "(SGLang 0.5.23)"),
        ({"mem-fraction-static": "much"}, "(SGLang 0.5.23)"),
        ({"trust-remote-code": False}, "serving.llama.flags.trust-remote-code"),
    ],
)
def test_flags_that_the_release_refuses_are_named_with_their_key(
    flags: dict[str, Any], says: str
) -> None:
    begun = launch_command(STAGE, model(flags=flags), sglang(), release=RELEASE)
    schema = engine("sglang").flags.load("0.5.23")
    (said,) = check_stage(schema, begun).refused
    assert says in said


def test_what_the_plan_writes_is_accepted_by_every_release_that_settings_allow() -> None:
    rules = engine("sglang").flags
    for version in rules.versions():
        try:
            settings = sglang(version=version)
        except ValueError:
            continue
        begun = launch_command(STAGE, model(), settings, release=RELEASE)
        assert check_stage(rules.load(version), begun).refused == (), version


HEAD = replace(
    STAGE,
    nodes=("gpu-01", "gpu-02"),
    group=Group(
        (
            ("gpu-01", Network("eth1", "10.1.0.1", ("mlx5_0",))),
            ("gpu-02", Network("eth1", "10.1.0.2", ("mlx5_0",))),
        ),
        29500,
    ),
    tensor_parallel=4,
)
WORKER = replace(HEAD, node="gpu-02", node_rank=1)


def unit_of(stage: Stage) -> str:
    keys = {**KEY, "cluster-key": "8e" * 32} if stage is HEAD else {"cluster-key": "8e" * 32}
    return render_unit(stage, model(), sglang(), release=RELEASE, credentials=keys).content


def test_ranks_of_a_replica_are_started_by_the_ranks_program_and_meet_at_the_head() -> None:
    for rank, stage in enumerate((HEAD, WORKER)):
        text = unit_of(stage)
        assert "ExecStart=/usr/bin/env \\\n    /usr/local/libexec/gpufleet/vllm-rank \\\n" in text
        python = f"/opt/vllm/releases/{RELEASE}/bin/python"
        program = f"/opt/vllm/releases/{RELEASE}/bin/sglang serve"
        assert f"\n    -- {python} {SGLANG_LAUNCHER} {program} \\\n" in text
        for line in (
            "--nnodes 2",
            f"--node-rank {rank}",
            '--dist-init-addr "10.1.0.1:{master_port}"',
        ):
            assert f"\n    {line}" in text
        assert "Environment=GLOO_SOCKET_IFNAME=eth1\n" in text
        assert "Environment=NCCL_IB_HCA==mlx5_0\n" in text
        assert started_release(text)["release"] == RELEASE


def test_only_the_head_has_an_endpoint() -> None:
    """A worker's server only shows that its process runs, so it is on loopback."""
    head, worker = (
        unit_command.serve(unit_command.command(unit_of(each))) for each in (HEAD, WORKER)
    )
    assert unit_command.value(head, "--port") == "8000"
    assert worker == []
    assert "--host 127.0.0.1" in unit_of(WORKER)
    assert "--port 8000" not in unit_of(WORKER)
    assert '--ready-port "{master_port}"' in unit_of(HEAD)
    assert "--ready-port" not in unit_of(WORKER)


def test_the_release_accepts_what_ranks_are_started_with() -> None:
    schema = engine("sglang").flags.load("0.5.23")
    for stage in (HEAD, WORKER):
        begun = launch_command(stage, model(), sglang(), release=RELEASE)
        assert check_stage(schema, begun).refused == ()


def test_ranks_of_one_configuration_know_each_other_and_others_do_not() -> None:
    def same(stage: Stage, **changes: Any) -> str:
        return replica_fingerprint(stage, model(**changes), sglang())

    assert same(HEAD) == same(WORKER)
    assert same(HEAD) != same(WORKER, flags={"mem-fraction-static": 0.5})


def test_variables_that_systemd_cannot_express_are_refused() -> None:
    with pytest.raises(FleetError, match=r"serving\.llama\.environment\.A"):
        render(model(environment={"A": "a\0b"}))
