"""Check that the files named in the settings exist on the nodes of their servers. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from gpufleet.artifacts.model_files import adapter_directory, model_directory
from gpufleet.errors import FleetError
from gpufleet.formatting import join_names
from gpufleet.on_node.common.model_folder import MARK
from gpufleet.planning.stage import Stage
from gpufleet.sanitize import printable
from gpufleet.serving.flag_check import Origins
from gpufleet.settings import engine_flags
from gpufleet.settings.base import KeyPath
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.server_sandbox import absolute_paths
from gpufleet.settings.serving_settings import Served


def check_files(
    stages: Iterable[Stage],
    settings: Mapping[str, NodeSettings],
    documents: Mapping[str, Mapping[str, Any]],
    origins: Mapping[str, Origins],
) -> tuple[str, ...]:
    """
    Return remarks on the paths of planned servers that could not be checked.

    `documents` are the nodes' probes. A path that a probe did not check is not judged. Raises
    `FleetError` with every path that is missing or unusable on a node whose server reads it.
    """
    found: dict[tuple[str, str], list[str]] = {}
    for stage in stages:
        served = settings[stage.node].serving[stage.model]
        for key, path, said in _looked_for(stage, served, documents[stage.node]):
            why, remedy = _problem(key, said, served)
            if not why:
                continue
            place = ".".join(map(str, key))
            if origin := origins.get(stage.node, {}).get(str(key[0])):
                place = f"{origin.place_of(*key[1:])}: {place}"
            found.setdefault((f"{place}: {path} {why}", remedy), []).append(stage.node)
    refused: list[str] = []
    remarks: list[str] = []
    for (sentence, remedy), nodes in found.items():
        where = (
            f"{sentence} on {join_names(sorted(set(nodes)))}, but the server reads it when it "
            "starts"
        )
        if remedy:
            refused.append(f"{where}: {remedy}")
        else:
            remarks.append(where)
    if refused:
        raise FleetError(*refused)
    return tuple(remarks)


def _looked_for(
    stage: Stage, served: Served, document: Mapping[str, Any]
) -> Iterator[tuple[KeyPath, str, Any]]:
    """Yield each path that a stage reads, as (its setting, the path, the probe's result)."""
    here: KeyPath = ("serving", stage.model)
    models, files = document.get("models"), document.get("files")
    if isinstance(models, Mapping):
        model = model_directory(served)
        if served.is_path or _is_marked(models.get(model)):
            yield (*here, "model"), model, models.get(model)
        for name, adapter in served.adapters.items():
            if adapter.is_path and adapter_directory(adapter) == adapter.source:
                key = (*here, "adapters", name, "source")
                yield key, adapter.source, models.get(adapter.source)
    if isinstance(files, Mapping):
        of_the_server = engine_flags.of(served.engine).files.of_the_server
        for flag, path in absolute_paths(served):
            if stage.node_rank == 0 or flag not in of_the_server:
                yield (*here, "flags", flag), path, files.get(path)


def _is_marked(said: Any) -> bool:
    """Return whether a download is marked as complete, so that no deploy downloads it again."""
    return isinstance(said, Mapping) and said.get("marked") is True


_PUT_IT_THERE = "create it there, or write a path that exists on every node that serves this model"


def _problem(key: KeyPath, said: Any, served: Served) -> tuple[str, str]:
    """
    Return a path's problem and its remedy.

    The problem is "" if there is none. The remedy is "" if the path could not be checked.
    """
    if said == "folder" and key[-1] in engine_flags.of(served.engine).files.one_file:
        return "is a directory, not a file", _PUT_IT_THERE
    if not isinstance(said, Mapping):
        return "", ""
    lost = said.get("lost")
    if key[-1] == "model" and isinstance(lost, list) and lost and _reads_safetensors(served):
        names = ", ".join(printable(str(each)) for each in lost[:3])
        why = f"has weights that cannot be loaded ({names}{', ...' if len(lost) > 3 else ''})"
        if served.is_path:
            return why, "restore these files on that node"
        return why, (
            f"remove {model_directory(served)}/{MARK} on that node, and run a deploy, which "
            "downloads them again"
        )
    if "missing" not in said:
        return "", ""
    if said["missing"] == "absent":
        return "does not exist", _PUT_IT_THERE
    return f"could not be checked ({printable(str(said['missing']))})", ""


def _reads_safetensors(served: Served) -> bool:
    """Return whether vLLM loads the tensors that the index lists, and not a different format."""
    return served.flags.get("load-format", "auto") in {"auto", "hf", "safetensors"} and not (
        {"config-format", "model-loader-extra-config"} & served.flags.keys()
    )
