"""
Refuse a config with keys that change the model's size, but that gpufleet did not read. Pure.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from gpufleet.errors import FleetError

SIZE_KEYS: dict[str, tuple[str, ...]] = {
    "routed experts": (
        "num_experts",
        "n_routed_experts",
        "num_local_experts",
        "moe_num_experts",
        "num_routed_experts",
        "n_experts",
    ),
    "width of an expert": (
        "moe_intermediate_size",
        "moe_ffn_hidden_size",
        "expert_ffn_hidden_size",
        "expert_hidden_dim",
    ),
    "shared experts": (
        "n_shared_experts",
        "num_shared_experts",
        "num_shared_expert",
        "moe_num_shared_experts",
        "moe_shared_expert_intermediate_size",
        "shared_expert_intermediate_size",
        "shared_intermediate_size",
    ),
    "layers with experts": (
        "mlp_layer_types",
        "moe_layers_enum",
        "expert_layer_period",
        "use_mixed_mlp_moe",
    ),
    "latent experts": ("moe_latent_size", "routed_expert_hidden_size"),
    "latent attention": ("kv_lora_rank",),
    "latent queries": ("q_lora_rank",),
    "rotary part of a latent cache": ("qk_rope_head_dim",),
    "width of values": ("v_head_dim", "swa_v_head_dim"),
    "heads of a window": (
        "swa_head_dim",
        "swa_num_key_value_heads",
        "swa_num_attention_heads",
        "num_sliding_attention_heads",
    ),
    "heads of layers without a window": ("global_head_dim", "num_global_key_value_heads"),
    "heads by the layer": ("num_attention_heads_per_layer",),
    "index of sparse attention": ("index_head_dim", "index_n_heads"),
    "compressed attention": ("compress_ratios",),
    "window": (
        "sliding_window",
        "sliding_window_size",
        "window_size",
        "attention_chunk_size",
    ),
    "kinds of layers": (
        "layer_types",
        "sliding_window_pattern",
        "interleaved_sliding_window_pattern",
        "hybrid_layer_pattern",
        "hybrid_override_pattern",
        "layers_block_type",
        "attn_layer_indices",
        "block_configs",
        "linear_attn_config",
    ),
    "kinds of layers by their numbers": (
        "attn_type_list",
        "attn_layer_period",
        "full_attention_interval",
        "full_attn_idxs",
        "layer_group_size",
        "decoder_attention_types",
    ),
    "parts with their own settings": ("attn_config", "ffn_config", "sparse_attention_config"),
    "state of linear attention": (
        "linear_num_value_heads",
        "linear_num_key_heads",
        "linear_attn_config",
        "kda_layers",
    ),
    "state of Mamba": (
        "mamba_d_state",
        "mamba_num_heads",
        "mamba_n_heads",
        "n_mamba_heads",
        "ssm_state_size",
        "state_size",
    ),
    "state of convolution": ("conv_L_cache",),
    "layers that share a cache": ("num_kv_shared_layers", "cla_share_factor"),
    "embeddings of each layer": ("hidden_size_per_layer_input",),
    "embeddings of several tokens": ("ngram_vocab_size_ratio", "emb_neighbor_num"),
    "further inputs": ("altup_num_inputs", "laurel_rank"),
    "streams of hidden states": ("hc_mult",),
    "layers that are run again": ("loop_num", "num_mem_blocks"),
    "layers that predict further tokens": ("num_nextn_predict_layers", "mtp_num_hidden_layers"),
    "towers": ("vision_config", "audio_config"),
}
"""
Keys of a config.json that change the weights or the cache. Each group has the names of one
quantity. A class that reads one of these names does not need the others. test_unread_keys.py lists
the keys that the builders of this package read, and fails if a key is in no group.
"""

_NAMED: dict[str, re.Pattern[str]] = {
    "routed experts": re.compile(
        r"(?!.*shared)(?:.*_)?n(?:um)?_(?:.*_)?experts?(?!.*(?:per|top|group))"
    ),
    "parts with experts": re.compile(r".*(?:expert|moe).*(?:config|cfg)"),
    "low ranks": re.compile(r".*lora_rank"),
    "state of Mamba": re.compile(r".*(?:mamba|ssm).*"),
}
"""Patterns of further keys that probably mean the same as a group, but that no builder reads."""

_ROUTED = "routed experts"
_OF_EXPERTS = ("width of an expert", "shared experts")
"""Groups that matter only for models with routed experts."""

_WITHOUT_EFFECT = {
    # `hybrid_layer_pattern` determines which layers have a window (mimo_v2_flash.py).
    ("MiMoV2FlashForCausalLM", "attention_chunk_size"),
    # Layers with even numbers have the window, independently of this key (gpt_oss.py).
    ("GptOssForCausalLM", "layer_types"),
    # longcat_flash.py creates no shared experts.
    ("LongcatFlashForCausalLM", "n_shared_experts"),
    ("LongcatFlashNgramForCausalLM", "n_shared_experts"),
    # All layers have full attention, and this list states the same (minimax_m2.py).
    ("MiniMaxM2ForCausalLM", "attn_type_list"),
    # `layer_types` states the same for each layer (transformers' Qwen3_5TextConfig,
    # Qwen3NextConfig).
    ("Qwen3_5ForCausalLM", "full_attention_interval"),
    ("Qwen3_5MoeForCausalLM", "full_attention_interval"),
    ("Qwen3NextForCausalLM", "full_attention_interval"),
} | {
    # With `--speculative-config`, vLLM loads these layers as a separate model (hf_config_override
    # in config/speculative.py). In 0.32.0, the served model has the same size with and without
    # these layers. This was tested with a model of each class (tests/data/small_models.py).
    (name, "num_nextn_predict_layers")
    for name in (
        "BailingMoeV2_5ForCausalLM",
        "BailingMoeV3ForCausalLM",
        "Ernie4_5_MoeForCausalLM",
        "Exaone4ForCausalLM",
        "ExaoneMoEForCausalLM",
        "ExaoneMoeForCausalLM",
        "Glm4ForCausalLM",
        "HYV3ForCausalLM",
        "KimiLinearForCausalLM",
        "LongcatFlashForCausalLM",
        "LongcatFlashNgramForCausalLM",
        "MiMoForCausalLM",
        "MiMoV2FlashForCausalLM",
        "MiMoV2ForCausalLM",
        "Step3p5ForCausalLM",
    )
}
"""(class, key) pairs of keys that vLLM's class does not read either."""

