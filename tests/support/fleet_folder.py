"""A fleet's own folder with an inventory, its variables, and the configs of recorded models."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.support import warm_command
from tests.support.checkout import ROOT

REVISION = "0123456789abcdef0123456789abcdef01234567"
# A lock that is not there: the plan then asks no CUDA of the driver.
VLLM = {"version": "0.32.0", "lock": "locks/none.txt", "listen": "127.0.0.1"}

EXAMPLE_MODELS = (
    *("Qwen/Qwen3-4B", "Qwen/Qwen3-8B", "Qwen/Qwen3-32B", "Qwen/Qwen3-235B-A22B"),
    *("meta-llama/Meta-Llama-3.1-70B", "meta-llama/Meta-Llama-3.1-405B"),
    *("google/gemma-3-27b-it", "openai/gpt-oss-120b"),
)
# XLM-R Large.
EXAMPLE_ENCODERS = {
    "BAAI/bge-m3": "XLMRobertaModel",
    "BAAI/bge-reranker-v2-m3": "XLMRobertaForSequenceClassification",
}
ENCODER = {
    "hidden_size": 1024,
    "num_attention_heads": 16,
    "num_hidden_layers": 24,
    "intermediate_size": 4096,
    "vocab_size": 250002,
    "max_position_embeddings": 514,
    "type_vocab_size": 1,
    "torch_dtype": "float32",
    "id2label": {"0": "LABEL_0"},
}


def write_models(folder: Path, *names: str) -> Path:
    """Write the config.json of models of tests/data/models: `folder/owner/name/config.json`."""
    for name in names:
        recorded = json.loads(
            (ROOT / f"tests/data/models/{name.replace('/', '--')}.json").read_text()
        )
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "config.json").write_text(json.dumps(recorded["config"]))
    return folder


def write_example_models(folder: Path) -> Path:
    """Write the models of examples/, also by their last name alone, as paths there have them."""
    write_models(folder, *EXAMPLE_MODELS)
    for name, architecture in EXAMPLE_ENCODERS.items():
        (folder / name).mkdir(parents=True)
        config = {"architectures": [architecture], **ENCODER}
        (folder / name / "config.json").write_text(json.dumps(config))
    for name in (*EXAMPLE_MODELS, *EXAMPLE_ENCODERS):
        (folder / name.rpartition("/")[2]).symlink_to(folder / name)
    return folder


class FleetFolder:
    """Inventory `prod`, written from {group: its nodes} and {group: its variables}."""

    def __init__(
        self,
        folder: Path,
        groups: Mapping[str, Sequence[str]],
        variables: Mapping[str, Mapping[str, Any]],
        *models: str,
    ) -> None:
        self.folder = folder
        self.inventory = folder / "inventories/prod.py"
        self.models = write_models(folder / "models", *models)
        for name in ("inventories", "group_vars", "models"):
            (folder / name).mkdir(exist_ok=True)
        self.inventory.write_text(
            "from gpufleet import inventory\n\n"
            f"globals().update(inventory.load(__file__, groups={dict(groups)!r}))\n"
        )
        for group, values in variables.items():
            self.write(group, values)

    def write(self, group: str, values: Mapping[str, Any]) -> None:
        """Write what a group's nodes have."""
        (self.folder / f"group_vars/{group}.yml").write_text(yaml.safe_dump(dict(values)))

    def run(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run a command of `gpufleet` on the inventory, from another directory than its own."""
        return warm_command.run([command, self.inventory, *arguments], cwd=ROOT)

    def json(self, command: str, *arguments: str) -> dict[str, Any]:
        """Return what a command that ends well prints as JSON."""
        run = self.run(command, "--json", *arguments)
        assert run.returncode == 0, run.stderr
        document: dict[str, Any] = json.loads(run.stdout)
        return document
