"""The schema of one release's `vllm serve`: flags, JSON fields, environment variables. Pure.

Contract: a schema comes from that release's own source (`extract`), and its names are exact. An
option that is not in `Schema.by_option` is not accepted, even if argparse would accept it as an
abbreviation. The package has the schemas of the releases in `versions()`. For any other release,
gpufleet raises an error; it never uses the nearest release instead. To use another release, run
`gpufleet flags extract`, and load its output with `from_document`.

The packaged file is JSON with one release per line, so only one line is parsed to load a release.
If two releases have the same flags, the line of one has only the name of the other.
"""

from __future__ import annotations

import json
import lzma
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, cached_property
from pathlib import Path
from typing import Any

from gpufleet.errors import FleetError, answer_fault

FORMAT = 1
"""
Version of the format of the document that `extract` writes.

It is increased when a key is removed or gets a different meaning.
"""

TITLES = {"vllm": "vLLM", "sglang": "SGLang"}
"""The names of engines in messages, by package name."""

UNKNOWN = "unknown"
"""The version of a release that states no version, for example a checkout that was not built."""

_DATA = Path(__file__).with_name("data")
_LIMITS_KEYS = {"class", "type", "needs"}  # all other keys are pydantic's names of bounds


class FlagKind(StrEnum):
    """How a flag uses its arguments."""

    VALUE = "value"  # one value, or `nargs` values; if given several times, the last one counts
    APPEND = "append"  # collects a value each time it is given
    SWITCH = "store_true"  # has no value and cannot be switched off
    PAIR = "bool_pair"  # has no value; `negations` switch it off


@dataclass(frozen=True, slots=True)
class Computed:
    """
    A default that is not a plain value. `how` is one of:

    - "object": an instance of the dataclass `what`, with the defaults of that class.
    - "factory": code creates the value each time.
    - "runtime": only a process that imports torch can compute the value.
    - "suppress": if the flag is not given, the parser sets no value.
    - "unset": there is no default, so the field must be given.
    """

    how: str
    what: str | None = None


@dataclass(frozen=True, slots=True)
class ValueType:
    """
    The conversion of a flag's text to a value.

    `base` is the parser's name for the type: "str", "int", "float", "bool", "json", "json_or_str",
    "human_readable_int" (1k, 2M), "human_readable_int_or_auto", "nullable_str", ... With "custom",
    vLLM's own code converts the text, and the schema does not describe how. If `optional` is set,
    the text `None` is a null value; in most releases, the empty text is as well. `json_class` is
    the dataclass in `Schema.classes` that describes the JSON value.
    """

    base: str
    optional: bool = False
    json_class: str | None = None

    @property
    def is_json(self) -> bool:
        """Return whether the text is JSON. Such a value can also be given as `--flag.key VALUE`."""
        return self.base in {"json", "json_or_str", "from_cli", "from_json"}


@dataclass(frozen=True, slots=True)
class Limits:
    """
    Limits of a flag's value that vLLM checks at start, not in its parser.

    `owner` is the config class that has a field for the value. `type` is the type of this field if
    the type lists the accepted names. `needs` is the dest of the switch without which vLLM does not
    create this config.
    """

    owner: str
    constraints: Mapping[str, float] = field(default_factory=dict)  # ge, gt, le, lt, multiple_of
    type: str | None = None
    needs: str | None = None


