"""
Record what vLLM's own KV cache code says of many layouts, release by release.

    PYTHON tests/data/kv_oracle.py SOURCES... | xz -9 > tests/data/kv_oracle.json.xz

PYTHON has torch; each of SOURCES is an unpacked release, a directory that holds `vllm/` and whose
name is the version ("0.19.0"). Of a release only the files that compute the KV cache are imported,
as they are; every other module of vLLM is an empty stand-in. What the release would log is caught
from its logger. `test_kv_cache.py` compares `gpufleet.sizing.kv_cache` with the record.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import inspect
import json
import math
import re
import sys
import types
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import torch

GIB = 1 << 30
DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "fp8": torch.uint8,
    "fp8_ds_mla": torch.uint8,
}
# Files of a release that are imported as they are.
REAL = {
    "vllm.v1.core.kv_cache_utils",
    "vllm.v1.core.kv_cache_planning",
    "vllm.v1.core.kv_cache_config_builder",
    "vllm.v1.core.single_type_kv_cache_manager",
    "vllm.v1.kv_cache_interface",
    "vllm.v1.kv_cache_layout",
    "vllm.v1.kv_cache_spec_registry",
    "vllm.attention.backends.registry",
    "vllm.v1.attention.backends.registry",
    "vllm.model_executor.models.config",
    "vllm.model_executor.layers.mamba.mamba_utils",
    "vllm.platforms.interface",
}
LOG: list[str] = []


class Logger:
    """Keeps what is logged at info."""

    def __getattr__(self, name: str) -> Any:
        """Return a method that logs, or does nothing."""

        def log(message: str, *arguments: Any, **_: Any) -> None:
            if name.startswith("info") and arguments:
                LOG.append(message % arguments)

        return log


class StandIn(types.ModuleType):
    """A module in which every name is there, and does nothing."""

    def __getattr__(self, name: str) -> Any:
        """Return a class that may be inherited from, or a mock."""
        if name.startswith("__"):
            raise AttributeError(name)
        value: Any = type(name, (), {}) if name[:1].isupper() else MagicMock(name=name)
        setattr(self, name, value)
        return value


class Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the REAL files of one release, and stand-ins for the rest."""

    def __init__(self, source: Path) -> None:
        self.source = source

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:  # noqa: ARG002
        """Return the spec of a module of vLLM."""
        if name != "vllm" and not name.startswith("vllm."):
            return None
        file = self.source.joinpath(*name.split(".")).with_suffix(".py")
        if name in REAL and file.exists():
            return importlib.util.spec_from_file_location(name, file)
        return importlib.util.spec_from_loader(name, self, is_package=True)

    def create_module(self, spec: Any) -> StandIn:
        """Return the stand-in, with what the real files need of it."""
        module = StandIn(spec.name)
        for name, value in PROVIDED.items():
            setattr(module, name, value)
        return module

    def exec_module(self, module: Any) -> None:
        """Do nothing."""


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(a // -b)


def get_kv_cache_torch_dtype(cache_dtype: Any, model_dtype: Any = None) -> Any:
    """Return a torch dtype, as utils.torch_utils does for these cases."""
    if cache_dtype == "auto":
        return model_dtype
    return DTYPES[cache_dtype] if isinstance(cache_dtype, str) else cache_dtype


PROVIDED = {
    "init_logger": lambda name: Logger(),  # noqa: ARG005
    "cdiv": cdiv,
    "round_up": lambda a, b: cdiv(a, b) * b,
    "GiB_bytes": GIB,
    "format_gib": lambda b: f"{b / GIB:.2f}",
    "get_dtype_size": lambda dtype: dtype.itemsize,
    "STR_DTYPE_TO_TORCH_DTYPE": DTYPES,
    "get_kv_cache_torch_dtype": get_kv_cache_torch_dtype,
    "divide": lambda a, b: a // b,
    "get_kv_cache_dtype_handler": lambda name: None,  # noqa: ARG005
    "get_hisparse_kv_cache_groups": lambda *a: None,  # noqa: ARG005
    "kNvfp4Dynamic": None,
    "TYPE_CHECKING": False,
    "is_interleaved": lambda config: False,  # noqa: ARG005
}


class AbsentError(Exception):
    """The release knows no such layers."""


class Release:
    """One release's code, imported anew."""

    def __init__(self, source: Path) -> None:
        for name in [name for name in sys.modules if name.split(".")[0] == "vllm"]:
            del sys.modules[name]
        sys.meta_path[:] = [f for f in sys.meta_path if not isinstance(f, Finder)]
        sys.meta_path.insert(0, Finder(source))
        self.name = source.name
        self.version = tuple(map(int, source.name.split(".")))
        self.utils = importlib.import_module("vllm.v1.core.kv_cache_utils")
        self.specs = importlib.import_module("vllm.v1.kv_cache_interface")
        self.planning = self.utils
        if self.version >= (0, 33):
            self.planning = importlib.import_module("vllm.v1.core.kv_cache_planning")
            builders = importlib.import_module("vllm.v1.core.kv_cache_config_builder")
            builders.get_kv_cache_config_builder = lambda config: (  # noqa: ARG005
                self.planning.DefaultKVCacheConfigBuilder()
            )
        if hasattr(self.specs, "KVCacheSpecRegistry"):
            manager = importlib.import_module("vllm.v1.core.single_type_kv_cache_manager")
            manager.register_all_kvcache_specs(None)

    def make(self, kind: str, **given: Any) -> Any:
        """Return a spec of this release, leaving out what it does not have."""
        spec = getattr(self.specs, kind, None)
        if spec is None:
            raise AbsentError(kind)
        known = {field.name for field in fields(spec)}
        return spec(**{name: value for name, value in given.items() if name in known})

    def state_shapes(self, state: dict[str, Any], tensor: int, speculative: int) -> Any:
        """Return (shapes, dtypes) of a state, by the release's own calculator."""
        utils = importlib.import_module("vllm.model_executor.layers.mamba.mamba_utils")
        calculator = vars(utils).get("MambaStateShapeCalculator")
        function = getattr(calculator, state["calculator"], None)
        if function is None:
            raise AbsentError(state["calculator"])
        names = inspect.signature(function).parameters
        given = dict(state["arguments"])
        given |= {"tp_world_size": tensor, "tp_size": tensor, "num_spec": speculative}
        shapes = function(**{name: value for name, value in given.items() if name in names})
        first, last = (DTYPES[name] for name in state["dtypes"])
        return tuple(shapes), (first,) * (len(shapes) - 1) + (last,)


def layers_of(model: dict[str, Any]) -> list[dict[str, Any]]:
    """Return a model's caches, one after the other."""
    found: list[dict[str, Any]] = []
    for times, pattern in model["layers"]:
        found.extend(pattern * times)
    return found


def config_of(release: Release, case: dict[str, Any], model: dict[str, Any]) -> SimpleNamespace:
    """Return as much of a VllmConfig as the code reads."""
    batched = case["max_num_batched_tokens"]
    layers = layers_of(model)
    latent = next((c for c in layers if c["kind"] == "latent"), None)
    first = next((c for c in layers if c["kind"] != "state"), {"kv_heads": 1, "head_dim": 1})
    heads = 1 if latent else max(1, first["kv_heads"] // case["tensor"])
    width = latent["rank"] + latent["rope_dim"] if latent else first["head_dim"]
    model_config = SimpleNamespace(
        max_model_len=case["max_model_len"],
        original_max_model_len=case["max_model_len"],
        dtype=DTYPES[model.get("dtype", "bfloat16")],
        use_mla=latent is not None,
        is_hybrid=True,
        architecture="Model",
        attention_chunk_size=None,
        supports_mamba_prefix_caching=model.get("every_block", False),
        supports_kv_cache_grouping=False,
        disable_cascade_attn=False,
        hf_config=SimpleNamespace(model_type="model"),
        get_num_kv_heads=lambda parallel: heads,  # noqa: ARG005
        get_head_size=lambda: width,
        get_mamba_chunk_size=lambda: 256,
    )
    cache_config = SimpleNamespace(
        block_size=case["block_size"],
        user_specified_block_size=False,
        user_specified_mamba_block_size=False,
        num_gpu_blocks_override=None,
        cache_dtype=case["kv_dtype"],
        enable_prefix_caching=case["prefix_caching"],
        mamba_block_size=None,
        mamba_cache_mode="none",
        mamba_page_size_padded=None,
        mamba_cache_dtype="auto",
        mamba_ssm_cache_dtype="auto",
        calculate_kv_scales=False,
        kv_cache_dtype_skip_layers=[],
        prefix_cache_retention_interval=None,
        kv_cache_layout="LBNHC",
        DEFAULT_BLOCK_SIZE=16,
    )
    if hasattr(release.specs, "KVCacheLayout"):
        layout = release.specs.KVCacheLayout.LBNHC
        cache_config.get_resolved_kv_cache_layout = lambda: layout
    # VllmConfig turns the hybrid manager off for chunks since 0.10.1.
    chunks = any(c["kind"] == "chunk" for c in layers) and release.version >= (0, 10, 1)
    # What runs at once by default (VllmConfig.max_concurrent_batches).
    batches = len(case["stages"]) + 1
    return SimpleNamespace(
        model_config=model_config,
        cache_config=cache_config,
        parallel_config=SimpleNamespace(
            decode_context_parallel_size=case["decode_context_parallel"],
            prefill_context_parallel_size=1,
            pipeline_parallel_size=len(case["stages"]),
            tensor_parallel_size=case["tensor"],
        ),
        scheduler_config=SimpleNamespace(
            max_num_batched_tokens=batched,
            disable_hybrid_kv_cache_manager=chunks or not case["hybrid_manager"],
            enable_chunked_prefill=True,
            async_scheduling=True,
        ),
        attention_config=SimpleNamespace(hisparse_config=None, backend=None),
        compilation_config=MagicMock(),
        device_config=SimpleNamespace(device_type="cuda"),
        speculative_config=None,
        kv_transfer_config=None,
        max_in_flight_tokens=batches * batched,
        num_speculative_tokens=case["speculative_tokens"],
        num_prefill_lookahead_tokens=0,
    )


def align(
    release: Release, config: SimpleNamespace, shapes: Any, dtypes: Any, *, delta: bool
) -> None:
    """Have the release choose the block of a model with states."""
    resolved = SimpleNamespace(
        get_mamba_state_shape_from_config=lambda _: shapes,
        get_mamba_state_dtype_from_config=lambda _: dtypes,
    )
    registry = SimpleNamespace(resolve_model_cls=lambda *a, **k: (resolved, None))  # noqa: ARG005
    models = importlib.import_module("vllm.model_executor.models")
    models.ModelRegistry = registry
    rules = importlib.import_module("vllm.model_executor.models.config")
    rules.ModelRegistry = registry
    rules.current_platform = SimpleNamespace(
        is_device_capability=lambda _: False, is_device_capability_family=lambda _: False
    )
    rules.envs = SimpleNamespace(VLLM_USE_V1=True, VLLM_ATTENTION_BACKEND=None)
    if release.version < (0, 18):
        # "16 unless the user said otherwise" was decided after this.
        config.cache_config.block_size = None
    rules.HybridAttentionMambaModelConfig.verify_and_update_config(config)
    if release.version < (0, 20):
        if release.version >= (0, 18):
            # Set back for hybrids once the layers are there (update_block_size_for_backend).
            config.cache_config.block_size = 16
        return
    platform = importlib.import_module("vllm.platforms.interface").Platform
    backend = SimpleNamespace(
        get_supported_kernel_block_sizes=lambda *a: [16],  # noqa: ARG005
        get_preferred_block_size=lambda size: size,
        customize_spec=lambda spec: spec,
        supports_block_size=lambda size: size % 16 == 0,
    )
    platform._find_non_ssm_backends = classmethod(lambda *a: [backend])  # noqa: ARG005
    vllm_config = importlib.import_module("vllm.config.vllm")
    vllm_config.set_current_vllm_config = MagicMock()
    abstract = importlib.import_module("vllm.model_executor.layers.mamba.abstract")
    # FlashInfer's kernel for gated delta nets, as on Hopper: 64 tokens since 0.33.
    checkpoints = delta and release.version >= (0, 33)
    abstract.get_mamba_prefill_checkpoint_alignment = lambda _: 64 if checkpoints else None
    platform._align_hybrid_block_size(config, backend)


def specs_of(
    release: Release, case: dict[str, Any], model: dict[str, Any], config: SimpleNamespace
) -> list[dict[str, Any]]:
    """Return each stage's specs, as the layers of the release make them."""
    tensor, kv_dtype = case["tensor"], case["kv_dtype"]
    own = DTYPES[model.get("dtype", "bfloat16")]
    dtype = own if kv_dtype == "auto" else DTYPES[kv_dtype]
    layers = layers_of(model)
    states = [cache for cache in layers if cache["kind"] == "state"]
    shapes: Any = ()
    dtypes: Any = ()
    if states:
        shapes, dtypes = release.state_shapes(states[0], tensor, case["speculative_tokens"])
        if len(states) < len(layers):
            align(release, config, shapes, dtypes, delta=states[0]["type"] == "gdn")
        else:
            config.cache_config.mamba_block_size = case["max_model_len"]
    block = config.cache_config.block_size
    mode = config.cache_config.mamba_cache_mode
    named: dict[str, Any] = {}
    for number, cache in enumerate(layers):
        name = f"model.layers.{number}"
        kind = cache["kind"]
        if kind == "state":
            named[name] = release.make(
                "MambaSpec",
                shapes=shapes,
                dtypes=dtypes,
                dtype=dtypes[0],
                block_size=config.cache_config.mamba_block_size or case["max_model_len"],
                page_size_padded=config.cache_config.mamba_page_size_padded,
                mamba_type=cache["type"],
                mamba_cache_mode=mode,
                num_speculative_blocks=case["speculative_tokens"],
                num_prefill_checkpoint_blocks=int(
                    release.version >= {"mamba2": (0, 32), "gdn": (0, 33)}.get(cache["type"], (9,))
                ),
            )
            continue
        if kind == "latent":
            mla = hasattr(release.specs, "MLAAttentionSpec")
            named[name] = release.make(
                "MLAAttentionSpec" if mla else "FullAttentionSpec",
                block_size=block,
                num_kv_heads=1,
                head_size=cache["rank"] + cache["rope_dim"],
                dtype=dtype,
                use_mla=True,
                cache_dtype_str=kv_dtype,
                state_content_bytes={"fp8_ds_mla": 656}.get(kv_dtype),
            )
            if cache.get("indexer_dim"):
                named[name + ".indexer"] = release.make(
                    "MLAAttentionSpec",
                    block_size=block,
                    num_kv_heads=1,
                    head_size=cache["indexer_dim"] + cache["indexer_dim"] // 128 * 4,
                    dtype=torch.uint8,
                )
            continue
        common = {
            "block_size": block,
            "num_kv_heads": max(1, cache["kv_heads"] // tensor),
            "head_size": cache["head_dim"],
            "head_size_v": cache.get("v_head_dim"),
            "dtype": dtype,
            "use_mla": False,
        }
        if kind == "full":
            named[name] = release.make("FullAttentionSpec", **common)
        elif kind == "window":
            named[name] = release.make(
                "SlidingWindowSpec", sliding_window=cache["window"], **common
            )
        else:
            named[name] = release.make(
                "ChunkedLocalAttentionSpec", attention_chunk_size=cache["chunk"], **common
            )
    stages: list[dict[str, Any]] = []
    start = 0
    for count in case["stages"]:
        wanted = {f"model.layers.{number}" for number in range(start, start + count)}
        stages.append({n: s for n, s in named.items() if n.removesuffix(".indexer") in wanted})
        start += count
    if release.version < (0, 11):
        # Attention first, then the states (gpu_model_runner.get_kv_cache_spec).
        mamba = getattr(release.specs, "MambaSpec", ())
        stages = [
            dict(sorted(stage.items(), key=lambda item: isinstance(item[1], mamba)))
            for stage in stages
        ]
    return stages


def run(release: Release, case: dict[str, Any], model: dict[str, Any]) -> dict[str, Any] | None:
    """Return what the release says of one case; None where it knows no such layers."""
    LOG.clear()
    if case["decode_context_parallel"] > 1 and release.version < (0, 10, 2):
        return None
    config = config_of(release, case, model)
    try:
        stages = specs_of(release, case, model, config)
        blocks = counted(release, config, stages, case["available"])
    except AbsentError:
        return None
    except (ValueError, AssertionError, NotImplementedError) as refused:
        return refusal(refused)
    found = {"blocks": blocks, "tokens": [], "concurrency": []}
    for line in LOG:
        if match := re.search(r"KV cache size: ([\d,]+) tokens", line):
            found["tokens"].append(int(match[1].replace(",", "")))
        if match := re.search(r"tokens per request: ([\d.]+)x", line):
            found["concurrency"].append(float(match[1]))
    return {
        "blocks": found["blocks"],
        "tokens": min(found["tokens"]),
        "concurrency": min(found["concurrency"]),
    }


def counted(
    release: Release, config: SimpleNamespace, stages: list[dict[str, Any]], memory: list[int]
) -> int:
    """Run the release's own code, and return the blocks that every rank uses."""
    planning = release.planning
    if release.version < (0, 11):
        made = [
            planning.get_kv_cache_config(config, stage, available)
            for stage, available in zip(stages, memory, strict=True)
        ]
        return min(one.num_blocks for one in made)
    arguments = [config, stages, memory]
    if hasattr(planning, "get_global_kv_cache_groups"):
        arguments.append(planning.get_global_kv_cache_groups(config, stages))
    made = planning.get_kv_cache_configs(*arguments)
    if hasattr(release.utils, "update_kv_cache_capacity"):
        whole = release.utils.generate_scheduler_kv_cache_config(made)
        release.utils.update_kv_cache_capacity(config, whole)
    return min(one.num_blocks for one in made)


def refusal(error: Exception) -> dict[str, Any]:
    """Return a refusal's figures, or only that there was one."""
    text = str(error)
    needed = re.search(r"\(([\d.]+) GiB KV cache is needed", text)
    longest = re.search(r"estimated maximum model length is (\d+)", text)
    return {
        "refused": "memory" if needed or "No available memory" in text else "layout",
        "needed_gib": float(needed[1]) if needed else None,
        "estimated": int(longest[1]) if longest else None,
    }


def full(heads: int, width: int, **more: Any) -> dict[str, Any]:
    """Return a layer of full attention."""
    return {"kind": "full", "kv_heads": heads, "head_dim": width, **more}


def window(heads: int, width: int, span: int) -> dict[str, Any]:
    """Return a layer with a sliding window."""
    return {"kind": "window", "kv_heads": heads, "head_dim": width, "window": span}


def state(kind: str, calculator: str, dtypes: list[str], **arguments: int) -> dict[str, Any]:
    """Return a layer with a state; `arguments` are its calculator's."""
    return {
        "kind": "state",
        "type": kind,
        "calculator": calculator,
        "dtypes": dtypes,
        "arguments": arguments,
    }


DELTA = state(
    "gdn",
    "gated_delta_net_state_shape",
    ["bfloat16", "float32"],
    num_k_heads=16,
    num_v_heads=32,
    head_k_dim=128,
    head_v_dim=128,
    conv_kernel_size=4,
)
MAMBA = state(
    "mamba2",
    "mamba2_state_shape",
    ["bfloat16", "float32"],
    intermediate_size=8192,
    n_groups=8,
    num_heads=128,
    head_dim=64,
    state_size=128,
    conv_kernel=4,
)
MAMBA1 = state(
    "mamba1",
    "mamba1_state_shape",
    ["bfloat16", "bfloat16"],
    intermediate_size=8192,
    state_size=16,
    conv_kernel=4,
)
KDA = state(
    "kda",
    "kda_state_shape",
    ["bfloat16", "float32"],
    num_heads=32,
    head_dim=128,
    conv_kernel_size=4,
)
SHORT = state(
    "short_conv",
    "short_conv_state_shape",
    ["bfloat16", "bfloat16"],
    intermediate_size=2048,
    conv_kernel=3,
)
LINEAR = state(
    "linear",
    "linear_attention_state_shape",
    ["bfloat16", "bfloat16"],
    num_heads=64,
    head_dim=128,
)
# Heads, dimensions and windows are those of the models' config.json.
MODELS: dict[str, dict[str, Any]] = {
    "Llama-3.1-8B": {"layers": [[32, [full(8, 128)]]]},
    "Llama-3.3-70B": {"layers": [[80, [full(8, 128)]]]},
    "Qwen3-32B": {"layers": [[64, [full(8, 128)]]]},
    "Phi-3-mini": {"layers": [[32, [window(32, 96, 2047)]]]},
    "gemma-3-27b": {
        "layers": [
            [10, [window(16, 128, 1024)] * 5 + [full(16, 128)]],
            [2, [window(16, 128, 1024)]],
        ]
    },
    "gpt-oss-20b": {"layers": [[12, [window(8, 64, 128), full(8, 64)]]]},
    "gpt-oss-20b with EAGLE": {
        "layers": [[12, [window(8, 64, 128), full(8, 64)]], [1, [full(8, 64)]]]
    },
    "gemma-4-31b": {"layers": [[10, [window(16, 256, 1024)] * 5 + [full(4, 512)]]]},
    "Llama-4-Scout": {
        "layers": [
            [
                12,
                [{"kind": "chunk", "kv_heads": 8, "head_dim": 128, "chunk": 8192}] * 3
                + [full(8, 128)],
            ]
        ]
    },
    "DeepSeek-V3": {"layers": [[61, [{"kind": "latent", "rank": 512, "rope_dim": 64}]]]},
    "DeepSeek-V3.2": {
        "layers": [[61, [{"kind": "latent", "rank": 512, "rope_dim": 64, "indexer_dim": 128}]]]
    },
    "Qwen3-Next-80B-A3B": {"layers": [[12, [DELTA] * 3 + [full(2, 256)]]]},
    "Granite-4.0-H-Small": {"layers": [[4, [MAMBA] * 9 + [full(8, 128)]]], "every_block": True},
    "Kimi-Linear-48B-A3B": {
        "layers": [
            [6, [KDA] * 3 + [{"kind": "latent", "rank": 512, "rope_dim": 64}]],
            [1, [KDA] * 3],
        ]
    },
    "LFM2-1.2B": {"layers": [[5, [SHORT, SHORT, full(8, 64)]], [1, [SHORT]]]},
    "MiniMax-Text-01": {"layers": [[10, [LINEAR] * 7 + [full(8, 128)]]]},
    "Jamba": {"layers": [[4, [MAMBA1] * 4 + [full(8, 128)] + [MAMBA1] * 3]], "every_block": True},
    "Mamba-Codestral-7B": {"layers": [[64, [MAMBA]]], "every_block": True},
    "mixed heads": {"layers": [[8, [full(8, 128), full(4, 128), full(8, 64)]]]},
    "values of their own": {"layers": [[16, [full(4, 192, v_head_dim=128)]]]},
    "two windows": {"layers": [[8, [window(8, 128, 4096), window(8, 128, 1024), full(8, 128)]]]},
}


def case(model: str, **changes: Any) -> dict[str, Any]:
    """Return a case: the usual figures with `changes`."""
    found: dict[str, Any] = {
        "model": model,
        "tensor": 1,
        "stages": [len(layers_of(MODELS[model]))],
        "kv_dtype": "auto",
        "decode_context_parallel": 1,
        "max_model_len": 32768,
        "max_num_batched_tokens": 8192,
        "block_size": 64 if any(c["kind"] == "latent" for c in layers_of(MODELS[model])) else 16,
        "prefix_caching": not any(c["kind"] == "state" for c in layers_of(MODELS[model])),
        "speculative_tokens": 0,
        "hybrid_manager": True,
        "available": [],
    }
    found |= changes
    if not found["available"]:
        found["available"] = [int(37.13 * GIB) + 12345 * i for i in range(len(found["stages"]))]
    return found


def cases() -> list[dict[str, Any]]:
    """Return the cases that every release is asked."""
    found: list[dict[str, Any]] = []
    for model, described in MODELS.items():
        count = len(layers_of(described))
        half = [math.ceil(count / 2), count // 2]
        found.append(case(model))
        found.append(case(model, tensor=2, max_model_len=131072, max_num_batched_tokens=2048))
        found.append(case(model, tensor=16, max_model_len=10_001))
        found.append(case(model, stages=half, max_model_len=65536))
        found.append(case(model, max_model_len=131072, available=[int(1.71 * GIB)]))
        found.append(case(model, stages=half, max_model_len=65536, available=[GIB * 2, GIB]))
        quarters = [count // 4 + (place < count % 4) for place in range(4)]
        memory = [6 * GIB, 5 * GIB + 1, 7 * GIB, 8 * GIB]
        found.append(case(model, stages=quarters, tensor=2, available=memory))
        found.append(case(model, hybrid_manager=False))
        found.append(case(model, max_model_len=1000, available=[0]))
    bytes_wide = ("Llama-3.3-70B", "gemma-3-27b", "DeepSeek-V3", "Qwen3-Next-80B-A3B")
    found.extend(case(model, kv_dtype="fp8") for model in bytes_wide)
    found.append(case("DeepSeek-V3.2", kv_dtype="fp8_ds_mla"))
    for model in ("Llama-3.1-8B", "DeepSeek-V3"):
        found.append(case(model, tensor=16, decode_context_parallel=2, max_model_len=100_001))
        found.append(case(model, tensor=16, decode_context_parallel=8))
    for size in (32, 64, 128):
        found.append(case("Llama-3.1-8B", block_size=size))
        found.append(case("gpt-oss-20b", block_size=size))
    hybrids = (
        "Qwen3-Next-80B-A3B",
        "Granite-4.0-H-Small",
        "Kimi-Linear-48B-A3B",
        "LFM2-1.2B",
        "Jamba",
    )
    for model in hybrids:
        found.append(case(model, prefix_caching=True))
        found.append(case(model, prefix_caching=True, tensor=4, max_model_len=262144))
        found.append(case(model, speculative_tokens=3))
        found.append(case(model, speculative_tokens=2, prefix_caching=True))
    return found


def main() -> None:
    """Write the record to the standard output."""
    record: dict[str, Any] = {"models": MODELS, "cases": cases(), "releases": {}}
    for source in map(Path, sys.argv[1:]):
        release = Release(source)
        record["releases"][release.name] = [
            run(release, one, MODELS[one["model"]]) for one in record["cases"]
        ]
        print(release.name, file=sys.stderr)
    json.dump(record, sys.stdout, indent=None, separators=(",", ":"))
    print()


if __name__ == "__main__":
    main()
