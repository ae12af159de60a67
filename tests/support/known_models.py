"""
Which architectures sizing knows, as a page.

`python -m tests.support.known_models` prints docs/reference/known-models.md.
"""

from __future__ import annotations

import importlib

from gpufleet.sizing.architectures.registry import FAMILIES
from gpufleet.sizing.architectures.towers import estimated_tower
from tests.support.checkout import ROOT

PAGE = ROOT / "docs/reference/known-models.md"

_HEAD = """# The models that sizing knows

A model is known by the class that `architectures` in its `config.json` names. Any other is refused
by its name, with near ones: its size is not guessed. That a class is known does not mean that a
release serves it: [plan-refusals.md](../plan/refusals.md). This page is the output of
`python -m tests.support.known_models`.
"""

_TITLES = {
    "dense": "Dense, every layer alike",
    "moe": "A mixture of experts",
    "mla": "Latent attention (MLA)",
    "hybrid": "Windows, states, or layers of several kinds",
    "multimodal": "A text part and a tower, counted weight by weight",
    "estimated": "A text part, and a tower that is estimated from its config",
    "encoders": "An encoder that embeds or scores, without a KV cache",
    "speech": "An encoder of sound, and a decoder that keeps what it heard",
    "poolers": "A decoder that embeds, classifies or scores",
    "image_embedders": "An encoder of texts beside one of images",
    "unsized": "Known and refused: without a KV cache, or with one of an encoder's as well",
}


def families() -> dict[str, list[str]]:
    """Return {title: the names of the classes under it}."""
    found: dict[str, list[str]] = {title: [] for title in _TITLES.values()}
    for family in FAMILIES:
        module = importlib.import_module(f"gpufleet.sizing.architectures.{family}")
        for name, builder in module.BUILDERS.items():
            wrapper = getattr(builder, "keywords", {}).get("wrapper")
            estimated = wrapper is not None and wrapper.tower is estimated_tower
            found[_TITLES["estimated" if estimated else family]].append(name)
    return {title: sorted(names, key=str.lower) for title, names in found.items()}


def page() -> str:
    """Return docs/reference/known-models.md."""
    parts = [_HEAD]
    for title, names in families().items():
        listed = ",\n".join(f"`{name}`" for name in names)
        parts.append(f"\n## {title} ({len(names)})\n\n{listed}.\n")
    return "".join(parts)


if __name__ == "__main__":
    print(page(), end="")
