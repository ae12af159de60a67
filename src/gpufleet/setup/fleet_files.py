"""Create the texts of the files in a fleet's directory, and write the files that do not exist."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from gpufleet.errors import FleetError
from gpufleet.gpu_software.lock_file import lock_path, lock_text
from gpufleet.importer.ansible import inventory_text
from gpufleet.paths import shipped_deploys, write_whole
from gpufleet.setup.first_model import CONTEXT, FirstModel
from gpufleet.setup.hosts import Host
from gpufleet.setup.kinds import NO_GPUS, Findings
from gpufleet.templates import render_template

INVENTORY = "inventories/fleet.py"
KNOWN_HOSTS = "inventories/known_hosts"
API_KEY = "secrets/vllm-api-key"
VARIABLES = "group_vars/fleet.yml"
GPU = "gpu"
"""The group of all nodes with GPUs."""

_DEPLOY = '''\
"""gpufleet's deploys/{name}.py: `pyinfra inventories/fleet.py deploys/{name}.py` runs it."""

from pyinfra import local

from gpufleet.paths import PROJECT

local.include(str(PROJECT / "deploys/{name}.py"))
'''
_CONFIG = '''\
"""gpufleet's settings of pyinfra, which executes this file before it reads the inventory."""

from runpy import run_path

from gpufleet.paths import PROJECT

