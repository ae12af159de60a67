"""Check that a JSON value fits the dataclass of its flag, by the rules of pydantic. Pure.

Contract: the fields and their types are those of the release (`Schema.classes`). Values are
converted to types as in pydantic's lax mode (tested with pydantic 2): "3", 3.0 and true are whole
numbers, "yes" is true, and 3 is not a text. An unknown key is refused. A type that gpufleet does
not know accepts every value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from gpufleet.flags.json_rules import broken_rules, quantization_keys, quantization_names
from gpufleet.flags.schema import Computed, Field, Schema

_TRUE = {"1", "true", "t", "yes", "y", "on"}
_FALSE = {"0", "false", "f", "no", "n", "off"}
_FAR = 12  # maximum number of keys or values in a message

# vLLM normalizes fields of this type before it compares them with a Literal.
_UNDERSCORED = "lower_underscored"


@dataclass(frozen=True, slots=True)
class JsonFault:
    """
    One mismatch between a JSON value and its class.

    `found` contains the key, unless the whole value is wrong.
    """

    found: str
    better: str | None = None  # the whole corrected JSON
    since: str | None = None  # the first release that is known to refuse it
    replacement: str | None = None


@dataclass(frozen=True, slots=True)
class _Type:
    """A type in Python's notation, as a name with arguments. The name "|" means alternatives."""

    name: str
    arguments: tuple[Any, ...] = ()


def type_faults(schema: Schema, json_class: str, value: Any) -> tuple[JsonFault, ...]:
    """Return the mismatches between a JSON value and the class `json_class`."""
    return tuple(_Judge(schema).dataclass(json_class, value, ""))


def field_faults(schema: Schema, field: Field, value: Any, where: str) -> tuple[JsonFault, ...]:
    """
    Return the mismatches between a value and one field.

    `where` is the field's name in messages.
    """
    judge = _Judge(schema)
    return (*judge.type(_parsed(field.type), value, where), *judge.limits(field, value, where))


