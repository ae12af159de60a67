"""RUNS ON THE NODE: provide a fake `msgspec`, because SGLang declares its arguments with msgspec.

The fake `Struct` keeps the fields, types and defaults, which the argument parser reads. It
validates nothing.
"""

from __future__ import annotations

import inspect
from typing import Any, Dict, List, NamedTuple, Tuple

from gpufleet.on_node.flags.fakes import Namespace

NODEFAULT: Any = object()


class FieldInfo(NamedTuple):
    """A field in the form of `msgspec.structs.fields`."""

    name: str
    type: Any
    default: Any = NODEFAULT
    default_factory: Any = NODEFAULT
    required: bool = False


class _Field(NamedTuple):
    """The result of `msgspec.field(...)`."""

    default: Any = NODEFAULT
    default_factory: Any = NODEFAULT
    name: Any = None


class Struct:
    """A class whose annotations are its fields."""

    _fields: Tuple[FieldInfo, ...] = ()

    def __init_subclass__(cls, **_options: Any) -> None:
        super().__init_subclass__()
        found: Dict[str, FieldInfo] = {one.name: one for one in cls._fields}
        for name, hint in inspect.get_annotations(cls).items():
            found[name] = _declared(name, hint, cls.__dict__.get(name, NODEFAULT))
        cls._fields = tuple(found.values())

    def __init__(self, *given: Any, **named: Any) -> None:
        values = {one.name: _made(one) for one in self._fields}
        values.update(zip(values, given))
        values.update(named)
        for name, value in values.items():
            object.__setattr__(self, name, value)


def _declared(name: str, hint: Any, default: Any) -> FieldInfo:
    if isinstance(default, _Field):
        return FieldInfo(name, hint, default.default, default.default_factory)
    if isinstance(default, (list, dict, set)):  # each struct gets its own copy
        return FieldInfo(name, hint, NODEFAULT, type(default))
    return FieldInfo(name, hint, default, NODEFAULT, default is NODEFAULT)


def _made(field: FieldInfo) -> Any:
    if field.default is not NODEFAULT:
        return field.default
    return None if field.default_factory is NODEFAULT else field.default_factory()


def fields(struct: Any) -> Tuple[FieldInfo, ...]:
    """Return the fields of a struct or of its class."""
    return tuple(struct._fields)


def defstruct(
    name: str,
    declared: List[Any],
    *,
    bases: Any = None,
    namespace: Any = None,
    **_options: Any,
) -> Any:
    """
    Return a struct class with these fields.

    A field is a name, a pair (name, type), or a triple (name, type, default).
    """
    space = dict(namespace or {})
    hints: Dict[str, Any] = {}
    for one in declared:
        field_name, hint, *default = (one, Any) if isinstance(one, str) else one
        hints[field_name] = hint
        space.pop(field_name, None)
        if default:
            space[field_name] = default[0]
    space["__annotations__"] = hints
    return type(name, bases or (Struct,), space)


def _asdict(struct: Any) -> Dict[str, Any]:
    return {one.name: getattr(struct, one.name) for one in fields(struct)}


STRUCTS = Namespace(
    "msgspec.structs", {"fields": fields, "asdict": _asdict, "FieldInfo": FieldInfo}
)

MSGSPEC: "dict[str, Any]" = {
    "msgspec.structs": STRUCTS,
    "msgspec": Namespace(
        "msgspec",
        {
            "NODEFAULT": NODEFAULT,
            "Struct": Struct,
            "defstruct": defstruct,
            "field": _Field,
            "structs": STRUCTS,
        },
    ),
}
"""The fake modules of msgspec, by name."""