@dataclass(frozen=True, slots=True)
class Flag:
    """
    One flag of `vllm serve`, or its positional argument.

    `name` is the long form that help prints ("--max-model-len"), or the dest of the positional
    argument. The parser refuses values outside `choices`. `suggested` has values that help prints,
    but that the parser does not enforce. None in `choices` means that the text `None` is accepted.
    `hidden` has the option strings that the parser accepts, but help does not print.
    """

    name: str
    dest: str
    group: str  # the title under which help prints the flag
    kind: FlagKind
    type: ValueType | None  # None: the text itself is the value
    default: Any
    aliases: tuple[str, ...] = ()
    negations: tuple[str, ...] = ()
    hidden: tuple[str, ...] = ()
    choices: tuple[Any, ...] | None = None
    suggested: tuple[Any, ...] = ()
    nargs: str | int | None = None  # as in argparse: "+", "*", "?" or a number; None means one
    const: Any = None  # the value if nargs is "?" and the flag has no value
    action: str | None = None  # the class of the argparse action, if it is vLLM's own
    deprecated: bool = False
    help_hidden: bool = False  # accepted, but help does not print the flag
    positional: bool = False
    help: str = ""
    limits: Limits | None = None
    required: bool = False

    @property
    def options(self) -> tuple[str, ...]:
        """All option strings of this flag, the name first."""
        if self.positional:
            return ()
        return tuple(dict.fromkeys((self.name, *self.aliases, *self.negations, *self.hidden)))

    @property
    def takes_value(self) -> bool:
        """Return whether the flag takes a value."""
        return self.kind in {FlagKind.VALUE, FlagKind.APPEND}

    def negates(self, option: str) -> bool:
        """Return whether `option` switches the flag off."""
        return option in self.negations


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a dataclass for the JSON of a flag. `type` is in Python's notation."""

    name: str
    type: str
    default: Any
    constraints: Mapping[str, float] = field(default_factory=dict)  # ge, gt, le, lt, multiple_of
    init: bool = True  # False: vLLM sets the field itself, and refuses it in JSON


@dataclass(frozen=True, slots=True)
class Variable:
    """
    One environment variable that vLLM reads.

    `type` and `declared` come from vLLM's table of variables. `default` is the value if the
    variable is not set. If vLLM fails on text that is not an integer, number or JSON, `form` is
    "integer", "number" or "json". If vLLM accepts any text, `form` is None. `also` has other
    variables that vLLM reads for the same setting.
    """

    name: str
    type: str | None
    default: Any
    choices: tuple[str, ...] | None = None
    ignore_case: bool = False  # whether case is ignored in `choices`
    form: str | None = None
    also: tuple[str, ...] = ()
    declared: str | None = None


@dataclass(frozen=True, slots=True)
class Syntax:
    """
    How a release rewrites the arguments before argparse parses them:

    - `underscores`: options may have underscores instead of dashes.
    - `dotted`: `--x.key v` is JSON for `--x`. `dotted_short`: this also applies to short options.
    - `dotted_lists`: `--x.key+ a,b` is a list.
    - `dotted_suffixes`: 1k is a number in dotted options. `json_suffixes`: 1k is a number in whole
      JSON values.
    - `model` and `model_equals`: whether `--model X` and `--model=X` are "moved" to the front,
      "refused", or "plain" flags.
    - `model_first`: --served-model-name is refused unless the model comes first.
    - `optimization`: the option that replaces -O3.
    - `leading_model`: the option that is put before a model at the beginning.
    """

    underscores: bool = True
    dotted: bool = False
    dotted_short: bool = False
    dotted_lists: bool = False
    dotted_suffixes: bool = False
    json_suffixes: bool = False
    model: str = "plain"
    model_equals: str = "plain"
    model_first: bool = False
    optimization: str | None = None
    leading_model: str | None = None


