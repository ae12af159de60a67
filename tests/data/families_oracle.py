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

import models_oracle
import torch

RECORD = Path(__file__).parent / "families.json"
RANKS = (1, 2, 4)


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
        with tempfile.TemporaryDirectory() as directory:
            Path(directory, "config.json").write_text(json.dumps(family["config"]))
            family["parameters"] = {
                str(ranks): models_oracle.rank(*models_oracle.built(directory, ranks))["parameters"]
                for ranks in RANKS
            }
        print(name, family["parameters"], flush=True)
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
