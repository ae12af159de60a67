"""
Choose the parts of a checkpoint that a server loads: head and tower are optional. Pure.

A server that embeds or scores does not load the language model's head (_create_pooling_model_cls in
vllm/model_executor/models/adapters.py of 0.31.0). A server for text only does not load the tower.
This is the case if the limits of all its modalities are 0 (_mark_tower_model in interfaces.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from gpufleet.sizing.architectures.description import Description
from gpufleet.sizing.options import Options

_TOWER_SKIPPED = (0, 17)
"""
The first release with `--language-model-only`: from this release on, classes of all families omit
their towers. In earlier releases, only some classes do this, so the tower is counted.
"""


def as_served(description: Description, options: Options) -> Description:
    """
    Return the description without the parts that are not loaded.

    If all parts are loaded, the same object is returned.
    """
    without_tower = options.vllm >= _TOWER_SKIPPED and is_text_only(description, options)
    if not options.pooling and not without_tower:
        return description
    return _without(description, head=options.pooling, tower=without_tower)


def is_text_only(description: Description, options: Options) -> bool:
    """Return whether a multimodal model is limited to text."""
    if not description.architecture.multimodal:
        return False
    needed = _modalities(description.config or {})
    return options.language_model_only or needed <= options.modalities_off


def _modalities(config: Mapping[str, Any]) -> frozenset[str]:
    """
    Return the modalities that a config's towers may serve.

    A config does not state whether its vision tower accepts videos, so the result then has both
    "image" and "video".
    """
    below = config.get("thinker_config")
    keys = {*config, *(below if isinstance(below, Mapping) else ())}
    audio = frozenset({"audio"}) if any("audio" in key for key in keys) else frozenset()
    if "vision_config" in keys or not audio:
        return audio | {"image", "video"}
    return audio


@lru_cache(maxsize=256)
def _without(description: Description, *, head: bool, tower: bool) -> Description:
    """
    Return a description without the head, without the tower, or without both.

    The result is the same object for each call, because other caches use the identity of
    descriptions.
    """
    whole = description.architecture
    left_out = {name for name, left in (("head", head), ("tower", tower)) if left}
    architecture = replace(
        whole,
        parts=tuple(part for part in whole.parts if part.name not in left_out),
        multimodal=whole.multimodal and not tower,
        tower_estimated=whole.tower_estimated and not tower,
        notes=tuple(note for note in whole.notes if not (tower and "text part" in note)),
    )
    return replace(description, architecture=architecture)
