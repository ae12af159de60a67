"""
Convert `params.json` of checkpoints in Mistral's format to the keys of `config.json`. Pure.

vLLM makes the same conversion. Source: adapt_config_dict in
vllm/transformers_utils/configs/mistral.py of 0.23.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from gpufleet.errors import FleetError

PARAMS = "params.json"
INDEX = "consolidated.safetensors.index.json"

_NAMES = {
    "dim": "hidden_size",
    "norm_eps": "rms_norm_eps",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "tied_embeddings": "tie_word_embeddings",
}
_OF_EXPERTS = {
    "route_every_n": "moe_layer_freq",
    "first_k_dense_replace": "first_k_dense_replace",
    "num_experts_per_tok": "num_experts_per_tok",
    "num_experts": "n_routed_experts",
    "expert_hidden_dim": "moe_intermediate_size",
    "num_shared_experts": "n_shared_experts",
}
_POSITIONS = 128_000
"""vLLM's default for `max_position_embeddings`."""


def config_of(params: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return the config.json that vLLM creates from this `params.json`. Raises `FleetError`."""
    missing = [key for key in ("dim", "n_layers", "n_heads", "vocab_size") if key not in params]
    if missing:
        raise FleetError(
            f"{origin}: {PARAMS} has no `{missing[0]}`, so it is not a checkpoint in Mistral's "
            "format: use the publisher's original file"
        )
    config: dict[str, Any] = {_NAMES.get(key, key): value for key, value in params.items()}
    positions = config.get("max_position_embeddings") or _POSITIONS
    config |= {"max_position_embeddings": positions}
    config["max_seq_len"] = params.get("max_seq_len") or positions
    config["model_type"] = params.get("model_type") or "transformer"
    _put_windows(config)
    quantized = _quantization(config.pop("quantization", None), origin)
    _put_class(config)
    if isinstance(yarn := config.pop("yarn", None), Mapping):
        config["rope_parameters"] = {"rope_type": "yarn", **yarn}
    config = _with_encoder(config, origin)
    return {**config, "quantization_config": quantized} if quantized else config


def _put_windows(config: dict[str, Any]) -> None:
    """
    Set `layer_types` if `sliding_window` is a list with one window, or null, for each layer.
    """
    windows = config.get("sliding_window")
    if not isinstance(windows, list) or not windows:
        return
    each = windows * (config["num_hidden_layers"] // len(windows))
    config["layer_types"] = [
        "full_attention" if window is None else "sliding_attention" for window in each
    ]
    config["sliding_window"] = next(filter(None, windows), None)


def _quantization(said: Any, origin: str) -> dict[str, Any] | None:
    if not isinstance(said, Mapping) or not said:
        return None
    if said.get("qformat_weight") == "fp8_e4m3":
        dynamic = said.get("qscheme_act") == "NO_SCALES"
        return {"quant_method": "fp8", "activation_scheme": "dynamic" if dynamic else "static"}
    method = str(said.get("quant_method", "")).lower().replace("_", "-")
    if method == "compressed-tensors":
        return {**said, "quant_method": method}
    raise FleetError(
        f"{origin}: {PARAMS} has a `quantization` that vLLM does not accept. If the checkpoint "
        "also exists in Hugging Face's format (config.json), write the directory of that "
        "checkpoint"
    )


def _put_class(config: dict[str, Any]) -> None:
    """Set `architectures`, depending on the keys for experts and latent attention."""
    experts = config.get("moe")
    latent = bool(config.get("qk_nope_head_dim"))
    if config["model_type"] == "mamba":
        name = "Mamba2ForCausalLM"
    elif latent or (isinstance(experts, Mapping) and experts.get("num_shared_experts")):
        name = "MistralLarge3ForCausalLM"
        config["model_type"] = "deepseek_v3"
        # Without experts every layer has one MLP (Mistral Medium with latent attention).
        dense = {"num_experts": 1, "first_k_dense_replace": config["num_hidden_layers"],
                 "num_shared_experts": 1, "route_every_n": 1, "num_experts_per_tok": 1,
                 "expert_hidden_dim": config.get("intermediate_size")}  # fmt: skip
        of_experts = experts if isinstance(experts, Mapping) and experts else dense
        config |= {new: of_experts[old] for old, new in _OF_EXPERTS.items() if old in of_experts}
    elif isinstance(experts, Mapping) and experts:
        name = "MixtralForCausalLM"
        config["num_local_experts"] = experts.get("num_experts")
    else:
        name = "MistralForCausalLM"
    config.pop("moe", None)
    config["architectures"] = [name]


def _with_encoder(config: dict[str, Any], origin: str) -> dict[str, Any]:
    """Return the config. If there is an image encoder, move the text model to `text_config`."""
    beside = config.pop("multimodal", None) or {}
    seen = config.pop("vision_encoder", None) or beside.get("vision_encoder_args")
    if beside.get("whisper_model_args"):
        raise FleetError(
            f"{origin}: {PARAMS} has an audio encoder, which gpufleet cannot read in Mistral's "
            "format: write the checkpoint in Hugging Face's format (config.json)"
        )
    if not isinstance(seen, Mapping) or not seen:
        return config
    merges = seen.get("mm_projector_id") == "patch_merge"
    return {
        "architectures": ["PixtralForConditionalGeneration"],
        "model_type": "pixtral",
        "text_config": config,
        "vision_config": {"model_type": "pixtral", **seen},
        "spatial_merge_size": seen.get("spatial_merge_size", 2) if merges else 1,
        "multimodal_projector_bias": bool(seen.get("adapter_bias", True)),
    }
