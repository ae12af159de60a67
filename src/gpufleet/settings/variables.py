"""Read operators' variables: YAML files under `group_vars/` and `host_vars/`.

Each value has an origin, so that messages can show the file and line. Pure, except for reading the
files. The module does not depend on pyinfra, on settings or on the groups of a node.

The layout is Ansible's: each group or host has one file (`NAME.yml` or `NAME.yaml`), a directory
`NAME/` of such files, or both. If several layers set a top-level key, the most specific layer
replaces the whole value, and mappings are not merged. gpufleet refuses some files that Ansible
accepts: a key twice in one mapping, keys that are not identifiers, `NAME.yml` beside `NAME.yaml`,
and values that JSON cannot represent.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import yaml

from gpufleet.errors import FleetError, file_fault, yaml_fault
from gpufleet.settings.base import KeyPath

_SUFFIXES = (".yml", ".yaml")

# The tags of YAML whose values JSON also has. Values with other standard tags (binary, set, ...)
# would change their type on the way to a node.
_JSON_TAGS = frozenset(
    f"tag:yaml.org,2002:{kind}" for kind in ("null", "bool", "int", "float", "str", "seq", "map")
)
# `{{ name }}`, also with filters, as in Ansible. It is allowed in flags, which may contain chat
# templates.
_TEMPLATE = re.compile(r"\{\{[^{}]*\}\}")
_NO_TEMPLATES = (
    "is a Jinja template, which Ansible would fill in, but gpufleet does not: write the "
    "value itself, or set the value beside the node's name in the inventory file, which is "
    "Python"
)
_MERGE_TAG = "tag:yaml.org,2002:merge"


class _Loader(yaml.SafeLoader):
    """A YAML loader without dates: `until: 2026-12-31` is text. The setting parses the date."""

    yaml_implicit_resolvers = {  # PyYAML's types declare it as an attribute of instances
        first: [(tag, form) for tag, form in known if tag != "tag:yaml.org,2002:timestamp"]
        for first, known in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }


@dataclass(frozen=True)
class Origin:
    """
    The file and line that set a top-level key. `str(origin)` is `group_vars/gpu.yml:12`.

    `line` counts from 1. It is 0 for an origin without lines, such as the command line. `inner` has
    the lines of nested keys, by path.
    """

    file: str
    line: int = 0
    inner: Mapping[KeyPath, int] = field(default_factory=dict, repr=False, compare=False)

    def __str__(self) -> str:
        return f"{self.file}:{self.line}" if self.line else self.file

    def place_of(self, *path: str | int) -> Origin:
        """
        Return the origin of a nested key. If it is unknown, return that of the nearest known
        parent.
        """
        for length in range(len(path), 0, -1):
            if line := self.inner.get(path[:length]):
                return Origin(self.file, line)
        return Origin(self.file, self.line)


Variables: TypeAlias = Mapping[str, tuple[Any, Origin]]
"""Top-level keys, each with its value and the origin of the value."""


def load_file(path: Path, root: Path | None = None) -> Variables:
    """
    Read one YAML file of variables. Messages name the file relative to `root`.

    Raises FleetError with every problem of the file, each with its line.
    """
    shown = shown_path(path, root)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FleetError(f"{shown}: cannot be read: {file_fault(error)}") from None
    try:
        loader = _Loader(text)
        node = loader.get_single_node()
        if node is None:  # the file has only comments
            return {}
        lines: dict[KeyPath, int] = {}
        problems = list(_problems(node, shown)) or list(_walk(node, shown, (), lines, {}))
        if problems:
            raise FleetError(*problems)
        values: dict[str, Any] = loader.construct_document(node)
    except (yaml.YAMLError, ValueError) as error:  # ValueError: `0b_` and the like
        raise FleetError(_syntax_error(error, shown)) from None
    except RecursionError:
        raise FleetError(f"{shown}: the values are nested too deeply") from None
    return {key: (value, _origin(key, shown, lines)) for key, value in values.items()}


def load(directories: Iterable[Path], name: str, root: Path | None = None) -> Variables:
    """
    Read the variables of one group or host from all directories. Later directories take precedence.

    Raises FleetError with every problem of every file.
    """
    problems: list[str] = []
    layers: list[Variables] = []
    for directory in directories:
        try:
            layers += [load_file(path, root) for path in files_of(directory, name, root)]
        except FleetError as error:
            problems += error.problems
    if problems:
        raise FleetError(*problems)
    return merge(*layers)


def merge(*layers: Variables) -> Variables:
    """
    Merge layers of variables. If several layers have a key, the last one sets the key's whole
    value.
    """
    return {key: found for layer in layers for key, found in layer.items()}


def set_below(found: Variables, dotted: str, value: Any) -> Variables | None:
    """
    Return variables after one value inside a mapping is replaced, such as `serving.llama.replicas`.

    The result is None if the first two parts of the key (`serving.llama`) do not exist. A part may
    itself contain dots, for example a model's name. In this case, the longest existing key is used.
    """
    top, *parts = dotted.split(".")
    whole, origin = found.get(top, (None, Origin("")))
    if not isinstance(whole, Mapping) or (len(parts) > 1 and not _known_parts(whole, parts)):
        return None
    place = Origin(f"--data on {origin.file}", origin.line, origin.inner)
    return {**found, top: (_put(whole, parts, value), place)}


def _put(whole: Mapping[str, Any], parts: Sequence[str], value: Any) -> dict[str, Any]:
    count = _known_parts(whole, parts) or 1
    key, rest = ".".join(parts[:count]), parts[count:]
    if not rest:
        return {**whole, key: value}
    below = whole.get(key)
    return {**whole, key: _put(below if isinstance(below, Mapping) else {}, rest, value)}


def _known_parts(whole: Mapping[str, Any], parts: Sequence[str]) -> int:
    """Return how many of the first parts together form an existing key, or 0 if no key matches."""
    return next((n for n in range(len(parts), 0, -1) if ".".join(parts[:n]) in whole), 0)


def files_of(directory: Path, name: str, root: Path | None = None) -> tuple[Path, ...]:
    """
    Return the files with one group's or host's variables, in reading order.

    Raises FleetError if both `NAME.yml` and `NAME.yaml` exist.
    """
    single = [path for suffix in _SUFFIXES if (path := directory / f"{name}{suffix}").is_file()]
    if len(single) > 1:
        both = " and ".join(shown_path(path, root) for path in single)
        raise FleetError(f"{both} set variables of the same name: remove one of the two files")
    return (*single, *_yaml_files(directory / name))


def all_files(directory: Path) -> tuple[Path, ...]:
    """Return every YAML file below a `group_vars` or `host_vars` directory."""
    return tuple(_yaml_files(directory))


def shown_path(path: Path, root: Path | None) -> str:
    """Return a path for messages, relative to `root` if the path is below it."""
    if root is not None and path.is_relative_to(root):
        return str(path.relative_to(root))
    return str(path)


def _yaml_files(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.rglob("*")):
        hidden = any(part.startswith(".") for part in path.relative_to(directory).parts)
        if path.suffix in _SUFFIXES and path.is_file() and not hidden:
            yield path


def _problems(node: yaml.Node, shown: str) -> Iterator[str]:
    """Yield the mistakes in the names of top-level keys. Deploys use them as names of variables."""
    if not isinstance(node, yaml.MappingNode):
        kind = "a list" if isinstance(node, yaml.SequenceNode) else f"{_text(node)!r}"
        yield (
            f"{shown}:{_line(node)}: the top level must be a mapping of settings, for "
            f"example `vllm:`, but it is {kind}"
        )
        return
    for key, _ in node.value:
        if key.tag == _MERGE_TAG or (_is_text(key) and _text(key).isidentifier()):
            continue
        yield (
            f"{shown}:{_line(key)}: {_text(key)!r} cannot be the name of a setting: use "
            "letters, digits and _, and do not begin with a digit"
        )


def _walk(
    node: yaml.Node,
    shown: str,
    path: KeyPath,
    lines: dict[KeyPath, int],
    seen: dict[int, bool],
) -> Iterator[str]:
    """
    Record the line of every key in `lines`, and yield the mistakes below `node`.

    `seen` has every node that was visited. Its value is True while the visit of the node lasts. An
    alias is not checked again, because its content is checked where it is defined.
    """
    if id(node) in seen:
        if seen[id(node)]:
            yield (
                f"{shown}:{_line(node)}: this value refers to itself: write the value without "
                "the alias"
            )
        return
    seen[id(node)] = True
    if _is_text(node) and "flags" not in path and _TEMPLATE.fullmatch(_text(node)):
        yield f"{shown}:{_line(node)}: {_dotted(path)} {_NO_TEMPLATES}"
    if node.tag not in _JSON_TAGS:
        yield (
            f"{shown}:{_line(node)}: {_dotted(path)} has a value of YAML's type "
            f"{_kind(node.tag)}, which settings do not accept: if the value is text, put "
            "quotes around it"
        )
    elif isinstance(node, yaml.MappingNode):
        yield from _walk_mapping(node, shown, path, lines, seen)
    elif isinstance(node, yaml.SequenceNode):
        for index, item in enumerate(node.value):
            lines[(*path, index)] = _line(item)
            yield from _walk(item, shown, (*path, index), lines, seen)
    seen[id(node)] = False


def _walk_mapping(
    node: yaml.MappingNode,
    shown: str,
    path: KeyPath,
    lines: dict[KeyPath, int],
    seen: dict[int, bool],
) -> Iterator[str]:
    first: dict[str, int] = {}
    for key, value in node.value:
        if key.tag == _MERGE_TAG:
            yield from _walk(value, shown, path, {}, seen)
            continue
        # `{{ x }}` is a mapping whose only key is a mapping.
        if isinstance(key, yaml.MappingNode) and key.flow_style and value.value == "":
            yield f"{shown}:{_line(key)}: {_dotted(path)} {_NO_TEMPLATES}"
            continue
        if not _is_text(key):
            yield (
                f"{shown}:{_line(key)}: {_dotted(path)} has the key {_text(key)!r}, which "
                f"YAML reads as {_kind(key.tag)}: put quotes around the key"
            )
            continue
        name = _text(key)
        here = (*path, name)
        if name in first:
            yield (
                f"{shown}:{_line(key)}: {_dotted(here)} is set twice, first in line "
                f"{first[name]}: remove one of the two"
            )
            continue
        first[name] = lines[here] = _line(key)
        yield from _walk(value, shown, here, lines, seen)


def _origin(key: str, shown: str, lines: Mapping[KeyPath, int]) -> Origin:
    inner = {path[1:]: line for path, line in lines.items() if path[0] == key and len(path) > 1}
    return Origin(shown, lines.get((key,), 0), inner)


def _syntax_error(error: yaml.YAMLError | ValueError, shown: str) -> str:
    if not isinstance(error, yaml.YAMLError):
        return f"{shown}: has an invalid number or date"
    mark = getattr(error, "problem_mark", None) or getattr(error, "context_mark", None)
    place = f"{shown}:{mark.line + 1}" if mark else shown
    what = yaml_fault(error)
    begins = getattr(error, "context_mark", None)
    if mark and begins and begins.line != mark.line:
        what += f"; the value around that place begins in line {begins.line + 1}"
    return f"{place}: is not valid YAML: {what}"


def _line(node: yaml.Node) -> int:
    return int(node.start_mark.line) + 1


def _is_text(node: yaml.Node) -> bool:
    return isinstance(node, yaml.ScalarNode) and node.tag.endswith(":str")


def _text(node: yaml.Node) -> str:
    return str(node.value) if isinstance(node, yaml.ScalarNode) else _kind(node.tag)


def _kind(tag: str) -> str:
    return tag.removeprefix("tag:yaml.org,2002:")


def _dotted(path: KeyPath) -> str:
    return ".".join(map(str, path)) or "the top level"
