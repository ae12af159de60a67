"""RUNS ON THE NODE: convert vLLM's argument parser to plain JSON values (docs/configure/flags.md).

A value that JSON does not have becomes an object with one key: {"$object": CLASS},
{"$factory": true}, {"$runtime": NAME}, {"$suppress": true} or {"$unset": true}.
"""

# ruff: noqa: SLF001 - argparse has no public way to ask a parser what it accepts
from __future__ import annotations

import argparse
import dataclasses
import enum
import json
import re
import types
import typing
from typing import Any, Dict, Iterator, List, Optional

from gpufleet.on_node.flags.fakes import NOT_SET, FieldInfo
from gpufleet.on_node.flags.placeholder import is_absent

_KINDS = {"_StoreTrueAction": "store_true", "_AppendAction": "append"}
_PLAIN_ACTIONS = {*_KINDS, "_StoreAction", "BooleanOptionalAction", "EnableDisableAction"}
_DEPRECATED = re.compile(
    r"^\W*deprecated\b|\b(?:is|are|was) deprecated\b|has no effect, do not set", re.IGNORECASE
)


def document_flags(parser: argparse.ArgumentParser, help_texts: bool) -> List[Dict[str, Any]]:
    """Return all flags of `parser` and its positional argument, in the order of the help text."""
    groups = {
        id(action): group.title
        for group in parser._action_groups
        for action in group._group_actions
    }
    accepted: Dict[int, List[str]] = {}
    for option, action in parser._option_string_actions.items():
        accepted.setdefault(id(action), []).append(option)
    # Before Python 3.13, vLLM itself stores the list of deprecated flags.
    deprecated = {id(action) for action in getattr(parser, "_deprecated", ())}
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._HelpAction):
            continue
        entry = _flag(action, accepted.get(id(action), []), id(action) in deprecated)
        entry["group"] = groups.get(id(action))
        entry["default"] = to_json_types(action.default)
        if help_texts and _help(action):
            entry["help"] = _help(action).replace("%%", "%")
        found.append(entry)
    return found


def _help(action: argparse.Action) -> str:
    return action.help if action.help and action.help != argparse.SUPPRESS else ""


def _flag(action: argparse.Action, accepted: List[str], deprecated: bool) -> Dict[str, Any]:
    kind = type(action).__name__
    pair = isinstance(action, argparse.BooleanOptionalAction) or kind == "EnableDisableAction"
    off = _negations(action, accepted) if pair else set()
    long = [option for option in action.option_strings if option.startswith("--")]
    name = next((option for option in long if option not in off), (long or [action.dest])[0])
    entry: Dict[str, Any] = {
        "name": name,
        "dest": action.dest,
        "kind": "bool_pair" if pair else _KINDS.get(kind) or _other_kind(action),
        "aliases": [one for one in action.option_strings if one != name and one not in off],
        "negations": sorted(off),
        "hidden": sorted(set(accepted) - set(action.option_strings)),
        "positional": not action.option_strings,
        "action": None if kind in _PLAIN_ACTIONS else kind,
        "type": type_name(action.type),
        "choices": None if action.choices is None else to_json_types(list(action.choices)),
        "suggested": _suggested(action),
        "nargs": action.nargs or None,  # 0 means no value, which `kind` already says
        "const": to_json_types(action.const) if kind in ("_StoreAction", "StoreBoolean") else None,
        "deprecated": bool(
            deprecated
            or getattr(action, "deprecated", False)
            or "Deprecated" in kind
            or _DEPRECATED.search(_help(action)[:300])
        ),
        "help_hidden": action.help is argparse.SUPPRESS,
    }
    return {key: value for key, value in entry.items() if value not in (None, [], False)}


def _other_kind(action: argparse.Action) -> str:
    """
    Return the kind of a flag whose action is a class of the engine.

    If the action takes no value, the flag is a switch.
    """
    return "store_true" if action.nargs == 0 else "value"


def _negations(action: argparse.Action, accepted: List[str]) -> "set[str]":
    """
    Return the options that negate a flag.

    vLLM 0.33 has a list of them. argparse uses the prefix `--no-`.
    """
    known = getattr(action, "negative_option_strings", None)
    return set(known) if known is not None else {one for one in accepted if one.startswith("--no-")}


