"""Validate a node's variables: gpufleet's settings, and pyinfra's own variables.

The input is the variables of a node after its groups and host are merged. Each mistake is reported
with the file and line that set the key. If a name is unknown, the message suggests similar valid
names.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import UnionType
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from gpufleet.errors import FleetError
from gpufleet.formatting import suggestion
from gpufleet.paths import PROJECT
from gpufleet.settings import lock_defaults, lookup, operator_paths
from gpufleet.settings.adapter_settings import NamedModel, name_clashes
from gpufleet.settings.base import KeyPath
from gpufleet.settings.node_settings import NodeSettings
from gpufleet.settings.open_secrets import open_secrets
from gpufleet.settings.parse import SettingsError, parse_settings, with_key
from gpufleet.settings.variables import Origin, Variables

# The time limit of commands that have no limit of their own, so that no command waits for ever.
# The longest command is faster: it installs a CUDA toolkit (some gigabytes) over a slow line.
COMMAND_SECONDS = 3600

# Variables of every node, unless it sets them. "yes" is required because pyinfra's default accepts
# the first key that a host presents, and stores it.
DEFAULTS: Mapping[str, Any] = {
    "ssh_strict_host_key_checking": "yes",
    "_timeout": COMMAND_SECONDS,
}

# These are refused, because pyinfra prints them with --debug, and variables are under version
# control.
PASSWORDS: Mapping[str, str] = {
    "ssh_password": "use an SSH key, or the option --ssh-password-prompt",
    "ssh_key_password": "use ssh-agent",
    "_sudo_password": "allow sudo without a password, or use the option --use-sudo-password",
    "_su_password": "connect as root, or use sudo",
}

_LOCAL_PATHS = ("ssh_config_file", "ssh_key", "ssh_known_hosts_file")


@dataclass(frozen=True)
class NodeVars:
    """
    One node with its variables and settings.

    `groups` are ordered from least to most specific, without `all`. `variables` has every key with
    its value and origin. `settings` has the variables that are settings, after validation.
    """

    name: str
    groups: tuple[str, ...]
    settings: NodeSettings
    variables: Variables

    @property
    def values(self) -> dict[str, Any]:
        """Return every variable as plain data."""
        return {key: value for key, (value, _) in self.variables.items()}

    @property
    def origins(self) -> dict[str, Origin]:
        """Return the origin of each variable."""
        return {key: origin for key, (_, origin) in self.variables.items()}

    @property
    def address(self) -> str:
        """Return the name or IP address for SSH, or `localhost` for `@local`."""
        if self.name == "@local":
            return "localhost"
        return str(self.values.get("ssh_hostname", self.name))

    def leaves(self, *, changed: bool = False) -> Iterator[tuple[str, Any, Origin | None]]:
        """
        Yield every value that is not a mapping: its dotted key, the value, and its origin.

        The origin is the file and line that set the value, or None for a default. If the value was
        filled in from the lock, the origin is that of the lock. With `changed`, yield only values
        that are set and differ from the default.
        """
        for key, value, origin in self._leaves():
            if not changed or (origin and not _is_default(key, value)):
                yield key, value, origin
        for key, (value, origin) in self.variables.items():
            if changed and value == {}:  # `monitoring: {}` switches a part on
                yield key, value, origin

    def _leaves(self) -> Iterator[tuple[str, Any, Origin | None]]:
        settings = self.settings.model_dump(mode="json")
        for key in sorted({*self.variables, *DEFAULTS, *settings}):
            value, origin = self.variables.get(key, ({}, Origin("")))
            written = dict(_flat(value)) if key in self.variables else {}
            for path, leaf in written.items():
                yield ".".join((key, *path)), leaf, origin.place_of(*path)
            for path, leaf in _flat(settings.get(key, DEFAULTS.get(key))):
                if leaf is not None and not any(path[:n] in written for n in range(len(path) + 1)):
                    yield ".".join((key, *path)), leaf, self._filled_from((key, *path))

    def _filled_from(self, path: KeyPath) -> Origin | None:
        """Return the origin in the lock if the lock filled in the value, or None."""
        source = lock_defaults.lock_key(path)
        if source is None or self.settings.gpu_lock is None:
            return None
        _, origin = self.variables[str(source[0])]
        return origin.place_of(*source[1:])

    def from_root(self, root: Path) -> NodeVars:
        """
        Return the node with the paths of the operator's files resolved against `root`.

        The paths are then valid in any current directory.
        """
        if root == Path.cwd() == PROJECT:
            return self
        return replace(self, settings=operator_paths.from_root(self.settings, root, self.name))

    def for_pyinfra(self, root: Path) -> dict[str, Any]:
        """Return all variables as plain data, with absolute paths of the operator's SSH files."""
        paths = {
            key: str(root / Path(value).expanduser())
            for key in _LOCAL_PATHS
            if (value := self.values.get(key))
        }
        return {**self.values, **paths}


