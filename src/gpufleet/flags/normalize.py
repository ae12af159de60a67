"""Normalize the arguments of `vllm serve` like vLLM's parser before argparse. Pure.

Contract: the rewriting follows the rules of the release (`schema.Syntax`), and every word records
the indexes of its original arguments. The module never raises for an operator's mistakes. The
arguments that the release refuses are in `Rewritten.unparsed`. The file of `--config` is not read,
because it is on the node. Flags in this file are therefore not checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from gpufleet.flags.schema import Flag, Syntax

# The option's name: everything between the dashes and the first dot (vLLM's own pattern).
_NAME = re.compile(r"(?<=--)[^.]*")
_SERVED_NAME = re.compile(r"--served[-_]model[-_]name(=.+|$)")
_LEVELS = {"0", "1", "2", "3"}  # levels of optimization: `-O 3` is rewritten, `-O decode` is not
_DIGITS = 290  # maximum digits of a number, so that a float can hold it (1.8e308)
_DEEP = 50  # maximum levels of nested keys; no config of any release has more than 5
_SUFFIXED = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


class UnparsedReason(StrEnum):
    """The reason why an argument could not be parsed."""

    UNKNOWN = "unknown"  # an option that the release does not have
    PREFIX = "prefix"  # an abbreviation of one option; a later release may have several
    AMBIGUOUS = "ambiguous-prefix"  # an abbreviation of several options
    NO_VALUE = "no-value"  # an option without its value
    SURPLUS_VALUE = "surplus-value"  # a value for an option that has no value
    STRAY = "stray"  # a word that belongs to no option
    MODEL = "model"  # the model is missing, given twice, or in a wrong place
    HELP = "help"  # the release prints its help and exits


@dataclass(frozen=True, slots=True)
class Unparsed:
    """
    One argument that the release's parser refuses, or accepts only as an abbreviation.

    `argument` is the argument as typed. `at` has the argv indexes that a correction replaces.
    `values` has the following words that were taken as values of the argument. `candidates` has the
    options that start with the argument. `found` is a sentence without a full stop.
    """

    trouble: UnparsedReason
    argument: str
    at: tuple[int, ...]
    found: str
    values: tuple[str, ...] = ()
    candidates: tuple[str, ...] = ()
    flag: Flag | None = None


@dataclass(frozen=True, slots=True)
class Dotted:
    """One `--config.key value`: the path of keys, the JSON value, and the indexes in argv."""

    path: tuple[str, ...]
    value: Any
    at: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class ArgvWord:
    """One argument for argparse, and its indexes in the original argv."""

    text: str
    at: tuple[int, ...]
    dotted: tuple[Dotted, ...] = ()  # if this word combines several dotted options


@dataclass(frozen=True, slots=True)
class Rewritten:
    """The words for argparse, and the arguments that the release refuses before argparse."""

    words: tuple[ArgvWord, ...]
    unparsed: tuple[Unparsed, ...]


def rewrite(argv: Sequence[str], syntax: Syntax) -> Rewritten:
    """Return `argv`, the arguments of `vllm serve`, in the form that argparse gets."""
    words = [ArgvWord(text, (at,)) for at, text in enumerate(argv)]
    unparsed: list[Unparsed] = []
    words = _with_named_model(words, syntax)
    words = _with_model_in_front(words, syntax, unparsed)
    words = list(_with_dashes(words, syntax))
    if syntax.dotted:
        words = _gathered(words, syntax, unparsed)
    return Rewritten(tuple(words), tuple(unparsed))


def _with_named_model(words: list[ArgvWord], syntax: Syntax) -> list[ArgvWord]:
    """
    Insert the model option before a model at the beginning, if the release has such an option.

    Source: sglang/cli/serve.py.
    """
    if syntax.leading_model is None or not words or words[0].text.startswith("-"):
        return words
    return [ArgvWord(syntax.leading_model, words[0].at), *words]


def _with_model_in_front(
    words: list[ArgvWord], syntax: Syntax, unparsed: list[Unparsed]
) -> list[ArgvWord]:
    """
    Treat the first `--model` as the release does.

    Depending on the release, its value is moved to the front, or it is refused or kept.
    """

    def treatment(text: str) -> str:
        if text == "--model":
            return syntax.model
        return syntax.model_equals if re.match("--model=.", text) else "plain"

    for index, word in enumerate(words):
        how = treatment(word.text)
        if how == "refused":
            unparsed.append(
                Unparsed(
                    UnparsedReason.MODEL,
                    word.text,
                    word.at,
                    "this release expects the model as the first argument, and refuses `--model`",
                    values=tuple(after.text for after in words[index + 1 : index + 2]),
                )
            )
            break
        if how == "moved":
            rest = words[index + 1 :]
            _, given, model = word.text.partition("=")
            if given:
                words = [ArgvWord(model, word.at), *words[:index], *rest]
            elif rest:
                moved = ArgvWord(rest[0].text, word.at + rest[0].at)
                words = [moved, *words[:index], *rest[1:]]
            else:
                unparsed.append(
                    Unparsed(UnparsedReason.NO_VALUE, word.text, word.at, "`--model` has no value")
                )
                words = words[:index]
            break
    if syntax.model_first and words and words[0].text.startswith("-"):
        config = any(re.match("--config(=.+|$)", word.text) for word in words)
        named = next((word for word in words if _SERVED_NAME.match(word.text)), None)
        if named and not config:
            unparsed.append(
                Unparsed(
                    UnparsedReason.MODEL,
                    named.text,
                    named.at,
                    "this release refuses `--served-model-name` unless the model comes first",
                )
            )
    return words


def _with_dashes(words: list[ArgvWord], syntax: Syntax) -> Iterable[ArgvWord]:
    """Yield the words. In options, replace underscores by dashes, and -O3 by the option for it."""
    level = syntax.optimization
    for index, word in enumerate(words):
        text = word.text
        short = level is not None and text.startswith("-O")
        following = words[index + 1].text if index + 1 < len(words) else None
        if text.startswith("--") and syntax.underscores:
            name, equals, value = text.partition("=")
            name = _NAME.sub(lambda match: match[0].replace("_", "-"), name, count=1)
            yield ArgvWord(name + equals + value, word.at)
        elif short and text == "-O" and following in _LEVELS:
            yield ArgvWord(str(level), word.at)
        elif short and text != "-O" and not (level == "-O.level" and text[2] == "."):
            value = text[3:] if text[2] == "=" else text[2:]
            if level == "-O.level":
                yield ArgvWord(f"-O.level={value}", word.at)
            else:
                yield ArgvWord(str(level), word.at)
                yield ArgvWord(value, word.at)
        else:
            yield word


def _gathered(words: list[ArgvWord], syntax: Syntax, unparsed: list[Unparsed]) -> list[ArgvWord]:
    """
    Move the dotted options to the end, combined to one option with JSON for each name.

    For vLLM, a dotted option is every word that begins with dashes and has a dot before any equals
    sign. If short options can be dotted as well, a single dash is enough, so negative numbers such
    as -0.5 are dotted options.
    """
    kept: list[ArgvWord] = []
    gathered: dict[str, tuple[dict[str, Any], list[Dotted]]] = {}
    left = iter(words)
    for word in left:
        name, equals, text = word.text.partition("=")
        dash = "-" if syntax.dotted_short else "--"
        if not (name.startswith(dash) and "." in name):
            kept.append(word)
            continue
        at = word.at
        if not equals:
            value_word = next(left, None)
            if value_word is None:
                found = f"`{word.text}` has no value"
                unparsed.append(Unparsed(UnparsedReason.NO_VALUE, word.text, at, found))
                break
            text, at = value_word.text, at + value_word.at
        several = syntax.dotted_lists and name.endswith("+")
        value = text.split(",") if several else _json_value(text, syntax)
        option, *path = name.removesuffix("+" if several else "").split(".")
        if len(path) > _DEEP:
            found = (
                f"`{option}` has {len(path)} nested keys, which is more than the {_DEEP} that "
                "gpufleet reads"
            )
            unparsed.append(Unparsed(UnparsedReason.NO_VALUE, name, at, found))
            continue
        whole, parts = gathered.setdefault(option, ({}, []))
        _merge(whole, _nested(path, value))
        parts.append(Dotted(tuple(path), value, at))
    for option, (whole, parts) in gathered.items():
        places = tuple(place for part in parts for place in part.at)
        kept += [ArgvWord(option, places, tuple(parts)), ArgvWord(json.dumps(whole), places)]
    return kept


def _json_value(text: str, syntax: Syntax) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        number = human_readable(text) if syntax.dotted_suffixes else None
        return text if number is None else number


def human_readable(text: str) -> int | None:
    """
    Return the number for a text such as 25.6k (powers of 1000) or 2M (powers of 1024).

    None if the text is not a number for vLLM. For example, vLLM does not accept 1.5K.

    >>> human_readable("1k"), human_readable("1K"), human_readable("1.5K")
    (1000, 1024, None)
    """
    if len(text) > _DIGITS:
        return None
    match = _SUFFIXED.fullmatch(text.strip())
    if match is None:
        try:
            return int(text)
        except ValueError:
            return None
    digits, suffix = match.groups()
    if suffix.islower():
        return int(float(digits) * 1000 ** _POWERS[suffix])
    return int(digits) * 1024 ** _POWERS[suffix.lower()] if digits.isdigit() else None


def _nested(path: Sequence[str], value: Any) -> dict[str, Any]:
    nested = value
    for key in reversed(path):
        nested = {key: nested}
    return dict(nested)


def _merge(whole: dict[str, Any], update: Mapping[str, Any]) -> None:
    for key, value in update.items():
        there = whole.get(key)
        if isinstance(value, dict) and isinstance(there, dict):
            _merge(there, value)
        elif isinstance(value, list) and isinstance(there, list):
            there += value
        else:
            whole[key] = value
