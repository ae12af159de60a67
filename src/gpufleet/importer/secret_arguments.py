"""Remove keys and tokens from a command line. They are found by the names of flags and by their
form. Pure.
"""

from __future__ import annotations

import json
from typing import Any

from gpufleet import redact
from gpufleet.flags.schema import Flag, Schema
from gpufleet.importer.findings import Findings
from gpufleet.importer.flag_rules import FlagRules
from gpufleet.importer.placed import Placed


def without_secrets(line: Placed, rules: FlagRules, found: Findings) -> Placed:
    """Return a command line without secrets. Add a note about each secret, without its value."""
    gone: set[int] = set()
    at = 0
    while at < len(line.words):
        used = _secret_at(line, at, rules, found)
        gone |= used
        at = max(at, *used) + 1 if used else at + 1
    return line.without(gone)


def _secret_at(line: Placed, at: int, rules: FlagRules, found: Findings) -> set[int]:
    """
    Return the indices of all words of the secret that begins at this index. No secret: an empty
    set.
    """
    word = line.words[at]
    name, equals, value = word.partition("=") if word[:1] == "-" else (word, "", "")
    plain = name.lower().replace("_", "-")
    setting = rules.secrets.get(plain)
    place = line.places[at]
    if setting is not None or _hides(plain, rules.schema):
        values = _values_behind(line, at, rules.schema.flag(plain)) if not equals else ()
        texts = [value] if equals else [line.words[each] for each in values]
        for text in texts:
            found.drop_secret(f"`{name}`", text, setting, place)
        if not texts:
            found.say(f"`{name}` is dropped, because it has no value", at=place)
        return {at, *values}
    text = value if equals else word
    inner = tuple(redact.find_secrets(read_json(text)))
    if not inner and not redact.is_secret(text):
        return set()
    before = at - 1 if not equals and at and line.words[at - 1][:1] == "-" else None
    flag = name if equals else line.words[before] if before is not None else ""
    for each in inner or (text,):
        found.hide(each)
    what = f"`{flag}`" if flag else "JSON with a secret" if inner else "a key"
    found.drop_secret(what, inner[0] if inner else text, None, place)
    return {at} if before is None else {at, before}


def _values_behind(line: Placed, at: int, flag: Flag | None) -> tuple[int, ...]:
    """
    Return the indices of a flag's values. If the flag is unknown, all following words are its
    values.
    """
    most = 1 if flag is not None and flag.nargs is None else len(line.words)
    found = []
    for each in range(at + 1, len(line.words))[:most]:
        if line.words[each].startswith("-"):
            break
        found.append(each)
    return tuple(found)


def _hides(flag: str, schema: Schema) -> bool:
    """Return whether a flag is unknown or has a dot in its name, and its name suggests a secret."""
    known = flag in schema.by_option or flag.partition(".")[0] in schema.by_option
    if flag.startswith("--no-") or not flag.startswith("--"):
        return False
    return (not known or "." in flag) and redact.is_secret_name(flag)


def read_json(text: str) -> Any:
    """Return the value of a text that is JSON, or None for any other text."""
    if not text.lstrip().startswith(("{", "[")):
        return None
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None
