"""What operators get wrong in settings of the right form is said before a node is touched."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest

from gpufleet.checks.finding import Severity
from gpufleet.errors import FleetError
from gpufleet.fleet import assessment
from gpufleet.settings.parse import SettingsError, parse_settings
from tests.support.checkout import ROOT
from tests.support.sound_node import sound_node

VLLM = {
    "version": "0.32.0",
    "lock": str(ROOT / "locks/vllm-0.32.0.txt"),
    "api_key_file": "secrets/key",
}
HUB = {"model": "Qwen/Qwen3-32B", "revision": "0" * 40}


@pytest.fixture(scope="module")
def node() -> dict[str, Any]:
    """Eight sound H100 with a driver for the release, and a 32 B model at /srv/q and /srv/r."""
    return sound_node("/srv/q", "/srv/r")


def served(**written: Any) -> dict[str, Any]:
    return {"serving": {"q": {"model": "/srv/q", "context": 8192, **written}}}


def flags(**written: Any) -> dict[str, Any]:
    return served(flags={name.replace("_", "-"): value for name, value in written.items()})


def variables(**written: str) -> dict[str, Any]:
    return served(environment=written)


def vllm(**written: Any) -> dict[str, Any]:
    return {**served(), "vllm": {**VLLM, **written}}


def pair(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    both = {"q": {"model": "/srv/q", **one}, "r": {"model": "/srv/r", **other}}
    return {"serving": {name: {"context": 8192, **each} for name, each in both.items()}}


MISTAKES: dict[str, dict[str, Any]] = {
    "three GPUs for 64 heads": served(tensor_parallel=3),
    "more replicas than GPUs": served(replicas=9),
    "context beyond the model's": served(context=400_000),
    "more requests than fit": served(concurrency=5000),
    "more engines than GPUs": served(data_parallel=16),
    "more stages than GPUs": served(pipeline_parallel=16),
    "no replica": served(replicas=0),
    "an objective of its own": served(objective="fast"),
    "experts of a dense model": served(expert_parallel=True, data_parallel=2),
    "prefill by itself": served(prefill="q"),
    "prefill by none": served(prefill="zz"),
    "two models on one node's GPUs": pair({"tensor_parallel": 8}, {"port": 8100}),
    "one name for two": pair({"served_name": "chat"}, {"served_name": "chat", "port": 8100}),
    "a setting's name": served(tensor_parallell=2),
    "a preset's name": served(presets=["chatty"]),
    "a unit of time": served(start_seconds="10min"),
    "a drain of hours": served(drain_seconds=7200),
    "a name with a blank": served(served_name="my model"),
    "an entry's name": {"serving": {"Q": {"model": "/srv/q"}}},
    "the exporter's port": served(port=9100),
    "the watchdog's port": served(port=8406),
    "a low port": served(port=80),
    "no commit": served(model="Qwen/Qwen3-32B"),
    "a branch": served(**{**HUB, "revision": "main"}),
    "no organisation": served(model="Qwen3-32B"),
    "the page of a model": served(**{**HUB, "model": "https://huggingface.co/Qwen/Qwen3-32B"}),
    "a model below /tmp": served(model="/tmp/q"),
    "a model that is not there": served(model="/srv/none"),
    "a key in a variable": variables(VLLM_API_KEY="abc"),
    "a token in a variable": variables(HF_TOKEN="hf_" + "ab" * 17),
    "devices by hand": variables(CUDA_VISIBLE_DEVICES="0"),
    "the engine that is gone": variables(VLLM_USE_V1="0"),
    "a backend's name": variables(VLLM_ATTENTION_BACKEND="FLASHINFR"),
    "a variable's name": variables(VLLM_LOGING_LEVEL="INFO"),
    "NVLink switched off": served(tensor_parallel=2, environment={"NCCL_P2P_DISABLE": "1"}),
    "open to all": vllm(api_key_file=None),
    "an old release": vllm(version="0.17.0"),
    "no release": vllm(version="latest"),
    "code without a lock": served(**HUB, flags={"trust-remote-code": True}),
    "fewer GPUs declared": {**served(), "gpus": {"count": 4}},
    "more GPUs declared": {**served(), "gpus": {"count": 16}},
    "a reserved GPU that is not there": {**served(), "gpus": {"reserved": [9]}},
    "other GPUs declared": {**served(), "gpus": {"name": "A100"}},
    "a share of 120 %": flags(gpu_memory_utilization=1.2),
    "a share in percent": flags(gpu_memory_utilization=95),
    "no share": flags(gpu_memory_utilization=0),
    "a dtype's short name": flags(dtype="bf16"),
    "a quantization's name": flags(quantization="fp9"),
    "another quantization": flags(quantization="awq"),
    "a cache's dtype": flags(kv_cache_dtype="fp5"),
    "a parser's name": flags(tool_call_parser="hermess", enable_auto_tool_choice=True),
    "a thinking parser's name": flags(reasoning_parser="deepseek_r9"),
    "tools without a parser": flags(enable_auto_tool_choice=True),
    "a parser without tools": flags(tool_call_parser="hermes"),
    "no seat": flags(max_num_seqs=0),
    "fewer seats than asked for": served(concurrency=8, flags={"max-num-seqs": 4}),
    "the length twice": flags(max_model_len=8192),
    "a flag with underscores": served(flags={"max_num_seqs": 8}),
    "a flag with dashes": served(flags={"--max-num-seqs": 8}),
    "a flag's name": flags(max_lenght=3),
    "what the plan decides": flags(tensor_parallel_size=2),
    "an address": flags(host="0.0.0.0"),
    "a key in a flag": flags(api_key="k"),
    "a word for a switch": flags(enforce_eager="yes"),
    "a flag that is gone": flags(swap_space=4),
    "a device": flags(device="cuda"),
    "a task": flags(task="embed"),
    "JSON that is none": flags(compilation_config="{bad"),
    "a text for JSON": flags(hf_overrides="rope"),
    "JSON without a key": flags(speculative_config={"method": "ngram"}),
    "a connector's name": flags(kv_transfer_config={"kv_connector": "Nixl"}),
    "adapters that are not enabled": flags(lora_modules=["a=/srv/a"]),
    "an adapter's rank": flags(enable_lora=True, max_lora_rank=100),
    "no chunks, short steps": flags(max_num_batched_tokens=4096, enable_chunked_prefill=False),
    "text for a number": flags(seed="abc"),
    "a level's name": flags(uvicorn_log_level="loud"),
    "a cache of 1000 GB": flags(kv_cache_memory_bytes="1000G"),
    "a template's relative path": flags(chat_template="t.jinja"),
    "a tokenizer's mode": flags(tokenizer_mode="mistrall"),
    "files in a form that is gone": flags(load_format="gguf"),
    "a block of 7": flags(block_size=7),
    "more than the node's memory": flags(cpu_offload_gb=5000),
    "embeddings of a chat model": flags(runner="pooling"),
    "OpenMP's threads": variables(OMP_NUM_THREADS="many"),
    "NCCL's level": variables(NCCL_DEBUG="LOUD"),
    "a level of vLLM's log": variables(VLLM_LOGGING_LEVEL="chatty"),
    "an adapter that the node lacks": variables(NCCL_IB_HCA="mlx9_9"),
}

UNSAID = frozenset(
    {
        "a block of 7",
        "a level of vLLM's log",
        "a tokenizer's mode",
        "an adapter that the node lacks",
        "embeddings of a chat model",
        "more than the node's memory",
        "NCCL's level",
        "OpenMP's threads",
    }
)
"""Those of which nothing is said: fewer than one in ten."""


def said(document: dict[str, Any], written: dict[str, Any]) -> list[str]:
    """Return what a deploy would say of settings before it touches a node: [] is nothing."""
    try:
        settings = parse_settings({"vllm": VLLM, **copy.deepcopy(written)})
        declared: Any = {"a": SimpleNamespace(groups=(), settings=settings, origins={})}
        report = assessment.check_nodes({"a": document}, declared)
        found = assessment.plan_fleet({"a": document}, declared)
    except SettingsError as error:
        return [str(error)]
    except FleetError as error:
        return [*error.problems]
    worth = [each.found for each in report.findings if each.severity is Severity.WARN]
    return [*worth, *found.remarks]


def test_nothing_is_said_of_settings_that_are_right(node: dict[str, Any]) -> None:
    for right in (
        served(),
        served(tensor_parallel=2),
        served(replicas=8),
        pair({}, {"port": 8100}),
    ):
        assert said(node, right) == []


def test_an_operators_mistake_is_said(node: dict[str, Any]) -> None:
    silent = {name for name, written in MISTAKES.items() if not said(node, written)}
    assert silent == UNSAID
    assert len(UNSAID) < len(MISTAKES) / 10
