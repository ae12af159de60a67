"""Define the input and output of the rules (`Choice`, `Refused`), and the names of flags. Pure."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from gpufleet.catalog.vllm_support import Version
from gpufleet.sizing.architectures.quantization_scheme import Quantization


@dataclass(frozen=True)
class Choice:
    """Values of vLLM's flags because of which vLLM may refuse a model."""

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False
    redundant_experts: int | None = None
    """`num_redundant_experts` with `--enable-eplb`; None without `--enable-eplb`."""
    decode_context: int = 1
    max_model_len: int | None = None
    """The length in tokens; None for the length in the model's config."""
    dtype: str = "auto"
    kv_cache_dtype: str = "auto"
    quantization: str | None = None
    """None for the checkpoint's quantization."""
    lora_rank: int | None = None
    """`--max-lora-rank`; None without adapters."""
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    chunked_prefill: bool = True
    whole_item: int | None = None
    """
    Tokens of the largest image or clip that must fit in one step; None if there is no such limit.
    """
    draft_vocabulary: int | None = None
    """
    Vocabulary size of a separate draft model. None without a draft model, or if the size may differ
    from the served model's.
    """


@dataclass(frozen=True)
class Refused:
    """
    One refusal of vLLM.

    `setting` is what to change: a field of `Choice`, "compute_capability" (use a different GPU),
    "vllm" (use a different release), or "checkpoint" (use a different quantization of the model).
    For "checkpoint", `nearest` is None.
    """

    name: str
    """The rule's name in docs/plan/refusals.md: "attention-heads"."""
    setting: str
    value: Any
    found: str
    """What vLLM refuses and why, as a sentence without a full stop."""
    rule: str
    """vLLM's file, and the function or class that raises the error."""
    nearest: Any
    """The value of `setting` that works and is nearest to `value`."""
    also: str = ""
    """An alternative to `nearest`, in words."""

    @property
    def flag(self) -> str:
        """Return what to change: a flag of `vllm serve`, or words such as "the GPU"."""
        return FLAGS[self.setting]

    @property
    def remedy(self) -> str:
        """Return the remedy in words."""
        return _remedy(self.setting, self.nearest) + (f", or {self.also}" if self.also else "")

    @property
    def sentence(self) -> str:
        """Return the refusal and its remedy as a sentence."""
        return f"{self.found} ({self.rule}): {self.remedy}"


FLAGS = {
    "tensor": "--tensor-parallel-size",
    "pipeline": "--pipeline-parallel-size",
    "data": "--data-parallel-size",
    "expert": "--enable-expert-parallel",
    "redundant_experts": "num_redundant_experts in --eplb-config",
    "decode_context": "--decode-context-parallel-size",
    "max_model_len": "--max-model-len",
    "dtype": "--dtype",
    "kv_cache_dtype": "--kv-cache-dtype",
    "quantization": "--quantization",
    "lora_rank": "--max-lora-rank",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "draft_vocabulary": "the draft model",
    "compute_capability": "the GPU",
    "vllm": "the vLLM release",
    "checkpoint": "the checkpoint",
}


def with_nearest(
    refused: Refused,
    quantization: Quantization | None,
    choice: Choice,
    compute_capability: tuple[int, int] | None,
    vllm: Version,
) -> tuple[Quantization | None, Choice, tuple[int, int] | None, Version]:
    """Return the inputs of the rules after the change that `refused` suggests."""
    if refused.setting == "compute_capability":
        return quantization, choice, refused.nearest, vllm
    if refused.setting == "vllm":
        return quantization, choice, compute_capability, refused.nearest
    if refused.setting == "checkpoint":
        return None, replace(choice, quantization=None), compute_capability, vllm
    changed = replace(choice, **{refused.setting: refused.nearest})
    return quantization, changed, compute_capability, vllm


def version_text(vllm: Version) -> str:
    """Return a release as text: `0.33.0`."""
    return ".".join(map(str, vllm))


def _remedy(setting: str, nearest: Any) -> str:
    flag = FLAGS[setting]
    match setting:
        case "compute_capability":
            return f"use GPUs of compute capability {nearest[0]}.{nearest[1]} or newer"
        case "vllm":
            return f"use vLLM {version_text(nearest)}"
        case "checkpoint":
            return "use a checkpoint with a different quantization"
        case "draft_vocabulary":
            return f"use a draft model of the same family, with {nearest} tokens"
        case "expert":
            return f"set {flag}" if nearest else f"remove {flag}"
        case "redundant_experts":
            return f"set {flag} to {nearest}"
        case "lora_rank" if nearest is None:
            return "remove --enable-lora"
        case _ if nearest is None:
            return f"remove {flag}"
    return f"set {flag} {nearest}"
