"""Write a tiny Whisper with random weights, which transcribes 30 seconds of sound to random text.

Contract: like `tiny_model`, whose tokenizer and random weights it uses, with Whisper's own tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from lab import tiny_model

ADDED = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    "<|en|>",
    "<|transcribe|>",
    "<|translate|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
)
FIRST = tiny_model.VOCABULARY
VOCABULARY = FIRST + len(ADDED)
END, START = FIRST, FIRST + 1
WIDTH = 64
HEADS = 2
LAYERS = 2
MELS = 80
SOURCE, TARGET = 1500, 448  # positions: 30 s of sound, and the most tokens of a text


def write(directory: Path) -> Path:
    """Write the checkpoint to `directory`, readable by all, and return its path."""
    processor = {"processor_class": "WhisperProcessor"}
    documents: dict[str, object] = {
        "config.json": config(),
        "generation_config.json": {
            "bos_token_id": END,
            "eos_token_id": END,
            "pad_token_id": END,
            "decoder_start_token_id": START,
        },
        "tokenizer.json": tiny_model.tokenizer_with(*ADDED),
        "tokenizer_config.json": {
            **tiny_model.tokenizer_config(),
            **processor,
            "model_max_length": TARGET,
            "eos_token": ADDED[0],
            "bos_token": ADDED[0],
            "pad_token": ADDED[0],
            "chat_template": None,
        },
        "preprocessor_config.json": {
            **processor,
            "feature_extractor_type": "WhisperFeatureExtractor",
            "feature_size": MELS,
            "sampling_rate": 16000,
            "hop_length": 160,
            "chunk_length": 30,
            "n_fft": 400,
            "n_samples": 480000,
            "nb_max_frames": 3000,
            "padding_side": "right",
            "padding_value": 0.0,
            "return_attention_mask": False,
        },
    }
    return tiny_model.write_checkpoint(directory, documents, tiny_model.drawn(_shapes()))


def config() -> dict[str, object]:
    """Return the model's `config.json`."""
    return {
        "architectures": ["WhisperForConditionalGeneration"],
        "model_type": "whisper",
        "dtype": "bfloat16",
        "vocab_size": VOCABULARY,
        "num_mel_bins": MELS,
        "d_model": WIDTH,
        "encoder_layers": LAYERS,
        "decoder_layers": LAYERS,
        "encoder_attention_heads": HEADS,
        "decoder_attention_heads": HEADS,
        "encoder_ffn_dim": 2 * WIDTH,
        "decoder_ffn_dim": 2 * WIDTH,
        "max_source_positions": SOURCE,
        "max_target_positions": TARGET,
        "activation_function": "gelu",
        "is_encoder_decoder": True,
        "bos_token_id": END,
        "eos_token_id": END,
        "pad_token_id": END,
        "decoder_start_token_id": START,
    }


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    encoder, decoder = "model.encoder", "model.decoder"
    yield f"{encoder}.conv1.weight", (WIDTH, MELS, 3)
    yield f"{encoder}.conv1.bias", (WIDTH,)
    yield f"{encoder}.conv2.weight", (WIDTH, WIDTH, 3)
    yield f"{encoder}.conv2.bias", (WIDTH,)
    yield f"{encoder}.embed_positions.weight", (SOURCE, WIDTH)
    yield f"{decoder}.embed_tokens.weight", (VOCABULARY, WIDTH)
    yield f"{decoder}.embed_positions.weight", (TARGET, WIDTH)
    for part, attentions in ((encoder, ("self_attn",)), (decoder, ("self_attn", "encoder_attn"))):
        yield from tiny_model.norm(f"{part}.layer_norm", WIDTH)
        for layer in range(LAYERS):
            each = f"{part}.layers.{layer}"
            for attention in attentions:
                yield from tiny_model.norm(f"{each}.{attention}_layer_norm", WIDTH)
                yield f"{each}.{attention}.k_proj.weight", (WIDTH, WIDTH)
                for projection in ("q", "v", "out"):
                    yield from tiny_model.linear(
                        f"{each}.{attention}.{projection}_proj", WIDTH, WIDTH
                    )
            yield from tiny_model.linear(f"{each}.fc1", 2 * WIDTH, WIDTH)
            yield from tiny_model.linear(f"{each}.fc2", WIDTH, 2 * WIDTH)
            yield from tiny_model.norm(f"{each}.final_layer_norm", WIDTH)
