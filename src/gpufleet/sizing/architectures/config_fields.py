"""
Read values of a parsed `config.json`.  Pure.

Missing and invalid values raise errors with messages.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gpufleet.errors import FleetError

_MOST = 10_000
_COUNTED = {
    "altup_num_inputs",
    "mtp_num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_hidden_layers",
    "num_layers",
    "num_nextn_predict_layers",
}
"""
Keys whose value is a number of layers or similar objects to build. The values are limited, so that
a typing mistake does not fill the memory.
"""


class ImpossibleError(ValueError):
    """A value that no model can have, with a message for operators."""


class Fields:
    """
    One part of a config, with its name for messages.

    The `keys` of each method are the key and its names in older checkpoints. The value of the first
    key that is not null is used. If no key has a value and there is no `default`, `whole` raises a
    `FleetError` with the first key.
    """

    def __init__(self, config: Mapping[str, Any], name: str, path: str = "") -> None:
        self.config = config
        self.name = name
        self.path = path

    def value(self, *keys: str) -> Any:
        """Return the first key's value that is not null, or None."""
        for key in keys:
            if (found := self.config.get(key)) is not None:
                return found
        return None

    def whole(self, *keys: str, default: int | None = None) -> int:
        """Return a non-negative whole number."""
        found = self.value(*keys)
        if found is None:
            if default is None:
                raise self.missing_error(*keys)
            return default
        if isinstance(found, bool) or not isinstance(found, int) or found < 0:
            raise FleetError(
                f"config.json of {self.name}: `{self.path}{keys[0]}` is {found!r}, but must be a "
                "whole number: use the publisher's original file"
            )
        if found > _MOST and keys[0] in _COUNTED:
            raise FleetError(
                f"config.json of {self.name}: `{self.path}{keys[0]}` is {found}, which is above "
                f"the maximum of {_MOST}: use the publisher's original file"
            )
        return found

    def number(self, *keys: str, default: float) -> float:
        """Return a number."""
        found = self.value(*keys)
        if found is None:
            return default
        if isinstance(found, bool) or not isinstance(found, int | float):
            raise FleetError(
                f"config.json of {self.name}: `{self.path}{keys[0]}` is {found!r}, but must "
                "be a number: use the publisher's original file"
            )
        return found

    def flag(self, *keys: str, default: bool = False) -> bool:
        """Return a true or false value."""
        found = self.value(*keys)
        return default if found is None else bool(found)

    def text(self, *keys: str, default: str = "") -> str:
        """Return a text."""
        found = self.value(*keys)
        return default if found is None else str(found)

    def texts(self, *keys: str) -> tuple[str, ...]:
        """Return a list of texts, or () if there is none."""
        found = self.value(*keys)
        if isinstance(found, str) or not isinstance(found, Iterable):
            return ()
        return tuple(str(word) for word in found)

    def wholes(self, *keys: str) -> tuple[int, ...]:
        """Return a list of whole numbers, or () if there is none."""
        found = self.value(*keys)
        if isinstance(found, str | Mapping) or not isinstance(found, Iterable):
            return ()
        return tuple(int(number) for number in found)

    def section(self, *keys: str) -> Fields | None:
        """Return the first existing section of these keys (`text_config`), or None."""
        for key in keys:
            if isinstance(found := self.config.get(key), Mapping):
                return Fields(found, self.name, f"{self.path}{key}.")
        return None

    def missing_error(self, *keys: str) -> FleetError:
        """Return the error for a missing key."""
        others = f" (nor {', '.join(f'`{key}`' for key in keys[1:])})" if keys[1:] else ""
        return FleetError(
            f"config.json of {self.name} has no `{self.path}{keys[0]}`{others}, so gpufleet cannot "
            "compute the model's size: use the publisher's original file"
        )
