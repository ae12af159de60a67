"""Define whether a flag of an engine becomes a setting, a note, or a flag in `flags`.  Pure.

Contract: every flag that `settings/engine_flags.py` refuses for an engine is in the `renamed`,
`dropped`, `unsupported` or `secrets` of the engine's rules. So no imported entry has such a flag.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from gpufleet.flags.check import check
from gpufleet.flags.problem import Problem
from gpufleet.flags.schema import Schema
from gpufleet.settings import engine_flags
from gpufleet.settings.engine_flags import EngineName


@dataclass(frozen=True)
class FlagRules:
    """
    The rules for the flags of one engine's release.

    Attributes:
        engine: the engine's name in settings.
        schema: the flags of the release.
        check: the function that checks a command line.
        model: the options that name the model.
        unset: for a flag, the setting to write if the command line does not have the flag, because
            the engine's default is not gpufleet's.
        renamed: for a flag, the setting that replaces it.
        dropped: for a flag, the reason for dropping it.
        unsupported: for a flag that changes what is served, the reason for dropping it. If its
            value is not the default, the operator has to decide.
        secrets: for a flag with a secret value, the setting for the secret's file. If there is no
            such setting, it is the reason for dropping the flag.
    """

    engine: EngineName
    schema: Schema
    check: Callable[[Schema, Sequence[str]], tuple[Problem, ...]]
    model: tuple[str, ...]
    unset: Mapping[str, tuple[str, int]]
    renamed: Mapping[str, str]
    dropped: Mapping[str, str]
    unsupported: Mapping[str, str]
    secrets: Mapping[str, str]

    @property
    def title(self) -> str:
        """Return the engine's name in messages."""
        return engine_flags.of(self.engine).title


_CONFIG = "the file was not read: import the file, too, and add its settings to these"
_OWN_NODES = "the plan decides which nodes a replica uses (`span_nodes: true` allows several nodes)"
_OWN_GPUS = "the plan decides which GPUs a stage gets"
_OWN_ENGINES = "the plan decides where the engines of a replica run"
_OWN_FILES = "a deploy copies files to a place where it can check them"
_PLAIN = "endpoints use plain HTTP: for TLS, put a gateway or a load balancer in front of them"


def vllm_rules(schema: Schema) -> FlagRules:
    """Return the rules for vLLM, in the release that `schema` describes."""
    return FlagRules(
        engine="vllm",
        schema=schema,
        check=check,
        model=("--model",),
        unset={},
        renamed={
            "--tensor-parallel-size": "tensor_parallel",
            "--pipeline-parallel-size": "pipeline_parallel",
            "--data-parallel-size": "data_parallel",
            "--enable-expert-parallel": "expert_parallel",
            "--distributed-executor-backend": "distributed_executor_backend",
            "--data-parallel-hybrid-lb": "data_parallel_balancing",
            "--data-parallel-external-lb": "data_parallel_balancing",
            "--data-parallel-multi-port-external-lb": "data_parallel_balancing",
            "--served-model-name": "served_name",
            "--max-model-len": "context",
            "--port": "port",
            "--revision": "revision",
            "--shutdown-timeout": "drain_seconds",
        },
        dropped={
            "--host": "`vllm.listen` sets the address that all endpoints listen on",
            "--uds": "endpoints are TCP ports",
            "--download-dir": _OWN_FILES,
            "--nnodes": _OWN_NODES,
            "--node-rank": _OWN_NODES,
            "--master-addr": _OWN_NODES,
            "--master-port": _OWN_NODES,
            "--headless": _OWN_NODES,
            "--data-parallel-size-local": _OWN_ENGINES,
            "--data-parallel-rank": _OWN_ENGINES,
            "--data-parallel-start-rank": _OWN_ENGINES,
            "--data-parallel-address": _OWN_ENGINES,
            "--data-parallel-rpc-port": _OWN_ENGINES,
            "--data-parallel-backend": _OWN_ENGINES,
            "--data-parallel-supervisor-port": _OWN_ENGINES,
            "--ssl-certfile": _PLAIN,
            "--ssl-keyfile": _PLAIN,
            "--ssl-ca-certs": _PLAIN,
            "--ssl-cert-reqs": _PLAIN,
        },
        unsupported={"--config": _CONFIG},
        secrets={"--api-key": "api_key_file", "--hf-token": "hf_token_file"},
    )


