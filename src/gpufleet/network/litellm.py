"""
Render LiteLLM in front of a gateway: the model names for clients, and the configuration. Pure.

Clients can use the served names of the entries in `serving`, names that stand for several entries,
and aliases. For each name, LiteLLM gets one deployment for each entry of the name. The deployment
has the gateway's path of that entry as its address. The gateway chooses the server, and excludes
drained and dead servers. So LiteLLM neither retries requests nor disables deployments after errors.
LiteLLM only adds names, defaults and fallbacks.

LiteLLM reads `config.yaml`. `front.json` configures the filter in front of LiteLLM,
`on_node/network/litellm_serve.py`. The file has the clients, the names and the allowed keys of a
request's body.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from gpufleet import node_paths
from gpufleet.artifacts.release import Program
from gpufleet.formatting import suggestion
from gpufleet.monitoring import prometheus
from gpufleet.monitoring.prometheus import MARK
from gpufleet.network.haproxy import KEEP_ALIVE_SECONDS
from gpufleet.settings.base import LOOPBACK
from gpufleet.settings.gateway_settings import Gateway
from gpufleet.settings.litellm_settings import Litellm, Parameters
from gpufleet.settings.node_variables import NodeVars

UNIT = "gpufleet-litellm.service"
ACCOUNT = "litellm"
HOME = node_paths.LITELLM
"""The directory of LiteLLM's configuration."""
CREDENTIALS = f"{HOME}/credentials"
STATE = "/var/lib/litellm"
SERVE = node_paths.LITELLM_PROGRAM
"""The path on nodes of `on_node/network/litellm_serve.py`."""
PROGRAM = Program(
    "litellm", node_paths.LITELLM_RELEASES, node_paths.LITELLM_UV_CACHE, ("litellm.proxy",)
)

KEY_VARIABLE = "GPUFLEET_UPSTREAM_KEY"
# The time limit until LiteLLM has started and answers. Measured: 7 s on a free core, and 33 s on
# busy cores.
START_SECONDS = 300

# The allowed keys of a request's body. vLLM 0.32.0 reads these keys (entrypoints/*/protocol.py).
# Keys that only vLLM's own processes use are not allowed. Keys that would control LiteLLM are not
# allowed either, such as `api_base`, `fallbacks`, `mock_response`, `num_retries` and some dozens
# more.
BODY_KEYS = frozenset(
    {
        *("model", "messages", "prompt", "suffix", "echo", "input", "dimensions"),
        *("encoding_format", "stream", "stream_options", "n", "best_of", "seed", "stop"),
        *("temperature", "top_p", "top_k", "min_p", "max_tokens", "max_completion_tokens"),
        *("presence_penalty", "frequency_penalty", "repetition_penalty", "length_penalty"),
        *("logit_bias", "logprobs", "top_logprobs", "prompt_logprobs", "response_format"),
        *("tools", "tool_choice", "parallel_tool_calls", "logprob_token_ids", "prompt_embeds"),
        *("reasoning_effort", "include_reasoning", "thinking_token_budget", "instruction"),
        *("stop_token_ids", "include_stop_str_in_output", "ignore_eos", "min_tokens"),
        *("skip_special_tokens", "spaces_between_special_tokens", "add_special_tokens"),
        *("truncate_prompt_tokens", "allowed_token_ids", "bad_words", "use_beam_search"),
        *("add_generation_prompt", "continue_final_message", "chat_template_kwargs"),
        *("mm_processor_kwargs", "structured_outputs", "documents"),
        *("return_token_ids", "return_tokens_as_token_ids", "cache_salt", "vllm_xargs"),
    }
)
# LiteLLM 1.106.2 fails if a request has one of these keys, except on the path for chats (measured).
CHAT_KEYS = frozenset({"chat_template_kwargs", "reasoning_effort", "response_format"})
# The allowed keys of a rerank request. vLLM reads these keys, and LiteLLM 1.106.2 passes them on.
# The exception is `return_documents`, which Jina's clients send. vLLM ignores it, because it always
# returns documents.
RERANK_KEYS = frozenset(
    {
        "return_documents",
        *("model", "query", "documents", "top_n", "instruction", "max_tokens_per_doc"),
        *("max_tokens_per_query", "truncate_prompt_tokens", "truncation_side"),
    }
)
# Keys that clients of OpenAI send and that only OpenAI uses. The filter removes them.
IGNORED_KEYS = frozenset(
    {
        *("metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store"),
        *("user", "verbosity"),
    }
)
# The headers of a request that are passed on, in addition to the gateway's session header.
HEADERS = ("accept", "x-request-id")


