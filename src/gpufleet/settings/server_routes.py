"""Refuse settings that add control routes to a server, or that bypass gpufleet's guard.  Pure.

The module also refuses the environment variables that `settings/engine_flags.py` refuses for an
engine.

The guard (`on_node/serving/guard.py`) requires the API key on every path. Clients with the key may
use the models, but must not control the servers. Control routes would allow this: `/collective_rpc`
calls any method of the workers, `/update_weights` changes the model, and `/pause` stops the model.
The routes of each setting come from vllm/entrypoints of vLLM 0.31.0 and 0.32.0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gpufleet.settings.base import KeyPath
from gpufleet.settings.engine_flags import of
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.serving_settings import Vllm

CONTROL_VARIABLES = {
    "VLLM_SERVER_DEV_MODE": "/collective_rpc, /update_weights, /pause, /sleep and others",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "/v1/load_lora_adapter and /v1/unload_lora_adapter",
    "VLLM_TORCH_PROFILER_DIR": "/start_profile and /stop_profile",
}
CONTROL_FLAGS = {
    "enable-elastic-ep": "/scale_elastic_ep",
    "enable-fault-tolerance": "/fault_tolerance/apply",
    "profiler-config": "/start_profile and /stop_profile",
}
"""Flags that add control routes to a server, with these routes."""

CHOSEN_PATHS = ("VLLM_LORA_RESOLVER_CACHE_DIR", "VLLM_LORA_RESOLVER_HF_REPO_LIST")
"""
Variables that make vLLM load an adapter from the location in a request's model name, without a
check (vllm/plugins/lora_resolvers).
"""

PAST_VARIABLES = ("VLLM_USE_RUST_FRONTEND",)
PAST_FLAGS = ("grpc", "grpc-port")
"""Flags that replace vLLM's Python server, the only server that loads middleware."""

_NO = {"", "0", "false"}


def route_mistakes(settings: NodeSettings) -> Iterator[tuple[KeyPath, str]]:
    """Yield each setting that gpufleet refuses, as (path of the key, problem)."""
    yield from _refused_variables(settings)
    vllm = settings.vllm
    if vllm is None:
        return
    for at, name, value in _set(settings):
        is_flag = at[-2] == "flags"
        control = (CONTROL_FLAGS if is_flag else CONTROL_VARIABLES).get(name)
        if control and not vllm.allow_control_routes:
            yield (
                at,
                f"adds the routes {control} to servers. With these routes, any client with "
                "the API key can control the servers: remove this key, or write "
                "`allow_control_routes: true` under `vllm`",
            )
        if not is_flag and name in CHOSEN_PATHS:
            yield (
                at,
                "lets clients choose the location from which servers read adapters: remove "
                "this key, and write each adapter in `adapters` of its model "
                "(docs/configure/adapters.md)",
            )
        if vllm.api_key_file is not None and name in (PAST_FLAGS if is_flag else PAST_VARIABLES):
            yield (
                at,
                "replaces vLLM's Python server with a program that does not load "
                "gpufleet's guard. The guard requires the API key on every path, because "
                f"`vllm.api_key_file` is set: remove this key ({value!r})",
            )


def _refused_variables(settings: NodeSettings) -> Iterator[tuple[KeyPath, str]]:
    for engine, section in settings.engines.items():
        given: dict[KeyPath, Mapping[str, str]] = {
            (engine, "environment"): section.environment,
            (engine, "environment_files"): section.environment_files,
        }
        for model, served in settings.serving.items():
            if served.engine == engine:
                given["serving", model, "environment"] = served.environment
                given["serving", model, "environment_files"] = served.environment_files
        for name, why in of(engine).refused_variables.items():
            for at, names in given.items():
                if name in names:
                    yield (*at, name), f"{why}: remove this variable"


def _set(settings: NodeSettings) -> Iterator[tuple[KeyPath, str, Any]]:
    """
    Yield each variable and flag of vLLM that is switched on, as (path of the key, name, value).
    """
    named: dict[KeyPath, Mapping[str, Any]] = {}
    if settings.vllm:
        named["vllm", "environment"] = settings.vllm.environment
        named["vllm", "environment_files"] = settings.vllm.environment_files
    for model, served in settings.serving.items():
        if served.engine != Vllm.engine:
            continue
        named["serving", model, "environment"] = served.environment
        named["serving", model, "environment_files"] = served.environment_files
        named["serving", model, "flags"] = served.flags
    for path, values in named.items():
        for name, value in values.items():
            if value is not None and str(value).strip().lower() not in _NO:
                yield (*path, name), name, value
