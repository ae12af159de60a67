"""docs/develop/tests.md names a test on a node for every deploy, command and role.

docs/develop/security-tests.md names one for each property of security.
"""

from __future__ import annotations

import ast
import re

import pytest

from gpufleet.cli.main import gpufleet
from tests.conftest import lab_of
from tests.support.checkout import ROOT
from tests.support.commands import commands

# No roles: the package's own file, and what two of them have in common.
NO_ROLES = {"__init__", "_monitoring_common"}
PAGE = (ROOT / "docs/develop/tests.md").read_text()
SECURITY = (ROOT / "docs/develop/security-tests.md").read_text()


AUDIT = "The audit of November 2026"


def cells(title: str, page: str) -> list[tuple[str, ...]]:
    """Return the rows of a section's table, without backquotes."""
    section = page.split(f"\n## {title}\n")[1].split("\n## ", maxsplit=1)[0]
    lines = [line for line in section.splitlines() if line.startswith("| ")][2:]
    return [tuple(cell.strip().strip("`") for cell in line.strip("|").split("|")) for line in lines]


def rows(title: str, page: str = PAGE) -> list[tuple[str, str, str]]:
    """Return the rows of a table of three columns."""
    return [(what, suite, test) for what, suite, test in cells(title, page)]


def suite_of(test: str) -> str:
    """Return the suite that a test is in, by its file and its marks; fail if there is no such
    test."""
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / path).read_text())
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    assert not name or name in functions, f"{path} has no {name}"
    assert any(each.startswith("test_") for each in functions), f"{path} has no test"
    assigned = [node for node in tree.body if isinstance(node, ast.Assign)]
    marks = [ast.unparse(node) for node in assigned if "pytestmark" in ast.unparse(node.targets[0])]
    marks += [ast.unparse(each) for each in functions[name].decorator_list] if name else []
    if any("mark.long" in each and "pytest.param" not in each for each in marks):
        return "long"
    quick = lab_of(path)[0] == "the walk" or path.startswith("tests/unit/")
    return "quick" if quick and not any("mark.slow" in each for each in marks) else "nodes"


@pytest.mark.parametrize(
    ("title", "there"),
    [
        ("Deploys", [f"deploys/{each.name}" for each in (ROOT / "deploys").glob("*.py")]),
        ("Commands", [words for words, _ in commands(gpufleet)]),
        (
            "Roles",
            [each.stem for each in (ROOT / "roles").glob("*.py") if each.stem not in NO_ROLES],
        ),
    ],
)
def test_a_row_names_a_test_for_each_and_the_suite_that_it_is_in(
    title: str, there: list[str]
) -> None:
    table = rows(title)

    assert [what for what, _, _ in table] == sorted(there)
    assert [row for row in table if suite_of(row[2]) != row[1]] == []


def test_each_property_of_security_has_a_test_in_the_suite_that_its_row_says() -> None:
    titles = [each for each in re.findall(r"(?m)^## (.+)$", SECURITY) if each != AUDIT]
    table = [row for title in titles for row in rows(title, SECURITY)]

    assert len(table) > 30
    assert len({what for what, _, _ in table}) == len(table)
    assert [row for row in table if suite_of(row[2]) != row[1]] == []


def test_each_finding_of_the_audit_has_a_test_and_its_commits() -> None:
    table = cells(AUDIT, SECURITY)

    numbers = [*(f"F{at}" for at in range(1, 14)), *(f"R{at}" for at in range(1, 5))]
    assert list(dict.fromkeys(number for number, _, _, _ in table)) == numbers
    for _, _, test, commits in table:
        assert suite_of(test)
        assert re.fullmatch(r"[0-9a-f]{8}(, [0-9a-f]{8})*", commits), commits


def test_deploys_and_roles_run_on_nodes() -> None:
    tests = [test for title in ("Deploys", "Roles") for _, _, test in rows(title)]
    assert [test for test in tests if not test.startswith("tests/lab/")] == []


def test_every_file_of_a_role_is_in_the_table() -> None:
    """A role's own file is what its row names."""
    files = {each.name for each in (ROOT / "tests/lab/roles").glob("test_*.py")}
    named = {test.rpartition("/")[2] for _, _, test in rows("Roles") if "/roles/" in test}
    assert named == files


def test_no_two_files_have_a_lab_of_one_name() -> None:
    """Two workers would take each other's nodes away; files that share a lab import its id."""
    names = [
        name
        for path in (ROOT / "tests/lab").rglob("*.py")
        for name in re.findall(r'own_lab\("(\w+)"\)', path.read_text())
    ]
    assert len(names) > 20
    assert sorted(names) == sorted(set(names))
