"""
Convert the config of each quantization method to a `Quantization`. Pure.

Source for the tensors after loading: create_weights and process_weights_after_loading of the
classes in vllm/model_executor/layers/quantization, 0.8.5 to 0.33.0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from gpufleet.errors import FleetError
from gpufleet.sizing.architectures.quantization_scheme import (
    FP8,
    FP8_CHANNEL,
    INT8_CHANNEL,
    MXFP4,
    MXFP8,
    NF4,
    NVFP4,
    Quantization,
    Scheme,
)


def inner_config(said: Mapping[str, Any]) -> Mapping[str, Any]:
    found = said.get("quantization")
    return found if isinstance(found, Mapping) else said


def _as_words(found: Any) -> tuple[str, ...]:
    if isinstance(found, str):
        return (found,)
    return tuple(map(str, found)) if isinstance(found, Iterable) else ()


def _skipped_names(said: Mapping[str, Any]) -> tuple[str, ...]:
    keys = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude", "exclude_modules")
    return tuple(name for key in keys for name in _as_words(said.get(key)))


def _fp8(said: Mapping[str, Any]) -> Quantization:
    block = said.get("weight_block_size")
    if str(said.get("activation_scheme", "")) == "ptpc":
        scheme = FP8_CHANNEL
    elif block:
        scheme = Scheme(8, "fp8", block=(int(block[0]), int(block[1])), scale_bytes=4)
    else:
        scheme = FP8
    return Quantization("fp8", scheme, _skipped_names(said))


def _fbgemm(said: Mapping[str, Any]) -> Quantization:
    return Quantization("fbgemm_fp8", FP8_CHANNEL, _skipped_names(said))


def _awq(said: Mapping[str, Any]) -> Quantization:
    scheme = Scheme(
        int(said.get("bits") or said.get("w_bit") or 4),
        group=_group(said.get("group_size", said.get("q_group_size", 128))),
        symmetric=not said.get("zero_point", True),
        zero_points=bool(said.get("zero_point", True)),
    )
    return Quantization("awq", scheme, _skipped_names(said), head=bool(said.get("lm_head")))


def _gptq(said: Mapping[str, Any]) -> Quantization:
    scheme = _gptq_scheme(said)
    groups: list[tuple[tuple[str, ...], Scheme | None]] = []
    ignored = list(_skipped_names(said))
    for pattern, values in (said.get("dynamic") or {}).items():
        bare = "re:" + re.sub(r"^[+-]:", "", pattern)
        # GPTQModel's patterns are searched from the start of a name that begins with `model.`.
        if pattern.startswith("-:"):
            ignored.append(bare)
        else:
            groups.append(((bare,), _gptq_scheme({**said, **(values or {})})))
    return Quantization(
        "gptq", scheme, tuple(ignored), tuple(groups), head=bool(said.get("lm_head"))
    )


def _gptq_scheme(said: Mapping[str, Any]) -> Scheme:
    return Scheme(
        int(said.get("bits", 4)),
        group=_group(said.get("group_size", 128)),
        symmetric=bool(said.get("sym", True)),
        # Even symmetric checkpoints have zero points, and not every kernel drops them.
        zero_points=True,
        activation_order=bool(said.get("desc_act", False)),
    )


def _group(found: Any) -> int:
    """Return the group size; -1 (one group for each output) becomes 0."""
    return max(0, int(found if found is not None else 0))


def _auto_round(said: Mapping[str, Any]) -> Quantization:
    kind = str(said.get("data_type", "int"))
    if kind != "int":
        known = {"mx_fp": {4: MXFP4, 8: MXFP8}, "nv_fp": {4: NVFP4}, "fp": {8: FP8_CHANNEL}}
        scheme = known.get(kind, {}).get(int(said.get("bits", 4)))
        if scheme is None:
            raise _unknown_error("auto-round", "data_type", kind)
    else:
        scheme = _gptq_scheme(said)
    groups = tuple(
        (
            (name,),
            None
            if int(values.get("bits", 16)) >= 16
            else _gptq_scheme({**said, **{k: v for k, v in values.items() if v is not None}}),
        )
        for name, values in (said.get("extra_config") or {}).items()
        if isinstance(values, Mapping)
    )
    ignored = list(_skipped_names(said))
    return Quantization("auto-round", scheme, tuple(ignored), groups)


def _compressed_tensors(said: Mapping[str, Any]) -> Quantization:
    sparsity = said.get("sparsity_config")
    if isinstance(sparsity, Mapping) and str(sparsity.get("format", "dense")) != "dense":
        raise _unknown_error("compressed-tensors", "sparsity_config.format", sparsity.get("format"))
    usual: Scheme | None = None
    groups: list[tuple[tuple[str, ...], Scheme | None]] = []
    whole = str(said.get("format", ""))
    for group in (said.get("config_groups") or {}).values():
        scheme = _compressed_scheme(group.get("weights"), str(group.get("format") or whole))
        targets = _as_words(group.get("targets") or ["Linear"])
        named = tuple(target for target in targets if not _is_class(target))
        if len(named) < len(targets):
            usual = scheme
        if named:
            groups.append((named, scheme))
    return Quantization(
        "compressed-tensors",
        usual,
        _skipped_names(said),
        tuple(groups),
        # The head is quantized only if a group names it. For all linear layers, `ignore` excludes
        # it.
        head=False,
    )


def _is_class(target: str) -> bool:
    return "." not in target and not target.startswith("re:") and target[:1].isupper()


def _compressed_scheme(weights: Mapping[str, Any] | None, form: str) -> Scheme | None:
    """Return the scheme of a group of compressed-tensors. `form` is the name of its format."""
    if not weights:
        return None
    bits = int(weights.get("num_bits", 8))
    strategy = str(weights.get("strategy") or ("group" if weights.get("group_size") else "tensor"))
    group = _group(weights.get("group_size"))
    if str(weights.get("type", "int")) == "float":
        if bits == 8:
            return _compressed_float8(weights, form, strategy, group)
        if bits == 4:
            return MXFP4 if form.startswith("mxfp4") or group == 32 else NVFP4
        raise _unknown_error("compressed-tensors", "num_bits", bits)
    actorder = str(weights.get("actorder") or "").lower()
    packed = form in {"pack-quantized", "marlin-24"} or bits < 8
    return Scheme(
        bits,
        group=-1 if strategy == "tensor" else group if strategy == "group" else 0,
        symmetric=bool(weights.get("symmetric", True)),
        zero_points=not weights.get("symmetric", True),
        scale_bytes=2 if packed else 4,
        activation_order=actorder == "group",
    )


def _compressed_float8(weights: Mapping[str, Any], form: str, strategy: str, group: int) -> Scheme:
    if form.startswith("mxfp8") or (strategy == "group" and group == 32):
        return MXFP8
    if block := weights.get("block_structure"):
        numbers = [int(n) for n in re.findall(r"\d+", block)] if isinstance(block, str) else block
        return Scheme(8, "fp8", block=(int(numbers[0]), int(numbers[1])), scale_bytes=4)
    return FP8 if strategy == "tensor" else FP8_CHANNEL


_MODELOPT = {
    "FP8": FP8,
    "FP8_PER_CHANNEL_PER_TOKEN": FP8_CHANNEL,
    "FP8_PB_WO": Scheme(8, "fp8", block=(128, 128), scale_bytes=4),
    "FP8_BLOCK": Scheme(8, "fp8", block=(128, 128), scale_bytes=4),
    "NVFP4": NVFP4,
    "W4A16_NVFP4": NVFP4,
    "NVFP4_AWQ": NVFP4,
    "W4A8_NVFP4_FP8": NVFP4,
    "MXFP8": MXFP8,
    "MXFP4": MXFP4,
    "W4A8_MXFP4_FP8": MXFP4,
    "W4A16_MXFP4": MXFP4,
    "INT4_AWQ": Scheme(4, group=128),
    "W4A16": Scheme(4, group=128),
    "W4A16_AWQ": Scheme(4, group=128),
    "W8A16": INT8_CHANNEL,
    "INT8_SQ": INT8_CHANNEL,
}
"""ModelOpt's algorithms; source: QUANT_ALGOS in vLLM's modelopt.py and ModelOpt's own list."""


