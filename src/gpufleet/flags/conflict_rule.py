"""Define rules on flags that vLLM refuses together, and the flag values that rules read. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from gpufleet.flags.command_line import CommandLine
from gpufleet.flags.schema import Computed, Schema


class Settings:
    """The values of all flags on a command line, with the release's defaults for other flags."""

    def __init__(
        self,
        schema: Schema,
        line: CommandLine,
        values: Mapping[str, Any],
        environment: Mapping[str, str],
    ) -> None:
        """Create the settings. `values` has the given values by flag name, without invalid ones."""
        self.version = schema.version
        self.line = line
        self.environment = environment
        self.schema = schema
        self._values = values

    def has(self, *names: str) -> bool:
        """Return whether the command line gives one of the flags, whatever its value."""
        return any(name in self.line.by_name for name in names)

    def on(self, name: str) -> bool:
        """Return whether a switch is on."""
        return bool(self.value(name))

    def value(self, name: str) -> Any:
        """
        Return a flag's given value, or its default.

        None if the given value is invalid, if vLLM computes the default when it starts, or if the
        release does not have the flag.
        """
        if name in self._values:
            return self._values[name]
        flag = self.schema.flag(name)
        if flag is None or self.has(name) or isinstance(flag.default, Computed):
            return None
        return flag.default

    def number(self, name: str, otherwise: int = 1) -> int:
        """Return a flag's value if it is a whole number, else `otherwise`."""
        value = self.value(name)
        if isinstance(value, float) and value.is_integer():  # 0.8 parses some flags as floats
            return int(value)
        return value if isinstance(value, int) and not isinstance(value, bool) else otherwise

    def texts(self, name: str) -> list[str]:
        """Return the words of all uses of a flag."""
        return [text for use in self.line.by_name.get(name, ()) for text in use.values]

    def key(self, name: str, key: str) -> Any:
        """Return one member of a JSON flag's value, or None if it is missing."""
        value = self.value(name)
        if isinstance(value, str):  # 0.8.2 parses JSON of `--speculative-config` later
            with suppress(ValueError, RecursionError):
                value = json.loads(value)
        return value.get(key) if isinstance(value, dict) else None


@dataclass(frozen=True, slots=True)
class Conflict:
    """
    A rule on flags.

    `flags` has the flags of the rule. A problem lists those that are given. `broken` returns
    whether settings break the rule. `where` is the place in vLLM's source that raises the error.
    `leave_out` is the flag to remove from the command line. For a flag that may be given several
    times, `wrong` returns whether a single value breaks the rule.
    """

    flags: tuple[str, ...]
    since: str
    broken: Callable[[Settings], Any]
    sentence: str
    where: str
    until: str | None = None
    leave_out: str | None = None
    wrong: Callable[[str], bool] | None = None
