"""
All settings by dotted key, for `gpufleet settings` and the reference page.  Pure.

In a key, `*` replaces a name that you choose (`serving.*.context`) or an item of a list
(`gateway.clients.*.name`). Descriptions, limits and defaults come from the classes of the settings.
For settings without a default, `data/examples.yml` has examples.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from gpufleet.errors import FleetError
from gpufleet.formatting import suggestion
from gpufleet.settings.node_settings import NodeSettings

_DATA = Path(__file__).with_name("data")

# The unit of a key, by the ending of its last part. The longest ending comes first.
_UNITS = (
    ("_seconds", "seconds"),
    ("_minutes", "minutes"),
    ("_days", "days"),
    ("_mib", "MiB"),
    ("_mbit", "Mbit/s"),
    ("_watts", "watts"),
    ("_percent", "percent"),
    ("_ratio", "ratio"),
    ("_penalty", "ratio"),
    ("_share", "fraction of one GPU"),
    ("_port", "TCP port"),
    ("_tokens", "tokens"),
    ("_parallel", "GPUs"),
    ("_requests", "requests"),
    ("_per_minute", "requests a minute"),
    ("_connections", "connections"),
    ("_releases", "releases"),
    ("_links", "NVLinks"),
    ("_width", "lanes"),
    ("_ports", "ports"),
    ("_major", "CUDA major"),
)
_UNITS_BY_NAME = {
    "canary": "groups",
    "concurrency": "requests",
    "connections": "connections",
    "context": "tokens",
    "Gpus.count": "GPUs",
    "HugePages.count": "pages of 2 MiB",
    "data_parallel": "engines",
    "failures": "groups",
    "gpu": "NVML index",
    "cosine": "ratio",
    "headroom": "ratio",
    "keep": "replicas",
    "min_p": "ratio",
    "per_server": "requests",
    "pipeline_parallel": "parts",
    "port": "TCP port",
    "ports": "TCP ports",
    "priority": "rank",
    "replicas": "replicas",
    "reserved": "NVML indices",
    "router_id": "number",
    "same": "ratio",
    "seconds": "seconds",
    "seed": "number",
    "temperature": "ratio",
    "top_k": "tokens",
    "top_p": "ratio",
    "waves": "groups or percent",
}
_NUMBERS = (int, float)


@dataclass(frozen=True)
class SettingEntry:
    """One setting, or a section of several."""

    key: str
    description: str
    type: str
    """The type in words. It is "section" for a key with settings below it."""
    unit: str
    """The unit of a number. It is "" for a number without a unit and for other types."""
    default: str
    """
    The default in YAML. "required" means that there is no default: if its section is set, the key
    must be set too.
    """
    example: str
    """A line of YAML. It is "" for a section."""
    choices: tuple[str, ...] = ()

    def as_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        return {**asdict(self), "choices": list(self.choices)}


@cache
def all_settings() -> Mapping[str, SettingEntry]:
    """Return every setting and section by its key, in the order of their declaration."""
    return {entry.key: entry for entry in _entries(NodeSettings, "")}


def find_settings(key: str) -> tuple[SettingEntry, ...]:
    """
    Return the setting of a key, or a section with all settings below it.

    In place of `*`, the key may have a name that you chose. If the key is unknown, raises
    `FleetError` with similar keys.
    """
    known = all_settings()
    wanted = _known_key(key.strip(".").split("."))
    if wanted is None:
        near = suggestion(key, list(known)) or suggestion(
            key.rpartition(".")[2], [each.rpartition(".")[2] for each in known]
        )
        raise FleetError(
            f"there is no setting {key!r}{near}; `gpufleet settings` lists the sections"
        )
    return tuple(
        entry for name, entry in known.items() if name == wanted or name.startswith(f"{wanted}.")
    )


@cache
def default_text(key: str) -> str | None:
    """
    Return a key's default in YAML, "required" if it has none, or None for an unknown key.

    >>> default_text("serving.qwen3-32b.port"), default_text("ssh_user")
    ('8000', None)
    """
    known = all_settings().get(_known_key(key.split(".")) or "")
    return known.default if known else None


def is_default(key: str, value: Any) -> bool:
    """Return whether a value is the default of this key's setting."""
    return default_text(key) == _yaml(value)


def _known_key(parts: list[str]) -> str | None:
    found = ""
    for part in parts:
        own, any_name = f"{found}.{part}".lstrip("."), f"{found}.*"
        named = next(
            (
                each
                for each in (own, any_name)
                for key in all_settings()
                if key == each or key.startswith(f"{each}.")
            ),
            None,
        )
        if named is None:
            return None
        found = named
    return found


def schema_text() -> str:
    """Return the shipped JSON Schema of group_vars and host_vars."""
    return (_DATA / "settings.schema.json").read_text(encoding="utf-8")


@cache
def _examples() -> Mapping[str, Any]:
    found: Mapping[str, Any] = yaml.safe_load((_DATA / "examples.yml").read_text(encoding="utf-8"))
    return found


