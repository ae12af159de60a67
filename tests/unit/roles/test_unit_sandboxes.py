"""Every unit of ours is rated by systemd as its page says; above 2.5 the page says why."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gpufleet.gpu_software import kernel_tuning
from gpufleet.templates import TEMPLATES, render_template
from tests.support.checkout import ROOT
from tests.unit.serving.test_unit import render

PAGE = ROOT / "docs/reference/unit-sandboxes.md"
MOST = 2.5
# What units are rendered with: nothing of it is rated, but that LiteLLM has networks.
VALUES = {
    **dict.fromkeys(
        ("home", "data", "program", "release", "serve", "rules", "configuration"), "/x"
    ),
    **dict.fromkeys(("textfile", "dumps", "directory", "started"), ""),
    **dict.fromkeys(("user", "account"), "someone"),
    **dict.fromkeys(("retention_days", "stop_seconds", "start_seconds", "files", "memory_mib"), 1),
    "address": ":9090",
    "run": "/run/x",
    "state": "/var/lib/x",
    "gone": "/run/gone",
    "credentials": [],
    "arguments": [],
    "networks": ["192.0.2.0/24"],
}


def rows() -> dict[str, tuple[float, str]]:
    """Return the page's table: exposure and reason by unit."""
    lines = re.findall(r"(?m)^\| `(\S+)` \| ([0-9.]+) \| (.*) ?\|$", PAGE.read_text())
    return {unit: (float(exposure), why.strip()) for unit, exposure, why in lines}


def unit(template: str) -> str:
    """Return a unit's text, with as many rights as it can have."""
    if template.startswith("vllm/"):
        content: str = render().content
        return content
    return render_template(template, **VALUES)


def exposure(folder: Path, name: str) -> float:
    """Return what systemd says of a unit in a folder."""
    said = subprocess.run(
        ["systemd-analyze", "security", "--offline=true", "--no-pager", name],
        env={**os.environ, "SYSTEMD_UNIT_PATH": f"{folder}:"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    found = re.search(r"exposure level for \S+: ([0-9.]+)", said.stdout)
    assert found, said.stdout
    return float(found[1])


@pytest.mark.skipif(not shutil.which("systemd-analyze"), reason="systemd-analyze is not installed")
def test_every_unit_is_rated_as_its_page_says(tmp_path: Path) -> None:
    units = {kernel_tuning.DEVICES: kernel_tuning.devices_unit(8)}
    for each in TEMPLATES.rglob("*.service*"):
        units[each.name.removesuffix(".j2")] = unit(str(each.relative_to(TEMPLATES)))
    found = {}
    for name, text in units.items():
        (tmp_path / name).write_text(text)
        found[name] = exposure(tmp_path, name)
    assert found == {name: rated for name, (rated, _) in rows().items()}


def test_what_is_rated_above_the_bound_has_its_reason() -> None:
    assert rows()
    assert [name for name, (rated, why) in rows().items() if rated > MOST and not why] == []
