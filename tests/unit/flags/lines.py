"""Command lines to compare our verdict with the real parser's on: every flag, right and wrong.

`generated` makes them out of a release's schema, `written` reads those that people write: the
lines of guides, recipes and container files from several years, composed for this file.
"""

from __future__ import annotations

import json
import random
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from gpufleet.flags.schema import Field, Flag, Schema

MODEL = "org/model"
_FILE = Path(__file__).with_name("command_lines.txt")

# By the parser's word for a type: a text that is right, and texts that are wrong or at the edge.
_TEXTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "int": ("2", ("two", "1.5", "1k", "", "None", " 7 ", "1_000", "-1")),
    "float": ("0.5", ("half", "", "None", "1e-2", "-0.5", "nan")),
    "str": ("text", ("", "None", "-", "two words")),
    "json": ('{"a": 1}', ("a=1", "{'a': 1}", '{"a": 1', "3", "", "None", "[1]")),
    "json_or_str": ('{"a": 1}', ("text", '{"a": 1', '{"a": 1}}', "", "3")),
    "human_readable_int": ("8k", ("8K", "1.5k", "1.5K", "8x", "eight", "", "None", "-1", "2M")),
    "human_readable_int_or_auto": ("32k", ("auto", "AUTO", "-1", "1.5K", "many", "", "None")),
    "lower_underscored": ("auto", ("AUTO", "flash-infer", "")),
    "custom": ("0,1", ("GPU-1234", "", "0")),
}
_OTHER = ("text", ("", "None"))


def written() -> list[list[str]]:
    """Return the command lines of `command_lines.txt`, without `vllm serve` and comments."""
    text = _FILE.read_text("utf-8").replace("\\\n", " ")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [shlex.split(line.removeprefix("vllm serve ")) for line in lines]


def generated(schema: Schema) -> list[list[str]]:
    """Return every flag of a release used right and wrong, each in a command line of its own."""
    lines = [
        [MODEL, *arguments]
        for flag in schema.flags
        if not flag.positional and flag.name != "--config"
        for arguments in _of_flag(schema, flag)
    ]
    return [json.loads(line) for line in dict.fromkeys(json.dumps(line) for line in lines)]


def combined(lines: Sequence[Sequence[str]], count: int = 1500, seed: int = 32) -> list[list[str]]:
    """Return command lines made of several others, with the model anywhere, and odd words."""
    chosen = random.Random(seed)
    parts = [list(line[1:]) for line in lines if line[:1] == [MODEL]]
    odd = [shlex.split(words) for words in _ODD]
    found = []
    for _ in range(count):
        several = chosen.choices(parts, k=chosen.randint(1, 4))
        if chosen.random() < 0.3:
            several.insert(chosen.randint(0, len(several)), chosen.choice(odd))
        if chosen.random() < 0.8:
            place = 0 if chosen.random() < 0.7 else chosen.randint(0, len(several))
            several.insert(place, [MODEL])
        found.append([word for part in several for word in part])
    return found


_ODD = (
    "--",
    "-",
    "stray",
    "-5",
    "-x",
    "--model m",
    "--model=m",
    "-O3",
    "-O 2",
    "--served-model-name a b",
    "-tp4",
    "-q awq",
    "-qawq",
    "-n2",
    "-tp.x 1",
    "--no",
    "'two words'",
    "'-two words'",
)


def _of_flag(schema: Schema, flag: Flag) -> Iterator[list[str]]:
    if not flag.takes_value:
        yield from _of_switch(flag)
        return
    right, others = _texts(flag)
    for option in flag.options:
        yield [option, right]
        yield [f"{option}={right}"]
    yield [flag.name.replace("-", "_").replace("__", "--", 1), right]
    yield [flag.name]
    yield [flag.name, "--port", "8000"]
    yield [flag.name, right, "left-over"]
    yield [flag.name[:-1], right]
    yield [flag.name + "s", right]
    yield ["--no-" + flag.name[2:]]
    for text in others:
        yield [flag.name, text]
        yield [f"{flag.name}={text}"]
    if flag.nargs in {"+", "*"}:
        yield [flag.name, right, right]
        yield [flag.name, right, "no-such-thing"]
    if flag.type is not None and flag.type.is_json:
        yield [f"{flag.name}.key", "1"]
        yield [f"{flag.name}.key"]
    if flag.type is not None and flag.type.json_class:
        yield from _of_json(schema, flag, flag.type.json_class)


