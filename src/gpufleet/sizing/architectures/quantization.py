"""
How a checkpoint's weights are quantized, as vLLM reads it from the config.  Pure.

Source of what each method keeps after loading: create_weights and process_weights_after_loading of
the classes in vllm/model_executor/layers/quantization, 0.8.5 to 0.33.0.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import translate
from functools import cache, cached_property
from typing import Any

from gpufleet.errors import FleetError


@dataclass(frozen=True)
class Scheme:
    """How one group of weights is kept."""

    bits: int
    """Of one weight: 4 or 8."""
    kind: str = "int"
    """int, fp8, nvfp4, mxfp4, mxfp8, nf4"""
    group: int = 0
    """Inputs that share a scale: 128; 0: one scale for each output; -1: one for the weight."""
    block: tuple[int, int] | None = None
    """Outputs and inputs that share a scale: (128, 128)."""
    symmetric: bool = True
    """Whether zero points are not used."""
    zero_points: bool = False
    """Kept beside the scales, used or not: of as many bits as a weight."""
    scale_bytes: int = 2
    activation_order: bool = False
    """GPTQ's desc_act: an index for each input is kept."""


FP8 = Scheme(8, "fp8", group=-1, scale_bytes=4)
FP8_CHANNEL = Scheme(8, "fp8", group=0, scale_bytes=4)
NVFP4 = Scheme(4, "nvfp4", group=16, scale_bytes=1)
MXFP4 = Scheme(4, "mxfp4", group=32, scale_bytes=1)
MXFP8 = Scheme(8, "mxfp8", group=32, scale_bytes=1)
INT8_CHANNEL = Scheme(8, "int", group=0, scale_bytes=4)
NF4 = Scheme(4, "nf4", group=64, scale_bytes=4)


@dataclass(frozen=True)
class Quantization:
    """What `quantization_config` says, by vLLM's name of the method."""

    method: str
    """fp8, awq, gptq, compressed-tensors, mxfp4, modelopt, bitsandbytes, ..."""
    scheme: Scheme | None = None
    """Of every linear weight that nothing else names; None: left as it is."""
    ignored: tuple[str, ...] = ()
    """Names or patterns of what is not quantized, as the config has them."""
    groups: tuple[tuple[tuple[str, ...], Scheme | None], ...] = ()
    """(names or patterns, scheme) of weights that the config names, in its order."""
    head: bool = False
    """The language model's head is quantized like a linear layer."""
    experts_only: bool = False
    """Only routed experts are quantized."""
    online: bool = False
    """Quantized by vLLM when it loads a checkpoint that is not."""

    @property
    def bits(self) -> int | None:
        """Return the bits of a weight under the usual scheme."""
        return self._usual.bits if self._usual else None

    @property
    def group(self) -> int:
        """Return the inputs that share a scale; 0: not by groups."""
        return max(0, self._usual.group) if self._usual else 0

    @property
    def block(self) -> tuple[int, int] | None:
        """Return the block that shares a scale, or None."""
        return self._usual.block if self._usual else None

    @property
    def kinds(self) -> frozenset[str]:
        """Return every kind of number that weights are kept in: fp8, nvfp4, mxfp4, int, ..."""
        schemes = (self.scheme, *(scheme for _, scheme in self.groups))
        return frozenset(scheme.kind for scheme in schemes if scheme)

    @property
    def _usual(self) -> Scheme | None:
        return self.scheme or next((scheme for _, scheme in self.groups if scheme), None)

    def scheme_of(self, name: str, *, head: bool = False, expert: bool = False) -> Scheme | None:
        """
        Return how the weight of this checkpoint name is kept, or None: as it is.

        `head`: it is the language model's head; `expert`: it is of routed experts, whose own number
        the name does not have.
        """
        if self.experts_only and not expert:
            return None
        names = _names(name, expert=expert)
        if self._ignored.matches(names):
            return None
        for targets, scheme in self._groups:
            if targets.matches(names):
                return scheme
        return self.scheme if self.head or not head else None

    @cached_property
    def _ignored(self) -> _Patterns:
        return _Patterns(self.ignored)

    @cached_property
    def _groups(self) -> tuple[tuple[_Patterns, Scheme | None], ...]:
        return tuple((_Patterns(targets), scheme) for targets, scheme in self.groups)


