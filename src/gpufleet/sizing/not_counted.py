"""
Find the parts whose memory cannot be computed. With such a part, the verdict is unknown. Pure.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gpufleet.sizing.architectures.description import Description
from gpufleet.sizing.lora_memory import why_not_counted
from gpufleet.sizing.options import Options
from gpufleet.sizing.stage_memory import counted_draft


def counted_options(description: Description, options: Options) -> Options:
    """Return the options without the features whose memory is unknown."""
    if any(_not_counted_adapters(description, options)):
        options = replace(options, lora=None)
    if any(_not_counted_draft(description, options)):
        options = replace(options, draft_model=None, speculative_tokens=0, speculative_method=None)
    return options


def not_counted(description: Description, options: Options) -> Iterator[str]:
    """
    Yield a sentence for each part of the server (tower, adapters, draft) whose memory is unknown.
    """
    architecture = description.architecture
    if architecture.tower_estimated and all(part.name != "tower" for part in architecture.parts):
        yield (
            f"the memory of the parts of {architecture.name} other than the text part is not "
            "counted"
        )
    yield from _not_counted_adapters(description, options)
    yield from _not_counted_draft(description, options)


def _not_counted_adapters(description: Description, options: Options) -> Iterator[str]:
    why = why_not_counted(description.architecture)
    if options.language_model_only or options.modalities_off:
        why = why or "gpufleet does not know which layers of a multimodal model get LoRA matrices"
    if options.lora and why:
        yield (
            f"--enable-lora: the memory of {options.lora.max_loras} adapters of rank "
            f"{options.lora.max_rank} is not counted for {description.architecture.name}: {why}"
        )


BLOCK = 16
"""
The smallest block size that all of vLLM's attention backends for NVIDIA GPUs accept; they also
accept multiples. Source: their `get_supported_kernel_block_sizes` in vllm/v1/attention/backends of
0.32.
"""


def odd_block(size: int) -> str:
    """Return the end of a sentence on a block size that is not a multiple of `BLOCK`."""
    return (
        f"{size} is not a multiple of {BLOCK}, but GPU attention backends require such a multiple, "
        f"so the server may not start: write {BLOCK}, 32 or 64, or remove the setting"
    )


_WITHOUT_DRAFT = {"ngram", "ngram_gpu", "suffix"}
"""Methods of speculative decoding that load no model."""


def _not_counted_draft(description: Description, options: Options) -> Iterator[str]:
    method = options.speculative_method
    if method in _WITHOUT_DRAFT or options.draft_model == "ngram":
        return
    if counted_draft(description, options) is not None:
        return
    own = bool(description.architecture.draft_layers)
    if options.draft_model and not (own and method and method.endswith("mtp")):
        why = description.draft if isinstance(description.draft, str) else ""
        if not why and method not in (None, "draft_model"):
            why = f"gpufleet does not know which parts {method} shares with the target model"
        because = f": {why}" if why else ""
        yield (
            f"--speculative-config: the weights and the cache of the draft model "
            f"{options.draft_model} are not counted{because}"
        )
    elif (options.speculative_tokens or (method or "").endswith("mtp")) and not own:
        yield (
            "--speculative-config: the weights and the cache of a draft model are not counted, "
            f"and {description.architecture.name} has no layers of its own that draft tokens"
        )
