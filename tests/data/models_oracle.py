"""
Record what vLLM's own model classes make of the configs in `models/`: models_oracle.json.xz.

    PYTHON tests/data/models_oracle.py [NAME ...]

PYTHON has vLLM 0.32.0 (its CPU build will do) and neither a GPU nor the network is needed: every
model is built on torch's meta device, where tensors have shapes and no memory. vLLM is told that
it runs on a Hopper GPU, so it chooses that GPU's quantization kernels and pads for them. Rank 0 of
1, 2, 4 and 8 tensor-parallel ranks is built; no process group is larger than one. What needs CUDA
to be imported is replaced by an empty stand-in: kernels are never called.

Besides, a rank of 8 with expert parallelism is built of models with experts, and both stages of
pipeline parallelism over 2 of every model.

Of each rank it keeps the parameters (how many, how many bytes), the buffers' bytes (rotary tables,
scales), all of them as the GPU's allocator would hand them out, and the cache of its layers:
{kind: [layers, bytes of a token in all of them; of a sequence where it is a state]}. What a rank
cannot be built for (heads that do not divide) is left out. With NAMEs only those are built anew.
"""

# What stands in for CUDA takes what the real thing takes, and ignores it:
# ruff: noqa: ARG002, ARG003, ARG005

from __future__ import annotations

import importlib.abc
import importlib.machinery
import json
import lzma
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

os.environ |= {
    "VLLM_LOGGING_LEVEL": "CRITICAL",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}

import torch
import torch.fx.experimental._config
from torch.overrides import TorchFunctionMode
from torch.utils._device import _device_constructors

DATA = Path(__file__).parent
RECORD = DATA / "models_oracle.json.xz"
RANKS = (1, 2, 4, 8)
MIB = 1 << 20
STAND_INS = (
    "torchvision",
    "cuda",
    "cutlass",
    "vllm._C_stable_libtorch",
    "vllm._moe_C_stable",
    "vllm._flashmla",
    "vllm._flashkda_C",
    "vllm.vllm_flash_attn",
)
KINDS = {
    "FullAttentionSpec": "full",
    "MLAAttentionSpec": "full",
    "SlidingWindowSpec": "window",
    "SlidingWindowMLASpec": "window",
    "ChunkedLocalAttentionSpec": "chunk",
    "MambaSpec": "state",
}
# Known to vLLM, but their config classes come with the checkpoint; what those are derived from.
OWN_CONFIGS = {
    "orion": "PretrainedConfig",
    "internlm2": "PretrainedConfig",
    "minicpm": "PretrainedConfig",
    "mimo": "Qwen2Config",
    "nemotron-nas": "LlamaConfig",
}
# What a class asks its config for and no size depends on; `models/` leaves it out.
SIZELESS = {"hidden_act": "silu"}
SIZELESS_OF = {
    "longcat_flash": {
        "mla_scale_q_lora": True,
        "mla_scale_kv_lora": True,
        "zero_expert_type": "identity",
        "router_bias": False,
    }
}


class _Anything(type):
    """A class that has every attribute."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return cls

    def __call__(cls, *args: Any, **options: Any) -> Any:
        return object.__new__(cls)


class _StandIn(types.ModuleType):
    """A module that has every name."""

    __version__ = "0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        found = _Anything(name, (), {})
        setattr(self, name, found)
        return found


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the stand-ins, whether or not the real module is installed."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        if any(name == one or name.startswith(f"{one}.") for one in STAND_INS):
            return importlib.machinery.ModuleSpec(name, self, is_package=True)
        return None

    def create_module(self, spec: Any) -> types.ModuleType:
        module = _StandIn(spec.name)
        module.__path__ = []
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing: it makes its names when they are asked for."""


class _Idle:
    """Whatever is called on it, nothing happens: an operator, a CUDA stream."""

    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    def __call__(self, *args: Any, **options: Any) -> None:
        return None

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Idle()


class _Block(dict):
    """A part of a config whose keys are read as attributes."""

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(name)
        found = self[name]
        return _Block(found) if isinstance(found, dict) else found


class _TritonConfig:
    """An entry of a kernel's tuning table, which is read when the kernel's module is imported."""

    def __init__(self, kwargs: Any = None, num_warps: int = 4, num_stages: int = 1, **_: Any):
        self.kwargs, self.num_warps, self.num_stages = kwargs, num_warps, num_stages


class Meta(TorchFunctionMode):
    """Every tensor is made on the meta device, whatever device it was meant for."""

    def __torch_function__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if function is torch.Tensor.to:
            kwargs.pop("device", None)
            first = args[0]
            rest = [one for one in args[1:] if isinstance(one, torch.dtype | torch.Tensor)]
            if not rest and not kwargs.keys() & {"dtype", "other"}:
                return first
            args = (first, *rest)
        elif function is torch.Tensor.cuda:
            return args[0]
        elif function is torch.Tensor.item:
            return 0  # asked for by what is logged of the experts' places
        elif function in _device_constructors() or kwargs.get("device") is not None:
            kwargs["device"] = torch.device("meta")
        return function(*args, **kwargs)


