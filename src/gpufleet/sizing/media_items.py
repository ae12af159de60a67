"""
Compute the tokens of images and clips that a model must process in one step. Pure.

A model whose image tokens attend to each other in both directions cannot process half of an image:
vLLM disables chunked media input for it (check_and_update_config in vllm/platforms/cuda.py), like
`--disable-chunked-mm-input` for any model, and ends at its start if the largest item has more
tokens than a step (compute_mm_encoder_budget in vllm/v1/core/encoder_cache_manager.py).
"""

from __future__ import annotations

from dataclasses import replace

from gpufleet.sizing.architectures.description import Description
from gpufleet.sizing.architectures.max_length import text_part
from gpufleet.sizing.options import Options
from gpufleet.sizing.served_parts import is_text_only
from gpufleet.sizing.stage_memory import requested_length, resolve_defaults

_FRAMES, _FRAME_TOKENS = 32, 70 + 2 + 6
"""
Maximum frames of a clip (_VIDEO_MAX_FRAMES), and the tokens of a frame with its marks and time
(get_mm_max_tokens_per_item in vllm/model_executor/models/gemma4_mm.py). An image takes less.
"""
_WHOLE_SINCE = (0, 20)
"""
The first release that reads from Gemma 4's config whether image tokens attend to each other
(Gemma4ModelArchConfigConvertor). 0.19 serves the model, but processes images in parts.
"""
_FRAMES_LIMITED_SINCE = (0, 21)
"""The release from which `num_frames` of `--limit-mm-per-prompt` is used."""
_DEFAULT_RAISED_SINCE = (0, 22)
"""The default of `--max-num-batched-tokens` is raised to the largest item
(_get_min_mm_batched_tokens in vllm/engine/arg_utils.py)."""


def whole_item_tokens(description: Description, options: Options) -> int | None:
    """
    Return the tokens of the largest item; with a smaller step, vLLM refuses to start.

    None if vLLM does not refuse, or if the model's items are unknown.
    """
    if _sees_both_ways(description):
        if options.max_num_batched_tokens is None and options.vllm >= _DEFAULT_RAISED_SINCE:
            return None
    elif options.chunked_media:
        return None
    return _largest_item(description, options)


def is_item_unknown(description: Description, options: Options) -> bool:
    """Return whether vLLM may refuse to start because of an item with unknown tokens."""
    return (
        not options.chunked_media
        and options.device == "cuda"
        and description.architecture.multimodal
        and not is_text_only(description, options)
        and (description.config or {}).get("model_type") != "gemma4"
    )


def with_raised_default(description: Description, options: Options) -> Options:
    """
    Return options with vLLM's raised default of batched tokens, if an item exceeds the default.
    """
    if options.max_num_batched_tokens is not None or options.vllm < _DEFAULT_RAISED_SINCE:
        return options
    item = _largest_item(description, options) if _sees_both_ways(description) else None
    if item is None:
        return options
    length = requested_length(description, options)
    chosen = resolve_defaults(options, length)
    if chosen.max_num_batched_tokens >= item:
        return options
    return replace(options, max_num_batched_tokens=min(item, chosen.max_num_seqs * length))


def _sees_both_ways(description: Description) -> bool:
    """
    Return whether image tokens attend to each other in both directions.

    vLLM then never processes an image in parts.
    """
    return text_part(description.config or {}).get("use_bidirectional_attention") == "vision"


def _largest_item(description: Description, options: Options) -> int | None:
    """Return the tokens of the model's largest image or clip, or None if unknown."""
    if options.device != "cuda" or options.vllm < _WHOLE_SINCE:
        return None
    config = description.config or {}
    if config.get("model_type") != "gemma4" or "video" in options.modalities_off:
        return None
    if not description.architecture.multimodal or is_text_only(description, options):
        return None
    frames = options.video_frames if options.vllm >= _FRAMES_LIMITED_SINCE else None
    return min(_FRAMES, frames or _FRAMES) * _FRAME_TOKENS
