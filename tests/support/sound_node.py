"""A recorded node on which nothing is wrong for the newest release."""

from __future__ import annotations

import json
from typing import Any

from tests.support.checkout import ROOT

DATA = ROOT / "tests/data"


def sound_node(*models: str) -> dict[str, Any]:
    """Return the probe of eight sound H100 with a driver of 580, a 32 B model at each path."""
    text = (ROOT / "src/gpufleet/catalog/data/nodes/h100x8.json").read_text()
    for old, new in {
        "570.124": "580.95",
        "r570_00": "r580_00",
        "manager-570": "manager-580",
    }.items():
        text = text.replace(old, new)
    document: dict[str, Any] = json.loads(text)
    document["driver"]["cuda"] = 13000
    config = json.loads((DATA / "models/Qwen--Qwen3-32B.json").read_text())["config"]
    absent = {"missing": "absent"}
    files = {"config": config, "hf_quant_config": absent, "bytes": absent}
    document["models"] = dict.fromkeys(models, files)
    return document
