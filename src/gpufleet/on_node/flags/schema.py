"""RUNS ON THE NODE or the controller: print the flags of one release's server as one document.

Takes PARAMETERS:
  source   a path, or "installed" for the release in the Python that runs this program
  engine   "vllm" or "sglang"
  seconds  the deadline
  helps, metrics, models  whether to add these parts; `metrics` and `models` are only for vLLM
Prints the document {"schema": 1, ...} that docs/configure/flags.md describes, or
{"refused": SENTENCE} with status 1.

Run the program with Python 3.10 or newer, which can parse the release's syntax. It runs parts of
the release's code (partial_import.py), imports no package, and writes nothing.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import sys
import types
from typing import Any, Dict

from gpufleet.on_node.flags import (
    environment,
    sglang_environment,
    sglang_parser,
    syntax,
    values,
)
from gpufleet.on_node.flags.document import document_flags
from gpufleet.on_node.flags.fakes import order_literals
from gpufleet.on_node.flags.limits import add_limits
from gpufleet.on_node.flags.metrics import release_metrics
from gpufleet.on_node.flags.model_classes import model_classes
from gpufleet.on_node.flags.parser import ParserError, parser_class, serve_parser
from gpufleet.on_node.flags.partial_import import Modules
from gpufleet.on_node.flags.source import SourceError, release
from gpufleet.on_node.flags.structs import MSGSPEC

FORMAT = 1
_SECONDS = 60.0
_PYTHON = (3, 10)
# Limit of recursion. Statements that bind names call each other to a depth of some hundred, and
# each of them needs several frames.
_DEPTH = 20_000


class _NoPackages:
    """A finder that prevents the release's code from importing packages."""

    @staticmethod
    def find_spec(name: str, _path: Any = None, _target: Any = None) -> None:
        """Refuse an import of a module that is not in the standard library or this program."""
        if name.partition(".")[0] not in {*sys.stdlib_module_names, "gpufleet"}:
            raise ImportError("%s is not imported here" % name)


def document(
    source: str, *, helps: bool = False, metrics: bool = False, models: bool = False
) -> Dict[str, Any]:
    """Return the document of one vLLM release. Raises `SourceError` or `ParserError`."""
    modules = Modules(release(source))
    _isolate("vllm", "VLLM_")
    parser = serve_parser(modules)
    flags = document_flags(parser, helps)
    add_limits(modules, flags)
    classes, enums = values.classes(modules, flags)
    found = {
        "schema": FORMAT,
        "vllm": modules.release.version,
        "syntax": syntax.syntax(modules, parser_class(modules)),
        "flags": flags,
        "classes": classes,
        "enums": enums,
        "values": values.lists(modules),
        "env": environment.variables(modules),
        "unresolved": modules.unresolved,
    }
    if metrics:
        found["metrics"] = release_metrics(modules.release)
    if models:
        found["models"] = model_classes(modules)
    return found


def sglang_document(source: str, *, helps: bool = False) -> Dict[str, Any]:
    """Return the document of one SGLang release. Raises `SourceError` or `ParserError`."""
    modules = Modules(release(source, sglang_parser.SGLANG), replaced={}, packages=MSGSPEC)
    _isolate("sglang", "SGL")
    environment_of = sglang_environment.variables(
        modules
    )  # before the parser reads some of the variables
    return {
        "schema": FORMAT,
        "sglang": modules.release.version,
        "syntax": sglang_parser.syntax(modules),
        "flags": sglang_parser.flags(modules, helps),
        "classes": {},
        "enums": {},
        "values": {},
        "env": environment_of,
        "unresolved": modules.unresolved,
    }


def _isolate(package: str, variables: str) -> None:
    """Isolate the release's code from installed packages and from the environment."""
    sys.modules[package] = types.ModuleType(package)  # hides an installed package
    sys.meta_path.insert(0, _NoPackages)
    sys.setrecursionlimit(_DEPTH)
    order_literals()
    for name in [name for name in os.environ if name.startswith(variables)]:
        del os.environ[name]


def _end_in_time(source: str, seconds: float) -> None:
    """At the deadline, print a refusal and end, even while the release's code runs."""

    def refuse(_number: int, _frame: Any) -> None:
        refused = {"refused": "%s was not read within %g s" % (source, seconds)}
        os.write(1, (json.dumps(refused) + "\n").encode())
        os._exit(1)

    signal.signal(signal.SIGALRM, refuse)
    signal.setitimer(signal.ITIMER_REAL, seconds)


def _answer(
    source: str,
    seconds: float = _SECONDS,
    *,
    engine: str = "vllm",
    helps: bool = False,
    metrics: bool = False,
    models: bool = False,
) -> Dict[str, Any]:
    python = "Python %d.%d" % sys.version_info[:2]
    if sys.version_info < _PYTHON:
        return {"refused": "%s is too old to read a release of %s" % (python, engine)}
    _end_in_time(source, seconds)
    try:
        if engine == "sglang":
            return sglang_document(source, helps=helps)
        return document(source, helps=helps, metrics=metrics, models=models)
    except (SourceError, ParserError) as error:
        return {"refused": str(error)}
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


def main(parameters: Dict[str, Any]) -> int:
    """Print the document, and return the exit status."""
    said = io.StringIO()  # the release's own output is no answer
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        answer = _answer(**parameters)
    print(json.dumps(answer))
    return int("refused" in answer)


if __name__ == "__main__":
    sys.exit(main(globals().get("PARAMETERS") or {"source": sys.argv[1]}))