def on_hopper() -> None:
    """Let vLLM, not imported yet, find one node of H100s."""
    sys.meta_path.insert(0, _Finder())
    import vllm.platforms
    from vllm.platforms.cuda import NonNvmlCudaPlatform
    from vllm.platforms.interface import DeviceCapability

    class Hopper(NonNvmlCudaPlatform):
        get_device_capability = classmethod(lambda cls, device_id=0: DeviceCapability(9, 0))
        get_device_name = classmethod(lambda cls, device_id=0: "NVIDIA H100 80GB HBM3")
        get_device_total_memory = classmethod(lambda cls, device_id=0: 85_017_755_648)
        device_count = classmethod(lambda cls: 8)
        num_compute_units = classmethod(lambda cls, device_id=0: 132)
        get_cuda_runtime_major = classmethod(lambda cls: 13)
        is_integrated_gpu = classmethod(lambda cls, device_id=0: False)
        is_arch_support_pdl = classmethod(lambda cls: True)
        is_fully_connected = classmethod(lambda cls, device_ids: True)
        check_if_supports_dtype = classmethod(lambda cls, dtype: None)
        import_kernels = classmethod(lambda cls: None)

        @classmethod
        def has_device_capability(cls, capability: Any, device_id: int = 0) -> bool:
            wanted = capability if isinstance(capability, tuple) else divmod(capability, 10)
            return wanted <= (9, 0)

    vllm.platforms._current_platform = Hopper()
    for name in ("Stream", "Event"):
        setattr(torch.cuda, name, _Idle)
    torch.cuda._lazy_init = lambda: None
    torch.cuda.current_stream = _Idle
    torch.cuda.current_device = lambda: 0
    import vllm._custom_ops as operators
    import vllm.triton_utils

    vllm.triton_utils.triton.Config = _TritonConfig
    for name in dir(operators):
        if "support" in name and callable(getattr(operators, name)):
            setattr(operators, name, lambda *args, **options: True)
    real = torch._ops._OpNamespace.__getattr__

    def operator(self: Any, name: str) -> Any:
        try:
            return real(self, name)
        except AttributeError:
            if name.startswith("__") or not str(self.name).startswith(
                ("_C", "_moe_C", "_flashkda")
            ):
                raise
            return _Idle()

    torch._ops._OpNamespace.__getattr__ = operator
    import vllm.model_executor.layers.sparse_attn_indexer as indexer
    import vllm.utils.import_utils as imports
    from vllm.model_executor.models import registry

    imports.has_deep_gemm = indexer.has_deep_gemm = lambda: True
    registry._run_in_subprocess = lambda function: function()