_OFF = {
    "layer_types": {"full_attention", "attention"},
    "mlp_layer_types": {"dense"},
    "attn_type_list": {"1"},
}
"""Values of lists that do not change the model's size."""


class ReadConfig(Mapping[str, Any]):
    """A parsed `config.json` that records which of its keys were read."""

    def __init__(self, config: Mapping[str, Any], read: set[str] | None = None) -> None:
        self._config = config
        self.read = set() if read is None else read

    def __getitem__(self, key: str) -> Any:
        self.read.add(key)
        return self._config[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._config)

    def __len__(self) -> int:
        return len(self._config)

    def __contains__(self, key: object) -> bool:
        return key in self._config

    def with_values(self, values: Mapping[str, Any]) -> ReadConfig:
        """
        Return the config with other values. Keys that are read from either config are recorded in
        both.
        """
        return ReadConfig({**self._config, **values}, self.read)


def with_values(config: Mapping[str, Any], values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config with other values, which also records the keys that are read."""
    if isinstance(config, ReadConfig):
        return config.with_values(values)
    return {**config, **values}


def unread_size_keys(config: Mapping[str, Any], read: set[str], name: str) -> list[str]:
    """
    Return the keys of `config` that change the model's size, but that were not read for `name`.
    """
    found = []
    experts = any(_says_something(key, config) for key in _names(_ROUTED, config))
    for group in dict.fromkeys((*SIZE_KEYS, *_NAMED)):
        if group in _OF_EXPERTS and not experts:
            continue
        stated = [key for key in _names(group, config) if _says_something(key, config)]
        if not read.intersection(stated):
            found += [key for key in stated if (name, key) not in _WITHOUT_EFFECT]
    return list(dict.fromkeys(found))


def _names(group: str, config: Mapping[str, Any]) -> Iterator[str]:
    """
    Yield the names of a group: first the known names, then keys of `config` that match its pattern.
    """
    known = SIZE_KEYS.get(group, ())
    yield from known
    if pattern := _NAMED.get(group):
        for key in config:
            value = config[key] if key not in known and pattern.fullmatch(str(key)) else None
            if isinstance(value, int | float | Mapping) and not isinstance(value, bool):
                yield key


def refuse_unread(config: Mapping[str, Any], read: set[str], name: str) -> None:
    """Raise `FleetError` with the unread keys that change the model's size."""
    if unread := unread_size_keys(config, read, name):
        keys = ", ".join(f"`{key}`" for key in unread)
        raise FleetError(
            f"config.json has {keys}, which changes the model's size. gpufleet does not know "
            f"{keys} for {name}, and cannot estimate the model's size: set the parallel sizes and "
            "`--gpu-memory-utilization` yourself, and read the number of KV cache tokens that vLLM "
            "logs at its start"
        )


def _says_something(key: str, config: Mapping[str, Any]) -> bool:
    """Return whether a key's value changes the model compared with a missing key."""
    value = config.get(key)
    if value is None or value is False or value == 0 or value in ([], {}, ""):
        return False
    if key in SIZE_KEYS["window"] and config.get("use_sliding_window") is False:
        return False
    if key in _OFF and isinstance(value, list):
        return not set(map(str, value)) <= _OFF[key]
    if key in SIZE_KEYS["width of values"]:
        return bool(value != config.get("head_dim"))
    if key == "cla_share_factor":
        return bool(config.get("use_cla")) and value != 1
    return not (key in _names(_ROUTED, config) and value == 1)
