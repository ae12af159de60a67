"""RUNS ON THE NODE: the argument parser of `vllm serve`, built by the release's own code."""

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

# Where `vllm serve` itself is, newest first: 0.8 and newer; 0.5.5 to 0.7.
_COMMANDS = ("vllm.entrypoints.cli.serve", "vllm.scripts")
# Where `make_arg_parser` has been, for releases without `vllm serve` (until 0.5.4).
_PARSERS = ("vllm.entrypoints.openai.cli_args", "vllm.entrypoints.openai.api_server")
# Where the parser class has been.
_PARSER_CLASSES = ("vllm.engine.arg_utils", "vllm.utils.argparse_utils", "vllm.utils")
# Packages that register parsers of tool calls and of reasoning when they are imported.
_REGISTRIES = ("vllm.tool_parsers", "vllm.reasoning", "vllm.entrypoints.openai.tool_parsers")
# Where the function that collects the help texts of fields has been.
_DOCUMENTED = ("vllm.config.utils", "vllm.config", "vllm.engine.arg_utils")


class ParserError(Exception):
    """The release's code returned no parser; the text names the failed step."""


class _CapturedError(Exception):
    """Raised to get the parser out of a program that is about to parse."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def serve_parser(modules: Modules) -> argparse.ArgumentParser:
    """
    Return the real argparse parser of the release's `vllm serve`.

    For a release without that command it is the parser of the API server. Raises `ParserError`.
    """
    sys.argv = ["vllm", "serve"]  # releases look whether --help is in it, and then hide --model
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
    """Return the parser from the subcommand's class, which also adds its own flags."""
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
    """Run `main` of the old command until it parses, and return its subparser `serve`."""
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
    """Return the parser of `make_arg_parser`, which fills a given parser in newer releases."""
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
    """Return the release's own parser class, or argparse's for old releases without one."""
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
    Return the docstring below each field of a vLLM dataclass, by field name.

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
