"""How a checkpoint's weights are quantized, as vLLM reads it from the config.  Pure."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Scheme:
    """How one group of linear weights is kept."""

    bits: int
    """Of one weight: 4 or 8."""
    kind: str = "int"
    """int, float"""
    group: int = 0
    """Inputs that share a scale: 128; 0: one for each output; -1: one for the whole weight."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale: (128, 128)."""
    symmetric: bool = True
    """Without zero points."""
    scale_bytes: int = 2
    activation_order: bool = False
    """GPTQ's desc_act: an index for each input is kept."""


@dataclass(frozen=True)
class Quantization:
    """What `quantization_config` says, by vLLM's name of the method."""

    method: str
    """fp8, awq, gptq, compressed-tensors, mxfp4, modelopt, bitsandbytes, ..."""
    scheme: Scheme | None = None
    """Of every linear weight that nothing else names; None: left as it is."""
    ignored: tuple[str, ...] = ()
    """Names or patterns of what is not quantized, as the config has them."""
    groups: tuple[tuple[tuple[str, ...], Scheme | None], ...] = field(default=())
    """(targets, scheme) for weights named by the config, in its order."""
    online: bool = False
    """Quantized by vLLM when it loads a checkpoint that is not."""

    @property
    def bits(self) -> int | None:
        """Return the bits of a weight under the usual scheme."""
        return self.scheme.bits if self.scheme else None

    @property
    def group(self) -> int:
        """Return the inputs that share a scale; 0: not by groups."""
        return self.scheme.group if self.scheme else 0

    @property
    def block(self) -> tuple[int, int] | None:
        """Return the block that shares a scale, or None."""
        return self.scheme.block if self.scheme else None


def quantization(
    config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None = None
) -> Quantization | None:
    """
    Return how the checkpoint is quantized, or None.

    `hf_quant_config` is the parsed file of that name, which older ModelOpt checkpoints have.
    Raises `FleetError` naming a method that is not known.
    """
    raise NotImplementedError
