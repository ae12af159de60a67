"""
Write what the probe finds on each healthy profile of the simulated NVML to tests/nodes/*.json.

    python tests/nodes/record.py

The real probe runs as on a node. What differs from machine to machine and run to run (its files,
the time) is fixed, so that a new recording shows as a difference only what the probe found anew.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpufleet import payload
from lab import nvml

HERE = Path(__file__).parent

# The files of a node that no GPU is needed for.
FILES = {
    "/etc/machine-id": "0123456789abcdef0123456789abcdef",
    "/etc/os-release": 'NAME="Ubuntu"\nID=ubuntu\nVERSION_ID="24.04"\n',
    "/proc/meminfo": "MemTotal:       2113461420 kB\nMemFree:        2113461420 kB\n",
    "/proc/sys/kernel/hostname": "gpu-01",
    "/proc/sys/kernel/osrelease": "6.8.0-88-generic",
    "/proc/sys/kernel/random/boot_id": "9e6f4b52-4c0e-4f5a-8a43-000000000001",
    "/sys/devices/system/cpu/online": "0-223",
}
SAME_EVERYWHERE = {
    "time": "2026-01-01T00:00:00Z",
    "seconds": 0.1,
    "probe": "0" * 64,
    "python": "3.12.3",
    "arch": "x86_64",
}


def write_tree(root: Path, files: dict[str, str]) -> Path:
    """Write `files` (absolute path: text) below `root`."""
    for path, text in files.items():
        file = root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


def probe(
    library: Path, *profiles: Path, python: str = sys.executable, **parameters: Any
) -> dict[str, Any]:
    """Run the probe as on a node, against the simulated NVML in the directory `library`."""
    done = subprocess.run(
        [python, "-I", "-"],
        input=payload.program("probe", nvml=True, **parameters),
        env={
            **os.environ,
            "LD_LIBRARY_PATH": str(library),
            "GPUFLEET_NVML_PROFILE": ":".join(map(str, profiles)),
        },
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def recording(library: Path, profile: str) -> dict[str, Any]:
    """Return the recording of one healthy profile."""
    with tempfile.TemporaryDirectory() as root:
        write_tree(Path(root), FILES)
        found = probe(library, nvml.profile(profile), sysroot=root)
    return {key: SAME_EVERYWHERE.get(key, value) for key, value in found.items()}


def text(document: Any, indent: str = "") -> str:
    """Return JSON with a fact a line, and whatever fits one line on one line."""
    short = json.dumps(document)
    if len(indent) + len(short) <= 100 or not isinstance(document, dict | list):
        return short
    inner = indent + " "
    if isinstance(document, list):
        lines = [inner + text(item, inner) for item in document]
        return "[\n" + ",\n".join(lines) + f"\n{indent}]"
    lines = [f"{inner}{json.dumps(key)}: {text(value, inner)}" for key, value in document.items()]
    return "{\n" + ",\n".join(lines) + f"\n{indent}}}"


def main() -> None:
    with tempfile.TemporaryDirectory() as built:
        library = nvml.build(Path(built)).parent
        for profile in nvml.profiles():
            (HERE / f"{profile}.json").write_text(text(recording(library, profile)) + "\n")
            print(f"{profile}.json")


if __name__ == "__main__":
    main()
