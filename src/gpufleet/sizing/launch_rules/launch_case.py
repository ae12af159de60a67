"""Provide the facts that rules read about a model, its options, a GPU and a release. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from gpufleet.catalog import vllm_support
from gpufleet.catalog.vllm_support import Version
from gpufleet.sizing.architectures.components import (
    Architecture,
    Split,
    StateCache,
    Weight,
)
from gpufleet.sizing.architectures.quantization import online_quantization
from gpufleet.sizing.architectures.quantization_scheme import Quantization, Scheme
from gpufleet.sizing.launch_rules.choice import Choice, version_text


@dataclass(frozen=True)
class Fault:
    """Why a tensor-parallel size is refused."""

    name: str
    found: str
    rule: str


@dataclass(frozen=True)
class LaunchCase:
    """All facts that a rule may read."""

    architecture: Architecture
    checkpoint: Quantization | None
    choice: Choice
    compute_capability: tuple[int, int] | None
    vllm: Version

    @property
    def model(self) -> str:
        """The architecture's name."""
        return self.architecture.name

    @property
    def release(self) -> str:
        """The release in words: `vLLM 0.33.0`."""
        return f"vLLM {version_text(self.vllm)}"

    @property
    def gpu(self) -> str:
        """The GPU in words: `a GPU of compute capability 9.0`."""
        major, minor = self.compute_capability or (0, 0)
        return f"a GPU of compute capability {major}.{minor}"

    @cached_property
    def capability(self) -> int | None:
        """The compute capability as a number, as in vLLM: 80 for 8.0. None if it is unknown."""
        if self.compute_capability is None:
            return None
        major, minor = self.compute_capability
        return 10 * major + minor

    @cached_property
    def quantization(self) -> Quantization | None:
        """The quantization of the loaded weights: from the checkpoint, or else from the flag."""
        if self.checkpoint is None and self.choice.quantization is not None:
            return online_quantization(self.choice.quantization, self.vllm)
        return self.checkpoint

    @cached_property
    def method(self) -> str | None:
        """The name of the quantization method that vLLM uses on this GPU."""
        return None if self.quantization is None else _loaded_method(self, self.quantization)

    @cached_property
    def method_limits(self) -> vllm_support.QuantizationNeeds | None:
        """
        The GPUs and dtypes that the method supports in this release; None if they are unknown.
        """
        return vllm_support.quantization_needs(self.method, self.vllm) if self.method else None

    @cached_property
    def dtype(self) -> str:
        """Return the dtype of computations. `auto` is resolved by the rules of the release."""
        dtype = _ALIASES.get(self.choice.dtype, self.choice.dtype)
        if dtype != "auto":
            return dtype
        own = self.architecture.dtype
        if own == "bfloat16" and self.has_no_bfloat16 and self.vllm >= _AUTO_FALLS_BACK:
            return "float32" if self.refuses_float16 else "float16"
        return own

    @property
    def has_no_bfloat16(self) -> bool:
        """Return whether the GPU is known to lack bfloat16."""
        return self.capability is not None and self.capability < BFLOAT16_CAPABILITY

    @property
    def has_no_fp8_latent_cache(self) -> bool:
        """
        Return whether certainly no backend of the release reads an FP8 latent cache on this GPU.
        """
        return (
            self.architecture.has_latent_cache
            and self.capability is not None
            and self.capability // 10 not in _LATENT_FP8_GPUS
            and _LATENT_FP8[0] <= self.vllm < _LATENT_FP8[1]
        )

    @cached_property
    def refuses_float16(self) -> bool:
        """Return whether the release refuses float16 for the model."""
        return bool(vllm_support.refuses_float16(self.model, self.vllm))


_LATENT_FP8 = (0, 11, 1), (0, 18)
"""
The releases in which only GPUs of `_LATENT_FP8_GPUS` read an FP8 latent cache. From 0.11.1 on, the
cache's dtype determines the backend. Up to 0.17.1, triton_mla.py, the only backend for other GPUs,
does not support FP8. Source: vllm/v1/attention/backends/mla.
"""
_LATENT_FP8_GPUS = {9, 10}
_ALIASES = {"half": "float16", "float": "float32"}
BFLOAT16_CAPABILITY = 80
"""supported_dtypes of vllm/platforms/cuda.py: Ampere and newer."""
_AUTO_FALLS_BACK = (0, 9, 1)
"""The first release with _resolve_auto_dtype in vllm/config."""


