"""RUNS ON THE NODE: build the argument parser of `sglang serve` with the release's own code.

`ServerArgs.add_cli_args` adds the arguments to a plain argparse parser, as in the release's
`prepare_server_args`. This module adds `--model-type`, because `sglang serve` handles this flag
before it parses (cli/serve.py).
"""

# ruff: noqa: SLF001 - argparse has no public way to ask a parser what it accepts
from __future__ import annotations

import argparse
from typing import Any, Dict, List

from gpufleet.on_node.flags.document import document_flags
from gpufleet.on_node.flags.parser import ParserError
from gpufleet.on_node.flags.partial_import import UNBOUND, Modules
from gpufleet.on_node.flags.placeholder import is_absent
from gpufleet.on_node.flags.source import Package

SGLANG = Package(
    "sglang",
    "SGLang",
    "sglang/srt/server_args.py",  # since 0.1.14: the server's arguments
    (
        ("sglang/_version.py", r"^__version__ = (?:version = )?['\"]([^'\"]+)"),
        ("sglang/version.py", r"^__version__ = ['\"]([^'\"]+)"),
        ("PKG-INFO", r"^Version: (\S+)"),
    ),
)

_ARGUMENTS = "sglang.srt.server_args"
# The module of the command `sglang`. Releases without it can only be started with
# `python -m sglang.launch_server`.
_SERVE = "sglang.cli.serve"
# The function with which SGLang 0.5.10 and newer accept the model as the first word.
_LEADING_MODEL = "_normalize_positional_model_path"
# Types with SGLang's own reading of numbers: 1K is not a number, and 1M is 1000 times 1000.
_TYPES = {"human_readable_int": "si_int", "json_list_type": "json"}


def serve_parser(modules: Modules) -> argparse.ArgumentParser:
    """Return the release's real argparse parser. Raises `ParserError` if there is none."""
    arguments = modules.value(_ARGUMENTS, "ServerArgs")
    if arguments is UNBOUND or is_absent(arguments):
        raise _unreadable(modules, "there is no ServerArgs")
    parser = argparse.ArgumentParser(prog="sglang serve")
    try:
        arguments.add_cli_args(parser)
    except (Exception, SystemExit) as error:
        raise _unreadable(modules, "%s: %s" % (type(error).__name__, error)) from error
    serve = modules.get(_SERVE)
    if serve is not None and '"--model-type"' in (modules.release.read(serve.path) or ""):
        parser.add_argument("--model-type", default="auto", help="Serving backend.")
    return parser


def _unreadable(modules: Modules, why: str) -> ParserError:
    last = "; ".join([why, *modules.unresolved[-5:]])
    return ParserError("no parser could be read from %s: %s" % (modules.release.place, last))


def flags(modules: Modules, helps: bool) -> List[Dict[str, Any]]:
    """Return every flag of the release."""
    parser = serve_parser(modules)
    for action in parser._actions:
        if isinstance(action.choices, (set, frozenset)):
            action.choices = sorted(action.choices)
    found = document_flags(parser, helps)
    required = {action.dest for action in parser._actions if action.required}
    for entry in found:
        if entry.get("type") in _TYPES:
            entry["type"] = _TYPES[entry["type"]]
        if entry["dest"] in required:
            entry["required"] = True
    return found


def syntax(modules: Modules) -> Dict[str, Any]:
    """
    Return how the release rewrites arguments before parsing. It only rewrites a leading model.
    """
    serve = modules.get(_SERVE)
    leading = serve is not None and serve.lookup(_LEADING_MODEL) is not UNBOUND
    return {"underscores": False, "leading_model": "--model-path" if leading else None}