def _texts(flag: Flag) -> tuple[str, tuple[str, ...]]:
    base = flag.type.base if flag.type is not None else "none"
    right, others = _TEXTS.get(base, _OTHER)
    if flag.type is not None and flag.type.json_class:
        right = "{}"
    if flag.choices is not None:
        right = next(str(choice) for choice in flag.choices if choice is not None)
        others = ("no-such-choice", right.upper(), "None", "")
    if flag.action == "LoRAParserAction":
        others = (
            "name=/path",
            '{"name": "a", "path": "/b"}',
            '{"name": "a", "path": "/b", "base_model_name": "c"}',
            '{"name": "a", "path": "/b", "rank": 8}',
            '{"name": "a"}',
            "[1]",
            "name",
            "a=1,b=2",
            "",
        )
        right = "name=/path"
    return right, others


def _of_switch(flag: Flag) -> Iterator[list[str]]:
    for option in flag.options:
        yield [option]
    stem = flag.name[2:]
    yield [flag.name.replace("-", "_").replace("__", "--", 1)]
    for word in ("true", "True", "false", "1", ""):
        yield [f"{flag.name}={word}"]
    yield [flag.name, "true"]
    yield ["--no-" + stem]
    yield ["--disable-" + stem.removeprefix("enable-")]
    yield ["--enable-" + stem.removeprefix("disable-")]
    yield ["--no_" + stem.replace("-", "_")]
    yield [flag.name[:-1]]


_BY_TYPE: tuple[tuple[str, tuple[Any, ...]], ...] = (
    ("bool", (True, "yes", 1, "maybe", 2, None)),
    ("int", (3, "3", 3.0, 3.5, "three", True, None, -1, 0, 300)),
    ("float", (0.5, "0.5", 3, "half", None)),
    ("str", ("text", 3, True, None, ["a"])),
    ("list", ([], [1], ["a"], [1.5], "text", 3, None)),
    ("dict", ({}, {"a": 1}, {"a": "b"}, [], "text", None)),
)


def _of_json(schema: Schema, flag: Flag, json_class: str) -> Iterator[list[str]]:
    for name, field in (schema.classes.get(json_class) or {}).items():
        for value in _values(schema, field):
            yield [flag.name, json.dumps({name: value})]
        yield [f"{flag.name}.{name}", "1"]
        yield [f"{flag.name}.{name.replace('_', '-')}", "text"]
    yield [flag.name, '{"no_such_key": 1}']
    yield [flag.name, "[]"]
    yield [flag.name, "null"]


def _values(schema: Schema, field: Field) -> Iterator[Any]:
    if "Literal[" in field.type:
        first = field.type.split("Literal[")[1].split(",")[0].rstrip("]").strip("'")
        yield int(first) if first.isdigit() else first
        yield first.upper()
        yield "no-such-choice"
        yield None
        return
    for name, members in schema.enums.items():
        if name in field.type:
            yield from (next(iter(members)), next(iter(members)).lower(), "NO_SUCH", 0, 3, None)
            yield {"full_attention": next(iter(members))}
            return
    for name, inner in schema.classes.items():
        if name in field.type and inner:
            yield from ({}, {"no_such_key": 1}, "text", None)
            for key in list(inner)[:4]:
                yield {key: True}
                yield {key: "text"}
            return
    for start, values in _BY_TYPE:
        if field.type.startswith(start):
            yield from values
            return
    yield from ("text", 3, None)