class _Judge:
    def __init__(self, schema: Schema) -> None:
        self._schema = schema

    def dataclass(self, name: str, value: Any, where: str) -> Iterator[JsonFault]:
        fields = self._schema.classes.get(name)
        if name in _FROM_TEXT and isinstance(value, str):
            yield from _FROM_TEXT[name](self._schema, value, where)
            return
        if fields is None:
            return
        if not isinstance(value, dict) or name == "QuantKey":
            what = f"`{where}` is" if where else "it is"
            yield JsonFault(f"{what} {_spoken(value)}, but must be a JSON object")
            return
        wrong = False
        looked_up = 0
        for key, item in value.items():
            path = f"{where}.{key}" if where else key
            field = fields.get(key)
            if field is None or not field.init or key.startswith("_"):
                wrong = True
                looked_up += 1
                if looked_up > _FAR:  # similar keys of more keys would not help the reader
                    yield JsonFault(f"`{path}` is not a key of this JSON object")
                else:
                    yield self._no_such_key(name, path, key, fields)
                continue
            for fault in self._field(name, field, item, path):
                wrong = True
                yield fault
        for field in fields.values():
            if field.name not in value and field.init and _required(field):
                wrong = True
                path = f"{where}.{field.name}" if where else field.name
                yield JsonFault(f"`{path}` is missing")
        if not wrong:  # vLLM checks rules between fields only if every field is valid
            for sentence in broken_rules(name, self._schema.version, _filled(fields, value)):
                yield JsonFault(f"`{where}`: {sentence}" if where else sentence)

    def _no_such_key(
        self, owner: str, path: str, key: str, fields: Mapping[str, Field]
    ) -> JsonFault:
        from gpufleet.flags import json_keys  # only where there is a problem: it is slow

        was = json_keys.removal_of(owner, key.replace("-", "_"), self._schema.version)
        if was is None:
            return JsonFault(_no_such_key(path, key, fields))
        return JsonFault(
            f"`{path}` was removed: vLLM {was.last} is the last release known to have this key",
            since=was.since,
            replacement=was.replacement,
        )

    def _field(self, owner: str, field: Field, value: Any, where: str) -> Iterator[JsonFault]:
        if value is None and _may_be_null(owner, field):
            return
        kind = _parsed(field.type)
        if isinstance(value, str):
            flag = self._schema.by_dest.get(field.name)
            if flag is not None and flag.type is not None and flag.type.base == _UNDERSCORED:
                value = value.lower().replace("-", "_")
            if owner == "AttentionConfig" and field.name == "backend" and value.lower() == "auto":
                return
            if owner == "IrOpPriorityConfig":
                value = value.split(",")
        if owner == "QuantizationConfigArgs" and field.name == "targets" and value:
            for key, item in value.items() if isinstance(value, dict) else ():
                if isinstance(item, str):
                    yield from _quant_spec(self._schema, item, f"{where}[{key}].targets")
        yield from self.type(kind, value, where)
        yield from self.limits(field, value, where)

    def limits(self, field: Field, value: Any, where: str) -> Iterator[JsonFault]:
        """Yield a fault for each limit of the field that a number exceeds or does not reach."""
        number = _number(value)
        if number is None:
            return
        for name, limit in field.constraints.items():
            if name in _LIMITS and not _LIMITS[name][0](number, limit):
                share = (
                    (", because it is a share between 0 and 1, for example 0.9")
                    if _is_share(field)
                    else ""
                )
                must = f"{_LIMITS[name][1]} {limit}{share}"
                yield JsonFault(f"`{where}` is {value}; it must be {must}")

    def type(self, kind: _Type, value: Any, where: str) -> Iterator[JsonFault]:
        """Yield the mismatches between a value and a type."""
        if kind.name == "|":
            faults = []
            for alternative in kind.arguments:
                found = tuple(self.type(alternative, value, where))
                if not found:
                    return
                faults.append((alternative, found))
            for alternative, found in faults:  # faults in keys are clearer than the type
                if isinstance(value, dict) and alternative.name in self._schema.classes:
                    yield from found
                    return
            yield self._misfit(kind, value, where)
        elif kind.name in self._schema.classes:
            yield from self.dataclass(kind.name, value, where)
        elif kind.name in self._schema.enums:
            if not _is_member(self._schema.enums[kind.name], value):
                yield JsonFault(_no_member(where, value, list(self._schema.enums[kind.name])))
        elif kind.name == "Literal":
            if not any(value == choice for choice in kind.arguments):
                yield JsonFault(_no_member(where, value, [str(each) for each in kind.arguments]))
        elif kind.name in _CONTAINERS:
            yield from self._container(kind, value, where)
        elif kind.name in _PLAIN and not _PLAIN[kind.name](value):
            yield self._misfit(kind, value, where)

    def _container(self, kind: _Type, value: Any, where: str) -> Iterator[JsonFault]:
        if not isinstance(value, dict if kind.name == "dict" else list):
            yield self._misfit(kind, value, where)
        elif isinstance(value, dict):
            if len(kind.arguments) == 2:
                for key, item in value.items():
                    yield from self.type(kind.arguments[1], item, f"{where}.{key}")
        elif kind.name == "tuple" and kind.arguments and kind.arguments[-1].name != "...":
            if len(value) != len(kind.arguments):
                found = f"`{where}` has {len(value)} items; it must have {len(kind.arguments)}"
                yield JsonFault(found)
            for at, (item, each) in enumerate(zip(value, kind.arguments, strict=False)):
                yield from self.type(each, item, f"{where}[{at}]")
        elif kind.arguments:
            for at, item in enumerate(value):
                yield from self.type(kind.arguments[0], item, f"{where}[{at}]")

    def _misfit(self, kind: _Type, value: Any, where: str) -> JsonFault:
        return JsonFault(f"`{where}` is {_spoken(value)}; it must be {_described(kind)}")


