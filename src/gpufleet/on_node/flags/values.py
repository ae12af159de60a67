"""RUNS ON THE NODE: read which values vLLM checks after parsing: JSON fields and lists of names."""

from __future__ import annotations

import dataclasses
import enum
import re
import typing
from typing import Any, Dict, List, Tuple

from gpufleet.on_node.flags import document
from gpufleet.on_node.flags.partial_import import UNBOUND, Modules
from gpufleet.on_node.flags.placeholder import is_absent

# Lists of names that the argument parser does not enforce, and the places where releases have had
# them. The newest place is first.
_LISTS: Dict[str, Tuple[Tuple[str, str], ...]] = {
    "quantization": (
        ("vllm.model_executor.layers.quantization", "QUANTIZATION_METHODS"),
        ("vllm.model_executor.layers.quantization", "QuantizationMethods"),
    ),
    "quantization_deprecated": (
        ("vllm.model_executor.layers.quantization", "DEPRECATED_QUANTIZATION_METHODS"),
    ),
    "quantization_online": (("vllm.config.quantization", "ONLINE_QUANT_SHORTHAND_NAMES"),),
    "attention_backend": (
        ("vllm.v1.attention.backends.registry", "AttentionBackendEnum"),
        ("vllm.attention.backends.registry", "AttentionBackendEnum"),
        ("vllm.attention.backends.registry", "_Backend"),
        ("vllm.platforms.interface", "_Backend"),
    ),
    "load_format": (
        ("vllm.model_executor.model_loader", "_LOAD_FORMAT_TO_MODEL_LOADER"),
        ("vllm.model_executor.model_loader", "LoadFormats"),
        ("vllm.config", "LoadFormat"),
    ),
    "tool_call_parser": (
        ("vllm.tool_parsers", "ToolParserManager"),
        ("vllm.entrypoints.openai.tool_parsers", "ToolParserManager"),
    ),
    "reasoning_parser": (("vllm.reasoning", "ReasoningParserManager"),),
}
# Attributes in which managers of parsers store the names, in releases without `list_registered`.
_REGISTERED = ("tool_parsers", "reasoning_parsers")


def lists(modules: Modules) -> Dict[str, List[str]]:
    """Return the lists of names in the release. Each list is sorted."""
    found = {}
    for key, places in _LISTS.items():
        for module_name, name in places:
            names = _strings(_get(modules, module_name, name))
            if names:
                found[key] = sorted(set(names))
                break
    return found


def _get(modules: Modules, module_name: str, name: str) -> Any:
    value = modules.value(module_name, name)
    return None if value is UNBOUND or is_absent(value) else value


def _strings(holder: Any) -> List[str]:
    """Return the names in a list, a dictionary, an enum, a Literal, or a manager of parsers."""
    if isinstance(holder, enum.EnumMeta):
        return [str(member.name) for member in holder]  # type: ignore[var-annotated]
    if hasattr(holder, "list_registered"):
        holder = holder.list_registered()
    for attribute in _REGISTERED:
        holder = getattr(holder, attribute, None) or holder
    if not isinstance(holder, (list, tuple, set, frozenset, dict)):
        holder = typing.get_args(holder)
    return [name for name in holder if isinstance(name, str)]


def classes(modules: Modules, flags: List[Dict[str, Any]]) -> Tuple[Dict[str, Any], Dict[str, Any]]:
    """
    Return the fields of each dataclass that a JSON flag fills, and the enums of these fields.

    Both results are {class: ...}. Fields have the form of `document.fields`, and enums are
    {member: value}. Classes of nested fields are included. If a class is not a dataclass in this
    release, its value is None.
    """
    words = [re.match(r"(?:optional\[)?json:(\w+)", flag.get("type", "")) for flag in flags]
    names = [word.group(1) for word in words if word]
    found: Dict[str, Any] = {}
    enums: Dict[str, Any] = {}
    # The flag of SpeculativeConfig accepts any JSON, which is later put into this class.
    for name in dict.fromkeys([*names, "SpeculativeConfig"]):
        _add(_class(modules, name), name, found, enums)
    return found, enums


def _class(modules: Modules, name: str) -> Any:
    for module_name in ("vllm.config", "vllm.engine.arg_utils"):
        found = _get(modules, module_name, name)
        if found is not None:
            return found
    return None


def _add(cls: Any, name: str, found: Dict[str, Any], enums: Dict[str, Any]) -> None:
    if name in found or name in enums or is_absent(cls):
        return
    if isinstance(cls, enum.EnumMeta):
        enums[name] = {member.name: document.to_json_types(member.value) for member in cls}  # type: ignore[var-annotated]
        return
    dataclass = isinstance(cls, type) and dataclasses.is_dataclass(cls)
    found[name] = document.fields(cls) if dataclass else None
    for field in dataclasses.fields(cls) if dataclass else ():
        for inner in document.inner_types(field.type):
            if isinstance(inner, enum.EnumMeta) or dataclasses.is_dataclass(inner):
                _add(inner, inner.__name__, found, enums)
