"""Convert LiteLLM's names and parameters to `litellm` in group_vars.  Pure.

Contract: LiteLLM's deployment of a server becomes a name with entries, parameters and fallbacks. A
part that cannot be converted becomes a note with the part's key. A value that has no setting is
never shown, because it may be a key.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from gpufleet.importer.server import Note, ProxyName
from gpufleet.settings.litellm_settings import Parameters

PREFIXES = ("hosted_vllm/", "openai/", "vllm/", "text-completion-openai/")
"""The prefixes of model names with which LiteLLM chooses a protocol."""

_PUBLIC = re.compile(r"[\w.:/-]+")
_WHY = {
    "api_base": "LiteLLM asks the gateway, which knows the servers",
    "base_url": "LiteLLM asks the gateway, which knows the servers",
    "api_key": "`litellm.upstream_key_file` names the file with LiteLLM's key for the gateway",
    "timeout": "`litellm.request_seconds` is for all names",
    "stream_timeout": "`litellm.request_seconds` is for all names",
    "max_retries": "the gateway tries other servers",
    "num_retries": "the gateway tries other servers",
    "rpm": "`gateway.clients` limits requests",
    "tpm": "`gateway.clients` limits requests",
    "weight": "the gateway divides requests over replicas",
    "order": "the gateway divides requests over replicas",
}


def read_deployment(said: Mapping[str, Any]) -> tuple[ProxyName, tuple[Note, ...]]:
    """
    Return the name of one deployment in `model_list`, and notes about its other keys.

    The parameters may be in `litellm_params`, or in the same mapping as the name.
    """
    inner = said.get("litellm_params")
    params = inner if isinstance(inner, Mapping) else {}
    around = {key: value for key, value in said.items() if key != "litellm_params" or not params}
    notes: list[Note] = []
    name = around.pop("model_name", None)
    asks = params.get("model", around.get("model"))
    kept: dict[str, Any] = {}
    for key, value in (*around.items(), *params.items()):
        if key == "model":
            continue
        if key not in Parameters.model_fields:
            why = _WHY.get(str(key), "`litellm` has no setting for it")
            notes.append(Note(f"`litellm`'s `{key}` is dropped: {why}"))
            continue
        given = [value] if key == "stop" and isinstance(value, str) else value
        try:
            Parameters.model_validate({key: given})
        except ValidationError:
            notes.append(
                Note(
                    f"`litellm`'s `{key}` is dropped: this value is not allowed in `parameters`",
                    decide=True,
                )
            )
        else:
            kept[str(key)] = given
    return (
        ProxyName(
            None if name is None else str(name),
            None if asks is None else without_prefix(str(asks)),
            kept,
        ),
        tuple(notes),
    )


def without_prefix(model: str) -> str:
    """
    Return the model's name without LiteLLM's prefix, as LiteLLM sends it to a server.

    >>> without_prefix("hosted_vllm/org/name")
    'org/name'
    """
    return next((model.removeprefix(each) for each in PREFIXES if model.startswith(each)), model)


def proxy_settings(
    asked: Iterable[tuple[ProxyName, str | None]], served: Mapping[str, str]
) -> tuple[dict[str, Any], list[Note]]:
    """
    Return the settings for `litellm` in group_vars, and notes.

    `asked` has names, each with its entry of `serving`, or None if the entry is unknown. `served`
    maps entries to the names under which their servers serve the model.
    """
    groups: dict[str, list[tuple[ProxyName, str | None]]] = {}
    notes: list[Note] = []
    for one, entry in asked:
        own = one.asks if entry is None else served[entry]
        if entry is not None and one.asks not in {None, own}:
            notes.append(
                Note(
                    f"LiteLLM requests the model `{one.asks}`, but the server has the name "
                    f"`{own}`: make sure that `{one.asks}` is the `served_name`",
                    entry,
                    decide=True,
                )
            )
        behind = entry or next((key for key, name in served.items() if name == own), None)
        name = one.name or own
        if name is None:
            continue
        if not _PUBLIC.fullmatch(name):
            notes.append(
                Note(
                    f"`{name}` is dropped, because it is not a valid name for `litellm`",
                    decide=True,
                )
            )
            continue
        groups.setdefault(name, []).append((one, behind))
    models: dict[str, Any] = {}
    aliases: dict[str, str] = {}
    for name, members in groups.items():
        notes += _name(name, members, served, models, aliases)
    found = {"models": models, "aliases": aliases}
    return {key: value for key, value in found.items() if value}, notes


def _name(
    name: str,
    members: Sequence[tuple[ProxyName, str | None]],
    served: Mapping[str, str],
    models: dict[str, Any],
    aliases: dict[str, str],
) -> Iterable[Note]:
    """Add one name to `models` or to `aliases`, and yield notes about the name."""
    entries = tuple(dict.fromkeys(entry for _, entry in members if entry is not None))
    asked = (served[entry] if entry else one.asks for one, entry in members)
    behind = tuple(dict.fromkeys(each for each in asked if each is not None))
    parameters = dict(members[0][0].parameters)
    for one, _ in members[1:]:
        for key in {*parameters} | {*one.parameters}:
            if parameters.get(key) != one.parameters.get(key):
                yield Note(
                    f"litellm.models.{name}: the servers of this name have different values "
                    f"of `{key}`, but a name can have only one value, so `{key}` is left out",
                    decide=True,
                )
                parameters.pop(key, None)
    fallbacks = tuple(dict.fromkeys(each for one, _ in members for each in one.fallbacks))
    more: dict[str, Any] = {"parameters": parameters} if parameters else {}
    if fallbacks:
        more["fallbacks"] = list(fallbacks)
    if behind == (name,):
        if more:
            models[name] = more
            yield Note(f"litellm.models.{name} contains the defaults for requests")
    elif len(behind) == 1 and not more:
        aliases[name] = behind[0]
        yield Note(f"litellm.aliases.{name} is an alias of {behind[0]}")
    else:
        models[name] = {"entries": list(entries), **more}
        if len(entries) < len(behind) or not behind:
            servers = ", ".join(behind) or "a server whose name it does not contain"
            yield Note(
                f"litellm.models.{name} requests {servers}: under `entries`, write the "
                "entries of `serving` that have these names",
                decide=True,
            )
