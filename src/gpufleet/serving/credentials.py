"""Choose the secrets of a node and of each stage's unit. Pure."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping

from gpufleet import node_paths
from gpufleet.planning.multinode.launch import RAY_TOKEN, ray_token
from gpufleet.planning.stage import Stage
from gpufleet.settings.serving_settings import EngineSettings, Served

CREDENTIALS = node_paths.VLLM_CREDENTIALS
API_KEY = "api-key"
API_KEY_FILE = f"{CREDENTIALS}/{API_KEY}"
CLUSTER_KEY = "cluster-key"
HF_TOKEN = "hf-token"  # noqa: S105  # a name
VARIABLE = "variable"
"""
Prefix of a credential that becomes an environment variable.

`variable.NAME` is for every stage, and `variable.NAME.MODEL` is for the stages of one model
(templates/vllm/vllm-variables.sh).
"""
# The Hub's token is for downloads: no unit loads it (`unit_credentials`).
NOT_FOR_UNITS = (HF_TOKEN,)


def secret_files(servers: EngineSettings, serving: Mapping[str, Served]) -> dict[str, str]:
    """Return the secret files on this machine that the settings name, by credential."""
    variables = {f"{VARIABLE}.{name}": path for name, path in servers.environment_files.items()} | {
        f"{VARIABLE}.{name}.{model}": path
        for model, served in serving.items()
        for name, path in served.environment_files.items()
    }
    named = {
        API_KEY: servers.api_key_file,
        CLUSTER_KEY: servers.cluster_key_file,
        HF_TOKEN: servers.hf_token_file,
    }
    return {name: path for name, path in named.items() if path} | variables


def unit_credentials(stage: Stage, model: Served, names: Iterable[str] = ()) -> tuple[str, ...]:
    """
    Return the names of the credentials that the stage's unit loads, if the node has them.

    `names` are the node's credentials, from which the variables are selected. A rank without a
    server needs no API key, so a new key does not restart the rank.
    """
    variables = variable_credentials(stage, model, names)
    if not stage.group:
        return (API_KEY, *variables)
    by_ray = model.distributed_executor_backend == "ray"
    own = (API_KEY,) if stage.servers else ()
    return (*own, CLUSTER_KEY, *([RAY_TOKEN] if by_ray else []), *variables)


def variable_credentials(stage: Stage, model: Served, names: Iterable[str]) -> tuple[str, ...]:
    """
    Return the node's credentials that become variables of the stage's process.

    A variable of the model's entry, from `environment` or `environment_files`, overrides the same
    variable of `vllm`.
    """
    own = {f"{VARIABLE}.{name}.{stage.model}" for name in model.environment_files}
    shadowed = {*model.environment, *model.environment_files}

    def is_loaded(name: str) -> bool:
        kind, _, variable = name.partition(".")
        return kind == VARIABLE and (
            name in own or ("." not in variable and variable not in shadowed)
        )

    return tuple(filter(is_loaded, names))


def node_credentials(
    contents: Mapping[str, bytes], stages: Iterable[Stage], serving: Mapping[str, Served]
) -> dict[str, bytes]:
    """
    Return the secrets of a node with these stages, by name.

    `contents` are the contents of the `secret_files`. A node gets variables and Ray's token only if
    one of its stages loads them.
    """
    found = {name: content.strip() for name, content in contents.items()}
    loaded = {
        name for each in stages for name in unit_credentials(each, serving[each.model], found)
    }
    unused = {name for name in found if name.startswith(f"{VARIABLE}.")} - loaded
    found = {name: content for name, content in found.items() if name not in unused}
    if RAY_TOKEN in loaded and CLUSTER_KEY in found:
        found[RAY_TOKEN] = ray_token(found[CLUSTER_KEY])
    return found


def unit_hashes(stage: Stage, model: Served, secrets: Mapping[str, bytes]) -> dict[str, str]:
    """Return the SHA-256 of each secret that the stage's unit loads, by name.

    `secrets` are the secrets of the node.
    """
    return {
        name: hashlib.sha256(secrets[name]).hexdigest()
        for name in unit_credentials(stage, model, secrets)
        if name in secrets
    }
