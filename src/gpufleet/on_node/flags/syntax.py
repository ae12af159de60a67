"""RUNS ON THE NODE: determine by trial how one release rewrites arguments before argparse.

vLLM's parser turns underscores into dashes, gathers `--config.key value` into JSON and moves the
model. Each of these began with a different release, so this module runs the release's own rewriting
on short command lines.
"""

from __future__ import annotations

import argparse
from typing import Any, Dict, List, Optional

from gpufleet.on_node.flags.partial_import import UNBOUND, Modules

# An option that every release with dotted options could have; rewriting does not look it up.
_OPTION = "--compilation-config"

# What -O3 has been turned into.
_OPTIMIZATION: Dict[Any, str] = {
    ("M", "--optimization-level", "3"): "--optimization-level",
    ("M", "-O", '{"level": 3}'): "-O.level",
}


class _Rewritten(BaseException):
    """Carries the rewritten arguments out of the parser."""

    def __init__(self, arguments: List[str]) -> None:
        super().__init__()
        self.arguments = arguments


def syntax(modules: Modules, parser_class: Any) -> Dict[str, Any]:
    """
    Return how the release's parser rewrites arguments before parsing.

    `underscores`: underscores in options count as dashes. `dotted`: `--x.key v` is JSON for `--x`,
    also with a short option (`dotted_short`), `--x.key+ a,b` is a list (`dotted_lists`), and 1k is
    a number there (`dotted_suffixes`), or within complete JSON (`json_suffixes`). `model` and
    `model_equals`: `--model X` and `--model=X` are "moved" to the front, "refused", or "plain"
    flags. `model_first`: --served-model-name is refused without it. `optimization`: the option that
    -O3 stands for.
    """

    def rewritten(*arguments: str) -> Optional[List[str]]:
        """Return the rewritten arguments, or None if the parser refuses them at once."""
        try:
            parser_class().parse_args(["serve", *arguments])
        except _Rewritten as done:
            return done.arguments[1:]
        except Exception:
            return None
        return None

    def treatment(*arguments: str) -> str:
        line = rewritten(*arguments)
        return "refused" if line is None else "moved" if line == ["M"] else "plain"

    real = argparse.ArgumentParser.parse_args
    argparse.ArgumentParser.parse_args = _raise_rewritten  # type: ignore[method-assign,assignment]
    try:
        dotted = rewritten("M", _OPTION + ".key", "3") == ["M", _OPTION, '{"key": 3}']
        return {
            "underscores": rewritten("M", "--a_b", "c") == ["M", "--a-b", "c"],
            "dotted": dotted,
            "dotted_short": dotted and rewritten("M", "-cc.key=3") == ["M", "-cc", '{"key": 3}'],
            "dotted_lists": dotted
            and rewritten("M", _OPTION + ".key+", "x") == ["M", _OPTION, '{"key": ["x"]}'],
            "dotted_suffixes": dotted
            and rewritten("M", _OPTION + ".key", "1k") == ["M", _OPTION, '{"key": 1000}'],
            "json_suffixes": _expands(modules),
            "model": treatment("--model", "M"),
            "model_equals": treatment("--model=M"),
            "model_first": rewritten("--served-model-name", "x") is None,
            "optimization": _OPTIMIZATION.get(tuple(rewritten("M", "-O3") or ())),
        }
    finally:
        argparse.ArgumentParser.parse_args = real  # type: ignore[method-assign]


def _raise_rewritten(_parser: Any, arguments: Any = None, _namespace: Any = None) -> Any:
    raise _Rewritten(list(arguments))


def _expands(modules: Modules) -> bool:
    name = "_expand_json_human_readable_numbers"
    return modules.value("vllm.engine.arg_utils", name) is not UNBOUND
