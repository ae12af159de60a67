"""`gpufleet plan` over recorded nodes that hold a real model: what is typed and printed."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml

from gpufleet.catalog import recorded_nodes
from gpufleet.fleet.declared_hardware import with_identity
from gpufleet.planning.stage import Stage
from gpufleet.serving import unit
from gpufleet.settings.node_settings import NodeSettings
from tests.support import warm_command
from tests.support.checkout import ROOT
from tests.support.fleet_folder import REVISION, VLLM, FleetFolder
from tests.support.silent_driver import without_driver

DATA = ROOT / "tests/data"
QWEN = "/srv/Qwen3-32B"


def config(name: str) -> dict:
    return json.loads((DATA / f"models/{name}.json").read_text())["config"]


@pytest.fixture
def project(tmp_path):
    """Two nodes with eight H100 each, on which a model's files lie."""
    recorded = json.loads((ROOT / "src/gpufleet/catalog/data/nodes/h100x8.json").read_text())
    about = {
        "config": config("Qwen--Qwen3-32B"),
        "hf_quant_config": {"missing": "absent"},
        "bytes": None,
    }
    recorded["models"] = {QWEN: about}
    return Project(tmp_path, {name: with_identity(recorded, name) for name in ("a", "b")})


class Project:
    def __init__(self, folder: Path, nodes: dict) -> None:
        self.folder, self.nodes = folder, nodes
        self.settings = {
            # The recorded driver is older than the CUDA of the packaged lock.
            "vllm": {"version": "0.32.0", "lock": "locks/none.txt", "listen": "127.0.0.1"},
            "serving": {"qwen": {"model": QWEN, "replicas": 2}},
        }

    @property
    def qwen(self) -> dict:
        return self.settings["serving"]["qwen"]

    def run(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        (self.folder / "probes.json").write_text(json.dumps(self.nodes))
        (self.folder / "vars.yml").write_text(yaml.safe_dump(self.settings))
        files = ("--vars", self.folder / "vars.yml", "--nodes", self.folder / "probes.json")
        return warm_command.run(["plan", *files, *arguments])

    def plan(self, *arguments: str) -> dict:
        run = self.run("--json", *arguments)
        assert run.returncode == 0, run.stderr
        return json.loads(run.stdout)

    def start(self, document: dict) -> None:
        """Have the nodes say that what was planned has units there."""
        for node in self.nodes.values():
            node["stages"] = []
        here = NodeSettings.model_validate(self.settings)
        for each in document["stages"]:
            keys = ("model", "replica", "node", "port", "tensor_parallel")
            stage = Stage(
                **{key: each[key] for key in keys},
                gpus=tuple(each["gpus"]),
                gpu_uuids=tuple(each["gpu_uuids"]),
            )
            self.nodes[stage.node]["stages"].append(
                {
                    "unit": stage.unit,
                    "model": stage.model,
                    "replica": stage.replica,
                    "rank": 0,
                    "port": stage.port,
                    "gpus": list(stage.gpu_uuids),
                    "release": "0.32.0-1a2b3c4d5e",
                    "arguments": unit.argument_lines(stage, here.serving["qwen"], here.vllm),
                }
            )


def test_nodes_without_a_driver_are_one_line_that_names_what_to_type(tmp_path):
    names = ("gpu-01", "gpu-02", "gpu-03")
    about = {
        "vllm": VLLM,
        "serving": {"qwen": {"model": QWEN}},
        "gpu_lock": {"driver": "580.95.05"},
        "cuda": {"repository": {"url": "https://mirror.example/x", "keyring_sha256": "0" * 64}},
    }
    fleet = FleetFolder(tmp_path, {"gpu": names}, {"gpu": about})
    bare = without_driver(recorded_nodes.document("h100x8"))
    probes = tmp_path / "probes.json"
    probes.write_text(json.dumps({name: with_identity(bare, name) for name in names}))

    said = fleet.run("plan", "--nodes", str(probes)).stderr.splitlines()

    (line,) = (each for each in said if "driver" in each)
    assert line.startswith(
        "error: gpu-[01-03]: driver-loaded (block): no NVIDIA driver is installed"
    )
    for command in ("gpufleet deploy node {}", "pyinfra {} deploys/node.py"):
        assert f"`{command.format(fleet.inventory)}`" in line


def test_what_an_operator_leaves_open_is_planned_from_the_models_own_config(project):
    (one, other) = project.plan()["stages"]
    assert {one["node"], other["node"]} == {"a", "b"}
    # 32.8 thousand million parameters of two bytes are 61 GiB of the 79 GiB of an H100; a request
    # of 40,960 tokens at 256 KiB each is 10 GiB more.
    assert one["tensor_parallel"] == 2
    project.qwen["context"] = 8192
    assert project.plan()["stages"][0]["tensor_parallel"] == 1


def test_explain_shows_each_candidate_with_its_numbers_and_a_reason(project):
    project.qwen["context"] = 8192
    document = project.plan("--explain")
    found = {row["tensor_parallel"]: row for row in document["candidates"]}
    assert set(found) == {1, 2, 4, 8}
    assert all(row["reason"] for row in found.values())
    assert [row["chosen"] for row in found.values()].count(True) == 1
    assert found[8]["kv_cache_tokens"] > found[2]["kv_cache_tokens"] > 0

    page = project.run("--explain").stdout
    for said in ("TP", "KV tokens", "GiB", "> ", "GPU 7", "NVLink"):
        assert said in page


def test_a_second_look_at_what_runs_changes_nothing(project):
    project.start(project.plan())
    changes = project.plan("--diff")["changes"]
    assert [change["action"] for change in changes] == ["stay", "stay"]


def test_a_flag_that_changed_restarts_and_is_named(project):
    project.start(project.plan())
    project.qwen["flags"] = {"seed": 7}
    (one, other) = project.plan("--diff")["changes"]
    assert (one["action"], other["action"]) == ("restart", "restart")
    assert one["why"] == "+ --seed 7"
    assert "restart" in project.run("--diff").stdout


def test_a_node_that_goes_moves_its_own_replica_and_no_other(project):
    project.qwen["replicas"] = 3
    before = project.plan()
    project.start(before)
    del project.nodes["b"]
    project.nodes["c"] = with_identity(project.nodes["a"], "c") | {"stages": []}
    after = {each["id"]: each for each in project.plan()["stages"]}
    for each in before["stages"]:
        if each["node"] == "a":
            now = after[each["id"]]
            assert (now["node"], now["gpus"], now["port"]) == ("a", each["gpus"], each["port"])


def test_the_layer_that_set_a_flag_is_shown_and_the_operators_value_wins(project):
    project.qwen.update({"presets": ["low-latency-code"], "flags": {"max-num-seqs": 8}})
    document = project.plan()
    layers = {each["name"]: each["layer"] for each in document["flags"]["qwen 0.32.0"]}
    assert layers["max-num-seqs"] == "yours"
    assert layers["max-num-batched-tokens"] == "preset low-latency-code"
    assert "preset low-latency-code" in project.run().stdout


def test_a_preset_that_cannot_be_applied_is_refused_with_its_key(project):
    project.qwen["presets"] = ["multi-lora"]
    run = project.run()
    assert run.returncode == 2
    assert "serving.qwen.presets: preset multi-lora needs `flags.lora-modules`" in run.stderr


def test_a_model_that_nobody_can_read_is_planned_only_as_the_operator_says(project):
    for node in project.nodes.values():
        del node["models"]
    run = project.run()
    assert run.returncode == 2
    assert "tensor_parallel" in run.stderr

    project.qwen["tensor_parallel"] = 2
    document = project.plan()
    assert [each["tensor_parallel"] for each in document["stages"]] == [2, 2]
    assert any("did not check the memory" in reason for reason in document["reasons"])


def test_fp8_is_proposed_where_it_saves_gpus_and_never_applied(project):
    document = project.plan()
    assert {each["tensor_parallel"] for each in document["stages"]} == {2}
    (said,) = [reason for reason in document["reasons"] if "FP8" in reason]
    assert "TP 1 would be enough instead of TP 2" in said
    assert "flags.quantization: fp8_per_tensor" in said
    assert "quantization" not in {each["name"] for each in document["flags"]["qwen 0.32.0"]}

    # Whoever says himself how many GPUs it gets is told nothing.
    project.qwen["tensor_parallel"] = 4
    assert not any("FP8" in reason for reason in project.plan()["reasons"])
    del project.qwen["tensor_parallel"]

    # As told, and it is not said again.
    project.qwen["flags"] = {"quantization": "fp8_per_tensor"}
    document = project.plan()
    assert {each["tensor_parallel"] for each in document["stages"]} == {1}
    assert not any("FP8" in reason for reason in document["reasons"])


def test_nothing_is_placed_on_gpus_that_others_have(project):
    project.settings["gpus"] = {"reserved": [0, 1, 2]}
    project.qwen.update({"replicas": 10, "context": 8192})
    used = {(each["node"], gpu) for each in project.plan()["stages"] for gpu in each["gpus"]}
    assert len(used) == 10
    assert not any(gpu in {0, 1, 2} for _, gpu in used)
    explained = project.run("--explain").stdout
    assert explained.count("GPU 0  not used: reserved for others") == 1
    assert "GPU 3  qwen-" in explained


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"pipeline_parallel": 65, "tensor_parallel": 1, "span_nodes": True}, "64 layers"),
        ({"flags": {"quantization": "awq"}, "tensor_parallel": 2}, "--quantization awq"),
    ],
)
def test_what_this_model_cannot_have_is_refused_and_not_taken_for_unknown(project, wrong, says):
    project.qwen.update(wrong)
    run = project.run()
    assert run.returncode == 2
    assert says in run.stderr


