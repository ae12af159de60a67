"""Refuse a config whose class leaves unread what changes the model's size.  Pure."""

from __future__ import annotations

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
    "latent attention": ("kv_lora_rank",),
    "latent queries": ("q_lora_rank",),
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
    "state of linear attention": (
        "linear_num_value_heads",
        "linear_num_key_heads",
        "linear_attn_config",
    ),
    "state of Mamba": (
        "mamba_d_state",
        "mamba_num_heads",
        "mamba_n_heads",
        "ssm_state_size",
        "state_size",
    ),
    "state of convolution": ("conv_L_cache",),
    "layers that share a cache": ("num_kv_shared_layers", "cla_share_factor"),
    "embeddings of each layer": ("hidden_size_per_layer_input",),
    "further inputs": ("altup_num_inputs", "laurel_rank"),
}
"""Keys of a config.json that change weights or cache, each group several names of one thing: a
class that reads one name needs no other."""

_OF_EXPERTS = ("width of an expert", "shared experts")
"""Groups that say something only where there are routed experts."""

_WITHOUT_EFFECT = {
    # Its attention has a window or none, by `hybrid_layer_pattern` (mimo_v2_flash.py).
    ("MiMoV2FlashForCausalLM", "attention_chunk_size"),
    # By the number of the layer: an even one has the window (gpt_oss.py).
    ("GptOssForCausalLM", "layer_types"),
    # longcat_flash.py makes none.
    ("LongcatFlashForCausalLM", "n_shared_experts"),
    ("LongcatFlashNgramForCausalLM", "n_shared_experts"),
}
"""(class, key): vLLM's class does not read it either."""

_OFF = {"layer_types": {"full_attention", "attention"}}
"""Values of lists that change nothing."""


class ReadConfig(Mapping[str, Any]):
    """A parsed `config.json` that remembers which of its keys were read."""

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
        """Return it with other values; what is read of either is remembered for both."""
        return ReadConfig({**self._config, **values}, self.read)


def with_values(config: Mapping[str, Any], values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config with other values, which goes on remembering what is read of it."""
    if isinstance(config, ReadConfig):
        return config.with_values(values)
    return {**config, **values}


def unread_size_keys(config: Mapping[str, Any], read: set[str], name: str) -> list[str]:
    """Return the keys with which `config` changes the model's size, and that class `name` left."""
    found = []
    experts = any(_says_something(key, config) for key in SIZE_KEYS["routed experts"])
    for group, names in SIZE_KEYS.items():
        if group in _OF_EXPERTS and not experts:
            continue
        stated = [key for key in names if _says_something(key, config)]
        if not read.intersection(stated):
            found += [key for key in stated if (name, key) not in _WITHOUT_EFFECT]
    return list(dict.fromkeys(found))


def refuse_unread(config: Mapping[str, Any], read: set[str], name: str) -> None:
    """Raise `FleetError` with the keys that change the model's size and were not read."""
    if unread := unread_size_keys(config, read, name):
        keys = ", ".join(f"`{key}`" for key in unread)
        raise FleetError(
            f"config.json has {keys}, which {name} is not known to have here, and which changes "
            "the model's size, so it cannot be estimated: set the parallel sizes and "
            "`--gpu-memory-utilization` yourself and read the KV cache tokens that vLLM logs at "
            "startup"
        )


def _says_something(key: str, config: Mapping[str, Any]) -> bool:
    """Return whether a key's value changes the model compared with no such key."""
    value = config.get(key)
    if value is None or value is False or value == 0 or value in ([], {}, ""):
        return False
    if key in SIZE_KEYS["window"] and config.get("use_sliding_window") is False:
        return False
    if key in _OFF and isinstance(value, list):
        return not set(map(str, value)) <= _OFF[key]
    if key == "cla_share_factor":
        return bool(config.get("use_cla")) and value != 1
    return not (key in SIZE_KEYS["routed experts"] and value == 1)
