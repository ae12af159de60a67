"""The files of variables that a checkout comes with."""

from __future__ import annotations

import re
from pathlib import Path

from tests.support.checkout import ROOT
from tests.support.rows import each_row


@each_row(
    "path",
    [*sorted((ROOT / "group_vars").glob("*.yml")), *sorted((ROOT / "examples").rglob("*.yml"))],
    ids=lambda path: "/".join(path.parts[-3:]),
)
def test_an_example_of_a_setting_stands_once(path: Path) -> None:
    """A second block is forgotten where the first one is changed."""
    keys = re.findall(r"^# ([a-z_]+):$", path.read_text(), re.MULTILINE)
    assert sorted(keys) == sorted(set(keys))