_ROOTS = ("", "model.", "language_model.model.", "model.language_model.")
_BEFORE_LAYERS = re.compile(r"^(?:(?:model|language_model|transformer|text_model|llm|backbone)\.)+")
_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)(?![\d])")


class _Patterns:
    """
    Names, wildcards and `re:` expressions, asked for many names.

    Checkpoints name the same weight from different roots (`model.`, `language_model.model.`), so
    roots do not count. A plain name stands for all that is below it.
    """

    def __init__(self, patterns: Iterable[str]) -> None:
        self.plain: set[str] = set()
        self.parts: set[str] = set()
        self.of_layer: dict[str, list[re.Pattern[str]]] = {}
        self.anywhere: list[re.Pattern[str]] = []
        for pattern in patterns:
            if pattern.startswith("re:"):
                compiled = re.compile(pattern.removeprefix("re:"))
                self.anywhere.append(compiled)
            elif "*" in pattern or "?" in pattern:
                rooted = _unrooted(pattern)
                compiled = re.compile(translate(rooted)[:-2] + r"(?:\..*)?\Z")
                if (found := _NUMBER.search(rooted)) and rooted[found.end() - 1 :][:1] != "*":
                    self.of_layer.setdefault(found.group(1), []).append(compiled)
                else:
                    self.anywhere.append(compiled)
            else:
                plain = _unrooted(pattern.rstrip("."))
                (self.plain if _NUMBER.search(plain) else self.parts).add(f".{plain}.")

    def matches(self, names: Sequence[str]) -> bool:
        """Return whether one of the names of a weight is meant."""
        return any(self._match(name) for name in names)

    def _match(self, name: str) -> bool:
        dotted = f".{name}."
        if self.plain and _NUMBER.search(name):
            end = dotted.find(".", 1)
            while end > 0:
                if dotted[: end + 1] in self.plain:
                    return True
                end = dotted.find(".", end + 1)
        if any(part in dotted for part in self.parts):
            return True
        if self.of_layer and (number := _NUMBER.search(name)):
            for pattern in self.of_layer.get(number.group(1), ()):
                if pattern.match(name):
                    return True
        return any(pattern.match(root + name) for pattern in self.anywhere for root in _ROOTS)


def _unrooted(name: str) -> str:
    return _BEFORE_LAYERS.sub("", name)


def _names(name: str, *, expert: bool) -> tuple[str, ...]:
    """Return what the config may call this weight; experts by the first one's number too."""
    plain = _unrooted(name)
    if not expert:
        return (plain,)
    if ".experts." in plain:
        return (plain, plain.replace(".experts.", ".experts.0.", 1))
    return (plain,)


def quantization(
    config: Mapping[str, Any], hf_quant_config: Mapping[str, Any] | None = None
) -> Quantization | None:
    """
    Return how the checkpoint is quantized, or None.

    `config` is the parsed config.json, `hf_quant_config` the parsed file of that name, which older
    ModelOpt checkpoints have. Raises `FleetError` naming a method that is not known.
    """
    said = _said(config) or hf_quant_config
    if not said:
        return None
    method = _method(said)
    reader = _READERS.get(method)
    if reader is None:
        raise FleetError(
            f"the quantization {method!r} (`quantization_config` in config.json) is not known; its "
            f"size is not guessed: known are {', '.join(sorted(_READERS))}"
        )
    if method == "modelopt" and "quantized_layers" not in said and hf_quant_config:
        said = {**said, **_inner(hf_quant_config)}
    try:
        found = reader(said)
        found = _with_experts(found, config, said) if method == "fp8" else found
        _check(found)
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, re.error) as error:
        raise FleetError(
            f"the quantization {method} has a value of another kind than is expected there "
            f"({error}); take config.json as the model's publisher has it"
        ) from error
    return found


def _check(found: Quantization) -> None:
    """Raises `ValueError` for a scheme of no size, `re.error` for a pattern that is none."""
    found.scheme_of("", expert=True)  # compiles the patterns, which are kept
    for scheme in (found.scheme, *(scheme for _, scheme in found.groups)):
        if scheme is not None and (scheme.bits < 1 or min(scheme.block or (1, 1)) < 1):
            raise ValueError(f"{scheme.bits} bits in blocks of {scheme.block}")


