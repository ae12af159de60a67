"""Describe a model for sizing: architecture, quantization, and contents of its files.  Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from gpufleet.sizing.adapter_config import AdapterConfig
from gpufleet.sizing.architectures.components import Architecture
from gpufleet.sizing.architectures.quantization import quantization
from gpufleet.sizing.architectures.quantization_scheme import Quantization
from gpufleet.sizing.architectures.registry import architecture

Stored = Mapping[str, tuple[str, tuple[int, ...]]]
"""The dtype, by safetensors' name, and the shape of each tensor, by the tensor's name."""


@dataclass(frozen=True, eq=False)
class Description:
    """
    The facts in a model's files.

    Descriptions are compared by identity, so create one for each model and keep it. `stored` is
    None if no safetensors header was read. `stored_bytes` is `total_size` of the index in bytes, or
    None without an index.
    """

    architecture: Architecture
    quantization: Quantization | None = None
    stored: Stored | None = None
    stored_bytes: int | None = None
    config: Mapping[str, Any] | None = None
    notes: tuple[str, ...] = ()
    """Sentences on parts of the files that could not be read."""
    draft: Description | str | None = None
    """The draft model of `--speculative-config`, or a sentence that states why it is unknown."""
    adapters: Mapping[str, AdapterConfig | str] = field(default_factory=dict)
    """
    The config of each LoRA adapter, or a sentence that states why it is unknown, by the adapter's
    name.
    """


class HubSilence(str):
    """
    A sentence that states that the Hub does not answer, so a model has no description.

    Unlike other sentences in `Described`, it does not mean that a setting is wrong.
    """

    __slots__ = ()


Described: TypeAlias = Description | str
"""A description, or a sentence that states why there is none."""


@dataclass(frozen=True)
class ModelFiles:
    """The parsed files of a model for sizing, without its weights."""

    config: Mapping[str, Any]
    hf_quant_config: Mapping[str, Any] | None = None
    stored: Stored | None = None
    stored_bytes: int | None = None
    modules: Sequence[Any] | None = None
    """modules.json of sentence-transformers; None if it does not exist."""
    origin: str = ""
    """The name or directory of the model, for messages."""
    notes: tuple[str, ...] = ()
    """Sentences on parts that could not be read."""


def describe(files: ModelFiles) -> Description:
    """Return the description of a model's files. Raises `FleetError`, see `architecture()`."""
    return Description(
        architecture(files.config),
        quantization(files.config, files.hf_quant_config),
        files.stored,
        files.stored_bytes,
        _with_quantization(files),
        files.notes,
    )


def _with_quantization(files: ModelFiles) -> Mapping[str, Any]:
    """
    Return config.json with the quantization of hf_quant_config.json, if config.json has none.

    vLLM does the same (transformers_utils/config.py, get_config).
    """
    if not files.hf_quant_config or files.config.get("quantization_config"):
        return files.config
    said = {"quant_method": "modelopt", **files.hf_quant_config}
    return {**files.config, "quantization_config": said}
