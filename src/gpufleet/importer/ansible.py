"""Convert Ansible inventories, YAML and INI, to an inventory file.  Pure.

Contract: the importer reads hosts, groups, the nesting of groups, and each host's address, port,
user and key file. The order of precedence is Ansible's. Other variables are shown only by name,
because their values may be passwords. Variables of groups are copied to each host, because an
inventory file has only variables of hosts.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.importer.bounded_yaml import load_documents, mapping, scalar_text
from gpufleet.importer.server import Note, Source
from gpufleet.settings.node_groups import resolve_groups

_RENAMED = {
    "ansible_host": "ssh_hostname",
    "ansible_ssh_host": "ssh_hostname",
    "ansible_port": "ssh_port",
    "ansible_ssh_port": "ssh_port",
    "ansible_user": "ssh_user",
    "ansible_ssh_user": "ssh_user",
    "ansible_ssh_private_key_file": "ssh_key",
    "ansible_private_key_file": "ssh_key",
    "ansible_become": "_sudo",
}
_ALL, _UNGROUPED = "all", "ungrouped"
_SECTION = re.compile(r"\[([^\]:\s]+)(?::(hosts|children|vars))?\]")
_UNITS = {"Unit", "Service", "Install", "Container", "Timer", "Socket"}
_RANGE = re.compile(r"\[(\w{1,9}):(\w{1,9})(?::(\d{1,9}))?\]")
_MOST_HOSTS = 10_000
"""The maximum number of hosts after all ranges are expanded. No real inventory has more."""
_MOST_RANGES = 8  # in the pattern of one host
_MOST_GROUPS = 1_000
_YES = {"true", "yes", "1", "on"}


@dataclass
class _Group:
    """A group: its hosts with their variables, its child groups, and its own variables."""

    hosts: dict[str, dict[str, Any]] = field(default_factory=dict)
    children: dict[str, None] = field(default_factory=dict)
    variables: dict[str, Any] = field(default_factory=dict)


@dataclass
class _Inventory:
    """Groups by name, in the order of the text."""

    groups: dict[str, _Group] = field(default_factory=dict)
    count: int = 0

    def group(self, name: str) -> _Group:
        if len(self.groups) > _MOST_GROUPS:
            raise FleetError(f"has more than {_MOST_GROUPS:,} groups")
        return self.groups.setdefault(name, _Group())

    def add(self, group: str, pattern: str, variables: Mapping[str, Any]) -> None:
        """Add the hosts of a pattern to a group."""
        if len(_RANGE.findall(pattern)) > _MOST_RANGES:
            raise FleetError(f"a host has more than {_MOST_RANGES} ranges")
        for name in self._expand(pattern):
            self.group(group).hosts.setdefault(name, {}).update(variables)

    def _expand(self, pattern: str) -> Iterator[str]:
        match = _RANGE.search(pattern)
        if match is None:
            self.count += 1
            if self.count > _MOST_HOSTS:
                raise FleetError(f"the ranges in it expand to more than {_MOST_HOSTS:,} hosts")
            yield pattern
            return
        for each in _range(match):
            yield from self._expand(pattern[: match.start()] + each + pattern[match.end() :])


def _range(match: re.Match[str]) -> Iterator[str]:
    first, last, step = match[1], match[2], int(match[3] or 1)
    ascii_ = first.isascii() and last.isascii()
    if ascii_ and first.isdecimal() and last.isdecimal() and step and int(first) <= int(last):
        width = len(first) if first.startswith("0") else 0
        yield from (f"{number:0{width}}" for number in range(int(first), int(last) + 1, step))
    elif ascii_ and len(first) == len(last) == 1 and step and first <= last:
        yield from map(chr, range(ord(first), ord(last) + 1, step))
    else:
        raise FleetError(f"{match[0]} is not a range of hosts: write [01:08] or [a:d]")


# -- YAML ------------------------------------------------------------------------------------------


def is_inventory(document: Mapping[str, Any]) -> bool:
    """
    Return whether all values are groups, which have only the keys `hosts`, `children` and `vars`.
    """
    groups = [mapping(each) for each in document.values() if each is not None]
    parts = {"hosts", "children", "vars"}
    return bool(groups) and all(each and {*each} <= parts for each in groups)


def read_inventory(document: Mapping[str, Any]) -> Source:
    """Return the inventory of a YAML file."""
    found = _Inventory()
    for name, said in document.items():
        _yaml_group(found, name, mapping(said))
    return _source(found)


def _yaml_group(found: _Inventory, name: str, said: Mapping[str, Any]) -> None:
    group = found.group(name)
    group.variables |= mapping(said.get("vars"))
    for pattern, variables in mapping(said.get("hosts")).items():
        found.add(name, pattern, mapping(variables))
    for child, below in mapping(said.get("children")).items():
        group.children[child] = None
        _yaml_group(found, child, mapping(below))


# -- INI -------------------------------------------------------------------------------------------


def is_ini(text: str) -> bool:
    """
    Return whether a text has sections that can be groups, and no sections of a systemd unit file.
    """
    sections = [
        match[1] for line in text.splitlines() if (match := _SECTION.fullmatch(line.strip()))
    ]
    return bool(sections) and not _UNITS & set(sections)


def read_ini(text: str) -> Source:
    """Return the inventory of an INI file. Raises `FleetError` with all invalid lines."""
    found = _Inventory()
    problems: list[str] = []
    name, kind = _UNGROUPED, "hosts"
    for number, line in enumerate(text.splitlines(), 1):
        stripped = line.strip()
        if not stripped or stripped[0] in "#;":
            continue
        if match := _SECTION.fullmatch(stripped.partition(" #")[0].strip()):
            name, kind = match[1], match[2] or "hosts"
            found.group(name)
            continue
        try:
            words = shlex.split(stripped, comments=True)
        except ValueError:
            problems.append(f"line {number}: a closing quote is missing: add it")
            continue
        _ini_line(found, name, kind, words)
    if problems:
        raise FleetError(*problems)
    return _source(found)


def _ini_line(found: _Inventory, name: str, kind: str, words: list[str]) -> None:
    if kind == "children":
        found.group(name).children[words[0]] = None
        found.group(words[0])
    elif kind == "vars":
        key, _, value = " ".join(words).partition("=")
        found.group(name).variables[key.strip()] = value.strip()
    else:
        variables: dict[str, Any] = {
            key: value for key, equals, value in (w.partition("=") for w in words[1:]) if equals
        }
        host, colon, port = words[0].rpartition(":")
        if colon and port.isdecimal() and host.count(":") == 0:
            variables = {"ansible_port": port, **variables}
        else:
            host = words[0]
        found.add(name, host, variables)


# -- an inventory file -----------------------------------------------------------------------------


def read_hosts(text: str) -> tuple[Any, ...]:
    """
    Return the hosts of a YAML or INI inventory, each as a name or (name, connection variables).

    Raises `FleetError` for any other text.
    """
    if is_ini(text):
        source = read_ini(text)
    else:
        documents = [each for each in load_documents(text) if mapping(each)]
        if len(documents) != 1 or not is_inventory(mapping(documents[0])):
            raise FleetError(
                "is not an Ansible inventory: give the YAML or INI file of the inventory "
                "that contains the hosts"
            )
        source = read_inventory(mapping(documents[0]))
    return source.hosts


def _source(found: _Inventory) -> Source:
    own = found.groups.pop(_ALL, _Group())
    grouped = {host for group in found.groups.values() for host in group.hosts}
    for host, variables in own.hosts.items():
        if host not in grouped:
            found.group(_UNGROUPED).hosts[host] = variables
    children = {
        name: list(group.children) for name, group in found.groups.items() if group.children
    }
    nested = resolve_groups(
        {name: tuple(group.hosts) for name, group in found.groups.items()}, children
    )
    if not any(nested.members.values()):
        raise FleetError("has groups but no hosts: give the inventory file that contains the hosts")
    said: dict[str, dict[str, Any]] = {}
    for name, hosts in nested.members.items():  # the most specific group comes last
        for host in hosts:
            said.setdefault(host, dict(own.variables)).update(found.groups[name].variables)
    for group in (own, *found.groups.values()):
        for host, variables in group.hosts.items():
            said[host].update(variables)
    notes: dict[str, Note] = {}
    reached = {host: _reached(host, variables, notes) for host, variables in said.items()}
    notes["known_hosts"] = Note(
        "an Ansible inventory has no host keys: create `inventories/known_hosts` with "
        "ssh-keyscan, and write `ssh_known_hosts_file: inventories/known_hosts` in "
        "group_vars",
        decide=True,
    )
    groups = {name: [reached[host] for host in group.hosts] for name, group in found.groups.items()}
    return Source(
        (),
        tuple(notes.values()),
        inventory=inventory_text("Written by `gpufleet import`.", groups, children),
        hosts=tuple(reached.values()),
    )


def _reached(host: str, said: Mapping[str, Any], notes: dict[str, Note]) -> Any:
    """
    Return the entry of a host in an inventory file: its name, or (name, connection variables).
    """
    kept: dict[str, Any] = {}
    for key, value in said.items():
        taken = _variable(key, value)
        if taken is not None:
            kept[_RENAMED[key]] = taken
        else:
            notes.setdefault(key, _dropped(key))
    return (host, dict(sorted(kept.items()))) if kept else host


def _variable(key: str, value: Any) -> Any:
    """Return the value of a variable, or None if inventory files do not support it."""
    text = scalar_text(value)
    setting = _RENAMED.get(key)
    if setting is None or "{{" in text or not text:
        return None
    if setting == "_sudo":
        return True if text.lower() in _YES else None
    if setting == "ssh_port":
        return int(text) if text.isdecimal() else None
    return text


def _dropped(key: str) -> Note:
    if key in _RENAMED:
        why = f"the value is unknown, or it is the default of `{_RENAMED[key]}`"
    elif key == "ansible_connection":
        why = (
            "gpufleet connects to nodes with SSH; if a node is this machine, write '@local' as "
            "its name"
        )
    elif re.search(r"pass|secret|token|key", key, re.IGNORECASE):
        why = (
            "gpufleet reads secrets from files that settings name, and connects to nodes with "
            "SSH keys"
        )
    else:
        why = (
            "an inventory has no such setting: write the models to serve under `serving` in "
            "group_vars or host_vars"
        )
    return Note(
        f"`{key}` is dropped, and its value is not shown: {why}", decide=key == "ansible_connection"
    )


def inventory_text(
    about: str, groups: Mapping[str, Iterable[Any]], children: Mapping[str, Iterable[str]]
) -> str:
    """
    Return the text of an inventory file. The hosts in `groups` are names or (name, variables).
    """
    lines = [
        f'"""{about}"""',
        "",
        "from gpufleet import inventory",
        "",
        "globals().update(",
        "    inventory.load(",
        "        __file__,",
        "        groups={",
    ]
    for name, hosts in groups.items():
        lines.append(f"            {_literal(name)}: [")
        lines += (f"                {_literal(host)}," for host in hosts)
        lines.append("            ],")
    lines.append("        },")
    if children:
        lines.append(f"        children={_literal(children)},")
    return "\n".join([*lines, "    )", ")", ""])


def _literal(value: Any) -> str:
    """
    Return a value as a Python literal. Texts have double quotes, unless these would need escapes.

    >>> _literal(("gpu-01", {"ssh_port": 22}))
    '("gpu-01", {"ssh_port": 22})'
    """
    if isinstance(value, str):
        plain = value.isprintable() and not {'"', "\\"} & {*value}
        return f'"{value}"' if plain else repr(value)
    if isinstance(value, Mapping):
        pairs = (f"{_literal(key)}: {_literal(each)}" for key, each in value.items())
        return f"{{{', '.join(pairs)}}}"
    if isinstance(value, tuple):
        return f"({', '.join(map(_literal, value))})"
    return f"[{', '.join(map(_literal, value))}]" if isinstance(value, list) else repr(value)