def _with_experts(
    found: Quantization, config: Mapping[str, Any], said: Mapping[str, Any]
) -> Quantization:
    """
    Return fp8 with the routed experts as some families keep them, of four bits.

    Source: _configure_ling_fp8_quant_config in bailing_moe_v3.py for Ling 3.
    """
    if said.get("routed_experts_quant_method") == "mxfp4":
        own = (("re:.*mlp\\.experts\\..*",), MXFP4)
        return replace(found, groups=(own, *found.groups))
    return _deepseek_v4(found, config, said)


def _deepseek_v4(
    found: Quantization, config: Mapping[str, Any], said: Mapping[str, Any]
) -> Quantization:
    """
    Return DeepSeek V4's quantization: fp8, and routed experts of four bits.

    `expert_dtype` says whether they are, without it they are; a scale is then one byte. Source:
    DeepseekV4FP8Config in vllm/models/deepseek_v4/quant_config.py.
    """
    if not str(config.get("model_type", "")).startswith("deepseek_v4"):
        return found
    if str(said.get("moe_quant_algo", "")).upper() == "NVFP4":
        experts = NVFP4
    elif config.get("expert_dtype", "fp4") == "fp4":
        experts = MXFP4
    else:
        return found
    linear = replace(found.scheme, scale_bytes=1) if found.scheme else None
    own = (("re:.*ffn\\.experts\\..*",), experts)
    return replace(found, scheme=linear, ignored=(), groups=(own,))


@cache
def online(method: str, vllm: tuple[int, ...]) -> Quantization | None:
    """
    Return what `--quantization METHOD` does to a checkpoint that is not quantized.

    None: this release does not quantize by that name when it loads. Source: the table of
    shorthands in vllm/config/quantization.py of 0.33.0, Fp8Config and BitsAndBytesConfig before.
    """
    scheme, since, until = _ONLINE.get(method, (None, (0,), (0,)))
    if scheme is None or not since <= vllm[:2] < until:
        return None
    return Quantization(
        method,
        scheme,
        experts_only=method in {"experts_int8", "nvfp4_per_token", "int8_per_channel_weight_only"},
        online=True,
        ignored=("lm_head",),
    )


_EVER = (1 << 30,)
_ONLINE: dict[str, tuple[Scheme | None, tuple[int, ...], tuple[int, ...]]] = {
    "fp8": (FP8, (0, 0), (0, 31)),
    "ptpc_fp8": (FP8_CHANNEL, (0, 7), (0, 19)),
    "fp8_per_tensor": (FP8, (0, 20), _EVER),
    "fp8_per_block": (Scheme(8, "fp8", block=(128, 128), scale_bytes=4), (0, 20), _EVER),
    "fp8_per_channel": (FP8_CHANNEL, (0, 24), _EVER),
    "mxfp8": (MXFP8, (0, 19), _EVER),
    "mxfp4": (MXFP4, (0, 28), _EVER),
    "int8_per_channel_weight_only": (INT8_CHANNEL, (0, 20), _EVER),
    "nvfp4_per_token": (NVFP4, (0, 26), _EVER),
    "experts_int8": (INT8_CHANNEL, (0, 0), _EVER),
    "bitsandbytes": (NF4, (0, 0), (0, 28)),
}


