"""RUNS ON THE NODE: determine by trial how one release rewrites arguments before argparse.

vLLM's parser replaces underscores with dashes, combines `--config.key value` into JSON, and moves
the model to a different position. Each of these began with a different release. So this module runs
the release's own rewriting with short command lines.
"""

from __future__ import annotations

import argparse
from typing import Any, Dict, List, Optional

from gpufleet.on_node.flags.partial_import import UNBOUND, Modules

# An option for the trials with dotted options. It need not exist, because the rewriting does not
# check that.
_OPTION = "--compilation-config"

# {what releases have replaced -O3 with: the option}
_OPTIMIZATION: Dict[Any, str] = {
    ("M", "--optimization-level", "3"): "--optimization-level",
    ("M", "-O", '{"level": 3}'): "-O.level",
}


class _Rewritten(BaseException):
    """Raised in the parser to get the rewritten arguments."""

    def __init__(self, arguments: List[str]) -> None:
        super().__init__()
        self.arguments = arguments


def syntax(modules: Modules, parser_class: Any) -> Dict[str, Any]:
    """
    Return how the release's parser rewrites arguments before parsing:

      underscores      underscores in options count as dashes
      dotted           `--x.key v` is JSON for `--x`
      dotted_short     this also works with a short option
      dotted_lists     `--x.key+ a,b` is a list
      dotted_suffixes  1k is a number in dotted options
      json_suffixes    1k is a number in complete JSON
      model, model_equals  `--model X` and `--model=X` are "moved" to the front, "refused", or
                       "plain" flags
      model_first      --served-model-name is refused if the model does not come first
      optimization     the option that -O3 stands for
    """

    def rewritten(*arguments: str) -> Optional[List[str]]:
        """Return the rewritten arguments, or None if the parser refuses them while rewriting."""
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
