"""Lines of other engines become vLLM's settings on request, and no option is lost silently."""

from __future__ import annotations

from typing import Any

import pytest

from gpufleet.importer import other_engines
from gpufleet.importer.convert import Imported, convert
from gpufleet.importer.detect import read
from gpufleet.importer.other_engines import Engine, engines, on_vllm
from tests.support.rows import each_row
from tests.unit.importer.test_import import KEY, NEWEST, TOKEN

ENGINES = pytest.mark.parametrize("engine", engines().values(), ids=lambda engine: engine.name)
SGLANG = "python3 -m sglang.launch_server --model-path /m --port 8000 "
TENSORRT_LLM = "trtllm-serve /m "
TGI = "text-generation-launcher --model-id /m --port 8000 "


def translated(text: str, file: str) -> Imported:
    """Return what a text becomes with `--engine vllm`."""
    source = read(text, file, "model")
    found = convert(map(on_vllm, source.launches), NEWEST, source.names)
    return Imported(found.settings, (*source.notes, *found.notes))


def entry(found: Imported) -> dict[str, Any]:
    """Return the settings of the one server."""
    (served,) = found.settings["serving"].values()
    return dict(served)


def flags(line: str) -> dict[str, Any]:
    return dict(entry(translated(line, "-")).get("flags", {}))


def told(line: str) -> str:
    return "\n".join(note.text for note in translated(line, "-").notes)


@ENGINES
def test_every_counterpart_is_an_option_of_vllm(engine: Engine) -> None:
    unknown = [each for each in engine.renamed.values() if each not in NEWEST.by_option]
    assert [each for each in unknown if each != "--model"] == []


@ENGINES
def test_an_option_has_one_meaning(engine: Engine) -> None:
    tables = [set(engine.renamed), set(engine.computed), set(engine.dropped)]
    assert sum(map(len, tables)) == len(set.union(*tables))


def test_each_function_of_the_tables_is_used() -> None:
    used = {name for engine in engines().values() for name in engine.computed.values()}
    assert used == set(other_engines._COMPUTED)


@ENGINES
def test_no_option_is_lost_without_a_word(engine: Engine) -> None:
    """By a value that is in no other word: in vLLM's words, or the option is in a note."""
    lost = []
    for option in (*engine.renamed, *engine.computed, *engine.dropped, "--no-such-option"):
        words, _, notes = other_engines.as_vllm(engine, ("/m", option, "v7701"), {})
        said = " ".join((*words, *(note.text for note in notes)))
        if "v7701" not in said and option not in said and engine.renamed.get(option) not in words:
            lost.append(option)
    # The value says for how many ranks, and the plan decides that.
    assert set(lost) <= {
        "--ep",
        "--ep-size",
        "--expert-parallel-size",
        "--moe-expert-parallel-size",
    }


FLAGS = {
    SGLANG + "--max-running-requests 64 --chunked-prefill-size 4096": {
        "max-num-seqs": 64,
        "max-num-batched-tokens": 4096,
    },
    SGLANG + "--chunked-prefill-size -1": {},
    SGLANG + "--disable-radix-cache --disable-cuda-graph --random-seed 7": {
        "enable-prefix-caching": False,
        "enforce-eager": True,
        "seed": 7,
    },
    SGLANG + "--tool-call-parser qwen25 --reasoning-parser deepseek-r1": {
        "enable-auto-tool-choice": True,
        "tool-call-parser": "hermes",
        "reasoning-parser": "deepseek_r1",
    },
    SGLANG + "--speculative-algorithm EAGLE3 --speculative-draft-model-path /d "
    "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4": {
        "speculative-config": {"method": "eagle3", "model": "/d", "num_speculative_tokens": 3}
    },
    SGLANG + "--speculative-algorithm NEXTN --speculative-num-steps 1": {
        "speculative-config": {"method": "mtp", "num_speculative_tokens": 1}
    },
    SGLANG + "--kv-cache-dtype fp8_e5m2 --page-size 1 --dtype half": {
        "kv-cache-dtype": "fp8_e5m2",
        "dtype": "half",
    },
    "sglang serve --model-path /m --sampling-defaults openai": {"generation-config": "vllm"},
    TENSORRT_LLM + "--max_batch_size 64 --max_num_tokens 8192 --trust_remote_code": {
        "max-num-seqs": 64,
        "max-num-batched-tokens": 8192,
        "trust-remote-code": True,
    },
    "trtllm-serve serve --trust_remote_code /m --backend=pytorch": {"trust-remote-code": True},
    TGI + "--quantize bitsandbytes-nf4 --cuda-memory-fraction 0.8": {
        "quantization": "bitsandbytes",
        "gpu-memory-utilization": 0.8,
    },
    TGI + "--cuda-graphs 0": {"enforce-eager": True},
    TGI + "--cuda-graphs 1,2,4": {"cudagraph-capture-sizes": [1, 2, 4]},
}


