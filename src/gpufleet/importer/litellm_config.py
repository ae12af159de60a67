"""Convert LiteLLM's `config.yaml` to `litellm` in group_vars.  Pure.

Contract: if an entry of `model_list` is for a server that speaks vLLM's protocol, it becomes a name
in `litellm`. Notes report all other parts by their keys, without values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from gpufleet.importer.bounded_yaml import items, mapping
from gpufleet.importer.proxy_names import read_deployment
from gpufleet.importer.server import Note, ProxyName, Source

# LiteLLM's prefixes for vLLM servers. `openai/` means such a server if there is an address.
_VLLM = ("hosted_vllm/", "vllm/")
_OPENAI = ("openai/", "text-completion-openai/")
_READ = {"fallbacks", "model_group_alias"}
_WHY = {
    "general_settings": "`litellm` has its own clients and uses no database",
    "environment_variables": "the unit of LiteLLM has only the variables that gpufleet sets",
    "litellm_settings": "the gateway tries other servers, and limits requests",
    "router_settings": "the gateway divides requests, and tries other servers",
}


def read_litellm(document: Mapping[str, Any]) -> Source:
    """Return the names in a LiteLLM configuration, and notes about its other parts."""
    notes: list[Note] = []
    names: list[ProxyName] = []
    for at, each in enumerate(items(document.get("model_list"))):
        said = mapping(each)
        shown = f"model_list[{at}]"
        if not _is_vllm(mapping(said.get("litellm_params")) or said):
            notes.append(Note(f"{shown} is left out, because it uses no vLLM server"))
            continue
        name, more = read_deployment(said)
        names.append(name)
        notes += (Note(note.text, shown, note.decide) for note in more)
    for asked, others in _fallbacks(document):
        found = [each for each in names if each.name == asked]
        names = [replace(each, fallbacks=others) if each in found else each for each in names]
        if not found:
            notes.append(
                Note(
                    f"the fallbacks of `{asked}` are dropped, because no vLLM server has this name"
                )
            )
    for alias, target in _aliases(document):
        found = [each for each in names if each.name == target]
        if not found:
            notes.append(
                Note(
                    f"the alias `{alias}` is dropped, because no vLLM server has the "
                    f"name `{target}`"
                )
            )
            continue
        first = found[0]
        own = len(found) > 1 or first.parameters or first.fallbacks
        names.append(ProxyName(alias, target if own else first.asks))
    return Source((), (*notes, *_rest(document)), tuple(names))


def _is_vllm(params: Mapping[str, Any]) -> bool:
    model = str(params.get("model", ""))
    address = params.get("api_base") or params.get("base_url")
    return model.startswith(_VLLM) or (model.startswith(_OPENAI) and bool(address))


def _fallbacks(document: Mapping[str, Any]) -> Iterator[tuple[str, tuple[str, ...]]]:
    for key in ("router_settings", "litellm_settings"):
        for each in items(mapping(document.get(key)).get("fallbacks")):
            for name, others in mapping(each).items():
                yield name, tuple(map(str, items(others)))


def _aliases(document: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for alias, name in mapping(
        mapping(document.get("router_settings")).get("model_group_alias")
    ).items():
        yield alias, str(mapping(name).get("model", "") if isinstance(name, Mapping) else name)


def _rest(document: Mapping[str, Any]) -> Iterator[Note]:
    for key, value in document.items():
        if key == "model_list":
            continue
        below = mapping(value) if key in {"router_settings", "litellm_settings"} else {}
        keys = [one for one in below if one not in _READ] if below else [""]
        for one in keys:
            said = f"{key}.{one}" if one else key
            yield Note(f"`{said}` is dropped: {_WHY.get(key, 'gpufleet has no setting for it')}")
