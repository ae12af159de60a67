"""The ways to converge a fleet that are compared, as command lines, and what runs say they did."""

from __future__ import annotations

import re
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from benchmarks.converge import ansible, declared
from benchmarks.converge.fleet import ROOT, BenchFleet

CHECK = "check of the endpoint"
# A row of the table that pyinfra ends with: operation, hosts, success, error, no change.
_ROW = re.compile(r"^ {4}(\S.*?)\s+(\d+)\s+(\d+|-)\s+(\d+|-)\s+(\d+|-)\s*$", re.MULTILINE)


@dataclass(frozen=True)
class Way:
    """A command line, and what it runs with."""

    argv: tuple[str, ...]
    environment: Mapping[str, str]


@contextmanager
def way(name: str, fleet: BenchFleet, folder: Path) -> Iterator[Way]:
    """Hand out a way, cold: Ansible finds no connection that an earlier run has left open."""
    pyinfra = (sys.executable, "-m", "pyinfra", "-y", fleet.inventory)
    lab = fleet.lab.facts
    if name == "ansible":
        # Short, for a socket's path has 108 characters at most.
        sockets = Path(tempfile.mkdtemp(prefix="cp-", dir="/tmp"))
        try:
            found = ansible.command(fleet, folder, sockets)
            yield Way(found.argv, found.environment)
        finally:
            shutil.rmtree(sockets, ignore_errors=True)
        return
    commands: dict[str, tuple[str, ...]] = {
        "ours": (*pyinfra, "deploys/vllm.py"),
        "file": (*pyinfra, "deploys/vllm.py"),
        "unit": (*pyinfra, "deploys/vllm.py"),
        "stock": (*pyinfra, "benchmarks/converge/stock.py"),
        "plan": (str(ROOT / ".venv/bin/gpufleet"), "plan", fleet.inventory),
        "floor": (
            *(sys.executable, "-m", "benchmarks.converge.floor"),
            *(str(lab.key), str(lab.known_hosts), *fleet.addresses().values()),
        ),
        "openssh": (
            *("sh", "-c", 'c=$1; shift; for n; do ssh -F "$c" "$n" true & done; wait', "sh"),
            *(str(lab.ssh_config), *fleet.nodes),
        ),
    }
    yield Way(commands[name], {**fleet.environment, declared.FOLDER: str(folder)})


def changed(name: str, output: str) -> list[str]:
    """
    Return what a way says it changed or could not, nothing where all was as declared.

    The stock way's look at the endpoint is a command, which pyinfra counts as a change.
    """
    if name == "ansible":
        found = ansible.changes(output)
        return [f"{node}: {count} tasks" for node, count in found.items() if count] or (
            [] if found else ["no recap"]
        )
    rows = _ROW.findall(output)
    if not rows:
        return ["no table of results"]
    return [
        operation
        for operation, _, success, error, _ in rows
        if operation not in {"Grand total", CHECK} and (success, error) != ("-", "-")
    ]
