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


VISION = {
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "image_size": 224,
    "patch_size": 14,
}


@each_row(("keys", "width"), [({"embed_dim": 320}, 320), ({"dim": 128}, 128), ({}, 4096)])
def test_late_interaction_adds_a_layer_to_the_model_that_it_is_of(keys, width):
    """ColQwen3 is Qwen3-VL and a layer of no bias; one of no stated width takes the hidden size."""
    whole = {
        "architectures": ["Qwen3VLForConditionalGeneration"],
        "model_type": "qwen3_vl",
        "text_config": {**config("Qwen--Qwen3-8B"), "model_type": "qwen3_vl_text"},
        "vision_config": {
            "depth": 4,
            "hidden_size": 512,
            "intermediate_size": 1408,
            "num_heads": 8,
            "out_hidden_size": 4096,
            "deepstack_visual_indexes": [1, 2],
            "num_position_embeddings": 256,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
    }
    of_text = {key: value for key, value in whole["text_config"].items() if key != "architectures"}
    whole["text_config"] = of_text
    model_of = architecture(whole)
    found = architecture({**whole, "architectures": ["ColQwen3"], **keys})

    assert found.parameters - model_of.parameters == width * 4096
    assert found.layers == model_of.layers


def test_nemotrons_embedder_is_siglip_two_layers_and_a_llama_without_a_cache():
    llama = config("meta-llama--Meta-Llama-3.1-8B")
    of_text = {**llama, "architectures": ["LlamaBidirectionalModel"], "model_type": "llama_bidirec"}
    whole = {
        "architectures": ["LlamaNemotronVLModel"],
        "llm_config": of_text,
        "vision_config": VISION,
        "downsample_ratio": 0.5,
    }
    text, found = architecture(of_text), architecture(whole)
    scoring = architecture({**whole, "architectures": ["LlamaNemotronVLForSequenceClassification"]})

    width, patches = 512, (224 // 14) ** 2
    block = 4 * width * width + 2 * 1408 * width + 4 * width + 1408 + width + 4 * width
    seen = 4 * block + 3 * 14 * 14 * width + width + patches * width + 2 * width
    joined, out = 4 * width, 4096
    projector = 2 * joined + out * joined + out + out * out + out
    assert found.parameters - text.parameters == seen + projector
    assert scoring.parameters - found.parameters == 2 * out  # two labels where none are named
    assert found.pooling
    assert not any(layer.caches for layer in found.layers)


def test_a_config_of_clip_that_names_only_its_parts_has_the_size_of_the_base_model():
    """openai/clip-vit-base-patch32 has 151,277,313 numbers, one of which scales its logits."""
    base = {"architectures": ["CLIPModel"], "text_config": {}, "vision_config": {}}

    assert architecture(base).parameters == 151_277_313 - 1


def test_a_config_of_siglip_that_names_only_its_parts_has_the_size_of_the_base_model():
    """google/siglip-base-patch16-224 has 203,155,970 numbers: two scale and move its logits."""
    base = {"architectures": ["SiglipModel"], "text_config": {}, "vision_config": {}}

    assert architecture(base).parameters == 203_155_970 - 2