run_path(str(PROJECT / "config.py"))
'''
_IGNORED = "/secrets/\n/.gpufleet/\npyinfra-debug.log\n__pycache__/\n"
_CONNECTION = ("ssh_", "_")


@dataclass(frozen=True)
class FileOutcome:
    """What `write_files` did with a file: it was written (`new`), kept, or left out."""

    path: str
    new: bool
    differs: bool = False
    left_out: bool = False
    """Whether the file was left out because the existing inventory does not have its group."""


def inventory_of(groups: Mapping[str, Iterable[Host]], user: str | None) -> str:
    """Return the text of the inventory file. `user` is the value of `ssh_user` in group_vars."""

    def entry(host: Host) -> Any:
        said = host.variables | ({} if host.user == user else {"ssh_user": host.user})
        if said and host.user not in {user, "root"}:
            said["_sudo"] = True
        return (host.name, said) if said else host.name

    kinds = [group for group in groups if group.startswith("gpu_")]
    return inventory_text(
        "The fleet. The variables of its nodes are in group_vars/; `gpufleet inventory` "
        "shows all of them.",
        {group: [*map(entry, hosts)] for group, hosts in groups.items()},
        {GPU: kinds} if kinds else {},
    )


def connection(hosts: Iterable[Host], known_hosts: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the connection variables that all nodes share."""
    users = {host.user for host in hosts}
    found: dict[str, Any] = {}
    if len(users) == 1:
        found["ssh_user"] = next(iter(users))
        if found["ssh_user"] != "root":
            found["_sudo"] = True
    found["ssh_known_hosts_file"] = known_hosts
    return found | {key: value for key, value in given.items() if key.startswith(_CONNECTION)}


def render(
    hosts: Iterable[Host],
    found: Findings,
    *,
    model: FirstModel | None,
    release: str,
    given: Mapping[str, Any],
) -> dict[str, str]:
    """
    Return the texts of a fleet's files, by path. Files with keys are not included.

    `given` are settings that replace the derived settings, key by key. If `model` has no revision,
    its entry is written as a comment, with a line in which you write the revision.
    """
    by_name = {host.name: host for host in hosts}
    kinds = found.kinds
    groups = {kind.group: [by_name[name] for name in kind.nodes] for kind in kinds}
    reached = connection(by_name.values(), KNOWN_HOSTS, given)
    files = {
        INVENTORY: inventory_of(groups, reached.get("ssh_user")),
        ".gitignore": _IGNORED,
    }
    derived: dict[str, Any] = {"cuda": {"repository": dict(found.repository)}}
    derived["vllm"] = {
        "version": release,
        "lock": f"locks/vllm-{release}.txt",
        "api_key_file": API_KEY,
    }
    settings = {key: value for key, value in given.items() if not key.startswith(_CONNECTION)}
    serving = settings.pop("serving", None)
    for key, value in settings.items():
        both = isinstance(value, Mapping) and isinstance(derived.get(key), Mapping)
        derived[key] = {**derived[key], **value} if both else value
    files[VARIABLES] = (
        "# Variables of every node of inventories/fleet.py: its address, and the sources "
        f"of software.\n{_yaml(reached)}\n{_yaml(derived)}"
    )
    served = sum(len(kind.nodes) for kind in kinds if kind.gpus)
    files[f"group_vars/{GPU}.yml"] = (
        "# The models that the nodes with GPUs serve. `gpufleet plan` shows which nodes "
        "serve them.\n" + _serving(serving, model, served)
    )
    for kind in kinds:
        path = f"group_vars/{kind.group}.yml"
        if kind.group == NO_GPUS:
            without = {"gpu_node": False, "monitoring": {}}
            files[path] = (
                f"# Nodes without GPUs, which can monitor the other nodes.\n{_yaml(without)}"
            )
            continue
        files[path] = (
            f"# Each node has {kind.gpus} x {kind.model}. gpufleet refuses a node with "
            f"fewer GPUs.\n{_yaml({'gpus': {'count': kind.gpus}})}"
        )
        if kind.lock:
            place = str(lock_path(Path("group_vars"), kind.group))
            files[place] = lock_text(kind.lock, kind.source, kind.why or {})
    files["README.md"] = render_template(
        "fleet/readme.md.j2",
        kinds=kinds,
        bare=any(kind.bare for kind in kinds),
        api_key=API_KEY,
    )
    files["config.py"] = _CONFIG
    files |= {f"deploys/{name}.py": _DEPLOY.format(name=name) for name in shipped_deploys()}
    return files


def write_files(root: Path, files: Mapping[str, str], *, api_key: bool) -> Iterator[FileOutcome]:
    """
    Write the files that do not exist, and yield what was done with each file.

    An existing file is kept, whatever its content. The variables of a group are left out if the
    existing inventory does not have the group. With `api_key`, a key is generated if there is none.
    Raises `FleetError` if a file cannot be written.
    """
    groups = _groups(root / INVENTORY)
    for path, text in files.items():
        file = root / path
        if os.path.lexists(file):
            yield FileOutcome(path, new=False, differs=_differs(file, text))
        elif groups is not None and path.startswith("group_vars/") and _group(path) not in groups:
            yield FileOutcome(path, new=False, left_out=True)
        else:
            write_whole(file, text)
            yield FileOutcome(path, new=True)
    if api_key:
        yield FileOutcome(API_KEY, new=_write_key(root / API_KEY))


def _groups(inventory: Path) -> frozenset[str] | None:
    """Return the names in an inventory file that may be groups, or None if it cannot be read."""
    try:
        text = inventory.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return None
    return frozenset({*re.findall(r"[\"'](\w+)[\"']", text), inventory.stem})


def _group(path: str) -> str:
    """
    Return the group whose variables a file has.

    >>> _group("group_vars/gpu_h100x8.lock.yml")
    'gpu_h100x8'
    """
    return Path(path).name.partition(".")[0]


def _write_key(file: Path) -> bool:
    """
    Create a file with a new key that only its owner can read. Return False if the file exists.
    """
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        return False
    except OSError as error:
        raise FleetError(f"{file} cannot be written: {error.strerror}") from None
    with os.fdopen(handle, "w", encoding="utf-8") as opened:
        opened.write(secrets.token_hex(32) + "\n")
    return True


def _differs(file: Path, text: str) -> bool:
    try:
        return file.read_text(encoding="utf-8") != text
    except (OSError, UnicodeDecodeError):
        return True


def _serving(given: Any, model: FirstModel | None, nodes: int) -> str:
    if given is not None:
        return _yaml({"serving": given})
    if model is None:
        return (
            "# No model is chosen: the GPUs' memory is not known, or too small for those that\n"
            "# `gpufleet init` knows. Write one, as docs/configure/serving.md says.\n"
        )
    entry: dict[str, Any] = {"model": model.model}
    if model.revision:
        entry["revision"] = model.revision
    text = _yaml({"serving": {model.name: entry | {"replicas": nodes, "context": CONTEXT}}})
    if model.revision or model.local:
        return text
    lines = text.splitlines()
    lines.insert(3, "    revision: COMMIT")
    return (
        "# The Hub did not report the model's current commit: write its 40 digits in place of "
        "COMMIT\n"
        "# (the model's page, `Files`, `History`), and uncomment these lines.\n"
        + "".join(f"# {line}\n" for line in lines)
    )


def _yaml(values: Mapping[str, Any]) -> str:
    return yaml.safe_dump(dict(values), sort_keys=False, allow_unicode=True, width=100)
