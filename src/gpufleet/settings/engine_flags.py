"""The flags of each engine that gpufleet sets or refuses, and settings that an engine lacks. Pure.

`engines/` has the rest of an engine, which settings do not need.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

EngineName: TypeAlias = Literal["vllm", "sglang"]
"""The name of an engine in settings."""
DEFAULT: EngineName = "vllm"
"""The engine of an entry without `engine`."""


@dataclass(frozen=True)
class EngineFlags:
    """
    The rules for an entry of `serving` with this engine.

    Attributes:
        title: the engine's name in messages.
        command: the command that starts a server.
        length: the flag for the maximum context.
        slots: the flag for the most requests that a server runs at once.
        planned: the flags that gpufleet sets: an operator's value would contradict the plan.
        refused: flags that operators cannot set, with the reason.
        accepted: the values that gpufleet supports for settings that it has for another engine.
        opens_ports: whether a server on one node opens ports to other nodes.
    """

    title: str
    command: str
    length: str
    slots: str
    planned: frozenset[str]
    refused: Mapping[str, str]
    accepted: Mapping[str, tuple[Any, ...]]
    opens_ports: bool = False


_PLAIN_HTTP = "endpoints are plain HTTP: put TLS in front of them"
_CONFIG = "its file could override the plan: write the flags here"

# `refused` has flags that would make a secret world-readable on the node, or that move the endpoint
# to where gpufleet does not find it.
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
            "hf-token": "arguments are readable by all users of the node: use vllm.hf_token_file",
            "ssl-certfile": _PLAIN_HTTP,
            "ssl-keyfile": _PLAIN_HTTP,
            "uds": "endpoints are TCP ports",
        },
        accepted={},
    ),
    # SGLang 0.5.23; options with several names: the first is in use, the others are spellings of
    # it (engines/sglang/data).
    "sglang": EngineFlags(
        title="SGLang",
        command="sglang serve",
        length="context-length",
        slots="max-running-requests",
        planned=frozenset(
            {
                "admin-api-key",
                "api-key",
                "data-parallel-size",
                "device",
                "dist-init-addr",
                "dp-size",
                "enable-metrics",
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
            "config": _CONFIG,
            "grpc-port": "this listener does not check the API key",
            "ssl-certfile": _PLAIN_HTTP,
            "ssl-keyfile": _PLAIN_HTTP,
            "ssl-keyfile-password": _PLAIN_HTTP,
            "ssl-ca-certs": _PLAIN_HTTP,
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
        opens_ports=True,
    ),
}

NAMES: tuple[EngineName, ...] = tuple(_ENGINES)
"""The engines, the default first."""

LENGTH_FLAGS: Mapping[str, str] = {name: rules.length for name, rules in _ENGINES.items()}
"""The flag for the maximum context, by engine."""

SLOT_FLAGS: Mapping[str, str] = {name: rules.slots for name, rules in _ENGINES.items()}
"""The flag for the most requests that a server runs at once, by engine."""


def of(engine: EngineName) -> EngineFlags:
    """Return an engine's rules."""
    return _ENGINES[engine]


def flag_mistakes(engine: EngineName, flags: Mapping[str, Any]) -> Iterator[str]:
    """Yield the mistakes in the names of an entry's flags."""
    rules = of(engine)
    names = {name.lstrip("-").replace("_", "-") for name in flags}
    if planned := sorted(names & rules.planned):
        yield (
            f"`flags` sets {', '.join(planned)}, which the plan decides: use the equivalent "
            "settings (tensor_parallel, served_name, port, drain_seconds, "
            f"{engine}.listen, {engine}.api_key_file) instead"
        )
    yield from (
        f"`flags` has {name}: {why}" for name, why in rules.refused.items() if name in names
    )
    yield from (
        f"`flags` has {name!r}: write flags as `{rules.command}` names them, in lower case "
        "with dashes and without the leading `--`"
        for name in flags
        if not re.fullmatch(r"[a-z0-9]+([-.][A-Za-z0-9_]+)*", name)
    )


def setting_mistakes(engine: EngineName, values: Mapping[str, Any]) -> Iterator[str]:
    """Yield the settings of an entry, by name, that gpufleet does not have for its engine."""
    rules = of(engine)
    for key, accepted in rules.accepted.items():
        if values[key] not in accepted:
            yield (
                f"`{key}` is not supported with `engine: {engine}`: remove it, or serve this entry "
                "with `engine: vllm`"
            )