# -- sentences -------------------------------------------------------------------------------------


def _no_such_key(path: str, key: str, fields: Mapping[str, Field]) -> str:
    known = [name for name, field in fields.items() if field.init and not name.startswith("_")]
    from difflib import get_close_matches  # seldom needed, and slow to load

    near = get_close_matches(key.replace("-", "_"), known, n=2, cutoff=0.7)
    if near:
        hint = f"; a similar key is {' or '.join(near)}"
    elif len(known) <= _FAR:
        hint = f"; the keys are {', '.join(known)}"
    else:
        hint = ""
    return f"`{path}` is not a key of this JSON object{hint}"


def _no_member(where: str, value: Any, names: list[str]) -> str:
    found = f"`{where}` is {_spoken(value)}"
    if len(names) <= _FAR:
        return f"{found}: choose from {', '.join(names)}"
    from difflib import get_close_matches  # seldom needed, and slow to load

    near = get_close_matches(str(value).lower(), [name.lower() for name in names], n=3)
    shown = [name for name in names if name.lower() in near]
    return f"{found}, which is not one of the {len(names)} accepted values" + (
        f"; a similar value is {' or '.join(shown)}"
        if shown
        else f": {', '.join(names[:_FAR])}, ..."
    )


def _spoken(value: Any) -> str:
    if isinstance(value, str):
        return f'"{value}"'
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    if isinstance(value, dict):
        return "an object"
    return "a list" if isinstance(value, list) else str(value)


_NAMES = {
    "int": "a whole number",
    "float": "a number",
    "bool": "true or false",
    "str": "a text",
    "Path": "a path",
    "None": "null",
    "dict": "an object",
    "list": "a list",
    "set": "a list",
    "tuple": "a list",
}


def _described(kind: _Type) -> str:
    if kind.name == "|":
        return " or ".join(_described(each) for each in kind.arguments)
    if kind.name == "Literal":
        return f"one of {', '.join(str(each) for each in kind.arguments[:_FAR])}"
    return _NAMES.get(kind.name, kind.name)


# -- types -----------------------------------------------------------------------------------------


def _is_int(value: Any) -> bool:
    if isinstance(value, str):
        text = value.strip()
        whole, dot, rest = text.partition(".")
        if dot and (not rest or rest.strip("0")):
            return False
        try:
            int(whole)
        except ValueError:
            return False
        return True
    return isinstance(value, bool | int) or (isinstance(value, float) and value.is_integer())


def _number(value: Any) -> float | None:
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return None
    try:
        return float(value) if isinstance(value, bool | int | float) else None
    except OverflowError:  # a whole number of more than 308 digits
        return float("inf") if value > 0 else float("-inf")


def _is_bool(value: Any) -> bool:
    if isinstance(value, str):
        return value.lower() in _TRUE | _FALSE
    return isinstance(value, bool | int | float) and value in {0, 1}


_PLAIN: Mapping[str, Callable[[Any], bool]] = {
    "int": _is_int,
    "float": lambda value: _number(value) is not None,
    "bool": _is_bool,
    "str": lambda value: isinstance(value, str),
    "Path": lambda value: isinstance(value, str),
    "None": lambda value: value is None,
}
_CONTAINERS = {"dict", "list", "set", "tuple"}


def _is_share(field: Field) -> bool:
    """Return whether a field is a share: a number from 0 to 1."""
    least = field.constraints.get("gt", field.constraints.get("ge"))
    return field.type != "int" and least == 0 and field.constraints.get("le") == 1


_LIMITS: Mapping[str, tuple[Callable[[float, float], bool], str]] = {
    "gt": (lambda number, limit: number > limit, "more than"),
    "ge": (lambda number, limit: number >= limit, "at least"),
    "lt": (lambda number, limit: number < limit, "less than"),
    "le": (lambda number, limit: number <= limit, "at most"),
    "multiple_of": (lambda number, limit: number % limit == 0, "a multiple of"),
}

