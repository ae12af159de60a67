"""Deploys and roles call each other, and operations, with arguments that these have.

pyinfra's decorators hide the signatures of what they wrap: mypy does not see these calls.
"""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from pyinfra.api.arguments import AllArguments

from tests.support.checkout import ROOT
from tests.support.rows import each_row

GLOBAL = {*AllArguments.__annotations__, "name"}
FILES = [
    *(ROOT / "deploys").glob("*.py"),
    *(ROOT / "roles").glob("*.py"),
    ROOT / "src/gpufleet/operations/build_release.py",
    ROOT / "src/gpufleet/operations/stage_model.py",
]


def imported(tree: ast.Module) -> dict[str, Callable[..., Any]]:
    """Return {name: what it is} of the decorated functions that a file imports or has."""
    found = {}
    for node in ast.walk(tree):
        if (
            isinstance(node, ast.ImportFrom)
            and node.module
            and node.module.split(".")[0]
            in {
                "gpufleet",
                "roles",
            }
        ):
            module = importlib.import_module(node.module)
            for each in node.names:
                value = getattr(module, each.name, None)
                if hasattr(value, "_inner"):
                    found[each.asname or each.name] = value._inner
    return found


def calls(path: Path) -> Iterator[tuple[ast.Call, Callable[..., Any]]]:
    """Give each call of a decorated function whose arguments are all written out or by name."""
    tree = ast.parse(path.read_text())
    known = imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in known:
            yield node, known[node.func.id]


def mistake(call: ast.Call, function: Callable[..., Any]) -> str:
    """Return what is wrong with the arguments of a call; "" if nothing is."""
    given = {each.arg: None for each in call.keywords if each.arg and each.arg not in GLOBAL}
    positional = [each for each in call.args if not isinstance(each, ast.Starred)]
    whole = len(positional) == len(call.args) and all(each.arg for each in call.keywords)
    signature = inspect.signature(function)
    try:
        # `**more` may hold what is missing, and nothing that is not known.
        (signature.bind if whole else signature.bind_partial)(*positional, **given)
    except TypeError as error:
        return f"line {call.lineno}: {function.__name__}: {error}"
    return ""


@each_row("path", FILES, ids=lambda path: path.stem)
def test_every_call_has_arguments_that_its_function_takes(path: Path) -> None:
    assert [said for call, function in calls(path) if (said := mistake(call, function))] == []


def test_most_calls_are_looked_at() -> None:
    """Otherwise the test above would say nothing: were the decorators to change, for instance."""
    assert sum(1 for path in FILES for _ in calls(path)) > 60