@dataclass(frozen=True)
class Schema:
    """
    Everything that `vllm serve` of one release accepts.

    `classes` maps each JSON dataclass, including nested ones, to its fields by name, or to None if
    the release accepts any JSON for it. `enums` maps the enums of these fields to their members and
    values. `values` has the lists against which vLLM checks values only after parsing, so they are
    not in `choices`: "quantization", "quantization_deprecated", "quantization_online",
    "attention_backend", "load_format", "tool_call_parser" and "reasoning_parser", as far as the
    release has them. `unresolved` lists code that the extractor could not run. A schema with such
    code may be incomplete. `unresolved` is empty in all packaged schemas.
    """

    version: str
    flags: tuple[Flag, ...]
    syntax: Syntax
    classes: Mapping[str, Mapping[str, Field] | None]
    enums: Mapping[str, Mapping[str, Any]]
    values: Mapping[str, tuple[str, ...]]
    environment: Mapping[str, Variable]
    unresolved: tuple[str, ...] = ()

    @cached_property
    def by_option(self) -> Mapping[str, Flag]:
        """Return the flag of every accepted option string, in the release's exact spelling."""
        return {option: flag for flag in self.flags for option in flag.options}

    @cached_property
    def by_dest(self) -> Mapping[str, Flag]:
        """Return every flag, by the attribute in which the parser stores its value."""
        return {flag.dest: flag for flag in self.flags}

    @property
    def positional(self) -> Flag | None:
        """
        Return the positional argument for the model.

        None for releases before 0.5.0, which do not have `vllm serve`.
        """
        return next((flag for flag in self.flags if flag.positional), None)

    def listed_values(self, flag: Flag) -> frozenset[str]:
        """
        Return the values that a flag accepts in this release, as far as the release lists them.
        """
        taken: Iterable[Any] = flag.choices or self.values.get(flag.dest, ()) or flag.suggested
        return frozenset("None" if value is None else str(value) for value in taken)

    def flag(self, option: str) -> Flag | None:
        """Return the flag with the exact name `option`. Underscores count as dashes, as in vLLM."""
        if option.startswith("--"):
            option = "--" + option[2:].replace("_", "-")
        return self.by_option.get(option)


def versions() -> tuple[str, ...]:
    """Return the releases of vLLM whose schemas are in the package, oldest first."""
    return tuple(_packaged("schemas"))


def documents() -> Mapping[str, str]:
    """
    Return every packaged release's document as JSON text, oldest first, for searches.

    Releases with the same flags share one document. Its "vllm" is the first of these releases.
    """
    return _packaged("schemas")


@cache
def load(version: str) -> Schema:
    """
    Return the packaged schema of one release.

    A leading "v" and a build suffix ("+cpu", "+cu129") are ignored, because all builds of a release
    have the same parser. "0.33" means 0.33.0. Raises `FleetError` if the release is not in the
    package. The message then has the nearest releases.
    """
    release = release_name(version)
    return from_document({**json.loads(packaged_text("schemas", release)), "vllm": release})


