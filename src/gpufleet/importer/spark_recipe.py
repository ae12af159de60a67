"""Read sparkrun's recipes of vLLM servers. Pure.

Contract: each `{key}` in a recipe's `command` is replaced by its value in `defaults`, as sparkrun
does. If a recipe has no command, each key of `defaults` becomes the option with the same name, with
a note. The rules are those of RECIPES.md of spark-arena/sparkrun at commit 1034742. A recipe for an
engine other than vLLM is refused, and the message has the name of its runtime.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.flags import arguments
from gpufleet.importer import shell
from gpufleet.importer.bounded_yaml import mapping, scalar_text
from gpufleet.importer.container import image_note, release_of
from gpufleet.importer.server import Launch, Note, Source
from gpufleet.settings.engine_flags import DEFAULT

_RUNTIMES = {"", "vllm", "vllm-distributed", "vllm-ray", "eugr-vllm"}
_RENAMED = {
    "tensor_parallel": "tensor-parallel-size",
    "pipeline_parallel": "pipeline-parallel-size",
    "data_parallel": "data-parallel-size",
}
_KEYS = {"model", "model_revision", "runtime", "container", "defaults", "env", "command", "name"}
_HINTS = {"runtime", "recipe_version", "container", "min_nodes", "cluster_only", "solo_only"}
_PLACEHOLDER = re.compile(r"\{([A-Za-z_]\w*)\}")
_ROUNDS = 8  # of replacements, because values may contain placeholders
_MOST = 1 << 16  # maximum number of characters in a command
_WHY = {
    "metadata": "it does not describe the server",
    "benchmark": "it does not describe the server",
    "recipe_version": "it does not describe the server",
    "max_nodes": "the plan decides over which nodes a replica goes",
}


def is_recipe(document: Mapping[str, Any]) -> bool:
    """Return whether a mapping has a model, and keys that only recipes have."""
    return (
        "model" in document
        and ("defaults" in document or "command" in document)
        and bool(_HINTS & set(document))
    )


def read_recipe(document: Mapping[str, Any], name: str) -> Source:
    """
    Return the server of a recipe. Raises `FleetError` if the recipe is for a different runtime.
    """
    runtime = scalar_text(document.get("runtime"))
    if runtime not in _RUNTIMES:
        raise FleetError(f"is a recipe for the runtime {runtime}, which is not vLLM")
    model = scalar_text(document.get("model"))
    defaults = {"model": model, **mapping(document.get("defaults"))}
    notes = [Note(f"`{key}` is dropped: {_WHY.get(key, 'it has no counterpart here')}")
             for key in document if key not in _KEYS]  # fmt: skip
    environment = {key: scalar_text(value) for key, value in mapping(document.get("env")).items()}
    argv: list[str] = []
    engine = DEFAULT
    if command := scalar_text(document.get("command")):
        started = shell.launches(_rendered(command, defaults), name)
        if not started:
            raise FleetError("is a recipe whose `command` has no `vllm serve`")
        argv += started[0].argv
        engine = started[0].engine
        environment |= started[0].environment
        notes += started[0].notes
        if started[1:]:
            notes.append(
                Note(f"its `command` starts {len(started)} servers: only the first is taken",
                     decide=True)
            )  # fmt: skip
    else:
        argv += (model, *_options(defaults, notes))
    if (revision := scalar_text(document.get("model_revision"))) and "--revision" not in argv:
        argv += ("--revision", revision)
    if runtime == "vllm-ray" and "--distributed-executor-backend" not in argv:
        argv += ("--distributed-executor-backend", "ray")
    nodes = document.get("min_nodes")
    if document.get("cluster_only") or (isinstance(nodes, int) and nodes > 1):
        notes.append(
            Note((
                "the recipe wants several nodes: set `span_nodes: true` if it also needs several "
                "of these nodes"
            ),
                 decide=True)
        )  # fmt: skip
    image = scalar_text(document.get("container"))
    if image:
        notes.insert(0, image_note(image))
    return Source(
        (
            Launch(
                name,
                tuple(argv),
                environment,
                version=release_of(image),
                notes=tuple(notes),
                engine=engine,
            ),
        )
    )


def _options(defaults: Mapping[str, Any], notes: list[Note]) -> Iterator[str]:
    notes.append(
        Note("it has no `command`, and sparkrun passes on those of `defaults` that its release "
             "knows: all are read here: remove those that it does not pass on", decide=True)
    )  # fmt: skip
    for key, value in defaults.items():
        if value is False:
            notes.append(Note(f"`{key}: false` is dropped: sparkrun writes nothing for it"))
        elif key != "model":
            yield from arguments.words(_RENAMED.get(key, key.replace("_", "-")), value)


def _rendered(command: str, defaults: Mapping[str, Any]) -> str:
    """
    Return a command after known placeholders are replaced. Unknown placeholders stay unchanged.
    """

    def value(match: re.Match[str]) -> str:
        if match[1] not in defaults:
            return match[0]
        found = defaults[match[1]]
        return json.dumps(found) if isinstance(found, Mapping | list) else scalar_text(found)

    for _ in range(_ROUNDS):
        rendered = _PLACEHOLDER.sub(value, command)
        if len(rendered) > _MOST:
            raise FleetError(
                f"its `command` has more than {_MOST:,} characters once its placeholders are filled"
            )
        if rendered == command:
            break
        command = rendered
    return command
