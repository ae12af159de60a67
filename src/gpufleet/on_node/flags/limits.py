"""RUNS ON THE NODE: find the limits of flags that vLLM checks at start but not in the parser.

The engine's arguments create config classes, and pydantic checks the fields of these classes. An
example is `CacheConfig(block_size=self.block_size)`. If a flag's value reaches a field unchanged,
the field's bounds and allowed names apply to the flag too. The limits are read from the source of
the calls and of the classes. If a value may change before it reaches the field, its flag gets no
limits.
"""

from __future__ import annotations

import ast
import dataclasses
import re
from typing import Any, Dict, FrozenSet, Iterator, List, NamedTuple, Optional

from gpufleet.on_node.flags.document import annotation_text
from gpufleet.on_node.flags.fakes import FieldInfo, is_checked
from gpufleet.on_node.flags.partial_import import UNBOUND, Modules

_ARGUMENTS = "vllm.engine.arg_utils"
_CLASS = "EngineArgs"
_NAMES = re.compile(r"Literal\[[^\]]*\]( \| None)?")
# Modes of validators that may change the value of a field.
_CHANGING = {"before", "wrap", "plain"}


class _Use(NamedTuple):
    """
    One keyword argument of a call that creates a config, and the switch that enables the call.
    """

    cls: str
    field: str
    needs: Optional[str]


def add_limits(modules: Modules, flags: List[Dict[str, Any]]) -> None:
    """Add `limits` to each flag whose value a config class checks when the server starts."""
    scope = modules.get(_ARGUMENTS)
    if scope is None:
        return
    statement = next(
        (one for one in scope.tree.body if isinstance(one, ast.ClassDef) and one.name == _CLASS),
        None,
    )
    if statement is None:
        return
    changed = set(_assigned(statement))
    uses: Dict[str, List[_Use]] = {}
    for dest, use in _uses(statement):
        uses.setdefault(dest, []).append(use)
    for flag in flags:
        dest = flag["dest"]
        for use in () if dest in changed else uses.get(dest, ()):
            limits = _limits(modules, modules.value(_ARGUMENTS, use.cls), use, "choices" in flag)
            if limits:
                flag["limits"] = limits
                break


def _limits(modules: Modules, cls: Any, use: _Use, listed: bool) -> Dict[str, Any]:
    """Return a field's bounds and allowed names, or {} if its class validates nothing."""
    if cls is UNBOUND or not is_checked(cls):
        return {}
    field = next((one for one in dataclasses.fields(cls) if one.name == use.field), None)
    if field is None or use.field in _changing(modules.class_statement(cls)):
        return {}
    found: Dict[str, Any] = {}
    if isinstance(field.default, FieldInfo):
        found.update(field.default.bounds)
    kind = annotation_text(field.type)
    if not listed and _NAMES.fullmatch(kind):
        found["type"] = kind
    if found:
        found["class"] = use.cls
        if use.needs:
            found["needs"] = use.needs
    return found


def _changing(statement: Optional[ast.ClassDef]) -> Iterator[str]:
    """Yield the fields for which a class has a validator that may change the value."""
    for function in () if statement is None else statement.body:
        for decorator in getattr(function, "decorator_list", ()):
            if not isinstance(decorator, ast.Call) or _name(decorator.func) != "field_validator":
                continue
            modes = {ast.literal_eval(one.value) for one in decorator.keywords if one.arg == "mode"}
            if modes & _CHANGING and not _lets_none_pass(function):
                yield from map(ast.literal_eval, decorator.args)


def _lets_none_pass(function: Any) -> bool:
    """Return whether a validator returns None unchanged and passes other values to the field."""
    body = [one for one in function.body if not isinstance(one, ast.Expr)]
    if len(body) != 2 or not isinstance(body[0], ast.If) or not isinstance(body[1], ast.Return):
        return False
    value, handler = (one.arg for one in function.args.args[-2:])
    written = [ast.unparse(one) for one in (body[0].test, *body[0].body, body[1])]
    return written == [f"{value} is None", f"return {value}", f"return {handler}({value})"]


def _name(node: ast.AST) -> str:
    return getattr(node, "id", getattr(node, "attr", ""))


def _assigned(statement: ast.ClassDef) -> Iterator[str]:
    """Yield the attributes whose values from the command line the class may change."""
    for function in statement.body:
        copies: Dict[str, str] = {}
        for node in ast.walk(function):
            if isinstance(node, ast.Assign):
                target: Any = node.targets[0]
                value: Any = node.value
                if isinstance(target, ast.Name) and _own(value):
                    copies[target.id] = value.attr
        yield from _overwritten(function, copies, frozenset())


def _overwritten(node: ast.AST, copies: Dict[str, str], unset: FrozenSet[str]) -> Iterator[str]:
    """Yield the attributes that are assigned outside `if self.NAME is None`."""
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        for target in getattr(node, "targets", None) or [getattr(node, "target", None)]:
            if _own(target) and target.attr not in unset:
                yield target.attr
    taken: List[ast.stmt] = []
    if isinstance(node, ast.If):
        taken = node.body
        for one in taken:
            yield from _overwritten(one, copies, unset.union(_known_unset(node.test, copies)))
    for child in ast.iter_child_nodes(node):
        if child not in taken:
            yield from _overwritten(child, copies, unset)


def _known_unset(test: ast.expr, copies: Dict[str, str]) -> Iterator[str]:
    """
    Yield the attributes that are None if `test` is true. `copies` maps local names to attributes.
    """
    if isinstance(test, ast.BoolOp) and isinstance(test.op, ast.And):
        for part in test.values:
            yield from _known_unset(part, copies)
    elif (
        isinstance(test, ast.Compare)
        and isinstance(test.ops[0], ast.Is)
        and isinstance(test.comparators[0], ast.Constant)
        and test.comparators[0].value is None
    ):
        left: Any = test.left
        if _own(left):
            yield left.attr
        elif isinstance(left, ast.Name) and left.id in copies:
            yield copies[left.id]


def _own(node: Any) -> bool:
    return isinstance(node, ast.Attribute) and _name(node.value) == "self"


def _uses(node: ast.AST, needs: "tuple[str, ...]" = ()) -> Iterator["tuple[str, _Use]"]:
    """
    Yield each attribute that a call passes to a config unchanged, with the use.

    If the call depends on any other condition than one switch, the use has "?" as the switch.
    """
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and len(needs) < 2:
        for keyword in node.keywords:
            if _own(keyword.value) and keyword.arg and needs != ("?",):
                attribute: Any = keyword.value
                yield attribute.attr, _Use(node.func.id, keyword.arg, needs[0] if needs else None)
    if isinstance(node, (ast.If, ast.IfExp)):
        test: Any = node.test
        held = test.attr if _own(test) else "?"
        taken = node.body if isinstance(node.body, list) else [node.body]
        other = node.orelse if isinstance(node.orelse, list) else [node.orelse]
        yield from _uses(node.test, needs)
        for one in taken:
            yield from _uses(one, (*needs, held))
        for one in other:
            yield from _uses(one, (*needs, "?"))
        return
    for child in ast.iter_child_nodes(node):
        yield from _uses(child, needs)
