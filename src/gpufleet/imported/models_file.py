"""A list of models, each with a command, variables and LiteLLM's parameters.  Pure.

Contract: `models` is a list of mappings or a mapping by name. Of each, `command` (text or words,
with or without `vllm serve`) or `model` is needed; `args` are added to it, `env` are its variables.
LiteLLM's part belongs to the proxy and is dropped, with a word about the name that it asks for.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.imported import shell
from gpufleet.imported.launch import Launch, Note

_NAMES = ("name", "model_name", "id")
_ENVIRONMENT = ("env", "environment")
_COMMAND = ("command", "cmd", "vllm_command")
_ARGUMENTS = ("args", "extra_args", "vllm_args")
_LITELLM = ("litellm", "litellm_params")
_KNOWN = {*_NAMES, *_ENVIRONMENT, *_COMMAND, *_ARGUMENTS, *_LITELLM, "model", "port"}
_PREFIXES = ("hosted_vllm/", "openai/", "vllm/", "text-completion-openai/")


def launches(models: Any, shared: Any) -> tuple[tuple[Launch, ...], tuple[Note, ...]]:
    """
    Return the servers of `models`; `shared` are variables of all of them, or None.

    Raises `FleetError` naming every model that cannot be read.
    """
    problems: list[str] = []
    found: list[Launch] = []
    everywhere = dict(_pairs(shared))
    for at, (name, model) in enumerate(_models(models)):
        where = f"models.{name or at}"
        if not isinstance(model, Mapping):
            problems.append(f"{where} is no mapping: write `command:`, `env:` below it")
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
        problems.append(f"{where} has neither `command` nor `model`: nothing says what it serves")
        return None
    if said is None:
        argv = [str(model["model"])]
    else:
        # Plain words keep their quotes when they are put together as a shell would read them.
        text = shlex.join(map(str, said)) if isinstance(said, list) else str(said)
        started = shell.launches(text, name)
        if started:
            argv = list(started[0].argv)
            environment |= started[0].environment
            notes += started[0].notes
        else:  # the arguments alone
            argv = [str(one) for one in said] if isinstance(said, list) else shlex.split(text)
    more = _first(model, _ARGUMENTS)
    argv += shlex.split(more) if isinstance(more, str) else [str(one) for one in more or ()]
    notes += _litellm(_first(model, _LITELLM))
    notes += [
        Note(f"`{key}` is dropped: it says nothing about the server")
        for key in model
        if key not in _KNOWN
    ]
    port = model.get("port")
    return Launch(
        name,
        tuple(argv),
        environment,
        port if isinstance(port, int) else None,
        notes=tuple(notes),
    )


def _litellm(said: Any) -> Iterator[Note]:
    if not isinstance(said, Mapping):
        return
    keys = ", ".join(str(key) for key in said)
    yield Note(f"litellm ({keys}) is dropped: it configures the proxy, not the server")
    asked = str(said.get("model", ""))
    for prefix in _PREFIXES:
        if asked.startswith(prefix):
            yield Note(
                f"LiteLLM asks the server for `{asked.removeprefix(prefix)}`: see that it is the "
                "`served_name`"
            )


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
