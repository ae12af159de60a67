"""`make mutants`: what is changed, where it is changed, and what is written about it."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.checkout import ROOT
from tools.mutants import (
    EXAMPLES,
    REGISTER,
    SAMPLE,
    SOURCE,
    Mutant,
    listing,
    positions,
    rooms,
    run_tests,
    sample,
    share_of,
    shares,
    suite,
    survivors_of,
    with_result,
)

CODE = '''
from dataclasses import dataclass


@dataclass(frozen=True)
class Card:
    memory: int | None = 80


def fits(card: Card, need: int | float, spare: bool = False) -> bool | None:
    """Say whether 3 < 4."""
    if card.memory is None or need < 1:
        return None
    for part in (need, 2 * need):
        if part + 1 >= card.memory and not spare:
            return False
    return True
'''


def test_the_same_code_has_the_same_mutants_wherever_it_stands_in_its_file() -> None:
    drawn = sample({"a.py": CODE}, 8)
    moved = sample({"a.py": f"X = 'above'\n\n{CODE}", "b.py": "Y = 'beside'\n"}, 8)

    assert len({mutant.key for mutant in drawn}) == 8
    assert [mutant.key for mutant in drawn] == [mutant.key for mutant in moved]
    assert [mutant.line + 2 for mutant in drawn] == [mutant.line for mutant in moved]


def test_a_mutant_changes_one_line_that_runs() -> None:
    """Annotations and docstrings are left alone, and no line is changed twice."""
    drawn = sample({"a.py": CODE}, 100)

    lines = CODE.splitlines()
    assert len({mutant.line for mutant in drawn}) == len(drawn) >= 8
    for mutant in drawn:
        ast.parse(mutant.code)
        changed = [line for line in lines if line not in mutant.code.splitlines()]
        assert changed == [lines[mutant.line - 1]]
        assert mutant.change.startswith(lines[mutant.line - 1].strip())
    assert not any("need: int |" not in mutant.code for mutant in drawn)


@pytest.mark.slow
def test_half_of_a_sample_is_comparisons_constants_and_branches_in_turn() -> None:
    folder = ROOT / SOURCE / "planning"
    files = {path.name: path.read_text() for path in folder.glob("*.py")}
    kinds = {
        (position.file, position.line): set[str]()
        for name, text in files.items()
        for position in positions(name, text)
    }
    for name, text in files.items():
        for position in positions(name, text):
            kinds[name, position.line].add(position.kind)

    drawn = sample(files, 18)

    assert len(drawn) == 18
    for mutant, kind in zip(drawn[:9], ["comparison", "constant", "branch"] * 3, strict=True):
        assert kind in kinds[mutant.file, mutant.line]


def test_each_room_has_mutants_and_all_together_are_the_sample() -> None:
    counts = {room: share_of(room) for room in rooms()}

    assert sum(counts.values()) == SAMPLE
    assert min(counts.values()) >= 8
    assert shares({"large": 900, "small": 100}, 26) == {"large": 17, "small": 9}


def test_a_mutant_runs_the_tests_of_its_room_and_those_of_its_module_first() -> None:
    near, others, _ = suite("planning", "planning/ports.py", ROOT)
    imported, *_ = suite("on_node", "on_node/change/units.py", ROOT)
    _, with_examples, _ = suite("artifacts", "artifacts/distribution.py", ROOT)

    room = (ROOT / "tests/unit/planning").rglob("test_*.py")
    assert sorted(near + others) == sorted(str(path.relative_to(ROOT)) for path in room)
    assert near[0] == "tests/unit/planning/test_ports.py"
    assert not [path for path in others if "ports" in re.findall(r"\w+", (ROOT / path).read_text())]
    assert [path for path in imported if not path.startswith("tests/unit/on_node/")] == [
        "tests/unit/upgrade/run/test_node_change.py"
    ]
    assert with_examples[-1] == str(EXAMPLES)


@pytest.mark.parametrize(("marker", "noticed"), [("slow", True), ("long", False)])
def test_slow_tests_of_the_module_notice_a_mutant_and_long_ones_do_not_run(
    copy: Path, marker: str, noticed: bool
) -> None:
    test = copy / "tests/unit/den/test_limit.py"
    test.write_text(f"import pytest\n\npytestmark = pytest.mark.{marker}\n{test.read_text()}")

    assert (survivors_of(copy, "den", [mutant_of("return x > 3")], 60) == []) is noticed


def test_a_program_of_a_room_runs_the_tests_of_that_room() -> None:
    near, others, _ = suite("on_node", "on_node/flags/limits.py", ROOT)
    *_, slow = suite("on_node", "on_node/gpu_software/driver_units.py", ROOT)

    assert "tests/unit/flags/test_extract.py" in near + others
    assert "tests/unit/on_node/gpu_software/test_driver_reload.py" in slow


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """A checkout of one room with one module and one test."""
    den, tests = tmp_path / SOURCE / "den", tmp_path / "tests/unit/den"
    den.mkdir(parents=True)
    tests.mkdir(parents=True)
    (tmp_path / SOURCE / "__init__.py").touch()
    (den / "__init__.py").touch()
    (den / "limit.py").write_text("def low(x):\n    return x < 3\n")
    (tests / "test_limit.py").write_text(
        "from gpufleet.den.limit import low\n\ndef test_low():\n    assert low(2)\n"
    )
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = lab\n    slow\n    long\n")
    return tmp_path


def mutant_of(after: str) -> Mutant:
    return Mutant("den/limit.py", 2, "low", after, f"def low(x):\n    {after}\n")


@pytest.mark.slow
def test_a_mutant_survives_where_no_test_fails_and_the_copy_is_as_it_was(copy: Path) -> None:
    module = copy / SOURCE / "den/limit.py"
    unchanged = module.read_bytes()
    noticed, unnoticed = mutant_of("return x > 3"), mutant_of("return x < 4")
    endless = mutant_of("while True: pass")

    left = survivors_of(copy, "den", [noticed, unnoticed, noticed], 60)

    assert left == [unnoticed]
    assert module.read_bytes() == unchanged
    assert survivors_of(copy, "den", [endless], 3) == []
    assert module.read_bytes() == unchanged


@pytest.mark.slow
def test_tests_that_take_too_long_are_ended_with_what_they_started(copy: Path) -> None:
    program = [sys.executable, "-c", "import time; time.sleep(600)", str(copy)]
    (copy / "tests/unit/den/test_limit.py").write_text(
        f"import subprocess\n\ndef test_long():\n    subprocess.run({program!r})\n"
    )

    result, _ = run_tests(copy, ["tests/unit/den/test_limit.py"], 5)

    ps = subprocess.run(["ps", "axww", "-o", "args"], check=True, capture_output=True, text=True)
    assert result == "too long"
    assert [
        line for line in ps.stdout.splitlines() if "sleep(600)" in line and str(copy) in line
    ] == []


PAGE = """# Page