def check(
    merged: Mapping[str, Variables], groups: Mapping[str, tuple[str, ...]]
) -> dict[str, NodeVars]:
    """
    Validate the variables of nodes, and return the nodes with their settings.

    Raises FleetError with every mistake of every node. If several nodes inherit a mistake from one
    file, the mistake is reported once.
    """
    nodes: dict[str, NodeVars] = {}
    settings: dict[str, NodeSettings] = {}  # most nodes of a group have equal variables
    found: dict[tuple[str, int, str], list[str]] = {}  # (file, line, sentence): nodes if no line
    for name, layers in merged.items():
        for origin, sentence in _key_mistakes(name, layers):
            found.setdefault((origin.file, origin.line, sentence), [])
        ours = {key: layers[key][0] for key in NodeSettings.model_fields if key in layers}
        try:
            if (written := repr(ours)) not in settings:
                settings[written] = parse_settings(ours)
            nodes[name] = NodeVars(name, groups[name], settings[written], layers)
        except SettingsError as mistake:
            for at, what in mistake.mistakes:
                sentence = with_key(at, what) + (_hint(at, what) if at else "")
                sentence += _also_at(layers, mistake.against.get(at))
                if at and at[0] in layers:
                    origin = layers[str(at[0])][1].place_of(*at[1:])
                    found.setdefault((origin.file, origin.line, sentence), [])
                else:
                    found.setdefault(("", 0, sentence), []).append(name)
    for origin, sentence in (*_unknown_groups(nodes.values()), *_adapter_names(nodes)):
        found.setdefault((origin.file, origin.line, sentence), [])
    if found:
        raise FleetError(
            *(
                f"{_some(names) or Origin(file, line)}: {what}"
                for (file, line, what), names in sorted(found.items())
            )
        )
    return nodes


def _unknown_groups(nodes: Collection[NodeVars]) -> Iterator[tuple[Origin, str]]:
    """Yield an origin and a message for each group in `prefer` that no node is in."""
    known = sorted({group for node in nodes for group in node.groups})
    for node in nodes if known else ():  # without an inventory there are no groups
        for model, served in node.settings.serving.items():
            for number, group in enumerate(served.prefer):
                if group not in known:
                    _, origin = node.variables["serving"]
                    yield (
                        origin.place_of(model, "prefer", number),
                        f"serving.{model}.prefer: no node of this inventory is in a group "
                        f"{group!r}{suggestion(group, known)}; the groups of this inventory "
                        f"are {', '.join(known)}",
                    )


def _adapter_names(nodes: Mapping[str, NodeVars]) -> Iterator[tuple[Origin, str]]:
    """Yield an origin and a message for each adapter whose name is also used for something else."""
    models = (
        NamedModel(name, entry, served.served_name, tuple(served.adapters))
        for name, node in nodes.items()
        for entry, served in node.settings.serving.items()
    )
    for node, key, sentence in name_clashes(models):
        yield nodes[node].origins["serving"].place_of(*key[1:]), sentence


def _is_default(key: str, value: Any) -> bool:
    return lookup.is_default(key, value) or (key in DEFAULTS and DEFAULTS[key] == value)


def _flat(value: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield (path, value) for each value in nested mappings that is not a mapping itself."""
    if not isinstance(value, Mapping):
        yield path, value
        return
    for key, below in value.items():
        yield from _flat(below, (*path, str(key)))


def _key_mistakes(node: str, found: Variables) -> Iterator[tuple[Origin, str]]:
    """
    Yield the mistakes in variables that are not settings, and in settings that are not JSON data.
    """
    for key, (value, origin) in found.items():
        if key in PASSWORDS:
            if origin.line:  # values typed at a prompt have no line
                yield origin, f"{key}: variables must not contain passwords: {PASSWORDS[key]}"
        elif key in NodeSettings.model_fields:
            try:
                json.dumps(value, allow_nan=False)
            except (TypeError, ValueError) as error:
                yield origin, f"{key}: the value cannot be written as JSON: {error}"
        elif said := _of_pyinfra(node, key, value):
            yield origin, said
        else:
            for secret in open_secrets({key: value}):
                dotted = ".".join(map(str, secret.at))
                yield origin.place_of(*secret.at[1:]), f"{dotted}: {secret.sentence}"


def _of_pyinfra(node: str, key: str, value: Any) -> str | None:
    """Return why a variable that is not a setting is invalid, or None if it is valid."""
    from gpufleet.settings import pyinfra_arguments

    if key in pyinfra_arguments.known_variables(node):
        return pyinfra_arguments.value_problem(key, value)
    names = [*NodeSettings.model_fields, *pyinfra_arguments.SSH, *pyinfra_arguments.ARGUMENTS]
    return f"{key}: no setting has this name{suggestion(key, names)}"


def _hint(at: KeyPath, what: str) -> str:
    return suggestion(str(at[-1]), _names_beside(at)) if what.startswith("no setting") else ""


def _also_at(layers: Variables, at: KeyPath | None) -> str:
    """Return the part of a message that shows a contradicting key and its origin."""
    if not at or str(at[0]) not in layers:
        return ""
    return f" ({'.'.join(map(str, at))} is in {layers[str(at[0])][1].place_of(*at[1:])})"


def _names_beside(at: KeyPath) -> list[str]:
    """Return the names of the settings that are valid in the section of the key `at`."""
    kind: Any = NodeSettings
    for part in at[:-1]:
        kind = _below(kind, str(part))
    return [name for each in _kinds(kind) if _is_model(each) for name in each.model_fields]


def _below(kind: Any, name: str) -> Any:
    """Return the type of the key `name` in values of type `kind`, or None."""
    for each in _kinds(kind):
        if _is_model(each) and name in each.model_fields:
            return each.model_fields[name].annotation
        if get_origin(each) is dict:
            return get_args(each)[1]
    return None


def _kinds(kind: Any) -> tuple[Any, ...]:
    """Return the members of a union. For any other type, return only the type itself."""
    return get_args(kind) if get_origin(kind) in {Union, UnionType} else (kind,)


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _some(names: list[str]) -> str:
    """Return up to three names and the number of others: `gpu-01, gpu-02, gpu-03 and 61 more`."""
    shown = ", ".join(names[:3])
    return f"{shown} and {len(names) - 3} more" if len(names) > 3 else shown
