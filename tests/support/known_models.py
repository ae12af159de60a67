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

Sizing knows a model by its class, which `architectures` in its `config.json` names. Any other class
is refused, with similar names: its size is not guessed. A release of vLLM
may not be able to serve a class, although sizing knows the class: see
[refusals](../plan/refusals.md). This page is the output of `python -m tests.support.known_models`.
"""

_TITLES = {
    "dense": "Dense models with equal layers",
    "moe": "Mixture of experts",
    "mla": "Latent attention (MLA)",
    "hybrid": "Windows, states, or layers of several kinds",
    "multimodal": "Text models with a tower that is counted weight by weight",
    "estimated": "Text models with a tower that is estimated from its config",
    "encoders": "Encoders that embed or score, without a KV cache",
    "speech": "Speech: an audio encoder with a text decoder",
    "poolers": "Decoders that embed, classify or score",
    "image_embedders": "Text encoders with an image encoder",
    "unsized": "Known, but refused: no KV cache, or also one for an encoder",
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
