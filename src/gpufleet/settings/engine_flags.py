"""Define which flags gpufleet sets or refuses, and which settings it does not support, by engine.
Pure.

Everything else about an engine is in `engines/`. Settings do not need it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

EngineName: TypeAlias = Literal["vllm", "sglang"]
"""
The name of an engine in settings. It is defined here and not in `engines/`, because `engines/`
imports the settings.
"""
DEFAULT: EngineName = "vllm"
"""The engine of an entry that does not set `engine`."""


@dataclass(frozen=True)
class FileFlags:
    """
    The flags of an engine whose values are files or models that a server reads when it starts.

    Attributes:
        read: all of these flags.
        hub: the flags that also accept a name on the Hub.
        adapters: the flags of `hub` that name LoRA adapters.
        one_file: the flags that name a single file. The other flags may name a directory.
        of_the_server: the flags that only the rank that answers requests reads.
        not_paths: for a flag, the pattern of its values that are not paths.
    """

    read: frozenset[str]
    hub: frozenset[str]
    adapters: frozenset[str]
    one_file: frozenset[str]
    of_the_server: frozenset[str]
    not_paths: Mapping[str, str]


@dataclass(frozen=True)
class EngineFlags:
    """
    The rules for an entry of `serving` with this engine.

    Attributes:
        title: the engine's name in messages.
        command: the command that starts a server.
        length: the flag for the maximum context.
        slots: the flag for the maximum number of requests that a server runs at once.
        planned: the flags that gpufleet sets from the plan. An operator's value would contradict
            the plan.
        refused: flags that operators cannot set, with the reason.
        refused_variables: environment variables that operators cannot set, with the reason.
        accepted: the settings that gpufleet does not fully support for this engine. Each has the
            values that gpufleet accepts.
        files: the flags that name files.
        opens_ports: whether a server that runs on only one node also opens ports to other nodes.
    """

    title: str
    command: str
    length: str
    slots: str
    planned: frozenset[str]
    refused: Mapping[str, str]
    refused_variables: Mapping[str, str]
    accepted: Mapping[str, tuple[Any, ...]]
    files: FileFlags
    opens_ports: bool = False


_PLAIN_HTTP = "endpoints use plain HTTP: for TLS, put a gateway or a load balancer in front of them"
_CONFIG = "the flags in its file could override the plan: write the flags under `flags`"
_NO_KEY = "it opens a port on which the server does not check the API key"
_NO_HTTP = "it starts a gRPC server instead of the HTTP server"
_NO_TEXT = "a server with this flag does not complete text"
_NOT_READY = (
    "the server would never be ready, because it would wait for a request that gpufleet does "
    "not send"
)
_HEALTH = "`/health` would answer 200 without testing the engine"

# Variables of SGLang 0.5.23 (srt/environ.py), without the prefix SGLANG_. SGLang also reads most of
# them with the prefix SGL_.
_SGLANG_VARIABLES = {
    "BLOCK_NONZERO_RANK_CHILDREN": "the ranks on other nodes would exit as soon as they are ready",
    "DIAG_BYPASS_HEALTH_GENERATE": _HEALTH,
    "ENABLE_HEALTH_ENDPOINT_GENERATION": _HEALTH,
    "FORCE_SHUTDOWN": "each stop would cut off running requests",
    "GRPC_PORT": _NO_KEY,
    "LOGGING_CONFIG_PATH": "SGLang logs its keys, so these log files could contain them",
    "RUST_SERVER": _NO_KEY,
}

# `refused` has flags that let all users of the node read a secret, that move the endpoint to a
# place where gpufleet does not find it, or that break starts and stops.
_ENGINES: dict[EngineName, EngineFlags] = {
    "vllm": EngineFlags(
        title="vLLM",
        command="vllm serve",
        length="max-model-len",
        slots="max-num-seqs",
        planned=frozenset(
            {
                "api-key",
                "data-parallel-size",
                "enable-expert-parallel",
                "headless",
                "host",
                "master-addr",
                "master-port",
                "model",
                "nnodes",
                "node-rank",
                "pipeline-parallel-size",
                "port",
                "served-model-name",
                "shutdown-timeout",
                "tensor-parallel-size",
            }
        ),
        refused={
            "config": _CONFIG,
            "hf-token": "all users of the node can read arguments: use vllm.hf_token_file",
            "ssl-certfile": _PLAIN_HTTP,
            "ssl-keyfile": _PLAIN_HTTP,
            "uds": "endpoints are TCP ports",
        },
        refused_variables={},  # settings/server_routes.py refuses some under conditions
        accepted={},
        files=FileFlags(
            read=frozenset(
                {
                    "allowed-local-media-path",
                    "chat-template",
                    "default-mm-loras",
                    "generation-config",
                    "hf-config-path",
                    "lora-modules",
                    "reasoning-parser-plugin",
                    "speculative-config",
                    "tokenizer",
                    "tool-parser-plugin",
                }
            ),
            hub=frozenset(
                {
                    "default-mm-loras",
                    "generation-config",
                    "hf-config-path",
                    "lora-modules",
                    "speculative-config",
                    "tokenizer",
                }
            ),
            adapters=frozenset({"default-mm-loras", "lora-modules"}),
            one_file=frozenset({"chat-template", "reasoning-parser-plugin", "tool-parser-plugin"}),
            of_the_server=frozenset(
                {
                    "allowed-local-media-path",
                    "chat-template",
                    "reasoning-parser-plugin",
                    "tool-parser-plugin",
                }
            ),
            # From entrypoints/chat_utils.py (text with these characters is the template itself),
            # config/model.py and config/speculative.py.
            not_paths={
                "chat-template": r"(?s).*[{}\n].*",
                "generation-config": "auto|vllm",
                "speculative-config": r"ngram|\[ngram\]|ngram_gpu|suffix",
            },
        ),
    ),
    # SGLang 0.5.23. If an option has several names, the first name is in use, and the others are
    # spellings of it (engines/sglang/data).
    "sglang": EngineFlags(
        title="SGLang",
        command="sglang serve",
        length="context-length",
        slots="max-running-requests",
        planned=frozenset(
            {
                "admin-api-key",
                "api-key",
                "base-gpu-id",
                "data-parallel-size",
                "device",
                "dist-init-addr",
                "dp-size",
                "enable-metrics",
                "gpu-id-step",
                "host",
                "model",
                "model-path",
                "nccl-init-addr",
                "nccl-port",
                "nnodes",
                "node-rank",
                "pipeline-parallel-size",
                "port",
                "pp-size",
                "served-model-name",
                "tensor-parallel-size",
                "tp",
                "tp-size",
            }
        ),
        refused={
            "checkpoint-engine-wait-weights-before-ready": _NOT_READY,
            "config": _CONFIG,
            "debug-tensor-dump-input-file": "the server exits as soon as it is ready",
            "delete-ckpt-after-loading": "restarts and other replicas need the model's files",
            "disaggregation-mode": _NO_TEXT,
            "encoder-only": _NO_TEXT,
            "gated-launch-port": _NOT_READY,
            "grpc-mode": _NO_HTTP,
            "grpc-port": _NO_KEY,
            "is-embedding": _NO_TEXT,
            "smg-grpc-mode": _NO_HTTP,
            "ssl-certfile": _PLAIN_HTTP,
            "ssl-keyfile": _PLAIN_HTTP,
            "ssl-keyfile-password": _PLAIN_HTTP,
            "ssl-ca-certs": _PLAIN_HTTP,
            # http_server.py of 0.5.23 checks keys only with a single tokenizer worker.
            "tokenizer-worker-num": "with several workers, a server does not check the API key",
            "use-ray": "gpufleet starts the ranks itself",
        },
        refused_variables={
            prefix + name: why
            for name, why in _SGLANG_VARIABLES.items()
            for prefix in ("SGLANG_", "SGL_")
        },
        accepted={
            "kind": (None, "generate"),
            "presets": ((),),
            "gpu_share": (None,),
            "data_parallel": (None, 1),
            "expert_parallel": (None, False),
            "distributed_executor_backend": ("mp",),
            "data_parallel_balancing": ("internal",),
            "prefill": (None,),
            "adapters": ({},),
        },
        files=FileFlags(
            read=frozenset(
                {
                    "chat-template",
                    "completion-template",
                    "decrypted-config-file",
                    "decrypted-draft-config-file",
                    "dllm-algorithm-config",
                    "flexkv-config-file",
                    "kt-weight-path",
                    "lmcache-config-file",
                    "lora-paths",
                    "modelopt-checkpoint-restore-path",
                    "pdmux-config-path",
                    "quantization-param-path",
                    "rl-quant-profile",
                    "speculative-adaptive-config",
                    "speculative-draft-model",
                    "speculative-draft-model-path",
                    "speculative-dspark-confidence-sts-path",
                    "speculative-dspark-sps-table-path",
                    "speculative-ngram-external-corpus-path",
                    "speculative-token-map",
                    "tokenizer-path",
                }
            ),
            hub=frozenset(
                {
                    "lora-paths",
                    "speculative-draft-model",
                    "speculative-draft-model-path",
                    "tokenizer-path",
                }
            ),
            adapters=frozenset({"lora-paths"}),
            one_file=frozenset(
                {
                    "chat-template",
                    "completion-template",
                    "quantization-param-path",
                    "speculative-token-map",
                }
            ),
            of_the_server=frozenset({"chat-template", "completion-template"}),
            # SGLang's own templates have names, such as llama-2 (managers/template_manager.py).
            not_paths={"chat-template": r"[\w-]+", "completion-template": r"[\w-]+"},
        ),
        opens_ports=True,
    ),
}

NAMES: tuple[EngineName, ...] = tuple(_ENGINES)
"""The names of all engines, with the default engine first."""

LENGTH_FLAGS: Mapping[str, str] = {name: rules.length for name, rules in _ENGINES.items()}
"""The flag for the maximum context, by engine."""

SLOT_FLAGS: Mapping[str, str] = {name: rules.slots for name, rules in _ENGINES.items()}
"""The flag for the maximum number of requests that a server runs at once, by engine."""


def of(engine: EngineName) -> EngineFlags:
    """Return an engine's rules."""
    return _ENGINES[engine]


