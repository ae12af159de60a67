"""Build the library that answers system calls like a node's simulated machine.

Some facts cannot be simulated by a file or a mount:

- whether the clock is synchronised, because the clock is this machine's;
- how much of the disk is free, because the disk is this machine's;
- the loaded modules, if this machine's kernel has no modules and so no /proc/modules.

The library is preloaded into every program of a node. A program without a C library, or a program
that makes the system call itself, gets this machine's real values.
"""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path
from tempfile import TemporaryDirectory

from lab import run_command
from lab.machine import Machine
from lab.state import CACHE, write

_SOURCE = Path(__file__).with_suffix(".c")
_COMPILE = ("gcc", "-std=c11", "-O1", "-fPIC", "-shared", "-Wall", "-Wextra", "-Werror")
_LIBRARY = Path("usr/lib/gpufleet-lab/libcalls.so")
_PRELOADED = Path("etc/ld.so.preload")


def build(cache: Path = CACHE) -> Path:
    """Return the compiled library below `cache`, compiled once and named by its inputs' hash."""
    compiler = (*_COMPILE, *([] if Path("/proc/modules").exists() else ["-DWITHOUT_MODULES"]))
    digest = hashlib.sha256(_SOURCE.read_bytes() + " ".join(compiler).encode()).hexdigest()
    library = cache / "calls" / f"libcalls-{digest[:12]}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        # Each builder writes its own draft, because labs of two checkouts may start at the same
        # time.
        with TemporaryDirectory(dir=library.parent) as folder:
            draft = Path(folder, library.name)
            run_command.run(*compiler, "-o", draft, _SOURCE)
            draft.rename(library)
    return library


def install(root: Path, home: Path, machine: Machine) -> None:
    """Make the node at `root` answer as `machine`; running programs follow from the next call."""
    built, target = build(), root / _LIBRARY
    if not target.exists() or target.read_bytes() != built.read_bytes():
        target.parent.mkdir(parents=True, exist_ok=True)
        draft = target.with_suffix(".new")
        shutil.copyfile(built, draft)
        draft.chmod(0o755)
        draft.rename(target)
    synchronised, error = machine.clock
    write(home / "clock", f"{int(synchronised)} {error}\n")
    free = [disk.free for disk in machine.disks if disk.mount == "/"]
    write(home / "free_mib", "".join(f"{mib}\n" for mib in free))
    # written last, because the files that it names must exist
    write(root / _PRELOADED, f"/{_LIBRARY}\n")
