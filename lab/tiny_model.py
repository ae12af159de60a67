"""Write a tiny Llama with random weights, which vLLM can load and which completes text.

Contract: `write()` makes a complete checkpoint (0.8 MB) with only the standard library, in about a
second. The bytes are equal on every machine, so the hash and the revision on the hub are fixed.

Four heads allow tensor parallelism up to 4.  A token is one byte, so any text round-trips.  Only
the output rows of printable ASCII are non-zero: a greedy completion is therefore never empty, and
never ends in half a UTF-8 character.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeAlias

HIDDEN = 128
INTERMEDIATE = 256
LAYERS = 2
HEADS = 4
CONTEXT = 32768  # tokens
# Trained models start from normal(0, 0.02); larger weights only make the logits overflow sooner.
DEVIATION = 0.02

# vLLM's attention on CPUs supports head sizes from 32. With 16, the engine starts, reports that it
# is ready, and dies at the first request. A readiness check that only queries /health misses this.
HEAD_SIZE = HIDDEN // HEADS

SPECIALS = ("<unk>", "<s>", "</s>", "<pad>")
VOCABULARY = len(SPECIALS) + 256
CHAT_TEMPLATE = (
    "{% for message in messages %}<s>{{ message['role'] }}: {{ message['content'] }}</s>"
    "{% endfor %}{% if add_generation_prompt %}<s>assistant: {% endif %}"
)

_Shape = tuple[int, ...]
Tensor: TypeAlias = tuple[str, _Shape, bytes]
"""A tensor's name, shape and bfloat16 values."""


def write(directory: Path, head_size: int = HEAD_SIZE) -> Path:
    """Write the checkpoint to `directory`, readable by all, and return its path."""
    documents = {
        "config.json": config(head_size),
        "generation_config.json": {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3},
        "tokenizer.json": tokenizer(),
        "tokenizer_config.json": tokenizer_config(),
    }
    return write_checkpoint(directory, documents, tensors(head_size))


def write_checkpoint(
    directory: Path, documents: Mapping[str, object], parts: Iterable[Tensor]
) -> Path:
    """Write JSON documents and the weights into `directory`, readable by all, and return it."""
    for name, document in documents.items():
        put(directory / name, (json.dumps(document, indent=1) + "\n").encode())
    put(directory / "model.safetensors", safetensors(parts))
    return directory


def config(head_size: int = HEAD_SIZE) -> dict[str, object]:
    """Return the model's `config.json`."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": head_size,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 3,
    }


def tokenizer() -> dict[str, object]:
    """Return the `tokenizer.json` of a byte-level BPE without merges, where a token is a byte."""
    added = [
        {
            "id": number,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
        for number, token in enumerate(SPECIALS)
    ]
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {**byte_level, "use_regex": True},
        "post_processor": None,
        "decoder": {**byte_level, "use_regex": True},
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": "<unk>",
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": False,
            "vocab": {token: number for number, token in enumerate((*SPECIALS, *_alphabet()))},
            "merges": [],
        },
    }


def tokenizer_with(*tokens: str, ordinary: str = "") -> dict[str, object]:
    """Return the same tokenizer with additional tokens, which are special except `ordinary`."""
    found = tokenizer()
    own = found["added_tokens"]
    assert isinstance(own, list)
    more = [
        {**own[0], "id": number, "content": text, "special": text != ordinary}
        for number, text in enumerate(tokens, VOCABULARY)
    ]
    return {**found, "added_tokens": [*own, *more]}


def tokenizer_config() -> dict[str, object]:
    """Return the `tokenizer_config.json` with the chat template."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "unk_token": "<unk>",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "pad_token": "<pad>",
        "model_max_length": CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }


def weights(head_size: int = HEAD_SIZE) -> bytes:
    """
    Return the content of `model.safetensors`.

    Weights are bfloat16, drawn by tensor name, so one tensor's shape does not change another.
    """
    return safetensors(tensors(head_size))


def tensors(head_size: int = HEAD_SIZE) -> Iterator[Tensor]:
    """Yield each tensor with its name, shape and bfloat16 values."""
    for name, shape in sorted(_shapes(head_size)):
        yield name, shape, _tensor(name, shape)