# Fields that may be null until vLLM fills them, even if their type does not allow null
# (_skip_none_validation).
_DELAYED: Mapping[str, frozenset[str]] = {
    "CompilationConfig": frozenset(
        {
            "level",
            "mode",
            "cudagraph_mode",
            "max_cudagraph_capture_size",
            "use_inductor_graph_partition",
            "ir_enable_torch_wrap",
        }
    ),
    "KernelConfig": frozenset(
        {"enable_flashinfer_autotune", "enable_cutedsl_warmup", "enable_jit_warmup"}
    ),
}


def _may_be_null(owner: str, field: Field) -> bool:
    if owner == "PassConfig":
        return field.name != "eliminate_noops"
    return field.name in _DELAYED.get(owner, ())


def _is_member(members: Mapping[str, Any], value: Any) -> bool:
    """
    Return whether a value is a member of an enum.

    A text is compared with the values of the members if all values are plain texts. Otherwise it is
    compared with the names of the members, ignoring case. A number is compared with the members'
    numbers.
    """
    numbers = [each for each in members.values() if isinstance(each, int)]
    if isinstance(value, str):
        texts = [each for each in members.values() if isinstance(each, str)]
        by_value = len(texts) == len(members) and not any("." in each for each in texts)
        return value in texts if by_value else value.upper() in members
    if len(numbers) == len(members):  # for an IntEnum, values become whole numbers first
        return _is_int(value) and int(value) in numbers
    return isinstance(value, int) and value in numbers


def _quant_spec(schema: Schema, text: str, where: str) -> Iterator[JsonFault]:
    """Yield a fault if a text is neither a quantization method nor a name of a number format."""
    online = schema.values.get("quantization_online", ())
    names = quantization_names(online, where.rpartition(".")[2], schema.version)
    if text not in names:
        yield JsonFault(_no_member(where, text, list(names)))


def _quant_key(schema: Schema, text: str, where: str) -> Iterator[JsonFault]:
    names = quantization_keys(schema.version)
    if text not in names:
        yield JsonFault(_no_member(where, text, list(names)))


_FROM_TEXT: Mapping[str, Callable[[Schema, str, str], Iterator[JsonFault]]] = {
    "QuantSpec": _quant_spec,
    "QuantKey": _quant_key,
}


def _required(field: Field) -> bool:
    return isinstance(field.default, Computed) and field.default.how == "unset"


def _filled(fields: Mapping[str, Field], value: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of all fields: given values, and defaults that are not computed."""
    plain = {
        name: field.default
        for name, field in fields.items()
        if not isinstance(field.default, Computed)
    }
    return {**plain, **value}


@cache
def _parsed(text: str) -> _Type:
    alternatives = [_single(part) for part in _split(text, "|")]
    return alternatives[0] if len(alternatives) == 1 else _Type("|", tuple(alternatives))


def _single(text: str) -> _Type:
    name, bracket, rest = text.partition("[")
    if not bracket:
        return _Type(name)
    inner = _split(rest.removesuffix("]"), ",")
    if name == "Literal":
        return _Type(name, tuple(_literal(part) for part in inner))
    return _Type(name, tuple(_parsed(part) for part in inner))


def _literal(text: str) -> Any:
    if text[:1] in {"'", '"'}:
        return text[1:-1]
    return {"None": None, "True": True, "False": False}.get(text, _int_or(text))


def _int_or(text: str) -> Any:
    return int(text) if text.lstrip("-").isdigit() else text


def _split(text: str, at: str) -> list[str]:
    """Split a text at a character outside brackets and quotes."""
    parts, depth, quote, start = [], 0, "", 0
    for index, character in enumerate(text):
        if quote:
            quote = "" if character == quote else quote
        elif character in "'\"":
            quote = character
        elif character in "[(":
            depth += 1
        elif character in "])":
            depth -= 1
        elif character == at and depth == 0:
            parts.append(text[start:index].strip())
            start = index + 1
    return [*parts, text[start:].strip()]
