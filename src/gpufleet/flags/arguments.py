"""Convert an entry of `flags` in group_vars to command line arguments.  Pure."""

from __future__ import annotations

import json
from typing import Any


def words(name: str, value: Any) -> tuple[str, ...]:
    """
    Return a flag and its values as command line arguments.

    `name` is the flag without dashes. `value` is the value from YAML.

    >>> words("enable-lora", True), words("enable-lora", False), words("seed", None)
    (('--enable-lora',), ('--no-enable-lora',), ())
    >>> words("seed", -1), words("lora-modules", ["a=/a", "b=/b"])
    (('--seed=-1',), ('--lora-modules', 'a=/a', 'b=/b'))
    """
    if value is None:
        return ()
    if value is True:
        return (f"--{name}",)
    if value is False:
        return (f"--no-{name}",)  # vLLM also has --disable-...; all versions accept this form
    if isinstance(value, list):
        return (f"--{name}", *map(_word, value))
    word = _word(value)
    # As a separate word, a value with a leading dash would be parsed as the next flag.
    return (f"--{name}={word}",) if word.startswith("-") else (f"--{name}", word)


def _word(value: Any) -> str:
    """Return a value for the command line: a text as it is, any other value as compact JSON."""
    if isinstance(value, str):
        return value
    return json.dumps(value, separators=(",", ":"), sort_keys=True, ensure_ascii=False)