def flag_mistakes(engine: EngineName, flags: Mapping[str, Any]) -> Iterator[str]:
    """Yield the mistakes in the names of an entry's flags."""
    rules = of(engine)
    names = {name.lstrip("-").replace("_", "-") for name in flags}
    if planned := sorted(names & rules.planned):
        yield (
            f"`flags` sets {', '.join(planned)}, but gpufleet sets this from the plan: use "
            "the equivalent settings (tensor_parallel, served_name, port, drain_seconds, "
            f"{engine}.listen, {engine}.api_key_file) instead"
        )
    yield from (
        f"`flags` has {name}: {why}" for name, why in rules.refused.items() if name in names
    )
    yield from (
        f"`flags` has {name!r}: write the names of flags as in `{rules.command} --help`, in "
        "lower case, with dashes and without the leading `--`"
        for name in flags
        if not re.fullmatch(r"[a-z0-9]+([-.][A-Za-z0-9_]+)*", name)
    )


def setting_mistakes(engine: EngineName, values: Mapping[str, Any]) -> Iterator[str]:
    """
    Yield a mistake for each setting of an entry that gpufleet does not support for the engine.
    """
    rules = of(engine)
    for key, accepted in rules.accepted.items():
        if values[key] not in accepted:
            yield (
                f"`{key}` is not supported with `engine: {engine}`: remove it, or serve this entry "
                "with `engine: vllm`"
            )
