"""Tells what a text is, and reads the servers out of it.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import yaml

from gpufleet.errors import FleetError
from gpufleet.importer import container, models_file, shell
from gpufleet.importer.server import Launch, Note

_HOW = (
    "give a list of models (`models:` with `command:` each), a compose file with a vLLM service, "
    "or a text with `vllm serve ...` or `docker run ... vllm/vllm-openai ...`"
)
_LONGEST = 1 << 18
"""Characters of a text: models, a compose file or a script of hundreds of servers have fewer."""
_MOST_VALUES = 100_000
"""Values of a YAML text once each alias is the value that it stands for."""


def read(text: str, file: str, name: str) -> tuple[tuple[Launch, ...], tuple[Note, ...]]:
    """
    Return the servers of a text, and notes about the text as a whole.

    `file` is for messages, `name` is what a server is called that has no name there. Raises
    `FleetError` where there is none.
    """
    if len(text) > _LONGEST:
        raise FleetError(
            f"{file}: has {len(text):,} characters, more than anything that starts vLLM: at most "
            f"{_LONGEST:,} are read; give the part with the servers"
        )
    try:
        launches, notes = _read(text, file, name)
    except FleetError as error:
        raise FleetError(*(f"{file}: {problem}" for problem in error.problems)) from None
    if not launches:
        raise FleetError(f"{file}: nothing in it starts vLLM; {_HOW}")
    return _named(launches), notes


def _read(text: str, file: str, name: str) -> tuple[tuple[Launch, ...], tuple[Note, ...]]:
    document = _document(text, file)
    notes: tuple[Note, ...] = ()
    if document is None:
        launches = shell.launches(text, name)
    elif "services" in document:
        launches, notes = container.from_compose(
            _expanded(document["services"]), shell.first_launch
        )
    else:
        shared = document.get("env", document.get("environment"))
        launches, notes = models_file.launches(document["models"], shared)
        notes += tuple(
            Note(f"`{key}` is dropped: it is no model")
            for key in document
            if key not in {"models", "env", "environment"}
        )
    return launches, notes


def _document(text: str, file: str) -> Mapping[str, Any] | None:
    """Return the text as YAML with `models` or `services`; None if it is none."""
    try:
        loaded = _load(text)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date or a number that is none
        if file.endswith((".yml", ".yaml")):
            raise FleetError(f"is no YAML: {_where(error)}") from None
        return None
    except RecursionError:
        raise FleetError("is nested more deeply than anything that starts vLLM") from None
    if isinstance(loaded, list) and all(isinstance(one, Mapping) for one in loaded):
        return {"models": loaded}
    if not isinstance(loaded, Mapping):
        return None
    if isinstance(loaded.get("services"), Mapping) or "models" in loaded:
        return loaded
    if loaded and all(isinstance(one, Mapping) and "command" in one for one in loaded.values()):
        return {"models": loaded}
    if file.endswith((".yml", ".yaml")):
        keys = ", ".join(map(str, loaded)) or "nothing"
        raise FleetError(f"has {keys}, and neither `models` nor `services`; {_HOW}")
    return None


def _load(text: str) -> Any:
    """Return the value of a YAML text. Raises `FleetError` for one that aliases blow up."""
    loader = yaml.SafeLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None
        if _size(node, {}) > _MOST_VALUES:
            raise FleetError(
                f"its aliases (`*name`) stand for more than {_MOST_VALUES:,} values: write what "
                "they stand for, or drop them"
            )
        return loader.construct_document(node)
    finally:
        loader.dispose()


def _size(node: yaml.Node, known: dict[int, int]) -> int:
    """Return how many values a node has with its aliases written out; each node is seen once."""
    if id(node) not in known:
        known[id(node)] = _MOST_VALUES + 1  # what contains itself has no end
        below = [] if isinstance(node, yaml.ScalarNode) else node.value
        parts = (part for each in below for part in (each if isinstance(each, tuple) else (each,)))
        known[id(node)] = 1 + sum(_size(part, known) for part in parts)
    return known[id(node)]


def _where(error: yaml.YAMLError | ValueError) -> str:
    """Return what is wrong in which line, without the line: it may have a key in it."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f"{error.problem} in line {error.problem_mark.line + 1}"
    return "it cannot be read as text"


def _expanded(value: Any) -> Any:
    """Return compose's values with the defaults of its variables; `$$` is a dollar sign."""
    if isinstance(value, str):
        return shell.expand(value.replace("$$", "\0"), {}).replace("\0", "$")
    if isinstance(value, Mapping):
        return {key: _expanded(below) for key, below in value.items()}
    return [_expanded(below) for below in value] if isinstance(value, list) else value


def _named(launches: tuple[Launch, ...]) -> tuple[Launch, ...]:
    """Number the servers that have the same name."""
    found: list[Launch] = []
    taken: dict[str, int] = {}
    for launch in launches:
        taken[launch.name] = taken.get(launch.name, 0) + 1
        again = taken[launch.name]
        found.append(launch if again == 1 else replace(launch, name=f"{launch.name}-{again}"))
    return tuple(found)
