"""
Write what the probe finds: on each healthy profile, or on this machine.

    python -m tests.support.record_node          # every profile: src/gpufleet/catalog/data/nodes/
    python -m tests.support.record_node --real   # this machine: tests/data/nodes/real/

The real probe runs as on a node. Of a profile, what differs from run to run (the time) is fixed, so
that a new recording shows as a difference only what the probe found anew. Of a real machine, what
identifies it is replaced, the same by the same (real_recordings.py).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.remote import payload
from lab import machine, nvml
from tests.support import real_recordings
from tests.support.checkout import ROOT

NODES = ROOT / "src/gpufleet/catalog/data/nodes"
REAL = ROOT / "tests/data/nodes/real"

SAME_EVERYWHERE = {
    "time": "2026-01-01T00:00:00Z",
    "seconds": 0.3,
    "probe": "0" * 64,
    "python": "3.12.3",
}


def probe(
    library: Path | None, *profiles: Path, python: str = sys.executable, **parameters: Any
) -> dict[str, Any]:
    """
    Run the probe as on a node and return its document.

    Against the simulated NVML in the directory `library`; None: whatever this machine has.
    """
    simulated = {
        "LD_LIBRARY_PATH": str(library),
        "GPUFLEET_NVML_PROFILE": ":".join(map(str, profiles)),
    }
    done = subprocess.run(
        [python, "-I", "-"],
        input=payload.program("probe/probe", nvml=True, **parameters),
        env={**os.environ, **(simulated if library else {})},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    document: dict[str, Any] = json.loads(done.stdout)
    return document


def probe_machine(
    library: Path, about: machine.Machine, python: str = sys.executable, **parameters: Any
) -> dict[str, Any]:
    """Run the probe on a simulated machine: its files, its programs, and its GPUs."""
    with tempfile.TemporaryDirectory() as scratch:
        root = machine.write(about, Path(scratch) / "root")
        profile = Path(scratch) / "nvml.conf"
        profile.write_text(machine.profile_text(about))
        answers = machine.answers(about)
        return probe(
            library if about.library else Path(scratch),
            profile,
            python=python,
            **{"sysroot": str(root), "answers": answers, **parameters},
        )


def recording(library: Path, profile: str) -> dict[str, Any]:
    """Return the recording of one healthy profile."""
    found = probe_machine(library, machine.of(profile))
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


def record_profiles() -> None:
    """Record every healthy profile."""
    with tempfile.TemporaryDirectory() as built:
        library = nvml.build(Path(built)).parent
        for profile in nvml.profiles():
            (NODES / f"{profile}.json").write_text(text(recording(library, profile)) + "\n")
            print(f"{profile}.json")


def record_real() -> None:
    """Record this machine; raises `FleetError` if it has no NVIDIA GPU that answers."""
    document = real_recordings.anonymous(real_recordings.with_gpus(probe(None)))
    to = REAL / f"{real_recordings.name(document)}.json"
    to.parent.mkdir(parents=True, exist_ok=True)
    to.write_text(text(document) + "\n")
    print(to)


def main(arguments: list[str]) -> None:
    if arguments not in ([], ["--real"]):
        sys.exit("usage: python -m tests.support.record_node [--real]")
    try:
        record_real() if arguments else record_profiles()
    except FleetError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main(sys.argv[1:])
