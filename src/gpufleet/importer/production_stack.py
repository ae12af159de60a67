"""Read Helm values of vLLM's production-stack.  Pure.

Contract: each entry of `servingEngineSpec.modelSpec` becomes the command line that the chart
generates for it. The rules are those of helm/templates/deployment-vllm-multi.yaml at commit
010004e. The chart's router, caches and storage cannot be converted, and notes contain their keys.
Tokens are never copied.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from gpufleet.importer.bounded_yaml import items, mapping, scalar_text
from gpufleet.importer.container import image_note, release_of
from gpufleet.importer.server import Launch, Note, Source

# Keys of `vllmConfig`, each with the option that the chart writes for it.
_OPTIONS = {
    "maxModelLen": "--max-model-len",
    "dtype": "--dtype",
    "tensorParallelSize": "--tensor-parallel-size",
    "pipelineParallelSize": "--pipeline-parallel-size",
    "maxNumSeqs": "--max-num-seqs",
    "gpuMemoryUtilization": "--gpu-memory-utilization",
    "maxLoras": "--max-loras",
}
_READ = {*_OPTIONS, "enableChunkedPrefill", "enablePrefixCaching", "extraArgs", "v0", "v1"}
_SPEC = {
    *("name", "enabled", "repository", "tag", "modelURL", "replicaCount", "vllmConfig", "env"),
    *("hf_token", "enableLoRA", "enableTool", "toolCallParser", "chatTemplate", "raySpec"),
    *("lmcacheConfig",),
}
_GPUS = "the plan decides which GPUs a stage gets"
_WHY = {
    "requestGPU": _GPUS,
    "requestGPUType": _GPUS,
    "requestCPU": "servers use the node's CPUs and memory",
    "requestMemory": "servers use the node's CPUs and memory",
    "limitCPU": "servers use the node's CPUs and memory",
    "limitMemory": "servers use the node's CPUs and memory",
    "pvcStorage": "a deploy copies files to where it can check them",
    "pvcAccessMode": "a deploy copies files to where it can check them",
    "pvcMatchLabels": "a deploy copies files to where it can check them",
    "storageClass": "a deploy copies files to where it can check them",
    "nodeSelectorTerms": "the groups of the inventory decide which nodes serve a model",
    "routerSpec": "clients send requests to `gateway`",
}
_NONE = "gpufleet has no setting for it"


def read_stack(document: Mapping[str, Any]) -> Source:
    """Return the servers in a chart's values, and notes about all other values."""
    engine = mapping(document.get("servingEngineSpec"))
    api_key = engine.get("vllmApiKey")
    launches: list[Launch] = []
    notes: list[Note] = []
    for at, each in enumerate(items(engine.get("modelSpec"))):
        spec = mapping(each)
        name = scalar_text(spec.get("name")) or f"model-{at + 1}"
        if spec.get("enabled") is False:
            notes.append(Note(f"modelSpec `{name}` is not enabled, so it is left out"))
        else:
            launches.append(_launch(name, spec, has_key=bool(_is_set(api_key))))
    notes += (
        Note(f"`servingEngineSpec.{key}` is dropped: {_WHY.get(key, _NONE)}")
        for key in engine
        if key not in {"modelSpec", "vllmApiKey", "enableEngine"}
    )
    notes += (
        Note(f"`{key}` is dropped: {_WHY.get(key, _NONE)}")
        for key in document
        if key != "servingEngineSpec"
    )
    return Source(tuple(launches), tuple(notes))


def _is_set(secret: Any) -> Any:
    return secret.get("secretName") if isinstance(secret, Mapping) else secret