def _said(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Return `quantization_config`, of the whole model or of its text part."""
    for part in (config, *(config.get(key) for key in ("text_config", "llm_config"))):
        if not isinstance(part, Mapping):
            continue
        for key in ("quantization_config", "compression_config"):
            if isinstance(found := part.get(key), Mapping) and found:
                return found
    return None


def _method(said: Mapping[str, Any]) -> str:
    inner = _inner(said)
    algorithm = str(inner.get("quant_algo") or "")
    producer = said.get("producer")
    by_modelopt = isinstance(producer, Mapping) and producer.get("name") == "modelopt"
    stated = str(said.get("quant_method") or "").lower()
    if (by_modelopt or algorithm) and stated in {"", "modelopt"}:
        return "modelopt"
    return canonical(stated) or "(no quant_method)"


_SAME = {
    "auto_awq": "awq",
    "awq_marlin": "awq",
    "awq_triton": "awq",
    "auto_gptq": "gptq",
    "gptq_marlin": "gptq",
    "intel/auto-round": "auto-round",
    "inc": "auto-round",
    "modelopt_fp4": "modelopt",
    "modelopt_mixed": "modelopt",
    "modelopt_mxfp8": "modelopt",
    "gpt_oss_mxfp4": "mxfp4",
}


def canonical(method: str) -> str:
    """Return a method's name here; vLLM has several for one, by kernel and by release."""
    return _SAME.get(method.lower(), method.lower())


def _inner(said: Mapping[str, Any]) -> Mapping[str, Any]:
    found = said.get("quantization")
    return found if isinstance(found, Mapping) else said


def _words(found: Any) -> tuple[str, ...]:
    if isinstance(found, str):
        return (found,)
    return tuple(map(str, found)) if isinstance(found, Iterable) else ()


def _skipped(said: Mapping[str, Any]) -> tuple[str, ...]:
    keys = ("modules_to_not_convert", "ignored_layers", "ignore", "exclude", "exclude_modules")
    return tuple(name for key in keys for name in _words(said.get(key)))


def _fp8(said: Mapping[str, Any]) -> Quantization:
    block = said.get("weight_block_size")
    if str(said.get("activation_scheme", "")) == "ptpc":
        scheme = FP8_CHANNEL
    elif block:
        scheme = Scheme(8, "fp8", block=(int(block[0]), int(block[1])), scale_bytes=4)
    else:
        scheme = FP8
    return Quantization("fp8", scheme, _skipped(said))


def _fbgemm(said: Mapping[str, Any]) -> Quantization:
    return Quantization("fbgemm_fp8", FP8_CHANNEL, _skipped(said))


def _awq(said: Mapping[str, Any]) -> Quantization:
    scheme = Scheme(
        int(said.get("bits") or said.get("w_bit") or 4),
        group=_group(said.get("group_size", said.get("q_group_size", 128))),
        symmetric=not said.get("zero_point", True),
        zero_points=bool(said.get("zero_point", True)),
    )
    return Quantization("awq", scheme, _skipped(said), head=bool(said.get("lm_head")))


def _gptq(said: Mapping[str, Any]) -> Quantization:
    scheme = _gptq_scheme(said)
    groups: list[tuple[tuple[str, ...], Scheme | None]] = []
    ignored = list(_skipped(said))
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
        # Checkpoints have them even where they are symmetric, and not every kernel drops them.
        zero_points=True,
        activation_order=bool(said.get("desc_act", False)),
    )


def _group(found: Any) -> int:
    """-1 is one group for each output, which is 0 here."""
    return max(0, int(found if found is not None else 0))


def _auto_round(said: Mapping[str, Any]) -> Quantization:
    kind = str(said.get("data_type", "int"))
    if kind != "int":
        known = {"mx_fp": {4: MXFP4, 8: MXFP8}, "nv_fp": {4: NVFP4}, "fp": {8: FP8_CHANNEL}}
        scheme = known.get(kind, {}).get(int(said.get("bits", 4)))
        if scheme is None:
            raise _unknown("auto-round", "data_type", kind)
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
    ignored = list(_skipped(said))
    return Quantization("auto-round", scheme, tuple(ignored), groups)


def _compressed_tensors(said: Mapping[str, Any]) -> Quantization:
    sparsity = said.get("sparsity_config")
    if isinstance(sparsity, Mapping) and str(sparsity.get("format", "dense")) != "dense":
        raise _unknown("compressed-tensors", "sparsity_config.format", sparsity.get("format"))
    usual: Scheme | None = None
    groups: list[tuple[tuple[str, ...], Scheme | None]] = []
    whole = str(said.get("format", ""))
    for group in (said.get("config_groups") or {}).values():
        scheme = _compressed(group.get("weights"), str(group.get("format") or whole))
        targets = _words(group.get("targets") or ["Linear"])
        named = tuple(target for target in targets if not _is_class(target))
        if len(named) < len(targets):
            usual = scheme
        if named:
            groups.append((named, scheme))
    return Quantization(
        "compressed-tensors",
        usual,
        _skipped(said),
        tuple(groups),
        # Only a group that names it reaches the head; one for all linear layers says `ignore`.
        head=False,
    )


