"""RUNS ON THE NODE: list the environment variables of one release, with types and defaults.

vLLM has a table of functions, with one function for each variable. The table's source shows which
variables each function reads. Running a function shows its default, choices and accepted texts.
"""

from __future__ import annotations

import ast
import os
import re
from typing import Any, Callable, Dict, Iterator, List, Optional

from gpufleet.on_node.flags import document
from gpufleet.on_node.flags.partial_import import Modules
from gpufleet.on_node.flags.placeholder import TruthTests

_TABLES = ("environment_variables", "env_variables")
_VARIABLE = re.compile(r"[A-Z][A-Z0-9_]{3,}")
# Defaults that are paths are computed with this home directory, so that they are the same on every
# machine. The user that runs vLLM has a different home directory.
_BARE = {"HOME": "/root"}


def variables(modules: Modules) -> Dict[str, Dict[str, Any]]:
    """
    Return every variable of the release's table, with these keys:

      type, declared  type and default in the table's annotations
      default         the function's result in an empty environment
      choices, ignore_case  optional
      form            "integer" or "number", if any other text stops vLLM
      also            the other variables that the function reads
    """
    module = modules.get("vllm.envs")
    if module is None:
        return {}
    annotations = _annotations(module.tree)
    sources = _sources(module.tree)
    table = module.lookup(_TABLES[0])
    if not isinstance(table, dict):
        table = {}
    outside = dict(os.environ)
    try:
        return {
            name: _variable(name, source, annotations.get(name), table.get(name))
            for name, source in sources.items()
        }
    finally:
        os.environ.clear()
        os.environ.update(outside)


def _annotations(tree: ast.Module) -> Dict[str, ast.AnnAssign]:
    return {
        node.target.id: node
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }


def _sources(tree: ast.Module) -> Dict[str, ast.expr]:
    """Return the expression of every entry of the table, by the variable's name."""
    found = {}
    for statement in tree.body:
        targets = getattr(statement, "targets", None) or [getattr(statement, "target", None)]
        value = getattr(statement, "value", None)
        if getattr(targets[0], "id", None) in _TABLES and isinstance(value, ast.Dict):
            for key, entry in zip(value.keys, value.values):
                if isinstance(key, ast.Constant):
                    found[str(key.value)] = entry
    return found


def _variable(
    name: str,
    source: ast.expr,
    annotation: Optional[ast.AnnAssign],
    read: Optional[Callable[[], Any]],
) -> Dict[str, Any]:
    declared = None
    if annotation is not None and annotation.value is not None:
        declared = ast.unparse(annotation.value)
    entry = {
        "type": None if annotation is None else ast.unparse(annotation.annotation),
        "default": _default(read, declared),
        "declared": declared,
        "also": sorted(set(_looked_at(source)) - {name}),
        "form": _form(name, read),
        **_validated(read),
    }
    return {
        key: value
        for key, value in entry.items()
        if key in ("type", "default") or value not in (None, [], False)
    }


def _looked_at(source: ast.expr) -> Iterator[str]:
    """Yield the variables that an expression reads in a call or as `NAME in os.environ`."""
    for node in ast.walk(source):
        asked: List[Any] = []
        if isinstance(node, ast.Call):
            asked = node.args[:1]
        elif isinstance(node, ast.Compare) and "environ" in ast.dump(node.comparators[0]):
            asked = [node.left]
        elif isinstance(node, ast.Subscript):
            asked = [node.slice]
        for constant in asked:
            if isinstance(constant, ast.Constant) and _VARIABLE.fullmatch(str(constant.value)):
                yield str(constant.value)


def _default(read: Optional[Callable[[], Any]], declared: Optional[str]) -> Any:
    """
    Return the default of a function.

    If the default varies or needs other packages, return {"$runtime": ...}.
    """
    before = TruthTests.count
    first, second = (document.to_json_types(_with(read, {})) for _ in range(2))
    made = isinstance(first, dict) and "$runtime" in first
    constant = first == second and not made and TruthTests.count == before
    return first if constant else {"$runtime": declared}


class _Refused:
    """The result of `_with` for a text that vLLM refuses."""


def _with(read: Optional[Callable[[], Any]], environment: Dict[str, str]) -> Any:
    os.environ.clear()
    os.environ.update(_BARE)
    os.environ.update(environment)
    try:
        return _Refused() if read is None else read()
    except Exception:
        return _Refused()


def _validated(read: Optional[Callable[[], Any]]) -> Dict[str, Any]:
    """Return the choices that the function enforces, from its closure."""
    names = getattr(getattr(read, "__code__", None), "co_freevars", ())
    cells = dict(zip(names, getattr(read, "__closure__", None) or ()))
    if "choices" not in cells:
        return {}
    choices = cells["choices"].cell_contents
    try:
        choices = choices() if callable(choices) else choices
        exact = cells["case_sensitive"].cell_contents if "case_sensitive" in cells else True
        return {
            "choices": [str(choice) for choice in choices],
            "ignore_case": not exact,
            "form": None,  # `choices` is more precise
        }
    except Exception:  # the list of choices is in a package
        return {}


def _form(name: str, read: Optional[Callable[[], Any]]) -> Optional[str]:
    """
    Return which values a function accepts, found by trial.

    The values may be any text (None), JSON, numbers, or only integers.
    """

    def takes(text: str) -> bool:
        return not isinstance(_with(read, {name: text}), _Refused)

    if takes("no number") or not takes("1"):
        return None
    if takes('{"a": [1]}'):
        return "json"
    return "number" if takes("1.5") else "integer"