@dataclass(frozen=True)
class Name:
    """A model name that clients may use."""

    name: str
    entries: tuple[str, ...]
    """
    The entries of `serving` behind this name.

    If there are several, each request is sent to one of them.
    """
    parameters: Parameters = field(default_factory=Parameters)
    fallbacks: tuple[str, ...] = ()


@dataclass(frozen=True)
class Upstream:
    """The gateway that LiteLLM sends requests to."""

    url: str
    seconds: int
    """
    After this time in seconds without data, LiteLLM ends a request.

    By default it is not shorter than the gateway's own timeout.
    """
    session_header: str
    """The header by which the gateway recognises the requests of one session."""


@dataclass(frozen=True)
class Configuration:
    """LiteLLM's files without secrets, by their path relative to `HOME`."""

    files: Mapping[str, bytes] = field(repr=False)


# Names


def entries(nodes: Mapping[str, NodeVars]) -> dict[str, str]:
    """Return the entries of `serving` that clients may use, with their served names."""
    found: dict[str, str] = {}
    prefill = set()
    for _, node in sorted(nodes.items()):
        for entry, model in node.settings.serving.items():
            found.setdefault(entry, model.served_name or entry)
            prefill.add(model.prefill)
    return {entry: name for entry, name in sorted(found.items()) if entry not in prefill}


def names(wanted: Litellm, served: Mapping[str, str]) -> tuple[Name, ...]:
    """Return the model names for clients, sorted. Call it only if `problems` yields nothing."""
    by_name: dict[str, list[str]] = {}
    for entry, name in served.items():
        by_name.setdefault(name, []).append(entry)
    found = {name: Name(name, tuple(behind)) for name, behind in by_name.items()}
    for name, model in wanted.models.items():
        behind = model.entries or tuple(by_name.get(name, ()))
        found[name] = Name(name, behind, model.parameters, model.fallbacks)
    for alias, name in wanted.aliases.items():
        if name in found:
            its = found[name]
            found[alias] = Name(alias, its.entries, its.parameters, its.fallbacks)
    return tuple(each for _, each in sorted(found.items()))


def problems(wanted: Litellm, nodes: Mapping[str, NodeVars], home: str) -> Iterator[str]:
    """Yield the problems of node `home`'s `litellm` settings, as sentences."""
    served = entries(nodes)
    found = [*_of_upstream(wanted, nodes[home].settings.gateway, nodes)]
    if served:
        found += [*_of_models(wanted, served), *_of_others(wanted, served)]
    else:
        found.append("models: no node of the inventory declares `serving`, so there are no models")
    yield from (f"{home}: litellm.{sentence}" for sentence in found)


def _of_models(wanted: Litellm, served: Mapping[str, str]) -> Iterator[str]:
    own = set(served.values())
    every = own | set(wanted.models) | set(wanted.aliases)
    for name, model in wanted.models.items():
        at = f"models.{name}"
        for entry in model.entries:
            if entry not in served:
                yield (
                    f"{at}.entries: no node serves {entry}{suggestion(entry, [*served])}; entries "
                    f"of `serving`: {', '.join(served)}"
                )
        if not model.entries and name not in own:
            yield (
                f"{at}: no entry of `serving` has this name{suggestion(name, sorted(own))}: set "
                "`entries`"
            )
        hidden = [e for e, each in served.items() if each == name and e not in model.entries]
        if model.entries and hidden:
            yield (
                f"{at}: hides {' and '.join(hidden)}, because the served model name is the same: "
                f"add {' and '.join(hidden)} to `entries`, or rename `{at}`"
            )
        for fallback in model.fallbacks:
            if fallback not in every:
                yield (
                    f"{at}.fallbacks: there is no model {fallback}"
                    f"{suggestion(fallback, sorted(every))}"
                )
    for name in sorted(own - {name for name, model in wanted.models.items() if model.entries}):
        if len(behind := [entry for entry, each in served.items() if each == name]) > 1:
            yield (
                f"models: {' and '.join(behind)} have the same name {name}: list in "
                f"`models.{name}.entries` the entries that get its requests"
            )


