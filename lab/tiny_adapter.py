"""Write tiny LoRA adapters for the tiny Llama, which vLLM can load and which change the answers.

Contract: `write()` makes a complete adapter (about 20 KB) with only the standard library. A name
has the same bytes on every machine. A different name has different weights, and a different
revision on the hub.

An adapter changes the output of attention to the residual stream (`o_proj`), and by far more than
the model's own random weights. So a greedy completion of the adapter is never that of the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from lab import tiny_model
from lab.tiny_model import HEAD_SIZE, HEADS, HIDDEN, LAYERS

RANK = 4
ALPHA = 4096
"""Scale with which the product of the weights (0.02 wide, like the model's) has an effect."""


def write(directory: Path, name: str, rank: int = RANK, base: str = "lab/tiny") -> Path:
    """Write the adapter `name` to `directory`, readable by all, and return its path."""
    directory.mkdir(parents=True, exist_ok=True)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": rank,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["o_proj"],
    }
    text = (json.dumps(config, indent=1) + "\n").encode()
    tiny_model.put(directory / "adapter_config.json", text)
    tiny_model.put(directory / "adapter_model.safetensors", _weights(name, rank))
    return directory


def _weights(name: str, rank: int) -> bytes:
    return tiny_model.safetensors(
        (tensor, shape, tiny_model.normal(f"{name}: {tensor}", shape[0] * shape[1]))
        for tensor, shape in sorted(_shapes(rank))
    )


def _shapes(rank: int) -> Iterator[tuple[str, tuple[int, int]]]:
    for layer in range(LAYERS):
        prefix = f"base_model.model.model.layers.{layer}.self_attn.o_proj"
        yield f"{prefix}.lora_A.weight", (rank, HEADS * HEAD_SIZE)
        yield f"{prefix}.lora_B.weight", (HIDDEN, rank)
