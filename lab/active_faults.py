"""Store the faults of a lab node in a file, and verify them before use.

`nodes/<name>/faults.json` defines the faults, and the node's root follows it (lab/node_machine.py).
So a fault lasts until it is cleared, through reboots, `down` and `up`.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from gpufleet.errors import FleetError
from lab import faults, machine
from lab.machine import Machine, Profile
from lab.state import write

# Faults that a container cannot have. Tests write documents of such machines from the same
# catalogue (lab.machine.write), and `gpufleet check --from` checks these documents.
OFFLINE = {
    "log-wrapped": "the kernel's ring buffer belongs to this machine, and nodes cannot read it",
    "no-permission": "the user of the connection decides this: connect as a user without rights "
    "(`adduser` on the node, ssh_user in the inventory)",
}

# On a node that was delivered without a driver, commands on the node cause these faults, as on a
# server.
BY_HAND = frozenset(
    {
        *("no-driver", "mismatch", "no-library", "old-driver", "module-differs"),
        *("module-unsigned", "unattended-upgrades-on", "nouveau"),
        *("fabric-not-started", "fabric-stale", "fabric-manager-version"),
    }
)


@dataclass(frozen=True, order=True)
class Broken:
    """One fault on a node, with its GPU if it concerns one."""

    fault: str
    gpu: int | None = None

    def __str__(self) -> str:
        return self.fault if self.gpu is None else f"{self.fault} (GPU {self.gpu})"


def read(home: Path) -> tuple[Broken, ...]:
    """Return the faults of the node with its files in `home`, in their order."""
    try:
        rows = json.loads((home / "faults.json").read_text())
    except FileNotFoundError:
        return ()
    return tuple(Broken(**row) for row in rows)


def remember(home: Path, broken: Iterable[Broken]) -> None:
    """Write the node's faults."""
    write(home / "faults.json", json.dumps([vars(each) for each in broken]) + "\n")


def still_possible(
    broken: Iterable[Broken], profile: str, *, driver: bool = True
) -> tuple[Broken, ...]:
    """Return the faults that this node's hardware can have, which may have changed."""
    kept = []
    for each in broken:
        try:
            parse_fault(each.fault, each.gpu, profile, driver=driver)
        except FleetError:
            continue
        kept.append(each)
    return tuple(kept)


def parse_fault(name: str, gpu: int | None, profile: str, *, driver: bool = True) -> Broken:
    """
    Return a fault by name; a fault of one GPU is on GPU 0 unless a different GPU is set.

    `driver` tells whether the node was delivered with a driver. Raises `FleetError` for an unknown
    fault, a fault that this hardware or node cannot have, or a fault that only documents can have.
    """
    hardware = Profile.of(profile)
    possible = [each for each in faults.possible(hardware) if each not in OFFLINE]
    if name not in faults.FAULTS:
        near = difflib.get_close_matches(name, possible, 3, 0.4)
        meant = f" Similar names: {', '.join(near)}." if near else ""
        raise FleetError(
            f"There is no fault {name!r}.{meant} `gpufleet lab fault --list` shows all of them."
        )
    fault = faults.FAULTS[name]
    if reason := OFFLINE.get(name):
        raise FleetError(
            f"A live node cannot have the fault {name}: {reason}. Tests use the fault in documents "
            "of simulated machines (docs/develop/lab-faults.md)."
        )
    if not driver and name in BY_HAND:
        raise FleetError(
            f"The fault {name} ({fault.says}) cannot be set on a node delivered without a driver: "
            "install, load, hold or remove packages or modules on the node (docs/develop/lab.md)."
        )
    if not fault.applies(hardware):
        near = difflib.get_close_matches(name, possible, 3, 0.3)
        instead = f" It can have {', '.join(near)}." if near else ""
        raise FleetError(f"{profile} cannot have the fault {name} ({fault.says}).{instead}")
    alone = fault.concerns_one_gpu(machine.of(profile))
    if gpu not in (None, 0) and hardware.count > 1 and not alone:
        raise FleetError(f"The fault {name} concerns the whole machine: omit --gpu.")
    if gpu is not None and not 0 <= gpu < hardware.count:
        raise FleetError(f"{profile} has no GPU {gpu}: choose from 0 to {hardware.count - 1}.")
    return Broken(name, (gpu or 0) if alone else None)


def machine_with(profile: str, broken: Iterable[Broken], node: str = "") -> Machine:
    """Return the machine of a profile with these faults, and with the node's own GPUs if named."""

    def its_own(delivered: Machine) -> Machine:
        return replace(delivered, profile=delivered.profile.of_node(node)) if node else delivered

    found = (faults.fault(each.fault, each.gpu or 0) for each in broken)
    return machine.of(profile, its_own, *found)
