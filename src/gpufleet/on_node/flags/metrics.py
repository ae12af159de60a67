"""RUNS ON THE NODE: find the Prometheus metrics in the code of one release.

A metric is found by a call of its class with a name. The name is a literal or a variable with a
literal value. Names that the code builds at run time (for some KV connectors) are not found.
"""

from __future__ import annotations

import ast
from typing import Any, Dict, Iterator, List, Optional, Tuple

from gpufleet.on_node.flags.source import Release

PREFIX = "vllm:"
_KINDS = ("counter", "gauge", "histogram", "summary", "info")
# The metrics in these files are read from a different server.
_READERS = ("vllm/benchmarks/", "vllm/v1/metrics/reader.py")


def release_metrics(release: Release) -> Dict[str, Dict[str, Any]]:
    """
    Return every metric as /metrics shows it, with `type`, `help`, `file`, `deprecated`, `hidden`.

    A counter's name ends in _total, because the client library adds this ending. A metric with
    `hidden` is shown only with --show-hidden-metrics-for-version. If a name is registered twice,
    the visible metric is returned.
    """
    found: Dict[str, Dict[str, Any]] = {}
    for path in release.names():
        text = release.read(path) or ""
        if ('"' + PREFIX in text or "'" + PREFIX in text) and not path.startswith(_READERS):
            tree = ast.parse(text, path)
            variables = dict(_variables(tree))
            for call, hidden in _calls(tree, False):
                name, entry = _metric(call, variables)
                if name and entry and (name not in found or found[name]["hidden"]):
                    found[name] = {**entry, "file": path, "hidden": hidden}
    return dict(sorted(found.items()))


def _calls(tree: ast.AST, hidden: bool) -> Iterator[Tuple[ast.Call, bool]]:
    """Yield every call, and whether it is under a condition on hidden metrics."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call):
            yield node, hidden
        if isinstance(node, ast.If) and "show_hidden" in ast.unparse(node.test):
            for inner in node.body:
                yield from _calls(inner, True)
            for inner in node.orelse:
                yield from _calls(inner, hidden)
        else:
            yield from _calls(node, hidden)


def _variables(tree: ast.AST) -> Iterator[Tuple[str, str]]:
    """Yield each variable whose value is a metric's name, with this name."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = _text(node.value)
            if value is not None and value.startswith(PREFIX):
                yield node.targets[0].id, value


def _metric(
    call: ast.Call, variables: Dict[str, str]
) -> Tuple[Optional[str], Optional[Dict[str, Any]]]:
    named = {keyword.arg: keyword.value for keyword in call.keywords}
    given = named.get("name", call.args[0] if call.args else None)
    name = variables.get(given.id) if isinstance(given, ast.Name) else _text(given)
    if name is None or not name.startswith(PREFIX):
        return None, None
    kind = _kind(call, named)
    if kind is None:
        return None, None
    if kind == "counter" and not name.endswith("_total"):
        name += "_total"
    if kind == "info" and not name.endswith("_info"):
        name += "_info"
    documentation = named.get("documentation", call.args[1] if len(call.args) > 1 else None)
    told = _text(documentation) or ""
    return name, {"type": kind, "help": told, "deprecated": "deprecat" in told.lower()}


def _kind(call: ast.Call, named: Dict[Any, ast.expr]) -> Optional[str]:
    """
    Return a metric's kind.

    It is known from the called class (`Counter(...)`, `self._counter_cls(...)`) or from a keyword.
    """
    words: List[ast.AST] = [call.func, *filter(None, (named.get("metric_type"), *call.args[2:3]))]
    for word in words:
        for kind in _KINDS:
            if kind in ast.unparse(word).lower():
                return kind
    return None


def _text(node: Optional[ast.expr]) -> Optional[str]:
    """
    Return the value of a constant string or of a concatenation of constants, or None otherwise.
    """
    try:
        value = None if node is None else ast.literal_eval(node)
    except ValueError:
        return None
    return value if isinstance(value, str) else None
