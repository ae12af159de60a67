"""RUNS IN A RELEASE: which routes vLLM's server of this release can have.

Prints JSON, [[kind, path, [method, ...]], ...]: what its own `build_app` registers for every task
that it knows, with the routes that control a server, and every router of its modules, for some are
registered only for a model of their kind. Kinds are "http", "websocket" and "mount".
"""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import pkgutil
import sys
from collections.abc import Iterable, Iterator
from typing import Any, get_args

os.environ["VLLM_SERVER_DEV_MODE"] = "1"
os.environ["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"

import fastapi
import vllm.entrypoints
import vllm.tasks
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser


def tasks(kind: Any) -> Iterator[str]:
    """Yield the words of a Literal, or of a union of them."""
    for each in get_args(kind):
        yield from tasks(each) if get_args(each) else [each]


def routes(found: Iterable[Any], prefix: str = "") -> Iterator[tuple[str, str, tuple[str, ...]]]:
    """Yield each route, those below mounts and routers too."""
    for each in found:
        path = prefix + getattr(each, "path", "")
        below = getattr(each, "routes", None)
        if below:
            yield from routes(below, path)
            continue
        methods = tuple(sorted(getattr(each, "methods", None) or ()))
        kind = "websocket" if "WebSocket" in type(each).__name__ else "http"
        yield ("mount" if type(each).__name__ == "Mount" else kind), path, methods


def everything() -> Iterator[tuple[str, str, tuple[str, ...]]]:
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    yield from routes(build_app(arguments, tuple(tasks(vllm.tasks.SupportedTask)), None).routes)
    home = vllm.entrypoints
    for module in pkgutil.walk_packages(home.__path__, home.__name__ + "."):
        try:
            there = vars(importlib.import_module(module.name))
        except Exception as error:  # noqa: BLE001  # it needs a package that this build has not
            sys.stderr.write(f"{module.name}: {error}\n")
            continue
        for each in there.values():
            if isinstance(each, fastapi.APIRouter):
                yield from routes(each.routes)


with contextlib.redirect_stdout(io.StringIO()):
    listed = sorted(set(everything()))
print(json.dumps(listed))
