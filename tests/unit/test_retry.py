"""`tests.support.retry` names what it ran twice, and never calls a failure a success."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import ROOT
from tests.support.retry import to_retry

ONCE = """
from pathlib import Path
def test_once():
    seen = Path("seen")
    if not seen.exists():
        seen.touch()
        raise AssertionError("the first time")
"""


@pytest.mark.parametrize(
    ("text", "status", "retried"),
    [
        ("def test_good(): pass", 0, "none"),
        (ONCE, 0, "test_it.py::test_once"),
        ("def test_bad(): assert False", 1, "test_it.py::test_bad"),
    ],
)
def test_the_last_line_names_what_ran_twice(
    tmp_path: Path, text: str, status: int, retried: str
) -> None:
    (tmp_path / "test_it.py").write_text(text)

    done = subprocess.run(
        [sys.executable, "-m", "tests.support.retry", "-q"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )

    assert done.returncode == status, done.stdout
    assert done.stdout.splitlines()[-1] == f"retried: {retried}"


def test_a_file_whose_tests_go_in_order_is_run_whole() -> None:
    walk = "tests/lab/test_walkthrough.py"
    failed = [f"{walk}::test_b", "tests/unit/test_a.py::test_c", f"{walk}::test_d"]
    assert to_retry(failed) == [walk, "tests/unit/test_a.py::test_c"]
