"""What the probe finds of stages and of models' files, read below a root as on a node."""

from __future__ import annotations

import json
import struct
from types import SimpleNamespace

import pytest

from gpufleet.fleet import model_configs
from gpufleet.on_node.common import linux_facts, stages
from gpufleet.planning.stage import Stage
from gpufleet.serving import unit
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.serving_settings import Served, Vllm
from tests.support.rows import each_row

STAGE = Stage(
    model="llama",
    replica=3,
    node="gpu-01",
    gpus=(2, 3),
    gpu_uuids=("GPU-5f1c", "GPU-9a2e"),
    port=8001,
    tensor_parallel=2,
)


LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 8192,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}


@pytest.fixture
def root(tmp_path, monkeypatch):
    monkeypatch.setattr(linux_facts, "ROOT", str(tmp_path))
    (tmp_path / "etc/systemd/system").mkdir(parents=True)
    return tmp_path


def rendered() -> str:
    vllm = Vllm(version="0.32.0", lock="locks/vllm.txt", listen="127.0.0.1")
    served = Served(model="/srv/llama", flags={"chat-template": "[X-Gpufleet]\nModel=other"})
    return unit.render_unit(STAGE, served, vllm, release="0.32.0-1a2b3c4d5e").content


def test_a_unit_that_was_rendered_says_which_stage_it_runs_and_where(root):
    (root / "etc/systemd/system/vllm-llama-3.service").write_text(rendered())
    assert stages.stages() == [
        {
            "unit": "vllm-llama-3.service",
            "model": "llama",
            "replica": 3,
            "rank": 0,
            "port": 8001,
            "gpus": ["GPU-5f1c", "GPU-9a2e"],
            "kind": "generate",
            "side_channel": 0,
            "release": "0.32.0-1a2b3c4d5e",
            "arguments": [
                "/srv/llama",
                "--served-model-name llama",
                "--host 127.0.0.1",
                "--port 8001",
                "--tensor-parallel-size 2",
                "--shutdown-timeout 60",
                r'--chat-template "[X-Gpufleet]\nModel=other"',
            ],
        }
    ]


def test_the_unit_of_a_rank_says_its_release_and_the_nodes_of_its_replica(root):
    """Its program is not the release's: that is behind it, with what it starts."""
    text = rendered()
    program = "/opt/vllm/releases/0.32.0-1a2b3c4d5e/bin/vllm serve"
    rank = (
        "/usr/local/libexec/gpufleet/vllm-rank \\\n    --node gpu-01=10.1.0.1 \\\n    -- " + program
    )
    assert program in text
    (root / "etc/systemd/system/vllm-llama-3.service").write_text(text.replace(program, rank))

    (found,) = stages.stages()

    assert found["release"] == "0.32.0-1a2b3c4d5e"
    assert found["arguments"][:2] == ["--node gpu-01=10.1.0.1", f"-- {program}"]


def test_a_unit_that_hands_kv_caches_over_says_the_port_that_it_has_for_that(root):
    model = Served(model="/srv/llama", environment={"VLLM_NIXL_SIDE_CHANNEL_PORT": "5601"})
    vllm = Vllm(version="0.32.0", lock="locks/vllm.txt", listen="127.0.0.1")
    text = unit.render_unit(STAGE, model, vllm, release="0.32.0-1a2b3c4d5e").content
    (root / "etc/systemd/system/vllm-llama-3.service").write_text(text)

    assert [each["side_channel"] for each in stages.stages()] == [5601]


@pytest.mark.parametrize(
    ("content", "answer"),
    [
        ("[Service]\nExecStart=/bin/true\n", {"unit": "vllm-x.service", "foreign": True}),
        ("[Service]\n[X-Gpufleet]\nModel=llama\n", "error"),
        ("[Service]\n[X-Gpufleet]\nModel=llama\nReplica=one\nRank=0\nPort=1\nGpus=\n", "error"),
    ],
)
def test_what_is_not_ours_or_was_edited_is_said_and_ends_nothing(root, content, answer):
    (root / "etc/systemd/system/vllm-x.service").write_text(content)
    (found,) = stages.stages()
    assert found == answer or found["missing"] == answer


def test_a_node_without_units_has_no_stages(root):
    assert stages.stages() == []


def test_a_models_files_are_described_and_its_weights_are_not_read(root):
    folder = root / "srv/llama"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text('{"architectures": ["LlamaForCausalLM"]}')
    header = json.dumps({"a": {"dtype": "BF16", "shape": [5], "data_offsets": [0, 10]}}).encode()
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"0" * 10)

    found = stages.model("/srv/llama")
    assert found["config"] == {"architectures": ["LlamaForCausalLM"]}
    assert found["hf_quant_config"] == {"missing": "absent"}
    assert found["bytes"] == 10

    (folder / "model.safetensors.index.json").write_text('{"metadata": {"total_size": 77}}')
    assert stages.model("/srv/llama")["bytes"] == 77


@pytest.mark.parametrize(
    "content", [b"", b"version https://git-lfs", struct.pack("<Q", 99) + b"{}"]
)
def test_a_file_that_was_cut_off_has_no_number_of_bytes(root, content):
    folder = root / "srv/llama"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(content)

    assert "is truncated" in stages.model("/srv/llama")["bytes"]["detail"]


@each_row(
    ("said", "expected"),
    [
        ({"config": LLAMA, "bytes": -8, "hf_quant_config": [1], "modules": {"a": 1}}, None),
        ({"config": LLAMA, "bytes": 16_000_000_000}, 16_000_000_000),
        (
            {"config": [1]},
            "config.json in this directory could not be read on any node (it is not a JSON object)",
        ),
        (
            {"config": {"missing": "absent"}},
            "config.json in this directory could not be read on any node (absent)",
        ),
        (
            {"missing": "absent"},
            "config.json in this directory could not be read on any node (absent)",
        ),
    ],
)
def test_what_nodes_say_of_a_model_is_taken_or_told(said, expected):
    """Whatever a node's file holds, the plan has a description or a sentence."""
    vllm = Vllm(version="0.32.0", lock="locks/vllm.txt", listen="127.0.0.1")
    serving = {"llama": Served(model="/srv/llama")}
    node = SimpleNamespace(settings=NodeSettings(vllm=vllm, serving=serving))

    found = model_configs.describe_models({"n1": node}, {"n1": {"models": {"/srv/llama": said}}})[
        "llama"
    ].described

    if isinstance(expected, str):
        assert expected in found
    else:
        assert found.stored_bytes == expected


def test_a_model_that_is_not_there_is_missing(root):
    assert stages.read(stages.model, "/srv/none") == {"missing": "absent"}
