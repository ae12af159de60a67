"""What operators get wrong in settings of the right form."""

from __future__ import annotations

from typing import Any

from tests.support.checkout import ROOT

VLLM = {
    "version": "0.32.0",
    "lock": str(ROOT / "locks/vllm-0.32.0.txt"),
    "api_key_file": "secrets/key",
}
HUB = {"model": "Qwen/Qwen3-32B", "revision": "0" * 40}


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
    "not a commit": served(model="Qwen/Qwen3-32B"),
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
    "could override the plan": flags(tensor_parallel_size=2),
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
    "NCCL level": variables(NCCL_DEBUG="LOUD"),
    "a level of vLLM's log": variables(VLLM_LOGGING_LEVEL="chatty"),
    "an adapter that the node lacks": variables(NCCL_IB_HCA="mlx9_9"),
    "a driver branch in gpus.name": {**served(), "gpus": {"name": "H100", "count": "8x"}},
    "a port as a range": served(port="8000-8007"),
    "a length in words of vLLM": served(max_model_len=8192),
    "vLLM's name for GPUs": served(tensor_parallel_size=2),
    "flags as a list": served(flags=["--enforce-eager"]),
    "flags as one text": served(flags="--enforce-eager"),
    "the name of a served model as a flag": flags(served_model_name="chat"),
    "a flag of SGLang": flags(mem_fraction_static=0.9),
    "a flag of TGI": flags(max_input_length=4096),
    "a variable that is a number": served(environment={"VLLM_LOG_STATS_INTERVAL": "often"}),
    "a variable without a value": served(environment={"NCCL_DEBUG": None}),
    "a secret as a value in environment_files": served(
        environment_files={"HF_TOKEN": "hf_" + "ab" * 17}
    ),
    "keys swapped": {"vllm": {**VLLM, "lock": "0.32.0", "version": VLLM["lock"]}, **served()},
    "the lock of another release": vllm(version="0.31.0"),
    "another Python than the lock's": vllm(python="3.9"),
    "a listening host's name": vllm(listen="gpu-01"),
    "a network for an address": vllm(listen="10.0.0.0/24"),
    "a key in place of its file": vllm(api_key_file="sk-0123456789abcdef0123456789abcdef"),
    "an index without a scheme": vllm(index_url="pypi.internal/simple"),
    "a revision that is a tag": served(**{**HUB, "revision": "v1.0"}),
    "a short commit": served(**{**HUB, "revision": "0123abc"}),
    "a commit of a directory": served(revision="0" * 40),
    "a gateway on a server's port": {
        **served(port=8000),
        "gateway": {"port": 8000, "allow_unauthenticated": True, "allow_plain_http": True},
    },
    "a gateway's port twice": {
        **served(),
        "gateway": {
            "port": 8443,
            "metrics_port": 8443,
            "allow_unauthenticated": True,
            "allow_plain_http": True,
        },
    },
    "a gateway open to all": {**served(), "gateway": {"port": 8443}},
    "a certificate without a key": {
        **served(),
        "gateway": {"tls": {"certificate_file": "c.pem"}, "allow_unauthenticated": True},
    },
    "a firewall's network with bits set": {
        **served(),
        "firewall": {"clients": ["10.0.0.5/24"]},
    },
    "LiteLLM's port is a server's": {
        **served(port=4000),
        "litellm": {"version": "1.80.0", "lock": "l", "allow_unauthenticated": True},
    },
    "memory in GiB for a share": flags(gpu_memory_utilization=72),
    "a share as text": flags(gpu_memory_utilization="90%"),
    "replicas as text": served(replicas="all"),
    "a GPU's name reserved": {**served(), "gpus": {"reserved": ["GPU-0"]}},
    "cuda without a repository": {**served(), "cuda": {"toolkit": "13-0"}},
    "an acceptance without an end": {
        **served(),
        "checks": {"accept": [{"check": "mig", "node": "a"}]},
    },
    "an acceptance of no check": {
        **served(),
        "checks": {"accept": [{"check": "migs", "node": "a", "until": "2099-01-01"}]},
    },
    "serving without vllm": {"vllm": None, **served()},
    "a model's weights in place of its folder": served(model="/srv/q/model.safetensors"),
    "a folder of this machine": served(model="./models/q"),
    "a home's sign": served(model="~/models/q"),
    "a draft by its Hub's name": flags(
        speculative_config={"model": "Qwen/Qwen3-0.6B", "num_speculative_tokens": 3}
    ),
    "a method that needs a draft": flags(
        speculative_config={"method": "eagle3", "num_speculative_tokens": 3}
    ),
    "a tokenizer by its Hub's name": flags(tokenizer="Qwen/Qwen3-32B"),
    "a negative seed": flags(seed=-1),
    "a negative number of images": flags(limit_mm_per_prompt={"image": -1}),
    "another scheduler's executor": flags(distributed_executor_backend="slurm"),
    "a middleware's short name": flags(middleware="auth"),
    "a logits processor with a dot": flags(logits_processors=["my.module.Class"]),
    "an editor's quotes": flags(speculative_config="{\u201cmethod\u201d: \u201cngram\u201d}"),
    "speculation by its old names": flags(speculative_model="/srv/r", num_speculative_tokens=5),
}

PROJECTS: dict[str, dict[str, str]] = {
    "host_vars of a host that does not exist": {"host_vars/gpu-1.yml": "gpus: {count: 8}"},
    "a group's name misspelt": {"group_vars/gpu_h10.yml": "gpus: {count: 8}"},
    "a child that is no group": {
        "inventory": 'groups={"gpu": ["gpu-01"]}, children={"all2": ["gpus"]}'
    },
    "an argument of pyinfra misspelt": {"host_vars/gpu-01.yml": "ssh_usr: root"},
    "a setting of `vllm` at the top": {"group_vars/gpu_h100.yml": "api_key_file: secrets/key"},
    "a model outside `serving`": {"group_vars/gpu_h100.yml": "llama: {model: /srv/q}"},
    "a tab in YAML": {"group_vars/gpu_h100.yml": "gpus:\n\tcount: 8"},
    "a key twice": {"group_vars/gpu_h100.yml": "gpus: {count: 8}\ngpus: {count: 4}"},
    "a vault of Ansible": {
        "group_vars/gpu_h100.yml": "password: !vault |\n  $ANSIBLE_VAULT;1.1;AES256\n  3132"
    },
    "a template of Ansible": {"group_vars/gpu_h100.yml": "gpus: {name: {{ gpu_name }}}"},
    "an Ansible inventory": {"inventory": "hosts"},
    "a node in no group": {"inventory": "groups={}, children={}"},
    "a node twice in a group": {"inventory": 'groups={"gpu_h100": ["gpu-01", "gpu-01"]}'},
    "a list where there are keys": {"group_vars/gpu_h100.yml": "- gpus\n- serving"},
    "a port for a node's address": {"inventory": 'groups={"gpu_h100": [("gpu-01", 22)]}'},
}
"""Files of a project with the node gpu-01 in the group gpu_h100; `inventory`: what `load` gets."""
