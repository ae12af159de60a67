"""Describe how weights are stored: `Scheme` for a group, `Quantization` for a checkpoint. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import translate
from functools import cached_property


@dataclass(frozen=True)
class Scheme:
    """How the weights of one group are stored."""

    bits: int
    """Bits of one weight: 4 or 8."""
    kind: str = "int"
    """Number format: int, fp8, nvfp4, mxfp4, mxfp8, nf4."""
    group: int = 0
    """
    Number of inputs that share a scale, such as 128. 0 means one scale for each output. -1 means
    one scale for the whole weight.
    """
    block: tuple[int, int] | None = None
    """Numbers of outputs and inputs that share a scale, such as (128, 128)."""
    symmetric: bool = True
    """Whether the scheme uses no zero points."""
    zero_points: bool = False
    """
    Whether zero points are stored with the scales, even if they are not used. A zero point has as
    many bits as a number of the weight.
    """
    scale_bytes: int = 2
    activation_order: bool = False
    """Whether an index is stored for each input (GPTQ's desc_act)."""


FP8 = Scheme(8, "fp8", group=-1, scale_bytes=4)
FP8_CHANNEL = Scheme(8, "fp8", group=0, scale_bytes=4)
NVFP4 = Scheme(4, "nvfp4", group=16, scale_bytes=1)
MXFP4 = Scheme(4, "mxfp4", group=32, scale_bytes=1)
MXFP8 = Scheme(8, "mxfp8", group=32, scale_bytes=1)
INT8_CHANNEL = Scheme(8, "int", group=0, scale_bytes=4)
NF4 = Scheme(4, "nf4", group=64, scale_bytes=4)


@dataclass(frozen=True)
class Quantization:
    """The contents of `quantization_config`, with vLLM's name of the method."""

    method: str
    """fp8, awq, gptq, compressed-tensors, mxfp4, modelopt, bitsandbytes, ..."""
    scheme: Scheme | None = None
    """
    Scheme of the linear weights that no entry of `groups` names; None if they are not quantized.
    """
    ignored: tuple[str, ...] = ()
    """Names or patterns of weights that are not quantized, in the config's form."""
    groups: tuple[tuple[tuple[str, ...], Scheme | None], ...] = ()
    """(names or patterns, scheme) of weights that the config names, in the order of the config."""
    head: bool = False
    """Whether the language model's head is quantized like other linear layers."""
    experts_only: bool = False
    """Whether only routed experts are quantized."""
    online: bool = False
    """
    Whether the checkpoint is not quantized, and vLLM quantizes the weights while it loads them.
    """

    @property
    def bits(self) -> int | None:
        """Return the bits of a number in the usual scheme, or None if nothing is quantized."""
        return self._usual.bits if self._usual else None

    @property
    def group(self) -> int:
        """Return the number of inputs that share a scale; 0 without groups."""
        return max(0, self._usual.group) if self._usual else 0

    @property
    def block(self) -> tuple[int, int] | None:
        """Return the block of weights that shares a scale, or None."""
        return self._usual.block if self._usual else None

    @property
    def kinds(self) -> frozenset[str]:
        """Return all number formats that the weights have: fp8, nvfp4, mxfp4, int, ..."""
        schemes = (self.scheme, *(scheme for _, scheme in self.groups))
        return frozenset(scheme.kind for scheme in schemes if scheme)

    @property
    def _usual(self) -> Scheme | None:
        return self.scheme or next((scheme for _, scheme in self.groups if scheme), None)

    def scheme_of(self, name: str, *, head: bool = False, expert: bool = False) -> Scheme | None:
        """
        Return the scheme of the weight with this checkpoint name, or None if it is not quantized.

        Set `head` for the language model's head. Set `expert` for routed experts, whose name must
        not contain the number of the expert.
        """
        if self.experts_only and not expert:
            return None
        names = _possible_names(name, expert=expert)
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
    Names, wildcards and `re:` expressions, prepared to be compared with many names.

    The names of a weight in different checkpoints begin with different roots (`model.`,
    `language_model.model.`), so roots are ignored. A plain name also matches all names below it.
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
                rooted = _strip_root(pattern)
                compiled = re.compile(translate(rooted)[:-2] + r"(?:\..*)?\Z")
                if (found := _NUMBER.search(rooted)) and rooted[found.end() - 1 :][:1] != "*":
                    self.of_layer.setdefault(found.group(1), []).append(compiled)
                else:
                    self.anywhere.append(compiled)
            else:
                plain = _strip_root(pattern.rstrip("."))
                (self.plain if _NUMBER.search(plain) else self.parts).add(f".{plain}.")

    def matches(self, names: Sequence[str]) -> bool:
        """Return whether a pattern matches one of a weight's names."""
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


def _strip_root(name: str) -> str:
    return _BEFORE_LAYERS.sub("", name)


def _possible_names(name: str, *, expert: bool) -> tuple[str, ...]:
    """
    Return the names that the config may use for this weight.

    The name of an expert may also contain the number 0.
    """
    plain = _strip_root(name)
    if not expert:
        return (plain,)
    if ".experts." in plain:
        return (plain, plain.replace(".experts.", ".experts.0.", 1))
    return (plain,)