# -- SGLang 0.5.23 ---------------------------------------------------------------------------------

_COPIES = "a replica of SGLang has only one engine: for several copies, set `replicas`"
_ATTENTION = (
    "gpufleet does not plan data-parallel attention for SGLang: all GPUs of a replica share "
    "the attention"
)
_EXPERTS = (
    "gpufleet does not plan expert parallelism for SGLang: all GPUs of a replica share each expert"
)
_ADAPTERS = "gpufleet loads adapters only with vLLM: set `adapters` and `engine: vllm`"
_SPLIT = "gpufleet separates prefill from decode only with vLLM: set `prefill` and `engine: vllm`"
_TEXT = (
    "with SGLang, gpufleet serves only models that complete text: serve this model with "
    "`engine: vllm`"
)
_HTTP = "endpoints are HTTP"
_LORA = (
    "--enable-lora --lora-paths --lora-backend --lora-eviction-policy --lora-target-modules "
    "--max-lora-chunk-size --max-lora-rank --max-loaded-loras --max-loras-per-batch"
)


def sglang_rules() -> FlagRules:
    """Return the rules for SGLang, in the newest release that gpufleet knows."""
    from gpufleet.engines.sglang import sglang_check, sglang_schemas  # slow to load

    schema = sglang_schemas.load(sglang_check.newest())
    names = [flag.name for flag in schema.flags]
    return FlagRules(
        engine="sglang",
        schema=schema,
        check=sglang_check.check,
        model=("--model-path", "--model"),
        unset={"--port": ("port", 30000), "--tp-size": ("tensor_parallel", 1)},
        renamed={
            "--model-path": "model",
            "--tp-size": "tensor_parallel",
            "--pp-size": "pipeline_parallel",
            "--served-model-name": "served_name",
            "--context-length": "context",
            "--port": "port",
            "--revision": "revision",
        },
        dropped={
            "--host": "`sglang.listen` sets the address that all endpoints listen on",
            "--device": "`sglang.device` sets the device",
            "--enable-metrics": "gpufleet always sets this flag",
            "--model-type": "gpufleet serves language models",
            "--download-dir": _OWN_FILES,
            **{
                f"--{name}": engine_flags.of("sglang").refused[name]
                for name in (
                    "checkpoint-engine-wait-weights-before-ready",
                    "debug-tensor-dump-input-file",
                    "delete-ckpt-after-loading",
                    "gated-launch-port",
                    "grpc-port",
                    "tokenizer-worker-num",
                )
            },
            "--base-gpu-id": _OWN_GPUS,
            "--gpu-id-step": _OWN_GPUS,
            "--enable-ssl-refresh": _PLAIN,
            "--ssl-certfile": _PLAIN,
            "--ssl-keyfile": _PLAIN,
            "--ssl-ca-certs": _PLAIN,
            **dict.fromkeys(("--nnodes", "--node-rank", "--dist-init-addr"), _OWN_NODES),
            "--nccl-port": _OWN_NODES,
            **{name: _SPLIT for name in names if name.startswith("--disaggregation-")},
        },
        unsupported={
            "--config": _CONFIG,
            "--dp-size": _COPIES,
            "--attn-dp-size": _ATTENTION,
            "--enable-dp-attention": _ATTENTION,
            "--ep-size": _EXPERTS,
            "--is-embedding": _TEXT,
            "--disaggregation-mode": _SPLIT,
            "--encoder-only": _SPLIT,
            "--language-only": _SPLIT,
            "--encoder-urls": _SPLIT,
            "--grpc-mode": _HTTP,
            "--smg-grpc-mode": _HTTP,
            "--use-ray": "ranks are SGLang's own processes",
            **dict.fromkeys(_LORA.split(), _ADAPTERS),
        },
        secrets={
            "--api-key": "api_key_file",
            "--admin-api-key": "gpufleet sets a new random value at each start",
            "--ssl-keyfile-password": _PLAIN,
        },
    )
