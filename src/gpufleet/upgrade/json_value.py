"""Convert the dataclasses of a journal to plain JSON and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import TypeAdapter


class JsonValue:
    """
    Base of the dataclasses that a journal stores.

    The keys of the JSON are the names of the fields. A field with a default may be missing, and an
    unknown key is ignored, so that journals of other releases stay readable.
    """

    def as_json(self) -> dict[str, Any]:
        """Return plain values for `json.dumps`."""
        found: dict[str, Any] = _adapter(type(self)).dump_python(self, mode="json")
        return found

    @classmethod
    def from_json(cls, said: Mapping[str, Any]) -> Self:
        """Parse `as_json`'s output. Raises `ValueError` for any other input."""
        found: Self = _adapter(cls).validate_python(said)
        return found


_adapters: dict[type[Any], TypeAdapter[Any]] = {}


def _adapter(cls: type[Any]) -> TypeAdapter[Any]:
    """Return a class' adapter from a cache: creating one takes a millisecond."""
    if cls not in _adapters:
        _adapters[cls] = TypeAdapter(cls)
    return _adapters[cls]