def _modelopt(said: Mapping[str, Any]) -> Quantization:
    inner = {**said, **inner_config(said)}
    algorithm = str(inner.get("quant_algo") or "").upper()
    ignored = _skipped_names(inner)
    layers = inner.get("quantized_layers")
    if algorithm == "MIXED_PRECISION" or (isinstance(layers, Mapping) and layers):
        if not isinstance(layers, Mapping) or not layers:
            raise FleetError(
                "the quantization has `quant_algo` MIXED_PRECISION, but no `quantized_layers` "
                "with the format of each layer: use the publisher's original "
                "hf_quant_config.json"
            )
        named: dict[Scheme, list[str]] = {}
        for name, values in layers.items():
            named.setdefault(_modelopt_scheme(values), []).append(str(name))
        groups = tuple((tuple(names), scheme) for scheme, names in named.items())
        return Quantization("modelopt", None, ignored, groups)
    return Quantization("modelopt", _modelopt_scheme(inner), ignored, head=True)


def _modelopt_scheme(said: Mapping[str, Any]) -> Scheme:
    algorithm = str(said.get("quant_algo") or "").upper()
    scheme = _MODELOPT.get(algorithm)
    if scheme is None:
        raise _unknown_error("modelopt", "quant_algo", said.get("quant_algo"))
    return scheme