def allocated(size: int) -> int:
    """
    Return what PyTorch's CUDA allocator hands out for so many bytes, as it is set to load weights.

    Source: CUDACachingAllocator.cpp; vLLM sets max_split_size_mb to 20 (v1/worker/gpu_worker.py).
    """
    if size <= 10 * MIB:
        return -(-size // 512) * 512
    whole = -(-size // (2 * MIB)) * 2 * MIB
    return whole if whole - size <= MIB or size >= 20 * MIB else -(-size // 512) * 512


def pretend(ranks: int, stage: int | None) -> None:
    """Let the process group of one be rank 0 of so many, on this of 2 pipeline stages."""
    import vllm.distributed.parallel_state as state

    group = state._TP
    group.world_size, group.ranks, group.rank_in_group = ranks, list(range(ranks)), 0
    state._EP = state._EPLB = group
    stages = state._PP
    stages.world_size, stages.rank_in_group = (1, 0) if stage is None else (2, stage)
    # The process is global rank 0, so the list says which stage it is.
    stages.ranks = {None: [0], 0: [0, 1], 1: [1, 0]}[stage]


def built(
    directory: str, ranks: int, *, experts: bool = False, stage: int | None = None
) -> tuple[Any, Any]:
    """
    Return vLLM's config for this checkpoint, and its model as rank 0 of `ranks`.

    `experts`: with expert parallelism. `stage`: one of 2 pipeline stages.
    """
    import vllm.distributed.parallel_state as state
    from vllm.config import set_current_vllm_config
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader.utils import initialize_model
    from vllm.utils.torch_utils import set_default_torch_dtype

    config = EngineArgs(
        model=directory,
        skip_tokenizer_init=True,
        enforce_eager=True,
        load_format="dummy",
        max_num_batched_tokens=8192,
        enable_prefix_caching=False,
    ).create_engine_config()
    if state._TP is None:
        with set_current_vllm_config(config):
            state.init_distributed_environment(1, 0, f"file://{directory}/world", 0, "gloo")
            state.initialize_model_parallel(1, 1, backend="gloo")
    config.parallel_config.tensor_parallel_size = ranks
    config.parallel_config.enable_expert_parallel = experts
    config.parallel_config.pipeline_parallel_size = 1 if stage is None else 2
    pretend(ranks, stage)
    dtype = set_default_torch_dtype(config.model_config.dtype)
    with Meta(), set_current_vllm_config(config), dtype:
        return config, initialize_model(config)


def rank(config: Any, model: Any) -> dict[str, Any]:
    """Return what one rank holds."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.layers.attention_layer_base import AttentionLayerBase

    parameters, buffers = list(model.parameters()), list(model.buffers())
    cache: dict[str, list[int]] = {}
    with set_current_vllm_config(config):
        for layer in config.compilation_config.static_forward_context.values():
            if not isinstance(layer, AttentionLayerBase):
                continue
            if getattr(layer, "kv_sharing_target_layer_name", None):
                continue
            if (spec := layer.get_kv_cache_spec(config)) is None:
                continue
            kind = KINDS[type(spec).__name__]
            size = spec.page_size_bytes
            if kind != "state":
                size = getattr(spec, "unpadded_page_size_bytes", size) // spec.block_size
            one = cache.setdefault(kind, [0, 0])
            one[0] += 1
            one[1] += size
    tensors = [one.numel() * one.element_size() for one in (*parameters, *buffers)]
    return {
        "parameters": sum(one.numel() for one in parameters),
        "bytes": sum(tensors[: len(parameters)]),
        "buffers": sum(tensors[len(parameters) :]),
        "allocated": sum(map(allocated, tensors)),
        "cache": cache,
    }


def known(kind: str) -> None:
    """Let transformers read configs of a model type that it has no class for."""
    import transformers

    base = getattr(transformers, OWN_CONFIGS[kind])

    def read(self: Any, block_configs: Any = (), **values: Any) -> None:
        base.__init__(self, **values)
        if block_configs:  # Nemotron's layers, each of its own sizes
            self.block_configs = [_Block(block) for block in block_configs]

    own = type("Own", (base,), {"model_type": kind, "__init__": read})
    transformers.AutoConfig.register(kind, own, exist_ok=True)


def record(facts: dict[str, Any]) -> dict[str, Any]:
    """Return what vLLM makes of one model."""
    config = facts["config"]
    for part in (config, config.get("text_config", {})):
        for key, value in SIZELESS.items():
            part.setdefault(key, value)
    kind = config.get("model_type", "")
    config |= SIZELESS_OF.get(kind, {})
    if kind in OWN_CONFIGS:
        known(kind)
    found: dict[str, Any] = {"tp": {}, "ep": {}, "pp": []}
    with tempfile.TemporaryDirectory() as directory:
        Path(directory, "config.json").write_text(json.dumps(config))
        if "hf_quant_config" in facts:
            Path(directory, "hf_quant_config.json").write_text(json.dumps(facts["hf_quant_config"]))
        for ranks in RANKS:
            if one := attempt(directory, ranks):
                found["tp"][str(ranks)] = rank(*one)
                found["max_model_len"] = one[0].model_config.max_model_len
                found["dtype"] = str(one[0].model_config.dtype).removeprefix("torch.")
                moe = one[0].model_config.is_moe
        if found["tp"] and moe and (one := attempt(directory, 8, experts=True)):
            found["ep"]["8"] = rank(*one)
        for stage in (0, 1) if "1" in found["tp"] else ():
            if one := attempt(directory, 1, stage=stage):
                found["pp"].append(rank(*one))
    return found


def attempt(directory: str, ranks: int, **options: Any) -> tuple[Any, Any] | None:
    """Return what `built` does; None where vLLM cannot: heads that do not divide, old classes."""
    try:
        return built(directory, ranks, **options)
    except Exception as error:  # noqa: BLE001 -- whatever a class of vLLM may raise
        print(f"  {ranks} {options}: {type(error).__name__}: {str(error)[-160:]!r}")
        return None


def main() -> None:
    """Build the models that are named, or all, and write the record."""
    torch.set_num_threads(1)
    # Which experts a rank has is counted on the meta device too.
    torch.fx.experimental._config.meta_nonzero_assume_all_nonzero = True
    on_hopper()
    import vllm

    names = set(sys.argv[1:])
    models: dict[str, Any] = {}
    if names and RECORD.exists():
        models = json.loads(lzma.decompress(RECORD.read_bytes()))["models"]
    for path in sorted((DATA / "models").glob("*.json")):
        if names and path.stem not in names:
            continue
        print(path.stem, flush=True)
        models.pop(path.stem, None)
        if (found := record(json.loads(path.read_text())))["tp"]:
            models[path.stem] = found
        document = {"vllm": vllm.__version__, "models": dict(sorted(models.items()))}
        with lzma.open(RECORD, "wt", preset=9) as file:
            json.dump(document, file, separators=(",", ":"))


if __name__ == "__main__":
    main()
