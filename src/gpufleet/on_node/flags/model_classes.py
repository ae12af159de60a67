"""RUNS ON THE NODE: list the model classes that one release supports, with their tasks.

A release lists the classes by task (vllm/model_executor/models/registry.py). These lists are read,
and also the files of the classes, to find classes that transcribe speech. The models' code does not
run.
"""

from __future__ import annotations

import ast
from typing import Any, Dict, Iterator, List, Set, Tuple

from gpufleet.on_node.flags.partial_import import UNBOUND, Modules

_REGISTRY = "vllm.model_executor.models.registry"
_FOLDER = "vllm/model_executor/models/"
LISTS = {
    "_TEXT_GENERATION_MODELS": "generate",
    "_MULTIMODAL_MODELS": "generate",
    "_TRANSFORMERS_SUPPORTED_MODELS": "generate",
    "_EMBEDDING_MODELS": "embed",
    "_CROSS_ENCODER_MODELS": "classify",
    "_SEQUENCE_CLASSIFICATION_MODELS": "classify",
    "_REWARD_MODELS": "reward",
    "_LATE_INTERACTION_MODELS": "token",
    "_TOKEN_CLASSIFICATION_MODELS": "token",
    "_TRANSFORMERS_BACKEND_MODELS": "backend",
}
"""The task of the models in each of a release's lists.

With the task `token`, a model returns a vector or a label for each token. With `backend`, the class
can serve any model of the package transformers.
"""
_SPEECH = "SupportsTranscription"
_ONLY = "supports_transcription_only"


def model_classes(modules: Modules) -> Dict[str, List[str]]:
    """
    Return {class: its sorted tasks}.

    Classes for speech have the task `transcribe`, alone or with other tasks. The result is empty if
    the release has no such lists.
    """
    found: Dict[str, Set[str]] = {}
    speech: Dict[str, Dict[str, bool]] = {}
    for name, use in LISTS.items():
        listed = modules.value(_REGISTRY, name)
        for label, (module, cls) in _entries(listed):
            uses = found.setdefault(label, set())
            uses.add(use)
            if module not in speech:
                speech[module] = dict(_speech(modules.release.read(_file(module)) or ""))
            only = speech[module].get(cls)
            if use == "generate" and only is not None:
                uses.add("transcribe")
                if only:
                    uses.discard("generate")
    return {label: sorted(uses) for label, uses in sorted(found.items())}


def _entries(listed: Any) -> Iterator[Tuple[str, Tuple[str, str]]]:
    """Yield the classes in a list. Each has the module and the class that implement it."""
    if listed is UNBOUND or not isinstance(listed, dict):
        return
    for label, place in listed.items():
        if isinstance(label, str) and isinstance(place, tuple) and len(place) == 2:
            yield label, (str(place[0]), str(place[1]))


def _file(module: str) -> str:
    """Return the file of a module. A name without `vllm.` is a module in the registry's folder."""
    if module.startswith("vllm."):
        return module.replace(".", "/") + ".py"
    return _FOLDER + module.replace(".", "/") + ".py"


def _speech(text: str) -> Iterator[Tuple[str, bool]]:
    """
    Yield the classes in a file that transcribe speech, and whether this is their only task.
    """
    if _SPEECH not in text:
        return
    for statement in ast.parse(text).body:
        if isinstance(statement, ast.ClassDef) and _SPEECH in map(ast.unparse, statement.bases):
            only = any(
                isinstance(each, (ast.Assign, ast.AnnAssign))
                and each.value is not None
                and ast.unparse(each).startswith(_ONLY)
                and ast.unparse(each.value) == "True"
                for each in statement.body
            )
            yield statement.name, only