def _of_others(wanted: Litellm, served: Mapping[str, str]) -> Iterator[str]:
    own = set(served.values())
    known = own | set(wanted.models)
    every = known | set(wanted.aliases)
    for alias, name in wanted.aliases.items():
        if alias in own:
            yield f"aliases.{alias}: hides a model of the same name: rename the alias"
        if name not in known:
            yield f"aliases.{alias}: there is no model {name}{suggestion(name, sorted(known))}"
    for client in wanted.clients:
        for name in client.models:
            if name not in every:
                yield (
                    f"clients: {client.name} may request the model {name}, which does not exist"
                    f"{suggestion(name, sorted(every))}"
                )


def _of_upstream(
    wanted: Litellm, gateway: Gateway | None, nodes: Mapping[str, NodeVars]
) -> Iterator[str]:
    if wanted.upstream_url is None:
        if gateway is None:
            yield (
                "upstream_url: is not set, and this node has no `gateway`: declare a gateway on "
                "this node, or set upstream_url to the address of a gateway "
                "(https://gateway.example.net:8443)"
            )
        elif gateway.tls:
            yield (
                "upstream_url: the gateway of this node uses TLS: write the gateway's address with "
                "the host name of its certificate (https://gateway.example.net:8443)"
            )
    here = [gateway] if gateway else _gateways(nodes)
    if not here and wanted.request_seconds is None:
        yield (
            "request_seconds: is not set, and no node of the inventory has a `gateway` whose "
            "timeout LiteLLM could use: set request_seconds"
        )
    if any(each.clients for each in here) and wanted.upstream_key_file is None:
        yield (
            "upstream_key_file: is not set, but the gateway requires a key: create a key for "
            "LiteLLM (openssl rand -base64 33), add its hash to `gateway.clients`, and set "
            "upstream_key_file to the key's file"
        )


def unknown_key(
    wanted: Litellm, nodes: Mapping[str, NodeVars], home: str, key: bytes
) -> str | None:
    """Return why the inventory's gateways would refuse LiteLLM's key, or None if they accept it."""
    gateway = nodes[home].settings.gateway
    needed = sorted({e for name in names(wanted, entries(nodes)) for e in name.entries})
    for each in [gateway] if gateway else _gateways(nodes):
        if not each.clients:
            continue
        digest = hashlib.sha256(key).hexdigest()
        found = next((c for c in each.clients if c.key_sha256.lower() == digest), None)
        said = f"{home}: litellm.upstream_key_file: the key in {wanted.upstream_key_file}"
        if found is None:
            return f"{said} is in no entry of `gateway.clients`: add its hash ({digest})"
        if found.models and (lacks := [entry for entry in needed if entry not in found.models]):
            return (
                f"{said} may not use {', '.join(lacks)}: add {', '.join(lacks)} to the `models` "
                f"of {found.name} in `gateway.clients`"
            )
    return None


def _gateways(nodes: Mapping[str, NodeVars]) -> list[Gateway]:
    return [each.settings.gateway for _, each in sorted(nodes.items()) if each.settings.gateway]


# Its configuration


