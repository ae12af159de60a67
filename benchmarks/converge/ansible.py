"""Ansible, in an environment of its own, over the nodes of a fleet: see playbook.yml."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.converge import declared
from benchmarks.converge.fleet import ROOT, BenchFleet
from lab.state import CACHE, write

HERE = Path(__file__).parent
REQUIREMENTS = HERE / "ansible-requirements.txt"
_RECAP = re.compile(
    r"^(\S+)\s+: ok=\d+\s+changed=(\d+)\s+unreachable=(\d+)\s+failed=(\d+)", re.MULTILINE
)


@dataclass(frozen=True)
class Command:
    """A command line, and what it runs with."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]


def installed() -> Path:
    """Return the folder of Ansible's programs; installed by hash when it is not there."""
    made = CACHE / f"ansible-{hashlib.sha256(REQUIREMENTS.read_bytes()).hexdigest()[:10]}"
    ready = made / ".ready"
    if not ready.exists():
        uv = str(ROOT / ".venv-uv/bin/uv")
        subprocess.run([uv, "venv", "-q", "--clear", "-p", sys.executable, str(made)], check=True)
        subprocess.run(
            [
                *(uv, "pip", "sync", "-q", "--require-hashes", "--no-build", "--compile-bytecode"),
                *("--python", str(made / "bin/python"), str(REQUIREMENTS)),
            ],
            check=True,
        )
        ready.touch()
    return made / "bin"


def inventory(fleet: BenchFleet, folder: Path) -> Path:
    """Write the inventory of a fleet, and what is declared of each node as its variables."""
    contents = folder / "files"
    lab = fleet.lab.facts
    hosts: dict[str, Any] = {}
    for node in lab.nodes:
        of = declared.read(folder, node.name)
        key = next(file for file in of["files"] if file["path"].endswith("/api-key"))
        hosts[node.name] = {"ansible_host": str(node.address)}
        variables = {
            **{name: value for name, value in of.items() if name != "groups"},
            "groups_wanted": of["groups"],
            "unit_files": [f"/etc/systemd/system/{unit['name']}" for unit in of["units"]],
            "contents": str(contents),
            "api_key": f"{{{{ lookup('ansible.builtin.file', '{contents}/{key['sha256']}') }}}}",
        }
        write(folder / "host_vars" / f"{node.name}.json", json.dumps(variables, indent=1))
    strict = (
        f"-o UserKnownHostsFile={lab.known_hosts} -o GlobalKnownHostsFile=/dev/null "
        "-o StrictHostKeyChecking=yes -o IdentitiesOnly=yes"
    )
    common = {
        "ansible_user": "root",
        "ansible_ssh_private_key_file": str(lab.key),
        "ansible_ssh_common_args": strict,
    }
    path = folder / "hosts.json"
    write(path, json.dumps({"gpu": {"hosts": hosts, "vars": common}}, indent=1))
    return path


def command(fleet: BenchFleet, folder: Path, sockets: Path, strategy: str = "linear") -> Command:
    """
    Return the command of one run.

    `sockets`: where its connections lie; a new folder makes the run open its own, as a first run
    of the day does. `strategy`: linear or free.
    """
    return Command(
        (
            str(installed() / "ansible-playbook"),
            *("-i", str(folder / "hosts.json")),
            *("--forks", str(len(fleet.nodes))),
            str(HERE / "playbook.yml"),
        ),
        {
            **fleet.environment,
            "ANSIBLE_CONFIG": str(HERE / "ansible.cfg"),
            "ANSIBLE_SSH_CONTROL_PATH_DIR": str(sockets),
            "ANSIBLE_STRATEGY": strategy,
            "ANSIBLE_HOME": str(folder / "ansible"),
            "LC_ALL": "C.UTF-8",
        },
    )


def changes(output: str) -> dict[str, int]:
    """
    Return how many tasks changed each node, by the recap that a run ends with.

    A node that failed or could not be reached counts as -1.
    """
    return {
        name: -1 if int(unreachable) + int(failed) else int(changed)
        for name, changed, unreachable, failed in _RECAP.findall(output)
    }
