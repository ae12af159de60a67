"""A decoder that classifies is the decoder without its head, and keeps its cache."""

from gpufleet.sizing.architectures.description import ModelFiles, describe
from gpufleet.sizing.architectures.registry import architecture
from gpufleet.sizing.fit import size
from tests.support.rows import each_row
from tests.unit.sizing.test_fit import model, options

ASKED = {"vllm": (0, 32, 0), "max_model_len": 8192}


def config(name, **changes):
    return {**model(name).config, **changes}


@each_row(
    ("name", "classifier", "labels", "rows"),
    [
        ("meta-llama--Meta-Llama-3.1-8B", "Llama", {"id2label": {"0": "a"}}, 1),
        ("Qwen--Qwen3-8B", "Qwen3", {"num_labels": 5}, 5),
        ("Qwen--Qwen2.5-7B-Instruct", "Qwen2", {}, 2),
        ("Qwen--Qwen3-30B-A3B", "Qwen3Moe", {}, 2),
    ],
)
def test_a_head_makes_room_for_a_row_a_label(name, classifier, labels, rows):
    decoder = architecture(config(name))
    found = architecture(
        config(name, architectures=[f"{classifier}ForSequenceClassification"], **labels)
    )

    head = decoder.vocab_size * decoder.hidden_size
    assert decoder.parameters - found.parameters == head - rows * decoder.hidden_size
    assert found.layers == decoder.layers
    assert found.pooling


def test_a_classifier_is_sized_as_a_pooling_server():
    name = "Qwen--Qwen3-8B"
    own = config(name, architectures=["Qwen3ForSequenceClassification"])
    found = size(describe(ModelFiles(own)), options(**ASKED))
    pooling = size(model(name), options(**ASKED, pooling=True))

    assert found.fits
    assert found.kv_bytes_per_token_per_gpu == pooling.kv_bytes_per_token_per_gpu
    assert 0 < found.weights_bytes_per_gpu - pooling.weights_bytes_per_gpu < 1 << 20
    assert found.activation_bytes_per_gpu == pooling.activation_bytes_per_gpu