def _suggested(action: argparse.Action) -> List[Any]:
    """Return the values that the help shows but the parser does not enforce (Literal | str)."""
    shown = action.metavar
    if action.choices is not None or shown is None:
        return []
    if isinstance(shown, (list, tuple)):
        return list(to_json_types(shown))
    braced = re.match(r"\{([^}]*)\}", shown)
    return [value for value in braced.group(1).split(",") if value] if braced else []


def type_name(convert: Any) -> Optional[str]:
    """
    Return the schema's name for the type function of an argument.

    vLLM's functions are recognised by their names, and a wrapper by the function that it wraps.
    """
    if convert is None:
        return None
    if convert is json.loads:
        return "json"
    made_in = getattr(convert, "__qualname__", "")
    name = getattr(convert, "__name__", str(convert))
    if "optional_type" in made_in or "parse_type" in made_in:
        wrapped = next((one for one in _enclosed(convert) if callable(one)), str)
        inner = type_name(wrapped) or "str"
        return "optional[%s]" % inner if "optional_type" in made_in else inner
    if "parse_dataclass" in made_in:
        candidates = (*(convert.__defaults__ or ()), *_enclosed(convert))
        of = next((one.__name__ for one in candidates if isinstance(one, type)), None)
        return "json:" + of if of else "json"
    if made_in.endswith("union_dict_and_str"):
        return "json_or_str"
    if made_in.endswith("check_port"):
        return "port"
    if name == "<lambda>":
        return "lower_underscored" if _lowers(convert) else "custom"
    return str(name)


def _enclosed(function: Any) -> List[Any]:
    return [cell.cell_contents for cell in function.__closure__ or ()]


def _lowers(convert: Any) -> bool:
    """
    Return whether a function accepts `Flash-Attn` for `flash_attn`, as vLLM's types of backends do.
    """
    try:
        return bool(convert("Aa-Bb_c") == "aa_bb_c")
    except Exception:
        return False


def to_json_types(value: Any) -> Any:
    """Return `value` as JSON types. A value that JSON lacks becomes an object with one key."""
    if value is argparse.SUPPRESS:
        return {"$suppress": True}
    if value is NOT_SET or value is dataclasses.MISSING:
        return {"$unset": True}
    if is_absent(value):
        return {"$runtime": value.__qualname__}
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [to_json_types(one) for one in value]
    if isinstance(value, (set, frozenset)):
        return sorted((to_json_types(one) for one in value), key=str)
    if isinstance(value, dict):
        return {str(key): to_json_types(one) for key, one in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {"$object": type(value).__name__}
    return {"$runtime": getattr(value, "__qualname__", type(value).__name__)}


def fields(cls: Any) -> Dict[str, Any]:
    """
    Return the fields of a dataclass that is filled from JSON.

    Each field has its type, default, bounds and `init`.
    """
    found = {}
    for field in dataclasses.fields(cls):
        if field.name.startswith("_"):
            continue
        default, bounds = field.default, {}
        if isinstance(default, FieldInfo):
            bounds = default.bounds
            default = (
                {"$factory": True} if default.default_factory else to_json_types(default.default)
            )
        elif field.default_factory is not dataclasses.MISSING:
            try:
                default = to_json_types(field.default_factory())
            except Exception:  # the default depends on the machine
                default = {"$factory": True}
        entry: Dict[str, Any] = {
            "type": annotation_text(field.type),
            "default": to_json_types(default),
        }
        if bounds:
            entry["constraints"] = bounds
        if not field.init:
            entry["init"] = False
        found[field.name] = entry
    return found


def inner_types(hint: Any) -> Iterator[type]:
    """Yield the classes in an annotation, at any depth."""
    if isinstance(hint, type) and not typing.get_args(hint):
        yield hint
    for argument in typing.get_args(hint):
        yield from inner_types(argument)


def annotation_text(hint: Any) -> str:
    """Return an annotation as Python code, for example `Literal['a', 'b'] | None`."""
    if isinstance(hint, str):
        return hint
    if hint is type(None):
        return "None"
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return annotation_text(arguments[0])
    if origin is typing.Literal:
        return "Literal[%s]" % ", ".join(map(repr, arguments))
    if origin is typing.Union or origin is getattr(types, "UnionType", None):
        return " | ".join(map(annotation_text, arguments))
    if origin is None:
        return str(getattr(hint, "__name__", hint))
    inner = ("..." if argument is Ellipsis else annotation_text(argument) for argument in arguments)
    return "%s[%s]" % (getattr(origin, "__name__", origin), ", ".join(inner))