def safetensors(tensors: Iterable[Tensor]) -> bytes:
    """Return the safetensors file with these bfloat16 tensors, in order."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    body = bytearray()
    for name, shape, tensor in tensors:
        span = [len(body), len(body) + len(tensor)]
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": span}
        body += tensor
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants the tensors aligned to 8 bytes
    return struct.pack("<Q", len(text)) + text + bytes(body)


def linear(name: str, rows: int, columns: int) -> Iterator[tuple[str, _Shape]]:
    """Yield the shapes of a linear layer's weight and bias."""
    yield f"{name}.weight", (rows, columns)
    yield f"{name}.bias", (rows,)


def norm(name: str, width: int) -> Iterator[tuple[str, _Shape]]:
    """Yield the shapes of a layer norm's weight and bias."""
    yield f"{name}.weight", (width,)
    yield f"{name}.bias", (width,)


def drawn(shapes: Iterable[tuple[str, _Shape]]) -> Iterator[Tensor]:
    """Yield tensors of these shapes: biases of 0, norms of 1, other weights drawn by their name."""
    for name, shape in shapes:
        count = math.prod(shape)
        if name.endswith(".bias"):
            yield name, shape, bytes(2 * count)
        elif "norm" in name.split(".")[-2].lower():
            yield name, shape, bfloat16(1.0) * count
        else:
            yield name, shape, normal(name, count)


def _shapes(head_size: int) -> Iterator[tuple[str, _Shape]]:
    yield "model.embed_tokens.weight", (VOCABULARY, HIDDEN)
    yield "model.norm.weight", (HIDDEN,)
    yield "lm_head.weight", (VOCABULARY, HIDDEN)
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for part in "qkv":
            yield f"{prefix}.self_attn.{part}_proj.weight", (HEADS * head_size, HIDDEN)
        yield f"{prefix}.self_attn.o_proj.weight", (HIDDEN, HEADS * head_size)
        for part in ("gate", "up"):
            yield f"{prefix}.mlp.{part}_proj.weight", (INTERMEDIATE, HIDDEN)
        yield f"{prefix}.mlp.down_proj.weight", (HIDDEN, INTERMEDIATE)
        for part in ("input", "post_attention"):
            yield f"{prefix}.{part}_layernorm.weight", (HIDDEN,)


def _tensor(name: str, shape: _Shape) -> bytes:
    if name.endswith("norm.weight"):
        return bfloat16(1.0) * math.prod(shape)
    if name == "lm_head.weight":
        rows = range(len(SPECIALS), VOCABULARY)
        printable = {row for row in rows if 0x20 < _alphabet_bytes()[row - len(SPECIALS)] < 0x7F}
        return b"".join(
            normal(f"{name}[{row}]", HIDDEN) if row in printable else bytes(2 * HIDDEN)
            for row in range(VOCABULARY)
        )
    return normal(name, math.prod(shape))


def normal(seed: str, count: int) -> bytes:
    """
    Return `count` nearly normal bfloat16 values, each from a sum of eight uniform bytes.

    The sums are centred and scaled, from a hash and integers only, because `random.gauss` uses the
    machine's own logarithm.
    """
    stream = hashlib.shake_256(seed.encode()).digest(8 * count)
    return b"".join(_DRAWN[sum(stream[start : start + 8])] for start in range(0, 8 * count, 8))


def bfloat16(value: float) -> bytes:
    """Return a value as bfloat16, the upper half of a float32."""
    return struct.pack("<f", value)[2:]


# A uniform byte has mean 255/2 and variance (256**2 - 1)/12; eight of them add up.
_MEAN = 8 * 255 / 2
_SPREAD = math.sqrt(8 * (256**2 - 1) / 12)
_DRAWN = [bfloat16(DEVIATION * (total - _MEAN) / _SPREAD) for total in range(8 * 255 + 1)]


def _alphabet_bytes() -> list[int]:
    """Return all 256 bytes in the order of byte-level BPE: visible Latin-1 ones, then the rest."""
    visible = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    return [*visible, *(byte for byte in range(256) if byte not in visible)]


def _alphabet() -> list[str]:
    """Return the characters for `_alphabet_bytes()`; invisible ones get U+0100 and up."""
    ordered = _alphabet_bytes()
    invisible = 256 - 188  # 94 + 12 + 82 visible ones stand for themselves
    return [chr(byte) for byte in ordered[:188]] + [chr(0x100 + n) for n in range(invisible)]


def token(letter: str) -> int:
    """Return the number of a visible letter's token."""
    return len(SPECIALS) + _alphabet().index(letter)


def put(path: Path, content: bytes) -> None:
    """Write a file that all users can read, with missing parent folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    # regardless of the umask, because vLLM reports "no such file" for weights that it may not read
    path.chmod(0o644)
