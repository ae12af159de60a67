"""
Read the configs of a fleet's models: from a directory on this machine, the Hub, or the nodes.

Border: this module reads files and queries the Hub. If a model cannot be read, the result has a
sentence instead of the model's description. The plan handles such sentences.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click

from gpufleet.artifacts.model_files import checkpoints
from gpufleet.errors import FleetError
from gpufleet.formatting import format_duration
from gpufleet.node.topology import value_or
from gpufleet.planning.serving_options import config_overrides, draft_model
from gpufleet.progress import Pace, wait_text
from gpufleet.remote.daemon_pool import DaemonPool
from gpufleet.remote.probe_paths import ProbePaths
from gpufleet.sanitize import printable
from gpufleet.settings.adapter_settings import Adapter
from gpufleet.settings.node_variables import NodeVars
from gpufleet.settings.server_sandbox import absolute_paths
from gpufleet.settings.serving_settings import EngineSettings, Served
from gpufleet.sizing import adapter_config
from gpufleet.sizing.adapter_config import AdapterConfig, parse_adapter
from gpufleet.sizing.architectures.description import Described, HubSilence, ModelFiles, describe
from gpufleet.sizing.architectures.overrides import with_overrides
from gpufleet.sizing.checkpoint_reader import (
    CONFIG,
    Hub,
    HubSilentError,
    read,
    read_adapter,
    read_adapter_file,
)
from gpufleet.sizing.model_kinds import UNREAD, KindReading, read_kind

# The Hub serves some kilobytes for each model; a fleet's plan waits at most this long.
SECONDS = 60.0
_LOOK_SECONDS = 1


def probe_paths(declared: Mapping[str, NodeVars]) -> dict[str, ProbePaths]:
    """Return the model directories and files that each node's probe looks up, by node."""
    return {
        name: ProbePaths(
            tuple(
                sorted(
                    {
                        path
                        for each in node.settings.serving.values()
                        for path in (
                            each.model,
                            draft_model(each) or "",
                            *(adapter.source for adapter in each.adapters.values()),
                            *(found.directory for found in checkpoints(each)),
                        )
                        if path.startswith("/")
                    }
                )
            ),
            tuple(
                sorted(
                    {
                        path
                        for each in node.settings.serving.values()
                        for _, path in absolute_paths(each)
                    }
                )
            ),
        )
        for name, node in declared.items()
    }


def local_directory(model: str, folder: Path, file: str = CONFIG) -> Path | None:
    """
    Return the directory below `folder` with a model's config.json, or None if there is none.

    For an adapter, `file` is `adapter_config.json` instead of config.json.

    For `Qwen/Qwen3-32B`, the directory is `folder/Qwen/Qwen3-32B` or `folder/Qwen3-32B`. For
    `/srv/models/qwen3-32b`, the directory is `folder/srv/models/qwen3-32b` or `folder/qwen3-32b`.
    """
    places = (folder / model.lstrip("/"), folder / Path(model).name)
    return next((each for each in places if (each / file).is_file()), None)


@dataclass(frozen=True)
class KnownModel:
    """The data read from a model's files."""

    described: Described
    kind: KindReading = UNREAD


def describe_models(
    declared: Mapping[str, NodeVars],
    documents: Mapping[str, Mapping[str, Any]],
    folder: Path | None = None,
) -> dict[str, KnownModel]:
    """
    Return each declared model's description, by its name in `serving`.

    Models in `folder` on this machine are read from there. Other models are read in parallel, each
    once. Models of the Hub are read from the Hub. Models in directories of nodes are read from the
    first node's probe that has them.
    """
    wanted: dict[str, tuple[Served, EngineSettings | None, list[str]]] = {}
    for name, node in sorted(declared.items()):
        for model, served in node.settings.serving.items():
            wanted.setdefault(model, (served, node.settings.engine_of(model), []))[2].append(name)
    with DaemonPool(8) as pool:
        jobs = {
            model: pool.submit(
                _describe_one, served, servers, [documents.get(each, {}) for each in nodes], folder
            )
            for model, (served, servers, nodes) in wanted.items()
        }
        _await(jobs)
        return {model: job.result() for model, job in jobs.items()}


def _await(jobs: Mapping[str, Future[KnownModel]]) -> None:
    """Wait until all models are read. If that takes long, print the remaining models on stderr."""
    began = time.monotonic()
    pace = Pace(began)
    while left := {model: job for model, job in jobs.items() if not job.done()}:
        wait(left.values(), timeout=_LOOK_SECONDS)
        now = time.monotonic()
        if (names := [model for model, job in left.items() if not job.done()]) and pace.is_due(now):
            text = wait_text("model", len(jobs), names, now - began)
            longest = format_duration(SECONDS)
            click.echo(printable(f"reading models: {text}; at most {longest} each"), err=True)


