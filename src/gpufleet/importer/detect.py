"""Recognise a text's kind, and read the servers in it.  Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

from gpufleet.errors import FleetError
from gpufleet.flags import schema
from gpufleet.importer import container, dockerfile, models_file, shell, supervisor
from gpufleet.importer.ansible import is_ini, is_inventory, read_ini, read_inventory
from gpufleet.importer.bounded_yaml import NoYamlError, load_documents, mapping
from gpufleet.importer.kubernetes import is_kubernetes, read_kubernetes
from gpufleet.importer.litellm_config import read_litellm
from gpufleet.importer.other_engines import started_engine
from gpufleet.importer.production_stack import read_stack
from gpufleet.importer.server import Launch, Note, Source
from gpufleet.importer.spark_recipe import is_recipe, read_recipe
from gpufleet.importer.vllm_config import is_config, read_config

_HOW = (
    "gpufleet can read: a list of models (`models:`, each with `command:`), a compose file "
    "with a vLLM service, vLLM's own `--config` file, LiteLLM's `model_list`, Kubernetes "
    "workloads, Helm values of vLLM's production-stack, a recipe of sparkrun, an Ansible "
    "inventory, a Dockerfile, programs of supervisord, or a text with `vllm serve ...` or "
    "`docker run ... vllm/vllm-openai ...`. SGLang, TensorRT-LLM or TGI can be in the "
    "place of vLLM"
)
_LONGEST = 1 << 18
"""The maximum number of characters in a text. A file for hundreds of servers has fewer."""
_STARTS = re.compile(r"vllm[\s./:]")
_SHOWN = 200  # characters of a text's keys in a message
_YAML = (".yml", ".yaml")


def read(text: str, file: str, name: str) -> Source:
    """
    Read the servers in a text.

    `file` is the file's name in messages. `name` is for a server that has no name in the text.
    Raises `FleetError` if nothing can be imported.
    """
    if len(text) > _LONGEST:
        raise FleetError(
            f"{file}: has {len(text):,} characters, but gpufleet reads at most "
            f"{_LONGEST:,}: give only the part with the servers"
        )
    try:
        found = _read(text, file, name)
    except FleetError as error:
        raise FleetError(*(f"{file}: {problem}" for problem in error.problems)) from None
    if not (found.launches or found.names or found.inventory):
        left_out = f" ({_short('; '.join(note.text for note in found.notes))})" * bool(found.notes)
        raise FleetError(f"{file}: the file does not start vLLM{left_out}; {_HOW}")
    return replace(found, launches=_named(found.launches))


def _read(text: str, file: str, name: str) -> Source:
    """Read the servers in a text, with the reader for the text's kind."""
    is_yaml = file.endswith(_YAML)
    try:
        documents = load_documents(text)
    except NoYamlError as error:
        if is_yaml:
            template = "{{" in text
            also = (
                "; the file is a template: give the output of `helm template` or of Ansible"
                * template
            )
            raise FleetError(f"is not valid YAML: {error}{also}") from None
        documents = ()
    mappings = [mapping(each) for each in documents if isinstance(each, Mapping)]
    if len(documents) == 1 and isinstance(documents[0], list) and _are_models(documents[0]):
        return _models({"models": documents[0]})
    if mappings and len(mappings) == len(documents):
        for is_kind, read_kind in _kinds(name):
            if is_kind(mappings):
                return read_kind(mappings)
        if is_yaml:
            keys = ", ".join(key for each in mappings for key in each) or "nothing"
            raise FleetError(f"has the keys {_short(keys)}, which is not a known format; {_HOW}")
    if is_ini(text) and not (_STARTS.search(text) or started_engine(text)):
        return read_ini(text)
    if dockerfile.is_dockerfile(text):
        text = dockerfile.as_script(text)
    elif supervisor.is_supervisor(text):
        text = supervisor.as_script(text)
    return Source(shell.launches(text, name))


_Documents: TypeAlias = Sequence[Mapping[str, Any]]


def _kinds(
    name: str,
) -> Iterator[tuple[Callable[[_Documents], bool], Callable[[_Documents], Source]]]:
    """Yield (function that recognises a kind of YAML, function that reads it) for each kind."""
    yield (
        lambda found: isinstance(found[0].get("services"), Mapping),
        lambda found: _compose(found[0]),
    )
    yield is_kubernetes, read_kubernetes
    yield lambda found: "servingEngineSpec" in found[0], lambda found: read_stack(found[0])
    yield lambda found: is_inventory(found[0]), lambda found: read_inventory(found[0])
    yield lambda found: is_recipe(found[0]), lambda found: read_recipe(found[0], name)
    yield lambda found: "models" in found[0], lambda found: _models(found[0])
    yield lambda found: "model_list" in found[0], lambda found: read_litellm(found[0])
    yield (
        lambda found: (
            all(isinstance(one, Mapping) and "command" in one for one in found[0].values())
            and bool(found[0])
        ),
        lambda found: _models({"models": found[0]}),
    )
    newest = schema.load(schema.versions()[-1])
    yield (
        lambda found: is_config(found[0], newest),
        lambda found: read_config(found[0], name, newest),
    )


def _are_models(found: Sequence[Any]) -> bool:
    return all(isinstance(one, Mapping) for one in found)


def _compose(document: Mapping[str, Any]) -> Source:
    launches, notes = container.from_compose(_expanded(document["services"]), shell.first_launch)
    return Source(launches, notes)


def _models(document: Mapping[str, Any]) -> Source:
    shared = document.get("env", document.get("environment"))
    launches, notes = models_file.launches(document["models"], shared)
    notes += tuple(
        Note(f"`{key}` is dropped, because it is not a model")
        for key in document
        if key not in {"models", "env", "environment"}
    )
    return Source(launches, notes)


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def _expanded(value: Any) -> Any:
    """
    Return values of compose after variables are replaced by their defaults. `$$` becomes a dollar
    sign.
    """
    if isinstance(value, str):
        return shell.expand(value.replace("$$", "\0"), {}).replace("\0", "$")
    if isinstance(value, Mapping):
        return {key: _expanded(below) for key, below in value.items()}
    return [_expanded(below) for below in value] if isinstance(value, list) else value


def _named(launches: tuple[Launch, ...]) -> tuple[Launch, ...]:
    """Return the servers. If several servers have the same name, numbers are added to it."""
    found: list[Launch] = []
    taken: dict[str, int] = {}
    for launch in launches:
        taken[launch.name] = taken.get(launch.name, 0) + 1
        again = taken[launch.name]
        found.append(launch if again == 1 else replace(launch, name=f"{launch.name}-{again}"))
    return tuple(found)
