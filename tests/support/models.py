"""Models whose config.json is kept in tests/data/models, as the planner gets them."""

from __future__ import annotations

import json
from functools import cache

from gpufleet.sizing.architectures.description import Description, ModelFiles, describe
from tests.support.checkout import ROOT

MODELS = ROOT / "tests/data/models"


@cache
def described(name: str) -> Description:
    """Return the description of a model by its file's name: `Qwen--Qwen3-32B`."""
    kept = json.loads((MODELS / f"{name}.json").read_text())
    return describe(ModelFiles(kept["config"]))