def _is_class(target: str) -> bool:
    return "." not in target and not target.startswith("re:") and target[:1].isupper()


def _compressed(weights: Mapping[str, Any] | None, form: str) -> Scheme | None:
    if not weights:
        return None
    bits = int(weights.get("num_bits", 8))
    strategy = str(weights.get("strategy") or ("group" if weights.get("group_size") else "tensor"))
    group = _group(weights.get("group_size"))
    if str(weights.get("type", "int")) == "float":
        if bits == 8 and (form.startswith("mxfp8") or (strategy == "group" and group == 32)):
            return MXFP8
        if bits == 8:
            if block := weights.get("block_structure"):
                numbers = (
                    [int(n) for n in re.findall(r"\d+", block)] if isinstance(block, str) else block
                )
                return Scheme(8, "fp8", block=(int(numbers[0]), int(numbers[1])), scale_bytes=4)
            return FP8 if strategy == "tensor" else FP8_CHANNEL
        if bits == 4 and (form.startswith("mxfp4") or group == 32):
            return MXFP4
        if bits == 4:
            return NVFP4
        raise _unknown("compressed-tensors", "num_bits", bits)
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
    inner = {**said, **_inner(said)}
    algorithm = str(inner.get("quant_algo") or "").upper()
    ignored = _skipped(inner)
    layers = inner.get("quantized_layers")
    if algorithm == "MIXED_PRECISION" or (isinstance(layers, Mapping) and layers):
        if not isinstance(layers, Mapping) or not layers:
            raise FleetError(
                "the quantization has `quant_algo` MIXED_PRECISION, no `quantized_layers`, which "
                "says how each layer is kept; take hf_quant_config.json as the publisher has it"
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
        raise _unknown("modelopt", "quant_algo", said.get("quant_algo"))
    return scheme


def _bitsandbytes(said: Mapping[str, Any]) -> Quantization:
    eight = bool(said.get("load_in_8bit") or said.get("_load_in_8bit"))
    return Quantization(
        "bitsandbytes", INT8_CHANNEL if eight else NF4, _words(said.get("llm_int8_skip_modules"))
    )


def _mxfp4(said: Mapping[str, Any]) -> Quantization:
    return Quantization("mxfp4", MXFP4, _skipped(said), experts_only=True)


def _mxfp8(said: Mapping[str, Any]) -> Quantization:
    return Quantization("mxfp8", MXFP8, _skipped(said))


def _quark(said: Mapping[str, Any]) -> Quantization:
    usual = _quark_scheme(said.get("global_quant_config") or {})
    groups = tuple(
        ((str(name),), _quark_scheme(values))
        for name, values in (said.get("layer_quant_config") or {}).items()
    )
    return Quantization("quark", usual, _skipped(said), groups)


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
    raise _unknown("quark", "weight.dtype", kind)


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
        # Scale and zero point, two bytes each: a scale of four.
        return Quantization("torchao", Scheme(4, group=group, scale_bytes=4), _skipped(said))
    if lowered.startswith("int8dynamicactivationint4"):
        group = int(data.get("group_size", 32))
        return Quantization("torchao", Scheme(8, group=group), _skipped(said))
    if lowered.startswith("int8"):
        return Quantization("torchao", INT8_CHANNEL, _skipped(said))
    if lowered.startswith("float8"):
        return Quantization("torchao", FP8_CHANNEL, _skipped(said))
    raise _unknown("torchao", "quant_type", name)


def _hqq(said: Mapping[str, Any]) -> Quantization:
    inner = (said.get("quant_config") or {}).get("weight_quant_params") or {}
    scheme = Scheme(
        int(inner.get("nbits", 4)), group=_group(inner.get("group_size", 64)), scale_bytes=4
    )
    return Quantization("hqq", scheme, _words(said.get("skip_modules")))


def _unknown(method: str, key: str, value: Any) -> FleetError:
    return FleetError(
        f"the quantization {method} has `{key}` {value!r}, which is not known; its size is not "
        "guessed: take a checkpoint of another kind, or read what vLLM reports at start"
    )


_READERS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
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