def test_a_model_that_no_node_holds_is_refused_with_what_would(project):
    project.qwen.update({"tensor_parallel": 1, "context": 40960, "concurrency": 500})
    run = project.run()
    assert run.returncode == 2
    assert "serving.qwen" in run.stderr
    assert "Traceback" not in run.stderr


@pytest.mark.parametrize("arguments", [(), ("memory-constrained",)])
def test_presets_are_shown_with_their_reasons(arguments):
    run = warm_command.run(["presets", *arguments])
    assert ("gpu-memory-utilization" if arguments else "low-latency-code") in run.stdout


# Over an inventory, without its nodes


@pytest.fixture
def fleet(tmp_path):
    """Two H100 nodes and an A100 one, with one model declared on all of them."""
    served = {"model": "Qwen/Qwen3-32B", "revision": REVISION, "context": 8192, "replicas": 3}
    return FleetFolder(
        tmp_path,
        {"gpu_h100": ["h-01", "h-02"], "gpu_a100": ["a-01"]},
        {"all": {"vllm": VLLM, "serving": {"qwen": served}}},
        "Qwen/Qwen3-32B",
    )


def test_an_inventory_is_planned_on_named_hardware_before_there_are_nodes(fleet):
    models = ("--models", str(fleet.models))

    document = fleet.json("plan", "--as", "gpu_h100=h100x8,gpu_a100=a100x8", *models)

    assert {each["node"] for each in document["stages"]} == {"h-01", "h-02", "a-01"}
    assert document["totals"]["gpus"] == 24
    page = fleet.run("plan", "--as", "h100x8", *models).stdout
    # All three hold the same: one line for the model's replicas 0 to 2.
    assert "a-01 h-[01-02]" in page
    assert page.splitlines()[-1].startswith("24 GPUs: 3 planned, 21 free, 0 unfit; the largest")