def _launch(name: str, spec: Mapping[str, Any], *, has_key: bool) -> Launch:
    config = mapping(spec.get("vllmConfig"))
    notes = [
        Note(f"`{key}` is dropped: {_WHY.get(key, _NONE)}") for key in spec if key not in _SPEC
    ]
    notes += (
        Note(
            f"`vllmConfig.{key}` is dropped, because the chart's template does not show what it "
            "does"
        )
        for key in config
        if key not in _READ
    )
    environment, secrets = _variables(spec, notes)
    if _is_set(spec.get("hf_token")):
        secrets.add("HF_TOKEN")
    if has_key:
        secrets.add("VLLM_API_KEY")
    environment |= dict.fromkeys(secrets, "")
    if scalar_text(config.get("v0")) == "1":
        environment["VLLM_USE_V1"] = "0"
    image = f"{scalar_text(spec.get('repository'))}:{scalar_text(spec.get('tag'))}"
    replicas = spec.get("replicaCount")
    return Launch(
        name,
        tuple(_argv(spec, config)),
        environment,
        version=release_of(image),
        notes=(image_note(image), *notes),
        replicas=replicas if isinstance(replicas, int) and replicas > 0 else None,
        secret_variables=frozenset(secrets),
    )


def _argv(spec: Mapping[str, Any], config: Mapping[str, Any]) -> Iterator[str]:
    yield scalar_text(spec.get("modelURL"))
    if spec.get("enableLoRA"):
        yield "--enable-lora"
    if spec.get("enableTool"):
        yield "--enable-auto-tool-choice"
    if parser := scalar_text(spec.get("toolCallParser")):
        yield from ("--tool-call-parser", parser)
    if "enableChunkedPrefill" in config:
        on = config["enableChunkedPrefill"]
        yield "--enable-chunked-prefill" if on else "--no-enable-chunked-prefill"
    if config:  # the chart writes one of the two, even if the key is missing
        on = config.get("enablePrefixCaching")
        yield "--enable-prefix-caching" if on else "--no-enable-prefix-caching"
    for key, option in _OPTIONS.items():
        if key in config:
            yield f"{option}={scalar_text(config[key])}"
    yield from map(scalar_text, items(config.get("extraArgs")))
    cache = mapping(spec.get("lmcacheConfig"))
    if cache.get("enabled"):
        role = scalar_text(cache.get("kvRole")) or "kv_both"
        connector = {"kv_connector": "LMCacheConnectorV1", "kv_role": role}
        yield from ("--kv-transfer-config", json.dumps(connector))
    if template := scalar_text(spec.get("chatTemplate")):
        yield from ("--chat-template", f"/templates/{template}")
    if "raySpec" in spec:
        yield from ("--distributed-executor-backend", "ray")


def _variables(spec: Mapping[str, Any], notes: list[Note]) -> tuple[dict[str, str], set[str]]:
    """Return the variables of an entry, and the names of variables that come from a Secret."""
    found: dict[str, str] = {}
    secrets: set[str] = set()
    for each in map(mapping, items(spec.get("env"))):
        name = scalar_text(each.get("name"))
        source = mapping(each.get("valueFrom"))
        if not source:
            found[name] = scalar_text(each.get("value"))
        elif "secretKeyRef" in source:
            secrets.add(name)
        else:
            notes.append(
                Note(f"{name} is dropped, because its value is not in this file", decide=True)
            )
    if mapping(spec.get("lmcacheConfig")):
        notes.append(
            Note(
                "`lmcacheConfig` is used only for `--kv-transfer-config`: add LMCache to "
                "the lock file that `vllm.lock` names, and write LMCache's settings as "
                "LMCACHE_* variables under `environment`",
                decide=True,
            )
        )
    if mapping(spec.get("lmcacheConfig")).get("enablePD"):
        notes.append(
            Note(
                "`lmcacheConfig.enablePD` separates prefill from decode: in the entry that "
                "decodes, set `prefill` to the name of the entry that computes prompts",
                decide=True,
            )
        )
    if scalar_text(spec.get("chatTemplate")):
        notes.append(
            Note("`chatTemplate` is a file of the chart: copy the file to the nodes, and write "
                "its path in the settings",
                 decide=True)
        )  # fmt: skip
    return found, secrets
