"""Dataclasses that are made in a third of the time, for what every command loads.  Pure.

`dataclasses.dataclass` compiles six functions for a frozen class, which takes 0.5 ms, and a plan
loads 150 such classes: a sixth of the time until it answers. Here only `__init__` is compiled; the
others are the same for all classes. What comes of it is a dataclass in every respect: its fields,
`replace`, `asdict`, equality, hash, text, and the refusal to change. Whatever asks for more than
`@dataclass` or `@dataclass(frozen=True)` is left to the standard library.
"""

from __future__ import annotations

import dataclasses
from operator import attrgetter
from reprlib import recursive_repr
from typing import TYPE_CHECKING, Any

__all__ = ["dataclass"]

_METHODS = ("__delattr__", "__eq__", "__hash__", "__init__", "__repr__", "__setattr__")
"""Methods that we make; a class that brings one itself is the standard library's."""

_PSEUDO_FIELDS = ("ClassVar", "InitVar", "KW_ONLY")


def _made(cls: type, frozen: bool) -> type:
    """Make a class a dataclass."""
    if not _is_plain(cls):
        return dataclasses.dataclass(frozen=frozen)(cls)
    cls.__doc__ = cls.__doc__ or cls.__name__  # else the standard library works out a signature
    dataclasses.dataclass(init=False, repr=False, eq=False)(cls)
    params: Any = vars(cls)["__dataclass_params__"]
    params.init = params.repr = params.eq = True
    params.frozen = frozen
    fields = dataclasses.fields(cls)
    methods = {
        "__init__": _init(fields, frozen, hasattr(cls, "__post_init__")),
        "__repr__": _repr([field.name for field in fields if field.repr]),
        "__eq__": _eq([field.name for field in fields if field.compare]),
        "__hash__": None,
    }
    if frozen:
        hashed = [field for field in fields if field.hash or (field.hash is None and field.compare)]
        methods["__hash__"] = _hash([field.name for field in hashed])
        methods |= _frozen(cls, frozenset(field.name for field in fields))
    for name, method in methods.items():
        if method is not None:
            method.__qualname__ = f"{cls.__qualname__}.{name}"
            method.__module__ = cls.__module__
        setattr(cls, name, method)
    return cls


def _is_plain(cls: type) -> bool:
    """Say whether a class has fields of its own alone, each of which `__init__` takes by place."""
    own = vars(cls)
    types: dict[str, Any] = own.get("__annotations__", {})
    given = [own[name] for name in types if isinstance(own.get(name), dataclasses.Field)]
    return (
        not any(dataclasses.is_dataclass(base) for base in cls.__mro__[1:])
        and not any(name in own for name in _METHODS)
        and not any(word in str(type_) for type_ in types.values() for word in _PSEUDO_FIELDS)
        and all(field.init and field.kw_only in {False, dataclasses.MISSING} for field in given)
    )


def _init(fields: tuple[dataclasses.Field[Any], ...], frozen: bool, post_init: bool) -> Any:
    """Return `__init__`; compiled, for it is called a hundred thousand times in a large plan."""
    scope: dict[str, Any] = {"_missing": dataclasses.MISSING, "_set": object.__setattr__}
    taken, body = ["self"], []
    for number, field in enumerate(fields):
        name, value = field.name, field.name
        if field.default is not dataclasses.MISSING:
            scope[f"_default_{number}"] = field.default
            taken.append(f"{name}=_default_{number}")
        elif field.default_factory is not dataclasses.MISSING:
            scope[f"_factory_{number}"] = field.default_factory
            taken.append(f"{name}=_missing")
            value = f"_factory_{number}() if {name} is _missing else {name}"
        else:
            taken.append(name)
        body.append(f"_set(self, {name!r}, {value})" if frozen else f"self.{name} = {value}")
    body += ["self.__post_init__()"] if post_init else []
    source = f"def __init__({', '.join(taken)}):\n " + "\n ".join(body or ["pass"])
    exec(source, scope)  # noqa: S102  # of the names of a class of ours, as the standard library does
    init = scope["__init__"]
    init.__annotations__ = {**{field.name: field.type for field in fields}, "return": None}
    return init


def _repr(names: list[str]) -> Any:
    def __repr__(self: Any) -> str:  # noqa: N807
        shown = ", ".join(f"{name}={getattr(self, name)!r}" for name in names)
        return f"{type(self).__qualname__}({shown})"

    return recursive_repr()(__repr__)


def _values(names: list[str]) -> Any:
    """Return what gives the values of an object's attributes, as a tuple."""
    if len(names) > 1:
        return attrgetter(*names)
    return lambda each: tuple(getattr(each, name) for name in names)


def _eq(names: list[str]) -> Any:
    values = _values(names)

    def __eq__(self: Any, other: object) -> Any:  # noqa: N807
        return (
            values(self) == values(other) if other.__class__ is self.__class__ else NotImplemented
        )

    return __eq__


def _hash(names: list[str]) -> Any:
    values = _values(names)

    def __hash__(self: Any) -> int:  # noqa: N807
        return hash(values(self))

    return __hash__


def _frozen(cls: Any, names: frozenset[str]) -> dict[str, Any]:
    def __setattr__(self: Any, name: str, value: Any) -> None:  # noqa: N807
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot assign to field {name!r}")
        super(cls, self).__setattr__(name, value)

    def __delattr__(self: Any, name: str) -> None:  # noqa: N807
        if type(self) is cls or name in names:
            raise dataclasses.FrozenInstanceError(f"cannot delete field {name!r}")
        super(cls, self).__delattr__(name)

    return {"__setattr__": __setattr__, "__delattr__": __delattr__}


if TYPE_CHECKING:  # what type checkers know of dataclasses hangs on this name
    from dataclasses import dataclass
else:

    def dataclass(cls: type | None = None, /, **options: Any) -> Any:
        """Make a class a dataclass; takes the options of `dataclasses.dataclass`."""
        if options.keys() - {"frozen"}:
            return dataclasses.dataclass(cls, **options)
        frozen = options.get("frozen", False)
        return _made(cls, frozen) if cls else lambda cls: _made(cls, frozen)
