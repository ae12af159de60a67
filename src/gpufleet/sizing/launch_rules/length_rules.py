"""Define rules on lengths, batches, draft models and adapters. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from gpufleet.catalog import vllm_support
from gpufleet.sizing.launch_rules.choice import Refused
from gpufleet.sizing.launch_rules.launch_case import LaunchCase

LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that LoRAConfig in vllm/config/lora.py accepts. Since 0.11.1, it also accepts 1."""


def check_max_model_len(case: LaunchCase) -> Iterator[Refused]:
    """Refuse a `--max-model-len` above the model's maximum."""
    wanted, longest = case.choice.max_model_len, case.architecture.longest_length(case.vllm)
    if wanted is not None and wanted > longest:
        yield Refused(
            "max-model-len",
            "max_model_len",
            wanted,
            f"--max-model-len {wanted} is above the maximum of {longest} tokens in {case.model}'s "
            "config",
            "vllm/config/model.py: _get_and_verify_max_len",
            longest,
            _how_to_lengthen(case),
        )


_YARN_LENGTHENS_NOT = (0, 30)
"""
Since this release, vLLM does not multiply the length by YaRN's factor: see
`max_length.longest_model_len`.
"""


def _how_to_lengthen(case: LaunchCase) -> str:
    key = "rope_scaling" if case.vllm < (0, 12) else "rope_parameters"
    both = f"`{key}` and `max_position_embeddings`"
    what = f"`{key}`" if case.vllm < _YARN_LENGTHENS_NOT else f"{both} (this release needs both)"
    return f"extend the maximum with {what} in `hf-overrides`, as the model's card says"


def check_batched_tokens(case: LaunchCase) -> Iterator[Refused]:
    """
    Refuse a `--max-num-batched-tokens` that is too small.

    The value must not be below the number of sequences, the tokens of the largest image or clip
    that must fit in one step, or, without chunked prefill, the length.
    """
    tokens, sequences = case.choice.max_num_batched_tokens, case.choice.max_num_seqs
    if tokens is None:
        return
    rule = "vllm/config/scheduler.py: SchedulerConfig.verify_max_model_len"
    if sequences is not None and tokens < sequences:
        yield Refused(
            "batched-tokens-below-seqs",
            "max_num_batched_tokens",
            tokens,
            f"--max-num-batched-tokens {tokens} is less than --max-num-seqs {sequences}",
            rule,
            sequences,
        )
    item = case.choice.whole_item
    if item is not None and tokens < item:
        yield Refused(
            "batched-tokens-below-item",
            "max_num_batched_tokens",
            tokens,
            f"--max-num-batched-tokens {tokens} (your value, or the release's default) is less "
            f"than the {item} tokens of one clip, and {case.model} reads a clip in one step",
            "vllm/v1/core/encoder_cache_manager.py: compute_mm_encoder_budget",
            item,
            "allow no clips: set `limit-mm-per-prompt` with video 0",
        )
    length = case.choice.max_model_len or case.architecture.default_length(case.vllm)
    if not case.choice.chunked_prefill and tokens < length:
        yield Refused(
            "batched-tokens-below-length",
            "max_num_batched_tokens",
            tokens,
            f"--max-num-batched-tokens {tokens} is less than the context of {length} tokens, but "
            "without chunked prefill vLLM reads a whole prompt in one step",
            rule,
            length,
        )


_DRAFT_VOCABULARY = (0, 17)
"""The first release that compares the vocabularies."""
_MIXED_VOCABULARIES = (0, 25)


def check_draft(case: LaunchCase) -> Iterator[Refused]:
    """Refuse a draft model whose vocabulary size differs from the served model's."""
    draft, own = case.choice.draft_vocabulary, case.architecture.vocab_size
    if draft is not None and draft != own and case.vllm >= _DRAFT_VOCABULARY:
        mixes = case.vllm >= _MIXED_VOCABULARIES
        yield Refused(
            "draft-vocabulary",
            "draft_vocabulary",
            draft,
            f"the draft model of --speculative-config has a vocabulary of {draft} tokens, but "
            f"{case.model} has a vocabulary of {own} tokens",
            "vllm/config/speculative.py: verify_equal_vocab_size_if_draft_model",
            own,
            "set `use_heterogeneous_vocab: true` in --speculative-config" if mixes else "",
        )


def check_lora(case: LaunchCase) -> Iterator[Refused]:
    """Refuse adapters that the class does not load, and ranks that vLLM does not accept."""
    rank = case.choice.lora_rank
    if rank is None:
        return
    served = vllm_support.supports_architecture(case.model, case.vllm)
    if vllm_support.supports_lora(case.model, case.vllm) is False and served is not False:
        yield Refused(
            "lora",
            "lora_rank",
            rank,
            f"{case.release} does not load LoRA adapters for {case.model}",
            "vllm/lora: the class is no SupportsLoRA",
            None,
        )
    ranks = LORA_RANKS if case.vllm < (0, 11, 1) else (1, *LORA_RANKS)
    if rank not in ranks:
        yield Refused(
            "lora-rank",
            "lora_rank",
            rank,
            f"--max-lora-rank {rank} is not one of {', '.join(map(str, ranks))}",
            "vllm/config/lora.py: LoRAConfig",
            next((one for one in ranks if one >= rank), ranks[-1]),
        )
