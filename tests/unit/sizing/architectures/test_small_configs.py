"""Small configs of each family have the weights that vLLM's own class makes of them."""

import json

from gpufleet.sizing.architectures.registry import architecture
from gpufleet.sizing.rank_weights import Sharding
from gpufleet.sizing.weights import weight_bytes
from tests.support.checkout import ROOT
from tests.support.rows import each_row

RECORD = json.loads((ROOT / "tests/data/families.json").read_text())
FAMILIES = RECORD["families"]
VLLM = tuple(int(part) for part in RECORD["vllm"].split("."))


@each_row("name", FAMILIES)
def test_the_whole_model_has_as_many_numbers(name):
    """
    To the last one.

    vLLM pads the vocabulary, so the configs' 1,000 tokens are 1,024 rows in every table of them.
    """
    family = FAMILIES[name]
    model = architecture(family["config"])
    tables = sum(part.name in {"embedding", "head"} for part in model.parts)
    biases = sum(
        weight.columns == 1
        for part in model.parts
        for weight in part.weights
        if weight.rows == model.vocab_size
    )
    padded = tables * 24 * model.hidden_size
    if tables and "opt350" in name:
        padded = 24 * 256

    assert model.parameters + padded + 24 * biases == family["parameters"]["1"]


@each_row("tensor", [1, 2, 4])
@each_row("name", FAMILIES)
def test_a_rank_has_as_many_numbers(name, tensor):
    """Which weights are divided, and which each rank has whole: within 512 bytes a tensor."""
    family = FAMILIES[name]
    model = architecture(family["config"])
    tensors = sum(
        weight.count for holder in (*model.layers, *model.parts) for weight in holder.weights
    )

    (stage,) = weight_bytes(model, None, Sharding(tensor), vllm=VLLM)

    tables = sum(
        weight.rows * weight.columns * weight.count * (4 if weight.dtype == "float32" else 2)
        for part in model.parts
        for weight in part.weights
        if weight.buffer and not (weight.until and weight.until <= VLLM)
    )
    numbers = (stage.bytes - tables) / 2
    assert 0 <= numbers - family["parameters"][str(tensor)] <= 256 * tensors


def test_mpt_is_four_times_as_wide_inside_where_its_config_does_not_say():
    """The default of Transformers' MptConfig, which the published models write out."""
    config = json.loads((ROOT / "tests/data/models/mosaicml--mpt-7b.json").read_text())["config"]
    silent = {key: value for key, value in config.items() if key != "expansion_ratio"}

    assert architecture(silent).parameters == architecture(config).parameters