@each_row("line, wanted", FLAGS.items())
def test_options_become_flags(line: str, wanted: dict[str, Any]) -> None:
    assert flags(line) == wanted


SETTINGS = {
    SGLANG + "--tp 8 --context-length 32k": {"tensor_parallel": 8, "context": 32000},
    SGLANG + "--context-length 64Ki": {"context": 65536},
    SGLANG + "--tp-size 4 --dp-size 2": {"tensor_parallel": 4, "data_parallel": 2},
    # Its tensor parallel size counts the GPUs of all groups of attention.
    SGLANG + "--tp 8 --dp 4 --enable-dp-attention --ep 8": {
        "tensor_parallel": 2,
        "data_parallel": 4,
        "expert_parallel": True,
    },
    SGLANG + "--tp 8 --attn-dp-size 8": {"tensor_parallel": 1, "data_parallel": 8},
    SGLANG + "--is-embedding": {"kind": "embed"},
    SGLANG + "--lora-paths a=/l/a b=/l/b": {
        "adapters": {"a": {"source": "/l/a"}, "b": {"source": "/l/b"}}
    },
    SGLANG + "--tp 16 --nnodes 2 --node-rank 0 --dist-init-addr h:5000": {
        "tensor_parallel": 16,
        "span_nodes": True,
    },
    TENSORRT_LLM + "--tp_size 2 --pp_size 2 --max_seq_len 4096": {
        "tensor_parallel": 2,
        "pipeline_parallel": 2,
        "context": 4096,
    },
    TGI + "--num-shard 4 --max-total-tokens 8192": {"tensor_parallel": 4, "context": 8192},
    # Each of its options has a variable.
    "NUM_SHARD=2 MODEL_ID=/m PORT=8000 text-generation-launcher": {"tensor_parallel": 2},
}


@each_row("line, wanted", SETTINGS.items())
def test_options_become_settings(line: str, wanted: dict[str, Any]) -> None:
    found = entry(translated(line, "-"))
    assert found["model"] == "/m"
    assert {key: found.get(key) for key in wanted} == wanted


PORTS = {
    "python -m sglang.launch_server --model-path /m": 30000,
    "text-generation-launcher --model-id /m": 3000,
    "trtllm-serve /m": None,
    "docker run -p 9000:30000 lmsysorg/sglang:v0.5.23 sglang serve --model-path /m": 9000,
    "docker run -p 8080:80 ghcr.io/huggingface/text-generation-inference:3 --model-id /m": 8080,
}


@each_row("line, port", PORTS.items())
def test_clients_find_the_model_at_the_same_port(line: str, port: int | None) -> None:
    assert entry(translated(line, "-")).get("port") == port


DECISIONS = {
    SGLANG + "--admin-api-key adm-77": "--admin-api-key",
    SGLANG + "--tp 6 --dp 4 --enable-dp-attention": "--tp",
    SGLANG + "--speculative-algorithm EAGLE3 --speculative-draft-model-path /d":
        "--speculative-algorithm",
    SGLANG + "--chat-template llama-2": "--chat-template",
    SGLANG + "--reasoning-parser muse": "--reasoning-parser",
    SGLANG + "--enable-hierarchical-cache": "--enable-hierarchical-cache",
    SGLANG + "--no-such-option x": "--no-such-option",
    TENSORRT_LLM + "--backend tensorrt": "--backend",
    TENSORRT_LLM + "--extra_llm_api_options a.yml": "--extra-llm-api-options",
    TGI + "--quantize exl2": "--quantize",
    TGI + "--speculate 2": "--speculate",
}  # fmt: skip