def _bitsandbytes(said: Mapping[str, Any]) -> Quantization:
    eight = bool(said.get("load_in_8bit") or said.get("_load_in_8bit"))
    return Quantization(
        "bitsandbytes", INT8_CHANNEL if eight else NF4, _as_words(said.get("llm_int8_skip_modules"))
    )


def _mxfp4(said: Mapping[str, Any]) -> Quantization:
    return Quantization("mxfp4", MXFP4, _skipped_names(said), experts_only=True)


def _mxfp8(said: Mapping[str, Any]) -> Quantization:
    return Quantization("mxfp8", MXFP8, _skipped_names(said))


def _quark(said: Mapping[str, Any]) -> Quantization:
    usual = _quark_scheme(said.get("global_quant_config") or {})
    groups = tuple(
        ((str(name),), _quark_scheme(values))
        for name, values in (said.get("layer_quant_config") or {}).items()
    )
    return Quantization("quark", usual, _skipped_names(said), groups)


def _quark_scheme(said: Mapping[str, Any]) -> Scheme | None:
    weight = said.get("weight")
    if not weight:
        return None
    if isinstance(weight, Sequence):
        weight = weight[-1]
    kind, shape = str(weight.get("dtype")), str(weight.get("qscheme"))
    if kind in {"fp4", "mxfp4"}:
        return MXFP4
    if kind.startswith("fp8"):
        return FP8 if shape == "per_tensor" else FP8_CHANNEL
    if kind == "int8":
        return INT8_CHANNEL
    if kind in {"int4", "uint4"}:
        return Scheme(
            4,
            group=_group(weight.get("group_size")),
            symmetric=kind == "int4",
            zero_points=kind == "uint4",
        )
    raise _unknown_error("quark", "weight.dtype", kind)


def _torchao(said: Mapping[str, Any]) -> Quantization:
    kind = said.get("quant_type")
    if isinstance(kind, Mapping):
        kind = kind.get("default", kind)
    name = str(kind.get("_type", "")) if isinstance(kind, Mapping) else str(kind)
    data = kind.get("_data", {}) if isinstance(kind, Mapping) else {}
    lowered = name.lower()
    if lowered.startswith("int4"):
        found = re.search(r"-(\d+)$", lowered)
        group = int(found.group(1)) if found else int(data.get("group_size", 128))
        # Scale and zero point have two bytes each, so they are counted as a scale of four bytes.
        return Quantization("torchao", Scheme(4, group=group, scale_bytes=4), _skipped_names(said))
    if lowered.startswith("int8dynamicactivationint4"):
        group = int(data.get("group_size", 32))
        return Quantization("torchao", Scheme(8, group=group), _skipped_names(said))
    if lowered.startswith("int8"):
        return Quantization("torchao", INT8_CHANNEL, _skipped_names(said))
    if lowered.startswith("float8"):
        return Quantization("torchao", FP8_CHANNEL, _skipped_names(said))
    raise _unknown_error("torchao", "quant_type", name)


def _hqq(said: Mapping[str, Any]) -> Quantization:
    inner = (said.get("quant_config") or {}).get("weight_quant_params") or {}
    scheme = Scheme(
        int(inner.get("nbits", 4)), group=_group(inner.get("group_size", 64)), scale_bytes=4
    )
    return Quantization("hqq", scheme, _as_words(said.get("skip_modules")))


def _unknown_error(method: str, key: str, value: Any) -> FleetError:
    return FleetError(
        f"the quantization {method} has `{key}` {value!r}. gpufleet does not know this value, and "
        "cannot estimate the size of the weights: use a different kind of checkpoint, or read the "
        "size that vLLM reports at its start"
    )


READERS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "fp8": _fp8,
    "fbgemm_fp8": _fbgemm,
    "awq": _awq,
    "gptq": _gptq,
    "auto-round": _auto_round,
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "bitsandbytes": _bitsandbytes,
    "mxfp4": _mxfp4,
    "mxfp8": _mxfp8,
    "quark": _quark,
    "torchao": _torchao,
    "hqq": _hqq,
}
