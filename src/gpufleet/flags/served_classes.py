"""
Return the model classes for which a release of vLLM has code, and the tasks of each class.

tools/collect_flags.py collects the data from each release (`on_node/flags/model_classes.py`). If no
packaged release lists a class, the result is unknown, because the class belongs to a publisher or a
plug-in. The module is pure, except that it reads its own data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache

from gpufleet.flags.schema import packaged_part, packaged_releases, sort_key

# If vLLM does not have a class with one of these endings, it uses and converts the class with the
# same beginning and an ending in _TEXT (_normalize_arch in model_executor/models/registry.py of
# 0.32.0).
_CONVERTED = (
    "ForSequenceClassification", "ForAudioClassification", "ForImageClassification",
    "ForVideoClassification", "ClassificationModel", "ForRewardModeling", "RewardModel",
    "ForTextEncoding", "EmbeddingModel", "Model",
)  # fmt: skip
_TEXT = ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel")
# The class of vLLM that runs transformers' classes if vLLM has no code of its own, by kind.
_BACKENDS = {
    "generate": "TransformersForCausalLM",
    "embed": "TransformersEmbeddingModel",
    "rerank": "TransformersForSequenceClassification",
    "classify": "TransformersForSequenceClassification",
}


@cache
def classes(version: str) -> Mapping[str, tuple[str, ...]] | None:
    """
    Return the tasks that a release lists for each class, or None if its lists are not packaged.
    """
    part = packaged_part("models", version)
    return None if part is None else {name: tuple(uses) for name, uses in json.loads(part).items()}


def has_code(version: str, name: str, *, pools: bool) -> bool | None:
    """
    Return whether a release has code for a class.

    None if this is unknown, because no release lists the class or the release's lists are not
    packaged. `pools` states whether the class is used to embed or score. For this purpose, vLLM can
    convert a class that generates text.
    """
    listed = classes(version)
    if listed is None or not releases_with(name, pools=pools):
        return None
    return _listed(listed, name, pools=pools)


def runs_by_transformers(version: str, kind: str) -> bool:
    """Return whether a release can run a class of this kind with transformers' code."""
    return _BACKENDS.get(kind, "") in (classes(version) or {})


@cache
def releases_with(name: str, *, pools: bool) -> tuple[str, ...]:
    """Return the releases in the package that have code for a class, oldest first."""
    return tuple(
        version for version in releases() if _listed(classes(version) or {}, name, pools=pools)
    )


@cache
def releases() -> tuple[str, ...]:
    """Return the releases with packaged lists, oldest first."""
    return tuple(sorted(packaged_releases("models"), key=sort_key))


def _listed(listed: Mapping[str, tuple[str, ...]], name: str, *, pools: bool) -> bool:
    if name in listed:
        return True
    stems = [name.removesuffix(end) for end in _CONVERTED if pools and name.endswith(end)]
    return any(stem + end in listed for stem in stems for end in _TEXT)
