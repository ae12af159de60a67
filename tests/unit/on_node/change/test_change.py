"""The program of changes answers also on a damaged node, and says what it could not read."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from gpufleet.remote import payload

HOME = "var/lib/gpufleet/change"


def test_a_look_reads_what_it_can_and_names_what_it_cannot(tmp_path: Path) -> None:
    (tmp_path / HOME / "next/manifest.json").mkdir(parents=True)
    (tmp_path / HOME / "lock.json").write_text(json.dumps({"id": "u1", "owner": "ann"}))
    program = payload.program("change/change", do="look", sysroot=str(tmp_path))

    done = subprocess.run(
        [sys.executable, "-I", "-"], input=program, capture_output=True, text=True,
        check=True, timeout=60,
    )  # fmt: skip
    found = json.loads(done.stdout)

    assert found["lock"]["owner"] == "ann"
    assert "next" not in found
    assert "next: " in found["problem"]
    assert "Is a directory" in found["problem"]