def _describe_one(
    served: Served,
    servers: EngineSettings | None,
    documents: Sequence[Mapping[str, Any]],
    folder: Path | None,
) -> KnownModel:
    kind = UNREAD
    try:
        files = _read(served.model, served.revision, servers, documents, folder)
        files = with_overrides(files, config_overrides(served))
        kind = read_kind(files.config, files.modules)
        found = describe(files)
    except HubSilentError as error:
        return KnownModel(HubSilence("; ".join(error.problems)), kind)
    except FleetError as error:
        return KnownModel("; ".join(error.problems), kind)
    adapters = {
        name: _describe_adapter(adapter, servers, documents, folder)
        for name, adapter in served.adapters.items()
    }
    if adapters:
        found = replace(found, adapters=adapters)
    if draft := draft_model(served):
        found = replace(found, draft=_describe_draft(draft, servers, documents, folder))
    return KnownModel(found, kind)


def _describe_adapter(
    adapter: Adapter,
    servers: EngineSettings | None,
    documents: Iterable[Mapping[str, Any]],
    folder: Path | None,
) -> AdapterConfig | str:
    file = adapter_config.FILE
    try:
        if folder and (found := local_directory(adapter.source, folder, file)):
            return read_adapter_file(found / file)
        if not adapter.is_path:
            return read_adapter(adapter.source, str(adapter.revision), _hub(servers), SECONDS)
        return parse_adapter(
            _on_nodes(adapter.source, "adapter_config", documents)["adapter_config"]
        )
    except FleetError as error:
        return "; ".join(error.problems)


def _describe_draft(
    draft: str,
    servers: EngineSettings | None,
    documents: Sequence[Mapping[str, Any]],
    folder: Path | None,
) -> Described:
    try:
        return describe(_read(draft, None, servers, documents, folder))
    except FleetError as error:
        return "; ".join(error.problems)


def _read(
    model: str,
    revision: str | None,
    servers: EngineSettings | None,
    documents: Iterable[Mapping[str, Any]],
    folder: Path | None,
) -> ModelFiles:
    """
    Return a model's files.

    Raises `FleetError` if the model's config.json is found neither in `folder` nor on the nodes or
    the Hub.
    """
    if folder and (found := local_directory(model, folder)):
        return replace(read(str(found)), origin=model)
    if model.startswith("/"):
        return _read_from_nodes(model, documents)
    return read(model, revision=revision, hub=_hub(servers), seconds=SECONDS)


def _hub(servers: EngineSettings | None) -> Hub:
    return Hub(
        endpoint=servers.hf_endpoint if servers else None,
        token_file=servers.hf_token_file if servers else None,
    )


def _read_from_nodes(path: str, documents: Iterable[Mapping[str, Any]]) -> ModelFiles:
    """
    Return a model's files from nodes' probes. Raises `FleetError` if no node could read the
    directory.
    """
    found = _on_nodes(path, "config", documents)
    quantized = value_or(found.get("hf_quant_config"))
    modules = value_or(found.get("modules"))
    return ModelFiles(
        found["config"],
        quantized if isinstance(quantized, Mapping) else None,
        stored_bytes=_positive(value_or(found.get("bytes"))),
        modules=modules if isinstance(modules, list) else None,
        origin=path,
    )


def _on_nodes(path: str, key: str, documents: Iterable[Mapping[str, Any]]) -> Mapping[str, Any]:
    """
    Return a directory's data from the first node that could parse its file `key`.

    Raises `FleetError` if no node could.
    """
    why = "no node was queried"
    for document in documents:
        models = value_or(document.get("models"))
        found = models.get(path) if isinstance(models, Mapping) else None
        if not isinstance(found, Mapping):
            continue
        content = found.get(key)
        if isinstance(content, Mapping) and "missing" not in content:
            return found
        missing = content if isinstance(content, Mapping) else found
        why = str(missing.get("missing", "it is not a JSON object"))
    raise FleetError(f"{path}: {key}.json in this directory could not be read on any node ({why})")


def _positive(count: Any) -> int | None:
    """Return a number of bytes, or None for any other value.

    The number is below 0 if a file is truncated.
    """
    return count if isinstance(count, int) and count > 0 else None
