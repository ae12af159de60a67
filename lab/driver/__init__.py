"""Simulate the kernel's view of a driver on a node that was delivered without one.

The node's own apt installs the packages from the lab's vendor repository. The packages contain a
library and sources of modules. This module prepares the entries of a loaded driver in /proc and
/sys (`loadable`). When a module is loaded or the node boots, a program of the node (loader.py) puts
these entries into place. dkms.py "builds" modules.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from fcntl import LOCK_EX, flock
from pathlib import Path, PurePosixPath
from typing import Any

from lab import fake_kernel_module
from lab.fake_kernel_log import MACHINE
from lab.machine import Entry, Folder, Link, Loaded, Machine, bare_machine
from lab.machine.bare import NOUVEAU
from lab.state import write

_HERE = Path(__file__).parent
_PROGRAMS = Path("usr/lib/gpufleet-lab")
LOADER = _PROGRAMS / "loader.py"

# Names of the node's programs. Those with a name of kmod replace kmod's own.
_CALLED = {
    "usr/sbin/modprobe": "loader.py",
    "usr/sbin/rmmod": "loader.py",
    "usr/sbin/dkms": "dkms.py",
    # What the vendor's package of this name calls.
    "usr/lib/gpufleet-lab/nvidia-modprobe": "loader.py",
}
_FILES = {
    LOADER: _HERE / "loader.py",
    _PROGRAMS / "dkms.py": _HERE / "dkms.py",
    _PROGRAMS / "fake_kernel_module.py": Path(fake_kernel_module.__file__),
    Path("usr/lib/dkms/common.postinst"): _HERE / "common.postinst",
    Path("etc/kernel/postinst.d/dkms"): _HERE / "kernel.postinst",
    Path("etc/kernel/header_postinst.d/dkms"): _HERE / "kernel.postinst",
}

# The version of Debian 12's package, so that Debian's archive has no newer one.
DKMS_VERSION = "3.0.10-8+deb12u1"

Tree = Callable[[Machine], Mapping[str, Entry]]


def install(root: Path) -> None:
    """Install the replacements of kmod and dkms in the node at `root`."""
    for target, source in _FILES.items():
        write(root / target, source.read_text(), 0o755)
    for name, program in _CALLED.items():
        link, to = root / name, Path("/", _PROGRAMS, program)
        if not link.is_symlink() or link.readlink() != to:
            draft = link.with_name(f".{link.name}.new")
            draft.unlink(missing_ok=True)
            draft.symlink_to(to)
            draft.rename(link)


def loadable(machine: Machine, tree: Tree) -> dict[str, Any]:
    """
    Return the entries that loader.py shows for each module, as JSON data.

    `machine` has a driver. `tree` returns a machine's entries that replace the kernel's files. The
    driver's version is written as @VERSION@.
    """
    handed_over = bare_machine(machine)
    without = tree(handed_over)

    def shown(loaded: Loaded) -> dict[str, Any]:
        new = tree(bare_machine(machine, loaded))
        return {
            path: _as_json(path, entry)
            for path, entry in new.items()
            if without.get(path) != entry and path != "/proc/modules"
        }

    switches = sum(each.driver == "nvidia-nvswitch" for each in machine.functions)
    return {
        "modules": list(handed_over.modules),
        "gpus": machine.profile.count,
        "switches": switches,
        "shows": {
            "nvidia-open": shown(Loaded(("nvidia",), "@VERSION@", "open")),
            "nvidia-proprietary": shown(Loaded(("nvidia",), "@VERSION@", "proprietary")),
            NOUVEAU: shown(Loaded((NOUVEAU,))),
        },
    }


def _as_json(path: str, entry: Entry) -> Any:
    if isinstance(entry, Link):
        return {"to": os.path.relpath(entry.to, PurePosixPath(path).parent)}
    return None if isinstance(entry, Folder) else entry


def write_loadable(root: Path, what: Mapping[str, Any]) -> None:
    """Write these modules for loader.py of the node at `root`."""
    write(root / MACHINE / "loadable.json", json.dumps(what, indent=1) + "\n")


@contextmanager
def hold_modules(root: Path, *, running: bool) -> Iterator[Loaded]:
    """
    Hold the node's loaded modules, so that no module is loaded or unloaded meanwhile.

    A node that is off has no loaded modules, and its next boot loads the ones on its disk.
    """
    home = root / MACHINE
    home.mkdir(parents=True, exist_ok=True)
    with (home / "lock").open("a") as lock:
        flock(lock, LOCK_EX)
        record = home / "driver.json"
        if not running:
            record.unlink(missing_ok=True)
        state = json.loads(record.read_text()) if record.exists() else {"modules": []}
        yield Loaded(tuple(state.pop("modules")), **state)
