"""
Record what vLLM's own classes make of the small configs in families.json: their parameters.

    PYTHON tests/data/families_oracle.py [NAME ...]

PYTHON and the ways are models_oracle.py's; the configs are of no published model, only small, with
every key that changes a family's weights. Of each family it keeps the numbers that rank 0 of 1, 2
and 4 tensor-parallel ranks holds, without buffers.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import models_oracle
import torch

RECORD = Path(__file__).parent / "families.json"
RANKS = (1, 2, 4)
UNKNOWN = ("PanguEmbedded", "TeleFLM", "exaone", "hyperclovax", "plamo3", "telechat")
"""Kinds of config that transformers has no class for."""


def known(kind: str) -> None:
    """Let transformers read a config of this kind."""
    import transformers

    if kind in models_oracle.OWN_CONFIGS:
        models_oracle.known(kind)
    elif kind in UNKNOWN:
        own = type("Own", (transformers.PretrainedConfig,), {"model_type": kind})
        transformers.AutoConfig.register(kind, own, exist_ok=True)


def completed(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with what vLLM reads and no weight depends on."""
    parts = {**models_oracle.SIZELESS, **config}
    if "text_config" in config:
        parts["text_config"] = {**models_oracle.SIZELESS, **config["text_config"]}
    return parts | models_oracle.SIZELESS_OF.get(config["model_type"], {})


def main() -> None:
    """Build the families that are named, or all, and write their parameters into the record."""
    torch.set_num_threads(1)
    torch.fx.experimental._config.meta_nonzero_assume_all_nonzero = True
    models_oracle.on_hopper()
    import vllm

    record = json.loads(RECORD.read_text())
    record["vllm"] = vllm.__version__
    for name in sys.argv[1:] or record["families"]:
        family = record["families"][name]
        known(family["config"]["model_type"])
        with tempfile.TemporaryDirectory() as directory:
            config = json.dumps(completed(family["config"]))
            Path(directory, "config.json").write_text(config)
            family["parameters"] = {
                str(ranks): models_oracle.rank(*models_oracle.built(directory, ranks))["parameters"]
                for ranks in RANKS
            }
        print(name, family["parameters"], flush=True)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
