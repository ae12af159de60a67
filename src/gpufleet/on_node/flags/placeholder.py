"""RUNS ON THE NODE: provide placeholders for packages that are not imported.

Code that is run only for one value still uses torch, transformers and other packages as base
classes, in annotations, as decorators and in defaults. A placeholder accepts every such use and
returns a placeholder, so that the surrounding code runs. If a result has a placeholder, the value
needs the package.
"""

from __future__ import annotations

import abc
import types
from typing import Any


class TruthTests:
    """
    A counter of truth tests of placeholders. After such a test, code may take a wrong branch.
    """

    count = 0


class AbsentType(abc.ABCMeta):
    """
    The type of placeholders. Placeholders are classes, so that they can be bases and annotations.
    """

    def __new__(mcls, name: str, bases: Any, space: Any, **_options: Any) -> Any:
        return super().__new__(mcls, name, bases, space)  # for example msgspec.Struct takes options

    def __init__(cls, name: str, bases: Any, space: Any, **_options: Any) -> None:
        super().__init__(name, bases, space)

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(name)
        return make_placeholder(cls.__qualname__ + "." + name)

    def __call__(cls, *args: Any, **kwargs: Any) -> Any:
        if not is_absent(cls):  # a class of the release whose base is a placeholder
            return super().__call__(*args, **kwargs)
        decorates = (
            len(args) == 1 and not kwargs and isinstance(args[0], (type, types.FunctionType))
        )
        return args[0] if decorates else make_placeholder(cls.__qualname__ + "()")

    def __instancecheck__(cls, instance: Any) -> bool:
        return not is_absent(cls) and super().__instancecheck__(instance)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return not is_absent(cls) and super().__subclasscheck__(subclass)

    def __getitem__(cls, item: Any) -> Any:
        return cls

    def __enter__(cls) -> Any:
        return cls

    def __exit__(cls, *raised: Any) -> None:
        return None

    def __iter__(cls) -> Any:
        return iter(())

    def __format__(cls, spec: str) -> str:
        return cls.__qualname__

    def __len__(cls) -> int:
        return 0

    def __bool__(cls) -> bool:
        TruthTests.count += 1
        return False

    def __index__(cls) -> int:
        return 0

    __int__ = __index__

    def _no(cls, _other: Any) -> bool:
        TruthTests.count += 1
        return False

    __contains__ = __lt__ = __le__ = __gt__ = __ge__ = _no

    def _itself(cls, *_others: Any) -> Any:
        return cls

    __add__ = __radd__ = __sub__ = __rsub__ = __mul__ = __rmul__ = __truediv__ = _itself
    __mod__ = __lshift__ = __and__ = __rand__ = __neg__ = _itself


def make_placeholder(name: str) -> Any:
    """Return a placeholder for `name`, which is a path with dots."""
    return AbsentType(
        name.rpartition(".")[2] or "absent",
        (),
        {"_is_absent": True, "__qualname__": name, "__module__": "absent"},
    )


def is_absent(thing: Any) -> bool:
    """Return whether `thing` is a placeholder."""
    return type(thing) is AbsentType and "_is_absent" in vars(thing)