def upstream(wanted: Litellm, nodes: Mapping[str, NodeVars], home: str) -> Upstream:
    """
    Return the gateway to which LiteLLM on node `home` sends requests.

    Call it only if `problems` yields nothing. By default, LiteLLM's timeout is the sum of the
    gateway's timeouts for its queue and for a server. So the gateway times out first, and answers
    with the reason.
    """
    here = nodes[home].settings.gateway
    known = [here] if here else _gateways(nodes)
    seconds = wanted.request_seconds or max(
        each.request_seconds + each.queue_seconds for each in known
    )
    header = known[0].affinity.header.lower() if known else "x-session-id"
    if wanted.upstream_url:
        return Upstream(wanted.upstream_url, seconds, header)
    if here is None:
        raise ValueError(f"{home} has no gateway")
    return Upstream(
        f"http://{prometheus.host_port(prometheus.local_address(here.listen), here.port)}",
        seconds,
        header,
    )


def configuration(
    wanted: Litellm, asked: Iterable[Name], served: Mapping[str, str], at: Upstream
) -> Configuration:
    """
    Return the configuration files of LiteLLM and of its filter. `served` are the fleet's entries.
    """
    asked = tuple(asked)
    said: dict[str, Any] = {
        "model_list": [
            {
                "model_name": name.name,
                "litellm_params": {
                    "model": f"hosted_vllm/{served[entry]}",
                    "api_base": f"{at.url}/{entry}/v1",
                    **({"api_key": f"os.environ/{KEY_VARIABLE}"} if _key(wanted) else {}),
                    "timeout": at.seconds,
                    "stream_timeout": at.seconds,
                    "max_retries": 0,
                    **name.parameters.set_values,
                },
                "model_info": {"id": f"{name.name}@{entry}"},
            }
            for name in asked
            for entry in name.entries
        ],
        "router_settings": {
            # No retries: the gateway has already tried other servers.
            "num_retries": 0,
            "disable_cooldowns": True,
            "fallbacks": [{each.name: [*each.fallbacks]} for each in asked if each.fallbacks],
        },
        "litellm_settings": {
            "telemetry": False,
            "num_retries": 0,
            "request_timeout": at.seconds,
            "drop_params": False,
            "suppress_debug_info": True,
            "turn_off_message_logging": True,
        },
        "general_settings": {
            "forward_client_headers_to_llm_api": True,  # which ones, front.json says
            "disable_spend_logs": True,
        },
    }
    front = {
        "listen": wanted.listen,
        "port": wanted.port,
        "clients": [each.model_dump(mode="json") for each in wanted.clients],
        "anybody": wanted.allow_unauthenticated,
        "models": [each.name for each in asked],
        "body_keys": sorted(BODY_KEYS | set(wanted.body_keys)),
        "chat_keys": sorted(CHAT_KEYS),
        "rerank_keys": sorted(RERANK_KEYS | set(wanted.body_keys)),
        "chat_models": [each.name for each in asked if CHAT_KEYS & set(each.parameters.set_values)],
        "ignored_keys": sorted(IGNORED_KEYS - set(wanted.body_keys)),
        "headers": sorted({*HEADERS, at.session_header}),
        "most_bytes": wanted.max_body_mib << 20,
        "drain_seconds": wanted.drain_seconds,
        "keep_alive_seconds": KEEP_ALIVE_SECONDS,
        "key_variable": KEY_VARIABLE,
    }
    text = yaml.safe_dump(said, sort_keys=False, width=200, allow_unicode=True)
    return Configuration(
        {
            "config.yaml": (MARK + text).encode(),
            "front.json": (json.dumps(front, indent=1) + "\n").encode(),
        }
    )


def allowed_networks(wanted: Litellm, at: Upstream) -> tuple[str, ...]:
    """
    Return the networks that LiteLLM's unit may use, in systemd's syntax. () allows any network.

    >>> allowed_networks(Litellm(version="1.0.0", lock="a", allow_unauthenticated=True),
    ...       Upstream("http://127.0.0.1:8443", 660, "x-session-id"))
    ('localhost',)
    """
    if wanted.networks:
        return ("localhost", *map(str, wanted.networks))
    host = at.url.partition("://")[2].rpartition(":")[0].strip("[]")
    return ("localhost",) if wanted.listen in LOOPBACK and host in LOOPBACK else ()


def _key(wanted: Litellm) -> bool:
    return wanted.upstream_key_file is not None
