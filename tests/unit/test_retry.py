"""`tests.support.retry` names what it ran twice, and never calls a failure a success."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import ROOT
from tests.support.retry import to_retry

DEFECT = "failed, then passed alone, which is a defect"
ONCE = """
from pathlib import Path
def test_once():
    seen = Path("seen")
    if not seen.exists():
        seen.touch()
        raise AssertionError("the first time")
"""


@pytest.mark.parametrize(
    ("text", "environment", "status", "last"),
    [
        ("def test_good(): pass", {}, 0, "retried: none"),
        (ONCE, {}, 1, f"retried, {DEFECT}: test_it.py::test_once"),
        (ONCE, {"CI": "1"}, 0, f"retried, {DEFECT}: test_it.py::test_once"),
        (
            "def test_bad(): assert False",
            {"CI": "1"},
            1,
            "retried, failed again: test_it.py::test_bad",
        ),
    ],
)
def test_the_last_line_names_what_ran_twice_and_the_run_fails_but_in_ci(
    tmp_path: Path, text: str, environment: dict[str, str], status: int, last: str
) -> None:
    (tmp_path / "test_it.py").write_text(text)

    done = subprocess.run(
        [sys.executable, "-m", "tests.support.retry", "-q"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **environment},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == status, done.stdout
    assert done.stdout.splitlines()[-1] == last


def test_a_file_that_runs_again_runs_only_the_tests_that_were_asked_for(tmp_path: Path) -> None:
    lab = tmp_path / "tests/lab"
    lab.mkdir(parents=True)
    (lab / "test_it.py").write_text(
        ONCE + "import pytest\n@pytest.mark.long\ndef test_hours(): Path('ran').touch()\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = long\n")

    done = subprocess.run(
        [sys.executable, "-m", "tests.support.retry", "-q", "-m", "not long"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CI": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stdout
    assert done.stdout.splitlines()[-1] == f"retried, {DEFECT}: tests/lab/test_it.py"
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("beside", "status", "last"),
    [
        ("def test_good(): pass", 0, f"retried, {DEFECT}: a/test_it.py::test_once"),
        (ONCE, 0, f"retried, {DEFECT}: a/test_it.py::test_once, b/test_it.py::test_once"),
        ("def test_bad(): assert False", 1,
         "retried, failed again: a/test_it.py::test_once, b/test_it.py::test_bad"),
        ("import nothing_of_this_name", 2, "retried: none"),
    ],
)  # fmt: skip
def test_what_runs_beside_is_shown_after_the_first_and_counts_as_much(
    tmp_path: Path, beside: str, status: int, last: str
) -> None:
    for folder, text in (("a", ONCE.replace('"seen"', '"seen-a"')), ("b", beside)):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "test_it.py").write_text(text)

    done = subprocess.run(
        [sys.executable, "-m", "tests.support.retry", "-q", "a", "--beside", "-v", "b"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "CI": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == status, done.stdout
    assert done.stdout.splitlines()[-1] == last
    assert done.stdout.index("a/test_it.py") < done.stdout.index("b/test_it.py")


def test_a_landing_is_the_run_in_which_a_second_chance_passes() -> None:
    assert "export CI=1\n" in (ROOT / ".ci/run").read_text()


def test_a_file_of_tests_on_nodes_is_run_whole() -> None:
    """A later test of it has no node of its own."""
    walk, role = "tests/lab/test_walkthrough.py", "tests/lab/roles/test_vllm.py"
    failed = [
        f"{walk}::test_b",
        f"{role}::test_e",
        "tests/unit/test_a.py::test_c",
        f"{walk}::test_d",
    ]
    assert to_retry(failed) == [role, walk, "tests/unit/test_a.py::test_c"]