def test_saved_probes_are_planned_with_the_inventorys_own_variables(fleet, tmp_path):
    probes = {"h-01": recorded_nodes.document("h100x8")}
    (tmp_path / "probes.json").write_text(json.dumps(probes))
    nodes = ("--nodes", str(tmp_path / "probes.json"), "--models", str(fleet.models))

    # The others are named as missing, unless their hardware is named.
    assert "a-01: there is no probe of this node in" in fleet.run("plan", *nodes).stderr
    document = fleet.json("plan", *nodes, "--as", "gpu_h100=h200x8", "--as", "gpu_a100=a100x8")
    uuids = {each["node"]: each["gpu_uuids"] for each in document["stages"]}
    assert set(uuids["h-01"]) <= {gpu["uuid"] for gpu in probes["h-01"]["gpus"]}

    (tmp_path / "probes.json").write_text(json.dumps({"h-03": probes["h-01"]}))
    assert "has no 'h-03'; did you mean 'h-02'?" in fleet.run("plan", *nodes).stderr


def test_a_preferred_group_that_the_inventory_does_not_have_is_refused_with_its_line(fleet):
    served = {"model": "Qwen/Qwen3-32B", "revision": REVISION, "prefer": ["gpu_a10"]}
    fleet.write("all", {"vllm": VLLM, "serving": {"qwen": served}})

    run = fleet.run("plan", "--as", "h100x8")

    assert run.returncode == 2
    assert "group_vars/all.yml:" in run.stderr
    assert "serving.qwen.prefer: no node of this inventory is in a group 'gpu_a10'" in run.stderr