def _entries(model: type[BaseModel], above: str) -> Iterator[SettingEntry]:
    for name, field in model.model_fields.items():
        key = f"{above}{name}"
        below = list(_models(field.annotation))
        section = below[0][0] if below else None
        yield SettingEntry(
            key=key,
            description=_description(section, field),
            type="section" if section else _type_text(field.annotation),
            unit="" if section else _unit(model, name, field),
            default=_default(field),
            example="" if section else _example(model, name, field),
            choices=tuple(map(str, _choices(field.annotation))),
        )
        for kind, way in below:
            yield from _entries(kind, f"{key}{way}.")


def _models(annotation: Any) -> Iterator[tuple[type[BaseModel], str]]:
    """
    Yield the settings classes inside a type. The suffix of a class's key is either empty or ".*".
    """
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation, ""
        return
    parts = get_args(annotation)
    origin = get_origin(annotation)
    if origin is Annotated:
        yield from _models(parts[0])
    elif origin in (Union, UnionType):
        for part in parts:
            yield from _models(part)
    elif origin in (dict, tuple, list) and parts:
        yield from ((kind, f".*{way}") for kind, way in _models(parts[1 if origin is dict else 0]))


def _description(section: type[BaseModel] | None, field: FieldInfo) -> str:
    """
    Return a setting's description.

    If a section has no description, or only one of null, the result begins with the text of its
    class.
    """
    own = field.description or ""
    about = (inspect.getdoc(section) or "").split("\n\n")[0] if section else ""
    if own and not own.startswith("null:"):
        return own
    return ". ".join(filter(None, (" ".join(about.split()).removesuffix("."), own)))


def _unit(model: type[BaseModel], name: str, field: FieldInfo) -> str:
    """Return the unit of a number, or "" if the setting is not a number or has no unit."""
    if not any(kind in _NUMBERS for kind in _scalars(field.annotation)):
        return ""
    for key in (f"{model.__name__}.{name}", name):
        if key in _UNITS_BY_NAME:
            return _UNITS_BY_NAME[key]
    return next((unit for end, unit in _UNITS if name.endswith(end)), "")


def _scalars(annotation: Any) -> Iterator[Any]:
    """Yield the scalar types inside a type. Mappings and literals have none."""
    origin = get_origin(annotation)
    if origin in (dict, Literal):
        return
    if parts := get_args(annotation):
        for part in parts[:1] if origin is Annotated else parts:
            yield from _scalars(part)
    else:
        yield annotation


def _choices(annotation: Any) -> tuple[Any, ...]:
    if get_origin(annotation) is Literal:
        return get_args(annotation)
    if get_origin(annotation) in (Union, UnionType, Annotated):
        return tuple(choice for part in get_args(annotation) for choice in _choices(part))
    return ()


_WORDS = {
    bool: "true or false",
    int: "whole number",
    float: "number",
    str: "text",
    NoneType: "null",
}


def _type_text(annotation: Any) -> str:
    """
    Return a type in words.

    >>> _type_text(tuple[str, ...] | None)
    'list of text, or null'
    """
    origin, parts = get_origin(annotation), get_args(annotation)
    if origin is Annotated:
        return _type_text(parts[0])
    if origin is Literal:
        return " or ".join(f"`{each}`" for each in parts)
    if origin in (Union, UnionType):
        return ", or ".join(dict.fromkeys(map(_type_text, parts)))
    if origin is dict:
        return "mapping"
    if origin in (tuple, list):
        plain = _type_text(parts[0])
        return f"list of {_PLURALS.get(plain, plain)}"
    return _WORDS.get(annotation, _spaced(getattr(annotation, "__name__", "value")))


_PLURALS = {"whole number": "whole numbers", "network": "networks"}


def _spaced(name: str) -> str:
    """Return the name of an address or date type in words, or "value" for other types."""
    return {
        "date": "date",
        "IPv4Network": "network, for example 10.0.0.0/16",
        "IPvAnyNetwork": "network",
        "IPvAnyAddress": "IP address",
    }.get(name, "value")


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return "{}"
    return _yaml(value)


def _example(model: type[BaseModel], name: str, field: FieldInfo) -> str:
    """
    Return a line of YAML with an example of a setting.

    The value is the one in `data/examples.yml`. If there is none, it is one of the setting's
    choices, the opposite of its default (true or false), or its default.
    """
    kinds = (each.__name__ for each in model.__mro__)
    written = next((found for kind in kinds if (found := _examples().get(f"{kind}.{name}"))), None)
    if written is None:
        choices = _choices(field.annotation)
        default = None if field.is_required() else field.get_default(call_default_factory=True)
        if choices:
            written = choices[-1] if choices[0] == default else choices[0]
        elif bool in _scalars(field.annotation):
            written = not default
        else:
            written = default
    return f"{name}: {_yaml(written)}"


def _yaml(value: Any) -> str:
    if value is None:
        return "null"
    plain = json.loads(json.dumps(value, default=str))
    line = yaml.safe_dump(plain, default_flow_style=True, width=10_000, sort_keys=False)
    return line.removesuffix("...\n").strip()