@each_row("line, option", DECISIONS.items())
def test_what_has_no_counterpart_is_left_to_a_person(line: str, option: str) -> None:
    open_ones = [note.text for note in translated(line, "-").notes if note.decide]
    assert any(option in text for text in open_ones), open_ones


@pytest.mark.parametrize(
    "line",
    [
        SGLANG + f"--api-key {KEY}",
        SGLANG + f"--admin-api-key {KEY}",
        SGLANG + f"--no-such-option {KEY}",
        SGLANG + f"--log-level {TOKEN}",
        SGLANG + f'--json-model-override-args \'{{"token": "{TOKEN}"}}\'',
        TENSORRT_LLM + f"--server_role {TOKEN}",
        TGI + f"--ngrok-authtoken {KEY}",
        f"API_KEY={KEY} {TGI}",
        f"SGLANG_SECRET={KEY} {SGLANG}",
        f"docker run -e HF_TOKEN={TOKEN} lmsysorg/sglang sglang serve --model-path /m",
    ],
)
def test_no_key_is_printed(line: str) -> None:
    found = translated(line, "-")
    said = str(found.settings) + told(line)
    assert KEY not in said
    assert TOKEN not in said


def test_gpus_of_one_group_are_not_counted_by_groups() -> None:
    assert "data-parallel groups" in told(SGLANG + "--tp 8 --dp 4 --enable-dp-attention")
    assert "data-parallel groups" not in told(SGLANG + "--tp 8")


def test_variables_of_the_engine_are_dropped_and_others_stay() -> None:
    found = translated(f"SGLANG_X=1 NCCL_DEBUG=WARN {SGLANG}", "-")
    assert entry(found)["environment"] == {"NCCL_DEBUG": "WARN"}
    assert "SGLANG_X is dropped" in told(f"SGLANG_X=1 NCCL_DEBUG=WARN {SGLANG}")


MODELS = """
models:
  - {name: chat, command: sglang serve --model-path /m, args: [--tp, "2"]}
"""


def test_hosts_that_are_named_after_an_engine_are_hosts() -> None:
    found = read("[sglang]\nsglang-01 ansible_host=10.0.0.1\n", "hosts.ini", "hosts")
    assert "sglang-01" in found.inventory


def test_a_router_of_an_engine_is_no_server() -> None:
    router = "{image: lmsysorg/sglang, command: python3 -m sglang_router.launch_router --port 1}"
    text = COMPOSE.replace("{image: postgres}", router)
    assert [*translated(text, "c.yml").settings["serving"]] == ["chat"]
    assert "service `db` does not run vLLM, so it is left out" in {
        each.text for each in read(text, "c.yml", "").notes
    }


COMPOSE = """
services:
  chat:
    image: lmsysorg/sglang:latest
    entrypoint: python3 -m sglang.launch_server
    command: --model-path /m --tp 2 --port 30000
    ports: ["8001:30000"]
  db: {image: postgres}
"""
DEPLOYMENT = """
apiVersion: apps/v1
kind: Deployment
metadata: {name: chat}
spec:
  replicas: 2
  template:
    spec:
      containers:
        - name: server
          image: nvcr.io/nvidia/tensorrt-llm/release:1.2.0
          command: [trtllm-serve]
          args: [/m, --tp_size, "2"]
"""


@each_row(
    "text, file, port",
    [(COMPOSE, "c.yml", 8001), (DEPLOYMENT, "d.yml", None), (MODELS, "m.yml", 30000)],
)
def test_manifests_of_other_engines_are_read(text: str, file: str, port: int | None) -> None:
    found = entry(translated(text, file))
    assert (found["model"], found["tensor_parallel"]) == ("/m", 2)
    assert found.get("port") == port
