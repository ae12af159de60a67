"""RUNS ON THE NODE: build the argument parser of `vllm serve` with the release's own code."""

# ruff: noqa: SLF001 - argparse has no public way to ask a parser what it accepts
from __future__ import annotations

import argparse
import ast
import inspect
import sys
from functools import partial
from typing import Any, Dict, Iterator, Optional

from gpufleet.on_node.flags.partial_import import UNBOUND, Modules, Scope
from gpufleet.on_node.flags.placeholder import is_absent

# Modules that have `vllm serve`: first of 0.8 and newer, then of 0.5.5 to 0.7.
_COMMANDS = ("vllm.entrypoints.cli.serve", "vllm.scripts")
# Modules that have had `make_arg_parser`, for releases without `vllm serve` (until 0.5.4).
_PARSERS = ("vllm.entrypoints.openai.cli_args", "vllm.entrypoints.openai.api_server")
# Modules that have had the class of the parser.
_PARSER_CLASSES = ("vllm.engine.arg_utils", "vllm.utils.argparse_utils", "vllm.utils")
# Packages that register parsers of tool calls and of reasoning when they are imported.
_REGISTRIES = ("vllm.tool_parsers", "vllm.reasoning", "vllm.entrypoints.openai.tool_parsers")
# Modules that have had the function that collects the help texts of fields.
_DOCUMENTED = ("vllm.config.utils", "vllm.config", "vllm.engine.arg_utils")


class ParserError(Exception):
    """Raised if the release's code returned no parser. The text says which step failed."""


class _CapturedError(Exception):
    """Raised in a program that begins to parse, to get its parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def serve_parser(modules: Modules) -> argparse.ArgumentParser:
    """
    Return the real argparse parser of the release's `vllm serve`.

    If the release does not have this command, return the parser of its API server. Raises
    `ParserError` if there is no parser.
    """
    sys.argv = ["vllm", "serve"]  # if --help is in it, some releases hide --model
    for name in _DOCUMENTED:
        modules.replaced[name, "get_attr_docs"] = partial(attribute_docs, modules)
    for name in _REGISTRIES:
        registry = modules.get(name)
        if registry is not None:
            registry.run_all()
    command = next(filter(None, map(modules.get, _COMMANDS)), None)
    parser = None
    if command is not None:
        parser = _of_subcommand(modules, command) or _of_program(modules, command)
    parser = parser or _of_function(modules, command)
    if parser is None:
        raise ParserError(
            "no parser could be read from %s: %s"
            % (modules.release.place, "; ".join(modules.unresolved[-5:]))
        )
    return parser


def _of_subcommand(modules: Modules, command: Scope) -> Optional[argparse.ArgumentParser]:
    """Return the parser that the subcommand's class builds. The class also adds its own flags."""
    subcommand = command.lookup("ServeSubcommand")
    if subcommand is UNBOUND or is_absent(subcommand):
        return None
    try:
        parser = subcommand().subparser_init(parser_class(modules, command)().add_subparsers())
    except (Exception, SystemExit) as error:
        modules.unresolved.append("ServeSubcommand: %s: %s" % (type(error).__name__, error))
        return None
    return parser if isinstance(parser, argparse.ArgumentParser) else None


def _of_program(modules: Modules, command: Scope) -> Optional[argparse.ArgumentParser]:
    """Run `main` of the old command until it begins to parse. Return its subparser `serve`."""
    main = command.lookup("main")
    own = parser_class(modules, command)
    if main is UNBOUND or own is argparse.ArgumentParser:
        return None

    def parse_args(self: Any, *_args: Any, **_options: Any) -> Any:
        raise _CapturedError(self)

    real, own.parse_args = own.parse_args, parse_args
    try:
        main()
    except _CapturedError as captured:
        for action in captured.parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                return action.choices.get("serve")
    except (Exception, SystemExit) as error:
        modules.unresolved.append("main: %s: %s" % (type(error).__name__, error))
    finally:
        own.parse_args = real
    return None


def _of_function(modules: Modules, command: Optional[Scope]) -> Optional[argparse.ArgumentParser]:
    """
    Return the parser that `make_arg_parser` makes, or in newer releases, adds its arguments to.
    """
    for name in (*_imported(command, "make_arg_parser"), *_PARSERS):
        module = modules.get(name)
        make = UNBOUND if module is None else module.lookup("make_arg_parser")
        if make is UNBOUND or is_absent(make):
            continue
        parser = parser_class(modules, module)()
        try:
            made = make(parser) if inspect.signature(make).parameters else make()
        except (Exception, SystemExit) as error:
            modules.unresolved.append("make_arg_parser: %s: %s" % (type(error).__name__, error))
            continue
        return made or parser  # type: ignore[no-any-return]
    return None


def _imported(module: Optional[Scope], name: str) -> Iterator[str]:
    return iter(()) if module is None else module.sources(name)


def parser_class(modules: Modules, near: Optional[Scope] = None) -> Any:
    """Return the release's own parser class. Old releases without one use argparse's class."""
    for module in (near, *map(modules.get, _PARSER_CLASSES)):
        if module is not None:
            found = module.lookup("FlexibleArgumentParser")
            if found is not UNBOUND and not is_absent(found):
                return found
    return argparse.ArgumentParser


class _Docs(Dict[str, str]):
    def __missing__(self, name: str) -> str:
        return ""


def attribute_docs(modules: Modules, cls: type, *_: Any) -> Dict[str, str]:
    """
    Return {field: the docstring below it} for a dataclass of vLLM.

    This replaces vLLM's own function, which needs the source of imported classes.
    """
    docs = _Docs()
    for base in reversed(cls.__mro__):
        statement = modules.class_statement(base)
        body = [] if statement is None else statement.body
        for field, doc in zip(body, body[1:]):
            targets = getattr(field, "targets", None) or [getattr(field, "target", None)]
            if (
                isinstance(targets[0], ast.Name)
                and isinstance(doc, ast.Expr)
                and isinstance(doc.value, ast.Constant)
                and isinstance(doc.value.value, str)
            ):
                docs[targets[0].id] = inspect.cleandoc(doc.value.value)
    return docs
