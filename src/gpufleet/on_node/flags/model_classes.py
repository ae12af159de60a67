"""RUNS ON THE NODE: one release's supported model classes, with their tasks.

A release lists them by task (vllm/model_executor/models/registry.py). Only these lists are read,
and the classes' files to find classes that transcribe. The models' code does not run.
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

`token` means a vector or a label for each token. `backend` means that the class serves any model of
the package transformers.
"""
_SPEECH = "SupportsTranscription"
_ONLY = "supports_transcription_only"


def model_classes(modules: Modules) -> Dict[str, List[str]]:
    """
    Return each class' sorted tasks; speech classes also, or only, have `transcribe`.

    The result is empty for a release without such lists.
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
    """Yield a list's classes, each with the module and the class that implement it."""
    if listed is UNBOUND or not isinstance(listed, dict):
        return
    for label, place in listed.items():
        if isinstance(label, str) and isinstance(place, tuple) and len(place) == 2:
            yield label, (str(place[0]), str(place[1]))


def _file(module: str) -> str:
    """Return the file of a module; a name without `vllm.` is in the registry's folder."""
    if module.startswith("vllm."):
        return module.replace(".", "/") + ".py"
    return _FOLDER + module.replace(".", "/") + ".py"


def _speech(text: str) -> Iterator[Tuple[str, bool]]:
    """Yield a file's classes that transcribe, and whether transcription is their only task."""
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
