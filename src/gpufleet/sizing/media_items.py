"""
Compute the tokens of images and clips that a model must process in one step. Pure.

Some models cannot process an image in parts, because all tokens of an image attend to each other.
For such a model, vLLM disables chunked media input (check_and_update_config in
vllm/platforms/cuda.py). `--disable-chunked-mm-input` does the same for any model. In both cases
vLLM does not start if the largest image or clip has more tokens than one step
(compute_mm_encoder_budget in vllm/v1/core/encoder_cache_manager.py).
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
Maximum number of frames in a clip (_VIDEO_MAX_FRAMES), and the tokens of one frame, with tokens for
its marks and time (get_mm_max_tokens_per_item in vllm/model_executor/models/gemma4_mm.py). An image
needs fewer tokens than a clip.
"""
_WHOLE_SINCE = (0, 20)
"""
The first release that reads from Gemma 4's config that image tokens attend to each other
(Gemma4ModelArchConfigConvertor). 0.19 also serves the model, but processes images in parts.
"""
_FRAMES_LIMITED_SINCE = (0, 21)
"""The release from which `num_frames` of `--limit-mm-per-prompt` is used."""
_DEFAULT_RAISED_SINCE = (0, 22)
"""
The release from which vLLM raises the default of `--max-num-batched-tokens` to the tokens of the
largest image or clip (_get_min_mm_batched_tokens in vllm/engine/arg_utils.py).
"""


def whole_item_tokens(description: Description, options: Options) -> int | None:
    """
    Return the tokens of the largest image or clip if one step must be able to hold them.

    If a step holds fewer tokens, vLLM refuses to start. The result is None if vLLM never refuses in
    this case, or if the number of tokens is unknown.
    """
    if _sees_both_ways(description):
        if options.max_num_batched_tokens is None and options.vllm >= _DEFAULT_RAISED_SINCE:
            return None
    elif options.chunked_media:
        return None
    return _largest_item(description, options)


def is_item_unknown(description: Description, options: Options) -> bool:
    """Return whether vLLM may refuse to start because of an image or clip of unknown size."""
    return (
        not options.chunked_media
        and options.device == "cuda"
        and description.architecture.multimodal
        and not is_text_only(description, options)
        and (description.config or {}).get("model_type") != "gemma4"
    )


def with_raised_default(description: Description, options: Options) -> Options:
    """
    Return the options with the default of batched tokens that vLLM raises for large items.

    If no image or clip exceeds the default, the options are returned as they are.
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
    Return whether all tokens of an image attend to each other.

    If so, vLLM never processes an image in parts.
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
