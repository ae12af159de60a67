"""RUNS ON THE NODE: find the top-level statements of a module that bind a name."""

from __future__ import annotations

import ast
from typing import Dict, Iterator, List

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_COMPOUND = (ast.For, ast.While, ast.With, ast.If, ast.Try, ast.ExceptHandler)


class Bindings:
    """
    The statements of one module that bind names, in the order of the module.

    `at_run_time` has the statements by name, without statements under `if TYPE_CHECKING`. `stars`
    has the imports with a star. `postponed` is true if the module's annotations are not evaluated.
    """

    def __init__(self, tree: ast.Module) -> None:
        self.at_run_time: Dict[str, List[ast.stmt]] = {}
        self.stars: List[ast.ImportFrom] = []
        self._for_type_checkers: Dict[str, List[ast.stmt]] = {}
        self.postponed = any(
            isinstance(statement, ast.ImportFrom) and statement.module == "__future__"
            for statement in tree.body
        )
        self._add(tree.body, self.at_run_time)

    def binding(self, name: str) -> List[ast.stmt]:
        """
        Return the statements that bind `name`.

        If there are none, return the statements under `if TYPE_CHECKING` that bind it.
        """
        return self.at_run_time.get(name) or self._for_type_checkers.get(name) or []

    def _add(self, body: List[ast.stmt], to: Dict[str, List[ast.stmt]]) -> None:
        for statement in body:
            if isinstance(statement, ast.If) and "TYPE_CHECKING" in ast.dump(statement.test):
                negated = isinstance(statement.test, ast.UnaryOp)
                self._add(statement.body, to if negated else self._for_type_checkers)
                self._add(statement.orelse, self._for_type_checkers if negated else to)
                continue
            if isinstance(statement, ast.ImportFrom) and statement.names[0].name == "*":
                self.stars.append(statement)
            for name in dict.fromkeys(bound_names(statement)):
                to.setdefault(name, []).append(statement)


def bound_names(statement: ast.AST) -> Iterator[str]:
    """
    Yield the names that a statement binds or modifies.

    `X.y = ...` and `X[y] = ...` modify X, so these statements are part of X's definition.
    """
    if isinstance(statement, _DEFINITIONS):
        yield statement.name
    elif isinstance(statement, ast.Import):
        yield from (alias.asname or alias.name.partition(".")[0] for alias in statement.names)
    elif isinstance(statement, ast.ImportFrom):
        yield from (alias.asname or alias.name for alias in statement.names if alias.name != "*")
    elif isinstance(statement, ast.AnnAssign):
        if statement.value is not None:
            yield from _targets(statement.target)
    elif isinstance(statement, ast.Assign):
        for target in statement.targets:
            yield from _targets(target)
    elif isinstance(statement, ast.AugAssign):
        yield from _targets(statement.target)
    elif isinstance(statement, _COMPOUND):
        if isinstance(statement, ast.For):
            yield from _targets(statement.target)
        for inner in ast.iter_child_nodes(statement):
            if isinstance(inner, (ast.stmt, ast.ExceptHandler)):
                yield from bound_names(inner)


def _targets(target: ast.expr) -> Iterator[str]:
    if isinstance(target, (ast.Tuple, ast.List)):
        for part in target.elts:
            yield from _targets(part)
    elif isinstance(target, (ast.Attribute, ast.Subscript, ast.Starred)):
        yield from _targets(target.value)
    elif isinstance(target, ast.Name):
        yield target.id
