"""`gpufleet monitoring`, as an operator types it, with no node to reach."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from gpufleet.monitoring import output_folder
from tests.support import warm_command
from tests.support.checkout import ROOT

PROD = ROOT / "examples/explained/inventories/prod.py"


def typed(*words: str | Path) -> tuple[int, str]:
    """Return the exit status and all that was printed."""
    done = warm_command.run(["monitoring", *words])
    return done.returncode, done.stderr + done.stdout


def test_it_says_what_it_wrote_and_a_second_run_writes_nothing(tmp_path: Path) -> None:
    status, said = typed("render", tmp_path, PROD, "--no-ask")
    assert status == 0, said
    written = {
        f"wrote {path}"
        for path in tmp_path.rglob("*")
        if path.is_file() and path.name != output_folder.LIST
    }
    assert {line for line in said.splitlines() if line.startswith("wrote")} == written
    targets = json.loads((tmp_path / "prometheus/targets/node.json").read_text())
    assert {each["labels"]["instance"] for each in targets} == {
        "gpu-h100-01.example.net",
        "gpu-h100-02.example.net",
        "gpu-a100-01",
        "gpu-a100-02",
    }
    status, said = typed("render", tmp_path, PROD, "--no-ask")
    assert status == 0
    assert f"nothing to write: {tmp_path} is up to date\n" in said
    assert [line for line in said.splitlines() if line.startswith("wrote")] == []


def test_a_file_of_theirs_is_never_overwritten(tmp_path: Path) -> None:
    theirs = tmp_path / "prometheus/prometheus.yml"
    theirs.parent.mkdir()
    theirs.write_text("mine: true\n")
    status, said = typed("render", tmp_path)
    assert status == 2
    assert "prometheus.yml: exists, but gpufleet did not write it" in said
    assert "Traceback" not in said
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [theirs]


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (("silence", PROD, "gpu-a100-01", "--for", "3d", "--why", "x"), "at most one day"),
        (("silences", PROD), "monitoring.alertmanager"),
        (("unsilence", PROD, "gpu-a100-1"), "gpu-a100-01"),
    ],
)
def test_what_cannot_be_is_refused_with_what_to_write(
    words: tuple[str | Path, ...], remedy: str
) -> None:
    status, said = typed(*words)
    assert status == 2
    assert remedy in said
    assert "Traceback" not in said