def from_document(document: Mapping[str, Any], engine: str = "vllm") -> Schema:
    """
    Return the schema of a release of `engine` from a document of `extract`.

    Raises `FleetError` if the document is invalid, or has a different format.
    """
    if not isinstance(document, Mapping) or document.get("schema", FORMAT) != FORMAT:
        raise FleetError(
            "this version of gpufleet cannot read this flag schema, because the schema has a "
            "different format: extract the flags again with `gpufleet flags extract`"
        )
    try:
        return Schema(
            version=document[engine] or UNKNOWN,
            flags=tuple(_flag(entry) for entry in document["flags"]),
            syntax=Syntax(**document.get("syntax", {})),
            classes={
                name: None if fields is None else {key: _field(key, fields[key]) for key in fields}
                for name, fields in document["classes"].items()
            },
            enums=document.get("enums", {}),
            values={name: tuple(values) for name, values in document["values"].items()},
            unresolved=tuple(document.get("unresolved", ())),
            environment={name: _variable(name, entry) for name, entry in document["env"].items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FleetError(
            f"this is not a schema of {TITLES[engine]}'s flags ({answer_fault(error)}): extract "
            "the flags again with `gpufleet flags extract`"
        ) from error


def _flag(entry: Mapping[str, Any]) -> Flag:
    choices = entry.get("choices")
    return Flag(
        name=entry["name"],
        dest=entry["dest"],
        group=entry["group"] or "",
        kind=FlagKind(entry["kind"]),
        type=_type(entry.get("type")),
        default=_default(entry["default"]),
        aliases=tuple(entry.get("aliases", ())),
        negations=tuple(entry.get("negations", ())),
        hidden=tuple(entry.get("hidden", ())),
        choices=None if choices is None else tuple(choices),
        suggested=tuple(entry.get("suggested", ())),
        nargs=entry.get("nargs"),
        const=entry.get("const"),
        action=entry.get("action"),
        deprecated=entry.get("deprecated", False),
        help_hidden=entry.get("help_hidden", False),
        positional=entry.get("positional", False),
        help=entry.get("help", ""),
        limits=_limits(entry.get("limits")),
        required=entry.get("required", False),
    )


def _limits(entry: Mapping[str, Any] | None) -> Limits | None:
    if entry is None:
        return None
    return Limits(
        owner=entry["class"],
        constraints={name: entry[name] for name in entry if name not in _LIMITS_KEYS},
        type=entry.get("type"),
        needs=entry.get("needs"),
    )


def _type(text: str | None) -> ValueType | None:
    """Parse the extractor's notation of a type, such as `int` or `optional[json:PoolerConfig]`."""
    if text is None:
        return None
    optional = text.startswith("optional[")
    base, _, json_class = text.removeprefix("optional[").removesuffix("]").partition(":")
    return ValueType(base, optional, json_class or None)


def _field(name: str, entry: Mapping[str, Any]) -> Field:
    return Field(
        name=name,
        type=entry["type"],
        default=_default(entry["default"]),
        constraints=entry.get("constraints", {}),
        init=entry.get("init", True),
    )


def _variable(name: str, entry: Mapping[str, Any]) -> Variable:
    choices = entry.get("choices")
    return Variable(
        name=name,
        type=entry["type"],
        default=_default(entry["default"]),
        choices=None if choices is None else tuple(choices),
        ignore_case=entry.get("ignore_case", False),
        form=entry.get("form"),
        also=tuple(entry.get("also", ())),
        declared=entry.get("declared"),
    )


def _default(value: Any) -> Any:
    """Return a default. A value like {"$object": "X"} becomes a `Computed`."""
    if isinstance(value, dict) and len(value) == 1:
        key, what = next(iter(value.items()))
        if key.startswith("$"):
            return Computed(key[1:], what if isinstance(what, str) else None)
    return value


def _packaged(name: str) -> Mapping[str, str]:
    return read_packed(_DATA / f"{name}.json.xz")


@cache
def read_packed(path: Path) -> Mapping[str, str]:
    """Return every release's part of a packaged file as unparsed text, oldest release first."""
    text = lzma.decompress(path.read_bytes()).decode()
    parts = (line.partition(":") for line in text.splitlines()[1:-1])  # between the braces
    found = {json.loads(version): part.removesuffix(",") for version, _, part in parts}
    return {
        version: found[json.loads(part)] if part.startswith('"') else part
        for version, part in found.items()
    }


def packaged_releases(name: str) -> tuple[str, ...]:
    """Return the releases in a packaged file."""
    return tuple(_packaged(name))


def packaged_part(name: str, version: str) -> str | None:
    """Return one release's part of a packaged file as unparsed text, or None if it is missing."""
    return _packaged(name).get(release_name(version))


def packaged_text(name: str, version: str) -> str:
    """
    Return one release's part of the packaged file `name` ("schemas", "metrics") as unparsed text.

    Raises `FleetError` if the release is not in the file. The message then has the nearest
    releases.
    """
    part = packaged_part(name, version)
    if part is not None:
        return part
    release = release_name(version)
    known = versions()
    extract = "extract its flags with `gpufleet flags extract SOURCE`"
    if not release[:1].isdigit():
        raise FleetError(
            f"vLLM {version}: this is not the number of a release, for example {known[-1]}. If "
            f"it is a different build, {extract}"
        )
    older = [one for one in known if sort_key(one) < sort_key(release)][-1:]
    newer = [one for one in known if sort_key(one) > sort_key(release)][:1]
    near = f"{' and '.join(older + newer)} {'are' if older and newer else 'is'} the nearest known"
    raise FleetError(
        f"vLLM {version}: gpufleet does not know this release ({near}), and does not guess its "
        f"flags from other releases: {extract}"
    )


def release_name(version: str) -> str:
    """Return the release of a build: `v0.33` and `0.33.0+cpu` are builds of 0.33.0."""
    release = version.strip().removeprefix("v").partition("+")[0]
    return f"{release}.0" if re.fullmatch(r"\d+\.\d+", release) else release


def sort_key(version: str) -> tuple[int, ...]:
    """
    Return a key that sorts releases of vLLM by publication.

    >>> sort_key("0.5.3.post1") > sort_key("0.5.3")
    True
    """
    return tuple(int(number) for number in re.findall(r"\d{1,9}", version))
