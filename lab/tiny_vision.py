"""Write a tiny PaliGemma with random weights, which completes text and describes pictures.

Contract: like `tiny_model`, whose tokenizer and random weights it uses. Its class is one of the few
that vLLM loads without torchvision, which lab nodes do not have. A picture uses four tokens.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from lab import tiny_model

ADDED = ("<image>", "\n")
IMAGE_TOKEN = tiny_model.VOCABULARY
VOCABULARY = tiny_model.VOCABULARY + len(ADDED) + 1024 + 128
"""Vocabulary size; the class' processor adds 1024 tokens for positions and 128 for shapes."""
WIDTH = 64
LAYERS = 2
HEADS = 2
PICTURE, PATCH = 32, 16  # pixels of a side
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: "
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] if part['type'] == 'text' %}{{ part['text'] }}{% endfor %}"
    "{% endif %}{% endfor %}"
)


def write(directory: Path) -> Path:
    """Write the checkpoint to `directory`, readable by all, and return its path."""
    processor = {"processor_class": "PaliGemmaProcessor"}
    documents: dict[str, object] = {
        "config.json": config(),
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3},
        # A picture's place, and the end of a prompt.
        "tokenizer.json": tiny_model.tokenizer_with(*ADDED, ordinary="\n"),
        "tokenizer_config.json": {
            **tiny_model.tokenizer_config(),
            **processor,
            "chat_template": CHAT_TEMPLATE,
        },
        "preprocessor_config.json": {
            **processor,
            "image_processor_type": "SiglipImageProcessor",
            "image_seq_length": (PICTURE // PATCH) ** 2,
            "size": {"height": PICTURE, "width": PICTURE},
            "image_mean": [0.5] * 3,
            "image_std": [0.5] * 3,
        },
    }
    return tiny_model.write_checkpoint(directory, documents, tensors())


def config() -> dict[str, object]:
    """Return the model's `config.json`."""
    text = tiny_model.config()
    del text["architectures"], text["hidden_act"]
    return {
        "architectures": ["PaliGemmaForConditionalGeneration"],
        "model_type": "paligemma",
        "dtype": "bfloat16",
        "image_token_index": IMAGE_TOKEN,
        "hidden_size": tiny_model.HIDDEN,
        "projection_dim": tiny_model.HIDDEN,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
        "text_config": {
            **text,
            "model_type": "gemma",
            "hidden_activation": "gelu_pytorch_tanh",
            "vocab_size": VOCABULARY,
            "tie_word_embeddings": True,
            "num_image_tokens": (PICTURE // PATCH) ** 2,
        },
        "vision_config": {
            "model_type": "siglip_vision_model",
            "hidden_size": WIDTH,
            "intermediate_size": 2 * WIDTH,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": HEADS,
            "image_size": PICTURE,
            "patch_size": PATCH,
            "projection_dim": tiny_model.HIDDEN,
            "vision_use_head": False,
        },
    }


def tensors() -> Iterator[tiny_model.Tensor]:
    """Yield the model's tensors."""
    for name, shape, values in tiny_model.tensors():
        rows, *others = shape
        if name == "lm_head.weight":  # the words' own table has its place
            continue
        # The norms of a Gemma are relative to 1. Added tokens have no weights, so the model never
        # returns one.
        if name.endswith("norm.weight"):
            values = bytes(len(values))  # noqa: PLW2901
        added = VOCABULARY - rows if rows == tiny_model.VOCABULARY else 0
        room = bytes(2 * added * math.prod(others))
        yield f"language_model.{name}", (rows + added, *others), values + room
    yield from tiny_model.drawn(_shapes())


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield from tiny_model.linear("multi_modal_projector.linear", tiny_model.HIDDEN, WIDTH)
    tower = "vision_tower.vision_model"
    yield f"{tower}.embeddings.patch_embedding.weight", (WIDTH, 3, PATCH, PATCH)
    yield f"{tower}.embeddings.patch_embedding.bias", (WIDTH,)
    yield f"{tower}.embeddings.position_embedding.weight", ((PICTURE // PATCH) ** 2, WIDTH)
    yield from tiny_model.norm(f"{tower}.post_layernorm", WIDTH)
    for layer in range(LAYERS):
        each = f"{tower}.encoder.layers.{layer}"
        for part in ("q", "k", "v", "out"):
            yield from tiny_model.linear(f"{each}.self_attn.{part}_proj", WIDTH, WIDTH)
        yield from tiny_model.linear(f"{each}.mlp.fc1", 2 * WIDTH, WIDTH)
        yield from tiny_model.linear(f"{each}.mlp.fc2", WIDTH, 2 * WIDTH)
        yield from tiny_model.norm(f"{each}.layer_norm1", WIDTH)
        yield from tiny_model.norm(f"{each}.layer_norm2", WIDTH)
