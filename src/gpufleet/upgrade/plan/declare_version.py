"""`--vllm VERSION`, `--sglang VERSION`: write a version and its lock where they are declared.

The declaration and the running fleet must agree, so a version on the command line is first written
into group_vars, at the lines that set the version now. Only unambiguous lines are changed. For the
other lines a message shows what to write.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from gpufleet.errors import FleetError, file_fault
from gpufleet.formatting import join_names
from gpufleet.gpu_software.lock_file import SUFFIX
from gpufleet.paths import shipped_lock, write_whole
from gpufleet.settings.engine_flags import DEFAULT, EngineName, of
from gpufleet.settings.operator_paths import from_root
from gpufleet.settings.serving_settings import EngineSettings
from gpufleet.settings.variables import Origin
from gpufleet.upgrade.json_value import JsonValue
from gpufleet.versions import RELEASE

if TYPE_CHECKING:
    from gpufleet.inventory.loader import Fleet
    from gpufleet.settings.node_variables import NodeVars

# A line of a YAML mapping in block style: its key, a plain or quoted value, maybe a comment.
_LINE = re.compile(
    r"""^(?P<before>\s*(?P<key>version|lock)\s*:\s*)(?P<quote>["']?)(?P<value>[^"'#\s]+)(?P=quote)"""
    r"""(?P<after>\s*(?:\#.*)?)$"""
)


@dataclass(frozen=True)
class Edit(JsonValue):
    """One line of a variables file, before and after."""

    file: str
    """Path of the file from the project's root."""
    line: int
    key: str
    before: str
    after: str
    engine: EngineName = DEFAULT

    def __str__(self) -> str:
        """Format the edit as one line."""
        return f"{self.file}:{self.line}: {self.engine}.{self.key}: {self.before} -> {self.after}"

    @property
    def inverse(self) -> Edit:
        """Return the edit that undoes this one."""
        return replace(self, before=self.after, after=self.before)


def version_edits(
    declared: Fleet, versions: Mapping[EngineName, str], nodes: Collection[str] = ()
) -> tuple[Edit, ...]:
    """
    Return the edits that declare these versions of engines for `nodes`; an empty `nodes` means all.

    Raises `FleetError` with every line for which the edit is ambiguous.
    """
    found: list[Edit] = []
    problems: list[str] = []
    for engine, version in versions.items():
        try:
            found += _engine_edits(declared, engine, version, nodes)
        except FleetError as error:
            problems += error.problems
    if problems:
        raise FleetError(*dict.fromkeys(problems))
    return tuple(sorted(found, key=lambda each: (each.file, each.line)))


def _engine_edits(
    declared: Fleet, engine: EngineName, version: str, nodes: Collection[str]
) -> Collection[Edit]:
    if not RELEASE.fullmatch(version):
        raise FleetError(
            f"--{engine} {version}: a version must have three numbers, for example 0.32.0"
        )
    wanted = {
        name: (each, each.settings.engines[engine])
        for name, each in declared.gpu_nodes.items()
        if engine in each.settings.engines and (not nodes or name in nodes)
    }
    if not wanted:
        raise FleetError(
            f"--{engine} {version}: none of the nodes has `{engine}` in its group_vars: write "
            f"`{engine}.version` and `{engine}.lock` there, or remove --{engine}"
        )
    _, first = next(iter(wanted.values()))
    if wrong := first.release_mistake(version):
        raise FleetError(f"--{engine} {version}: {wrong}")
    found: dict[tuple[str, int], Edit] = {}
    problems: list[str] = []
    for name, (each, section) in sorted(wanted.items()):
        if section.version == version:
            continue
        present = _written_lock(each, section)
        lock = _lock(section, present, version)
        for key, before, after in (
            ("version", section.version, version),
            ("lock", present, lock),
        ):
            try:
                edit = _edit(declared.root, each, engine, key, before=before, after=after)
            except FleetError as error:
                problems += error.problems
                continue
            found[edit.file, edit.line] = edit
        if lock is not None and not ((declared.root / lock).is_file() or shipped_lock(lock)):
            problems.append(
                f"{lock}: does not exist, but {name} is built from this file: create it with "
                "`gpufleet packages lock` (locks/README.md)"
            )
    problems += _others(declared, wanted, found.values())
    if problems:
        raise FleetError(*problems)
    return found.values()


def apply_edits(
    declared: Fleet, versions: Mapping[EngineName, str], nodes: Collection[str] = ()
) -> Fleet:
    """Return the declaration as it will be after the edits."""
    changed = {}
    for name, each in declared.nodes.items():
        if not each.settings.gpu_node or (nodes and name not in nodes):
            continue
        sections: dict[str, EngineSettings] = {}
        for engine, section in each.settings.engines.items():
            if version := versions.get(engine):
                lock = _lock(section, _written_lock(each, section), version) or section.lock
                new = section.model_copy(update={"version": version, "lock": lock})
                sections[engine] = from_root(new, declared.root, name)
        changed[name] = replace(each, settings=each.settings.model_copy(update=sections))
    return replace(declared, nodes={**declared.nodes, **changed})


def write_down(root: Path, wanted: Iterable[Edit]) -> None:
    """
    Apply the edits, each file completely or not at all; lines with the new value stay unchanged.

    Raises `FleetError`, and writes nothing, if a line was changed meanwhile.
    """
    texts: dict[Path, list[str]] = {}
    problems = []
    for edit in wanted:
        path = root / edit.file
        lines = texts.setdefault(path, _lines(path))
        line = lines[edit.line - 1] if edit.line <= len(lines) else ""
        found = _LINE.match(_without_end(line))
        if found and found["key"] == edit.key and found["value"] == edit.after:
            continue
        if not found or found["key"] != edit.key or found["value"] != edit.before:
            problems.append(
                f"{edit.file}:{edit.line}: this line is no longer `{edit.key}: {edit.before}`: "
                f"write `{edit.after}` yourself"
            )
            continue
        lines[edit.line - 1] = (
            f"{found['before']}{found['quote']}{edit.after}{found['quote']}{found['after']}"
            f"{line[len(_without_end(line)) :]}"
        )
    if problems:
        raise FleetError(*problems)
    for path, lines in texts.items():
        write_whole(path, "".join(lines))


def _lock(section: EngineSettings, present: str, version: str) -> str | None:
    """
    Return the lock of a version, named like the present lock; None: its name contains no version.
    """
    folder, slash, name = present.rpartition("/")
    if section.version not in name:
        return None
    return f"{folder}{slash}{name.replace(section.version, version)}"


def _written_lock(node: NodeVars, section: EngineSettings) -> str:
    """
    Return the lock's path as written in the variables, possibly relative to the project's root.
    """
    found = node.values.get(section.engine, {}).get("lock")
    return found if isinstance(found, str) else section.lock


def _origin(node: NodeVars, engine: EngineName, key: str) -> Origin:
    found = node.origins.get(engine)
    if found is None:
        raise FleetError(f"{engine}.{key} is not set in a file that can be edited")
    locked = node.values.get("gpu_lock") or {}
    if key == "version" and ("version",) not in found.inner and engine in locked:
        place = node.origins["gpu_lock"].place_of(engine, "version")
        raise FleetError(
            f"{place}: `gpu_lock` sets the {of(engine).title} of these nodes: write a new lock "
            f"(`gpufleet lock`), and remove --{engine}"
        )
    return found.place_of(key)


def _edit(
    root: Path, node: NodeVars, engine: EngineName, key: str, *, before: str, after: str | None
) -> Edit:
    origin = _origin(node, engine, key)
    path = root / origin.file
    if after is None:
        raise FleetError(
            f"{origin}: {engine}.lock is {before}. This file name does not contain the version, so "
            f"gpufleet does not know the lock file of a different version: write "
            f"`{engine}.version` and `{engine}.lock` yourself, and remove --{engine}"
        )
    if not origin.line or path.suffix not in {".yml", ".yaml"} or origin.file.endswith(SUFFIX):
        raise FleetError(
            f"{origin}: sets {engine}.{key}, but is not a file in group_vars or host_vars, so "
            f"gpufleet does not edit it: write {after} there yourself, and remove --{engine}"
        )
    line = _without_end(_lines(path)[origin.line - 1])
    found = _LINE.match(line)
    if not found or found["key"] != key or found["value"] != before:
        raise FleetError(
            f"{origin}: `{line.strip()}` is not simply `{key}: {before}`, so gpufleet does not "
            f"edit it: write {after} there yourself, and remove --{engine}"
        )
    return Edit(origin.file, origin.line, key, before, after, engine)


def _others(declared: Fleet, wanted: Collection[str], found: Iterable[Edit]) -> list[str]:
    """Return a problem for each line that also applies to nodes outside the request."""
    problems = []
    for edit in found:
        others = [
            name
            for name, each in declared.gpu_nodes.items()
            if name not in wanted
            and (origin := each.origins.get(edit.engine))
            and (origin.file, origin.place_of(edit.key).line) == (edit.file, edit.line)
        ]
        if others:
            problems.append(
                f"{edit.file}:{edit.line}: {edit.engine}.{edit.key} also applies to "
                f"{join_names(sorted(others))}, which --limit excludes: set the key for these "
                "nodes in their own group_vars or host_vars, or remove --limit"
            )
    return problems


def _lines(path: Path) -> list[str]:
    """Return a file's lines with their line ends."""
    try:
        return path.read_bytes().decode().splitlines(keepends=True)
    except (OSError, UnicodeDecodeError) as error:
        raise FleetError(f"{path}: cannot be read: {file_fault(error)}") from None


def _without_end(line: str) -> str:
    return line.rstrip("\r\n")
