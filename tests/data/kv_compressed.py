"""
Record what vLLM's own KV cache code says of DeepSeek V4, release by release: kv_compressed.json.

    PYTHON tests/data/kv_compressed.py SOURCES...

As `kv_oracle.py`, whose code does the work: PYTHON has torch, each of SOURCES is an unpacked
release. The specs are those that the layers of vllm/models/deepseek_v4 return with fp8_ds_mla.
`test_kv_groups.py` compares `gpufleet.sizing.kv_cache` with the record.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import kv_oracle
import torch

RECORD = Path(__file__).parent / "kv_compressed.json"
GIB = 1 << 30
RATIOS = {
    "Flash": [0, 0] + [4, 128] * 20 + [4],
    "Pro": [128, 128] + [4, 128] * 29 + [4],
    "alike": [4] * 12,
}
"""Of each layer, as `compress_ratios` in config.json; "alike" is made up."""
ASKED = (
    # max_model_len, max_num_batched_tokens, GiB
    (131072, 8192, 30.0),
    (1048576, 8192, 60.0),
    (65536, 2048, 7.7),
    (4096, 16384, 20.0),
    (1048576, 8192, 4.0),
)


def specs_of(release: kv_oracle.Release, case: dict[str, Any], *_: object) -> list[dict[str, Any]]:
    """Return the specs of all layers, on one stage."""
    found: dict[str, Any] = {}

    def window(name: str, block: int, size: int, span: int, **more: Any) -> None:
        found[name] = release.make(
            "SlidingWindowMLASpec",
            block_size=block,
            num_kv_heads=1,
            head_size=size,
            sliding_window=span,
            alignment=576,
            **{"dtype": torch.float32} | more,
        )

    def whole(name: str, size: int, ratio: int, **more: Any) -> None:
        found[name] = release.make(
            "MLAAttentionSpec",
            block_size=256,
            num_kv_heads=1,
            head_size=size,
            dtype=torch.uint8,
            alignment=576,
            compress_ratio=ratio,
            tokens_per_state=ratio,
            **more,
        )

    packed = {
        "cache_dtype_str": "fp8_ds_mla",
        "model_version": "deepseek_v4",
        "state_content_bytes": 584,
    }
    for number, ratio in enumerate(RATIOS[case["v4"]]):
        name = f"model.layers.{number}.attn"
        window(f"{name}.swa_cache", 64, 512, 128, dtype=torch.uint8, **packed)
        if ratio:
            whole(name, 512, ratio, **packed)
        if ratio == 4:
            window(f"{name}.compressor.state_cache", 4, 2048, 8)
            whole(f"{name}.indexer.k_cache", 132, 4)
            window(f"{name}.indexer.compressor.state_cache", 4, 512, 8)
        if ratio == 128:
            window(f"{name}.compressor.state_cache", 8, 1024, 128)
    return [found]


def config_of(release: kv_oracle.Release, case: dict[str, Any]) -> SimpleNamespace:
    """Return the config, with the layout that DeepSeek V4's backends want."""
    config = _CONFIG_OF(release, case, kv_oracle.MODELS["Llama-3.1-8B"])
    config.cache_config.cache_dtype = "fp8_ds_mla"
    config.cache_config.block_size = 256
    if hasattr(release.specs, "KVCacheLayout"):
        layout = next(one for one in release.specs.KVCacheLayout if one.is_block_outermost)
        config.cache_config.get_resolved_kv_cache_layout = lambda: layout
    return config


_CONFIG_OF = kv_oracle.config_of


def main() -> None:
    """Write the record."""
    kv_oracle.specs_of = specs_of
    kv_oracle.config_of = lambda release, case, _: config_of(release, case)
    cases = [
        kv_oracle.case(
            "Llama-3.1-8B",
            max_model_len=length,
            max_num_batched_tokens=batch,
            available=[int(memory * GIB)],
        )
        | {"v4": name, "stages": [len(ratios)]}
        for name, ratios in RATIOS.items()
        for length, batch, memory in ASKED
    ]
    kept = ("v4", "max_model_len", "max_num_batched_tokens", "available")
    releases: dict[str, Any] = {}
    for source in map(Path, sys.argv[1:]):
        release = kv_oracle.Release(source)
        releases[release.name] = [kv_oracle.run(release, case, {}) for case in cases]
        print(release.name, file=sys.stderr)
    record = {
        "ratios": RATIOS,
        "cases": [{key: case[key] for key in kept} for case in cases],
        "releases": releases,
    }
    RECORD.write_text(json.dumps(record, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()