class _ByIdentity:
    """
    An architecture and a quantization, compared by identity because comparing layers is slow.
    """

    def __init__(self, architecture: Architecture, quantization: Quantization | None) -> None:
        self.architecture = architecture
        self.quantization = quantization

    def __hash__(self) -> int:
        return hash((id(self.architecture), id(self.quantization)))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, _ByIdentity)
            and self.architecture is other.architecture
            and self.quantization is other.quantization
        )


@dataclass(frozen=True)
class Shape:
    """The weights and caches of an architecture's layers, without duplicates."""

    caches: tuple[Any, ...]
    linear: tuple[tuple[Weight, tuple[int, ...]], ...]
    """
    (matrix, sample layers with this matrix) for each matrix that TP divides. The mixers of layers
    with states are excluded.
    """


def shape_of(architecture: Architecture) -> Shape:
    """Return the weights and caches of an architecture's layers, without duplicates. Cached."""
    return _shape_once(_ByIdentity(architecture, None))


@lru_cache(maxsize=256)
def _shape_once(same: _ByIdentity) -> Shape:
    caches: dict[Any, None] = {}
    weights: dict[Weight, list[int]] = {}
    seen: dict[tuple[int, int], list[int]] = {}
    for index, layer in enumerate(same.architecture.layers):
        key = (id(layer.weights), id(layer.cache))
        seen.setdefault(key, []).append(index)
    for indices in seen.values():
        layer = same.architecture.layers[indices[0]]
        own = [cache for cache in (layer.cache, *layer.more) if cache is not None]
        caches.update(dict.fromkeys(own))
        state = any(isinstance(cache, StateCache) for cache in own)
        for weight in layer.weights:
            # The heads determine how the mixer of a layer with states is divided, not the rows.
            if state and not (weight.expert or weight.name.startswith(("mlp.", "feed_forward."))):
                continue
            if weight.linear and weight.split not in {Split.NONE, Split.VOCABULARY}:
                weights.setdefault(weight, []).extend(indices)
    return Shape(
        tuple(caches),
        tuple(
            (weight, (indices[-1], indices[len(indices) // 2], indices[0]))
            for weight, indices in weights.items()
        ),
    )


@lru_cache(maxsize=256)
def _quantized_weights(same: _ByIdentity) -> tuple[tuple[Weight, Scheme], ...]:
    """Return the matrices that are quantized in at least one layer, with their scheme."""
    found = []
    if same.quantization is not None:
        for weight, indices in shape_of(same.architecture).linear:
            schemes = (
                same.quantization.scheme_of(
                    f"model.layers.{index}.{weight.name}", expert=weight.expert
                )
                for index in indices
            )
            if scheme := next((scheme for scheme in schemes if scheme), None):
                found.append((weight, scheme))
    return tuple(found)


def quantized_weights(case: LaunchCase) -> tuple[tuple[Weight, Scheme], ...]:
    """Return the matrices that are quantized in at least one layer, with their scheme."""
    return _quantized_weights(_ByIdentity(case.architecture, case.quantization))


def _loaded_method(case: LaunchCase, quantization: Quantization) -> str:
    """
    Return the name under which vLLM loads a method.

    GPTQ and AWQ become Marlin's methods if Marlin supports the GPU and the checkpoint.

    Source: override_quantization_method of the classes in
    vllm/model_executor/layers/quantization.
    """
    method = quantization.method
    if quantization.online and method not in _ONLINE_OF_THEIR_OWN:
        return "online"
    if method == "auto-round" and vllm_support.quantization_needs(method, case.vllm) is None:
        return "inc"
    if method == "modelopt":
        kinds = quantization.kinds
        if len(kinds) > 1:
            return "modelopt_mixed"
        return {"nvfp4": "modelopt_fp4", "mxfp8": "modelopt_mxfp8"}.get(
            next(iter(kinds), ""), "modelopt"
        )
    if method == "mxfp4" and vllm_support.quantization_needs("gpt_oss_mxfp4", case.vllm):
        return "gpt_oss_mxfp4"
    if method in {"awq", "gptq"}:
        marlin = vllm_support.quantization_needs(f"{method}_marlin", case.vllm)
        known = case.capability is not None  # if it is unknown, the better kernel is assumed
        enough = marlin and (not known or (case.capability or 0) >= marlin.capability)
        scheme = quantization.scheme
        fits = scheme is not None and scheme.bits in {4, 8}
        if method == "gptq":
            fits = fits and scheme is not None and scheme.symmetric
        if enough and fits:
            return f"{method}_marlin"
    return method


_ONLINE_OF_THEIR_OWN = {"fp8", "ptpc_fp8", "bitsandbytes", "experts_int8"}
"""
Methods that quantize while loading with a class of their own, not with OnlineQuantizationConfig.
"""
