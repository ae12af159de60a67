"""Read a list of models, each with a command, variables and LiteLLM's parameters.  Pure.

Contract: `models` is a list of mappings, or a mapping from names to such mappings. Each mapping
needs `command` (text or words, with or without `vllm serve`) or `model`. `args` (text, words or a
mapping of flags) are added to the command. `env` has the server's variables. `litellm` has
LiteLLM's names and parameters for the server.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.flags import arguments
from gpufleet.importer import shell
from gpufleet.importer.other_engines import started_engine
from gpufleet.importer.proxy_names import read_deployment
from gpufleet.importer.server import Launch, Note, ProxyName
from gpufleet.settings.engine_flags import DEFAULT

_NAMES = ("name", "model_name", "id")
_ENVIRONMENT = ("env", "environment")
_COMMAND = ("command", "cmd", "vllm_command")
_ARGUMENTS = ("args", "extra_args", "vllm_args", "vllm", "flags")
_LITELLM = ("litellm", "litellm_params")
_MODEL = {"--model", "--model-path"}
_KNOWN = {*_NAMES, *_ENVIRONMENT, *_COMMAND, *_ARGUMENTS, *_LITELLM, "model", "port"}


def launches(models: Any, shared: Any) -> tuple[tuple[Launch, ...], tuple[Note, ...]]:
    """
    Return the servers of `models`. `shared` are variables for all servers, or None.

    Raises `FleetError` with every model that cannot be read.
    """
    problems: list[str] = []
    found: list[Launch] = []
    everywhere = dict(_pairs(shared))
    for at, (name, model) in enumerate(_models(models)):
        where = f"models.{name or at}"
        if not isinstance(model, Mapping):
            problems.append(f"{where} is not a mapping: write `command:` and `env:` below it")
            continue
        launch = _launch(name or f"model-{at + 1}", model, everywhere, where, problems)
        if launch is not None:
            found.append(launch)
    if problems:
        raise FleetError(*problems)
    return tuple(found), ()


def _models(models: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(models, Mapping):
        yield from ((str(name), model) for name, model in models.items())
    elif isinstance(models, list):
        for model in models:
            known = model if isinstance(model, Mapping) else {}
            yield str(next((known[key] for key in _NAMES if key in known), "")), model
    else:
        raise FleetError("`models` is neither a list nor a mapping of models")


def _launch(
    name: str, model: Mapping[str, Any], shared: Mapping[str, str], where: str, problems: list[str]
) -> Launch | None:
    said = _first(model, _COMMAND)
    notes: list[Note] = []
    environment = {**shared, **dict(_pairs(_first(model, _ENVIRONMENT)))}
    if said is None and "model" not in model:
        problems.append(f"{where} has neither `command` nor `model`, so its model is unknown")
        return None
    try:
        text = "" if said is None else _text(said)
        more = _text(_first(model, _ARGUMENTS) or "")
        if started_engine(text):  # `args` are then also arguments of this engine
            text, more = f"{text} {more}", ""
        started = shell.launches(text, name)
        argv = list(started[0].argv) if started else shlex.split(text)  # or it has only arguments
        argv += shlex.split(more)
    except ValueError:
        problems.append(f"{where}: a closing quote is missing, or the last character is \\")
        return None
    except FleetError as error:
        problems += (f"{where}: {problem}" for problem in error.problems)
        return None
    if started:
        environment |= started[0].environment
        notes += started[0].notes
    if started[1:]:
        text = f"the command starts {len(started)} servers, but only the first server is imported"
        notes.append(Note(f"{text}: give each entry a different name", decide=True))
    engine = started[0].engine if started else DEFAULT
    if model.get("model") is not None and not _names_a_model(argv):
        argv.insert(0, str(model["model"]))
    names, told = _litellm(_first(model, _LITELLM))
    notes += told
    notes += [
        Note(f"`{key}` is dropped, because it does not describe the server")
        for key in model
        if key not in _KNOWN
    ]
    port = str(model.get("port", ""))
    if port and not port.isdecimal():
        notes.append(Note("`port` is dropped, because it is not a whole number", decide=True))
    return Launch(
        name,
        tuple(argv),
        environment,
        int(port) if port.isdecimal() else None,
        notes=tuple(notes),
        proxy_names=names,
        engine=engine,
    )


def _names_a_model(argv: Sequence[str]) -> bool:
    """
    Return whether arguments contain the model: as the first argument or as the value of an option.
    """
    flagged = any(word.partition("=")[0] in _MODEL for word in argv)
    return flagged or (bool(argv) and not argv[0].startswith("-"))


def _text(said: Any) -> str:
    """
    Return a command as text in shell syntax.

    If the command is a list, its items are either words, which may contain spaces, or lines such as
    `--port 8001`. If the command is a mapping, its items are flags with their values.

    >>> _text(["--a", "x y"]), _text(["vllm serve m", "--a b"])
    ("--a 'x y'", 'vllm serve m --a b')
    """
    if isinstance(said, Mapping):
        flags = ((str(name).lstrip("-").replace("_", "-"), value) for name, value in said.items())
        return shlex.join(word for name, value in flags for word in arguments.words(name, value))
    if not isinstance(said, list):
        return str(said)
    words = [str(one) for one in said]
    lines = any(
        re.match(r"(-{1,2}[\w-]+|vllm|sglang|trtllm-serve|python3?)\s", word) for word in words
    )
    return " ".join(words) if lines else shlex.join(words)


def _litellm(said: Any) -> tuple[tuple[ProxyName, ...], tuple[Note, ...]]:
    """Return the names that LiteLLM has for a server, and notes about all other keys."""
    names: list[ProxyName] = []
    notes: list[Note] = []
    for each in said if isinstance(said, list) else [said]:
        if isinstance(each, Mapping):
            name, more = read_deployment(each)
            names.append(name)
            notes += more
        elif each is not None:
            notes.append(
                Note("`litellm` is dropped, because it is neither a mapping nor a list of mappings")
            )
    return tuple(names), tuple(notes)


def _first(model: Mapping[str, Any], keys: tuple[str, ...]) -> Any:
    return next((model[key] for key in keys if model.get(key) is not None), None)


def _pairs(said: Any) -> Iterator[tuple[str, str]]:
    if isinstance(said, Mapping):
        for name, value in said.items():
            yield str(name), str(value).lower() if isinstance(value, bool) else str(value)
    elif isinstance(said, list):
        for pair in said:
            name, _, value = str(pair).partition("=")
            yield name, value