| room | mutants | killed before | killed after | tests | minutes | run |
| --- | --: | --: | --: | --: | --: | --- |
| other | 9 | 8 | 9 | 70 | 3 | 2026-01-01, aaaaaaa |
| den | 10 | 5 | 6 | 60 | 2 | 2026-01-01, aaaaaaa |

Between.

| room | place | survives | why |
| --- | --- | --- | --- |
| other | other/b.py:7 | `x → y` | equivalent |
| den | den/limit.py:9 `low` | `a ¦ b → a + b` | sets: never both |
| den | den/limit.py:11 `low` | `gone → since` | |

After.
"""


def test_a_result_keeps_the_first_one_the_reasons_and_all_other_text() -> None:
    stays, new = mutant_of("a | b → a + b"), mutant_of("p → q")

    changed = with_result(PAGE, ["den", "10", "8", "66", "1", "today"], [new, stays])

    before, after = PAGE.splitlines(), changed.splitlines()
    assert [line for line in before if line not in after] == [before[5], *before[12:14]]
    assert [line for line in after if line not in before] == [
        "| den | 10 | 5 | 8 | 66 | 1 | today |",
        "| den | den/limit.py:2 `low` | `p → q` | |",
        "| den | den/limit.py:2 `low` | `a ¦ b → a + b` | sets: never both |",
    ]
    first = with_result(PAGE, ["new", "10", "8", "66", "1", "today"], [])
    assert "| new | 10 | 8 | 8 | 66 | 1 | today |" in first.splitlines()


def test_the_page_takes_results_and_the_list_has_every_room() -> None:
    with_result(REGISTER.read_text(), ["new", "10", "8", "66", "1", "today"], [])

    assert [line.split()[0] for line in listing(REGISTER.read_text()).splitlines()] == rooms()


def test_an_unknown_room_is_refused() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tools.mutants", "kitchen"],
        cwd=ROOT,
        env=os.environ,
        check=False,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 2
    assert done.stdout.startswith("kitchen is not a room. The rooms:\nartifacts")
